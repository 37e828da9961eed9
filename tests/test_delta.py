"""Deltas: only the rows that changed, and a chain that is never broken silently."""

import inspect
import os
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import examples
from hypothesis import given
from hypothesis import strategies as st

import jslices as js
from jslices import dynamic
from jslices.checkpoint import DataLossError, NotFoundError, files
from jslices.checkpoint.archive import Archive
from jslices.checkpoint.leaves import Rows, as_leaf
from jslices.checkpoint.tensors import TensorFile
from jslices.checkpoint.writing import Save

V = 64


def start():
    return {
        "table": jnp.zeros((V, 2)),
        "mu": {"table": jnp.zeros((V, 2))},
        "w": jnp.ones(3),
    }


def stepped(variables, ids, value):
    """Rows changed in both tables, and everything else too."""
    ids = jnp.asarray(ids, jnp.int32)
    changed = {
        k: jax.tree.map(lambda t: t.at[ids].set(value), variables[k])
        for k in ("table", "mu")
    }
    return {**changed, "w": variables["w"] * value}


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def by_name(ids):
    return {"table": ids, "mu/table": ids}


TOUCHED = {
    "names": by_name,
    "tuple": lambda ids: by_name(tuple(ids)),
    "array": lambda ids: by_name(jnp.array(ids)),
    "with empty entries": lambda ids: by_name(np.array([*ids, V, -1, *ids])),
    "mask": lambda ids: by_name(np.isin(np.arange(V), ids)),
    "pattern": lambda ids: {"*table": ids},
    "tree": lambda ids: {
        "table": jnp.array(ids),
        "mu": {"table": jnp.array(ids)},
        "w": None,
    },
    "slices": lambda ids: by_name(
        js.IndexedSlices(jnp.ones((len(ids), 2)), jnp.array(ids), (V, 2))
    ),
    "compared": lambda ids: None,
}


@pytest.mark.parametrize("kind", TOUCHED)
def test_touched(kind, tmp_path):
    saver, variables = js.Saver(), start()
    saver.save(variables, tmp_path / "m", 0)
    for step, ids in enumerate([[3, 5], [5, 60, 0]], 1):
        variables = stepped(variables, ids, step + 1.0)
        path = saver.save_delta(variables, tmp_path / "m", step, touched=TOUCHED[kind](ids))
        file = TensorFile(path)
        assert file.shapes["table"] == file.shapes["mu/table"] == (len(ids), 2)
        assert_same(js.Saver().restore(path), variables)
        assert_same(
            js.Saver().restore(path, jax.tree.map(jnp.zeros_like, variables)), variables
        )
    assert js.checkpoint.latest_checkpoint(tmp_path) == path


@pytest.mark.parametrize("kind", [x for x in TOUCHED if x != "compared"])
def test_rows_of_the_last_step_alone_are_refused(kind, tmp_path):
    saver, variables = js.Saver(), start()
    path = saver.save(variables, tmp_path / "m", 0)
    variables = stepped(stepped(variables, [3, 5], 2.0), [5, 60], 3.0)
    with pytest.raises(
        js.InvalidArgumentError,
        match=r"names 2 rows of '(mu/)?table'.*m-0, such as row 3\.",
    ):
        saver.save_delta(variables, tmp_path / "m", 1, touched=TOUCHED[kind]([5, 60]))
    assert js.checkpoint.latest_checkpoint(tmp_path) == path
    path = saver.save_delta(variables, tmp_path / "m", 1, touched=TOUCHED[kind]([3, 5, 60]))
    assert_same(saver.restore(path), variables)


