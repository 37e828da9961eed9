"""Accumulators for worker processes, on this machine or others.

Clients hold stand-ins for the objects of a server, which forward every call. Each thread
of a client has a connection of its own, which a thread of the server answers. A server
that works on a call sends signs of life; a client that receives none for too long takes it
for lost. So nothing waits without end for a process that is frozen.
"""

import contextlib
import enum
import functools
import logging
import os
import pickle
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from multiprocessing import AuthenticationError, connection, process
from typing import Any

import numpy as np

from jslices import InvalidArgumentError, UnavailableError
from jslices.accumulators._channel import Channel
from jslices.accumulators._gradients import refuse_tracer
from jslices.accumulators._state import peer
from jslices.accumulators.blocking import (
    ConditionalAccumulator,
    Limits,
    SlicesMethods,
    SparseAccumulatorTakeGradient,
    SparseConditionalAccumulator,
)

_log = logging.getLogger("jslices.accumulators")

#: Host and port, or the name of a Unix socket.
Address = tuple[str, int] | str

_BEAT_SECONDS = 0.25  # between two signs of life of a server that works on a call
_HANDSHAKE_SECONDS = 10.0  # for a client, to prove that it knows the key
_HANDSHAKES = 64  # at a time, each of which holds a thread
_HURRY_SECONDS = 0.25  # for one of them to end, when another client waits
_BACKLOG = 1024  # connections that wait to be accepted
_STALL_SECONDS = 60.0  # for a client that stops in the middle of a message
_LONGEST_SECONDS = 1_000_000  # that sockets can wait
_PROTOCOL = 5  # of pickle: it copies arrays least


# --- stand-ins ------------------------------------------------------------------------


class RemoteObject:
    """A stand-in for an object of another process, with its public methods."""

    methods: tuple[str, ...] | None = None  # that are served; None: all public ones

    def __init__(self, client: "AccumulatorClient", name: str) -> None:
        self._client = client
        self._name = name

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)
        return functools.partial(self._call, method)

    def _call(
        self,
        method: str,
        /,
        *arguments: object,
        _within: float | None = None,
        **options: object,
    ) -> Any:
        arguments = tuple(self._sendable(method, x) for x in arguments)
        options = {name: self._sendable(method, x) for name, x in options.items()}
        return self._client._call(self._name, method, arguments, options, _within)

    def _sendable(self, method: str, argument: object) -> object:
        return argument

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._name!r} at {self._client.address}>"


class RemoteAccumulator(RemoteObject):
    """A :class:`jslices.accumulators.ConditionalAccumulator` of another process.

    Methods and errors are the same, and an ``UnavailableError`` when that process is gone
    or gives no sign of life (see :func:`connect`). A gradient is applied wholly or not at
    all, also when this process is killed meanwhile; a process that is killed while it
    waits to take takes nothing.
    """

    methods: tuple[str, ...] = (
        "apply_grad",
        "take_grad",
        "num_accumulated",
        "num_stale",
        "num_waiting",
        "global_step",
        "set_global_step",
        "close",
    )

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *RemoteAccumulator.methods]

    def take_grad(
        self, num_required: int, name: str | None = None, *, timeout: float | None = None
    ) -> Any:
        """As in the accumulator."""
        return self._call("take_grad", num_required, timeout=timeout, _within=timeout)

    def _sendable(self, method: str, argument: object) -> object:
        """Copy JAX arrays to NumPy, which a process can read without a device."""
        refuse_tracer(f"an argument of {method}", argument)
        return np.asarray(argument) if hasattr(argument, "dtype") else argument


class RemoteSparseAccumulator(SlicesMethods, RemoteAccumulator):
    """The same for a :class:`jslices.accumulators.SparseConditionalAccumulator`."""

    methods = (*RemoteAccumulator.methods, "_take_within")

    def _take_within(
        self, limits: Limits, num_required: int, timeout: float | None
    ) -> SparseAccumulatorTakeGradient:
        return self._call("_take_within", limits, num_required, timeout, _within=timeout)


#: The stand-in for each kind of object.
_KINDS: dict[str, type[RemoteObject]] = {
    "sparse": RemoteSparseAccumulator,
    "dense": RemoteAccumulator,
    "object": RemoteObject,
}


def _kind_of(thing: object) -> str:
    if isinstance(thing, SparseConditionalAccumulator):
        return "sparse"
    return "dense" if isinstance(thing, ConditionalAccumulator) else "object"


