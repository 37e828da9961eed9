"""Numbering rows by their first entries, against the sort and against NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jslices._rows.sums import number_by_first, sum_duplicates

K, V = 520, 3000


@functools.cache
def number(num_rows=V, packed=True):
    return jax.jit(lambda ids: number_by_first(ids, num_rows, ids.shape[0], packed))


def draw(seed, distinct, empty):
    rng = np.random.default_rng(seed)
    ids = rng.choice(rng.integers(0, V, distinct), K)
    return np.where(rng.random(K) < empty, V, ids).astype(np.int32)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    distinct=st.integers(1, 2 * K),
    empty=st.sampled_from((0.0, 0.3, 1.0)),
)
def test_each_row_is_numbered_by_its_first_entry(seed, distinct, empty):
    ids = draw(seed, distinct, empty)
    present = list(dict.fromkeys(ids[ids < V].tolist()))
    where = {i: ids.tolist().index(i) for i in present}
    unique, numbers, count = map(np.asarray, number()(ids))
    assert count == len(present)
    assert unique.tolist() == present + [V] * (K - len(present))
    assert numbers.tolist() == [present.index(i) if i < V else K for i in ids.tolist()]
    unique, numbers, count = map(np.asarray, number(packed=False)(ids))
    assert count == len(present)
    assert numbers.tolist() == [where.get(i, K) for i in ids.tolist()]
    firsts = set(where.values())
    assert unique.tolist() == [i if n in firsts else V for n, i in enumerate(ids)]


@pytest.mark.parametrize("order", ("sorted", "any"))
def test_a_cpu_sorts_only_rows_that_must_be_sorted(order):
    summed = jax.jit(lambda x, ids: sum_duplicates(x, ids, V, None, order=order))
    traced = summed.trace(
        jax.ShapeDtypeStruct((K, 16), jnp.float32), jax.ShapeDtypeStruct((K,), jnp.int32)
    )
    for platform in ("cpu", "cuda", "tpu"):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert ("stablehlo.sort" in text) == (platform != "cpu" or order == "sorted")


@pytest.mark.parametrize("stride", (1, 1 << 12, 1 << 20, 2654435769 % 4093))
def test_ids_that_are_evenly_spaced(stride):
    ids = jnp.arange(K) * stride
    unique, numbers, count = number(2**31 - 1)(ids)
    np.testing.assert_array_equal(unique, ids)
    np.testing.assert_array_equal(numbers, np.arange(K))
    assert count == K


def test_sums_have_the_bits_of_sorted_ones():
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


def test_under_vmap_and_with_64_bit_ids():
    batch = np.stack([draw(s, 300, 0.2) for s in (1, 2)])
    together = jax.jit(jax.vmap(number()))(batch)
    for n, ids in enumerate(batch):
        for got, want in zip(together, number()(ids), strict=True):
            np.testing.assert_array_equal(got[n], want)
    with jax.enable_x64(True):
        wide = number()(jnp.asarray(batch[0], jnp.int64))
        assert wide[0].dtype == jnp.int64
        np.testing.assert_array_equal(wide[0], together[0][0])


def test_64_bit_ids_that_differ_in_their_high_half_only():
    with jax.enable_x64(True):
        ids = jnp.arange(K, dtype=jnp.int64) % 300 << 32
        unique, numbers, count = number(2**50)(ids)
        assert count == 300
        np.testing.assert_array_equal(unique[:300], np.arange(300) << 32)
        np.testing.assert_array_equal(numbers, np.arange(K) % 300)
