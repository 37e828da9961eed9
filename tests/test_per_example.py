"""Norms and clipping of each example's gradient, against dense gradients [B, V, D]."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, dense, fast_jit
from hypothesis import given, settings
from hypothesis import strategies as st

import jslices as js

V, D, B, K = 6, 2, 3, 4


def loss(params, ids):
    rows = params["table"][ids]
    return ((rows @ params["w"]) ** 2).sum() + params["bias"][ids].sum()


def make_params():
    rng = np.random.default_rng(0)
    return {
        "table": jnp.asarray(rng.normal(size=(V, D)), jnp.float32),
        "w": jnp.asarray(rng.normal(size=D), jnp.float32),
        "bias": jnp.zeros(V),
    }


def per_example(grad):
    return fast_jit(jax.vmap(grad(loss), in_axes=(None, 0)))


rows_of, dense_of = per_example(js.grad), per_example(jax.grad)
norms = fast_jit(js.per_example_norms)
clip = fast_jit(js.per_example_global_norm_clip)
dense_norms = fast_jit(jax.vmap(optax.tree.norm))
dense_clip = fast_jit(optax.per_example_global_norm_clip)
to_dense = fast_jit(js.IndexedSlices.to_dense)
many_ids = st.lists(st.integers(0, V - 1), min_size=B * K, max_size=B * K)


@settings(max_examples=20)
@given(many_ids, st.sampled_from([0.0, 1.0, 3.0, 1e6]))
def test_equal_the_dense_formulation(ids, limit):
    params, batch = make_params(), jnp.array(ids).reshape(B, K)
    grads, wanted = rows_of(params, batch), dense_of(params, batch)
    assert grads["table"].values.shape == (B, K, D)
    np.testing.assert_allclose(norms(grads), dense_norms(wanted), 1e-5)
    total, count = clip(grads, limit)
    wanted_total, wanted_count = dense_clip(wanted, limit)
    assert js.is_slices(total["table"]) and js.is_slices(total["bias"])
    assert total["table"].indices.shape == (min(B * K, V),)
    assert_close(total, wanted_total, 1e-5, 1e-5)
    assert count == wanted_count and count.dtype == jnp.int32


@settings(max_examples=15)
@given(st.lists(st.integers(-2, V + 2), min_size=B * K, max_size=B * K))
def test_empty_entries_do_not_count(ids):
    indices = np.array(ids, np.int32).reshape(B, K)
    values = np.random.default_rng(1).normal(size=(B, K, D)).astype(np.float32)
    values[(indices < 0) | (indices >= V)] = np.nan
    grads = js.IndexedSlices.tree_unflatten((V, D), (values, indices))
    wanted = to_dense(grads)
    np.testing.assert_allclose(norms(grads), dense_norms(wanted), 1e-5, 1e-6)
    assert_close(clip(grads, 1.0)[0], dense_clip(wanted, 1.0)[0])


def test_a_dp_sgd_step():
    params, batch = make_params(), jnp.array([[0, 0, 1, 5], [2, 2, 2, 2], [0, 1, 1, 3]])
    grads, _ = clip(rows_of(params, batch), 0.5)
    tx = js.sgd(1.0)

    @fast_jit
    def step(params, grads):
        mean = jax.tree.map(lambda g: g / B, grads, is_leaf=js.is_slices)
        return tx.apply(mean, tx.init(params), params)[0]

    moved = step(params, grads)
    length = optax.tree.norm(jax.tree.map(jnp.subtract, moved, params))
    assert length <= 0.5 * (1 + 1e-5)  # one example can move them by 0.5 / B
    np.testing.assert_array_equal(moved["table"][4], params["table"][4])


def test_16_bit_floats_and_bad_examples():
    values = jnp.array([[[150], [150]], [[1], [2]]], jnp.float16)
    indices = jnp.array([[3, 3], [1, 9]])
    grads = js.IndexedSlices.tree_unflatten((5, 1), (values, indices))
    out = norms((grads, None))
    np.testing.assert_array_equal(out, [300, 1])
    assert out.dtype == jnp.float32
    total, count = clip(grads, 3.0)
    assert total.dtype == jnp.float16 and count == 1
    np.testing.assert_allclose(total.to_dense().ravel(), [0, 1, 0, 3, 0])
    bad = js.IndexedSlices.tree_unflatten((5, 1), (values.at[0, 0].set(jnp.inf), indices))
    total, _ = clip({"t": bad, "b": jnp.ones((2, 1))}, 3.0)
    # Its whole example is NaN, the rows of others are not.
    wanted = [0, 1, 0, np.nan, 0]
    np.testing.assert_allclose(total["t"].to_dense().ravel(), wanted)
    assert np.isnan(total["b"]).all()
    # Optax goes on with the other numbers of that example, times 0 or 1.
    for norm, number in ((jnp.inf, 0), (jnp.nan, 1)):
        theirs, _ = dense_clip([jnp.array([[norm, 1.0]])], 3.0)
        assert theirs[0][1] == number
        ours, _ = clip([jnp.array([[norm, 1.0]])], 3.0)
        assert np.isnan(ours[0]).all()


def test_no_dense_gradient_per_example():
    rows = 77_777
    params = {
        "table": jax.ShapeDtypeStruct((rows, D), jnp.float32),
        "w": jax.ShapeDtypeStruct((D,), jnp.float32),
        "bias": jax.ShapeDtypeStruct((rows,), jnp.float32),
    }

    def clipped(params, batch):
        grads = jax.vmap(js.grad(loss), in_axes=(None, 0))(params, batch)
        return js.per_example_global_norm_clip(grads, 1.0)

    batch = jax.ShapeDtypeStruct((B, K), jnp.int32)
    compiled = fast_jit(clipped).lower(params, batch).compile()
    assert f"[{B},{rows}" not in compiled.as_text()
    assert compiled.memory_analysis().temp_size_in_bytes < 30_000
    out = jax.eval_shape(clipped, params, batch)[0]
    assert dense({"w": out["w"]})["w"].shape == (D,)
    assert out["table"].values.shape == (B * K, D)


def test_errors():
    rows = js.IndexedSlices(jnp.ones((2, 2)), jnp.array([3, 1]), (9, 2))
    batch = jax.tree.map(lambda x: jnp.stack([x, x]), rows)
    for bad in (rows, [], jnp.float32(1), (batch, jnp.ones((3, 1)))):
        with pytest.raises(ValueError, match=r"per_example_norms wants .*values \[B, K"):
            js.per_example_norms(bad)
    with pytest.raises(ValueError, match="wanted a number of at least 0"):
        js.per_example_global_norm_clip(batch, -1.0)
