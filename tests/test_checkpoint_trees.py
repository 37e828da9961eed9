"""Any pytree comes back as it was: dtypes, structures, shardings, memory."""

import functools
import json
import os
import secrets
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from draws import examples
from helpers import GOLDEN
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jslices as js
from jslices.checkpoint.leaves import Leaf, Piece, Rows, Spec, as_leaf, restore_like
from jslices.checkpoint.tensors import TensorFile
from jslices.errors import DataLossError, NotFoundError


class Point(NamedTuple):
    x: jax.Array
    y: jax.Array


def same(a, b):
    """Equal in kind, dtype, shape and bytes, leaf by leaf."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert type(x) is type(y)
        if hasattr(x, "dtype"):
            assert (x.dtype, x.shape) == (y.dtype, y.shape)
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
                assert jax.random.key_impl(x) == jax.random.key_impl(y)
                x, y = jax.random.key_data(x), jax.random.key_data(y)
            assert np.asarray(x).tobytes() == np.asarray(y).tobytes()
        else:
            assert x == y


NUMPY_DTYPES = "bool int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 float32 \
float64 complex64 complex128 S5 U3 M8[s] >f4 >i8".split()
MORE_DTYPES = "bfloat16 float8_e4m3fn float8_e5m2 float8_e4m3b11fnuz int4 uint4".split()


@pytest.mark.parametrize("shape", [(), (0,), (3,), (0, 4), (2, 3)])
@pytest.mark.parametrize("dtype", NUMPY_DTYPES + MORE_DTYPES)
def test_numpy_dtypes(dtype, shape, tmp_path):
    rng = np.random.default_rng(0)
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    if dtype.kind == "U":
        array = np.full(shape, "é漢", dtype)
    elif dtype.name.endswith("int4") or dtype.kind == "b":
        array = rng.integers(0, 2, shape).astype(dtype)
    else:
        array = np.zeros(shape, dtype)
        array[...] = rng.integers(0, 9, shape).astype(dtype)
    array = np.asarray(array)
    path = js.Saver().save({"a": array}, tmp_path / "m")
    back = js.Saver().restore(path)["a"]
    assert (back.dtype, back.shape) == (array.dtype.newbyteorder("="), shape)
    assert back.tolist() == array.tolist()
    template = js.Saver().restore(path, {"a": np.zeros(shape, array.dtype)})["a"]
    assert template.tolist() == array.tolist() and isinstance(template, np.ndarray)


def everything():
    params = {
        "table": jnp.arange(12.0).reshape(4, 3).astype(jnp.bfloat16),
        "w": jnp.ones(3),
    }
    return {
        "params": params,
        "state": js.adam(1e-3).init(params),
        "exact": js.adam(1e-3, untouched="exact").init(params),
        "slices": js.IndexedSlices(jnp.ones((2, 3)), jnp.array([1, 5]), (4, 3)),
        "key": jax.random.split(jax.random.key(3), 2),
        "old_key": jax.random.PRNGKey(3),
        "rbg": jax.random.key(1, impl="rbg"),
        "nested": [1, (2.5, None, {}), [], (), {"deep/er": True}, {7: 2j}],
        "points": Point(jnp.zeros(()), np.ones(2)),
        "text": "naïve",
        "bytes": b"\0\1",
    }


def test_a_training_state_into_its_template(tmp_path):
    tree = everything()
    saver = js.Saver()
    path = saver.save(tree, tmp_path / "m")
    same(saver.restore(path, tree), tree)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, jax.Array) else x,
        tree,
    )
    same(saver.restore(path, shapes), tree)


def as_dict(x):
    """Named tuples come back as dicts."""
    if hasattr(x, "_asdict"):
        return {name: as_dict(part) for name, part in x._asdict().items()}
    return x


def test_without_a_template(tmp_path):
    tree = everything()
    restored = js.Saver().restore(js.Saver().save(tree, tmp_path / "m"))
    tree = jax.tree.map(as_dict, tree, is_leaf=lambda x: hasattr(x, "_asdict"))
    same(restored, tree)


@pytest.mark.parametrize(
    "tree",
    [
        jnp.ones(2), [1, 2], (3,), {"a": (None,)}, 5, "x",
        # What safetensors and the files' own header would take for something else.
        {"__metadata__": 1}, {"__metadata__": 1, "__metadata__@": 2, "__metadata__@@": 3},
        {"jslices": 1, "crc32:jslices": 2}, {'"jslices.crc32":"': 1}, {"": 1}, {"a\nb": 1},
    ],
)  # fmt: skip
def test_small_trees(tree, tmp_path):
    saver = js.Saver(allow_empty=True)
    path = saver.save(tree, tmp_path / "m")
    same(saver.restore(path), tree)
    same(saver.restore(path, tree), tree)


def test_flat_and_nested_names_are_one(tmp_path):
    saver = js.Saver()
    path = saver.save({"foo/bar/v": jnp.ones(2), "n": 1}, tmp_path / "m")
    assert set(saver.restore(path)) == {"foo/bar/v", "n"}
    nested = saver.restore(path, {"foo": {"bar": {"v": jnp.zeros(2)}}})
    np.testing.assert_array_equal(nested["foo"]["bar"]["v"], np.ones(2))


@examples(30)
@given(
    st.dictionaries(
        st.text("abcé_ ~.", min_size=1).filter(lambda s: s != ".."),
        hnp.arrays(
            st.sampled_from([np.float32, np.int64, np.bool_, np.complex64]),
            hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_any_arrays(tmp_path_factory, tree):
    path = js.Saver().save(tree, tmp_path_factory.mktemp("any") / "m")
    same(js.Saver().restore(path), dict(sorted(tree.items())))


def test_arrays_that_are_not_contiguous(tmp_path):
    base = np.arange(24.0, dtype=np.float32).reshape(4, 6)
    tree = {"t": base.T, "s": base[::2, ::-1], "f": np.asfortranarray(base)}
    restored = js.Saver().restore(js.Saver().save(tree, tmp_path / "m"))
    for name in tree:
        np.testing.assert_array_equal(restored[name], tree[name])


def test_files_are_safetensors(tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    tree = {"a": {"b": np.arange(6.0).reshape(2, 3)}, "h": np.ones(3, np.float16)}
    path = js.Saver().save(tree, tmp_path / "m")
    theirs = safetensors.load_file(path)
    np.testing.assert_array_equal(theirs["a/b"], tree["a"]["b"])
    safetensors.save_file(theirs, tmp_path / "theirs")
    restored = js.Saver().restore(tmp_path / "theirs", tree)
    np.testing.assert_array_equal(restored["a"]["b"], tree["a"]["b"])
    flat = js.Saver().restore(tmp_path / "theirs")
    assert set(flat) == {"a/b", "h"} and isinstance(flat["h"], jax.Array)
    assert flat["a/b"].dtype == np.float64  # NumPy's, as JAX would make it narrower


def test_an_index_of_safetensors_files(tmp_path):
    """Hugging Face's, ``model.safetensors.index.json``."""
    safetensors = pytest.importorskip("safetensors.numpy")
    tree = {"a": np.arange(6, dtype=np.float32).reshape(3, 2), "b": np.ones(2, np.int32)}
    for name, x in tree.items():
        safetensors.save_file({name: x}, tmp_path / f"{name}.safetensors")
    path = tmp_path / "model.safetensors.index.json"
    file_of = {name: f"{name}.safetensors" for name in tree}
    path.write_text(json.dumps({"metadata": {"total_size": 32}, "weight_map": file_of}))
    restored = js.Saver().restore(path, rows={"a": slice(1, 3)})
    np.testing.assert_array_equal(restored["a"], tree["a"][1:])
    np.testing.assert_array_equal(js.Saver().restore(path, {"b": tree["b"]})["b"], [1, 1])
    for text, error, message in [
        ('{"weight_map": {}}', DataLossError, "does not name the tensors that"),
        ('{"weight_map": {"c": "b.safetensors"}}', DataLossError, "does not name the"),
        ('{"weight_map": {"c": "c.safetensors"}}', NotFoundError, r"not there: .*c\."),
        ("[" * 100_000, DataLossError, "index.json is no index of safetensors files"),
        ('{"weight_map": [1]}', DataLossError, "is no index of safetensors files"),
    ]:
        path.write_text(text)
        with pytest.raises(error, match=message):
            js.Saver().restore(path)


