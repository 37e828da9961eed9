"""Accumulators for worker processes, on this machine or others."""

import os
import socket
import threading
import time
from collections.abc import Mapping
from multiprocessing import connection, managers
from types import TracebackType
from typing import Any

from jslices._errors import InvalidArgumentError, UnavailableError
from jslices.accumulators._proxies import (
    DENSE,
    SPARSE,
    RemoteAccumulator,
    RemoteObject,
    RemoteSparseAccumulator,
    send_at_once,
)
from jslices.accumulators._turns import peer
from jslices.accumulators.blocking import SparseConditionalAccumulator
from jslices.accumulators.dense import ConditionalAccumulator

#: Host and port, or the name of a Unix socket.
Address = tuple[str, int] | str


class _Server(managers.Server):
    """Python's server of managed objects, which can also stop, and knows its clients."""

    listener: connection.Listener
    address: Any

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.stop_event = threading.Event()
        self.clients: set[connection.Connection] = set()

    def serve_client(self, conn: connection.Connection) -> None:
        # Who waits for an answer sends nothing: something to read is the end of file.
        peer.gone = lambda: conn.poll(0)
        self.clients.add(conn)
        send_at_once(conn)
        try:
            super().serve_client(conn)
        finally:
            self.clients.discard(conn)
        # Stopped. To return would send one more answer, to a question nobody asked.
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


class _Manager(managers.BaseManager):
    """What a client connects with; a server has one whose kinds can be made."""


class _Directory:
    """What is served, by name."""

    def __init__(self, kinds: dict[str, str]) -> None:
        self._kinds = kinds

    def kinds(self) -> dict[str, str]:
        return self._kinds


_PROXIES: dict[str, tuple[Any, tuple[str, ...] | None]] = {
    "sparse": (RemoteSparseAccumulator, SPARSE),
    "dense": (RemoteAccumulator, DENSE),
    "object": (RemoteObject, None),
    "directory": (RemoteObject, ("kinds",)),
}
for _kind, (_proxy, _exposed) in _PROXIES.items():
    _Manager.register(_kind, proxytype=_proxy, exposed=_exposed)


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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


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


def serve(
    objects: Mapping[str, Any],
    address: Address = ("127.0.0.1", 0),
    authkey: bytes | None = None,
) -> AccumulatorServer:
    """Lets other processes use the accumulators of this one.

    The objects stay here, and this process goes on using them; threads of its own answer
    for the others. Built on ``multiprocessing.managers``: clients prove that they know
    ``authkey``. What they send is unpickled, so that **whoever has the key can run any
    code here**, and nothing is encrypted: beyond loopback use it in trusted networks only.

    Args:
      objects: accumulators by name; also any other object, whose public methods can then
        be called with what can be pickled (for the parameters, say).
      address: host and port. By default only this machine can connect, at a free port;
        ``("0.0.0.0", 5000)`` lets others in.
      authkey: a secret; None makes a random one.

    Returns:
      An :class:`AccumulatorServer` with ``address``, ``authkey`` and ``close()``; use it
      in a ``with`` statement.

    Raises:
      InvalidArgumentError: for names or a key of the wrong kind.
      OSError: when the address cannot be listened at.

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
    kinds = {name: _kind_of(thing) for name, thing in objects.items()}

    class Manager(_Manager):
        pass

    for kind, (proxy, exposed) in _PROXIES.items():
        Manager.register(kind, objects.__getitem__, proxytype=proxy, exposed=exposed)
    directory, (proxy, exposed) = _Directory(kinds), _PROXIES["directory"]
    Manager.register("directory", lambda: directory, proxytype=proxy, exposed=exposed)
    return AccumulatorServer(Manager, address, key)


def connect(address: Address, authkey: bytes) -> AccumulatorClient:
    """Reaches what another process serves.

    Args:
      address: that of the :class:`AccumulatorServer`.
      authkey: its key.

    Returns:
      A client; ``client["name"]`` is a stand-in with the methods of the object.

    Raises:
      UnavailableError: (a ``ConnectionError``) when nobody listens there.
      multiprocessing.AuthenticationError: for the wrong key.

    Example:
      >>> import jslices as js  # more in serve
      >>> js.accumulators.connect(("127.0.0.1", 1), b"key")
      Traceback (most recent call last):
      jslices._errors.UnavailableError: nobody serves accumulators at ('127.0.0.1', 1): ...
    """
    manager = _Manager(address, authkey)
    try:
        manager.connect()
        return AccumulatorClient(manager)
    except (EOFError, OSError) as error:
        raise UnavailableError(
            f"nobody serves accumulators at {address}: {error}"
        ) from error


def _kind_of(thing: Any) -> str:
    if isinstance(thing, SparseConditionalAccumulator):
        return "sparse"
    return "dense" if isinstance(thing, ConditionalAccumulator) else "object"


def _hang_up(conn: connection.Connection) -> None:
    """Ends a connection under a thread that reads from it."""
    try:
        with socket.fromfd(conn.fileno(), socket.AF_INET, socket.SOCK_STREAM) as end:
            end.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it has ended by itself
