"""Messages between two processes, with a limit to every wait."""

import contextlib
import selectors
import socket
import struct
import time
from collections.abc import Callable

import numpy as np

_MESSAGE, _BEAT = b"M", b"."  # first bytes; a beat is that byte alone
_LENGTH = struct.Struct("!Q")
_CHUNK = 1 << 20  # bytes that are passed to the socket at once
_SLOWEST = 100_000  # bytes a second: slower traffic counts as silence

_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
# The one that needs no file of its own.
_Selector = getattr(selectors, "PollSelector", selectors.SelectSelector)

#: Socket options by which the loss of a machine is detected within minutes.
_KEEPALIVE = {
    "TCP_KEEPIDLE": 60,
    "TCP_KEEPINTVL": 10,
    "TCP_KEEPCNT": 6,
    "TCP_USER_TIMEOUT": 120_000,  # milliseconds
}


class Channel:
    """Sends and receives messages over a socket, which it owns; for one thread.

    :meth:`allow` starts a clock. Sending or receiving beyond it raises a TimeoutError,
    possibly in the middle of a message: the channel is then of no more use. An end from the
    other side is an EOFError or another OSError.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._socket.settimeout(0)
        self._waits = {event: _Selector() for event in (_READ, _WRITE)}
        for event, selector in self._waits.items():
            selector.register(end, event)
        self.allow(0)
        if end.family == socket.AF_INET:
            # Parts of a message must not wait until the part before is acknowledged.
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEPALIVE.items():
                if hasattr(socket, name):
                    end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def __del__(self) -> None:
        self.close()

    # --- the clock

    def allow(self, patience: float, until: float = float("inf")) -> None:
        """Allow ``patience`` seconds, up to the time ``until``.

        Bytes that move extend the time, as much as they take at ``_SLOWEST``, but never
        beyond ``patience`` seconds from now: large messages may take long, whereas neither
        silence nor a trickle goes on. Bytes that have arrived are read also afterwards, as
        this process may have been frozen.
        """
        self._patience = patience
        self._end = min(time.monotonic() + patience, until)

    def wait(self, event: int = _READ) -> None:
        """Wait until the socket is readable, or writable, as long as the clock allows."""
        left = max(0.0, self._end - time.monotonic())
        if not self._waits[event].select(None if left == float("inf") else left):
            raise TimeoutError("timed out")

    # --- messages

    def connect(self, address: tuple[str, int] | str) -> None:
        """Connect the socket."""
        self._socket.settimeout(max(0.001, self._end - time.monotonic()))
        self._socket.connect(address)
        self._socket.settimeout(0)

    def send_bytes(self, message: bytes) -> None:
        """Send a message."""
        header = _MESSAGE + _LENGTH.pack(len(message))
        for part in [header + message] if len(message) < _CHUNK else [header, message]:
            self._move(_WRITE, self._socket.send, memoryview(part))

    def receive(self, limit: int | None = None) -> memoryview | None:
        """Receive a message; None stands for a beat.

        Raises an OSError for a message above the ``limit``, before it is read, and for
        anything but a message.
        """
        kind = self._exactly(1).tobytes()
        if kind == _BEAT:
            return None
        if kind != _MESSAGE:
            raise OSError(f"no message begins with {kind!r}")
        (size,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        if limit is not None and size > limit:
            raise OSError(f"a message of {size} bytes, where {limit} are allowed")
        return self._exactly(size)

    def recv_bytes(self, limit: int | None = None) -> bytes:
        """Receive a message, for the handshake of ``multiprocessing.connection``."""
        message = self.receive(limit)
        if message is None:
            raise OSError("a beat instead of a message")
        return message.tobytes()

    def _exactly(self, size: int) -> memoryview:
        """Receive so many bytes; memory is used only as they arrive."""
        buffer = np.empty(size, np.uint8).data
        self._move(_READ, self._socket.recv_into, buffer)
        return buffer

    def _move(
        self, event: int, move: Callable[[memoryview], int], rest: memoryview
    ) -> None:
        """Send, or receive, all these bytes."""
        while rest:
            try:
                size = move(rest[:_CHUNK])
            except BlockingIOError:
                self.wait(event)
                continue
            if not size:
                raise EOFError("it has hung up")
            left = self._end + size / _SLOWEST
            self._end = min(time.monotonic() + self._patience, left)
            rest = rest[size:]

    # --- signs of life

    def beat(self) -> None:
        """Send a sign of life without waiting, from any thread that sends nothing else."""
        with contextlib.suppress(OSError):  # a full or closed socket needs no beat
            self._socket.send(_BEAT)

    def readable(self) -> bool:
        """True if data or the end has arrived; to a side that expects no data, the end."""
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True

    # --- the end

    def hang_up(self) -> None:
        """End the channel for another thread that uses it."""
        with contextlib.suppress(OSError):  # it has ended by itself
            self._socket.shutdown(socket.SHUT_RDWR)

    def give_up(self) -> None:
        """Close it, and discard what the other side has not received yet."""
        with contextlib.suppress(OSError):
            at_once = struct.pack("ii", 1, 0)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
        self.close()

    def close(self) -> None:
        """Close this end."""
        self._socket.close()
