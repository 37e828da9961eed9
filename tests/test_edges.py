"""Row numbers at the edges of their dtype and of the table, as JAX's programs take them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close
from jax import lax

import jslices as js

V, D = 300, 3
TABLE = np.random.default_rng(0).normal(size=(V, D)).astype(np.float32)
ROWS = lax.GatherDimensionNumbers((1,), (0,), (0,))
WRITES = lax.ScatterDimensionNumbers((1,), (0,), (0,))


def gathered(table, ids, mode):
    rows = lax.gather(table, ids[:, None], ROWS, (1, table.shape[1]), mode=mode)
    return jnp.nan_to_num(rows, nan=7.0)


def windows(table, starts):
    """Slices, as the primitive takes starts of any integer dtype."""
    zero = jnp.zeros((), starts.dtype)
    slices = lax.dynamic_slice_p.bind

    def of_layer(i):
        layer = slices(table.reshape(V, D, 1), i, zero, zero, slice_sizes=(1, D, 1))
        return layer[0][jnp.array([0, 2])]

    for i in starts:
        yield slices(table, i, zero, slice_sizes=(1, D))
        yield slices(table, zero, i, slice_sizes=(1, 2))
        yield slices(table, i, i, slice_sizes=(2, D))
        yield of_layer(i)
    yield lax.scan(lambda carry, i: (carry, of_layer(i)), 0, starts)[1]


def replaced(table, ids, mode):
    row = jnp.full((1, D), 5.0, table.dtype)
    written = lax.scatter(table, ids[:1, None], row, WRITES, mode=mode)
    return written[jnp.array([0, V - 1, 1, 99])]


def reads(table, ids, starts, indexed):
    """What every form of reading gives, by its name."""
    tables = {
        "itself": table,
        "a view": table * 2.0,
        "below others": jnp.pad(table, ((2, 1), (0, 0))),
        "reversed": table[::-1],
        "of two axes": table.reshape(100, 3, D).reshape(V, D),
    }
    for name, of in tables.items():
        for mode in ("clip", "fill", "promise_in_bounds"):
            yield f"{name}, {mode}", gathered(of, ids, mode)
        if indexed:
            yield f"{name}, indexed", of[ids]
    if indexed:
        yield "take", jnp.nan_to_num(jnp.take(table, ids, axis=0), nan=7.0)
        yield "one-hot", jax.nn.one_hot(ids, V) @ table
    yield from ((f"window {n}", x) for n, x in enumerate(windows(table, starts)))
    for mode in ("clip", "drop"):
        yield f"replaced, {mode}", replaced(table, ids, mode)


def edges(dtype):
    """The ends of a dtype and of the table, and what 32 bits of it would be."""
    ends = np.iinfo(dtype)
    numbers = {0, 1, 250, V - 1, V, -1, -V, -V - 1, ends.min, ends.max, 2**31 + 1}
    numbers |= {2**32 + 1, -(2**32), 2**63 + 5}
    return np.array(sorted(x for x in numbers if ends.min <= x <= ends.max), dtype)


def with_gradients(value_and_grad, table, *args):
    """Every form of reading, and the gradient of a sum with a weight for each."""

    def loss(table):
        found = dict(reads(table, *args))
        total = sum((jnp.sin(x) * (n + 1)).sum() for n, x in enumerate(found.values()))
        return total, found

    (_, found), grad = value_and_grad(loss, has_aux=True)(table)
    return found, grad


DTYPES = "int8 uint8 int16 uint16 int32 uint32 int64 uint64".split()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_reads_are_those_of_jax(dtype):
    with jax.enable_x64(dtype.endswith("64")):
        ids, table = edges(dtype), jnp.asarray(TABLE)
        # JAX's own scatters write to other rows, or none, where the indices are narrow
        # (jax 0.10.2, not 0.12): the dense gradient of table[jnp.uint8(250)] is zero.
        near = jnp.asarray(np.clip(ids.astype(object), 0, V).astype(np.int32))
        ids = jnp.asarray(ids)
        same = ids.astype(jnp.int32) if ids.dtype.itemsize < 4 else ids
        indexed = ids.dtype.itemsize > 1  # or jnp refuses so tall a table
        want, want_grad = with_gradients(jax.value_and_grad, table, same, near, indexed)
        got, grad = with_gradients(js.value_and_grad, table, ids, ids, indexed)
        for name, x in got.items():
            np.testing.assert_array_equal(x, want[name], err_msg=name)
        assert js.is_slices(grad)
        np.testing.assert_allclose(grad.to_dense(), want_grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("number", [np.uint8(254), np.uint32(2**31 + 5), np.int8(-2)])
def test_constant_numbers_of_columns(number):
    loss = lambda t: lax.dynamic_index_in_dim(t[-1:], jnp.asarray(number), 1).sum()  # noqa: E731
    found = jax.jit(js.value_and_grad(loss))(TABLE)
    assert js.is_slices(found[1])
    assert_close(found, jax.jit(jax.value_and_grad(loss))(TABLE))


@pytest.mark.parametrize("shape", [(6, 3), (2, 3, 3)])
@pytest.mark.parametrize("mode", [None, "promise_in_bounds", "fill", "drop", "clip"])
def test_second_derivatives(mode, shape):
    """Those of JAX, but where a row is read against a promise, as plain indexing makes it.

    There JAX's first derivative leaves the row out, and its second one counts it. Ours is
    the derivative of the first.
    """
    ids, w = jnp.array([0, 5, 6, -7, 3]), jnp.array([[1.0, 2.0, 0.5]])

    def rows(table):
        table = table.reshape(6, 3)
        return table[ids] if mode is None else table.at[ids].get(mode=mode, fill_value=0.5)

    def as_promised(table):
        near = table.reshape(6, 3).at[ids].get(mode="clip")
        good = jnp.array([True, True, False, False, True])[:, None]
        return jnp.where(good, near, lax.stop_gradient(near))

    def second(grad, rows):
        def size(table, w):
            loss = lambda t, w: jnp.sin((rows(t) * w).sum())  # noqa: E731
            by_table, by_w = grad(loss, (0, 1))(table, w)
            first = by_table.to_dense() if js.is_slices(by_table) else by_table
            return (jnp.sin(first).reshape(6, 3) * TABLE[10:16]).sum() + (by_w**2).sum()

        return jax.jit(jax.grad(size, (0, 1)))(TABLE[:6].reshape(shape), w)

    promised = mode in (None, "promise_in_bounds")
    wanted = second(jax.grad, as_promised if promised else rows)
    assert_close(second(js.grad, rows), wanted, 1e-4, 1e-5)
