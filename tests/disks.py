"""Disks for tests: one that records what is written to it, and one of which a call fails.

A system writes what was changed in any order, and only a barrier (fsync of the file or of
the folder, msync, sync) says that something is on the disk. So what a power failure leaves
is every change before a barrier of its own, and any of the others.
"""

import contextlib
import errno
import fcntl
import itertools
import mmap
import os
import pathlib
import random
import shutil
import stat
import sys
import threading
from typing import NamedTuple

import jslices

PAGE = 4096


class UnflushedMap(mmap.mmap):
    def flush(self, *_):
        pass


class Change(NamedTuple):
    """A page, the length of a file or a name; it reaches the disk whole or not at all."""

    where: object  #: the number of the file, or the path of the folder
    what: object  #: the number of a page, "length", or "names", as a call changes them
    value: object  #: bytes, a length, or {name: number of a file, text of a link or None}

    def __repr__(self):
        value = f"{len(self.value)} bytes" if isinstance(self.what, int) else self.value
        return f"{self.where}/{self.what}: {value}"


class Barrier(NamedTuple):
    """All changes of a file or folder before it are on the disk; None: of all."""

    where: object


class Promise(NamedTuple):
    """What may be there from now on, and whether DataLossError may be the answer."""

    values: tuple
    loss: bool = False


