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

from jslices.checkpoint.checksum import CHUNK, DIGITS, Checksum, num_chunks
from jslices.checkpoint.memory import CODES, as_bytes, dtype_named

#: Bytes of one write. For larger ones Linux takes huge pages, which a virtual machine may
#: have given back to its host: 4 MiB at a time were seven times as slow there.
_WRITE = 1 << 20
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
    with open(descriptor, "wb", buffering=0, closefd=False) as file, Flusher(descriptor):
        reserve(descriptor, len(header(sums)) + sum(t.num_bytes for t in tensors.values()))
        write_all(file, header(sums))
        for name in order:
            with Checksum(tensors[name].num_bytes) as checksum:
                for chunk in _chunks(tensors[name].blocks()):
                    checksum.add(chunk)
                    write_all(file, chunk)
                sums[name] = checksum.text()
        file.seek(0)
        write_all(file, header(sums))
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


def write_all(file: Any, data: Any) -> None:
    """An unbuffered write may be short, of a disk that fills up for example."""
    view = memoryview(data)
    while view:
        view = view[file.write(view[:_WRITE]) :]


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


def _chunks(blocks: Iterable[np.ndarray]) -> Iterator[memoryview]:
    for block in blocks:
        flat = as_bytes(np.ascontiguousarray(block))
        for start in range(0, len(flat), CHUNK):
            yield flat[start : start + CHUNK]