def _method_of(thing: object, method: str) -> Any:
    """Look up a method that a client may call."""
    served = _KINDS[_kind_of(thing)].methods
    if method.startswith("_") if served is None else method not in served:
        raise AttributeError(f"{method!r} of a {type(thing).__name__} is not served")
    return getattr(thing, method)


# --- the process that serves ----------------------------------------------------------


class _Phase(enum.Enum):
    """What a connection does."""

    GREETING = enum.auto()  # both sides prove that they know the key
    WAITING = enum.auto()  # for a call
    WORKING = enum.auto()  # on a call, whose answer the client waits for


class AccumulatorServer:
    """Objects of this process that other processes may use; made by :func:`serve`.

    Attributes:
      address: where it listens, with the port that was chosen.
      authkey: the bytes that :func:`connect` must be given.
    """

    def __init__(
        self, objects: dict[str, object], address: Address, authkey: bytes
    ) -> None:
        self.authkey = authkey
        self._objects = objects
        self._listener = _listening_socket(address)
        self.address: Address = self._listener.getsockname()
        self._handshakes = threading.Semaphore(_HANDSHAKES)
        self._lock = threading.Lock()  # of the phases
        self._phases: dict[Channel, _Phase] = {}
        self._closing = False
        if isinstance(address, str) and not address.startswith("\0"):
            self._remove_file = weakref.finalize(self, _remove, address, os.getpid())
        self._accepting = threading.Thread(
            target=self._accept_connections, daemon=True, name="jslices serve"
        )
        self._accepting.start()

    def close(self) -> None:
        """Stops serving; clients get an UnavailableError. The objects live on here."""
        if not self._accepting.is_alive():
            return
        self._closing = True
        self._accepting.join()
        self._listener.close()
        self._for_each(Channel.hang_up, *_Phase)
        if hasattr(self, "_remove_file"):
            self._remove_file()

    def __enter__(self) -> "AccumulatorServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept_connections(self) -> None:
        """Start a thread for each connection, and give signs of life meanwhile."""
        while not self._closing:
            self._for_each(Channel.beat, _Phase.WORKING)
            try:
                channel = Channel(self._listener.accept()[0])
            except TimeoutError:
                continue
            except OSError:  # such as too many open files
                time.sleep(0.1)
                continue
            while not self._handshakes.acquire(timeout=_HURRY_SECONDS):
                # They say nothing: none has ended for so long.
                self._for_each(Channel.hang_up, _Phase.GREETING)
            self._enter(channel, _Phase.GREETING)
            try:
                threading.Thread(
                    target=self._converse, args=(channel,), daemon=True
                ).start()
            except RuntimeError:  # no more threads
                self._end(channel)

    def _converse(self, channel: Channel) -> None:
        """Answer the calls of one connection until it ends."""
        try:
            channel.allow(_HANDSHAKE_SECONDS)
            connection.deliver_challenge(channel, self.authkey)  # type: ignore[arg-type]
            connection.answer_challenge(channel, self.authkey)  # type: ignore[arg-type]
            self._enter(channel, _Phase.WAITING)
            self._handshakes.release()
            # A client that waits for an answer sends nothing: what can be read is the end.
            peer.gone = channel.readable
            while self._answer_call(channel):
                pass
        except Exception:
            _log.debug("A connection has ended.", exc_info=True)
        finally:
            self._end(channel)

    def _answer_call(self, channel: Channel) -> bool:
        """Wait for a call and answer it; False if the client has given it up."""
        channel.allow(float("inf"))
        channel.wait()
        self._enter(channel, _Phase.WORKING)
        channel.allow(_STALL_SECONDS)
        request = channel.receive()
        if request is None or channel.readable():  # it may have asked again elsewhere
            return False
        answer = _answer(self._objects, request)
        self._enter(channel, _Phase.WAITING)  # for the next one: the answer is on its way
        channel.allow(_STALL_SECONDS)
        channel.send_bytes(answer)
        return True

    def _enter(self, channel: Channel, phase: _Phase) -> None:
        with self._lock:
            self._phases[channel] = phase

    def _end(self, channel: Channel) -> None:
        with self._lock:
            if self._phases.pop(channel) is _Phase.GREETING:
                self._handshakes.release()
        channel.close()

    def _for_each(self, do: Callable[[Channel], None], *phases: _Phase) -> None:
        with self._lock:
            for channel, phase in self._phases.items():
                if phase in phases:
                    do(channel)


