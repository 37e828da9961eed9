"""The journal of host tables, by which a step is written whole or not at all.

A journal lies beside the file, ``PATH-journal``, from the first write after opening to
``close``. Tables that are stored together share that of the first of them, to which the
journals of the others are symbolic links. Its first bytes are the head, the body comes a
page later: a line of JSON with the file, its id and the number of the write for each table,
then the rows and the shared values of each, then the records.

A write goes through these states, and each action may be done again from its start:

  1. room for new rows is reserved, the body written     killed: the step is lost, whole
  2. head: *started*, and the checksum of the body       from here on the step counts
  3. ``in_progress`` in each file; records, values;
     ``done``                                            killed: the next opening writes it
  4. head: *finished*

Ctrl-C between 2 and 4 leaves the action in ``Journal._started``, for tables in memory too,
and the next call does it first. The same holds while a file takes the place of another
(``restore``, ``grow``).

A disk writes pages in any order, so before the first write since a flush the head is on the
disk, saying *unflushed*, with the id of this start of the machine. Opening checks in this
order (``settle``):

  * *unflushed*, and the machine was started anew: DataLossError, delete the journal to
    take the rows as they are
  * *finished*, or none: ``in_progress`` must be ``done``; the journal is deleted
  * *started*: the file's id must be in the body, whose checksum must be right, and the
    number one more than ``done`` (or equal): it is written. Else DataLossError. Others
    that the body names are written only if their own journal is this one: a crafted one
    may name any file
  * no such head: DataLossError

and then flushes the file and gives it a new id. Begin with :class:`Journal`, and ``settle``
in opening.py; tests/test_host_table_faults.py interrupts and kills all of it.
"""

import atexit
import contextlib
import errno
import functools
import json
import os
import struct
import sys
import threading
import uuid
import warnings
import weakref
import zlib
from collections.abc import Callable, Sequence
from typing import Concatenate, NamedTuple, ParamSpec, Self, TypeVar

import jax
import numpy as np

from jslices._host_table import records as storage
from jslices._host_table.rows import Stored
from jslices.checkpoint import files
from jslices.errors import DataLossError, FailedPreconditionError

_MAGIC = b"jsrows 2"
_NOTHING = np.zeros(0, np.uint8)
_HEAD = struct.Struct("<8sIIIIQ16s")
_CHECKSUM = struct.Struct("<I")


class Head(NamedTuple):
    """The head of a journal."""

    started: bool
    unflushed: bool
    tables: int  #: that share the journal
    checksum: int = 0  #: of the body
    length: int = 0  #: bytes of the body
    boot: bytes = b""  #: of this start of the machine

    def to_bytes(self) -> bytes:
        data = _HEAD.pack(_MAGIC, *self[:-1], self.boot or this_boot())
        return data + _CHECKSUM.pack(zlib.crc32(data))


class FilePart(NamedTuple):
    """What a journal records about a write to one file."""

    file: str  #: its path, in the journal relative to the journal's folder
    id: str
    number: int
    height: int  #: of the write, in rows
    record: int  #: bytes of a row's
    shared: int  #: bytes of the values that all rows share
    rows: np.ndarray = _NOTHING  #: int64 ``[height]``, like the next two not in the index
    words: np.ndarray = _NOTHING  #: uint8 ``[height, record]``
    values: np.ndarray = _NOTHING  #: uint8 ``[shared]``


