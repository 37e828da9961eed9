"""Checksums that cost no time while there is a second core."""

import concurrent.futures
import zlib

#: Every so many bytes of a tensor have a checksum of their own, so that some rows can be
#: checked without reading the others. Part of the format of the files; small enough that
#: the checksum finds the bytes in the cache.
CHUNK = 1 << 22
DIGITS = 8  #: of one checksum, hexadecimal
_THREADS = 2  # as fast together as a copy is


def num_chunks(num_bytes: int) -> int:
    """How many checksums a tensor has."""
    return max(1, -(-num_bytes // CHUNK))


class Checksum:
    """CRC-32 of each chunk of a tensor, taken in other threads while its giver goes on."""

    def __init__(self, num_bytes: int) -> None:
        # One chunk is not worth a thread.
        threads = min(_THREADS, num_chunks(num_bytes))
        self._pool = concurrent.futures.ThreadPoolExecutor(threads) if threads > 1 else None
        self._pending: list[concurrent.futures.Future[int]] = []
        self._sums: list[int] = []
        self._parts: list[memoryview] = []  # of the chunk that is not complete
        self._filled = 0

    def add(self, data: memoryview) -> None:
        """Takes in the next bytes, which must stay as they are until :meth:`text`."""
        while data:
            part = data[: CHUNK - self._filled]
            self._parts.append(part)
            self._filled += len(part)
            if self._filled == CHUNK:
                self._take()
            data = data[len(part) :]

    def text(self) -> str:
        """The checksums, one after the other."""
        if self._parts or not (self._sums or self._pending):
            self._take()
        self._wait(0)
        return "".join(f"{one:0{DIGITS}x}" for one in self._sums)

    def _take(self) -> None:
        parts, self._parts, self._filled = self._parts, [], 0
        if self._pool is None:
            self._sums.append(_crc(parts))
            return
        self._pending.append(self._pool.submit(_crc, parts))
        self._wait(_THREADS)  # so that what waits is still in the cache, and is not much

    def _wait(self, most: int) -> None:
        while len(self._pending) > most:
            self._sums.append(self._pending.pop(0).result())

    def __enter__(self) -> "Checksum":
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()


def _crc(parts: list[memoryview]) -> int:
    total = 0
    for part in parts:
        total = zlib.crc32(part, total)
    return total
