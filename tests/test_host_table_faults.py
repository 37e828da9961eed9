"""Faults of real machines: whole steps in host tables, or an error that names the file.

A tracing hook interrupts functions at each line at which this can make a difference. A copy
of the files at a line is what a kill would leave there.
"""

import contextlib
import dis
import errno
import fcntl
import functools
import json
import mmap
import os
import pathlib
import shutil
import signal
import struct
import subprocess
import sys
import threading
import zlib

import jax
import numpy as np
import pytest

import jslices as js
from jslices._host_table import records as storage
from jslices.errors import DataLossError, FailedPreconditionError

pytestmark = pytest.mark.filterwarnings(  # after an interrupt, and beside another thread
    "ignore:the rows that were fetched before:UserWarning"
)
V, D = 20, 3
TX = js.sgd(0.5)
FOLDER = os.path.join(os.path.dirname(js.__file__), "_host_table")
EVERY = np.arange(V)


@functools.partial(jax.jit, static_argnums=1)
def add(rows, amount=1):
    """Adds an amount to all rows that were fetched."""
    table, state = rows.unpack()
    return rows.pack(table + amount, state)


def step(table, ids=(2, 3, 5), amount=1):
    rows, _ = table.fetch(np.array(ids))
    table.store(add(rows, amount))


def opened(path, rows=V, **options):
    return js.HostTable((rows, D), TX, path, **options)


def check_whole(table, ids=(2, 3, 5)):
    """What every step adds to is the number of steps; returns that."""
    steps, rows = table.steps, table.read(EVERY)
    assert (rows[list(ids)] == steps).all()
    assert not np.delete(rows, list(ids), 0).any()
    return steps


class Lines:
    """Calls a function with the frame at each line that the library's own files run."""

    def __init__(self, action, only=None):
        self.action, self.only, self.count = action, only, 0

    def _line(self, frame, event, _):
        if event == "line":
            self.count += 1
            if self.only is None or self.count == self.only:
                with suspended():
                    self.action(frame)
        return self._line

    def _call(self, frame, event, argument):
        name = frame.f_code.co_filename
        return self._line if name.startswith(FOLDER) else None

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, kind, *_):
        sys.settrace(self.before)
        return kind is KeyboardInterrupt


@contextlib.contextmanager
def suspended():
    trace = sys.gettrace()
    sys.settrace(None)
    try:
        yield
    finally:
        sys.settrace(trace)


class UnflushedMap(mmap.mmap):
    def flush(self, *_):
        pass


@pytest.fixture(autouse=True)
def fast_disk(monkeypatch):
    """Kills lose nothing that was written."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(os, "sync", lambda: None)
    monkeypatch.setattr(mmap, "mmap", UnflushedMap)


#: All lines that differ, or some of them, of tables of each kind.
STRIDES = pytest.mark.parametrize("stride", [11, pytest.param(1, marks=pytest.mark.slow)])
STRIDES_AND_KINDS = pytest.mark.parametrize(
    "stride, file, overlap",
    [
        (11, True, True),
        pytest.param(1, True, True, marks=pytest.mark.slow),
        pytest.param(1, False, False, marks=pytest.mark.slow),
    ],
)


def interruptions(do, stride, folder):
    """Runs ``do(interrupted)`` with an interrupt at each line in it (or some) that differs.

    At two lines in a row it has the same effect if between them nothing changes in the
    folder or in the library's objects, and if the same handlers of exceptions see it.
    """
    differ, last, hit = [], None, []

    def interrupt(frame):
        hit.append(frame.f_lineno)
        raise KeyboardInterrupt

    def compare(frame):
        nonlocal last
        now = contents(folder), objects(frame), handlers(frame)
        if now != last:
            differ.append(lines.count)
        last = now

    do(contextlib.nullcontext)  # some lines run once, as they compile something
    lines = Lines(compare)
    do(lambda: lines)
    for line in differ[::stride]:
        do(functools.partial(Lines, interrupt, line))
    assert len(hit) > 0.9 * len(differ[::stride])


def contents(folder):
    """What is in the files below a folder, and where links lead."""
    paths = [path for path in pathlib.Path(folder).rglob("*") if not path.is_dir()]
    return {x: os.readlink(x) if x.is_symlink() else x.read_bytes() for x in paths}


def stack(frame):
    """A frame and those that called it."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def objects(frame):
    """The attributes of the library's objects that functions have at hand."""
    found = {}

    def state(x):
        if isinstance(x, np.ndarray):
            return x.tobytes()
        if isinstance(x, list | tuple):
            return [state(y) for y in x]
        if isinstance(x, bool | int | str | type(threading.RLock())):
            return repr(x)
        if is_own(x) and id(x) not in found:
            found[id(x)] = [getattr(x, "closed", None)]  # no variable of files
            found[id(x)] += [(name, state(value)) for name, value in vars(x).items()]
        return id(x)

    def is_own(x):
        return type(x).__module__.startswith("jslices._host_table")

    for caller in stack(frame):
        if caller.f_code.co_filename.startswith(FOLDER):
            state([x for x in caller.f_locals.values() if is_own(x)])
    return found


def handlers(frame):
    """Where the functions that run go on after an exception."""
    return [
        (f.f_code, entry.target)
        for f in stack(frame)
        for entry in entries(f.f_code)
        if entry.start <= f.f_lasti < entry.end
    ]


@functools.cache
def entries(code):
    return dis.Bytecode(code).exception_entries


# --- Ctrl-C ---------------------------------------------------------------------------


