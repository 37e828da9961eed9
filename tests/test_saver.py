"""Saver: names, retention and errors as TensorFlow has them."""

import cProfile
import os
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import golden

import jslices as js
import jslices.tf1 as tf
from jslices.checkpoint import NotFoundError

GOLDEN = golden("saver")
RUNS = [name for name, run in GOLDEN.items() if isinstance(run, dict)]
SMALL = {"v": np.arange(3.0, dtype=np.float32)}


def checkpoints(directory):
    """The checkpoints whose files are there."""
    names = {name.split("-00000-of")[0] for name in os.listdir(directory)}
    return sorted(names - {"checkpoint"})


def basenames(paths):
    return [os.path.basename(path) for path in paths]


@pytest.mark.parametrize("name", RUNS)
def test_runs_of_tensorflow(name, tmp_path):
    run = GOLDEN[name]
    saver = tf.train.Saver(**run["kwargs"])
    returned = [
        saver.save(SMALL, tmp_path / "m", global_step=step) for step in run["global_steps"]
    ]
    assert basenames(returned) == run["returned_basenames"]
    assert basenames(saver.last_checkpoints) == run["last_checkpoints_basenames"]
    assert checkpoints(tmp_path) == sorted(run["kept"])
    text = (tmp_path / "checkpoint").read_text()
    assert text == run["checkpoint_file"].replace("/DIR", str(tmp_path))
    assert js.checkpoint.latest_checkpoint(tmp_path) == returned[-1]
    for path in returned[-1:]:
        np.testing.assert_array_equal(saver.restore(None, path)["v"], SMALL["v"])


def test_state_files_of_tensorflow(tmp_path):
    for case in GOLDEN["update_checkpoint_state"]:

        def here(x):
            return x.replace("/DIR", str(tmp_path))

        paths = case["all"] and [here(p) for p in case["all"]]
        before = paths and list(paths)
        js.checkpoint.update_checkpoint_state(tmp_path, here(case["model"]), paths)
        assert paths == before  # TensorFlow appends to it
        assert (tmp_path / "checkpoint").read_text() == here(case["file"])
        state = js.checkpoint.get_checkpoint_state(tmp_path)
        assert state.model_checkpoint_path == here(case["state_model"])
        assert state.all_model_checkpoint_paths == [here(p) for p in case["state_all"]]


STEPS = [
    (0, "m-0"),
    (-3, "m--3"),
    (np.int64(7), "m-7"),
    (np.array(7), "m-7"),
    (jnp.int32(7), "m-7"),
    ("n", "m-42"),
    (None, "m"),
]


@pytest.mark.parametrize(("step", "name"), STEPS)
def test_steps(step, name, tmp_path):
    path = js.Saver().save({"n": 42, **SMALL}, tmp_path / "m", step)
    assert path == str(tmp_path / name) and os.path.isfile(path)


@pytest.mark.parametrize("step", [1.0, np.float32(1), True, jnp.ones(()), np.arange(2), []])
def test_steps_that_are_none(step, tmp_path):
    with pytest.raises(TypeError, match=r"global_step must be an integer"):
        js.Saver().save(SMALL, tmp_path / "m", step)
    assert os.listdir(tmp_path) == []


SAVE_ERRORS = [
    ({}, "m", {}, ValueError, "No variables to save"),
    (
        SMALL,
        "no/m",
        {},
        ValueError,
        "Parent directory of .*no/m doesn't exist, can't save. Type os.makedirs",
    ),
    (SMALL, "", {}, ValueError, "ends in no name"),
    (SMALL, "m", {"latest_filename": "a/b"}, ValueError, "must not contain path comp"),
    (SMALL, "x", {"latest_filename": "x"}, ValueError, "collides with 'save_path'"),
    (SMALL, "checkpoint", {}, ValueError, "collides with 'save_path'"),
    (SMALL, "m", {"global_step": "zz"}, NotFoundError, "'zz' is not a variable; .*'v'"),
    (
        {"a": object()},
        "m",
        {},
        TypeError,
        "'a' is of the type object, which cannot be saved",
    ),
    ({"a": np.array([None])}, "m", {}, TypeError, "'a' has the dtype object"),
    ({"a/b": 1, "a": {"b": 2}}, "m", {}, ValueError, r"under one name: \['a/b'\]"),
    ({"../x": 1}, "m", {}, ValueError, r"cannot have the names \['../x'\]"),
    ({"a\ud800": 1}, "m", {}, ValueError, r"half a character \(surrogate\)"),
    ({"a": 2**70}, "m", {}, TypeError, "'a' has the dtype object"),
]


