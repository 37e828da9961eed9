"""Accumulators for worker processes, on this machine or others.

Built on ``multiprocessing.managers``. A client holds a stand-in for each object, which
sends every call over; each thread has a connection of its own.
"""

import contextlib
import functools
import os
import socket
import threading
import time
from collections.abc import Mapping
from multiprocessing import connection, managers
from typing import Any

import numpy as np

from jslices._errors import InvalidArgumentError, UnavailableError
from jslices._slices import IndexedSlices
from jslices.accumulators._gradients import refuse_tracer
from jslices.accumulators._state import peer
from jslices.accumulators.blocking import (
    ConditionalAccumulator,
    Limits,
    SparseConditionalAccumulator,
    gradient_of_slices,
    taken_as_slices,
)

#: Host and port, or the name of a Unix socket.
Address = tuple[str, int] | str


# --- stand-ins ------------------------------------------------------------------------


class RemoteObject(managers.BaseProxy):
    """An object that another process holds: its public methods, by name."""

    _token: Any
    _tls: Any

    def _connect(self) -> None:
        super()._connect()  # type: ignore[misc]
        _send_at_once(self._tls.connection)

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)
        return functools.partial(self._call, method)

    def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        try:
            return self._callmethod(method, arguments, options)
        except (EOFError, ConnectionError) as error:
            raise UnavailableError(
                f"the process that served this at {self._token.address} is gone "
                f"({type(error).__name__})"
            ) from error


class RemoteAccumulator(RemoteObject):
    """A :class:`jslices.accumulators.ConditionalAccumulator` that another process holds.

    Methods and errors are the same, and an ``UnavailableError`` when that process is gone.
    A gradient is applied wholly or not at all, also when this process is killed meanwhile;
    a process that is killed while it waits to take takes nothing.
    """

    methods: tuple[str, ...] = (
        "apply_grad",
        "take_grad",
        "num_accumulated",
        "num_stale",
        "global_step",
        "set_global_step",
        "close",
    )

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *RemoteAccumulator.methods]

    def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        def sendable(value: Any) -> Any:
            """JAX arrays as NumPy arrays, which a process can read without a device."""
            refuse_tracer(f"an argument of {method}", value)
            return np.asarray(value) if hasattr(value, "dtype") else value

        options = {name: sendable(value) for name, value in options.items()}
        return super()._call(method, *map(sendable, arguments), **options)


class RemoteSparseAccumulator(RemoteAccumulator):
    """The same for a :class:`jslices.accumulators.SparseConditionalAccumulator`."""

    methods = (*RemoteAccumulator.methods, "_take_within")

    def apply_indexed_slices_grad(self, grad: IndexedSlices, local_step: Any = 0) -> None:
        """As in the accumulator; K rows are sent."""
        self._call("apply_grad", *gradient_of_slices(grad), local_step)

    def take_indexed_slices_grad(
        self, num_required: int, *, timeout: float | None = None, size: int | None = None
    ) -> IndexedSlices:
        """As in the accumulator; U rows are sent."""
        taken = self._call("_take_within", Limits.here(size), num_required, timeout)
        return taken_as_slices(taken, size)


#: The stand-in for every kind of object, and the methods that it may call; None: all.
_KINDS: dict[str, tuple[Any, tuple[str, ...] | None]] = {
    "sparse": (RemoteSparseAccumulator, RemoteSparseAccumulator.methods),
    "dense": (RemoteAccumulator, RemoteAccumulator.methods),
    "object": (RemoteObject, None),
    "directory": (RemoteObject, ("kinds",)),
}


def _kind_of(thing: Any) -> str:
    if isinstance(thing, SparseConditionalAccumulator):
        return "sparse"
    return "dense" if isinstance(thing, ConditionalAccumulator) else "object"


class _Directory:
    """What is served, by name."""

    def __init__(self, kinds: dict[str, str]) -> None:
        self._kinds = kinds

    def kinds(self) -> dict[str, str]:
        return self._kinds


# --- the process that serves ----------------------------------------------------------


def _manager(makers: Mapping[str, Any]) -> type[managers.BaseManager]:
    """A class with which a client connects; with ``makers`` one that a server has."""

    class Manager(managers.BaseManager):
        pass

    for kind, (proxy, exposed) in _KINDS.items():
        Manager.register(kind, makers.get(kind), proxytype=proxy, exposed=exposed)
    return Manager


class _Server(managers.Server):
    """Python's server of managed objects, which can also stop, and knows its clients."""

    listener: connection.Listener
    address: Any

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.stop_event = threading.Event()
        self.clients: set[connection.Connection] = set()

    def serve_client(self, conn: connection.Connection) -> None:
        # A client that waits for an answer sends nothing: what can be read is the end.
        peer.gone = lambda: conn.poll(0)
        self.clients.add(conn)
        _send_at_once(conn)
        try:
            super().serve_client(conn)
        finally:
            self.clients.discard(conn)
        # Stopped. A return would send one more answer, to a question that nobody asked.
        raise SystemExit

    def accept_until_stopped(self) -> None:
        while True:
            try:
                conn = self.listener.accept()
            except OSError:  # such as too many open files
                time.sleep(0.1)
                continue
            if self.stop_event.is_set():
                conn.close()
                return
            handle = threading.Thread(target=self.handle_request, args=(conn,), daemon=True)
            handle.start()

    def stop(self, accepting: threading.Thread) -> None:
        self.stop_event.set()
        connection.Client(self.address).close()  # wakes the thread that accepts
        accepting.join()
        self.listener.close()
        for conn in list(self.clients):
            _hang_up(conn)


