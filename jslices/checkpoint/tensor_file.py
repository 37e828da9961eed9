"""Reading one safetensors file through mmap, with every tensor checked."""

import contextlib
import json
import mmap
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jslices._errors import DataLossError
from jslices.checkpoint.checksum import CHUNK, Checksum
from jslices.checkpoint.memory import CODES, as_bytes, dtype_named, empty
from jslices.checkpoint.tensor_writer import MARK, OWN

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
            self._offsets = {n: tuple(t["data_offsets"]) for n, t in header.items()}
            self.shapes = {n: tuple(t["shape"]) for n, t in header.items()}
            self.dtypes = {
                n: _DTYPES.get(t["dtype"], t["dtype"]) for n, t in header.items()
            }
        self._verified: set[str] = set()

    def read(self, name: str, out: np.ndarray | None = None) -> np.ndarray:
        """A copy of one tensor, into ``out`` if that is given; checked on the way."""
        source = self._flat(name)
        if out is None:
            out = empty(self.shapes[name], self._dtype(name))
        if not out.flags.c_contiguous:
            out[...] = self.view(name)
            return out
        target = as_bytes(out)

        def copied(start: int) -> memoryview:
            target[start : start + CHUNK] = source[start : start + CHUNK]
            return target[start : start + CHUNK]

        self._check(name, copied, len(source))
        return out

    def view(self, name: str) -> np.ndarray:
        """One tensor as it lies in the file, checked when first asked for."""
        source = self._flat(name)
        if name not in self._verified:
            self._check(name, lambda start: source[start : start + CHUNK], len(source))
        flat = np.frombuffer(source, np.uint8).view(self._dtype(name))
        return flat.reshape(self.shapes[name])

    def _check(self, name: str, chunk_at: Callable[[int], memoryview], size: int) -> None:
        base = self._start + self._offsets[name][0]
        with Checksum(size) as checksum:
            for start in range(0, size, CHUNK):
                checksum.add(chunk_at(start))
                self._forget(base + start - CHUNK)
            total = checksum.total()
        if self._checked and self.metadata.get(f"crc32:{name}") != f"{total:08x}":
            raise DataLossError(
                f"{self.path} is damaged: the checksum of {name!r} does not fit. Restore "
                "an earlier checkpoint"
            )
        self._verified.add(name)

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
