"""Writing one safetensors file, with checksums of every tensor and of the header."""

import contextlib
import dataclasses
import errno
import functools
import json
import math
import os
import re
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from jslices.checkpoint.checksum import CHUNK, DIGITS, Checksums, checksum, num_chunks
from jslices.checkpoint.memory import CODES, as_bytes, dtype_named

#: Bytes that are summed and then written at a time: the write finds them in the cache. Of
#: one write Linux makes large pages of the page cache, which a virtual machine may have
#: given back to its host: with 1 MiB some saves took three times as long.
_PIECE = 1 << 18
_ALIGNMENT = 64  # bytes at a multiple of which the tensors begin
_RESERVED = re.compile("__metadata__(@*)")  # safetensors keeps the first of them to itself
OWN = "jslices.crc32"  #: the header's own checksum, counted with zeros in its place
MARK = f'"{OWN}":"'.encode()


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


def written_name(name: str) -> str:
    """The name of a tensor in the file."""
    return f"{name}@" if _RESERVED.fullmatch(name) else name


def given_name(written: str) -> str:
    """What :func:`written_name` was given."""
    return written[:-1] if _RESERVED.fullmatch(written) else written


def write(descriptor: int, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Fills a new file and makes it outlast a power failure."""
    # Wide elements first: then each tensor starts at a multiple of its item size.
    order = sorted(tensors, key=lambda n: (-dtype_named(tensors[n].dtype).itemsize, n))
    sums = {n: "0" * DIGITS * num_chunks(tensors[n].num_bytes) for n in order}
    header = functools.partial(_header, tensors, order, metadata)
    with Flusher(descriptor):
        place = len(header(sums))
        reserve(descriptor, place + sum(t.num_bytes for t in tensors.values()))
        for name in order:
            sums[name] = _write_tensor(descriptor, tensors[name], place)
            place += tensors[name].num_bytes
        write_all(descriptor, header(sums), 0)
        os.fsync(descriptor)


def reserve(descriptor: int, size: int) -> None:
    """Has the disk find room for a file at once: a full one says so before any work."""
    try:
        os.posix_fallocate(descriptor, 0, size)
    except AttributeError:
        pass
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            raise


class Flusher:
    """Sends a file to the disk while it is being written, so that fsync waits less."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        # An error will be reported by the fsync at the end.
        while not self._done.wait(0.01):
            with contextlib.suppress(OSError):
                os.fsync(self._descriptor)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


def write_all(descriptor: int, data: Any, place: int) -> None:
    """Writes at a place; one write may be short, of a disk that fills up for example."""
    view = memoryview(data)
    while view:
        size = _write_at(descriptor, view, place)
        view, place = view[size:], place + size


def _seek_and_write(descriptor: int, data: memoryview, place: int) -> int:
    with _one_at_a_time:
        os.lseek(descriptor, place, os.SEEK_SET)
        return os.write(descriptor, data)


_one_at_a_time = threading.Lock()
_write_at = getattr(os, "pwrite", _seek_and_write)  # Windows has no pwrite


def _write_tensor(descriptor: int, tensor: Tensor, place: int) -> str:
    """Writes a tensor at a place, a chunk in each thread, and gives its checksums."""
    with Checksums(tensor.num_bytes) as checksums:
        for parts in _chunks(tensor.blocks()):
            checksums.add(functools.partial(_write_chunk, descriptor, parts, place))
            place += sum(map(len, parts))
        return checksums.text()


def _write_chunk(descriptor: int, parts: list[memoryview], place: int) -> int:
    total = 0
    for part in parts:
        while part:
            piece = part[: _PIECE - place % _PIECE]  # the next begins with a whole page
            total = checksum(piece, total)
            write_all(descriptor, piece, place)
            part, place = part[len(piece) :], place + len(piece)
    return total


def _header(
    tensors: dict[str, Tensor],
    order: Sequence[str],
    metadata: dict[str, str],
    sums: dict[str, str],
) -> bytes:
    own = {OWN: "0" * 8, **metadata, **{f"crc32:{n}": sums[n] for n in order}}
    header: dict[str, Any] = {"__metadata__": own}
    end = 0
    for name in order:
        tensor, start = tensors[name], end
        end += tensor.num_bytes
        header[written_name(name)] = {
            "dtype": CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    data = bytearray(len(text).to_bytes(8, "little") + text)
    place = data.index(MARK) + len(MARK)
    data[place : place + 8] = f"{zlib.crc32(data):08x}".encode()
    return bytes(data)


def _chunks(blocks: Iterable[np.ndarray]) -> Iterator[list[memoryview]]:
    """The bytes of blocks, one after the other, so many at a time as have a checksum."""
    parts: list[memoryview] = []
    room = CHUNK
    for block in blocks:
        flat = as_bytes(np.ascontiguousarray(block))
        while flat:
            parts.append(flat[:room])
            flat, room = flat[room:], room - len(parts[-1])
            if not room:
                yield parts
                parts, room = [], CHUNK
    if parts:
        yield parts