@pytest.mark.parametrize("shape", [(100_000, 2), (3, 40_000, 2), (40_000, 3, 2), (2000,)])
def test_some_rows_of_a_tall_table_are_compared(shape, tmp_path):
    axes = max(1, len(shape) - 1)
    size, rng = int(np.prod(shape[:axes])), np.random.default_rng(0)
    table, saver = np.zeros(shape, "f4"), js.Saver()
    saver.save({"t": table}, tmp_path / "m", 0)
    first, second = np.split(rng.permutation(size)[: size // 10 * 2], 2)
    mask, only = np.zeros(shape[:axes], bool), np.zeros(shape[:axes], bool)
    for ids in (first, second):
        np.put(mask, ids, True)
        table[mask] += 1
    np.put(only, second, True)
    with pytest.raises(js.InvalidArgumentError, match="others have changed"):
        saver.save_delta({"t": table}, tmp_path / "m", 1, touched={"t": only})
    path = saver.save_delta({"t": jnp.array(table)}, tmp_path / "m", 1, touched={"t": mask})
    np.testing.assert_array_equal(saver.restore(path)["t"], table)


def test_what_is_not_said_is_saved_whole(tmp_path):
    saver, variables = js.Saver(), start()
    saver.save(variables, tmp_path / "m", 0)
    variables = stepped(variables, [1], 2.0)
    path = saver.save_delta(variables, tmp_path / "m", 1, touched={"table": [1]})
    shapes = TensorFile(path).shapes
    assert shapes["table"] == (1, 2) and shapes["mu/table"] == (V, 2)
    assert_same(saver.restore(path), variables)


def test_a_dense_gradient_touches_all(tmp_path):
    saver, variables = js.Saver(), start()
    saver.save(variables, tmp_path / "m", 0)
    path = saver.save_delta(
        variables, tmp_path / "m", 1, touched={"table": jnp.ones((V, 2))}
    )
    assert TensorFile(path).shapes["table"] == (V, 2)


def test_new_and_changed_variables(tmp_path):
    saver = js.Saver()
    saver.save({"a": jnp.ones((4, 2)), "gone": 1, "b": np.ones(4)}, tmp_path / "m", 0)
    now = {"a": jnp.ones((5, 2)), "new": jnp.arange(3), "b": np.arange(4.0)}
    path = saver.save_delta(now, tmp_path / "m", 1)
    assert_same(saver.restore(path), now)
    path = saver.save_delta(now, tmp_path / "m", 2, touched={"a": []})
    assert TensorFile(path).shapes["a"] == (0, 2)
    assert_same(saver.restore(path), now)


def test_comparing_sees_bits(tmp_path):
    saver = js.Saver()
    first = {"t": np.array([[0.0], [np.nan], [1.0]]), "c": np.ones(3, np.complex128)}
    saver.save(first, tmp_path / "m", 0)
    now = {
        "t": np.array([[-0.0], [np.nan], [1.0]]),
        "c": np.array([1, 1j, 1], np.complex128),
    }
    path = saver.save_delta(now, tmp_path / "m", 1)
    shapes = TensorFile(path).shapes
    assert shapes["t"] == (1, 1) and shapes["c"] == (1, 16)
    restored = saver.restore(path)
    assert restored["t"].tobytes() == now["t"].tobytes()
    np.testing.assert_array_equal(restored["c"], now["c"])


@pytest.mark.parametrize("touched", [None, {"t": [3, 4, 7]}])
def test_sharded_tables(touched, tmp_path):
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    mesh = jax.sharding.Mesh(devices, ("x", "y"))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x", "y"))
    table = jax.device_put(jnp.arange(32.0).reshape(8, 4), sharding)
    saver = js.Saver(sharded=True)
    saver.save({"t": table}, tmp_path / "m", 0)
    table = jax.device_put(table.at[jnp.array([3, 4, 7])].add(1.0), sharding)
    path = saver.save_delta({"t": table}, tmp_path / "m", 1, touched=touched)
    assert TensorFile(path).shapes["t"] == (3, 4)
    restored = saver.restore(path, {"t": table})["t"]
    assert restored.sharding == sharding
    np.testing.assert_array_equal(restored, table)


@examples(15)
@given(st.lists(st.lists(st.integers(-2, V + 1), max_size=5), max_size=4), st.booleans())
def test_any_chain(tmp_path_factory, batches, compare):
    directory = tmp_path_factory.mktemp("chain")
    saver, table = js.Saver(max_to_keep=2), np.zeros((V, 2), np.float32)
    saver.save({"t": table}, directory / "m", 0)
    for step, ids in enumerate(batches, 1):
        table = table.copy()
        table[[i for i in ids if 0 <= i < V]] += step
        touched = None if compare else {"t": list(ids)}
        path = saver.save_delta({"t": table}, directory / "m", step, touched=touched)
        np.testing.assert_array_equal(js.Saver().restore(path)["t"], table)
    for path in saver.last_checkpoints:
        js.Saver().restore(path)


L, H = 3, 5
FINE = [(0, 1), (2, 4)]  # rows by layer and number


def fine():
    return js.IndexedSlices(jnp.ones((4, 2)), jnp.array([1, 14, 14, 99]), (L, H, 2), 2)


def layers_without_a_shape():
    return js.IndexedSlices(jnp.ones((2, H, 2)), jnp.array([0, 2]))


def looked_up():
    table = jnp.zeros((L, H, 2))
    at = tuple(jnp.array(FINE).T)
    return js.lookup_ids(lambda t: t[at].sum())(table)


def fine_mask():
    return np.isin(np.arange(L * H), [1, 14]).reshape(L, H)


# By name: what is touched, and the shape of what a delta of the table holds.
STACKED = {
    "slices": (lambda: {"*t": fine()}, (2, 2)),
    "slices without a shape": (lambda: {"*t": layers_without_a_shape()}, (2, H, 2)),
    "lookup_ids": (lambda: {"*t": looked_up()}, (2, 2)),
    "mask": (lambda: {"*t": fine_mask()}, (2, 2)),
    "compared": (lambda: None, (2, 2)),
    "layers": (lambda: {"*t": [0, 2]}, (2, H, 2)),
    "both": (lambda: {"*t": fine(), "*t*": [2]}, (1 + H, 2)),
    "both, the other way": (lambda: {"*t": [2], "*t*": fine()}, (1 + H, 2)),
    "numbers": (lambda: {"*t": fine_mask()[..., None].repeat(2, 2)}, (4,)),
}


@pytest.mark.parametrize("kind", STACKED)
def test_rows_that_several_axes_number(kind, tmp_path):
    touched, shape = STACKED[kind]
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), "x")
    spec = jax.sharding.PartitionSpec(None, None, "x")
    split = jax.sharding.NamedSharding(mesh, spec)
    changed = np.arange(L * H * 2.0, dtype=np.float32).reshape(L, H, 2)

    def variables():
        whole = changed.copy()
        return {
            "t": jnp.asarray(whole),
            "mu": {"t": jax.device_put(whole, split)},
            "raw_t": whole.astype(np.complex64),
        }

    saver = js.Saver()
    saver.save(variables(), tmp_path / "m", 0)
    for step in (1, 2):
        changed[tuple(np.array(FINE).T)] += step
        path = saver.save_delta(variables(), tmp_path / "m", step, touched=touched())
    shapes = TensorFile(path).shapes
    assert shapes["t"] == shapes["mu/t"] == shapes["raw_t"][: len(shape)] == shape
    for template in (None, variables()):
        assert_same(js.Saver().restore(path, template), variables())
    for part in (slice(0, 1), slice(1, 3), slice(1, 1)):
        rows = js.Saver().restore(path, rows={"*t": part})
        assert_same(rows, jax.tree.map(lambda x, part=part: x[part], variables()))


