"""Records in the memory of this process, or in a file that no other process has open."""

import errno
import json
import mmap
import os
import shutil
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jslices import FailedPreconditionError, InvalidArgumentError
from jslices._host_table.layout import Field, Layout
from jslices.extend import human_bytes

try:
    import fcntl
except ImportError:  # Windows: nobody is kept from opening a file twice
    fcntl = None  # type: ignore[assignment]

_MAGIC = b"jslices host table 1\n"
_PAGE = 4096


class Changes(NamedTuple):
    """Changes that are stored at once."""

    numbers: np.ndarray  #: int64 ``[n]``, distinct rows.
    words: np.ndarray  #: ``[n, words]``, their records.
    shared: Sequence[np.ndarray]  #: the values that all rows share.


class Records:
    """Records ``[V, words]``, and the values that all rows share.

    Attributes:
      array: the records; those that were never written are zero.
      shared: the values that all rows share.
      counter: int64 ``[]``, the number of calls of ``store``.
    """

    def __init__(self, layout: Layout, num_rows: int, shared: Sequence[np.ndarray]) -> None:
        self.array = np.zeros((num_rows, layout.words), layout.word)
        self.shared = [x.copy() for x in shared]
        self.counter = np.zeros((), np.int64)

    def store(self, changes: Changes) -> None:
        """Write some rows, and the values that all rows share."""
        self.array[changes.numbers] = changes.words
        for old, new in zip(self.shared, changes.shared, strict=True):
            old[...] = new
        self.counter += 1  # last, for FileRecords

    def flush(self) -> None:
        """Wait until everything is on the disk, if there is a file."""

    def close(self) -> None:
        """Let others open the file."""


class FileRecords(Records):
    """Records in a file, which the operating system caches in memory.

    Changes are written to a journal beside the file first, so that they are in the file
    whole or not at all when the process is killed.
    """

    def __init__(
        self, path: str, layout: Layout, num_rows: int, shared: Sequence[np.ndarray]
    ) -> None:
        head = _description(layout, num_rows)
        state = b"".join(x.tobytes() for x in (np.zeros((), np.int64), *shared))
        first = _whole_pages(len(head) + len(state))
        size = first + num_rows * layout.words * layout.word.itemsize
        self._journal_path = f"{path}-journal"
        self._file = _opened(path, buffering=0)
        try:
            descriptor = self._file.fileno()
            _lock(descriptor, path)
            if not os.fstat(descriptor).st_size:
                _check_room(path, size)
                self._file.write(head + state)
            self._file.seek(0)
            _check_description(path, self._file.read(len(head)), head)
            if os.fstat(descriptor).st_size < size:  # new, or killed when it was
                os.ftruncate(descriptor, size)
            self._map = mmap.mmap(descriptor, size)
            self._journal = _opened(self._journal_path)
        except BaseException:
            self._file.close()
            raise
        if hasattr(mmap, "MADV_RANDOM"):  # read one page, not those around it
            self._map.madvise(mmap.MADV_RANDOM)
        like = [((), np.int64), *((x.shape, x.dtype) for x in shared)]
        self.counter, *self.shared = _arrays(self._map, len(head), like)
        records = (num_rows, layout.words), layout.word
        (self.array,) = _arrays(self._map, first, [records])
        self._replay_journal()

    def store(self, changes: Changes) -> None:
        self._write_journal(_PAGE, changes.numbers, changes.words, *changes.shared)
        head = np.array([self.counter + 1, len(changes.numbers)], np.int64)
        self._write_journal(0, head)  # from here on the changes count
        super().store(changes)

    def _write_journal(self, offset: int, *arrays: np.ndarray) -> None:
        self._journal.seek(offset)
        for x in arrays:
            self._journal.write(np.ascontiguousarray(x).view(np.uint8).data)
        self._journal.flush()

    def _replay_journal(self) -> None:
        """Store the changes that a killed process left in the journal alone."""
        head = np.frombuffer(self._journal.read(16), np.int64)
        if len(head) < 2 or head[0] != self.counter + 1:
            return
        self._journal.seek(_PAGE)
        like = [((head[1],), np.int64), ((head[1], self.array.shape[1]), self.array.dtype)]
        like += [(x.shape, x.dtype) for x in self.shared]
        numbers, words, *shared = _arrays(self._journal.read(), 0, like)
        super().store(Changes(numbers, words, shared))

    def flush(self) -> None:
        self._map.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        if not self._file.closed:
            self._journal.close()
            os.unlink(self._journal_path)
            _unlock(self._file.fileno())
            self._file.close()


def _opened(path: str, buffering: int = -1) -> Any:
    """Open a file to read and write, or create it."""
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering)


def _lock(descriptor: int, path: str) -> None:
    if fcntl is None:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise FailedPreconditionError(
            f"{path} is open as a HostTable, in another process or in this one, and only "
            "one can train it. Call close() there, or open a copy that save(path) made"
        ) from error


def _unlock(descriptor: int) -> None:
    """Unlock a file now: the map keeps a descriptor until the last array is gone."""
    if fcntl is not None:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def _check_room(path: str, size: int) -> None:
    """Refuse to begin a file for which the disk has no room.

    Its pages take room as they are written, and a process that writes one for which there
    is none is killed without a message.
    """
    free = shutil.disk_usage(os.path.dirname(path) or ".").free
    if free < size:
        raise OSError(
            errno.ENOSPC,
            f"a HostTable of {human_bytes(size)} has no room on a disk with "
            f"{human_bytes(free)} left",
            path,
        )


def _description(layout: Layout, num_rows: int) -> bytes:
    """The first pages of a file: its layout in JSON."""

    def described(fields: Sequence[Field]) -> list[list[Any]]:
        return [[field.name, field.dtype.name, list(field.shape)] for field in fields]

    description = {
        "rows": num_rows,
        "fields": described(layout.fields),
        "shared": described(layout.shared),
    }
    text = _MAGIC + json.dumps(description).encode() + b"\n"
    return text.ljust(_whole_pages(len(text)))


def _check_description(path: str, actual: bytes, expected: bytes) -> None:
    if actual == expected:
        return
    if not actual.startswith(_MAGIC):
        raise InvalidArgumentError(
            f"{path} is no file of a HostTable; give the path of one, or of none yet"
        )
    texts = [x.removeprefix(_MAGIC).split(b"\n")[0].decode() for x in (actual, expected)]
    raise InvalidArgumentError(
        f"{path} holds a table with {texts[0]}, and HostTable was asked for one with "
        f"{texts[1]}; open it with the shape, dtype and optimizer that it was made with"
    )


def _arrays(
    buffer: bytes | mmap.mmap, offset: int, like: Sequence[tuple[Any, Any]]
) -> list[np.ndarray]:
    """View arrays of some shapes and dtypes that follow one another in a buffer."""
    arrays = []
    for shape, dtype in like:
        arrays.append(np.ndarray(shape, dtype, buffer, offset))
        offset += arrays[-1].nbytes
    return arrays


def _whole_pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE
