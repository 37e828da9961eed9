"""Checksums of chunks, taken in other threads together with the work on each chunk."""

import concurrent.futures
import zlib
from collections.abc import Callable

#: Every so many bytes of a tensor have a checksum of their own, so that some rows can be
#: checked without reading the others. Part of the format of the files; small enough that
#: the checksum finds the bytes in the cache.
CHUNK = 1 << 22
DIGITS = 8  #: of one checksum, hexadecimal
_THREADS = 2  # as fast together as a copy is


def num_chunks(num_bytes: int) -> int:
    """How many checksums a tensor has."""
    return max(1, -(-num_bytes // CHUNK))


def checksum(data: memoryview, so_far: int = 0) -> int:
    """CRC-32 of these bytes after others."""
    return zlib.crc32(data, so_far)


class Checksums:
    """The checksums of a tensor, one after the other, each taken by a function."""

    def __init__(self, num_bytes: int) -> None:
        # One chunk is not worth a thread.
        threads = min(_THREADS, num_chunks(num_bytes))
        self._pool = concurrent.futures.ThreadPoolExecutor(threads) if threads > 1 else None
        self._pending: list[concurrent.futures.Future[int]] = []
        self._sums: list[int] = []

    def add(self, take: Callable[[], int]) -> None:
        """Has ``take`` called for the next checksum, in another thread if there are many.

        What one of them raises comes out of a later ``add``, or of :meth:`text`.
        """
        if self._pool is None:
            self._sums.append(take())
            return
        self._pending.append(self._pool.submit(take))
        self._wait(_THREADS)  # so that what waits is still in the cache, and is not much

    def text(self) -> str:
        """The checksums, one after the other; that of nothing if there is none."""
        self._wait(0)
        sums = self._sums or [checksum(memoryview(b""))]
        return "".join(f"{one:0{DIGITS}x}" for one in sums)

    def _wait(self, most: int) -> None:
        while len(self._pending) > most:
            self._sums.append(self._pending.pop(0).result())

    def __enter__(self) -> "Checksums":
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()