@pytest.mark.parametrize(("variables", "path", "options", "kind", "text"), SAVE_ERRORS)
def test_errors_of_save(variables, path, options, kind, text, tmp_path):
    with pytest.raises(kind, match=text):
        js.Saver().save(variables, os.path.join(tmp_path, path), **options)
    assert os.listdir(tmp_path) == []


def test_a_directory_in_the_way(tmp_path):
    (tmp_path / "m").mkdir()
    with pytest.raises(ValueError, match=r"m is a directory; give the path of a file"):
        js.Saver().save(SMALL, tmp_path / "m")


def test_traced_and_donated_variables_are_named(tmp_path):
    with pytest.raises(TypeError, match=r"'v' is being traced: save outside of jit"):
        jax.jit(lambda v: js.Saver().save({"v": v}, tmp_path / "m"))(1.0)
    x = jnp.ones(3)
    x.delete()
    with pytest.raises(ValueError, match=r"'x' was donated to a jitted function"):
        js.Saver().save({"x": x}, tmp_path / "m")
    assert os.listdir(tmp_path) == []


VAR_LISTS = [
    ("v", TypeError, "list of names, or a dict .* not str"),
    (5, TypeError, "not int"),
    (np.ones(2), TypeError, "not ndarray"),
    ([np.ones(2)], TypeError, "must hold names"),
    ({"a": 1}, TypeError, "must hold names, .* not 1"),
    ({1: "a"}, TypeError, "must hold names"),
    ([], ValueError, "No variables to save"),
    ({}, ValueError, "No variables to save"),
    (["a", "a"], ValueError, r"names \['a'\] twice"),
    (["a", "a:0"], ValueError, r"names \['a'\] twice"),
    ({"x": "a", "y": "a"}, ValueError, r"names \['a'\] twice"),
]


@pytest.mark.parametrize(("var_list", "kind", "text"), VAR_LISTS)
def test_errors_of_var_list(var_list, kind, text):
    with pytest.raises(kind, match=text):
        js.Saver(var_list)


def test_allow_empty(tmp_path):
    path = js.Saver([], allow_empty=True).save({"a": 1}, tmp_path / "m")
    assert js.Saver().restore(path) == {}


def test_var_list_chooses_and_renames(tmp_path):
    variables = {"enc": {"w": 1, "b": 2}, "dec": 3}
    path = js.Saver(["enc/w"]).save(variables, tmp_path / "list")
    assert js.Saver().restore(path) == {"enc/w": 1}
    path = js.Saver({"old": "enc", "d": "dec"}).save(variables, tmp_path / "dict")
    assert js.Saver().restore(path) == {"old/w": 1, "old/b": 2, "d": 3}
    template = {"enc": {"w": 0, "b": 0}, "dec": 0}
    renaming = js.Saver({"old": "enc"})
    assert renaming.restore(path, template) == {"enc": {"w": 1, "b": 2}, "dec": 0}
    assert renaming.restore(path) == {"enc/w": 1, "enc/b": 2}
    with pytest.raises(NotFoundError, match=r"hold no variables of the names \['zz'\]"):
        js.Saver(["zz"]).save(variables, tmp_path / "m")


@pytest.mark.parametrize("way", ["below", "rows", "touched"])
def test_many_names_take_linear_time(way, tmp_path):
    """A fourth of the variables take a fourth of the calls, not a sixteenth."""

    def calls(count):
        tree = {f"{i}": {"w": np.zeros((2, 1))} for i in range(count)}
        saver = js.Saver([*tree] if way == "below" else None)
        names, path = [f"{i}/w" for i in range(count)], saver.save(tree, tmp_path / "m")
        options = {"rows": {name: slice(1) for name in names}} if way == "rows" else {}
        profile = cProfile.Profile()
        if way == "touched":
            touched = dict.fromkeys(names, np.array([0]))
            profile.runcall(saver.save_delta, tree, tmp_path / "d", touched=touched)
        else:
            profile.runcall(saver.restore, path, **options)
        return sum(entry.callcount for entry in profile.getstats())

    calls(40)
    assert calls(400) < 6 * calls(100)


def test_a_long_var_list():
    start = time.process_time()  # a twentieth of a second, or ten if it were quadratic
    js.Saver([f"layers/{i}/w" for i in range(30_000)])
    assert time.process_time() - start < 3