@STRIDES_AND_KINDS
def test_interrupted_steps_are_whole(stride, tmp_path, file, overlap):
    numbers = iter(range(10_000))

    def do(interrupted):
        path = tmp_path / str(next(numbers)) if file else None
        table = opened(path, overlap=overlap)
        step(table)
        with interrupted():
            step(table)
        assert (steps := check_whole(table)) in (1, 2)
        step(table)
        if file:
            table.close()
            table = opened(path)
        assert check_whole(table) == steps + 1
        table.close()

    interruptions(do, stride, tmp_path)


@STRIDES
def test_interrupted_close(stride, tmp_path):
    numbers = iter(range(10_000))

    def do(interrupted):
        path = tmp_path / str(next(numbers))
        table = opened(path, overlap=True)
        step(table)
        step(table)
        with interrupted():
            table.close()
        table.close()
        with opened(path) as table:
            assert check_whole(table) == 2

    interruptions(do, stride, tmp_path)


@STRIDES
def test_a_with_block_that_is_interrupted_closes_whole(stride, tmp_path):
    numbers = iter(range(10_000))

    def do(interrupted):
        path = tmp_path / str(next(numbers))
        with interrupted(), opened(path) as table:
            step(table)
            step(table)
        with contextlib.suppress(UnboundLocalError):
            del table  # where an interrupt hit before it could be closed
        with opened(path) as table:
            check_whole(table)

    interruptions(do, stride, tmp_path)


@STRIDES_AND_KINDS
@pytest.mark.parametrize(
    "name",
    [
        "restore",
        "flush",
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("save", "grow")),
    ],
)
def test_interrupted_copies(stride, tmp_path, name, file, overlap):
    folders = iter(range(10_000))
    with opened(tmp_path / "copy") as table:
        step(table)
        step(table)

    def do(interrupted):
        folder = tmp_path / str(next(folders))
        folder.mkdir()
        shutil.copy(tmp_path / "copy", folder)
        path = folder / "table" if file else None
        table = opened(path, overlap=overlap)
        step(table)
        with interrupted():
            match name:
                case "save" | "restore":
                    getattr(table, name)(folder / "copy")
                case "grow":
                    table.grow(V + 5)
                case "flush":
                    table.flush()
        assert table.shape[0] in (V, V + 5)
        steps = check_whole(table)
        assert steps in ((1, 2) if name == "restore" else (1,))
        step(table)
        rows = table.shape[0]
        assert check_whole(table) == steps + 1
        table.save(folder / "last")  # cleans up after an interrupted one
        table.close()
        with opened(folder / "copy") as copy:
            assert check_whole(copy) in ((1, 2) if name == "save" else (2,))
        if file:
            with opened(path, rows) as table:
                assert check_whole(table) == steps + 1

    interruptions(do, stride, tmp_path)


#: What changes some rows of a table whose steps are 1, and what these rows then hold.
CHANGES = {
    "reset": (lambda table: table.reset([2, 3, 5]), 0),
    "write": (
        lambda table: table.write([2, 3, 5], np.full((3, D), 7, "f4"), TX.init(0)),
        7,
    ),
}


def held(table):
    """What all rows hold that steps add to."""
    rows = table.read(EVERY)
    assert not np.delete(rows, [2, 3, 5], 0).any()
    (value,) = {*rows[[2, 3, 5]].ravel().tolist()}
    return value


@STRIDES_AND_KINDS
@pytest.mark.parametrize("name", CHANGES)
def test_interrupted_changes_of_rows(stride, tmp_path, name, file, overlap):
    numbers, (change, after) = iter(range(10_000)), CHANGES[name]

    def do(interrupted):
        path = tmp_path / str(next(numbers)) if file else None
        table = opened(path, overlap=overlap)
        step(table)
        with interrupted():
            change(table)
        assert (value := held(table)) in (1, after)
        step(table)
        if file:
            table.close()
            table = opened(path)
        assert held(table) == value + 1 and table.steps == 2
        table.close()

    interruptions(do, stride, tmp_path)


# --- kills ----------------------------------------------------------------------------


class Copies(Lines):
    """Copies of a folder as kills leave it, one at each line that finds it changed.

    Attributes:
      paths: of the copies.
    """

    def __init__(self, folder):
        super().__init__(self._copy)
        self.paths, self._folder, self._last = [], folder, None

    def _copy(self, _):
        if (now := contents(self._folder)) != self._last:
            self._last = now
            self.paths.append(self._folder.with_name(f"{len(self.paths)}"))
            shutil.copytree(self._folder, self.paths[-1], symlinks=True)


@pytest.mark.parametrize("name", ["step", "close", "save", "restore", "grow", "flush"])
def test_killed_at_any_line(tmp_path, name):
    folder = tmp_path / "now"
    folder.mkdir()
    with opened(folder / "copy") as table:
        step(table)
        step(table)
    table = opened(folder / "table")
    step(table)
    with Copies(folder) as copies:
        match name:
            case "step":
                step(table)
            case "save" | "restore":
                getattr(table, name)(folder / "copy")
            case "grow":
                table.grow(V + 5)
            case _:
                getattr(table, name)()
    table.close()
    seen = set()
    for copy in copies.paths:
        size = V
        if name == "grow":
            size = max(V, V + 5 - (b'"rows": 25' not in (copy / "table").read_bytes()) * 5)
        with opened(copy / "table", size) as table:
            seen.add(check_whole(table))
            table.save(copy / "copy")
        # Nothing is left of saves that were killed.
        assert sorted(os.listdir(copy)) == ["copy", "table"]
    assert seen == ({1, 2} if name in ("step", "restore") else {1})


