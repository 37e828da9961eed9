"""One safetensors file: written with checksums, viewed through mmap and checked meanwhile.

Every 4 MiB of a tensor have a CRC-32 of their own, so that some rows can be checked without
reading the others. The checksums are in the file's metadata, and the header, which holds
the metadata, has one too.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import errno
import functools
import json
import math
import mmap
import os
import re
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from safetensors import safe_open

from jslices.checkpoint import files
from jslices.errors import DataLossError

#: The dtypes for which safetensors has a name; all others are stored as bytes.
CODES = {
    "bool": "BOOL",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
    "complex64": "C64",
}
_DTYPES = {code: name for name, code in CODES.items()}

CHUNK = 1 << 22  #: bytes per checksum; part of the format, and small enough for the cache
_DIGITS = 8  # of a checksum, hexadecimal
_NO_SUM = "0" * _DIGITS  # that of no bytes as well
# Threads that write chunks and compute their checksums. With two of them a save of 512 MiB
# took 0.61 of the time (median of 7, two cores); a restore gains nothing by them.
_THREADS = 2

# Bytes that are summed and then written at a time, so that the write finds them in the
# cache. For a larger write Linux makes large pages of the page cache, which a virtual
# machine may have given back to its host: with 1 MiB some saves took three times as long.
_PIECE = 1 << 18
_ALIGNMENT = 64  # of the data in a file, and of arrays that XLA can use without a copy

_OWN = "jslices.crc32"  # the header's checksum, computed with zeros in its place
_MARK = f'"{_OWN}":"'.encode()
_PARTS = "DCP_SHARDING_INFO"  # what PyTorch writes beside a part of each tensor
_RESERVED = re.compile("__metadata__(@*)")  # safetensors keeps the first of them to itself

# Numbers; text and times, whose names have parameters.
_NUMBER = re.compile("bool|b?(u?int|float|complex)[0-9]+(_e[0-9]+m[0-9]+[a-z0-9]*)?")
_OTHERS = re.compile(r"[|<>][SU][1-9]\d*|[<>][mM]8(\[\d*[A-Za-z]+\])?")


def dtype_named(name: str) -> np.dtype[Any]:
    """A dtype of NumPy or of ml_dtypes; ValueError if there is none of this name."""
    if not _NUMBER.fullmatch(name) and not _OTHERS.fullmatch(name):
        raise ValueError(f"there is no dtype {name!r}")
    try:
        return np.dtype(name)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"there is no dtype {name!r}: {error}") from error


def empty_array(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """An uninitialised array, aligned so that XLA can use it without a copy.

    Without, restoring 256 MiB took 2.6 times as long (median of 7).
    """
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def _hexadecimal(checksum: int) -> str:
    return f"{checksum:0{_DIGITS}x}"


# --- writing --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor to be written."""

    dtype: str  #: the name of one of the dtypes in ``CODES``.
    shape: tuple[int, ...]
    #: Returns its elements in order, as arrays, which may be views.
    blocks: Callable[[], Iterable[np.ndarray]]
    start: tuple[int, ...] = ()  #: its start in the variable.

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * dtype_named(self.dtype).itemsize