def test_a_comparison_takes_the_rows_of_the_fewest_bytes(tmp_path):
    saver, table = js.Saver(), np.zeros((4, 3, 2), np.float32)
    state = {"table": table, "rows": table[..., 0].copy(), "empty": table[:, :0]}
    saver.save(state, tmp_path / "m", 0)
    table[2] = 1
    state["rows"][1, 1] = 1
    path = saver.save_delta(state, tmp_path / "m", 1)
    shapes = TensorFile(path).shapes
    assert shapes["table"] == (1, 3, 2) and shapes["rows"] == (1, 3)
    assert_same(js.Saver().restore(path), state)


@pytest.mark.parametrize("count", [0, 31, 32, V])
def test_rows_that_take_more_bytes_than_the_array_are_not_written(count, tmp_path):
    """A row takes 8, and its number 8, of 512 for the whole table."""
    saver, variables = js.Saver(), start()
    saver.save(variables, tmp_path / "m", 0)
    ids = list(range(count))
    variables = stepped(variables, ids, 2.0)
    path = saver.save_delta(variables, tmp_path / "m", 1, touched={"*table": ids})
    fewer = count if count * 16 < 512 else V
    assert TensorFile(path).shapes["table"] == (fewer, 2)
    assert_same(js.Saver().restore(path), variables)


def test_a_delta_of_a_keyed_map_is_no_larger_than_the_map(tmp_path):
    """Whose rows are narrow, and change all over."""
    saver, ids = js.Saver(), dynamic.id_map(1000)
    full = saver.save({"ids": ids}, tmp_path / "m", 0)
    ids, _ = ids.admit(dynamic.wide_ids(np.arange(900) * 7919))
    delta = saver.save_delta({"ids": ids}, tmp_path / "m", 1)
    assert os.path.getsize(delta) < 1.05 * os.path.getsize(full)
    assert_same(js.Saver().restore(delta, {"ids": ids})["ids"], ids)