@pytest.mark.parametrize("name", CHANGES)
def test_killed_in_changes_of_rows(tmp_path, name):
    folder, (change, after) = tmp_path / "now", CHANGES[name]
    folder.mkdir()
    with opened(folder / "table") as table:
        step(table)
        with Copies(folder) as copies:
            change(table)
    seen = set()
    for copy in copies.paths:
        with opened(copy / "table") as table:
            seen.add(held(table))
            assert table.steps == 1
    assert seen == {1, after}


@pytest.mark.slow
def test_killed_savers_leave_nothing(tmp_path):
    """Of 25 there were 44 files."""
    for _ in range(2):
        kill(f"table.save({str(tmp_path / 'saved')!r})", "replace")
    assert len(os.listdir(tmp_path)) == 1
    opened(None).save(tmp_path / "saved")
    assert os.listdir(tmp_path) == ["saved"]


def kill(code, where):
    """Runs code in a process that kills itself when it calls a function of os."""
    setup = f"""
import os, signal, sys
sys.path.insert(0, {os.path.dirname(__file__)!r})
from test_host_table_faults import *
os.{where} = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
table = opened(None)
{code}
"""
    run = subprocess.run([sys.executable, "-c", setup], capture_output=True, text=True)
    assert run.returncode == -9, run.stderr


# --- files and journals that do not belong together -----------------------------------


def moments(folder, amount=1):
    """What a file and its journal hold at each line of a step; killed there."""
    folder.mkdir()
    pairs = {}

    def snapshot(_):
        pairs[path.read_bytes(), journal.read_bytes()] = None

    path, journal = folder / "table", folder / "table-journal"
    with opened(path) as table:
        step(table, amount=amount)
        with Lines(snapshot):
            step(table, amount=amount)
        saved = folder / "saved"
        table.save(saved)
    return list(pairs), saved.read_bytes()


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    return moments(tmp_path_factory.mktemp("killed") / "one")


def put(folder, file, journal):
    """Writes a file and a journal, those that are not None."""
    for path, data in ((folder / "table", file), (folder / "table-journal", journal)):
        path.unlink(missing_ok=True)
        if data is not None:
            path.write_bytes(data)
    return folder / "table"


def outcomes(folder, pairs, whole=(1, 2)):
    """How many pairs are opened, whole, and what errors the others raise."""
    count, errors = 0, []
    for file, journal in pairs:
        path = put(folder, file, journal)
        try:
            with opened(path) as table:
                assert check_whole(table) in whole
            assert os.listdir(folder) == ["table"]
            count += 1
        except DataLossError as error:
            assert str(path) in str(error)
            assert (path.read_bytes() if path.exists() else None) == file
            errors.append(str(error))
    return count, errors


def test_a_step_in_the_journal_is_in_the_table(killed, tmp_path):
    pairs, _ = killed
    assert len(pairs) > 6
    assert outcomes(tmp_path, pairs) == (len(pairs), [])


def test_a_journal_that_is_gone(killed, tmp_path):
    pairs, _ = killed
    count, errors = outcomes(tmp_path, [(file, None) for file, _ in pairs])
    assert count and errors and all("in the middle of write 2" in e for e in errors)


def test_journals_of_other_tables(killed, tmp_path):
    """Of one started over, of a copy that was put back, of another optimizer."""
    pairs, saved = killed
    others, _ = moments(tmp_path / "other", amount=7)
    folder = tmp_path / "mixed"
    folder.mkdir()
    for wrong in (
        [(file, journal) for (file, _), (_, journal) in zip(pairs, others, strict=False)],
        [(saved, journal) for _, journal in pairs],
    ):
        count, errors = outcomes(folder, wrong)
        assert count and errors
        assert any("is another table" in error for error in errors)
    adam = tmp_path / "adam"
    with js.HostTable((V, D), js.adam(0.1), adam):
        pass
    _, errors = outcomes(folder, [(None, journal) for _, journal in pairs], whole=(0,))
    assert errors and all("which is not there" in error for error in errors)
    put(folder, adam.read_bytes(), pairs[-3][1])
    with pytest.raises(DataLossError, match=r"table-journal.*another table"):
        js.HostTable((V, D), js.adam(0.1), folder / "table")


HEAD, CHECKSUM = struct.Struct("<8sIIIIQ16s"), struct.Struct("<I")
WORDS = 3 * 4 * (D + 1)  # bytes of the records of a step


def crafted(journal, change, parts=1):
    """A journal with another index, so many times its rows, and right checksums."""
    magic, *flags, _, _, boot = HEAD.unpack(journal[: HEAD.size])
    index, _, rest = journal[4096:].partition(b"\n")
    index = change(json.loads(index))
    index = index if isinstance(index, bytes) else json.dumps(index).encode()
    body = index + b"\n" + rest[:-WORDS] * parts + rest[-WORDS:] * parts
    head = HEAD.pack(magic, *flags, zlib.crc32(body), len(body), boot)
    return (head + CHECKSUM.pack(zlib.crc32(head))).ljust(4096, b"\0") + body


def started(pairs):
    """A file and its journal from the middle of a step."""
    return next((f, j) for f, j in pairs if HEAD.unpack(j[: HEAD.size])[1])


STRANGE = [-1, 0, 3, 2**31, 2**63 - 1, 2**64, 1.5, "12", None, True, [], {}, "\0", "/dev"]
STRANGE_INDEX = [
    *(
        lambda x, n=n, y=y: [[*x[0][:n], y, *x[0][n + 1 :]]]
        for n in range(6)
        for y in STRANGE
    ),
    *(lambda x, n=n: [x[0][:n]] for n in range(6)),
    *(lambda _, text=text: text for text in (b"[" * 100_000, b"\xff", b"7", b"[]", b"{}")),
    lambda x: x * 2,
    lambda x: [x[0] * 2],
]