def _listening_socket(address: Address) -> socket.socket:
    listener = socket.socket(_family(address))
    try:
        if os.name == "posix":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    listener.settimeout(_BEAT_SECONDS)
    return listener


def _family(address: Address) -> socket.AddressFamily:
    return socket.AF_UNIX if isinstance(address, str) else socket.AF_INET


def _remove(path: str, creator: int) -> None:
    """Remove the file of a Unix socket, but not in a fork of the process that made it."""
    if os.getpid() == creator:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _answer(objects: Mapping[str, object], request: memoryview) -> bytes:
    """Carry out a call: ``(True, result)`` or ``(False, error)``, pickled."""
    try:
        name, method, arguments, options = pickle.loads(request)
        if name is None:  # the client asks which objects are served
            result: Any = {name: _kind_of(thing) for name, thing in objects.items()}
        elif name not in objects:
            raise KeyError(f"{name!r} is not served; there are {sorted(objects)}")
        else:
            result = _method_of(objects[name], method)(*arguments, **options)
        return pickle.dumps((True, result), _PROTOCOL)
    except Exception as error:
        try:
            answer = pickle.dumps((False, error), _PROTOCOL)
            pickle.loads(answer)
            return answer
        except Exception:  # some errors cannot be pickled or unpickled and become text
            text = f"{type(error).__name__}: {error}"
            return pickle.dumps((False, RuntimeError(text)), _PROTOCOL)


