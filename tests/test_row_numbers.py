"""Numbering rows by their first entries, against the sort and against numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jslices as js
from jslices._rows.sums import first_entries, number_by_first, sum_duplicates

K, V = 520, 3000
#: The rows of the table, of which ids name the first V: a map of all is too large for many.
ROWS = {"map": V, "hash": 1_000_000}


@functools.cache
def number(num_rows, row_bytes=64, packed=True):
    def run(ids):
        return number_by_first(ids, num_rows, ids.shape[0], row_bytes, packed)

    return jax.jit(run)


def draw(seed, distinct, empty, num_rows=V, count=K):
    rng = np.random.default_rng(seed)
    ids = rng.choice(rng.integers(0, V, distinct), count)
    return np.where(rng.random(count) < empty, num_rows, ids).astype(np.int32)


@pytest.mark.parametrize("way", ("map", "hash", "pairs"))
@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    distinct=st.integers(1, 2 * K),
    empty=st.sampled_from((0.0, 0.3, 1.0)),
)
def test_each_row_is_numbered_by_its_first_entry(way, seed, distinct, empty):
    rows, count = ROWS.get(way, V), 100 if way == "pairs" else K
    ids = draw(seed, distinct, empty, rows, count)
    present = list(dict.fromkeys(ids[ids < V].tolist()))
    where = {i: ids.tolist().index(i) for i in present}
    unique, slots, distinct = map(np.asarray, number(rows)(ids))
    assert distinct == len(present)
    assert unique.tolist() == present + [rows] * (count - len(present))
    assert slots.tolist() == [present.index(i) if i < V else count for i in ids.tolist()]
    unique, slots, distinct = map(np.asarray, number(rows, packed=False)(ids))
    assert distinct == len(present)
    assert slots.tolist() == [where.get(i, count) for i in ids.tolist()]
    firsts = set(where.values())
    assert unique.tolist() == [i if n in firsts else rows for n, i in enumerate(ids)]


@pytest.mark.parametrize("rows", sorted(ROWS.values()))
def test_a_cpu_does_not_sort_and_others_do(rows):
    summed = jax.jit(lambda x, ids: sum_duplicates(x, ids, rows, None, order="any"))
    traced = summed.trace(
        jax.ShapeDtypeStruct((K, 16), jnp.float32), jax.ShapeDtypeStruct((K,), jnp.int32)
    )
    for platform, sorts in (("cpu", False), ("cuda", True), ("tpu", True)):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert ("stablehlo.sort" in text) == sorts


@pytest.mark.parametrize(
    "num_ids, num_rows, row_bytes, writes",
    (
        (K, 32 * K, 1000, 32 * K),
        (K, 33 * K, 1000, 4096),  # many rows: 4 to 8 K places
        (K, 16 * K, 32, 16 * K),
        (K, 17 * K, 32, 2048),  # short rows: 2 to 4 K
        (256, 256, 1000, None),  # few ids
    ),
)
def test_the_map_is_as_large_as_pays(num_ids, num_rows, row_bytes, writes):
    ids = jax.ShapeDtypeStruct((num_ids,), jnp.int32)
    first = jax.jit(lambda ids: first_entries(ids, num_rows, row_bytes))
    text = first.trace(ids).lower(lowering_platforms=("cpu",)).as_text()
    assert ("stablehlo.scatter" in text) == (writes is not None)
    assert writes is None or f"-> tensor<{writes}xi32>" in text


@pytest.mark.parametrize("stride", (1, 1 << 12, 1 << 20, 2654435769 % 4093))
def test_hashed_ids_that_are_evenly_spaced(stride):
    ids = jnp.arange(K) * stride
    unique, slots, count = number(2**31 - 1)(ids)
    np.testing.assert_array_equal(unique, ids)
    np.testing.assert_array_equal(slots, np.arange(K))
    assert count == K


def test_sums_are_those_of_the_sort_to_the_bit():
    ids = jnp.asarray(draw(3, 200, 0.1))
    values = jax.random.normal(jax.random.key(0), (K, 16))
    orders = ("sorted", "packed", "any")
    every = jax.jit(lambda v, i: [sum_duplicates(v, i, V, None, order=o) for o in orders])
    (a, rows_a, count), *others = jax.device_get(every(values, ids))
    assert count == len(set(rows_a.tolist()) - {V})
    for b, rows_b, count_b in others:
        order = np.argsort(rows_b, kind="stable")
        assert count_b == count
        np.testing.assert_array_equal(rows_a, rows_b[order])
        np.testing.assert_array_equal(a, b[order])


@pytest.mark.parametrize("way", ("map", "hash"))
def test_under_vmap_and_with_64_bit_indices(way):
    rows = ROWS[way]
    batch = np.stack([draw(s, 300, 0.2, rows) for s in (1, 2)])
    together = jax.jit(jax.vmap(number(rows)))(batch)
    for n, ids in enumerate(batch):
        for got, want in zip(together, number(rows)(ids), strict=True):
            np.testing.assert_array_equal(got[n], want)
    with jax.enable_x64(True):
        wide = number(rows)(jnp.asarray(np.asarray(batch[0]), jnp.int64))
        assert wide[0].dtype == jnp.int64
        np.testing.assert_array_equal(wide[0], together[0][0])


def test_64_bit_ids_that_differ_in_their_high_half_only():
    with jax.enable_x64(True):
        ids = jnp.arange(K, dtype=jnp.int64) % 300 << 32
        unique, slots, count = number(2**50)(ids)
        assert count == 300
        np.testing.assert_array_equal(unique[:300], np.arange(300) << 32)
        np.testing.assert_array_equal(slots, np.arange(K) % 300)


def test_coalesce_still_sorts():
    slices = js.IndexedSlices(jnp.ones((K, 16)), jnp.asarray(draw(5, 300, 0.1)), (V, 16))
    indices = np.asarray(jax.jit(lambda s: s.coalesce())(slices).indices)
    assert (np.diff(indices) >= 0).all()
