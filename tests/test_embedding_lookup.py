"""embedding_lookup: one meaning for every bad id, and errors that say what to do."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import fast_jit, lists, numpy_dense
from hypothesis import given
from hypothesis import strategies as st

import jslices as js


@functools.cache
def compiled(mode):
    def run(table, ids):
        look = lambda t: js.embedding_lookup(t, ids, mode=mode)  # noqa: E731
        return look(table), js.grad(lambda t: jnp.nansum(look(t)))(table)

    return fast_jit(run)


@given(
    num_rows=st.sampled_from([1, 6]),
    row=st.sampled_from([(), (2, 3)]),
    ids=lists(st.integers(-8, 8), (0, 6)),
    mode=st.sampled_from(["fill", "clip"]),
)
def test_reads_rows_and_never_wraps(num_rows, row, ids, mode):
    size = num_rows * int(np.prod(row))
    table = np.arange(size, dtype=np.float32).reshape(num_rows, *row)
    got, grad = compiled(mode)(table, np.array(ids, np.int32))
    for value, i in zip(got, ids, strict=True):
        if mode == "clip":
            wanted = table[min(max(i, 0), num_rows - 1)]
        else:
            wanted = table[i] if 0 <= i < num_rows else np.full(row, np.nan)
        np.testing.assert_array_equal(value, wanted)
    assert js.is_slices(grad) and grad.indices.shape == (len(ids),)
    good = [min(max(i, 0), num_rows - 1) if mode == "clip" else i for i in ids]
    wanted = np.zeros_like(table)
    for i in good:
        if 0 <= i < num_rows:
            wanted[i] += 1
    dense = numpy_dense(np.asarray(grad.values), np.asarray(grad.indices), grad.shape)
    np.testing.assert_array_equal(dense, wanted)


@pytest.mark.parametrize(
    "shape, dtype",
    [
        *((shape, "int32") for shape in [(), (2,), (0,), (2, 1, 2)]),
        *(((2,), dtype) for dtype in ["int8", "uint8", "int16", "uint32"]),
    ],
)
def test_ids_of_any_rank_and_type(dtype, shape):
    table = jnp.arange(10.0).reshape(5, 2)
    ids = jnp.full(shape, 3, dtype)
    assert js.embedding_lookup(table, ids).shape == (*shape, 2)
    np.testing.assert_array_equal(js.embedding_lookup(table, ids), table[ids])


def test_plain_lists_and_integer_tables():
    table = jnp.arange(6).reshape(3, 2)
    np.testing.assert_array_equal(js.embedding_lookup(table, [2, 0]), [[4, 5], [0, 1]])
    assert js.embedding_lookup(table, []).shape == (0, 2)
    assert js.embedding_lookup(table, [7])[0, 0] == np.iinfo(np.int32).min
    assert np.isnan(js.embedding_lookup(jnp.zeros((0, 2)), [0])).all()


@pytest.mark.parametrize(
    "args, error, text",
    [
        ((jnp.float32(1), 0), ValueError, "got a scalar"),
        ((jnp.ones((2, 2)), 1.5), TypeError, r"integer ids, got float32\[\]"),
    ],
)
def test_errors(args, error, text):
    with pytest.raises(error, match=text):
        js.embedding_lookup(*args)


def test_unknown_mode():
    with pytest.raises(ValueError, match=r"mode='wrap'\): wanted .fill"):
        js.embedding_lookup(jnp.ones((2, 2)), 0, mode="wrap")


def test_ids_of_64_bits_are_not_cut():
    """JAX's gather takes the lower 32 bits of them (0.10.2, 0.12)."""
    with jax.enable_x64(True):
        table, ids = jnp.ones((6, 2)), jnp.array([2**32 + 1, -(2**32), 2**63 - 1, 5])
        rows = fast_jit(js.embedding_lookup)(table, ids)
        np.testing.assert_array_equal(jnp.isnan(rows[:, 0]), [True, True, True, False])
        grad = js.grad(lambda table: js.embedding_lookup(table, ids)[3].sum())(table)
        np.testing.assert_array_equal(np.nonzero(grad.to_dense()[:, 0])[0], [5])