def test_handles_and_names_of_tensorflow(tmp_path):
    """``Saver({"v": v})``: a handle stands for its name, also when its run is over."""
    savers = []

    def model():
        v = tf.get_variable("foo/v", [3])
        step = tf.Variable(5, name="step", trainable=False)
        savers.append((js.Saver({"old": v, "s": step}), js.Saver([v, step])))
        with pytest.raises(TypeError, match=r"not Variable"):
            js.Saver(v)
        with pytest.raises(ValueError, match=r"names \['foo/v'\] twice"):
            js.Saver([v, "foo/v:0"])
        return js.Saver().save({"v": v, "s": step}, tmp_path / "inside", global_step=step)

    model = tf.transform(model)
    variables = model.init(jax.random.key(0))
    renaming, listing = savers[0]
    path = renaming.save(variables, tmp_path / "m", global_step="step:0")
    assert path == str(tmp_path / "m-5")
    assert set(js.Saver().restore(path)) == {"old", "s"}
    restored = renaming.restore(path, jax.tree.map(jnp.zeros_like, variables))
    np.testing.assert_array_equal(restored["foo/v"], variables["foo/v"])
    assert set(renaming.restore(path)) == {"foo/v", "step"}
    for saver in (listing, js.Saver(["foo/v:0", "step:0"])):
        path = saver.save(variables, tmp_path / "list")
        assert set(js.Saver().restore(path)) == {"foo/v", "step"}
    path = js.Saver({"old": "foo/v:0"}).save(variables, tmp_path / "dict")
    assert set(js.Saver().restore(path)) == {"old"}
    path, _ = model.apply(variables)
    assert path == str(tmp_path / "inside-5")
    restored = js.Saver().restore(path)
    np.testing.assert_array_equal(restored["v"], variables["foo/v"])
    # A name that really ends so is itself.
    path = js.Saver(["v:0"]).save({"v:0": 1, "v": 2}, tmp_path / "literal")
    assert js.Saver(["v:0"]).restore(path, {"v:0": 0, "v": 0}) == {"v:0": 1, "v": 0}


# --- retention ------------------------------------------------------------------------