class Journal:
    """Writes to some tables: each write is in all of them, or in none.

    When its last table is deleted, stored steps are written.
    """

    #: Whether others may open the files, or the tables have another journal. True until it
    #: is made: an interrupt may come before.
    closed = True

    def __init__(self, members: Sequence[storage.Records]) -> None:
        self.members = list(members)  #: the records of the tables.
        self.lock = threading.RLock()  #: for one call at a time.
        #: A write that was stored but not started: rows of each table.
        self.pending: Sequence[Stored] = ()
        self._started: Callable[[], None] | None = None
        self._file: storage.File | None = None
        self._unflushed = False
        self._flush_error: OSError | None = None
        self._pid = os.getpid()
        _JOURNALS.add(self)
        self.closed = False

    @property
    def _files(self) -> list[storage.FileRecords]:
        return [x for x in self.members if isinstance(x, storage.FileRecords)]

    def check_usable(self, table: object) -> None:
        """Refuse to go on after ``close``, in a forked process, and without the file.

        Raises:
          FailedPreconditionError: in these cases.
          DataLossError: for a file that was cut off.
        """
        if self._files and os.getpid() != self._pid:
            raise FailedPreconditionError(
                f"{table!r} is open in the process that this one was forked from, and only "
                "that may use it: fetch rows there, or open a copy that save(path) made"
            )
        if self.closed:
            raise FailedPreconditionError(f"{table!r} is closed; make another HostTable")
        self._check_lengths()

    def _check_lengths(self) -> None:
        for member in self._files:
            member.check_length()

    # --- writing ----------------------------------------------------------------------

    def finish(self) -> None:
        """Finish what an interrupt has left, and write stored steps."""
        self._resume()
        if self.pending:
            try:
                self._check_lengths()
                parts = [rows.part() for rows in self.pending]
            except (DataLossError, FailedPreconditionError, jax.errors.JaxRuntimeError):
                self.pending = ()  # no file, rows of another fetch, or a step that failed
                raise
            self.write(parts)  # whatever else is raised, the next call tries again

    def store(self, pending: Sequence[Stored], *, at_once: bool) -> None:
        """Write to some tables, now or at the next call. Nothing may be unfinished."""
        self.pending = pending
        if at_once:
            self.finish()

    def write(self, parts: Sequence[storage.Part]) -> None:
        """Write to some tables. Nothing may be unfinished."""
        for part in parts:
            part.records.reserve(part.rows)
        of_files = [part for part in parts if isinstance(part.records, storage.FileRecords)]
        head = self._write_body(of_files) if of_files else None
        self.do(functools.partial(self._apply, head, parts))

    def do(self, action: Callable[[], None]) -> None:
        """Do a repeatable action; after an interrupt the next call does it again."""
        self._started = action
        self._resume()

    def _resume(self) -> None:
        if self._started is not None:
            self._started()
            self._started = None

    def _apply(self, head: Head | None, parts: Sequence[storage.Part]) -> None:
        if head is not None:
            self._write_head(head)  # from here on the step counts
        for part in parts:
            part.records.apply(part)
        if head is not None:
            self._write_head(head._replace(started=False))
        self.pending = ()

    def replace(self, old: storage.Records, new: storage.Records) -> None:
        """Let a table have other records, and its path another file."""
        if isinstance(old, storage.FileRecords) and isinstance(new, storage.FileRecords):
            new.publish(old.path)
        self.members[:] = [new if x is old else x for x in self.members]
        old.close()

    def flush(self) -> None:
        """Write everything that was stored to the disk.

        Raises:
          OSError: if it cannot be written, now and at every call from now on: a system
            reports a failed write once, and forgets it.
        """
        self.finish()
        if self._flush_error is not None:
            raise OSError(
                self._flush_error.errno or errno.EIO,  # it may be a handler's TimeoutError
                f"an earlier flush failed ({self._flush_error}), and what is on "
                "the disk is not certain: save(path) makes a copy, close() lets the file "
                "be opened again",
                self._flush_error.filename or self._files[0].path,
            ) from self._flush_error
        try:
            for member in self._files:
                member.check_path()
                member.flush()
            if self._unflushed:
                self._write_head(Head(False, False, len(self._files)))
                self._opened().sync()
                self._unflushed = False
        except OSError as error:
            if error.errno is not None:  # not what a signal handler raises
                self._flush_error = error
            raise

    # --- the file ---------------------------------------------------------------------

    def _opened(self) -> storage.File:
        """The file, made before the first write."""
        if self._file is None:
            first, *others = (storage.journal_of(x.path) for x in self._files)
            self._file = storage.File(first, "x+")
            for link in others:
                folder = os.path.dirname(link)
                os.symlink(os.path.relpath(first, folder), link)
            for path in (first, *others):
                files.sync_directory(os.path.dirname(path))
        return self._file

    def _write_head(self, head: Head) -> None:
        self._opened().write_at(0, head.to_bytes())

    def _write_body(self, parts: Sequence[storage.Part]) -> Head:
        """Write all but the head; returns the head that makes the write count."""
        file = self._opened()
        if not self._unflushed:
            self._write_head(Head(False, True, len(self._files)))
            file.sync()
            self._unflushed = True
        folder = os.path.dirname(file.path)
        index = json.dumps([_described(part, folder) for part in parts]).encode()
        values = (x.tobytes() for part in parts for x in (part.rows, *part.shared))
        start = b"".join([index, b"\n", *values])
        file.write_at(storage.PAGE, start)
        offset, checksum = storage.PAGE + len(start), zlib.crc32(start)
        for part in parts:
            words = np.ascontiguousarray(part.words).reshape(-1).view(np.uint8)
            file.write_at(offset, words)
            offset, checksum = offset + len(words), _checksum(words, checksum)
        return Head(True, True, len(self._files), checksum, offset - storage.PAGE)

    def close(self) -> None:
        """Finish, flush, delete the journal and let others open the files.

        Raises:
          Exception: if a write cannot be finished; the tables stay open. If they cannot be
            flushed they are closed, and the journal remains.
        """
        if os.getpid() != self._pid and self._files:
            return  # the files belong to the parent
        if not self.closed:
            self.finish()
        try:
            if not self.closed:
                self.end()
        finally:
            self.release()

    def release(self) -> None:
        """Let others open the files, without a flush."""
        self.closed = True
        if self._file is not None:
            self._file.close()
        for member in self.members:
            member.close()

    def end(self) -> None:
        """Finish, flush and delete the journal; the tables stay open, for another one."""
        self.flush()
        if self._file is None:
            return
        first = self._file.path
        for member in self._files[1:]:
            link = storage.journal_of(member.path)
            if os.path.islink(link) and os.path.realpath(link) == first:
                files.remove(link)
        if self._file.is_at(first):
            files.remove(first)
        self._file.close()
        self._file = None

    # --- the end of the process -------------------------------------------------------

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # At the end of the process everything is written, and modules may be gone.
        if not is_finalizing():
            self.abandon()

    def abandon(self) -> None:
        """Write what was stored, at the end of the process or of the last table."""
        if self.closed or not self._files or os.getpid() != self._pid:
            return
        try:
            self.finish()
        except Exception as error:
            paths = ", ".join(x.path for x in self._files)
            warnings.warn(
                f"the last step of {paths} is not written: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
        finally:
            self.release()

    def forget(self) -> None:
        """In a forked process: leave the files, and their locks, to the parent."""
        self.lock = threading.RLock()
        if self._files:
            self.pending, self._started = (), None
        for member in self._files:
            member.unlock()


#: Of all existing tables.
_JOURNALS: "weakref.WeakSet[Journal]" = weakref.WeakSet()


@atexit.register
def _finish_all() -> None:
    # Before JAX, which was imported and registered earlier, releases its devices.
    for journal in list(_JOURNALS):
        if journal.lock.acquire(timeout=10):  # a thread may be in a call for ever
            journal.abandon()


def _forget_all() -> None:
    for journal in list(_JOURNALS):
        journal.forget()


os.register_at_fork(after_in_child=_forget_all)

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")
_Owner = TypeVar("_Owner", bound="Journaled")


def one_at_a_time(
    method: Callable[Concatenate[_Owner, _Args], _Result],
) -> Callable[Concatenate[_Owner, _Args], _Result]:
    """A method that one thread calls at a time, before ``close``."""

    def call(self: _Owner, /, *args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        self._journal.check_usable(self)
        with self._journal.lock:
            return method(self, *args, **kwargs)

    functools.update_wrapper(call, method)
    return call


class Journaled:
    """A table, or some, that a journal writes to."""

    #: The journal, and the number of the first table in it.
    _journal_slot: tuple[Journal, int]

    @property
    def _journal(self) -> Journal:
        return self._journal_slot[0]

    @one_at_a_time
    def flush(self) -> None:
        """Returns once all stored steps are written, in files on the disk.

        Raises:
          DataLossError: where a file was deleted or replaced.
        """
        self._journal.flush()

    def close(self) -> None:
        """Writes stored steps, flushes and lets others open the files. Idempotent.

        Raises:
          DataLossError: where a file was deleted or replaced.
        """
        with self._journal.lock:
            self._journal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_head(journal: str) -> Head | None:
    """The head of a journal; None if there is none, or nothing was written to it.

    Raises:
      DataLossError: for a damaged one.
    """
    try:
        with storage.File(journal, "r") as file:
            data = file.read_at(0, _HEAD.size + _CHECKSUM.size)
    except FileNotFoundError:
        return None
    if not data:
        return None
    if len(data) == _HEAD.size + _CHECKSUM.size:
        magic, started, unflushed, *rest = _HEAD.unpack(data[: _HEAD.size])
        head = Head(bool(started), bool(unflushed), *rest)
        if magic == _MAGIC and head.to_bytes() == data:
            return head
    raise DataLossError(
        f"{journal} is damaged, or no journal of a HostTable, and may have a step that the "
        f"table lacks: put a copy of the table in its place and delete {journal}; or "
        "delete only that, to take the rows as they are"
    )


def read_body(path: str, journal: str, head: Head) -> list[FilePart]:
    """The parts of a write that is in the journal of a file."""
    with storage.File(journal, "r") as source:
        length = min(head.length, os.fstat(source.fileno()).st_size)
        body = np.frombuffer(source.read_at(storage.PAGE, length), np.uint8)
    folder = os.path.dirname(os.path.realpath(journal))
    # What a crafted index raises: too deep for the parser, words for numbers, and so on.
    with contextlib.suppress(ValueError, TypeError, AttributeError, RecursionError):
        index, _, _ = body.tobytes().partition(b"\n")
        parts = [FilePart(*x) for x in json.loads(index)]
        counts = [n for x in parts for n in (x.number, x.height, x.record, x.shared)]
        if not all(type(n) is int and 0 <= n < 2**63 for n in counts):
            raise ValueError
        starts = [8 * x.height + x.shared for x in parts]
        sizes = [len(index) + 1, *starts, *(x.height * x.record for x in parts)]
        if not sum(sizes) == head.length == len(body):
            raise ValueError
        _, *pieces = np.split(body, np.cumsum(sizes))[:-1]
        checksum = zlib.crc32(body[: sum(sizes[: len(parts) + 1])].data)
        whole, count = [], len(parts)
        for part, start, words in zip(parts, pieces[:count], pieces[count:], strict=True):
            checksum = _checksum(words, checksum)
            rows, values = np.split(start, [8 * part.height])
            file = os.path.realpath(os.path.join(folder, part.file))
            rows, words = rows.view(np.int64), words.reshape(part.height, part.record)
            whole.append(part._replace(file=file, rows=rows, words=words, values=values))
        if checksum == head.checksum:
            return whole
    raise DataLossError(
        f"{journal} is damaged, and may have a step that {path} lacks: put a copy that "
        f"save(path) made in its place and delete {journal}"
    )


def _described(part: storage.Part, folder: str) -> tuple[str | int, ...]:
    """The entry of a part in the index."""
    records = part.records
    assert isinstance(records, storage.FileRecords)
    return (
        os.path.relpath(records.path, folder),
        records.id.tobytes().hex(),
        part.number,
        len(part.rows),
        records.form.at.record + records.form.at.entry,
        sum(x.nbytes for x in part.shared),
    )


def _checksum(words: np.ndarray, before: int) -> int:
    """Continue a CRC-32 with eight bytes of each page: a disk may lack whole pages."""
    # Summing all of them takes 3 to 5 % of a step.
    pages = len(words) // storage.PAGE * storage.PAGE
    starts = words[:pages].view(np.uint64)[:: storage.PAGE // 8]
    return zlib.crc32(words[pages:].data, zlib.crc32(starts.tobytes(), before))


@functools.cache
def this_boot() -> bytes:
    """An id of this start of the machine; zeros where the system has none."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return uuid.UUID(file.read().strip()).bytes
    except OSError:
        return bytes(16)
