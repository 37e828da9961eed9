"""Norms and clipping of each example's gradient, against dense gradients [B, V, D]."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from draws import examples
from helpers import assert_close, dense, fast_jit, numpy_array
from hypothesis import given
from hypothesis import strategies as st

import jslices as js

V, D, B, K = 6, 2, 3, 4


def loss(params, ids):
    rows = params["table"][ids]
    return ((rows @ params["w"]) ** 2).sum() + params["bias"][ids].sum()


def make_params():
    rng = np.random.default_rng(0)
    return {
        "table": rng.normal(size=(V, D)).astype(np.float32),
        "w": rng.normal(size=D).astype(np.float32),
        "bias": np.zeros(V, np.float32),
    }


def per_example(grad):
    return jax.vmap(grad(loss), in_axes=(None, 0))


def ours_of(grads, limit):
    return js.per_example_norms(grads), js.per_example_global_norm_clip(grads, limit)


def optax_of(grads, limit):
    return jax.vmap(optax.tree.norm)(grads), optax.per_example_global_norm_clip(
        grads, limit
    )


@fast_jit
def of_a_batch(params, batch, limit):
    grads, wanted = (
        per_example(js.grad)(params, batch),
        per_example(jax.grad)(params, batch),
    )
    assert grads["table"].values.shape == (B, K, D)
    return ours_of(grads, limit), optax_of(wanted, limit)


@fast_jit
def of_slices(grads, limit):
    return ours_of(grads, limit), optax_of(grads.to_dense(), limit)


many_ids = st.lists(st.integers(0, V - 1), min_size=B * K, max_size=B * K)


@examples(20)
@given(many_ids, st.sampled_from([0.0, 1.0, 3.0, 1e6]))
def test_equal_the_dense_formulation(ids, limit):
    ours, theirs = of_a_batch(make_params(), np.array(ids).reshape(B, K), limit)
    np.testing.assert_allclose(ours[0], theirs[0], 1e-5)
    total, count = ours[1]
    wanted_total, wanted_count = theirs[1]
    assert js.is_slices(total["table"]) and js.is_slices(total["bias"])
    assert total["table"].indices.shape == (min(B * K, V),)
    assert_close(total, wanted_total, 1e-5, 1e-5)
    assert count == wanted_count and count.dtype == jnp.int32


@examples(15)
@given(st.lists(st.integers(-2, V + 2), min_size=B * K, max_size=B * K))
def test_empty_entries_do_not_count(ids):
    indices = np.array(ids, np.int32).reshape(B, K)
    values = np.random.default_rng(1).normal(size=(B, K, D)).astype(np.float32)
    values[(indices < 0) | (indices >= V)] = np.nan
    grads = js.IndexedSlices.tree_unflatten((V, D), (values, indices))
    ours, theirs = of_slices(grads, 1.0)
    np.testing.assert_allclose(ours[0], theirs[0], 1e-5, 1e-6)
    assert_close(ours[1][0], theirs[1][0])


def test_a_dp_sgd_step():
    params, batch = make_params(), np.array([[0, 0, 1, 5], [2, 2, 2, 2], [0, 1, 1, 3]])
    tx = js.sgd(1.0)

    @fast_jit
    def step(params, batch):
        grads = per_example(js.grad)(params, batch)
        total, _ = js.per_example_global_norm_clip(grads, 0.5)
        mean = jax.tree.map(lambda g: g / B, total, is_leaf=js.is_slices)
        return tx.apply(mean, tx.init(params), params)[0]

    moved = jax.tree.map(
        lambda new, old: np.asarray(new) - old, step(params, batch), params
    )
    length = np.sqrt(sum((x**2).sum() for x in moved.values()))
    assert length <= 0.5 * (1 + 1e-5)  # one example can move them by 0.5 / B
    assert not moved["table"][4].any()


def test_16_bit_floats_and_bad_examples():
    values = np.array([[[150], [150]], [[1], [2]]], np.float16)
    indices = np.array([[3, 3], [1, 9]], np.int32)
    grads = js.IndexedSlices.tree_unflatten((5, 1), (values, indices))
    out, (total, count) = fast_jit(ours_of)((grads, None), 3.0)
    np.testing.assert_array_equal(out, [300, 1])
    assert out.dtype == jnp.float32
    assert total[0].dtype == jnp.float16 and count == 1
    np.testing.assert_allclose(numpy_array(total[0]).ravel(), [0, 1, 0, 3, 0])
    values = values.copy()
    values[0, 0] = np.inf
    bad = js.IndexedSlices.tree_unflatten((5, 1), (values, indices))
    clip = fast_jit(js.per_example_global_norm_clip)
    total, _ = clip({"t": bad, "b": np.ones((2, 1), np.float32)}, 3.0)
    # Its whole example is NaN, the rows of others are not.
    wanted = [0, 1, 0, np.nan, 0]
    np.testing.assert_allclose(numpy_array(total["t"]).ravel(), wanted)
    assert np.isnan(total["b"]).all()
    # Optax goes on with the other numbers of that example, times 0 or 1.
    clips = js.per_example_global_norm_clip, optax.per_example_global_norm_clip
    both = fast_jit(lambda x: [clip([x], 3.0)[0] for clip in clips])
    for norm, number in ((np.inf, 0), (np.nan, 1)):
        (ours,), (theirs,) = both(np.array([[norm, 1]], np.float32))
        assert np.asarray(theirs)[1] == number and np.isnan(ours).all()


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
