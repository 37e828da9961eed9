"""Records of a host table, in memory or in a file, and the format of the file.

    description   whole pages: a magic line, then rows, fields and sizes in JSON
    state         whole pages: ``done``, the values that all rows share; at the end a byte,
                  1 if ``init`` was given, and a mark, the file's ``id`` and ``in_progress``
    entries       whole pages, of a map of ids: who owns each row, ``[V, width]``
    records       ``[V, words]``; those of rows that never began are zero
    logs          from a whole page on: for each log of steps among the shared values, which
                  has the last ones, the columns of all, ``[LOG_STEPS, lines]``

``done`` counts the writes that are in the records, and ``in_progress`` is one more during a
write. ``id`` is a new one whenever the file is made or opened: 8 random bytes, which tell
what journal belongs to the file (``journal.py``), then a hash of the optimizer's call, zero
if that is not known. A file gets its name when all of it is written, so its length is
always the one that its description says. A write has a record and its entry as one.
"""

import contextlib
import errno
import fcntl
import hashlib
import io
import json
import mmap
import operator
import os
import re
import stat
import struct
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jslices import InvalidArgumentError
from jslices._host_table.layout import LOG_STEPS, Layout, logs_among
from jslices.checkpoint import files
from jslices.checkpoint.boxes import row_blocks
from jslices.errors import DataLossError, FailedPreconditionError
from jslices.optim.engine.missed import LONG_LOG

PAGE = 4096
#: The bytes of a description are at most so many.
MOST_DESCRIBED = 1 << 24
_MAGIC = b"jslices host table 2\n"
#: The end of the state: ``id`` and ``in_progress``.
_MARK = struct.Struct("<16sq")
_DONE = np.dtype(np.int64)
#: Steps that a log in memory has room for at first.
FIRST_STEPS = 1 << 12
#: Said of a file of an earlier format: of row numbers, and of ids.
_OLD = (
    "was made by an earlier version of jslices. There, of rows = np.arange(V) or parts of "
    "it, save params, state = table.fetch(rows)[0].unpack() with jslices.Saver; here, "
    "restored without variables, HostTable(..., a new path).write(rows, "
    "*jslices.checkpoint.resize_rows(tx, params, state, params))"
)
_OLD_IDS = (
    "was made by an earlier version of jslices. There ids, _ = table.ids.export(); rows, "
    "places = table.fetch(ids); params, state = rows.unpack(), and save these four with "
    "jslices.Saver. Here, restored without variables, of table = HostTable(..., a new path)"
    ": rows, here = table.fetch(ids); new, _ = rows.unpack(); order = np.full(len(new), -1)"
    "; order[here] = places; table.store(rows.pack(*jslices.checkpoint.resize_rows(tx, "
    'params, state, new, {"*": order})))'
)


class File(io.FileIO):
    """A file that is read and written at offsets.

    An interrupt may leave it to the garbage collector, without a warning. It is made by
    one call, so that no interrupt comes between the file and what refers to it.
    """

    #: Where it is now, if that is not the name by which it was opened.
    renamed: str | None = None

    @property
    def path(self) -> str:
        return str(self.name) if self.renamed is None else self.renamed

    def __del__(self) -> None:
        self.close()

    def read_at(self, offset: int, size: int) -> bytes:
        """Read bytes, fewer at the end of the file."""
        parts = []
        with files.naming(self.path):
            os.lseek(self.fileno(), offset, os.SEEK_SET)
            while size and (part := os.read(self.fileno(), size)):
                parts.append(part)
                size -= len(part)
        return b"".join(parts)

    def next_at(self, offset: int, what: int) -> int:
        """Where written bytes (``os.SEEK_DATA``) or a hole (``SEEK_HOLE``) begin next."""
        with files.naming(self.path):
            return os.lseek(self.fileno(), offset, what)

    def write_at(self, offset: int, data: bytes | memoryview | np.ndarray) -> None:
        """Write bytes, or the bytes of an array."""
        if isinstance(data, np.ndarray):
            data = np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
        with files.naming(self.path):
            files.write_at(self.fileno(), memoryview(data), offset)

    def is_at(self, path: str) -> bool:
        """True if this file is what is at a path."""
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.stat(path), os.fstat(self.fileno()))
        return False

    def sync(self) -> None:
        """Wait until what was written is on the disk."""
        with files.naming(self.path):
            os.fsync(self.fileno())