def serve(
    objects: Mapping[str, object],
    address: Address = ("127.0.0.1", 0),
    authkey: bytes | None = None,
) -> AccumulatorServer:
    """Let other processes use the accumulators of this one.

    The objects stay here, and this process goes on using them; threads answer the calls
    of the others. Clients prove that they know ``authkey``. What they send is unpickled, so
    that **anyone who has the key can run any code here**, and nothing is encrypted: beyond
    loopback use it in trusted networks only.

    Clients that are slow, frozen or lost keep nobody else waiting. Unauthenticated
    connections are closed after 10 s, and at most 64 are open at a time; a client that
    stops for a minute in the middle of a message is disconnected.

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
    if authkey is not None:
        _check_key(authkey, "a random one is made when it is left out")
    return AccumulatorServer(dict(objects), address, authkey or os.urandom(32))


# --- the processes that connect -------------------------------------------------------


class AccumulatorClient:
    """The objects that another process serves, by name; made by :func:`connect`.

    Attributes:
      address: that of the server.
      timeout: seconds without a sign of life after which a call fails.
    """

    def __init__(self, address: Address, authkey: bytes, timeout: float) -> None:
        self.address = address
        self.timeout = timeout
        self._authkey = process.AuthenticationString(authkey)  # type: ignore[attr-defined]
        self._mine = threading.local()
        self._kinds: dict[str, str] = self._call(None, "kinds", (), {})

    def __getitem__(self, name: str) -> Any:
        """The stand-in for the object of that name: same methods, same errors."""
        if name not in self._kinds:
            raise KeyError(f"{name!r} is not served; there are {sorted(self._kinds)}")
        return _KINDS[self._kinds[name]](self, name)

    def __reduce__(self) -> Any:
        """For a process that is being started; else Python refuses to pickle the key."""
        return AccumulatorClient, (self.address, self._authkey, self.timeout)

    def _call(
        self,
        name: str | None,
        method: str,
        arguments: tuple[object, ...],
        options: Mapping[str, object],
        within: float | None = None,
    ) -> Any:
        """Send a call and wait for the answer, at most ``within`` seconds and timeout."""
        request = pickle.dumps((name, method, arguments, options), _PROTOCOL)
        latest = float("inf")
        if within is not None:
            latest = time.monotonic() + max(0.0, within) + self.timeout
        channel = self._channel()
        try:
            channel.allow(self.timeout)
            channel.send_bytes(request)
            channel.allow(self.timeout, until=latest)
            while (answer := channel.receive()) is None:  # a beat: the server works on it
                if time.monotonic() > latest:
                    raise TimeoutError("beats, but no answer")
                channel.allow(self.timeout, until=latest)
            done, result = pickle.loads(answer)
        except BaseException as error:
            # The answer may still come, and must not be taken for that to another call.
            channel.give_up()
            if isinstance(error, Exception):
                raise self._lost(error, method) from error
            raise
        if done:
            return result
        raise result

    def _channel(self) -> Channel:
        """The connection of this thread of this process, a new one if it has ended."""
        held: tuple[int, Channel] | None = getattr(self._mine, "held", None)
        if held and held[0] == os.getpid() and not held[1].readable():
            return held[1]
        channel = self._connected()
        self._mine.held = os.getpid(), channel
        return channel

    def _connected(self) -> Channel:
        """Connect, and let both sides prove that they know the key."""
        channel: Any = Channel(socket.socket(_family(self.address)))
        channel.allow(self.timeout)
        try:
            channel.connect(self.address)
        except OSError as error:
            raise UnavailableError(
                f"nobody serves accumulators at {self.address}: {error}"
            ) from error
        try:
            connection.answer_challenge(channel, self._authkey)
            connection.deliver_challenge(channel, self._authkey)
        except AuthenticationError as error:
            raise AuthenticationError(
                f"what listens at {self.address} refuses this authkey ({error}); pass that "
                "of the AccumulatorServer there"
            ) from error
        except TimeoutError as error:
            raise UnavailableError(self._silent()) from error
        except (AssertionError, EOFError, OSError) as error:
            raise UnavailableError(
                f"what listens at {self.address} has too many connections, or is no server "
                f"of accumulators ({type(error).__name__}: {error})"
            ) from error
        return channel

    def _lost(self, error: Exception, method: str) -> UnavailableError:
        if isinstance(error, TimeoutError):
            problem = self._silent()
        elif isinstance(error, EOFError | OSError):
            problem = (
                f"the process that served this at {self.address} is gone "
                f"({type(error).__name__})"
            )
        else:
            problem = (
                f"the answer of the server at {self.address} cannot be read here "
                f"({type(error).__name__}: {error})"
            )
        return UnavailableError(
            f"{problem}. {method} was carried out or not, which cannot be known from here; "
            "the next call connects anew"
        )

    def _silent(self) -> str:
        return (
            f"the server at {self.address} does not answer: it is frozen, overloaded or "
            f"cut off. To wait for more than {self.timeout:g} s use connect(timeout=...)"
        )


def connect(
    address: Address, authkey: bytes, *, timeout: float = 20.0
) -> AccumulatorClient:
    """Connect to the objects that another process serves.

    No call waits without end for a server that is frozen or cut off. While a server works
    on a call it gives a sign of life every quarter of a second; after ``timeout`` seconds
    without one the call ends in an ``UnavailableError``. So ``take_grad`` may wait for
    hours for gradients, and ends soon when none can come; ``take_grad(n, timeout=t)`` ends
    after ``t + timeout`` seconds at the latest. Bytes that move are signs of life too, if
    they are 100 kB in a second: a large gradient may take longer than ``timeout``.

    After an ``UnavailableError`` the stand-ins can be used again: the next call connects
    anew, also to a server that was started again at this address. Nothing is sent twice
    by itself, and a server that was frozen drops the calls that were given up meanwhile.
    But a call that it was already working on may have been carried out: what a
    ``take_grad`` took is lost then, and an ``apply_grad`` that is called again counts
    twice; go on with the next gradient instead.

    Args:
      address: that of the :class:`AccumulatorServer`.
      authkey: its key.
      timeout: seconds, from 1 on; above 10 where a network moves less than 1 MB/s.

    Returns:
      A client; ``client["name"]`` is a stand-in with the methods of the object.

    Raises:
      UnavailableError: (a ``ConnectionError``) when nothing listens there, or nothing that
        answers within ``timeout``.
      multiprocessing.AuthenticationError: for the wrong key.
      InvalidArgumentError: for a key or a timeout of the wrong kind.

    Example:
      >>> import jslices as js  # more in serve
      >>> js.accumulators.connect(("127.0.0.1", 1), b"key")
      Traceback (most recent call last):
      jslices._errors.UnavailableError: nobody serves accumulators at ('127.0.0.1', 1): ...
    """
    _check_key(authkey, "pass that of the AccumulatorServer")
    if not isinstance(timeout, int | float) or not 1 <= timeout <= _LONGEST_SECONDS:
        raise InvalidArgumentError(
            f"timeout={timeout!r}: it must be seconds, from 1 to {_LONGEST_SECONDS:,}"
        )
    return AccumulatorClient(address, authkey, timeout)


def _check_key(authkey: object, advice: str) -> None:
    if not isinstance(authkey, bytes) or not authkey:
        raise InvalidArgumentError(
            f"authkey must be bytes, not {type(authkey).__name__}; {advice}"
        )