def test_keep_every_n_hours(tmp_path, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    saver = js.Saver(max_to_keep=1, keep_checkpoint_every_n_hours=1)
    for step, minutes in enumerate([10, 59, 61, 70, 119, 125, 130]):
        now[0] = 1000.0 + 60 * minutes
        saver.save(SMALL, tmp_path / "m", step)
    # Saved in the first hour: gone. The first one after each hour stays.
    assert checkpoints(tmp_path) == ["m-2", "m-5", "m-6"]
    assert basenames(saver.last_checkpoints) == ["m-6"]


def test_max_to_keep_negative_keeps_all(tmp_path):
    saver = js.Saver(max_to_keep=-1)
    for step in range(3):
        saver.save(SMALL, tmp_path / "m", step)
    assert saver.last_checkpoints == [] and len(checkpoints(tmp_path)) == 3


def test_last_checkpoints_is_a_copy(tmp_path):
    saver = js.Saver()
    saver.save(SMALL, tmp_path / "m")
    saver.last_checkpoints.clear()
    assert len(saver.last_checkpoints) == 1


def test_set_last_checkpoints_are_never_deleted(tmp_path):
    first = js.Saver()
    paths = [first.save(SMALL, tmp_path / "old", i) for i in range(2)]
    saver = js.Saver(max_to_keep=1)
    for wrong in (tuple(paths), paths[0], None):
        with pytest.raises(AssertionError, match=r"must be a list"):
            saver.set_last_checkpoints(wrong)
    saver.set_last_checkpoints(paths)
    saver.set_last_checkpoints(paths[:1])
    saver.save(SMALL, tmp_path / "new", 0)
    saver.save(SMALL, tmp_path / "new", 1)
    assert checkpoints(tmp_path) == ["new-1", "old-0", "old-1"]


@pytest.mark.parametrize("sharded", [False, True])
def test_recovered_checkpoints_are_deleted_in_turn(sharded, tmp_path):
    first = js.Saver(sharded=sharded)
    paths = [first.save(SMALL, tmp_path / "m", i) for i in range(4)]
    os.unlink(paths[1] + ("-00000-of-00001" if sharded else ""))
    saver = js.Saver(max_to_keep=3, sharded=sharded)
    saver.recover_last_checkpoints(paths)
    assert basenames(saver.last_checkpoints) == ["m-0", "m-2", "m-3"]
    saver.save(SMALL, tmp_path / "m", 4)
    assert checkpoints(tmp_path) == ["m-2", "m-3", "m-4"]


def test_write_state_false(tmp_path):
    saver = js.Saver()
    path = saver.save(SMALL, tmp_path / "m", write_state=False)
    assert os.listdir(tmp_path) == ["m"] and saver.last_checkpoints == []
    assert js.checkpoint.latest_checkpoint(tmp_path) is None
    np.testing.assert_array_equal(saver.restore(path)["v"], SMALL["v"])


@pytest.mark.parametrize("run", GOLDEN["write_state"], ids=lambda run: run["saves"])
def test_runs_of_tensorflow_with_write_state(run, tmp_path):
    """A step with a dash was saved with ``write_state=False``."""
    saver = js.Saver(max_to_keep=run["max_to_keep"])
    for step in run["saves"].split():
        wrote_state = not step.endswith("-")
        saver.save(SMALL, tmp_path / "m", int(step.strip("-")), write_state=wrote_state)
    assert checkpoints(tmp_path) == run["kept"].split()
    assert basenames(saver.last_checkpoints) == run["last_checkpoints"].split()


def test_two_savers_do_not_know_each_other(tmp_path):
    one, two = js.Saver(max_to_keep=1), js.Saver(max_to_keep=1)
    one.save(SMALL, tmp_path / "one", 1)
    two.save(SMALL, tmp_path / "two", 1)
    one.save(SMALL, tmp_path / "one", 2)
    assert checkpoints(tmp_path) == ["one-2", "two-1"]
    assert os.path.basename(js.checkpoint.latest_checkpoint(tmp_path)) == "one-2"


@pytest.mark.parametrize(("argument", "instead"), [
    ("builder", "sharded=True"), ("defer_build", "leave it out"),
    ("write_version", "leave it out"), ("filename", "give the path to save and restore"),
    ("max_to_kep", r"see help\(Saver\)"),
])  # fmt: skip
def test_arguments_that_only_tensorflow_has(argument, instead):
    with pytest.raises(TypeError, match=rf"has no argument '{argument}': .*{instead}"):
        js.Saver(**{argument: 1})


def test_restore_sequentially_and_the_order_of_arguments(tmp_path):
    """The order is TensorFlow's: after the name stands ``restore_sequentially``."""
    options = js.Saver(max_to_keep=2).as_saver_def()
    saver = js.Saver(None, False, False, 5, 10000.0, "save", True, options)
    assert saver.as_saver_def() == options
    path = saver.save({"v": 1}, tmp_path / "m")
    assert saver.restore(path) == {"v": 1}


def test_saver_def(tmp_path):
    saver = js.Saver(sharded=True, max_to_keep=2, keep_checkpoint_every_n_hours=3, name="s")
    options = saver.as_saver_def()
    assert (options.max_to_keep, options.sharded) == (2, True)
    assert options.keep_checkpoint_every_n_hours == 3
    again = js.Saver(saver_def=options, name="s")
    assert again.as_saver_def() == options
    assert js.Saver(max_to_keep=None).as_saver_def().max_to_keep == 0


# --- restoring ------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    variables = {
        "w": jnp.arange(6.0).reshape(2, 3),
        "n": jnp.arange(3),
        "key": jax.random.key(1),
        "word": "hello",
        "count": 3,
    }
    return js.Saver().save(variables, tmp_path / "m")


RESTORE_ERRORS = [
    ({"zz": 1}, NotFoundError, r"holds no \['zz'\]; it holds .*'w'"),
    (
        {"w": np.zeros((3, 2), np.float32)},
        ValueError,
        r"shape \(3, 2\) is wanted; Saver\(re",
    ),
    (
        {"w": jnp.zeros((2, 3), jnp.int32)},
        ValueError,
        r"float32\[2, 3\], but the dtype int32",
    ),
    ({"w": "text"}, ValueError, "but a Python str is wanted"),
    ({"w": jax.random.key(0)}, ValueError, "but random keys"),
    (
        {"key": jnp.zeros(2, jnp.uint32)},
        ValueError,
        r"saved as random keys \(fry\)|\(threefry",
    ),
    ({"word": 3}, ValueError, "'word' was saved as a Python str"),
    ({"count": 3.0}, ValueError, "'count' was saved as int64"),
]


