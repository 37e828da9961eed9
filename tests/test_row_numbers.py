"""Sums of rows in no order, as norms and optimizers take them, against sorted ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import examples
from hypothesis import given
from hypothesis import strategies as st

import jslices as js

K, V = 520, 30_000  # too many rows for a pass over the table
HEAVY_BALL = js.sgd(1.0, momentum=0.9)  # the first update is the gradient, negative


def draw(seed, distinct, empty):
    rng = np.random.default_rng(seed)
    ids = rng.choice(rng.integers(0, V, distinct), K)
    return np.where(rng.random(K) < empty, V, ids).astype(np.int32)


@jax.jit
def both_ways(values, ids):
    grad = js.IndexedSlices(values, ids, (V, values.shape[1]))
    table = jnp.zeros(grad.dense_shape)
    update, _ = HEAVY_BALL.update(grad, HEAVY_BALL.init(table), table)
    return grad.coalesce(), update


@examples(30)
@given(
    seed=st.integers(0, 2**31),
    distinct=st.integers(1, 2 * K),
    empty=st.sampled_from((0.0, 0.3, 1.0)),
)
def test_sums_have_the_bits_of_sorted_ones(seed, distinct, empty):
    ids = draw(seed, distinct, empty)
    values = np.random.default_rng(seed).normal(size=(K, 3)).astype(np.float32)
    by_row, update = jax.device_get(both_ways(values, ids))
    order = np.argsort(update.indices, kind="stable")
    assert len(order) == K
    np.testing.assert_array_equal(update.indices[order], by_row.indices)
    np.testing.assert_array_equal(-update.values[order], by_row.values)
    assert len(set(ids.tolist()) - {V}) == (by_row.indices < V).sum()


@pytest.mark.parametrize("way", (js.global_norm, lambda slices: slices.coalesce()))
def test_a_cpu_sorts_only_what_must_be_sorted(way):
    values = jax.ShapeDtypeStruct((K, 16), jnp.float32)
    ids = jax.ShapeDtypeStruct((K,), jnp.int32)
    traced = jax.jit(lambda x, i: way(js.IndexedSlices(x, i, (V, 16)))).trace(values, ids)
    for platform in ("cpu", "cuda", "tpu"):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert ("stablehlo.sort" in text) == (platform != "cpu" or way != js.global_norm)


def norm(ids, num_rows=V):
    """The norm of ones: of how often each row is named."""
    return js.global_norm(js.IndexedSlices(jnp.ones((K, 1)), ids, (num_rows, 1)))


@pytest.mark.parametrize("stride", (1, 1 << 12, 1 << 20, 2654435769 % 4093))
def test_ids_that_are_evenly_spaced(stride):
    for times in (1, 2, K):  # that each row is named
        ids = jnp.arange(K) // times * stride
        np.testing.assert_allclose(norm(ids, 2**31 - 1), np.sqrt(K * times), rtol=1e-6)


def test_many_ids_of_a_table_that_is_not_tall():
    ids = jnp.concatenate([jnp.asarray(draw(seed, 300, 0.1)) for seed in range(10)])
    slices = js.IndexedSlices(jnp.ones((len(ids), 1)), ids, (V, 1))
    counts = np.bincount(ids[ids < V])
    wanted = np.sqrt((counts**2.0).sum())
    np.testing.assert_allclose(js.global_norm(slices), wanted, rtol=1e-6)
    tall = js.IndexedSlices(slices.values, jnp.where(ids < V, ids, 10 * V), (10 * V, 1))
    np.testing.assert_allclose(js.global_norm(tall), wanted, rtol=1e-6)


def test_under_vmap():
    batch = jnp.stack([draw(seed, 300, 0.2) for seed in (1, 2)])
    for ids, got in zip(np.asarray(batch), jax.vmap(norm)(batch), strict=True):
        counts = np.bincount(ids[ids < V])
        np.testing.assert_allclose(got, np.sqrt((counts**2.0).sum()), rtol=1e-6)


def test_64_bit_ids_that_differ_in_their_high_half_only():
    with jax.enable_x64(True):
        ids = jnp.arange(K, dtype=jnp.int64) % (K // 2) << 32
        np.testing.assert_allclose(norm(ids, 2**50), np.sqrt(2 * K), rtol=1e-6)