def write_tensors(
    descriptor: int, tensors: dict[str, Tensor], metadata: dict[str, str]
) -> None:
    """Writes a new file and flushes it to the disk."""
    # Wide elements first: then each tensor starts at a multiple of its item size.
    order = sorted(tensors, key=lambda n: (-dtype_named(tensors[n].dtype).itemsize, n))
    sums = {n: _NO_SUM * max(1, -(-tensors[n].num_bytes // CHUNK)) for n in order}
    header = functools.partial(_header, tensors, order, metadata)
    with (
        _flushed_meanwhile(descriptor),
        concurrent.futures.ThreadPoolExecutor(_THREADS) as pool,
    ):
        offset = len(header(sums))
        _reserve(descriptor, offset + sum(t.num_bytes for t in tensors.values()))
        for name in order:
            tasks = _write_tasks(descriptor, tensors[name].blocks(), offset)
            sums[name] = "".join(map(_hexadecimal, _in_order(pool, tasks))) or _NO_SUM
            offset += tensors[name].num_bytes
        files.write_at(descriptor, memoryview(header(sums)), 0)
        os.fsync(descriptor)


def _in_order(
    pool: concurrent.futures.Executor, tasks: Iterable[Callable[[], int]]
) -> Iterator[int]:
    """The results of tasks. At most two wait, so that their data is still in the cache."""
    pending = collections.deque[concurrent.futures.Future[int]]()
    for task in tasks:
        pending.append(pool.submit(task))
        if len(pending) > _THREADS:
            yield pending.popleft().result()
    yield from (future.result() for future in pending)


def _header(
    tensors: dict[str, Tensor],
    order: Sequence[str],
    metadata: dict[str, str],
    sums: dict[str, str],
) -> bytes:
    own = {_OWN: _NO_SUM, **metadata, **{f"crc32:{n}": sums[n] for n in order}}
    header: dict[str, Any] = {"__metadata__": own}
    end = 0
    for name in order:
        tensor, start = tensors[name], end
        end += tensor.num_bytes
        header[f"{name}@" if _RESERVED.fullmatch(name) else name] = {
            "dtype": CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    data = bytearray(len(text).to_bytes(8, "little") + text)
    start = data.index(_MARK) + len(_MARK)
    data[start : start + _DIGITS] = _hexadecimal(zlib.crc32(data)).encode()
    return bytes(data)


@contextlib.contextmanager
def _flushed_meanwhile(descriptor: int) -> Iterator[None]:
    """Flush a file while it is being written, so that the last fsync is short.

    Without it a save of 512 MiB took 1.6 times as long (median of 7). A write that failed
    is raised here: Linux reports it to one fsync alone, and the last may be another.
    """
    done = threading.Event()

    def flush() -> None:
        while not done.wait(0.01):
            os.fsync(descriptor)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        flushed = pool.submit(flush)
        try:
            yield
        finally:
            done.set()
        flushed.result()


def _reserve(descriptor: int, size: int) -> None:
    """Allocate the space of a file, so that a full disk is reported before any writing."""
    try:
        os.posix_fallocate(descriptor, 0, size)
    except AttributeError:
        pass  # not on this system
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            raise


def _write_tasks(
    descriptor: int, blocks: Iterable[np.ndarray], offset: int
) -> Iterator[Callable[[], int]]:
    """Tasks that each write a chunk and return its checksum."""
    parts: list[memoryview] = []
    room = CHUNK
    for block in blocks:
        flat = np.ascontiguousarray(block).reshape(-1).view(np.uint8).data
        while flat:
            parts.append(flat[:room])
            flat, room = flat[room:], room - len(parts[-1])
            if not room:
                yield functools.partial(_write_chunk, descriptor, parts, offset)
                offset, parts, room = offset + CHUNK, [], CHUNK
    if parts:
        yield functools.partial(_write_chunk, descriptor, parts, offset)


def _write_chunk(descriptor: int, parts: list[memoryview], offset: int) -> int:
    checksum = 0
    for part in parts:
        while part:
            piece = part[: _PIECE - offset % _PIECE]  # the next begins with a whole page
            checksum = zlib.crc32(piece, checksum)
            files.write_at(descriptor, piece, offset)
            part, offset = part[len(piece) :], offset + len(piece)
    return checksum


# --- reading --------------------------------------------------------------------------


class TensorFile:
    """A safetensors file open for reading, with shapes and names of dtypes by tensor.

    Files that this package wrote are checked; those of other tools have no checksums.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        #: The chunks that were right, as tensor and start.
        self._verified: set[tuple[str, int]] = set()
        try:
            header, self._start, self._bytes = _open(path)
            self.metadata: dict[str, str] = header.pop("__metadata__", None) or {}
            self._checked = _OWN in self.metadata
            if self._checked:
                header = {
                    n[:-1] if _RESERVED.fullmatch(n) else n: t for n, t in header.items()
                }
            self._offsets = {n: tuple(t["data_offsets"]) for n, t in header.items()}
            self.shapes = {n: tuple(t["shape"]) for n, t in header.items()}
            codes = {n: t["dtype"] for n, t in header.items()}
            self.dtypes = {n: _DTYPES.get(code, code) for n, code in codes.items()}
        except (OSError, MemoryError):
            raise
        except Exception as error:
            kind = _kind_of(path)
            problem = f"no checkpoint of a Saver, but {kind}" if kind else "damaged"
            raise DataLossError(
                f"{path} is {problem}: its header cannot be read ({error})"
            ) from error
        if _PARTS in self.metadata:
            raise DataLossError(
                f"{path} is one of the parts that PyTorch's HuggingFaceStorageWriter("
                "save_distributed=True) saves of each tensor; put them together by "
                "torch.distributed.checkpoint's consolidate_safetensors_files"
            )

    def view(self, name: str, rows: slice | None = None) -> np.ndarray:
        """View a tensor, or a range of its rows, in the mapped file.

        Each chunk of the file is checked the first time that it is viewed.
        """
        begin, end = self._offsets[name]
        data = memoryview(self._bytes)[self._start + begin : self._start + end]
        shape, first, last = self.shapes[name], 0, len(data)
        if rows is not None:
            width = len(data) // max(shape[0], 1)
            first, last = rows.start * width, rows.stop * width
            shape = (rows.stop - rows.start, *shape[1:])
        for start in range(first - first % CHUNK, last, CHUNK):
            if self._checked and (name, start) not in self._verified:
                self._check(name, start, data[start : start + CHUNK])
                self._verified.add((name, start))
        flat = np.frombuffer(data[first:last], np.uint8)
        return flat.view(dtype_named(self.dtypes[name])).reshape(shape)

    def take_bytes_as(self, name: str, dtype: str) -> None:
        """View a tensor that was written as bytes, as before safetensors had its dtype."""
        shape = self.shapes[name]
        if self.dtypes[name] == "uint8" and shape[-1:] == (dtype_named(dtype).itemsize,):
            self.dtypes[name], self.shapes[name] = dtype, shape[:-1]

    def release(self, name: str) -> None:
        """Drop the pages of a tensor from this process's memory; views stay valid."""
        begin, end = (self._start + offset for offset in self._offsets[name])
        # Not those of the whole file, which would cost 0.4 ms a tensor in one of 40 GB.
        if begin < end and hasattr(mmap, "MADV_DONTNEED"):
            begin -= begin % mmap.PAGESIZE
            self._bytes.madvise(mmap.MADV_DONTNEED, begin, end - begin)

    def _check(self, name: str, start: int, chunk: memoryview) -> None:
        sums = self.metadata.get(f"crc32:{name}", "")
        if sums[start // CHUNK * _DIGITS :][:_DIGITS] != _hexadecimal(zlib.crc32(chunk)):
            raise DataLossError(
                f"{self.path} is damaged: the checksum of {name!r} does not match. Restore "
                "an earlier checkpoint"
            )


def _kind_of(path: str) -> str:
    with open(path, "rb") as file:
        head = file.read(64)
        file.seek(max(0, os.path.getsize(path) - 8))
        return files.other_kind(head, file.read(8))


def _open(path: str) -> tuple[dict[str, Any], int, mmap.mmap]:
    """The header of a file, the offset of its data, and the file, mapped.

    Any program may have written it: safetensors checks that the header is sound and fits
    the length of the file.
    """
    with files.naming(path), open(path, "rb") as file:
        contents = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with safe_open(path, framework="numpy"):
        pass
    start = 8 + int.from_bytes(contents[:8], "little")
    head = bytearray(contents[:start])
    if b'"jslices' in head:
        first = head.index(_MARK) + len(_MARK)
        digits = slice(first, first + _DIGITS)
        written, head[digits] = bytes(head[digits]), _NO_SUM.encode()
        if written != _hexadecimal(zlib.crc32(head)).encode():
            raise ValueError("its checksum does not match")
    return json.loads(head[8:]), start, contents