@pytest.mark.parametrize(("template", "kind", "text"), RESTORE_ERRORS)
def test_errors_of_restore(template, kind, text, saved):
    with pytest.raises(kind, match=text):
        js.Saver().restore(saved, template)


def test_all_misfits_are_told_at_once(saved):
    with pytest.raises(ValueError, match=r"'n' was saved as .*; 'w' was saved as "):
        js.Saver().restore(saved, {"w": jnp.zeros(1), "n": jnp.zeros(3)})


def test_errors_of_paths(tmp_path):
    with pytest.raises(ValueError, match=r"Can't load save_path when it is None\. The fol"):
        js.Saver().restore(None)
    for path in (tmp_path / "no", tmp_path, tmp_path / "no" / "m"):
        with pytest.raises(ValueError, match=r"The passed save_path is not a valid checkp"):
            js.Saver().restore(path)
    with pytest.raises(ValueError, match=r"\(a folder\): .*latest_checkpoint\('/"):
        js.Saver().restore(tmp_path)
    table = js.HostTable((2, 1), js.sgd(0.1))
    with pytest.raises(TypeError, match=r"HostTable, which cannot .*: table\.save\(path\)"):
        js.Saver().save({"table": table}, tmp_path / "m")
    (tmp_path / "tf.index").write_text("")
    with pytest.raises(ValueError, match=r"it has TensorFlow's own format"):
        js.Saver().restore(tmp_path / "tf")


def test_reshape(saved):
    saver = js.Saver(reshape=True)
    template = {"w": jnp.zeros((3, 2)), "n": np.zeros((3, 1), np.int32)}
    restored = saver.restore(saved, template)
    np.testing.assert_array_equal(restored["w"], np.arange(6.0).reshape(3, 2))
    assert restored["n"].shape == (3, 1) and isinstance(restored["n"], np.ndarray)
    with pytest.raises(ValueError, match=r"the number of elements differs"):
        saver.restore(saved, {"w": jnp.zeros(5)})


def test_a_part_is_restored(saved):
    assert js.Saver().restore(saved, {"count": 0}) == {"count": 3}
    assert js.Saver().restore(saved, {"count": jnp.int32(0)}) == {"count": 3}


def test_relative_directories(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkdir("d")
    assert js.Saver().save(SMALL, "m", 1) == "m-1"
    assert js.checkpoint.latest_checkpoint(".") == "./m-1"
    js.Saver().save(SMALL, "d/m", 2)
    assert 'model_checkpoint_path: "m-2"\n' in (tmp_path / "d/checkpoint").read_text()
    assert js.checkpoint.latest_checkpoint("d") == "d/m-2"
    assert js.Saver().restore("d/m-2")["v"].shape == (3,)


@pytest.mark.parametrize("saver", [js.Saver, tf.train.Saver])
def test_a_run_goes_on_in_a_folder_that_was_moved(saver, tmp_path):
    """The loop of docs/checkpoints.md, in folders of absolute paths."""
    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    saver(sharded=True, max_to_keep=2).save(SMALL, before / "m", 99)
    first = saver(max_to_keep=2)
    first.recover_last_checkpoints([before / "m-99"])
    first.save(SMALL, before / "m", 100)
    os.rename(before, after)
    assert js.checkpoint.latest_checkpoint(after) == str(after / "m-100")
    state = js.checkpoint.get_checkpoint_state(after)
    assert state.all_model_checkpoint_paths == [str(after / f"m-{i}") for i in (99, 100)]
    second = saver(max_to_keep=2)
    second.recover_last_checkpoints(state.all_model_checkpoint_paths)
    second.save(SMALL, after / "m", 110)
    assert checkpoints(after) == ["m-100", "m-110"]
    absolute = str(tmp_path) in (after / "checkpoint").read_text()
    assert absolute == (saver is tf.train.Saver)


def test_what_another_saver_has_saved_since_is_not_deleted(tmp_path):
    """One saver's turn to delete a path comes when it is the other's newest."""
    one, other = js.Saver(max_to_keep=2), js.Saver()
    numbers = {"a": np.arange(3.0)}
    shared = one.save(numbers, tmp_path / "m")
    one.save(numbers, tmp_path / "m", 1)
    other.save({"a": np.ones(3)}, tmp_path / "m")
    one.save(numbers, tmp_path / "m", 2)  # evicts "m"
    np.testing.assert_array_equal(js.Saver().restore(shared)["a"], np.ones(3))
    one.save(numbers, tmp_path / "m", 3)
    assert not (tmp_path / "m-1").exists()