@contextlib.contextmanager
def closed_on_error(opened: "File | Records") -> Iterator[None]:
    """A context that closes a file, or the records in it, if the block raises."""
    try:
        yield
    except BaseException:
        opened.close()
        raise


class Part(NamedTuple):
    """A write to one table."""

    records: "Records"
    number: int  #: of the write, counted from 1.
    rows: np.ndarray  #: int64 ``[n]``, distinct rows.
    words: np.ndarray  #: ``[n, words]``, their records, and their entries beside them.
    shared: Sequence[np.ndarray]  #: the values that all rows share.


class Records:
    """Records ``[V, words]``, and the values that all rows share."""

    def __init__(self, layout: Layout, num_rows: int, shared: Sequence[np.ndarray]) -> None:
        #: The records; those that were never written are zero.
        self.array = np.zeros((num_rows, layout.words), layout.word)
        self.entries = np.zeros((num_rows, layout.width), np.uint32)  #: in a map of ids.
        #: For each log among the shared values its columns ``[steps, lines]`` of all steps.
        self.logs = [np.zeros(*x) for x in _logs(layout, FIRST_STEPS)]
        self.in_logs = layout.logs
        self.shared = [x.copy() for x in shared]  #: the values that all rows share.
        self.done = np.zeros((), np.int64)  #: the number of the last write.
        self.has_init = np.zeros((), bool)  #: True if rows began by another value than 0.
        self.keep_columns()

    @property
    def arrays(self) -> list[np.ndarray]:
        """Arrays of rows whose last word is not zero once they are written."""
        return [x for x in (self.array, self.entries) if x.shape[1]]

    def with_entries(self, rows: np.ndarray, words: np.ndarray, batch: Any) -> np.ndarray:
        """Records as a write has them; their entries may be those of a batch of the map."""
        if not self.entries.shape[1]:
            return words
        entries = self.entries[rows] if batch is None else batch.entries_of(rows)
        return np.append(words, entries.view(words.dtype), axis=1)

    def reserve(self, rows: np.ndarray) -> None:
        """Make room for the records of those of some rows that are new."""

    def apply(self, part: Part) -> None:
        """Write some rows, and the values that all rows share; the same if done again."""
        columns = np.split(part.words, [self.array.shape[1]], axis=1)
        for array, words in zip(self.arrays, columns, strict=False):
            # NumPy copies opaque records 1 to 6 times as fast.
            record = np.dtype((np.void, array.strides[0]))
            words = np.ascontiguousarray(words)
            array.view(record)[part.rows, 0] = words.view(record)[:, 0]
        self.set_shared(part.shared)
        self.keep_columns(1)  # that the next step forgets
        self.done[...] = part.number

    def keep_columns(self, most: int | None = None) -> None:
        """Write columns that are among the shared values to the logs of all steps."""
        for number, mine in enumerate(self.in_logs):
            self.put_columns(number, *mine.columns(self.shared[1:], most))

    def log(self, number: int, steps: int) -> np.ndarray:
        """A log of all steps, with room for so many or, where it forgets, ``LOG_STEPS``."""
        log, room = self.logs[number], min(steps, LOG_STEPS)
        if len(log) < room:
            longer = np.zeros((1 << (room - 1).bit_length(), log.shape[1]), log.dtype)
            longer[: len(log)] = log
            self.logs[number] = log = longer
        return log

    def put_columns(self, number: int, first: int, columns: np.ndarray) -> None:
        """Write columns of a log that follow one another; the oldest make room."""
        log = self.log(number, first + len(columns))
        start = first % len(log)
        here = min(len(columns), len(log) - start)
        for at, some in ((start, columns[:here]), (0, columns[here:])):
            if len(some):
                self.put(log, at, np.ascontiguousarray(some))

    def short_logs(self, shared: Sequence[Any]) -> tuple[list[np.ndarray], list[Any]]:
        """The values that all rows share, with logs as short as here, and all they had.

        ``(shared, known)``: ``put_columns`` takes each of ``known``.
        """
        shared, known = [np.asarray(x) for x in shared], []
        for number, log in enumerate(self.in_logs):
            known.append((number, *log.columns(shared)))
            length = self.shared[1 + log.number].shape[1]
            shared[log.number] = log.shortened(shared, length)
        return shared, known

    def columns_of(self, layout: Layout, words: np.ndarray) -> tuple[np.ndarray, ...]:
        """What records missed ``[n, lines]``, of each log; NaN where it has forgotten."""
        found = []
        for log, mine in zip(self.logs, self.in_logs, strict=True):
            last, count = layout.column(words, mine.last), int(self.shared[1 + mine.steps])
            columns = log[last % len(log)]
            columns[(last >= 0) & (count - last >= LOG_STEPS)] = np.nan
            found.append(columns)
        return tuple(found)

    def waiting(self, layout: Layout, words: np.ndarray) -> tuple[np.ndarray, list[Any]]:
        """Which records have waited longer than a long log, as they may take more columns
        of it than their own; and the shared values with all of these columns."""
        waits, shared = np.zeros(len(words), bool), list(self.shared[1:])
        for log, mine in zip(self.logs, self.in_logs, strict=True):
            if shared[mine.number].shape[1] >= LONG_LOG:
                last = layout.column(words, mine.last).reshape(len(words), -1)
                late = (last >= 0) & (last < mine.first(shared)) & (words[:, -1:] != 0)
                if late.any():
                    first = int(last[late].min())
                    shared[mine.number] = mine.lengthened(shared, log, first)
                    waits |= late.any(axis=1)
        return np.flatnonzero(waits), shared

    def set_shared(self, shared: Sequence[np.ndarray]) -> None:
        for old, new in zip(self.shared, shared, strict=True):
            old[...] = new

    def blocks(self, array: np.ndarray) -> Iterator[slice]:
        """The rows of an array that may have been written, by blocks."""
        return row_blocks(array.shape, array.itemsize)

    def put(self, array: np.ndarray, start: int, words: np.ndarray) -> None:
        """Write rows of an array that follow one another."""
        array[start : start + len(words)] = words

    def close(self) -> None:
        """Let others open the file, if there is one."""


