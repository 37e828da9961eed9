"""One safetensors file, with a checksum of every tensor and of the header."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import math
import mmap
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from jslices._errors import DataLossError

#: What safetensors has a name for; everything else is stored as bytes.
CODES = {
    "bool": "BOOL",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
}
_DTYPES = {code: name for name, code in CODES.items()}
_CHUNK = 1 << 22  # bytes; small enough that the checksum finds them in the cache
_ALIGNMENT = 64  # what XLA wants, to use an array without a copy
_OWN = "jslices.crc32"  # the header's own checksum, counted with zeros in its place
_MARK = f'"{_OWN}":"'.encode()


def dtype_named(name: str) -> np.dtype[Any]:
    """A dtype of NumPy or of ml_dtypes."""
    return np.dtype(getattr(ml_dtypes, name, name))


@dataclasses.dataclass(frozen=True)
class Tensor:
    """What is to be written under one name.

    Attributes:
      dtype: the name of one of the dtypes in ``CODES``.
      shape: its shape.
      blocks: gives its elements in order, as contiguous arrays, which may be views.
    """

    dtype: str
    shape: tuple[int, ...]
    blocks: Callable[[], Iterable[np.ndarray]]

    @property
    def num_bytes(self) -> int:
        """The bytes of its elements."""
        return math.prod(self.shape) * dtype_named(self.dtype).itemsize


def write(descriptor: int, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Fills a new file and makes it outlast a power failure."""
    # Wide elements first: then each tensor starts at a multiple of its item size.
    order = sorted(tensors, key=lambda n: (-dtype_named(tensors[n].dtype).itemsize, n))
    sums = dict.fromkeys(order, "0" * 8)
    header = functools.partial(_header, tensors, order, metadata)
    with open(descriptor, "wb", buffering=0, closefd=False) as file:
        write_all(file, header(sums))
        for name in order:
            with Checksum(tensors[name].num_bytes) as checksum:
                for chunk in _chunks(tensors[name].blocks()):
                    checksum.add(chunk)
                    write_all(file, chunk)
                sums[name] = f"{checksum.total():08x}"
        file.seek(0)
        write_all(file, header(sums))
        os.fsync(descriptor)


def write_all(file: Any, data: Any) -> None:
    """An unbuffered write may be short, of a disk that fills up for example."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def _header(
    tensors: dict[str, Tensor],
    order: Sequence[str],
    metadata: dict[str, str],
    sums: dict[str, str],
) -> bytes:
    own = {_OWN: "0" * 8, **metadata, **{f"crc32:{n}": sums[n] for n in order}}
    header: dict[str, Any] = {"__metadata__": own}
    end = 0
    for name in order:
        tensor, start = tensors[name], end
        end += tensor.num_bytes
        header[name] = {
            "dtype": CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    data = bytearray(len(text).to_bytes(8, "little") + text)
    place = data.index(_MARK) + len(_MARK)
    data[place : place + 8] = f"{zlib.crc32(data):08x}".encode()
    return bytes(data)


def _chunks(blocks: Iterable[np.ndarray]) -> Iterator[memoryview]:
    for block in blocks:
        flat = as_bytes(np.ascontiguousarray(block))
        for start in range(0, len(flat), _CHUNK):
            yield flat[start : start + _CHUNK]


class Checksum:
    """CRC-32 of chunks, each taken in another thread while its giver goes on."""

    def __init__(self, num_bytes: int) -> None:
        # One chunk is not worth a thread.
        self._pool = (
            concurrent.futures.ThreadPoolExecutor(1) if num_bytes > _CHUNK else None
        )
        self._total = 0
        self._pending: concurrent.futures.Future[int] | None = None

    def add(self, chunk: memoryview) -> None:
        """Takes in a chunk; the one before it is done with when this returns."""
        total = self.total()
        if self._pool is None:
            self._total = zlib.crc32(chunk, total)
        else:
            self._pending = self._pool.submit(zlib.crc32, chunk, total)

    def total(self) -> int:
        """The checksum so far."""
        if self._pending is not None:
            self._total, self._pending = self._pending.result(), None
        return self._total

    def __enter__(self) -> "Checksum":
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()


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
            self._checked = _OWN in self.metadata
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
            target[start : start + _CHUNK] = source[start : start + _CHUNK]
            return target[start : start + _CHUNK]

        self._check(name, copied, len(source))
        return out

    def view(self, name: str) -> np.ndarray:
        """One tensor as it lies in the file, checked when first asked for."""
        source = self._flat(name)
        if name not in self._verified:
            self._check(name, lambda start: source[start : start + _CHUNK], len(source))
        flat = np.frombuffer(source, np.uint8).view(self._dtype(name))
        return flat.reshape(self.shapes[name])

    def _check(self, name: str, chunk_at: Callable[[int], memoryview], size: int) -> None:
        base = self._start + self._offsets[name][0]
        with Checksum(size) as checksum:
            for start in range(0, size, _CHUNK):
                checksum.add(chunk_at(start))
                self._forget(base + start - _CHUNK)
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
            length = min(_CHUNK, len(self._bytes) - start)
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


def as_bytes(array: np.ndarray) -> memoryview:
    """The memory of a contiguous array."""
    flat: Any = array.reshape(-1).view(np.uint8)
    return memoryview(flat)


def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """An array that XLA can use as it is, without a copy."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def _open(path: str) -> tuple[dict[str, Any], int, mmap.mmap]:
    with open(path, "rb") as file:
        contents = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    _validate(path)
    start = 8 + int.from_bytes(contents[:8], "little")
    head = bytearray(contents[:start])
    if b'"jslices' in head:
        place = head.index(_MARK) + len(_MARK)
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