def test_crafted_journals(killed, tmp_path):
    """They end in an error that names them, or in the step that they hold."""
    file, journal = started(killed[0])
    assert outcomes(tmp_path, [(file, crafted(journal, lambda x: x))]) == (1, [])
    others = [(file, crafted(journal, change)) for change in STRANGE_INDEX]
    count, _ = outcomes(tmp_path, others)
    assert count < 0.2 * len(others)


@pytest.mark.parametrize("link", (None, "elsewhere", "table-journal"))
def test_a_journal_writes_to_no_file_that_does_not_point_to_it(killed, tmp_path, link):
    """A table that somebody sent, beside one of the user's with the same id and layout."""
    file, journal = started(killed[0])
    victim, sent = tmp_path / "victim", file.replace(uuid_in(journal), bytes(16))
    victim.write_bytes(file)
    both = lambda x: [["table", "0" * 32, *x[0][2:]], ["victim", *x[0][1:]]]  # noqa: E731
    path = put(tmp_path, sent, crafted(journal, both, parts=2))
    if link:
        os.symlink(link, tmp_path / "victim-journal")
    if link == "table-journal":  # as tables that are stored together have it
        opened(path).close()
        assert victim.read_bytes() != file
        return
    with pytest.raises(DataLossError, match=r"victim is another now"):
        opened(path)
    assert victim.read_bytes() == file and path.read_bytes() == sent


def uuid_in(journal):
    """The id of the file that a journal belongs to."""
    return bytes.fromhex(json.loads(journal[4096:].partition(b"\n")[0])[0][1])


def test_an_older_copy_beside_a_later_journal(tmp_path):
    path = tmp_path / "table"
    with opened(path) as table:
        step(table)
        first = path.read_bytes()
        step(table)
        pairs = {}
        with Lines(lambda _: pairs.setdefault((tmp_path / "table-journal").read_bytes())):
            step(table)
    folder = tmp_path / "mixed"
    folder.mkdir()
    count, errors = outcomes(folder, [(first, journal) for journal in pairs])
    assert count and errors and all("an older copy" in error for error in errors)


def places(data, first, step_):
    """Every so many bytes of what is written, and some of what fills pages."""
    return [
        i
        for count, i in enumerate(range(first, len(data), step_))
        if count % 40 == 0 or len({*data[max(0, i - 8) : i + step_]}) > 1
    ]


@pytest.mark.parametrize("step_", [90, pytest.param(5, marks=pytest.mark.slow)])
def test_every_truncation(killed, tmp_path, step_):
    pairs, saved = killed
    for size in places(saved, 0, step_):
        _, errors = outcomes(tmp_path, [(saved[:size], None)], whole=())
        assert "cut off" in errors[0]
    with pytest.raises(DataLossError, match="written by something else"):
        opened(put(tmp_path, saved + bytes(8), None))
    cut = [(file, data[:i]) for file, data in pairs for i in places(data, 1, 2 * step_)]
    outcomes(tmp_path, dict.fromkeys(cut))


@pytest.mark.parametrize("step_", [90, pytest.param(9, marks=pytest.mark.slow)])
def test_flipped_bits_of_journals(killed, tmp_path, step_):
    pairs, _ = killed
    flipped = []
    for first, (file, journal) in enumerate(pairs):
        for place in places(journal, first, step_):
            data = bytearray(journal)
            data[place] ^= 1 << place % 8
            flipped.append((file, bytes(data)))
    assert outcomes(tmp_path, flipped)[1]


def on_another_boot(journal):
    """A journal as if the machine had been started anew since."""
    head = journal[: HEAD.size]
    if len(head) < HEAD.size or journal[HEAD.size :][:4] != CHECKSUM.pack(zlib.crc32(head)):
        return journal  # damaged
    head = HEAD.pack(*HEAD.unpack(head)[:-1], bytes(range(16)))
    return head + CHECKSUM.pack(zlib.crc32(head)) + journal[HEAD.size + 4 :]


@pytest.mark.skipif(not os.path.exists("/proc/sys/kernel/random"), reason="needs Linux")
def test_a_failure_of_the_machine_is_seen(killed, tmp_path):
    pairs, _ = killed
    for file, journal in pairs:
        path = put(tmp_path, file, on_another_boot(journal))
        with pytest.raises(DataLossError, match=r"its machine failed.*delete only"):
            opened(path)
    path.unlink()
    (tmp_path / "table-journal").unlink()
    with opened(path) as table:
        step(table)
        table.flush()  # from here on nothing is lost
        journal = (tmp_path / "table-journal").read_bytes()
        file = path.read_bytes()
    assert outcomes(tmp_path, [(file, on_another_boot(journal))]) == (1, [])


# --- files ----------------------------------------------------------------------------


def test_relative_paths_and_links(tmp_path, monkeypatch):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "a")
    table = opened("table")
    step(table)
    monkeypatch.chdir(tmp_path / "b")
    other = opened(b"table")
    step(other)
    table.close()
    assert (tmp_path / "b" / "table-journal").exists()
    other.close()
    os.symlink(tmp_path / "a" / "table", "link")
    with opened("link") as table:
        step(table)
        assert sorted(os.listdir()) == ["link", "table"]
        assert (tmp_path / "a" / "table-journal").exists()
        with pytest.raises(FailedPreconditionError, match="is open as a HostTable"):
            opened(tmp_path / "a" / "table")
        with pytest.raises(js.InvalidArgumentError, match="file of this table"):
            table.save(tmp_path / "a" / "table")


