"""Reading one safetensors file through mmap, with every tensor checked."""

import contextlib
import functools
import json
import mmap
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jslices._errors import DataLossError
from jslices.checkpoint.checksum import CHUNK, DIGITS, Checksums, checksum
from jslices.checkpoint.memory import CODES, as_bytes, dtype_named, empty
from jslices.checkpoint.tensor_writer import MARK, OWN, given_name

_DTYPES = {code: name for name, code in CODES.items()}


class TensorFile:
    """A safetensors file open for reading; arrays come out of it checked.

    Attributes:
      path: where it is.
      metadata: the strings that were written with it.
      shapes: of every tensor.
      dtypes: of every tensor, by name.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        with self._blaming("its header cannot be read"):
            header, self._start, self._bytes = _open(path)
            self.metadata: dict[str, str] = header.pop("__metadata__", None) or {}
            self._checked = OWN in self.metadata
            if self._checked:
                header = {given_name(name): tensor for name, tensor in header.items()}
            self._offsets = {n: tuple(t["data_offsets"]) for n, t in header.items()}
            self.shapes = {n: tuple(t["shape"]) for n, t in header.items()}
            self.dtypes = {
                n: _DTYPES.get(t["dtype"], t["dtype"]) for n, t in header.items()
            }
        self._verified: set[tuple[str, int]] = set()

    def read(
        self, name: str, out: np.ndarray | None = None, rows: slice | None = None
    ) -> np.ndarray:
        """A copy of one tensor, or of a range of its rows; checked on the way.

        Args:
          name: which.
          out: what to copy into; None: a new array.
          rows: which rows; only the chunks of the file that hold them are read.
        """
        source, (first, last, shape) = self._flat(name), self._span(name, rows)
        if out is None:
            out = empty(shape, self._dtype(name))
        if not out.flags.c_contiguous:
            out[...] = self.view(name, rows)
            return out
        target = as_bytes(out)

        def copied(start: int) -> memoryview:
            stop = min(start + CHUNK, len(source))
            a, b = max(start, first), min(stop, last)
            target[a - first : b - first] = source[a:b]
            # Of a chunk that is wanted whole the copy is checked, else all of it is read.
            whole = (a, b) == (start, stop)
            return target[a - first : b - first] if whole else source[start:stop]

        self._check(name, copied, range(first - first % CHUNK, last, CHUNK))
        return out

    def view(self, name: str, rows: slice | None = None) -> np.ndarray:
        """One tensor, or a range of its rows, as it lies in the file.

        The chunks of the file that hold it are checked when they are first asked for; no
        others are read.
        """
        source, (first, last, shape) = self._flat(name), self._span(name, rows)
        starts = [
            start
            for start in range(first - first % CHUNK, last, CHUNK)
            if (name, start) not in self._verified
        ]
        if self._checked and starts:
            self._check(name, lambda start: source[start : start + CHUNK], starts)
            self._verified.update((name, start) for start in starts)
        flat = np.frombuffer(source[first:last], np.uint8).view(self._dtype(name))
        return flat.reshape(shape)

    def _span(self, name: str, rows: slice | None) -> tuple[int, int, tuple[int, ...]]:
        """The first byte and the one after the last of some rows, and their shape."""
        shape, size = self.shapes[name], len(self._flat(name))
        if rows is None:
            return 0, size, shape
        width = size // max(shape[0], 1)
        count = rows.stop - rows.start
        return rows.start * width, rows.stop * width, (count, *shape[1:])

    def _check(
        self, name: str, chunk_at: Callable[[int], memoryview], starts: Sequence[int]
    ) -> None:
        base = self._start + self._offsets[name][0]
        with Checksums(len(starts) * CHUNK) as checksums:
            for start in starts:
                checksums.add(functools.partial(checksum, chunk_at(start)))
                self._forget(base + start - 2 * CHUNK)  # later ones may be in work
            found = checksums.text()
        if not self._checked:
            return
        written = self.metadata.get(f"crc32:{name}", "")
        places = [start // CHUNK * DIGITS for start in starts] or [0]
        wanted = "".join(written[place : place + DIGITS] for place in places)
        if found != wanted:
            raise DataLossError(
                f"{self.path} is damaged: the checksum of {name!r} does not fit. Restore "
                "an earlier checkpoint"
            )

    def _forget(self, start: int) -> None:
        """Pages that have been read are the page cache's, and no longer this process's."""
        start = max(start - start % mmap.PAGESIZE, 0)
        if self._bytes is not None and hasattr(mmap, "MADV_DONTNEED"):
            length = min(CHUNK, len(self._bytes) - start)
            self._bytes.madvise(mmap.MADV_DONTNEED, start, length)

    def _flat(self, name: str) -> memoryview:
        first, last = self._offsets[name]
        return memoryview(self._bytes)[self._start + first : self._start + last]

    def _dtype(self, name: str) -> np.dtype[Any]:
        if self.dtypes[name] not in CODES:
            raise TypeError(
                f"{name!r} in {self.path} is of the dtype {self.dtypes[name]}, which NumPy "
                "does not have"
            )
        return dtype_named(self.dtypes[name])

    @contextlib.contextmanager
    def _blaming(self, what: str) -> Iterator[None]:
        try:
            yield
        except (OSError, DataLossError, ModuleNotFoundError):
            raise
        except Exception as error:
            raise DataLossError(f"{self.path} is damaged: {what} ({error})") from error


def _open(path: str) -> tuple[dict[str, Any], int, mmap.mmap]:
    with open(path, "rb") as file:
        contents = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    _validate(path)
    start = 8 + int.from_bytes(contents[:8], "little")
    head = bytearray(contents[:start])
    if b'"jslices' in head:
        place = head.index(MARK) + len(MARK)
        wanted, head[place : place + 8] = bytes(head[place : place + 8]), b"0" * 8
        if wanted != f"{zlib.crc32(head):08x}".encode():
            raise ValueError("its checksum does not fit")
    return json.loads(head[8:]), start, contents


def _validate(path: str) -> None:
    """Lets safetensors check that the header is sound and fits the file's length."""
    try:
        from safetensors import safe_open
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "checkpoints need the package safetensors: pip install safetensors"
        ) from error
    with safe_open(path, framework="numpy"):
        pass
