"""The instructions added to gathers on a CPU: they change nothing, and stay in the loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import all_at_once, as_users, assert_close, fast_jit

import jslices as js
from jslices._rows.access import SCALAR, row_loop, take_rows

DTYPES = (jnp.float32, jnp.int32, jnp.uint32, jnp.float16, jnp.bfloat16, jnp.int16, bool)
IDS = np.array([2**31 - 1, -(2**31), -1, 0, 3, 3, 2, 1, 5, 12], np.int32)
TABLE = np.sin(np.arange(256, dtype=np.float32)).reshape(4, 64)


def patterns(dtype, num_rows, length):
    """Every kind of bits: NaNs of any payload, both zeros, denormals."""
    bits = np.random.default_rng(length).integers(0, 256, (num_rows, length, 4), np.uint8)
    if dtype is bool:
        return jnp.asarray(bits[..., 0] > 127)
    array = bits.view(np.uint32) if np.dtype(dtype).itemsize == 4 else bits[..., :2]
    return jnp.asarray(np.ascontiguousarray(array).view(dtype)[..., 0])


def same_bits(a, b):
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(
        np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8)
    )


@pytest.mark.as_users
@pytest.mark.parametrize("length", (31, 32, 64, 79, 80))
def test_rows_keep_every_bit(length):
    rows = {np.dtype(t).name: patterns(t, len(IDS), length) for t in DTYPES}
    found = as_users(lambda rows: {n: row_loop(x, IDS) for n, x in rows.items()})(rows)
    for name, wanted in rows.items():
        same_bits(found[name], wanted)
        if length == 64 and name != "bfloat16":  # which conftest.py has as float32
            same_bits(row_loop(wanted, IDS), wanted)


@pytest.mark.as_users
@pytest.mark.parametrize("shape", ((64,), (4, 16), (2, 4, 8)))
def test_rows_and_ids_of_any_rank(shape):
    rows = jnp.arange(6 * 64.0).reshape(2, 3, *shape)
    np.testing.assert_array_equal(
        jax.jit(row_loop)(rows, jnp.arange(6).reshape(2, 3)), rows
    )


@pytest.mark.as_users
def test_64_bit_rows_stay():
    with jax.enable_x64(True):
        rows = jnp.arange(128.0).reshape(2, 64)
        assert rows.dtype == jnp.float64
        np.testing.assert_array_equal(jax.jit(row_loop)(rows, jnp.array([7, 2**40])), rows)


def test_transformations_pass_through():
    ids = np.array([1, 0, 1], np.int32)

    def transformed(f):
        return {
            "grad": jax.grad(f),
            "hessian": jax.hessian(f),
            "jvp": lambda t: jax.jvp(f, (t,), (jnp.cos(t),)),
            "linearize": lambda t: jax.linearize(f, t)[1](t),
            "vmap": lambda t: jax.vmap(f)(jnp.stack([t, 2 * t])),
            "checkpoint": jax.checkpoint(jax.grad(f)),
        }

    ours, plain = (
        all_at_once(transformed(lambda t, read=read: jnp.sum(read(t, ids) ** 2)), TABLE[:2])
        for read in (take_rows, lambda t, ids: t[ids])
    )
    assert_close(ours, plain, rtol=1e-6)


def test_vmap_over_ids():
    ids = np.array([[1, 2], [3, 1]], np.int32)
    found = fast_jit(jax.vmap(take_rows, (None, 0)))(TABLE, ids)
    np.testing.assert_array_equal(found, TABLE[ids])


def test_gradients_inside_gradients_stay_slices():
    ids = np.array([3, 1])

    def inner(t, other):
        return jnp.sum(js.grad(lambda u: jnp.sum(jnp.sin(u[ids])))(t).values ** 2 * other)

    got = fast_jit(js.grad(inner))(TABLE, 2.0)
    assert js.is_slices(got)
    wanted = np.zeros_like(TABLE)
    wanted[ids] = -4 * np.cos(TABLE[ids]) * np.sin(TABLE[ids])
    assert_close(got, wanted)


def step_program(length, optimizer):
    table, ids = jax.ShapeDtypeStruct((20000, length), jnp.float32), np.arange(3000)
    tx = optimizer(0.1)

    def step(table, state, ids):
        _, grads = js.value_and_grad(lambda t: jnp.mean(jnp.square(t[ids])))(table)
        updates, state = tx.update(grads, state, table)
        return js.apply_updates(table, updates), state

    state = jax.eval_shape(tx.init, table)
    return as_users(step, donate_argnums=(0, 1)), (table, state, ids)


@pytest.mark.parametrize("length", (SCALAR.start, SCALAR.stop - 1))
def test_a_cpu_reads_rows_in_one_loop_with_the_instructions(length):
    # If XLA split them into a loop of their own, that would be one more pass.
    step, args = step_program(length, js.adam)
    computations = step.lower(*args).compile().as_text().split("\n\n")
    gathers = [c for c in computations if f",1,{length}]{{2,1,0}} gather(" in c]
    assert len(gathers) == 3, "the table and two moments"
    for computation in gathers:
        assert " xor(" in computation


def test_a_lookup_has_the_instructions_once():
    def count(lookup):
        grad = jax.make_jaxpr(js.grad(lambda t: jnp.sin(lookup(t)).sum()))
        return str(grad(jnp.zeros((20, 64)))).count("row_loop")

    ids = jnp.array([[3, 1]])
    lookups = [lambda t: t[ids], lambda t: js.embedding_lookup(t, ids)]
    lookups.append(lambda t: js.embedding_lookup_sparse(t, ids))
    assert {count(lookup) for lookup in lookups} == {1}


def test_other_platforms_are_given_no_instructions():
    step, args = step_program(64, js.adam)
    traced = step.trace(*args)
    for platform in ("cuda", "rocm", "tpu"):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert "stablehlo.xor" not in text and "stablehlo.gather" in text