def test_what_is_refused_names_the_file(tmp_path):
    path = tmp_path / "table"
    with opened(path) as table:
        step(table)
        saver = opened(None)
        with pytest.raises(FailedPreconditionError, match=r"table is open.*close\(\)"):
            saver.save(path)
        assert check_whole(table) == 1
    os.mkfifo(tmp_path / "pipe")
    for wrong in (tmp_path, tmp_path / "pipe", "/dev/null"):
        for act in (opened, saver.save, saver.restore):
            with pytest.raises(js.InvalidArgumentError, match="is no file but a directory"):
                act(wrong)
    (tmp_path / "empty").touch()
    for act in (opened, saver.restore):
        with pytest.raises(DataLossError, match=r"empty is cut off after 0 bytes"):
            act(tmp_path / "empty")
    assert not (tmp_path / "empty").read_bytes()
    (tmp_path / "later").write_bytes(path.read_bytes().replace(b"table 2", b"table 3", 1))
    for act in (opened, saver.restore):
        with pytest.raises(
            js.InvalidArgumentError, match=r"later is of format 3.* a later"
        ):
            act(tmp_path / "later")
    with pytest.raises(js.InvalidArgumentError, match=r"with 20 rows, .*table\.grow"):
        opened(path, V + 1)
    for call, error, message in [
        (lambda: saver.fetch(None), TypeError, "wants ids that are integers, got None"),
        (lambda: opened(None, device="cpu"), TypeError, r"device='cpu'.*jax\.devices"),
        (lambda: opened(None, size="3"), TypeError, r"size='3'\): wanted an int of at"),
        (lambda: opened(None, overlap="no"), TypeError, "overlap='no'"),
        (lambda: js.HostTable(5, TX), js.InvalidArgumentError, r"shape=5.*\(V, \*D\)"),
        (lambda: saver.grow(V - 1), js.InvalidArgumentError, r"grow\(19\).*20 rows"),
    ]:
        with pytest.raises(error, match=message):
            call()


def test_a_file_that_is_deleted_or_replaced_while_it_is_open(tmp_path):
    for act in ("flush", "close"):
        path = tmp_path / act
        table = opened(path)
        step(table)
        os.unlink(path)
        with pytest.raises(DataLossError, match=rf"{act} was deleted or replaced"):
            getattr(table, act)()
        other = opened(path)
        step(other)
        with contextlib.suppress(DataLossError):
            table.close()
        step(other)
        assert (tmp_path / f"{act}-journal").exists()
        other.close()


FULL = """
folder = sys.argv[1]
table = js.HostTable((20_000, 32), TX, f"{folder}/table")
step(table, range(100))
with open(f"{folder}/other", "wb", 0) as file, contextlib.suppress(OSError):
    while True:
        file.write(bytes(4096))
for act in (
    lambda: step(table, range(5000, 15000, 7)),
    lambda: table.steps,
    lambda: table.save(f"{folder}/copy"),
    table.close,
):
    try:
        act()
    except OSError as error:
        assert "No space left" in str(error) and f"{folder}/table" in error.filename
        print("refused")
os.unlink(f"{folder}/other")
assert table.steps == 2 and table.read([0, 1, 5000, 5001])[:, 0].tolist() == [1, 1, 1, 0]
table.close()
with js.HostTable((20_000, 32), TX, f"{folder}/table") as table:
    assert table.steps == 2 and table.read([0, 5000, 5001])[:, 0].tolist() == [1, 1, 0]
print(*os.listdir(folder))
"""


@pytest.mark.slow
@pytest.mark.skipif(
    subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode
    if shutil.which("unshare")
    else True,
    reason="needs to mount a file system",
)
def test_a_disk_that_is_full(tmp_path):
    """A tmpfs, whose memory would end with SIGBUS where the map writes or reads a hole."""
    setup = f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})\n"
    setup += f"from test_host_table_faults import *\n{FULL}"
    mount = 'mount -t tmpfs -o size=4m none "$1" && exec "$2" -c "$3" "$1"'
    command = ["unshare", "-rm", "sh", "-c", mount, "sh", tmp_path, sys.executable, setup]
    said = subprocess.run(command, capture_output=True, text=True)
    assert said.stdout.split() == [*["refused"] * 4, "table"], said.stderr


ALMOST_FULL = """
folder = sys.argv[1]
table = js.HostTable((20_000, 32), TX, f"{folder}/table")
step(table, range(100))
with open(f"{folder}/room", "wb", 0) as file:
    file.write(bytes(700 << 10))
with open(f"{folder}/other", "wb", 0) as file, contextlib.suppress(OSError):
    while True:
        file.write(bytes(1024))
os.unlink(f"{folder}/room")  # for blocks of each of these rows, not for their pages
try:
    step(table, range(5000, 15000, 25))
    table.flush()
except OSError as error:
    assert "No space left" in str(error) and f"{folder}/table" in error.filename
    print("refused")
os.unlink(f"{folder}/other")
assert table.steps == 2 and table.read([0, 5000, 5001])[:, 0].tolist() == [1, 1, 0]
"""