def test_wide_numbers_are_not_made_narrow(tmp_path):
    with jax.enable_x64(True):
        path = js.Saver().save({"a": jnp.ones(2, jnp.float64)}, tmp_path / "m")
        assert js.Saver().restore(path)["a"].dtype == jnp.float64
    with pytest.raises(ValueError, match=r"which JAX would make narrower; set jax.config"):
        js.Saver().restore(path)
    assert js.Saver().restore(path, {"a": np.zeros(2)})["a"].dtype == np.float64


def test_restored_arrays_can_be_donated(tmp_path):
    path = js.Saver().save({"t": jnp.zeros((64, 8))}, tmp_path / "m")
    table = js.Saver().restore(path)["t"]
    table = jax.jit(lambda t: t.at[3].add(1.0), donate_argnums=0)(table)
    assert float(table.sum()) == 8.0
    assert float(js.Saver().restore(path)["t"].sum()) == 0.0


def test_what_was_donated_still_says_what_is_wanted(tmp_path):
    tree = {"t": jnp.ones((4, 2)), "u": on_mesh(("x",))}
    path = js.Saver().save(tree, tmp_path / "m")
    sharding = tree["u"].sharding
    for leaf in tree.values():
        leaf.delete()
    restored = js.Saver().restore(path, tree)
    assert float(restored["t"].sum()) == 8.0 and restored["u"].sharding == sharding


