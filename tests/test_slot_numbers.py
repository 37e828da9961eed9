"""Numbering rows by a map, against the sort and against numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jslices as js
from jslices._coalesce import sum_duplicates
from jslices._slot_numbers import number_slots_in_any_order

K, V = 520, 3000
by_map = jax.jit(
    functools.partial(number_slots_in_any_order, num_rows=V, capacity=K, row_bytes=64)
)


def draw(seed, distinct, empty):
    rng = np.random.default_rng(seed)
    ids = rng.choice(rng.integers(0, V, distinct), K)
    return np.where(rng.random(K) < empty, V, ids).astype(np.int32)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 2 * K), st.sampled_from((0.0, 0.3, 1.0)))
def test_each_row_has_one_slot_in_the_order_of_appearance(seed, distinct, empty):
    ids = draw(seed, distinct, empty)
    unique, slots, count = map(np.asarray, by_map(ids))
    present = list(dict.fromkeys(ids[ids < V].tolist()))
    assert count == len(present)
    assert unique.tolist() == present + [V] * (K - len(present))
    want = [present.index(i) if i < V else K for i in ids.tolist()]
    assert slots.tolist() == want


def test_a_cpu_does_not_sort_and_others_do():
    ids = jax.ShapeDtypeStruct((K,), jnp.int32)
    traced = by_map.trace(ids)
    for platform, sorts in (("cpu", False), ("cuda", True), ("tpu", True)):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert ("stablehlo.sort" in text) == sorts


@pytest.mark.parametrize(
    "num_ids, num_rows, row_bytes",
    ((K, 33 * K, 1000), (K, 17 * K, 64), (100, 100, 1000)),
    ids=("many rows", "short rows", "few ids"),
)
def test_a_map_that_would_not_pay_is_not_made(num_ids, num_rows, row_bytes):
    number = functools.partial(
        number_slots_in_any_order, num_rows=num_rows, capacity=K, row_bytes=row_bytes
    )
    ids = jax.ShapeDtypeStruct((num_ids,), jnp.int32)
    text = jax.jit(number).trace(ids).lower(lowering_platforms=("cpu",)).as_text()
    assert "stablehlo.sort" in text


def test_sums_are_those_of_the_sort_to_the_bit():
    ids = jnp.asarray(draw(3, 200, 0.1))
    values = jax.random.normal(jax.random.key(0), (K, 16))
    a, rows_a = sum_duplicates(values, ids, V, None)
    b, rows_b = sum_duplicates(values, ids, V, None, ordered=False)
    order = np.argsort(np.asarray(rows_b), kind="stable")
    np.testing.assert_array_equal(rows_a, rows_b[order])
    np.testing.assert_array_equal(a, b[order])


def test_under_vmap_and_with_64_bit_indices():
    batch = jnp.stack([jnp.asarray(draw(s, 300, 0.2)) for s in (1, 2)])
    together = jax.vmap(by_map)(batch)
    for n, ids in enumerate(batch):
        for got, want in zip(together, by_map(ids), strict=True):
            np.testing.assert_array_equal(got[n], want)
    with jax.enable_x64(True):
        wide = by_map(jnp.asarray(np.asarray(batch[0]), jnp.int64))
        assert wide[0].dtype == jnp.int64
        np.testing.assert_array_equal(wide[0], together[0][0])


def test_coalesce_still_sorts():
    slices = js.IndexedSlices(jnp.ones((K, 16)), jnp.asarray(draw(5, 300, 0.1)), (V, 16))
    indices = np.asarray(jax.jit(lambda s: s.coalesce())(slices).indices)
    assert (np.diff(indices) >= 0).all()