@pytest.mark.slow
@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("mkfs.ext4"), reason="needs to mount an ext4"
)
def test_a_disk_that_is_full_and_has_blocks_smaller_than_a_page(tmp_path):
    image, folder = tmp_path / "image", tmp_path / "mounted"
    image.write_bytes(bytes(12 << 20))
    folder.mkdir()
    subprocess.run(["mkfs.ext4", "-q", "-b", "1024", image], check=True)
    mounted = subprocess.run(["mount", "-o", "loop", image, folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs to mount an ext4")
    try:
        setup = f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})\n"
        setup += f"from test_host_table_faults import *\n{ALMOST_FULL}"
        command = [sys.executable, "-c", setup, folder]
        said = subprocess.run(command, capture_output=True, text=True)
    finally:
        subprocess.run(["umount", folder], check=True)
    assert said.returncode == 0 and said.stdout.split() == ["refused"], said.stderr


def test_room_is_made_for_whole_pages(tmp_path, monkeypatch):
    """Of any size, as a map fills all blocks of a page that are holes."""
    monkeypatch.setattr(mmap, "PAGESIZE", page := 1 << 16)
    with opened(tmp_path / "t", 1_000_000) as table, open(tmp_path / "t", "rb") as file:
        step(table, [500_000])
        table.flush()
        at = os.lseek(file.fileno(), 1_000_000, os.SEEK_DATA)
        end = os.lseek(file.fileno(), at, os.SEEK_HOLE)
        assert at % page == 0 and end - at == page


def test_a_file_of_holes_is_read_where_it_was_written(tmp_path, monkeypatch):
    """Rows at the ends and in blocks that touch, and those that began and are zero."""
    rows = np.array([0, 1, 700, 701, 50_000, 120_000, 199_998, 199_999])
    read, count = storage.FileRecords.blocks, []

    def counted(self, array):
        for part in read(self, array):
            count.append(part.stop - part.start)
            yield part

    monkeypatch.setattr(storage.FileRecords, "blocks", counted)
    with opened(tmp_path / "t", 200_000) as table:
        assert table.written_rows().tolist() == []
        step(table, rows, 0)
        step(table, rows[1::2])
        assert (table.written_rows() == rows).all()
        table.save(tmp_path / "copy")
        assert 0 < sum(count) < 20_000  # of 400,000
        table.grow(240_000)
        assert (table.written_rows() == rows).all()
        values = table.read(np.arange(240_000))[:, 0]
        assert (np.flatnonzero(values) == rows[1::2]).all()
    with opened(tmp_path / "copy", 200_000) as copy:
        assert (copy.written_rows() == rows).all() and copy.steps == 2
    other = opened(None, 200_000)
    step(other, [5, 50_001])
    other.restore(tmp_path / "copy")
    assert (other.written_rows() == rows).all()
    assert (np.flatnonzero(other.read(np.arange(200_000))[:, 0]) == rows[1::2]).all()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_file_that_is_cut_off_while_it_is_open(tmp_path, overlap):
    table = opened(tmp_path / "t", overlap=overlap)
    step(table)
    os.truncate(tmp_path / "t", 100)
    refused = pytest.raises(DataLossError, match=r"t was cut off after 100 bytes by")
    for call in (lambda: table.read([1]), lambda: table.steps, lambda: step(table)):
        with refused:
            call()
    with refused if overlap else contextlib.nullcontext():
        table.close()  # a step waited
    table.close()
    with pytest.raises(FailedPreconditionError, match="is closed"):
        table.read([1])


def test_restore_only_reads(killed, tmp_path):
    with opened(tmp_path / "t") as table:
        step(table)
        table.save(tmp_path / "copy")
    before, times = contents(tmp_path), os.stat(tmp_path / "copy").st_mtime_ns
    os.chmod(tmp_path / "copy", 0o444)
    os.chmod(tmp_path, 0o555)
    with open(tmp_path / "copy") as reader:  # as another process that restores it
        fcntl.flock(reader, fcntl.LOCK_SH)
        other = opened(None)
        other.restore(tmp_path / "copy")
    assert check_whole(other) == 1
    os.chmod(tmp_path, 0o755)
    assert contents(tmp_path) == before
    assert os.stat(tmp_path / "copy").st_mtime_ns == times
    folder, (pairs, _) = tmp_path / "killed", killed
    folder.mkdir()
    for pair in pairs:  # whole, or refused
        path = put(folder, *pair)
        try:
            other.restore(path)
        except FailedPreconditionError as error:
            assert "table-journal has a step that may not be in" in str(error)
        else:
            assert check_whole(other) in (1, 2)
        assert (path.read_bytes(), (folder / "table-journal").read_bytes()) == pair


@pytest.mark.parametrize("call", ["fsync", "flush", "ftruncate", "pwrite"])
@pytest.mark.parametrize("arguments", [["slow"], [errno.EIO, "fails"]])
def test_errors_of_the_disk_name_the_file(call, arguments, tmp_path, monkeypatch):
    """What a handler of signals raises, an OSError without a number, is left alone."""
    raised = OSError(*arguments)

    def fails(*_):
        raise raised

    table, flushes = opened(tmp_path / "t"), call in ("fsync", "flush")
    step(table)
    with monkeypatch.context() as patch, pytest.raises(OSError) as info:
        patch.setattr(mmap.mmap if call == "flush" else os, call, fails)
        table.flush() if flushes else table.save(tmp_path / "copy")
    assert info.value is raised
    assert str(raised) == "slow" or str(tmp_path) in str(raised)
    lasts = flushes and raised.errno is not None
    with pytest.raises(OSError, match=r"/t'") if lasts else contextlib.nullcontext():
        table.close()  # an earlier flush failed


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def fails(*_):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", fails)
        table = opened(tmp_path / "t")
        step(table)
        table.close()
        with pytest.warns(UserWarning, match=r"t cannot be locked .*one process alone"):
            table = opened(tmp_path / "t")
        assert check_whole(table) == 1
        table.close()