def copy_records(source: Records, target: Records, rows: np.ndarray | None = None) -> None:
    """Copy records, or those of some rows; rows that never began take no whole page."""
    for old, new in zip(source.arrays, target.arrays, strict=True):
        gap = max(1, PAGE // old.strides[0])
        is_new = rows is None and next(target.blocks(new), None) is None
        for part in source.blocks(old) if is_new else row_blocks(new.shape, new.itemsize):
            words = old[part if rows is None else rows[part]]
            began = words[:, -1] | new[part][: len(words), -1]
            for run in _runs(np.flatnonzero(began), gap):
                target.put(new, part.start + run.start, words[run])
    target.set_shared(source.shared)
    for number, (mine, old) in enumerate(zip(source.in_logs, source.logs, strict=True)):
        known = min(int(source.shared[1 + mine.steps]) + 1, len(old))
        new = target.log(number, known)
        for block in row_blocks((known, *old.shape[1:]), old.itemsize):
            target.put(new, block.start, old[block])
    target.keep_columns()
    target.has_init |= source.has_init


def _runs(rows: np.ndarray, gap: int = 1) -> list[slice]:
    """Ascending row numbers as slices, with those between two that are so close."""
    firsts = np.flatnonzero(np.diff(rows, prepend=-1 - gap) > gap)
    starts, stops = rows[firsts], rows[np.append(firsts, len(rows))[1:] - 1] + 1
    return [slice(*pair) for pair in zip(starts.tolist(), stops.tolist(), strict=True)]


class Offsets(NamedTuple):
    """Where things are in a file, in bytes."""

    state: int  #: ``done``, then the values that all rows share
    mark: int  #: the id and ``in_progress``
    entries: int
    entry: int  #: the size of one
    first: int  #: the records
    record: int  #: the size of one
    rows: int  #: V
    shared: int  #: the size of the values that all rows share
    logs: tuple[int, ...]  #: the sizes of columns of logs

    @property
    def size(self) -> int:
        return self.log(len(self.logs))

    def log(self, number: int) -> int:
        """The log of this number; they follow the records."""
        end = self.first + self.rows * self.record
        first = _whole_pages(end) if self.logs else end
        return first + LOG_STEPS * sum(self.logs[:number])


def offsets_in(head: bytes) -> Offsets:
    """The offsets in a file that begins like this.

    Raises:
      Exception: of any kind, for what is no description.
    """
    text = head[: head.index(b"\n", len(_MAGIC)) + 1]
    about = json.loads(text[len(_MAGIC) :])
    rows, record, size = (operator.index(about[n]) for n in ("rows", "record", "state"))
    state = _whole_pages(len(text))
    entries = _whole_pages(state + size + 1 + _MARK.size)
    entry = operator.index(about.get("entry", 0))
    first, shared = _whole_pages(entries + rows * entry), size - _DONE.itemsize
    in_logs = logs_among(about["fields"], values := about["shared"])
    kinds = ((values[x.number][1], values[x.number][2][0]) for x in in_logs)
    logs = tuple(np.dtype(dtype).itemsize * operator.index(n) for dtype, n in kinds)
    held = state, entries - _MARK.size, entries, entry, first, record, rows, shared
    return Offsets(*held, logs)


def offsets_of(file: File) -> Offsets | None:
    """The offsets in a file; None unless it is a whole one of a host table."""
    head = file.read_at(0, MOST_DESCRIBED)
    with contextlib.suppress(Exception):  # whatever a crafted description raises
        offsets = offsets_in(head)
        if head.startswith(_MAGIC) and offsets.size == os.fstat(file.fileno()).st_size:
            return offsets
    return None


class FileForm:
    """The form of a file of a layout with so many rows.

    ``shared`` are the values that all rows share at the beginning.
    """

    def __init__(self, layout: Layout, num_rows: int, shared: Sequence[np.ndarray]) -> None:
        self.shared = shared
        #: Shapes and dtypes in the state: ``done``, then the values that all rows share.
        self.like = [((), _DONE), *((x.shape, x.dtype) for x in shared)]
        size = _DONE.itemsize + sum(x.nbytes for x in shared)
        self.head = _description(layout, num_rows, size)
        self.at = offsets_in(self.head)
        self.words, self.word, self.tx = layout.words, layout.word, layout.tx
        self.is_keyed = bool(layout.keyed)
        self.in_logs, self.logs = layout.logs, _logs(layout, LOG_STEPS)
        call = re.sub(" at 0x[0-9a-f]+", "", self.tx.call or "").encode()
        self.optimizer = hashlib.blake2b(call, digest_size=8).digest() if call else bytes(8)

    def check(self, file: File) -> None:
        """Refuse a file of another kind or table, and one that was cut off or extended."""
        path, start = file.path, file.read_at(0, len(self.head))
        magic = start[: len(_MAGIC)]
        if len(start) < PAGE and _MAGIC.startswith(magic):
            raise DataLossError(
                f"{path} is cut off after {len(start)} bytes, and a HostTable has at "
                f"least {self.at.first}: put a copy in its place, or delete it to begin a "
                "new table"
            )
        found = re.match(rb"jslices host table (\d{1,9})\n", start)
        if found and int(found[1]) > 2:
            raise InvalidArgumentError(
                f"{path} is of format {int(found[1])} and this version of jslices reads 2: "
                "it was made by a later version, so update jslices"
            )
        if found and re.match(
            rb'.* 1\n|.*\n(?!.*"record")|.*\n.*\bclock/(run|snap|log/\d+", "\w+", \[0,)',
            start,
        ):
            raise InvalidArgumentError(f"{path} {_OLD_IDS if self.is_keyed else _OLD}")
        if magic != _MAGIC:
            raise InvalidArgumentError(
                f"{path} is no file of a HostTable; give the path of one, or of none yet"
            )
        if start[len(_MAGIC) :] != self.head[len(_MAGIC) :]:
            parts = [_parts(x[len(_MAGIC) :]) for x in (start, self.head)]
            common = {*parts[0]} & {*parts[1]}
            held, asked = (", ".join(x for x in of if x not in common) for of in parts)
            raise InvalidArgumentError(
                f"{path} holds a table with {held or 'less'}, and HostTable was asked for "
                f"one with {asked or 'less'}; open it with the shape, dtype, optimizer and "
                "keyed= that it was made with. table.grow(rows) gives it more rows"
            )
        length = os.fstat(file.fileno()).st_size
        if length != self.at.size:
            raise DataLossError(
                f"{path} is {length} bytes long, and its {self.at.rows} rows take "
                f"{self.at.size}: it was cut off or written by something else. Put a copy "
                "in its place"
            )


class FileRecords(Records):
    """Records in a file, which the operating system caches in memory."""

    def __init__(
        self, path: str, lock: File, form: FileForm, *, temporary: bool = False
    ) -> None:
        self.path, self.form = path, form
        self._temporary = path if temporary else None
        # The map and its descriptor may outlive the table; the lock has a file of its own.
        self._lock = lock
        writable = lock.writable()
        self._file = File(path, "r+" if writable else "r")
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        with closed_on_error(self._file), files.naming(path):
            if writable and _is_in_memory(self._file):  # where reading takes room too
                os.posix_fallocate(self._file.fileno(), 0, form.at.log(0))
            self._map = mmap.mmap(self._file.fileno(), form.at.size, access=access)
        if hasattr(mmap, "MADV_RANDOM"):  # read one page, not those around it
            self._map.madvise(mmap.MADV_RANDOM)
        self.done, *self.shared = _arrays(self._map, form.at.state, form.like)
        like = (form.at.rows, form.words), form.word
        (self.array,) = _arrays(self._map, form.at.first, [like])
        like = (form.at.rows, form.at.entry // 4), np.dtype(np.uint32)
        (self.entries,) = _arrays(self._map, form.at.entries, [like])
        self.logs = _arrays(self._map, form.at.log(0), form.logs)
        self.in_logs = form.in_logs
        self._reserved = np.zeros(form.at.size // mmap.PAGESIZE + 1, bool)  # by pages
        # Then rows that were written may share their pages with holes.
        self._in_blocks = os.fstatvfs(self._file.fileno()).f_bsize < mmap.PAGESIZE
        at = form.at.mark - 1
        # ``in_progress`` is ``done``, or one more while a write goes on.
        mark: list[Any] = [((), np.dtype("?")), ((16,), np.dtype("u1")), ((), _DONE)]
        self.has_init, self.id, self.in_progress = _arrays(self._map, at, mark)
        if writable:  # a step that was in the journal has kept none
            self.keep_columns()

    def renew(self) -> None:
        """Give the file a new id, so that journals of before are not its own."""
        self.id[...] = np.frombuffer(os.urandom(8) + self.form.optimizer, np.uint8)

    def reserve(self, rows: np.ndarray) -> None:
        # On a full disk a write through the map ends in SIGBUS where a block of its page is
        # a hole, so a call first writes these pages as they are.
        at, page = self.form.at, mmap.PAGESIZE
        tables = ((at.first, at.record, self.array), (at.entries, at.entry, self.entries))
        spans = []
        for first, size, array in tables[: len(self.arrays)]:
            new = rows if self._in_blocks else rows[array[rows, -1] == 0]
            spans.append((first + new * size, size))
        for number, mine in enumerate(self.in_logs):
            step, size = int(self.shared[1 + mine.steps]) + 1, at.logs[number]
            spans.append((at.log(number) + np.array([step % LOG_STEPS]) * size, size))
        pages = np.unique(np.concatenate([_numbers(*span, page) for span in spans]))
        for run in _runs(pages[~self._reserved[pages]]):
            start, stop = run.start * page, min(run.stop * page, at.size)
            self._file.write_at(start, self._file.read_at(start, stop - start))
            self._reserved[run] = True

    def apply(self, part: Part) -> None:
        self.in_progress[...] = part.number
        super().apply(part)

    def blocks(self, array: np.ndarray) -> Iterator[slice]:
        first, size = self._first(array), array.strides[0]
        at, stop, done = first, first + array.nbytes, 0
        while at < stop:
            try:
                at = self._file.next_at(at, os.SEEK_DATA)
            except OSError as error:
                if error.errno != errno.ENXIO:
                    raise
                return  # there is no more
            end = self._file.next_at(at, os.SEEK_HOLE)
            here = max(done, (at - first) // size)
            at, done = end, min(-((first - end) // size), len(array))
            for part in row_blocks((done - here, *array.shape[1:]), array.itemsize):
                yield slice(here + part.start, here + part.stop)

    def _first(self, array: np.ndarray) -> int:
        at = self.form.at
        firsts = [at.first, at.entries, *map(at.log, range(len(self.logs)))]
        arrays = [self.array, self.entries, *self.logs]
        return next(x for x, y in zip(firsts, arrays, strict=True) if y is array)

    def put(self, array: np.ndarray, start: int, words: np.ndarray) -> None:
        self._file.write_at(self._first(array) + start * array.strides[0], words)

    def flush(self) -> None:
        """Wait until everything is on the disk."""
        with files.naming(self.path):
            self._map.flush()
        self._file.sync()

    def check_length(self) -> None:
        """Refuse to go on with a file that was cut off, whose pages end the process."""
        length = os.fstat(self._file.fileno()).st_size
        if length < self.form.at.size:
            raise DataLossError(
                f"{self.path} was cut off after {length} bytes by something else while a "
                "HostTable had it open: close the table, and put a copy in its place"
            )

    def check_path(self) -> None:
        """Refuse to go on where another file, or none, has taken the place of this one."""
        if not self._file.is_at(self.path):
            raise DataLossError(
                f"{self.path} was deleted or replaced while a HostTable had it open, and "
                "what was stored since is in no file: table.save(path) writes it to another"
            )

    def publish(self, path: str) -> None:
        """Give a file that was made its name; the same if done again."""
        if self._temporary is not None:
            if os.path.lexists(self._temporary):
                os.replace(self._temporary, path)  # while it is open and locked
            files.sync_directory(os.path.dirname(path))
            self.path = self._file.renamed = path
            self._temporary = None

    def close(self) -> None:
        if self._temporary is not None:
            files.remove(self._temporary)
        self.unlock()
        self._file.close()

    def unlock(self) -> None:
        """Unlock the file; in a forked process, leave the lock to the parent."""
        self._lock.close()


def make(path: str, form: FileForm) -> FileRecords:
    """Make a file under a temporary name, locked; ``publish`` gives it its own."""
    clean(path)
    temporary = files.temporary_path(path, files.new_id())
    lock = File(files.open_new(temporary), "r+")
    try:
        lock.renamed = temporary
        with files.naming(temporary):
            os.ftruncate(lock.fileno(), form.at.size)
        state = b"".join(x.tobytes() for x in (np.zeros((), np.int64), *form.shared))
        lock.write_at(form.at.state, state.ljust(form.at.entries - form.at.state, b"\0"))
        lock.write_at(form.at.mark, _MARK.pack(os.urandom(8) + form.optimizer, 0))
        lock.write_at(0, form.head)
        return FileRecords(temporary, lock, form, temporary=True)
    except BaseException:
        lock.close()
        files.remove(temporary)
        raise


def clean(path: str) -> None:
    """Delete temporary files of this name that killed processes left."""
    for temporary, _ in files.temporaries_of(path):
        if files.is_abandoned(temporary):
            files.remove(temporary)


def locked(path: str, mode: str = "r+") -> File | None:
    """Open a file and lock it for as long as it is open; None if there is none.

    Several may read it at a time (``mode="r"``).

    Raises:
      InvalidArgumentError: for a directory, a pipe or a device.
      FailedPreconditionError: for a file that is open as a HostTable.
    """
    while True:
        try:
            if not stat.S_ISREG(os.stat(path).st_mode):
                raise InvalidArgumentError(
                    f"{path} is no file but a directory, a pipe or a device; give the path "
                    "of a HostTable's file, or of none yet"
                )
            file = File(path, mode)
        except FileNotFoundError:
            return None
        with closed_on_error(file):
            _lock(file)
            if file.is_at(path):  # another may have been renamed to it between the two
                return file
        file.close()


def _lock(file: File) -> None:
    try:
        kind = fcntl.LOCK_EX if file.writable() else fcntl.LOCK_SH
        fcntl.flock(file.fileno(), kind | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise FailedPreconditionError(
            f"{file.path} is open as a HostTable, in another process or in this one, and "
            "only one can train it. Call close() there, or open a copy that save(path) made"
        ) from error
    except OSError as error:
        warnings.warn(
            f"{file.path} cannot be locked ({error.strerror}), as on some network file "
            "systems: see to it that one process alone opens it as a HostTable",
            stacklevel=2,
        )


def journal_of(path: str) -> str:
    return f"{path}-journal"


def remove_journal(journal: str) -> None:
    """Delete a journal; a power failure would find the table flushed, and it unflushed."""
    if os.path.lexists(journal):
        files.remove(journal)
        files.sync_directory(os.path.dirname(journal))


def _is_in_memory(file: File) -> bool:
    """True on Linux's tmpfs."""
    device = os.fstat(file.fileno()).st_dev
    with contextlib.suppress(OSError), open("/proc/self/mountinfo") as mounts:
        for line in mounts:
            fields = line.split()
            if fields[2] == f"{os.major(device)}:{os.minor(device)}":
                return fields[fields.index("-") + 1] == "tmpfs"
    return False


def _description(layout: Layout, num_rows: int, state: int) -> bytes:
    """The first pages of a file: its layout in JSON."""
    both = layout.fields, layout.shared
    parts = [[[x.name, x.dtype.name, list(x.shape)] for x in part] for part in both]
    description: dict[str, Any] = {
        "rows": num_rows,
        "record": layout.words * layout.word.itemsize,
        "state": state,
        "fields": parts[0],
        "shared": parts[1],
    }
    if layout.keyed:
        description |= {"entry": 4 * layout.width, "keyed": layout.keyed}
    text = _MAGIC + json.dumps(description).encode() + b"\n"
    return text.ljust(_whole_pages(len(text)))


def _parts(description: bytes) -> list[str]:
    """What a description says of a table; all of it in one if it is damaged."""
    text = description.split(b"\n")[0].decode(errors="replace")
    with contextlib.suppress(Exception):  # whatever a crafted one raises
        about = json.loads(text)
        arrays = [f"{x} {dtype}{d}" for x, dtype, d in about["fields"] + about["shared"]]
        return [f"{about['rows']} rows", *arrays, f"keyed={about.get('keyed')}"]
    return [text]


def _logs(layout: Layout, steps: int) -> list[tuple[Any, Any]]:
    """Shapes and dtypes of the logs of all steps, with room for so many."""
    fields = [layout.shared[log.number] for log in layout.logs]
    return [((steps, x.shape[0]), x.dtype) for x in fields]


def _arrays(
    buffer: mmap.mmap, offset: int, like: Sequence[tuple[Any, Any]]
) -> list[np.ndarray]:
    """View arrays of some shapes and dtypes that follow one another in a buffer."""
    arrays = []
    for shape, dtype in like:
        arrays.append(np.ndarray(shape, dtype, buffer, offset))
        offset += arrays[-1].nbytes
    return arrays


def _numbers(starts: np.ndarray, size: int, page: int) -> np.ndarray:
    """The numbers of the pages that spans of this size are in, with duplicates."""
    first, last = starts // page, (starts + size - 1) // page
    return np.concatenate([np.minimum(first + i, last) for i in range(size // page + 2)])


def _whole_pages(size: int) -> int:
    return -(-size // PAGE) * PAGE
