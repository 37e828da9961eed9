"""Checksums that cost no time while there is a second core."""

import concurrent.futures
import zlib

CHUNK = 1 << 22  # bytes; small enough that the checksum finds them in the cache


class Checksum:
    """CRC-32 of chunks, each taken in another thread while its giver goes on."""

    def __init__(self, num_bytes: int) -> None:
        # One chunk is not worth a thread.
        self._pool = concurrent.futures.ThreadPoolExecutor(1) if num_bytes > CHUNK else None
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