# --- shards ---------------------------------------------------------------------------

SPECS = [("x",), (None, "x"), ("x", "y"), ("y",), (), (("x", "y"),)]


def on_mesh(spec, shape=(8, 4), dtype=jnp.float32):
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    sharding = NamedSharding(Mesh(devices, ("x", "y")), PartitionSpec(*spec))
    array = jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape).astype(dtype)
    return jax.device_put(array, sharding)


kept_on_mesh = functools.cache(on_mesh)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("spec", SPECS)
def test_sharded_arrays(spec, sharded, tmp_path):
    on_mesh = kept_on_mesh
    tree = {"t": on_mesh(spec), "h": on_mesh(spec, dtype=jnp.bfloat16), "w": jnp.ones(3)}
    path = js.Saver(sharded=sharded).save(tree, tmp_path / "m")
    whole = js.Saver().restore(path)
    np.testing.assert_array_equal(whole["t"], np.arange(32.0).reshape(8, 4))
    for other in SPECS:  # onto another sharding than it was saved from
        template = on_mesh(other)
        restored = js.Saver().restore(
            path, {"t": template, "h": on_mesh(other, dtype=jnp.bfloat16)}
        )
        assert restored["t"].sharding == template.sharding
        np.testing.assert_array_equal(restored["t"], whole["t"])
        np.testing.assert_array_equal(restored["h"], tree["h"])
    struct = jax.ShapeDtypeStruct(
        (8, 4), jnp.float32, sharding=on_mesh(("x", "y")).sharding
    )
    restored = js.Saver().restore(path, {"t": struct})["t"]
    assert restored.sharding == struct.sharding


def test_one_file_for_each_shard(tmp_path):
    tree = {"t": on_mesh(("x", "y")), "u": on_mesh(("x",)), "w": jnp.ones(3)}
    path = js.Saver(sharded=True).save(tree, tmp_path / "m", 1)
    names = [f"m-1-{i:05d}-of-00004" for i in range(4)]
    assert sorted(os.listdir(tmp_path)) == ["checkpoint", *names]
    shapes = [TensorFile(str(tmp_path / name)).shapes for name in names]
    assert [s["t"] for s in shapes] == [(4, 2)] * 4
    assert [s.get("u") for s in shapes] == [(4, 4), (4, 4), None, None]
    assert [s.get("w") for s in shapes] == [None, None, (3,), None]
    assert path == str(tmp_path / "m-1")


def test_other_numbers_of_shards_take_the_place(tmp_path):
    for spec, sharded in [
        (("x", "y"), True),
        (("x",), True),
        ((), False),
        (("x", "y"), True),
    ]:
        tree = {"t": on_mesh(spec) + len(spec)}
        path = js.Saver(sharded=sharded).save(tree, tmp_path / "m")
        np.testing.assert_array_equal(js.Saver().restore(path)["t"], tree["t"])
        expected = {(): 1, ("x",): 2, ("x", "y"): 4}[spec]
        assert len(os.listdir(tmp_path)) == expected + 1


@pytest.mark.parametrize("spec", SPECS)
def test_a_table_is_gathered_block_by_block(spec):
    leaf = as_leaf("t", on_mesh(spec))
    blocks = list(leaf.tensor(block_bytes=48).blocks())
    np.testing.assert_array_equal(np.concatenate(blocks), on_mesh(()))
    assert len(leaf.pieces) == 1 or [len(block) for block in blocks] == [3, 3, 2]


def test_a_shard_is_written_from_its_device(tmp_path, monkeypatch):
    seen, array = [], np.asarray

    def watched(x, *rest, **named):
        if isinstance(x, jax.Array):
            seen.append(x.size)
        return array(x, *rest, **named)

    tree = {"t": on_mesh(("x", "y"), (512, 4))}
    monkeypatch.setattr(np, "asarray", watched)
    path = js.Saver(sharded=True).save(tree, tmp_path / "m")
    monkeypatch.undo()
    assert max(seen) == 512 * 4 // 4
    np.testing.assert_array_equal(js.Saver().restore(path)["t"], tree["t"])


