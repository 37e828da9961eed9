"""One call of the system fails, or ends early: nothing is lost, and nothing hangs."""

import contextlib
import itertools
import os
import shutil
import warnings

import pytest
from disks import FAILURES, failing
from test_host_table_faults import check_whole, opened, step
from test_keyed_host_table import MAP
from test_power_failures import fast_disk, holds, values

import jslices as js

assert fast_disk
#: Every so many calls fail.
STRIDES = pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.slow)])


def failures(stride):
    """Calls, and each kind of failure in its turn: two for every call, or one for some."""
    kinds = itertools.cycle(FAILURES)
    for number in itertools.count(0, stride):
        for _ in range(2 if stride == 1 else 1):
            yield number, next(kinds)


def check_error(error, failure, hit):
    """Raises what did not come from the call, and what names no file."""
    expected = {MemoryError: MemoryError, "late": TimeoutError}.get(failure, OSError)
    if not isinstance(error, expected):
        raise error
    if type(failure) is int:
        assert error.filename, (hit, repr(error))


@STRIDES
@pytest.mark.parametrize(
    "options", [{}, {"overlap": True}, {"keyed": MAP}], ids=["plain", "overlap", "keyed"]
)
def test_a_table_on_a_failing_disk(stride, options, tmp_path, monkeypatch):
    def train(path):
        yield 0
        table = opened(path, **options)
        tables.append(table)
        for steps in (1, 2):
            yield steps
            step(table)
            table.flush()
        yield 2
        table.save(path.with_name("copy"))
        table.restore(path.with_name("copy"))
        yield 3
        step(table)
        table.close()
        with opened(path, **options) as table:
            pass

    for number, failure in failures(stride):
        tables, steps = [], 0
        folder = tmp_path / "now"
        folder.mkdir()
        try:
            with failing(monkeypatch, number, failure) as hit, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of locks
                for steps in train(folder / "table"):  # noqa: B007
                    pass
        except Exception as error:
            check_error(error, failure, hit)
            allowed = {max(steps - 1, 0), steps}
        else:
            allowed = {3}
        for table in tables:
            with contextlib.suppress(js.errors.FailedPreconditionError):  # closed
                steps = check_whole(table)
                assert steps in allowed
                step(table)
                allowed = {steps + 1}
            with contextlib.suppress(OSError):  # an fsync that failed
                table.close()
        with opened(folder / "table", **options) as table:
            assert check_whole(table) in allowed
            table.save(folder / "copy")  # cleans up
        # A handler may leave a descriptor, and with it a lock, until the process ends.
        left = {*os.listdir(folder)} - {"table", "copy"}
        assert failure == "late" or not left, (number, failure, hit)
        shutil.rmtree(folder)
        if not hit:
            break


def save_some(folder, sharded):
    saver = js.Saver(max_to_keep=1, sharded=sharded)
    for number in range(3):
        yield number
        save = saver.save_delta if number == 1 and not sharded else saver.save
        save(values(number, 2 if sharded else 1), folder / "m", number)


@STRIDES
@pytest.mark.parametrize("sharded", [False, True])
def test_a_saver_on_a_failing_disk(stride, sharded, tmp_path, monkeypatch):
    folder = tmp_path / "now"
    for number, failure in failures(stride):
        folder.mkdir()
        try:
            with failing(monkeypatch, number, failure) as hit:
                for last in save_some(folder, sharded):  # noqa: B007
                    pass
        except Exception as error:
            check_error(error, failure, hit)
            allowed = {last - 1 if last else None, last}
        else:
            allowed = {2}
        path = js.checkpoint.latest_checkpoint(folder)
        now = None if path is None else holds(path)
        assert now in allowed, (number, failure, hit)
        saver = js.Saver(max_to_keep=1)
        saver.recover_last_checkpoints([] if path is None else [path])
        assert holds(saver.save(values(9), folder / "m", 9)) == 9
        shutil.rmtree(folder)
        if not hit:
            break