def test_a_flush_that_failed_is_not_forgotten(tmp_path, monkeypatch):
    """A system reports a failed write once."""
    table = opened(tmp_path / "t")
    step(table)

    def fails(_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fails)
        with pytest.raises(OSError, match="Input/output error"):
            table.flush()
    step(table)
    with pytest.raises(OSError, match=r"earlier flush failed .*not certain: save\(path\)"):
        table.flush()
    table.save(tmp_path / "copy")
    with pytest.raises(OSError, match="earlier flush failed"):
        table.close()
    for name in ("t", "copy"):
        with opened(tmp_path / name) as again:
            assert check_whole(again) == 2
            again.flush()


def test_a_step_whose_rows_were_awaited_in_vain_is_tried_again(tmp_path, monkeypatch):
    table = opened(tmp_path / "t", overlap=True)
    step(table)

    def fails(*_, **__):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(np, "asarray", fails)
        with pytest.raises(MemoryError):
            table.flush()
    assert check_whole(table) == 1
    table.close()


def test_grow(tmp_path):
    for path in (None, tmp_path / "table"):
        table = opened(path)
        step(table)
        table.grow(V + 4)
        assert table.shape == (V + 4, D) and table.steps == 1
        step(table, [2, 3, 5, V + 3])
        assert table.read([2, V + 3, V + 4])[:, 0].tolist()[:2] == [2, 1]
        table.close()
    with opened(path, V + 4) as table:
        assert table.read([2, V + 3])[:, 0].tolist() == [2, 1]
    assert os.listdir(tmp_path) == ["table"]


# --- processes and threads ------------------------------------------------------------