# --- the chain ------------------------------------------------------------------------


def chain(directory, **options):
    saver, variables = js.Saver(**options), start()
    paths = [saver.save(variables, directory / "m", 0)]
    for step in (1, 2):
        variables = stepped(variables, [step], 2.0)
        paths.append(saver.save_delta(variables, directory / "m", step))
    return saver, variables, paths


@pytest.mark.parametrize("broken", [0, 1])
def test_a_missing_link_is_named(broken, tmp_path):
    _, _, paths = chain(tmp_path)
    os.unlink(paths[broken])
    link = f"m-{broken + 1} is a delta that builds on .*m-{broken}, which is not there"
    with pytest.raises(NotFoundError, match=link):
        js.Saver().restore(paths[2])


@pytest.mark.parametrize("broken", [0, 1])
@pytest.mark.parametrize("where", [20, -30])  # the last 12 bytes are of "w", whole later
def test_a_damaged_link_is_named(broken, where, tmp_path):
    _, _, paths = chain(tmp_path)
    data = bytearray(open(paths[broken], "rb").read())
    data[where] ^= 4
    open(paths[broken], "wb").write(data)
    with pytest.raises(DataLossError, match=f"m-{broken} is damaged"):
        js.Saver().restore(paths[2])


def test_an_overwritten_link_is_named(tmp_path):
    _, variables, paths = chain(tmp_path)
    js.Saver().save(variables, paths[0])
    with pytest.raises(DataLossError, match=r"m-0, which was overwritten after the delta"):
        js.Saver().restore(paths[2])


def test_a_hostile_link_is_not_followed(tmp_path):
    (tmp_path / "d").mkdir()
    js.Saver().save({"t": jnp.ones((4, 2))}, tmp_path / "outside")
    path = str(tmp_path / "d" / "n")
    delta = {"base": "../outside", "base_id": "", "rows": {}}
    info = {"variables": {}, "delta": delta}
    Save(path, files.new_id(), [{}], info, False).run()
    with pytest.raises(DataLossError, match=r"names '../outside' as its base; .* not foll"):
        js.Saver().restore(path)


def test_what_deltas_build_on_is_kept_and_then_goes(tmp_path):
    saver, variables, paths = chain(tmp_path, max_to_keep=1)
    assert saver.last_checkpoints == paths[2:]
    assert_same(saver.restore(paths[2]), variables)
    full = saver.save(variables, tmp_path / "m", 3)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint", os.path.basename(full)]


def test_a_base_is_not_overwritten(tmp_path):
    saver, variables, paths = chain(tmp_path)
    for path in (paths[0], paths[1]):
        with pytest.raises(ValueError, match=r"saved deltas build on"):
            saver.save(variables, path)
        with pytest.raises(ValueError, match=r"would overwrite a checkpoint"):
            saver.save_delta(variables, path)
    with pytest.raises(ValueError, match=r"would overwrite a checkpoint that it builds"):
        saver.save_delta(variables, paths[2])
    assert_same(js.Saver().restore(paths[2]), variables)


def test_going_on_after_a_restart(tmp_path):
    _, variables, paths = chain(tmp_path)
    saver = js.Saver()
    variables = saver.restore(js.checkpoint.latest_checkpoint(tmp_path), variables)
    saver.recover_last_checkpoints(
        js.checkpoint.get_checkpoint_state(tmp_path).all_model_checkpoint_paths
    )
    variables = stepped(variables, [9], 7.0)
    path = saver.save_delta(variables, tmp_path / "m", 3, touched={"*table": [9]})
    assert TensorFile(path).shapes["table"] == (1, 2)
    assert_same(js.Saver().restore(path), variables)
    assert saver.last_checkpoints == [*paths, path]


def test_a_long_chain(tmp_path):
    """More deltas than Python would follow by calls of one function in another."""
    table = np.zeros((4, 2))
    last = Archive(js.Saver().save({"t": table}, tmp_path / "m-0")).info.save_id
    for step in range(1, 200):
        rows = np.array([step % 4])
        table[rows] = step
        leaf = as_leaf("t", table)
        part = {
            "t": leaf.rows_tensor(Rows(rows, 1)),
            "r": as_leaf("r", rows).tensor(),
        }
        delta = {"base": f"m-{step - 1}", "base_id": last, "rows": {"t": "r"}}
        info = {"variables": {"t": ("numpy", "float64", (4, 2))}, "delta": delta}
        last = files.new_id()
        Save(str(tmp_path / f"m-{step}"), last, [part], info, False).run()
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 150)
    try:
        restored = js.Saver().restore(tmp_path / "m-199")
    finally:
        sys.setrecursionlimit(before)
    np.testing.assert_array_equal(restored["t"], table)


