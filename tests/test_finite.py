"""all_finite sees what duplicates add up to; a loss scale that skips bad steps."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import examples
from helpers import as_users, assert_close, fast_jit
from hypothesis import given
from hypothesis import strategies as st

import jslices as js

V, K = 4, 6
finite = fast_jit(js.all_finite)


@examples(40)
@given(
    st.lists(st.integers(-1, V + 1), min_size=K, max_size=K),
    st.lists(
        st.sampled_from([1.0, 40_000.0, -40_000.0, np.inf, -np.inf, np.nan]),
        min_size=K,
        max_size=K,
    ),
)
def test_says_what_the_dense_gradient_says(ids, values):
    rows = np.array(values, np.float16)[:, None]
    slices = js.IndexedSlices(rows, np.array(ids, np.int32), (V, 1))
    dense = np.zeros(V, np.float32)
    with np.errstate(all="ignore"):
        for i, v in zip(ids, values, strict=True):
            if 0 <= i < V:
                dense[i] += v
        wanted = np.isfinite(dense.astype(np.float16)).all()
    assert finite({"a": slices, "b": None, "c": jnp.ones(2)}) == wanted


def test_overflow_in_the_sum_only():
    rows = jnp.full((2, 1), 60_000, jnp.float16)
    assert jnp.isfinite(rows).all()
    assert not js.all_finite(js.IndexedSlices(rows, jnp.array([1, 1]), (V, 1)))
    assert js.all_finite(js.IndexedSlices(rows, jnp.array([1, 2]), (V, 1)))
    assert not js.all_finite(js.IndexedSlices(rows, jnp.array([1, 1])))
    largest = jnp.full((2, 1), jnp.finfo(jnp.float32).max)
    assert not js.all_finite(js.IndexedSlices(largest, jnp.array([1, 1]), (V, 1)))


@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFC00000, 0xFF800001, 0x7FFFFFFF])
def test_a_nan_of_either_sign_passes_through_norms_clipping_and_maxima(bits):
    """An x86 gives NaN that it computes, inf - inf, a sign."""
    nan = np.array([bits], np.uint32).view(np.float32)[0]
    rows = js.IndexedSlices(jnp.array([[1.0, nan], [3.0, 4.0]]), jnp.array([1, 2]), (V, 2))

    @fast_jit
    def results(rows):
        narrow = jnp.zeros((V, 2), jnp.bfloat16)
        clipped = js.clip_by_global_norm({"a": rows}, 1.0)
        return (
            js.global_norm(rows),
            clipped[0]["a"].values,
            js.clip_by_norm(rows, 1.0).values,
            js.clip_by_average_norm(rows, 1.0).values,
            js.clip_by_value(rows, -1.0, 1.0).values,
            js.clip_rows_by_norm(rows, 1.0).values,
            js.optim.clip_by_block_rms(1.0).update(rows, ())[0].values,
            js.project_rows(rows.to_dense(), rows, 1.0),
            js.scatter_max(jnp.zeros((V, 2)), rows.indices, rows.values),
            js.scatter_min(jnp.zeros((V, 2)), rows.indices, rows.values),
            js.apply_updates(narrow, rows),
            js.apply_updates(narrow, rows, jax.random.key(0)),
        )

    assert not finite({"a": rows})
    assert all(np.isnan(np.asarray(x, np.float32)).any() for x in results(rows))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_nan_among_many_numbers_is_noticed(dtype):
    """XLA:CPU leaves it out of maxima of 4,096 numbers (jaxlib 0.10.2 to 0.12.0.1)."""
    rows = np.zeros((700, 8), dtype)
    rows[300, 3] = np.nan
    slices = js.IndexedSlices(rows, np.arange(700), (1000, 8))

    @as_users
    def noticed(rows, slices):
        largest = js.scatter_max(jnp.zeros((1, 8), dtype), jnp.zeros(700, int), rows)
        norms = js.global_norm(rows), js.global_norm(slices), largest[0, 3]
        return [js.all_finite(x) for x in (rows, slices, *norms)]

    assert not any(noticed(rows, slices))


def test_empty_entries_other_leaves_and_batches():
    bad = js.IndexedSlices(jnp.array([jnp.nan, jnp.inf]), jnp.array([-1, V]), (V,))
    assert js.all_finite(bad)
    assert js.all_finite([]) and js.all_finite([None, jnp.arange(3), 1.0])
    assert not js.all_finite((jnp.ones(2), jnp.array([1.0, jnp.inf])))
    batch = jax.tree.map(lambda x: jnp.stack([x, x]), bad)
    assert js.all_finite(batch) and js.all_finite(batch).shape == ()
    each = fast_jit(jax.vmap(js.all_finite))(
        js.IndexedSlices.tree_unflatten((V,), (batch.values, jnp.array([[0, 9], [9, 9]])))
    )
    np.testing.assert_array_equal(each, [False, True])


def loss(params, ids):
    rows = params["table"][ids].astype(jnp.float16)
    return (rows.sum(-1) * params["w"].astype(jnp.float16)).sum()


@functools.lru_cache
def scaled_step(tx, good_steps_before_growth=2):
    def take(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return js.apply_updates(params, updates), state

    @fast_jit
    def step(params, state, scale, good, ids):
        # The gradient of the scaled float16 loss, as it is in float16.
        scaled = lambda p: loss(p, ids).astype(jnp.float32) * scale  # noqa: E731
        grads = js.grad(scaled)(jax.tree.map(lambda p: p.astype(jnp.float16), params))
        ok = js.all_finite(grads)
        grads = jax.tree.map(
            lambda g: g.astype(jnp.float32) / scale, grads, is_leaf=js.is_slices
        )
        skip = lambda params, state, grads: (params, state)  # noqa: E731
        params, state = jax.lax.cond(ok, take, skip, params, state, grads)
        grow = ok & (good + 1 >= good_steps_before_growth)
        scale = jnp.where(ok, jnp.where(grow, scale * 2, scale), scale / 2)
        return params, state, scale, jnp.where(ok & ~grow, good + 1, 0), ok

    return step


@pytest.mark.parametrize("make", [js.adam, js.adagrad])
def test_dynamic_loss_scaling_skips_a_step(make):
    tx = make(0.1)
    step = scaled_step(tx)
    start = {"table": jnp.ones((V, 2)), "w": jnp.ones(())}
    copy = lambda tree: jax.tree.map(jnp.copy, tree)  # noqa: E731
    params, state = copy(start), tx.init(start)
    ids = jnp.array([1, 1, 2])
    # 2**15 is finite in float16, but row 1 gets it twice.
    scale, good = jnp.float32(2**15), jnp.int32(0)
    before = copy(state)
    params, state, scale, good, ok = step(params, state, scale, good, ids)
    assert not ok and scale == 2**14 and good == 0
    chex.assert_trees_all_equal((params, state), (start, before))
    # Now the steps are taken, and are those without any scale.
    wanted, wanted_state = start, tx.init(start)

    @fast_jit
    def plain(params, state):
        grads = js.grad(lambda p: (p["table"][ids].sum(-1) * p["w"]).sum())(params)
        return tx.apply(grads, state, params)

    for _ in range(2):
        if scale * 6 >= 65_504:  # w: six ones add up
            scale = scale / 8
        params, state, scale, good, ok = step(params, state, scale, good, ids)
        assert ok
        wanted, wanted_state = plain(wanted, wanted_state)
    assert scale == 2**12 and good == 0  # grown after two good steps
    # float16 keeps three digits.
    assert_close((params, state), (wanted, wanted_state), rtol=4e-3, atol=1e-3)


def test_the_step_that_may_be_skipped_is_in_place():
    rows, tx = 77_777, js.adam(0.1)
    params = {
        "table": jax.ShapeDtypeStruct((rows, 2), jnp.float16),
        "w": jax.ShapeDtypeStruct((), jnp.float16),
    }

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, ids):
        grads = js.grad(loss)(params, ids)

        def take(params, state, grads):
            updates, state = tx.update(grads, state, params)
            return js.apply_updates(params, updates), state

        skip = lambda params, state, grads: (params, state)  # noqa: E731
        return jax.lax.cond(js.all_finite(grads), take, skip, params, state, grads)

    ids = jax.ShapeDtypeStruct((3,), jnp.int32)
    lowered = step.lower(params, jax.eval_shape(tx.init, params), ids)
    compiled = lowered.compile({"xla_backend_optimization_level": 0})
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < 20_000
    assert memory.alias_size_in_bytes >= 3 * rows * 2 * 2