def run(code, *arguments):
    """What a process says that ends in an ordinary way."""
    setup = f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})\n"
    setup += f"from test_host_table_faults import *\n{code}"
    command = [sys.executable, "-c", setup, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.slow
def test_the_end_of_a_process_writes_what_was_stored(tmp_path):
    path = tmp_path / "table"
    code = "table = opened(sys.argv[1], overlap=True); step(table); step(table); "
    code += "js.in_memory = js.HostTable((9, 2), js.sgd(0.1))"  # goes when modules go
    done = run(code, path)
    assert done.returncode == 0 and not done.stderr
    with opened(path) as table:
        assert check_whole(table) == 2
    table = opened(path, overlap=True)
    step(table)
    del table  # the last reference, not closed
    with opened(path) as table:
        assert check_whole(table) == 3
    broken = "table = opened(sys.argv[1], overlap=True); a, _ = table.fetch([1]); "
    broken += "table.fetch([2]); table.store(a)"
    said = run(broken, path)
    assert "RuntimeWarning" in said.stderr and f"{path} is not written" in said.stderr


FORK = """
import time
table = opened(sys.argv[1], overlap=True)
step(table)
if not (child := os.fork()):
    for act in (lambda: step(table), lambda: table.steps, lambda: table.save("copy")):
        try:
            act()
        except FailedPreconditionError as error:
            assert "forked" in str(error)
            print("refused", flush=True)
    table.close()
    del table
    if sys.argv[2] == "exit":
        sys.exit()
    time.sleep(30)
if sys.argv[2] == "exit":
    os.waitpid(child, 0)
    step(table)
    table.close()
    print("closed")
else:
    time.sleep(1)
    print("child", child, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_leaves_the_file_alone(tmp_path):
    path = tmp_path / "table"
    said = run(f"import warnings; warnings.simplefilter('ignore')\n{FORK}", path, "exit")
    assert said.stdout.split() == [*["refused"] * 3, "closed"], said.stderr
    with opened(path) as table:
        assert check_whole(table) == 2
    code = f"import warnings; warnings.simplefilter('ignore')\n{FORK}"
    setup = f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})\n"
    setup += f"from test_host_table_faults import *\n{code}"
    log = tmp_path / "log"
    with open(log, "w") as out:  # the child keeps it open
        command = [sys.executable, "-c", setup, str(path), "kill"]
        assert subprocess.run(command, stdout=out, stderr=out).returncode == -9
    try:
        with opened(path) as table:  # the child has no lock
            assert check_whole(table) in (2, 3)
    finally:
        os.kill(int(log.read_text().split()[-1]), signal.SIGKILL)


def test_threads():
    table, errors, counts = opened(None), [], [0, 0]
    start = threading.Barrier(2)

    def train(number):
        start.wait()
        for _ in range(40):
            try:
                step(table)
                counts[number] += 1
            except FailedPreconditionError as error:
                errors.append(str(error))

    threads = [threading.Thread(target=train, args=(i,)) for i in range(2)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert table.steps == sum(counts)
    assert (table.read([2]) <= sum(counts)).all()
    assert all("earlier fetch" in e or "nothing was fetched" in e for e in errors)


# --- tables together ------------------------------------------------------------------


def both(folder, **options):
    """Two tables with a file each, in folders of their own."""
    tables = {}
    for name in ("user", "item"):
        path = None if folder is None else folder / name / "table"
        tables[name] = js.HostTable((V, D), TX, path, **options)
    return js.HostTable.together(tables)


def step_both(tables):
    ids = np.array([2, 3, 5])
    rows, _ = tables.fetch({"user": ids, "item": ids})
    tables.store({name: add(x) for name, x in rows.items()})


def check_both(tables):
    steps = tables.steps  # raises where they differ
    assert {check_whole(tables[name]) for name in ("user", "item")} == {steps}
    return steps


@pytest.fixture
def two(tmp_path):
    for name in ("user", "item"):
        (tmp_path / "now" / name).mkdir(parents=True)
    return tmp_path / "now"


@STRIDES_AND_KINDS
def test_interrupted_steps_of_two_tables_are_whole(stride, two, file, overlap):
    def do(interrupted):
        shutil.rmtree(two)
        for name in ("user", "item"):
            (two / name).mkdir(parents=True)
        tables = both(two if file else None, overlap=overlap)
        step_both(tables)
        with interrupted():
            step_both(tables)
        steps = check_both(tables)
        assert steps in (1, 2)
        step_both(tables)
        if file:
            tables.close()
            assert os.listdir(two / "user") == os.listdir(two / "item") == ["table"]
            tables = both(two)
        assert check_both(tables) == steps + 1
        tables.close()

    interruptions(do, stride, two)


@pytest.mark.parametrize("first", ["user", "item", "both"])
def test_two_tables_killed_at_any_line(two, first):
    """Whichever is opened first, alone or together."""
    tables = both(two)
    step_both(tables)
    with Copies(two) as copies:
        step_both(tables)
    tables.close()
    seen = set()
    for copy in copies.paths:
        if first != "both":
            with opened(copy / first / "table") as table:
                steps = check_whole(table)
                with opened(copy / ("item", "user")[first == "item"] / "table") as other:
                    assert check_whole(other) == steps
        with both(copy) as tables:
            seen.add(check_both(tables))
            step_both(tables)
        assert os.listdir(copy / "user") == os.listdir(copy / "item") == ["table"]
    assert seen == {1, 2}


def test_tables_together(tmp_path, two):
    user, item = opened(two / "user" / "table", overlap=True), opened(None, overlap=True)
    step(user)
    tables = js.HostTable.together({"user": user, "item": item})
    with pytest.raises(FailedPreconditionError, match=r"different.*'user': 1, 'item'"):
        tables.steps  # noqa: B018
    step(item)  # they can be used one by one
    assert check_both(tables) == 1
    step_both(tables)
    rows, places = tables.fetch({"user": [4, V], "item": {"a": [7]}})
    assert places["user"].tolist() == [0, 3] and places["item"]["a"].tolist() == [0]
    with pytest.raises(js.InvalidArgumentError, match=r"fetch got \['user'\].*'item'"):
        tables.fetch({"user": [4]})
    with pytest.raises(js.InvalidArgumentError, match=r"store got \[\].*'user'"):
        tables.store({})
    item.fetch([3])
    tables.store(rows)  # of the user, but not of the item
    with pytest.raises(FailedPreconditionError, match="earlier fetch"):
        tables.flush()
    assert check_both(tables) == 2
    with pytest.raises(js.InvalidArgumentError, match="together with other tables already"):
        js.HostTable.together({"user": user})
    with pytest.raises(TypeError, match="wants HostTables, got 3"):
        js.HostTable.together({"user": 3})
    del user, item  # the tables are there as long as one of them is
    item = tables["item"]
    step_both(tables)
    tables.close()
    with pytest.raises(FailedPreconditionError, match="is closed"):
        item.fetch([1])
    with opened(two / "user" / "table") as user:
        assert check_whole(user) == 3


def test_a_step_of_two_tables_of_which_one_is_gone(two):
    errors = []
    with both(two) as tables:
        step_both(tables)
        with Copies(two) as copies:
            step_both(tables)
    for copy in copies.paths:
        os.unlink(copy / "item" / "table")
        try:
            with opened(copy / "user" / "table") as table:
                assert check_whole(table) in (1, 2)
        except DataLossError as error:
            errors.append(str(error))
    assert errors and all("is not there: put it back" in error for error in errors)


def test_killed_in_each_of_several_steps(tmp_path, monkeypatch):
    """The journal has the shared values of a step, not the columns of its log."""
    tx = js.proximal_adagrad(0.5, l1_regularization_strength=0.01, untouched="exact")
    ones, apply = jax.numpy.ones((1, D)), storage.FileRecords.apply
    ids = [[0, 1], [2], [2], [2], [2], [0, 1, 2]]

    @jax.jit
    def stepped(rows):
        table, state = rows.unpack()
        grads = js.IndexedSlices(ones, jax.numpy.zeros(1, int), table.shape)
        return rows.pack(*tx.apply(grads, state, table))

    def killed(records, part):
        shutil.copytree(folder, folder.with_name(f"{k + 1}"))
        apply(records, part)

    folder, whole = tmp_path / "0", js.HostTable((V, D), tx, init=1.0, size=3)
    folder.mkdir()
    for k, rows in enumerate(ids):
        whole.store(stepped(whole.fetch(rows)[0]))
        with js.HostTable((V, D), tx, folder / "table", init=1.0, size=3) as table:
            assert table.steps == k
            monkeypatch.setattr(storage.FileRecords, "apply", killed)
            table.store(stepped(table.fetch(rows)[0]))
            monkeypatch.setattr(storage.FileRecords, "apply", apply)
        folder = folder.with_name(f"{k + 1}")
    with js.HostTable((V, D), tx, folder / "table", init=1.0) as table:
        assert table.steps == len(ids)
        np.testing.assert_array_equal(table.read(EVERY), whole.read(EVERY))
        in_memory = js.HostTable((V, D), tx, init=1.0)
        table.save(tmp_path / "saved")
        in_memory.restore(tmp_path / "saved")
        np.testing.assert_array_equal(in_memory.read(EVERY), whole.read(EVERY))