class AccumulatorServer:
    """Objects of this process that other processes may use; made by :func:`serve`.

    Attributes:
      address: where it listens, with the port that was chosen.
      authkey: the bytes that :func:`connect` must be given.
    """

    def __init__(
        self, kinds: type[managers.BaseManager], address: Address, authkey: bytes
    ) -> None:
        registry = kinds._registry  # type: ignore[attr-defined]
        self._server = _Server(registry, address, authkey, "pickle")
        self.address: Address = self._server.address
        self.authkey = authkey
        accept = self._server.accept_until_stopped
        self._accepting = threading.Thread(target=accept, daemon=True, name="jslices serve")
        self._accepting.start()

    def close(self) -> None:
        """Stops serving; clients get an UnavailableError. The objects live on here."""
        if self._accepting.is_alive():
            self._server.stop(self._accepting)

    def __enter__(self) -> "AccumulatorServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve(
    objects: Mapping[str, Any],
    address: Address = ("127.0.0.1", 0),
    authkey: bytes | None = None,
) -> AccumulatorServer:
    """Lets other processes use the accumulators of this one.

    The objects stay here, and this process goes on using them; threads answer the calls
    of the others. Built on ``multiprocessing.managers``: clients prove that they know
    ``authkey``. What they send is unpickled, so that **anyone who has the key can run any
    code here**, and nothing is encrypted: beyond loopback use it in trusted networks only.

    Args:
      objects: accumulators by name; also any other object, whose public methods can then
        be called with arguments that can be pickled (the parameters, say).
      address: host and port. By default a free port of this machine, to which only this
        machine can connect; ``("0.0.0.0", 5000)`` lets others in.
      authkey: a secret; None makes a random one.

    Returns:
      An :class:`AccumulatorServer` with ``address``, ``authkey`` and ``close()``; use it
      in a ``with`` statement.

    Raises:
      InvalidArgumentError: for names or a key of the wrong kind.
      OSError: when nothing can listen at the address.

    Example:
      >>> import jslices as js
      >>> mean = js.accumulators.SparseConditionalAccumulator("float32", (5, 1))
      >>> with js.accumulators.serve({"table": mean}) as server:
      ...     # in another process, given server.address and server.authkey:
      ...     table = js.accumulators.connect(server.address, server.authkey)["table"]
      ...     table.apply_grad([3], [[1.0]])
      >>> mean.take_grad(1).indices
      array([3])

    Source: TensorFlow's accumulators live on a parameter server of its own runtime.
    """
    if not objects or not all(isinstance(name, str) for name in objects):
        raise InvalidArgumentError(
            f"serve wants objects by name, {{'table': accumulator}}, got {objects!r}"
        )
    if authkey is not None and (not isinstance(authkey, bytes) or not authkey):
        raise InvalidArgumentError(
            f"authkey must be bytes, not {type(authkey).__name__}; a random one is made "
            "when it is left out"
        )
    objects, key = dict(objects), authkey or os.urandom(32)
    directory = _Directory({name: _kind_of(thing) for name, thing in objects.items()})
    makers = dict.fromkeys(_KINDS, objects.__getitem__) | {"directory": lambda: directory}
    return AccumulatorServer(_manager(makers), address, key)


# --- the processes that connect -------------------------------------------------------


class AccumulatorClient:
    """The objects that another process serves, by name; made by :func:`connect`."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._kinds: dict[str, str] = manager.directory().kinds()

    def __getitem__(self, name: str) -> Any:
        """The stand-in for the object of that name: same methods, same errors."""
        if name not in self._kinds:
            raise KeyError(f"{name!r} is not served; there are {sorted(self._kinds)}")
        return getattr(self._manager, self._kinds[name])(name)


def connect(address: Address, authkey: bytes) -> AccumulatorClient:
    """Reaches what another process serves.

    Args:
      address: that of the :class:`AccumulatorServer`.
      authkey: its key.

    Returns:
      A client; ``client["name"]`` is a stand-in with the methods of the object.

    Raises:
      UnavailableError: (a ``ConnectionError``) when nothing listens there.
      multiprocessing.AuthenticationError: for the wrong key.

    Example:
      >>> import jslices as js  # more in serve
      >>> js.accumulators.connect(("127.0.0.1", 1), b"key")
      Traceback (most recent call last):
      jslices._errors.UnavailableError: nobody serves accumulators at ('127.0.0.1', 1): ...
    """
    manager = _manager({})(address, authkey)
    try:
        manager.connect()
        return AccumulatorClient(manager)
    except (EOFError, OSError) as error:
        raise UnavailableError(
            f"nobody serves accumulators at {address}: {error}"
        ) from error


# --- sockets --------------------------------------------------------------------------


def _send_at_once(conn: connection.Connection) -> None:
    """Switches off Nagle's algorithm.

    A message above 16 KB is written in two parts, and the second would wait, typically
    for 40 ms, until the other side has acknowledged the first.
    """
    with contextlib.suppress(OSError):  # no TCP, so no Nagle
        with socket.fromfd(conn.fileno(), socket.AF_INET, socket.SOCK_STREAM) as end:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _hang_up(conn: connection.Connection) -> None:
    """Ends a connection under a thread that reads from it."""
    with contextlib.suppress(OSError):  # it has ended by itself
        with socket.fromfd(conn.fileno(), socket.AF_INET, socket.SOCK_STREAM) as end:
            end.shutdown(socket.SHUT_RDWR)