def recovered(directory, **options):
    """What a process does that goes on where an earlier one stopped."""
    saver = js.Saver(**options)
    state = js.checkpoint.get_checkpoint_state(directory)
    saver.recover_last_checkpoints(state.all_model_checkpoint_paths)
    return saver, saver.restore(js.checkpoint.latest_checkpoint(directory), start())


@pytest.mark.parametrize("relative", [False, True])
def test_what_waits_for_deletion_survives_restarts(relative, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path.parent)
    directory = pathlib.Path(tmp_path.name) if relative else tmp_path
    chain(directory, max_to_keep=1)  # the first two wait
    for step in range(3, 6):
        saver, variables = recovered(directory, max_to_keep=1, save_relative_paths=relative)
        variables = stepped(variables, [step], 2.0)
        path = saver.save_delta(variables, directory / "m", step)
        assert_same(js.Saver().restore(path), variables)
    assert set(os.listdir(directory)) == {"checkpoint", *(f"m-{i}" for i in range(6))}
    js.checkpoint.update_checkpoint_state(directory, path)  # knows nothing of them
    js.Saver().save(variables, directory / "n")  # they are needed: by a delta that is there
    assert_same(js.Saver().restore(path), variables)
    saver, variables = recovered(directory, max_to_keep=1)
    saver.recover_last_checkpoints([str(path)])
    saver.save(variables, directory / "m", 6)
    assert set(os.listdir(directory)) == {"checkpoint", "m-6", "n"}
    assert "#" not in (directory / "checkpoint").read_text()


def test_a_delta_that_an_earlier_run_kept_for_good_can_be_restored(tmp_path):
    saver, variables, _ = chain(tmp_path, max_to_keep=1)
    kept_variables = stepped(variables, [9], 3.0)
    kept = saver.save_delta(kept_variables, tmp_path / "kept", write_state=False)
    for step in range(3, 6):
        saver, variables = recovered(tmp_path, max_to_keep=1)
        saver.save(variables, tmp_path / "m", step)
    assert_same(js.Saver().restore(kept), kept_variables)
    os.unlink(kept)
    saver.save(variables, tmp_path / "m", 6)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint", "m-6"]


ERRORS = [
    ({"zz": [1]}, NotFoundError, r"no variable with 'zz'; there are .*'mu/table'"),
    (
        {"table": np.ones(3, bool)},
        ValueError,
        r"is a mask of rows \(3,\) for a table of \(64,\)",
    ),
    ({"table": "abc"}, ValueError, "ids are integers"),
    ({"*": [1]}, ValueError, "covers tables of different numbers of rows"),
    ({"table": fine()}, ValueError, r"slices whose rows axes \(3, 5\) number, for a table"),
    ({"w": fine()}, ValueError, r"whose first axes are \(3,\)"),
]


@pytest.mark.parametrize(("touched", "kind", "text"), ERRORS)
def test_errors_of_touched(touched, kind, text, tmp_path):
    saver = js.Saver()
    saver.save(start(), tmp_path / "m", 0)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(kind, match=text):
        saver.save_delta(start(), tmp_path / "m", 1, touched=touched)
    assert sorted(os.listdir(tmp_path)) == before


def test_errors_of_the_base(tmp_path):
    saver = js.Saver()
    with pytest.raises(ValueError, match=r"has saved and restored none; call save"):
        saver.save_delta(start(), tmp_path / "m")
    path = saver.save(start(), tmp_path / "m", 0)
    (tmp_path / "d").mkdir()
    with pytest.raises(ValueError, match=r"must be in the directory of what it builds on"):
        saver.save_delta(start(), tmp_path / "d" / "m", 1)
    js.Saver().save(start(), path)
    with pytest.raises(ValueError, match=r"is not what this Saver saved or restored"):
        saver.save_delta(start(), tmp_path / "m", 1)
    os.unlink(path)
    with pytest.raises(NotFoundError, match=r"on which a delta would build, is not there"):
        saver.save_delta(start(), tmp_path / "m", 1)