def test_only_the_boxes_of_the_devices_are_read():
    saved, boxes = np.arange(32, dtype=np.float32).reshape(8, 4), []

    def read(index):
        boxes.append(saved[index])
        return boxes[-1]

    restored = restore_like("t", Spec("jax", "float32", (8, 4)), read, on_mesh(("x",)))
    np.testing.assert_array_equal(restored, saved)
    assert [box.shape for box in boxes] == [(4, 4), (4, 4)]


def test_blocks_from_devices_other_than_the_host():
    class Elsewhere:
        """An array that only gives rows."""

        def __init__(self, array):
            self.array, self.shape, self.dtype = array, array.shape, array.dtype
            self.ndim, self.gave = array.ndim, []

        def devices(self):
            return {type("Device", (), {"platform": "gpu"})()}

        def __getitem__(self, rows):
            self.gave.append(rows)
            return self.array[rows]

    data = Elsewhere(np.arange(20.0, dtype=np.float32).reshape(10, 2))
    leaf = Leaf(Spec("jax", "float32", (10, 2)), [Piece((0, 0), data)])
    blocks = list(leaf.tensor(block_bytes=32).blocks())
    assert [len(block) for block in blocks] == [4, 4, 2]
    np.testing.assert_array_equal(np.concatenate(blocks), data.array)
    rows = np.array([1, 4, 9])
    (taken,) = leaf.rows_tensor(Rows(rows, 1)).blocks()
    np.testing.assert_array_equal(taken, data.array[rows])
    assert len(data.gave[-1][0]) == 4  # a power of two: few programs are compiled


# --- the format -----------------------------------------------------------------------


def kept_trees():
    """What the files in ``golden/checkpoint`` hold, in the order of saving."""
    full = {
        "params": {
            "table": jnp.arange(12.0).reshape(4, 3).astype(jnp.bfloat16),
            "w": jnp.ones(3),
        },
        "small": jnp.arange(6).reshape(3, 2).astype(jnp.int4),
        "complex": np.array([1, 2j], np.complex64),
        "words": np.array(["a", "bc"]),
        "slices": js.IndexedSlices(jnp.ones((2, 3)), jnp.array([1, 5]), (4, 3)),
        "key": jax.random.split(jax.random.key(3), 2),
        "nested": [1, (2.5, None, {}), [], (), {"deep/er": True}, {7: 2j}],
        "point": Point(jnp.zeros(()), np.ones(2)),
        "text": "naïve",
        "bytes": b"\0\1",
        "__metadata__": 3,
        "empty": np.zeros((0, 4)),
    }
    shards = {"t": on_mesh(("x",), (4, 2)), "w": jnp.ones(3)}
    base = {"t": jnp.arange(8.0).reshape(4, 2), "n": 1}
    return full, shards, base, {"t": base["t"].at[2].set(7), "n": 2}


def test_the_format_stays(tmp_path, monkeypatch):
    """Files of version 0.1 can be read, and what is written is the same, byte for byte."""
    full, shards, base, delta = kept_trees()
    folder = GOLDEN / "checkpoint"
    same(js.Saver().restore(folder / "full", full), full)
    restored = js.Saver().restore(folder / "full")
    assert restored["nested"] == full["nested"] and set(restored) == set(full)
    same(js.Saver().restore(folder / "shards", shards), shards)
    same(js.Saver().restore(folder / "delta"), dict(sorted(delta.items())))
    # As it was before safetensors had a name for complex64.
    restored = js.Saver().restore(GOLDEN / "complex_as_bytes")
    assert restored["complex"].dtype == np.complex64 and restored["bytes"].shape == (2, 8)
    np.testing.assert_array_equal(restored["complex"], [1, 2j])

    times = iter(range(0x1800000000000001, 0x1800000000000009, 2))
    monkeypatch.setattr(time, "time_ns", lambda: next(times))
    monkeypatch.setattr(secrets, "token_hex", lambda n: "ab" * n)
    js.Saver().save(full, tmp_path / "full")
    js.Saver(sharded=True).save(shards, tmp_path / "shards")
    saver = js.Saver()
    saver.save(base, tmp_path / "base")
    saver.save_delta(delta, tmp_path / "delta", touched={"t": [2]})
    for file in folder.iterdir():
        assert (tmp_path / file.name).read_bytes() == file.read_bytes(), file.name
