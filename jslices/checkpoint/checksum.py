"""Checksums that cost no time while there is a second core."""

import concurrent.futures
import zlib

#: Every so many bytes of a tensor have a checksum of their own, so that some rows can be
#: checked without reading the others. Part of the format of the files; small enough that
#: the checksum finds the bytes in the cache.
CHUNK = 1 << 22
DIGITS = 8  #: of one checksum, hexadecimal


def num_chunks(num_bytes: int) -> int:
    """How many checksums a tensor has."""
    return max(1, -(-num_bytes // CHUNK))


class Checksum:
    """CRC-32 of each chunk of a tensor, taken in another thread while its giver goes on."""

    def __init__(self, num_bytes: int) -> None:
        # One chunk is not worth a thread.
        self._pool = concurrent.futures.ThreadPoolExecutor(1) if num_bytes > CHUNK else None
        self._pending: concurrent.futures.Future[None] | None = None
        self._done: list[int] = []
        self._sum = self._filled = 0

    def add(self, data: memoryview) -> None:
        """Takes in the next bytes; those before them are done with when this returns."""
        self._wait()
        if self._pool is None:
            self._take(data)
        else:
            self._pending = self._pool.submit(self._take, data)

    def text(self) -> str:
        """The checksums so far, one after the other."""
        self._wait()
        sums = [*self._done, self._sum] if self._filled or not self._done else self._done
        return "".join(f"{one:0{DIGITS}x}" for one in sums)

    def _take(self, data: memoryview) -> None:
        while data:
            part = data[: CHUNK - self._filled]
            self._sum = zlib.crc32(part, self._sum)
            self._filled += len(part)
            if self._filled == CHUNK:
                self._done.append(self._sum)
                self._sum = self._filled = 0
            data = data[len(part) :]

    def _wait(self) -> None:
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def __enter__(self) -> "Checksum":
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()