class RecordedDisk:
    """Records what one thread does to a folder, between the calls that it makes of ``os``.

    Barriers of other threads do not count.

    Attributes:
      log: changes, barriers and promises in their order.
    """

    CALLS = ("open", "write", "pwrite", "lseek", "ftruncate", "truncate", "posix_fallocate")
    CALLS += ("replace", "rename", "link", "symlink", "unlink", "mkdir")

    def __init__(self, folder, before=()):
        self.folder, self.log, self.thread = folder, list(before), threading.get_ident()
        self._numbers = {}  # of files, by the system's, as long as they have a name
        self._names, self._data = {}, {}
        self._next = itertools.count()
        if before:  # the folder is what a kill has left
            self._names = replay(before, range(len(before)), folder)
            self._next = itertools.count(len(before))
            for place, entries in self._names.items():
                for name in (x for x, target in entries.items() if type(target) is int):
                    path = folder / place / name
                    self._numbers[path.stat().st_ino] = entries[name]
                    self._data[entries[name]] = path.read_bytes()
        else:
            self.observe()
            self.log.append(Barrier(None))

    @contextlib.contextmanager
    def recording(self, monkeypatch):
        disk = self

        class Map(mmap.mmap):
            def __new__(cls, descriptor, *args, **options):
                made = super().__new__(cls, descriptor, *args, **options)
                made.file = os.fstat(descriptor).st_ino
                return made

            def flush(self, *_):
                disk.barrier(self.file)

        with monkeypatch.context() as patch:
            for name in self.CALLS:
                patch.setattr(os, name, self._observed(getattr(os, name)))
            patch.setattr(os, "fsync", lambda x: self.barrier(os.fstat(x).st_ino))
            patch.setattr(os, "sync", lambda: self.barrier(None))
            patch.setattr(mmap, "mmap", Map)
            yield
            self.observe()

    def promise(self, *values, loss=False):
        """Says what must be there after a failure from now on."""
        self.observe()
        self.log.append(Promise(values, loss))

    def barrier(self, file):
        self.observe()
        if threading.get_ident() == self.thread:
            self.log.append(Barrier(None if file is None else self._numbers.get(file, -1)))

    def _observed(self, call):
        def observed(*args, **options):
            self.observe()
            result = call(*args, **options)
            self.observe()
            return result

        return observed

    def observe(self, *_):
        """Records what has changed."""
        if threading.get_ident() != self.thread:
            return
        there = {}
        for folder, _, names in os.walk(self.folder):
            place = os.path.relpath(folder, self.folder)
            there[os.stat(folder).st_ino] = place
            entries = {name: self._entry(f"{folder}/{name}", there) for name in names}
            before = self._names.get(place)
            gone = dict.fromkeys((before or {}).keys() - entries)
            changed = dict(entries.items() - (before or {}).items())
            if before is None or gone or changed:
                self.log.append(Change(place, "names", {**gone, **changed}))
                self._names[place] = entries
        self._numbers = there

    def _entry(self, path, there):
        status = os.lstat(path)
        if stat.S_ISLNK(status.st_mode):
            return os.readlink(path)
        number = self._numbers.get(status.st_ino)
        number = there[status.st_ino] = next(self._next) if number is None else number
        data, before = pathlib.Path(path).read_bytes(), self._data.get(number, b"")
        if data != before:
            if len(data) != len(before):
                self.log.append(Change(number, "length", len(data)))
            for page in range(-(-len(data) // PAGE)):
                part = slice(page * PAGE, (page + 1) * PAGE)
                if data[part].ljust(PAGE, b"\0") != before[part].ljust(PAGE, b"\0"):
                    self.log.append(Change(number, page, data[part].ljust(PAGE, b"\0")))
            self._data[number] = data
        return number


def is_change(x):
    return isinstance(x, Change)


def certain(log):
    """The numbers of the changes that a barrier holds."""
    synced, found = set(), set()
    for number, x in reversed([*enumerate(log)]):
        if isinstance(x, Barrier):
            synced.add(x.where)
        elif is_change(x) and synced & {x.where, None}:
            found.add(number)
    return found


def replay(log, kept, folder):
    """Writes what is left of a log if these changes are kept; returns all names."""
    names, lengths, pages = {}, {}, {}
    for x in (log[i] for i in sorted(kept)):
        if not is_change(x):
            continue
        if x.what == "names":
            names.setdefault(x.where, {}).update(x.value)
        elif x.what == "length":
            lengths[x.where] = x.value
        else:
            pages.setdefault(x.where, {})[x.what] = x.value
    for place, entries in names.items():
        (folder / place).mkdir(parents=True, exist_ok=True)
        for name in [x for x, target in entries.items() if target is None]:
            del entries[name]
        for name, target in entries.items():
            if isinstance(target, str):
                os.symlink(target, folder / place / name)
                continue
            length, own = lengths.get(target, 0), pages.get(target, {})
            whole = (own.get(i, bytes(PAGE)) for i in range(-(-length // PAGE)))
            (folder / place / name).write_bytes(b"".join(whole)[:length])
    return names


def failures(log, count, seed, start):
    """Power failures: how much of the log there was, and which changes are left.

    Each file and folder loses nothing, everything that it may, or some of it.
    """
    draw = random.Random(seed)
    for _ in range(count):
        end = draw.randrange(start, len(log)) + 1
        kept, chances = certain(log[:end]), {}
        for number, x in enumerate(log[:end]):
            if is_change(x) and number not in kept:
                chance = chances.setdefault(x.where, draw.choice([0, 0.2, 0.8, 1]))
                if draw.random() < chance:
                    kept.add(number)
        yield end, kept


def check_failures(log, folder, check, count, seed=0, start=None):
    """Checks what so many power failures leave: ``check(folder, promise)``.

    ``start`` is that of the changes before which none happens, or the first promise.
    """
    if start is None:
        start = next(i for i, x in enumerate(log) if isinstance(x, Promise))
    for end, kept in failures(log, count, seed, start):
        shutil.rmtree(folder)
        replay(log, kept, folder)
        promise = next(x for x in log[end - 1 :: -1] if isinstance(x, Promise))
        try:
            check(folder, promise)
        except BaseException as error:
            marks = {
                i: "kept" if i in kept else "lost" for i in range(end) if is_change(log[i])
            }
            lines = (f"{marks.get(i, '    ')} {i} {log[i]}" for i in range(end))
            error.add_note("\n".join([f"seed {seed}, {promise}", *lines]))
            raise


# --- a disk of which a call fails -----------------------------------------------------

CALLS = [(os, name) for name in RecordedDisk.CALLS]
CALLS += [(os, name) for name in ("fsync", "sync", "stat", "listdir", "read", "close")]
CALLS += [(fcntl, "flock"), (mmap, "mmap"), (UnflushedMap, "flush")]
LIBRARY = os.path.dirname(jslices.__file__)
#: What a call ends in; "late" is a signal handler's TimeoutError, "short" half a write.
FAILURES = [errno.EIO, errno.ENOSPC, errno.ENOLCK, errno.EINTR]
FAILURES += [MemoryError, "late", "short"]


@contextlib.contextmanager
def failing(monkeypatch, number, failure):
    """Lets one call of the system that the library makes fail; gives a list of its name."""
    count, hit = itertools.count(), []

    def wrapped(module, name):
        call = getattr(module, name)

        def fails(*args, **options):
            own = sys._getframe(1).f_code.co_filename.startswith(LIBRARY)
            if not own or next(count) != number:
                return call(*args, **options)
            hit.append(name)
            if failure == "late":
                call(*args, **options)
                raise TimeoutError("late")
            if failure == "short" or name == "close":
                if name in ("write", "pwrite"):
                    args = args[0], args[1][: -(-len(args[1]) // 2)], *args[2:]
                return call(*args, **options)
            if failure is MemoryError:
                raise MemoryError
            path = [args[0]] if args and isinstance(args[0], str) else []
            raise OSError(failure, "it failed", *path)

        return fails

    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", UnflushedMap)
        for module, name in CALLS:
            patch.setattr(module, name, wrapped(module, name))
        yield hit
