"""Restoring a range of rows: only these are read, from whatever files hold them."""

import os
import pathlib
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import examples
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jslices as js
from jslices.checkpoint import DataLossError, NotFoundError
from jslices.checkpoint.tensors import CHUNK

V = 8


def sharding(*spec):
    devices = np.array(jax.devices()[:4]).reshape(4, 1)
    return NamedSharding(Mesh(devices, ("x", "y")), PartitionSpec(*spec))


def table(dtype=jnp.float32):
    return jnp.arange(V * 3).reshape(V, 3).astype(dtype)


@pytest.fixture(params=["one file", "four files", "a chain of deltas"], scope="module")
def path(request, tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("saved")
    saver = js.Saver(sharded=request.param == "four files")
    tree = {
        "table": jax.device_put(table(), sharding("x")),
        "half": jax.device_put(table(jnp.bfloat16), sharding("x")),
        "mu": {"table": table() + 100},
        "w": jnp.ones(2),
        "n": 7,
    }
    if request.param == "a chain of deltas":
        before = {**tree, "table": tree["table"].at[jnp.array([0, 3, 7])].set(-1)}
        saver.save(before, tmp_path / "m", 0)
        between = {**tree, "table": tree["table"].at[7].set(-1)}
        saver.save_delta(between, tmp_path / "m", 1, touched={"table": [0, 3]})
        return saver.save_delta(tree, tmp_path / "m", 2, touched={"table": [7]})
    path = saver.save(tree, tmp_path / "m")
    if saver.as_saver_def().sharded:
        assert os.path.exists(f"{path}-00003-of-00004")
    return path


@pytest.mark.parametrize(
    ("start", "stop"), [(0, 8), (0, 1), (1, 5), (3, 4), (6, 8), (7, 8), (4, 4), (8, 8)]
)
def test_rows(start, stop, path):
    rows = {"table": slice(start, stop), "half": slice(start, stop)}
    restored = js.Saver().restore(path, rows=rows)
    np.testing.assert_array_equal(restored["table"], table()[start:stop])
    np.testing.assert_array_equal(restored["half"], table(jnp.bfloat16)[start:stop])
    np.testing.assert_array_equal(restored["mu"]["table"], table() + 100)
    assert restored["n"] == 7 and restored["half"].dtype == jnp.bfloat16
    struct = jax.ShapeDtypeStruct((stop - start, 3), jnp.float32)
    rows = {"*table": slice(start, stop)}
    for template in (struct, np.zeros(struct.shape, struct.dtype)):
        only = js.Saver().restore(path, {"table": template}, rows)
        np.testing.assert_array_equal(only["table"], table()[start:stop])
        assert isinstance(only["table"], np.ndarray) == (template is not struct)
    both = js.Saver(["table", "mu"]).restore(path, rows=rows)
    assert both["table"].shape == both["mu/table"].shape == struct.shape


def test_open_ends_and_other_names(path):
    restored = js.Saver().restore(path, rows={"table:0": slice(None, 2)})
    np.testing.assert_array_equal(restored["table"], table()[:2])
    saver = js.Saver({"table": "renamed"})
    restored = saver.restore(path, rows={"renamed": slice(5, None)})
    np.testing.assert_array_equal(restored["renamed"], table()[5:])
    struct = jax.ShapeDtypeStruct((9,), jnp.float32)
    restored = js.Saver({"table": "renamed"}, reshape=True).restore(
        path, {"renamed": struct}, rows={"renamed": slice(5, 8)}
    )
    np.testing.assert_array_equal(restored["renamed"], table()[5:].reshape(9))


@pytest.mark.parametrize("spec", [("x",), (None, "y"), ()])
def test_rows_onto_a_sharding(spec, path):
    struct = jax.ShapeDtypeStruct((4, 3), jnp.float32, sharding=sharding(*spec))
    restored = js.Saver().restore(path, {"table": struct}, {"table": slice(3, 7)})
    assert restored["table"].sharding == struct.sharding
    np.testing.assert_array_equal(restored["table"], table()[3:7])


def test_random_keys_and_raw_bytes(tmp_path):
    tree = {
        "keys": jax.random.split(jax.random.key(0), 5),
        "small": jnp.arange(6).reshape(3, 2).astype(jnp.int4),
        "words": np.array(["a", "bc", "d"]),
    }
    path = js.Saver().save(tree, tmp_path / "m")
    rows = {name: slice(1, 3) for name in tree}
    restored = js.Saver().restore(path, rows=rows)
    assert restored["words"].tolist() == ["bc", "d"]
    assert restored["small"].tolist() == [[2, 3], [4, 5]]
    data = jax.random.key_data
    assert data(restored["keys"]).tolist() == data(tree["keys"])[1:3].tolist()


ERRORS = [
    (
        {"table": slice(0, 9)},
        ValueError,
        r"is slice\(0, 9, None\), but it was saved with 8",
    ),
    ({"table": slice(9, 9)}, ValueError, r"want 0 <= start <= stop <= 8"),
    ({"table": slice(-2, None)}, ValueError, r"negative numbers do not count from the end"),
    ({"table": slice(5, 4)}, ValueError, r"slice\(5, 4, None\)"),
    ({"table": slice(0, 4, 2)}, ValueError, r"slice\(0, 4, 2\), but .* no step"),
    ({"table": slice(0, 2.5)}, TypeError, r"'table'\] must hold integers"),
    ({"table": [1, 2]}, TypeError, r"must be a slice\(start, stop\), not \[1, 2\]"),
    ({"n": slice(0, 1)}, ValueError, r"rows\['n'\]: it was saved as a single value"),
    (
        {"zz": slice(0, 1)},
        NotFoundError,
        r"names no variable with 'zz'; there are .*'table'",
    ),
    (
        {"table": slice(1), "t*": slice(2)},
        ValueError,
        r"two ranges of 'table': slice\(0, 1",
    ),
    (slice(0, 1), TypeError, r"rows must be a dict"),
]


@pytest.mark.parametrize(("rows", "kind", "text"), ERRORS)
def test_errors(rows, kind, text, path):
    with pytest.raises(kind, match=text):
        js.Saver().restore(path, rows=rows)


def test_slices_stay_whole(tmp_path):
    slices = js.IndexedSlices(jnp.arange(6.0).reshape(3, 2), jnp.array([4, 1, 9]), (9, 2))
    path = js.Saver().save({"g": slices}, tmp_path / "m")
    restored = js.Saver().restore(path, rows={"g/*": slice(1, 3)})["g"]
    assert restored.indices.tolist() == [1, 9] and restored.values.tolist() == [
        [2, 3],
        [4, 5],
    ]
    with pytest.raises(
        ValueError, match=r"2 values and 3 indices .* same rows of 'g/values'"
    ):
        js.Saver().restore(path, rows={"g/values": slice(1, 3)})


def test_the_template_has_the_shape_of_the_rows(path):
    with pytest.raises(
        ValueError, match=r"float32\[2, 3\], but the shape \(8, 3\) is want"
    ):
        js.Saver().restore(path, {"table": table()}, {"table": slice(2, 4)})


@examples(20)
@given(st.data())
def test_any_rows(tmp_path_factory, data):
    shape = (data.draw(st.integers(1, 40)), data.draw(st.integers(0, 3)))
    array = np.arange(np.prod(shape), dtype=np.int16).reshape(shape)
    path = js.Saver().save({"a": array}, tmp_path_factory.mktemp("any") / "m")
    start = data.draw(st.integers(0, shape[0]))
    stop = data.draw(st.integers(start, shape[0]))
    restored = js.Saver().restore(path, rows={"a": slice(start, stop)})["a"]
    np.testing.assert_array_equal(restored, array[start:stop])


# --- nothing else is read -------------------------------------------------------------

WIDTH = 1024
ROWS = 5 * CHUNK // WIDTH  # five chunks and, with the hundred bytes before, a bit


def damaged(path, target, keep):
    """A copy in which every byte of the table is flipped but those of some chunks."""
    data = bytearray(pathlib.Path(path).read_bytes())
    start = len(data) - ROWS * WIDTH
    whole = np.frombuffer(data, np.uint8)
    flipped = ~whole[start:]
    for chunk in keep:
        part = slice(chunk * CHUNK, (chunk + 1) * CHUNK)
        flipped[part] = whole[start:][part]
    target.write_bytes(bytes(data[:start]) + flipped.tobytes())
    return target


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    """A table, and the path at which it was saved."""
    array = np.arange(ROWS * WIDTH // 4, dtype=np.int32).reshape(ROWS, WIDTH // 4)
    return array, js.Saver().save({"t": array}, tmp_path_factory.mktemp("big") / "m")


@pytest.mark.parametrize(("start", "stop"), [(2, 3), (1.5, 3.25), (0, 1), (4.5, 5)])
def test_other_chunks_of_the_file_do_not_matter(start, stop, big, tmp_path):
    array, path = big
    rows = slice(int(start * CHUNK // WIDTH), int(stop * CHUNK // WIDTH))
    path = damaged(path, tmp_path / "m", keep=range(int(start), int(np.ceil(stop))))
    restored = js.Saver().restore(path, rows={"t": rows})["t"]
    np.testing.assert_array_equal(restored, array[rows])
    struct = jax.ShapeDtypeStruct(
        (rows.stop - rows.start, WIDTH // 4), np.int32, sharding=sharding("x")
    )
    restored = js.Saver().restore(path, {"t": struct}, rows={"t": rows})["t"]
    np.testing.assert_array_equal(restored, array[rows])


def test_the_chunks_of_the_rows_are_checked(big, tmp_path):
    path = damaged(big[1], tmp_path / "m", keep=[2])
    first, last = 2 * CHUNK // WIDTH, 3 * CHUNK // WIDTH
    js.Saver().restore(path, rows={"t": slice(first, last)})
    with pytest.raises(DataLossError, match=r"the checksum of 't' does not match"):
        js.Saver().restore(path)
    for rows in (slice(first - 1, last), slice(first, last + 1)):
        with pytest.raises(DataLossError, match=r"the checksum of 't' does not match"):
            js.Saver().restore(path, rows={"t": rows})


def test_a_shard_without_these_rows_is_not_read(tmp_path):
    tree = {"t": jax.device_put(table(), sharding("x"))}
    path = js.Saver(sharded=True).save(tree, tmp_path / "m")
    last = pathlib.Path(f"{path}-00003-of-00004")
    data = bytearray(last.read_bytes())
    data[-1] ^= 255
    last.write_bytes(data)
    restored = js.Saver().restore(path, rows={"t": slice(0, 6)})["t"]
    np.testing.assert_array_equal(restored, table()[:6])
    with pytest.raises(DataLossError, match=r"00003-of-00004 is damaged"):
        js.Saver().restore(path, rows={"t": slice(0, 7)})


def test_memory_is_that_of_the_rows(big):
    array, path = big
    js.Saver().restore(path, rows={"t": slice(7, 8)})
    tracemalloc.start()
    restored = js.Saver().restore(path, rows={"t": slice(7, 1007)})["t"]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    np.testing.assert_array_equal(restored, array[7:1007])
    assert peak < 1.5 * restored.nbytes < array.nbytes / 10
