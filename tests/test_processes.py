"""Several real processes: trained and saved as by one, restored by any number of them.

And what becomes of the others where one of them fails, dies or stops.
"""

import contextlib
import functools
import io
import json
import os
import signal
import socket
import time

import jax
import numpy as np
import pytest
from forked import Origin
from helpers import assert_close
from quick_flags import quick_flags
from several_processes import PLACEMENTS, keyed_batch, on_one_device, page, resume

import jslices as js
from jslices import dynamic

#: What ``jax.distributed.initialize`` is told where a process dies.
HEARTBEAT = {"heartbeat_timeout_seconds": 6}
WAYS = [*((placement, None) for placement in PLACEMENTS), ("rows", "all_to_all")]


@functools.cache
def origin():
    """What the processes of all tests are forked from."""
    return Origin("several_processes")


@pytest.fixture(scope="module", autouse=True)
def _origin_ends():
    yield
    if origin.cache_info().currsize:
        with origin():
            origin.cache_clear()


@contextlib.contextmanager
def started(count, devices, function, options=None, **arguments):
    """So many processes with so many devices."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = f"{quick_flags()} --xla_force_host_platform_device_count={devices}"
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                origin().forked(
                    "be_one",
                    {"XLA_FLAGS": flags},
                    number=number,
                    count=count,
                    port=port,
                    function=function,
                    arguments=arguments,
                    options=options or {},
                )
            )
            for number in range(count)
        ]


def reports(lines):
    """What a process has printed; other lines are of Gloo."""
    return [json.loads(line) for line in lines if line[0] == "{"]


def run(count, devices, function, **arguments):
    """What each of several processes prints."""
    with started(count, devices, function, **arguments) as running:
        for process in running:
            code = process.wait(timeout=120)
            assert code == 0, process.errors()
        return [reports(process.lines()) for process in running]


# --- training, saving, restoring ------------------------------------------------------


def check_training(directory, count, devices, ways):
    """Losses and checkpoints are those of one device, whatever the way."""
    printed = run(count, devices, "train_and_save", directory=directory, ways=ways, steps=2)
    said = [report for (report,) in printed]
    wanted, losses = on_one_device(2)
    whole = js.Saver().restore(js.Saver().save(wanted, f"{directory}/one"))
    for way in (f"{placement}-{plan}" for placement, plan in ways):
        assert [one[way] for one in said] == [said[0][way]] * count
        np.testing.assert_allclose(said[0][way], losses, rtol=1e-5)
        restored = js.Saver().restore(f"{directory}/{way}")
        assert jax.tree.structure(restored) == jax.tree.structure(whole)
        assert_close(jax.device_get(restored), jax.device_get(whole), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_two_processes_train_and_save_as_one_and_three_restore_it(tmp_path):
    check_training(str(tmp_path), 2, 2, WAYS)
    saved = [("rows", "all_to_all"), ("columns", None)]
    names = [(f"{way}-{plan}", lies) for way, plan in saved for lies in PLACEMENTS]
    run(3, 1, "copy", directory=str(tmp_path), names=names)
    wanted, _ = on_one_device(2)
    for name, placement in names:
        restored = js.Saver().restore(f"{tmp_path}/{name}-{placement}-3", wanted)
        assert_close(jax.device_get(restored), jax.device_get(wanted), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_rows_travel_between_three_processes(tmp_path):
    ways = [("rows", plan) for plan in ("all_to_all", "gather")]
    check_training(str(tmp_path), 3, 1, ways)


@pytest.mark.slow
def test_leaves_of_all_kinds_are_written_once(tmp_path):
    (first,), (second,) = run(2, 2, "all_kinds", directory=str(tmp_path))
    assert first["path"] == second["path"] and first["name"] == "process 0"


@pytest.mark.slow
def test_the_page_of_docs_is_true_for_several_processes(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    wanted = page(str(tmp_path / "one"))
    assert len(set(wanted["losses"])) == 4
    for (said,) in run(2, 4, "page", directory=str(tmp_path / "two")):
        np.testing.assert_allclose(said["losses"], wanted["losses"], rtol=1e-6)


@pytest.mark.slow
def test_a_map_of_ids_is_that_of_one_process():
    both = run(2, 2, "keyed", steps=3)
    ids, rows = dynamic.id_map(32, devices=4), []
    for step in range(3):
        ids, out = ids.admit(dynamic.wide_ids(keyed_batch(step)))
        rows.append(out.rows.tolist())
    for (said,) in both:
        assert said["rows"] == rows
        assert said["owners"] == [x.tolist() for x in ids.export()]
        assert "only a part of the map; gather it first" in said["refused"]


# --- one of them fails ----------------------------------------------------------------


#: What the process says that fails, or all of them where they disagree.
FAILURES = {
    "an unsaveable leaf": "TypeError: 'a' is of the type object, which cannot be saved",
    "no such directory": "ValueError: Parent directory of ",
    "a path that is taken": "is a directory; give the path of a file",
    "a full disk": "m-1 was not saved, and what was saved before is as it was",
    "no checkpoint": "ValueError: Can't load save_path when it is None.",
}
DISAGREEMENTS = {
    "another directory": "process 1 does not find in ",
    "another name": "to save; give all processes one path and global_step",
    "one variable more": "has 9 variables to save (digest ",
    "another shape": "arrays that are spread over them with the same shape",
    "a damaged shard": "DataLossError: ",
    "another one": "give all processes the path of one checkpoint",
}


@pytest.mark.slow
def test_a_process_fails_to_save_or_restore(tmp_path):
    """All raise, none waits, nothing is left, and the former checkpoint is as it was."""
    directory, other = tmp_path / "m", tmp_path / "other"
    for path in (directory, other / "elsewhere", other / "m-1"):
        path.mkdir(parents=True)
    printed = run(2, 1, "failing", directory=str(directory), other=str(other))
    for own, (report,) in enumerate(printed):
        for case, said in report["said"].items():
            name, number = case.split(", ")
            assert said is not None, case
            assert (FAILURES | DISAGREEMENTS)[name] in said
            if name in FAILURES:
                is_told = said.startswith(f"OSError: process {number} of 2 has failed: ")
                assert is_told == (own != int(number)), said
        shards = ["m-0-00000-of-00002", "m-0-00001-of-00002"]
        assert report["seen"] == [["checkpoint", *shards]] * 16
        assert report["at last"] == sorted(os.listdir(directory))
    assert [name for name in os.listdir(directory) if name.endswith(".tmp")] == []
    assert os.listdir(other / "elsewhere") == []


# --- one of them dies or stops --------------------------------------------------------


STEPS = 5


def resumed(directory, count, plan):
    """Goes on, and compares the losses with an undisturbed run.

    Two or more are new processes; one is this process, on all of its devices.
    """
    arguments = {"directory": str(directory), "plan": plan, "until": STEPS}
    if count == 1:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            resume(**arguments)
        steps = reports(out.getvalue().splitlines())
    else:
        steps, *others = run(count, 1, "resume", **arguments)
        assert others == [steps] * (count - 1)
    _, losses = on_one_device(STEPS)
    first = steps[0]["step"]
    assert [step["step"] for step in steps] == [*range(first, STEPS)]
    np.testing.assert_allclose([s["loss"] for s in steps], losses[first:], rtol=1e-5)
    assert not [name for name in os.listdir(directory) if name.endswith(".tmp")]
    return first


def others_end(directory, count, fate, process, options=None, **arguments):
    """How long the others live after what one meets in step 2, in seconds; their errors."""
    arguments |= {"directory": str(directory), "until": 1000, "step": 2}
    arguments |= {"fate": fate, "process": process}
    with started(count, 1, "resume", options, plan="all_to_all", **arguments) as running:
        victim = running.pop(process)
        for other in running:
            assert other.wait(timeout=120) != 0
        ended = time.time()
        if fate in ("stopped", "asleep"):
            victim.kill()
        else:
            assert victim.wait(timeout=1) == -signal.SIGKILL
        (met,) = (line["met"] for line in reports(victim.lines()) if "met" in line)
        return ended - met, [other.errors() for other in running]


@pytest.mark.slow
@pytest.mark.parametrize(
    "count, fate, process, done, later",
    [
        (3, "killed", 1, 2, 2),
        (2, "killed", 0, 2, 1),  # whom the others ask who is there
        (2, "killed as it writes", 1, 2, 1),
        (2, "killed as it renames", 0, 3, 1),
    ],
)
def test_processes_are_killed_and_training_goes_on(
    tmp_path, count, fate, process, done, later
):
    seconds, errors = others_end(tmp_path, count, fate, process, HEARTBEAT)
    assert seconds < 10
    if (fate, process) == ("killed", 1):
        assert any("Gloo" in error for error in errors)
    if process and fate == "killed as it writes":
        assert any("which may have died" in error for error in errors)
    assert resumed(tmp_path, later, "all_to_all" if process else "gather") == done


@pytest.mark.slow
@pytest.mark.parametrize("process", [0, 1])
def test_heartbeats_miss_a_stopped_process(tmp_path, process):
    seconds, _ = others_end(tmp_path, 2, "stopped", process, HEARTBEAT)
    assert seconds < 10


@pytest.mark.slow
def test_a_process_that_waits_too_long_ends_itself(tmp_path):
    """The recipe of docs/sharding.md, also where heartbeats go on."""
    seconds, errors = others_end(tmp_path, 2, "asleep", 1, patience=8)
    assert 4 < seconds < 10
    assert "Timeout (0:00:08)!" in errors[0] or "Connection closed" in errors[0]
    assert resumed(tmp_path, 1, None) == 2
