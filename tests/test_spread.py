"""spread_ids: a permutation that evens out the load of any number of devices."""

import functools

import jax
import numpy as np
import pytest
from draws import examples
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jslices as js

MOST = 2**31 - 1
spread_ids = jax.jit(js.spread_ids, static_argnames=("num_rows", "shards", "inverse"))


@pytest.fixture
def wide():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("shards", [1, 2, 3, 7, 8, 4096])
def test_every_row_has_one_id(shards):
    ids = np.arange(-5, 75)
    for num_rows in [*range(10), 17, 31, 32, 33, 64, 70]:
        rows = np.asarray(js.spread_ids(ids, num_rows, shards))
        known = (ids >= 0) & (ids < num_rows)
        np.testing.assert_array_equal(np.sort(rows[known]), np.arange(num_rows))
        np.testing.assert_array_equal(rows[~known], ids[~known])
        back = js.spread_ids(rows, num_rows, shards, inverse=True)
        np.testing.assert_array_equal(back, ids)


def row_of(i, num_rows, shards):
    """The same of one id by counting, in integers of any size."""
    (before,) = np.nonzero(turned(shards) < turned(shards)[i % shards])
    longer = int((before < num_rows % shards).sum())
    return len(before) * (num_rows // shards) + longer + i // shards


@functools.cache
def turned(shards):
    """The numbers below ``shards`` with their bits in reverse order."""
    bits = max((shards - 1).bit_length(), 1)
    return np.array([int(f"{part:0{bits}b}"[::-1], 2) for part in range(shards)])


SIZES = st.integers(1, 2**20) | st.integers(MOST - 2**13, MOST)


@examples(30)
@given(num_rows=SIZES, shards=st.sampled_from([1, 3, 64, 1000, 4096]), data=st.data())
def test_no_size_is_too_large(num_rows, shards, data):
    last = num_rows - 1
    few = data.draw(st.lists(st.integers(0, last), min_size=4, max_size=4))
    ids = np.array([*few, 0, last, last // 2, MOST], np.int32)
    rows = np.asarray(js.spread_ids(ids, num_rows, shards))
    wanted = [row_of(int(i), num_rows, shards) if i < num_rows else i for i in ids]
    np.testing.assert_array_equal(rows, wanted)
    np.testing.assert_array_equal(js.spread_ids(rows, num_rows, shards, inverse=True), ids)


def test_tables_of_more_than_32_bits(wide):
    num_rows = 10**10 + 7
    ids = np.array([0, 1, 2**31, 2**33 + 5, num_rows - 1, num_rows, -1], np.int64)
    rows = spread_ids(ids, num_rows)
    assert rows.dtype == np.int64
    wanted = [row_of(int(i), num_rows, 4096) if 0 <= i < num_rows else i for i in ids]
    np.testing.assert_array_equal(rows, wanted)
    np.testing.assert_array_equal(spread_ids(rows, num_rows, inverse=True), ids)
    narrow = spread_ids(np.arange(3, dtype=np.int32), num_rows)
    assert narrow.dtype == np.int64


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint32", "int64", "uint64"])
def test_ids_of_any_integers(dtype):
    info = np.iinfo(dtype)
    ids = np.array([0, 1, 100, info.max, info.min], dtype)
    rows = np.asarray(js.spread_ids(ids, 101))
    assert rows.dtype == np.int32
    wanted = [row_of(i, 101, 4096) for i in (0, 1, 100)]
    np.testing.assert_array_equal(rows[:3], wanted)
    out = rows[3:][(ids[3:] > 100) | (ids[3:] < 0)]
    assert ((out > 100) | (out < 0)).all()


def test_transformed():
    ids = np.arange(24, dtype=np.int32).reshape(4, 6)
    spread = functools.partial(js.spread_ids, num_rows=23)
    wanted = spread(ids)
    assert wanted.shape == ids.shape
    np.testing.assert_array_equal(jax.jit(jax.vmap(spread))(ids), wanted)
    back = jax.jit(functools.partial(spread, inverse=True))
    np.testing.assert_array_equal(back(wanted), ids)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_split_ids_stay_split(kind):
    if jax.device_count() < 8:
        pytest.skip("needs eight devices")
    mesh = jax.make_mesh((8,), ("x",), axis_types=(getattr(AxisType, kind),))
    ids = jax.device_put(np.arange(64), NamedSharding(mesh, P("x")))
    with jax.set_mesh(mesh):
        for inverse in (False, True):
            spread = functools.partial(js.spread_ids, num_rows=64, inverse=inverse)
            rows = jax.jit(spread)(ids)
            assert rows.sharding.is_equivalent_to(ids.sharding, 1)
            np.testing.assert_array_equal(rows, jax.jit(spread)(np.arange(64)))


@pytest.mark.parametrize("devices", [8, 64, 4096])
def test_neighbours_are_on_different_devices(devices):
    rows = np.asarray(spread_ids(np.arange(4 * devices), 2**20))
    for some in rows.reshape(4, devices):
        assert len(set(some // (2**20 // devices))) == devices


@pytest.mark.parametrize("devices", [8, 48, 256])
def test_every_device_is_asked_for_about_as_many_rows(devices):
    """Ids by frequency, as vocabularies have them, are asked for by Zipf's law."""
    num_rows, each = js.padded_rows(10**6, devices), 4096
    weights = np.cumsum(np.arange(1.0, num_rows + 1) ** -1.05)
    chances = np.random.default_rng(0).random((8, each)) * weights[-1]
    ids = np.searchsorted(weights, chances)

    def fullest(rows):
        owners = [np.unique(x) // (num_rows // devices) for x in rows]
        return max(np.bincount(x, minlength=devices).max() * devices / each for x in owners)

    assert fullest(np.asarray(spread_ids(ids, num_rows))) < 2
    assert fullest(ids) > 3


@pytest.mark.parametrize(
    "args, error, text",
    [
        ((np.arange(3), -1), js.InvalidArgumentError, "num_rows=-1.*at least 0"),
        ((np.arange(3), 9, 0), js.InvalidArgumentError, "shards=0.*at least 1"),
        ((np.ones(3), 9), TypeError, "wants integer ids, got float32"),
        ((np.arange(3), 2**31), ValueError, "jax_enable_x64"),
        ((np.arange(3), 9.0), TypeError, "num_rows=9.0.*wanted an int"),
    ],
)
def test_bad_arguments(args, error, text):
    with pytest.raises(error, match=text):
        js.spread_ids(*args)
