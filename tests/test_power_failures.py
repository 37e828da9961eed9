"""Power failures: what was flushed or saved is there, whole, or an error says what is lost.

A scenario is run once and recorded (``disks.py``); then what many power failures leave of
it is opened. A failure prints what was kept.
"""

import functools
import itertools
import os
import random
import shutil

import jax
import numpy as np
import pytest
from disks import Promise, RecordedDisk, check_failures
from helpers import slow_unless
from test_host_table_faults import TX, Lines, V, add, check_whole, on_another_boot, step
from test_keyed_host_table import BATCHES, MAP, keyed, owners
from test_keyed_host_table import step as keyed_step

import jslices as js

D = 300  # then a table has some pages
IDS = (2, 5, 11, 17)
#: How many power failures of a scenario.
COUNTS = pytest.mark.parametrize("count", [6, pytest.param(200, marks=pytest.mark.slow)])


@pytest.fixture(autouse=True)
def fast_disk(monkeypatch):
    """What is opened after a failure is not flushed."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(os, "sync", lambda: None)


def opened(path, rows=V, **options):
    return js.HostTable((rows, D), TX, path, **options)


def train(disk, table, flushed, count, act=step):
    """Some steps after those that were flushed; returns how many there are."""
    for steps in range(flushed + 1, flushed + count + 1):
        disk.promise(*range(flushed, steps + 1), loss=True)
        act(table, IDS)
    return flushed + count


def flushed(disk, table, steps):
    table.flush()
    disk.promise(steps)
    return steps


# --- host tables ----------------------------------------------------------------------


def steps_of_a_table(disk, folder, overlap=False):
    """Flushed, closed, opened again."""
    disk.promise(None, 0)
    table = opened(folder / "table", overlap=overlap)
    disk.promise(0)
    steps = flushed(disk, table, 0)
    for count in (1, 2, 3):
        steps = flushed(disk, table, train(disk, table, steps, count))
    steps = train(disk, table, steps, 2)
    table.close()
    disk.promise(steps)
    with opened(folder / "table", overlap=overlap) as table:
        flushed(disk, table, steps)
        train(disk, table, steps, 1)
    disk.promise(steps + 1)


def copies_of_a_table(disk, folder):
    """Grown, restored, saved over."""
    disk.promise(None, 0)
    table = opened(folder / "table")
    disk.promise(0)
    steps = flushed(disk, table, train(disk, table, 0, 2))
    table.grow(V + 5)
    disk.promise(steps)
    with opened(None, V + 5) as other:
        for _ in range(7):
            step(other, IDS)
        other.save(folder / "copy")
    disk.promise(steps, 7)
    table.restore(folder / "copy")
    disk.promise(7)
    steps = train(disk, table, 7, 2)
    table.grow(V + 6)
    flushed(disk, table, steps)
    table.close()
    with opened(None, V + 6) as other:
        step(other, IDS)
        disk.promise(1, steps)
        other.save(folder / "table")
    disk.promise(1)


def changed_rows(disk, folder):
    """Reset, and written."""
    disk.promise(None, 0)
    table, now = opened(folder / "table"), 0
    for then, change in (
        (1, lambda: step(table, IDS)),
        (0, lambda: table.reset(IDS)),
        (7, lambda: table.write(IDS, np.full((len(IDS), D), 7, "f4"), TX.init(0))),
        (0, lambda: table.reset(IDS)),
        (1, lambda: step(table, IDS)),
    ):
        disk.promise(now, then, loss=True)
        change()
        flushed(disk, table, then)
        now = then
    table.close()


def keyed_rows(disk, folder):
    """Ids that take rows of others, and lose theirs."""
    now = 0, frozenset()
    disk.promise(None, now)
    with keyed(None) as model, keyed(folder / "table", row=(D,)) as table:
        for change in (
            *(functools.partial(keyed_step, ids=ids) for ids in BATCHES[:2]),
            lambda table: table.evict(BATCHES[1]),
            functools.partial(keyed_step, ids=BATCHES[2]),
        ):
            change(model)
            then = owners(model)
            disk.promise(now, then, loss=True)
            change(table)
            now = flushed(disk, table, then)


def start_anew(folder):
    """Lets journals be of another start of the machine."""
    for journal in folder.rglob("*-journal"):
        if journal.exists() and not journal.is_symlink():
            journal.write_bytes(on_another_boot(journal.read_bytes()))


def value_of_rows(table, ids):
    rows = table.read(np.arange(V))
    assert not np.delete(rows, ids, 0).any()
    (value,) = {*rows[list(ids)].ravel().tolist()}
    return value


def check_table(folder, promise, read=check_whole, **options):
    """All steps that were flushed are there, or an error says that some are mixed."""
    start_anew(folder)
    path = folder / "table"
    if not path.exists():
        assert None in promise.values
        return
    text = path.read_bytes()[:4096]
    rows = next((n for n in (V + 5, V + 6) if b'"rows": %d,' % n in text), V)
    try:
        with opened(path, rows, **options) as table:
            assert read(table, IDS) in promise.values
            table.save(folder / "copy")  # cleans up
    except js.errors.DataLossError as error:
        assert promise.loss and str(path) in str(error)
    else:
        assert {*os.listdir(folder)} == {"table", "copy", "other"}


def both(folder, overlap=False):
    paths = {"user": folder / "table", "item": folder / "other" / "table"}
    made = {name: opened(path, overlap=overlap) for name, path in paths.items()}
    return js.HostTable.together(made)


def step_both(tables, ids):
    rows, _ = tables.fetch(dict.fromkeys(("user", "item"), np.array(ids)))
    tables.store({name: add(x) for name, x in rows.items()})


def two_tables(disk, folder, overlap=False):
    disk.promise(None, 0)
    steps = 0
    for _ in range(2):
        tables = both(folder, overlap)
        disk.promise(steps)
        for count in (1, 2):
            steps = flushed(disk, tables, train(disk, tables, steps, count, step_both))
        steps = train(disk, tables, steps, 1, step_both)
        tables.close()
        disk.promise(steps)


ORDERS = itertools.cycle([("table", "other/table"), ("other/table", "table")])


def check_two(folder, promise):
    """Whichever is opened first."""
    start_anew(folder)
    steps = set()
    for path in (folder / name for name in next(ORDERS)):
        if not path.exists():
            assert None in promise.values
            continue
        try:
            with opened(path) as table:
                steps.add(check_whole(table, IDS))
        except js.errors.DataLossError as error:
            assert promise.loss and str(path) in str(error)
        else:
            assert {*os.listdir(path.parent)} <= {"table", "other"}
    assert len(steps) < 2 and steps <= {*promise.values}


def reopen(disk, folder, promise, make=lambda x: opened(x / "table"), act=step):
    """After a kill."""
    with make(folder) as table:
        steps = table.steps
        assert steps in promise.values
        flushed(disk, table, steps)
        steps = train(disk, table, steps, 2, act)
    disk.promise(steps)


reopen_both = functools.partial(reopen, make=both, act=step_both)


# --- savers ---------------------------------------------------------------------------


def values(number, shards=1):
    table = np.full((600, 4), number, np.float32)
    if shards > 1:
        mesh = jax.make_mesh((shards,), ("x",), devices=jax.devices()[:shards])
        table = jax.device_put(table, jax.NamedSharding(mesh, jax.P("x")))
    return {"table": table, "bias": np.full(7, number), "number": number}


def holds(path):
    """The number of a checkpoint, the same in all of it."""
    read = js.Saver().restore(path)
    assert {np.shape(x) for x in read.values()} == {(600, 4), (7,), ()}
    (number,) = {float(y) for x in read.values() for y in np.ravel(x)}
    return number


def saves(disk, folder, kind):
    saver = js.Saver(max_to_keep=1, sharded=kind == "shards")
    for number in range(5):
        path, tree = folder / "m", values(number, 2 if kind == "shards" else 1)
        act = functools.partial(saver.save, tree, path, number)
        if kind == "deltas" and number % 3:
            act = functools.partial(saver.save_delta, tree, path, number)
        elif kind == "at one path":  # shards take the place of others, and of a single file
            shards = [2, 2, 3, 1, 2][number]
            save = js.Saver(sharded=shards > 1).save
            act = functools.partial(save, values(number, shards), path)
        elif kind == "state files":
            saved = js.Saver().save(tree, path, number, write_state=False)
            act = functools.partial(js.checkpoint.update_checkpoint_state, folder, saved)
        disk.promise(number - 1 if number else None, number)
        act()
        disk.promise(number)


def check_saved(folder, promise):
    """The last checkpoint whose save returned is there, or the one after it."""
    path, saver = js.checkpoint.latest_checkpoint(folder), js.Saver(max_to_keep=1)
    assert (None if path is None else holds(path)) in promise.values
    saver.recover_last_checkpoints([] if path is None else [path])
    assert holds(saver.save(values(99), folder / "m", 99)) == 99
    assert not [name for name in os.listdir(folder) if name.endswith(".tmp")]


def save_on(disk, folder, promise):
    """After a kill."""
    path, saver = js.checkpoint.latest_checkpoint(folder), js.Saver(max_to_keep=1)
    saver.recover_last_checkpoints([] if path is None else [path])
    disk.promise(*promise.values, 99)
    saver.save(values(99), folder / "m", 99)
    disk.promise(99)


# --- power failures -------------------------------------------------------------------


def record(monkeypatch, folder, scenario, before=()):
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "other").mkdir(parents=True)
    disk = RecordedDisk(folder, before)
    with disk.recording(monkeypatch), Lines(disk.observe):
        scenario(disk, folder)
    return disk.log


#: What is done, how it is checked, and what is done after a kill.
SCENARIOS = {
    "steps": (steps_of_a_table, check_table, reopen),
    "overlap": (functools.partial(steps_of_a_table, overlap=True), check_table, reopen),
    "copies": (copies_of_a_table, check_table, None),
    "rows": (changed_rows, functools.partial(check_table, read=value_of_rows), None),
    "keyed": (keyed_rows, functools.partial(check_table, read=owners, keyed=MAP), None),
    "two": (two_tables, check_two, reopen_both),
    "two, overlap": (functools.partial(two_tables, overlap=True), check_two, reopen_both),
}
for kind in ("full", "deltas", "shards", "at one path", "state files"):
    SCENARIOS[kind] = functools.partial(saves, kind=kind), check_saved, save_on


#: More than a second each.
SLOW = "keyed", "two", "two, overlap"


def scenarios(names):
    return slow_unless(((name,) for name in names), lambda case: case[0] not in SLOW)


@COUNTS
@pytest.mark.parametrize(["name"], scenarios(SCENARIOS))
def test_power_failures(name, count, tmp_path, monkeypatch):
    scenario, check, _ = SCENARIOS[name]
    log = record(monkeypatch, tmp_path / "now", scenario)
    check_failures(log, tmp_path / "now", check, count)


@COUNTS
@pytest.mark.parametrize(["name"], scenarios(n for n, x in SCENARIOS.items() if x[2]))
def test_power_failures_after_a_kill(name, count, tmp_path, monkeypatch):
    scenario, check, go_on = SCENARIOS[name]
    log, draw = record(monkeypatch, tmp_path / "now", scenario), random.Random(0)
    start = next(i for i, x in enumerate(log) if isinstance(x, Promise))
    for end in (draw.randrange(start, len(log)) + 1 for _ in range(max(2, count // 20))):
        promise = next(x for x in log[end - 1 :: -1] if isinstance(x, Promise))
        then = functools.partial(go_on, promise=promise)
        both = record(monkeypatch, tmp_path / "now", then, log[:end])
        check_failures(both, tmp_path / "now", check, 10, start=end)
