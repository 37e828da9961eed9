"""Accumulators for worker processes, on this machine or others, over gRPC.

A server answers each call in a thread of its own. Clients hold stand-ins for its objects,
which forward every call. Connections, deadlines, signs of life, limits and encryption are
gRPC's; ``_messages`` says what a message may hold.
"""

import atexit
import builtins
import contextlib
import errno
import functools
import hmac
import math
import os
import secrets
import socket
import tempfile
import threading
import time
import types
from collections.abc import Mapping, Sequence
from concurrent import futures
from multiprocessing import context as processes
from typing import Any

import jslices
from jslices import InvalidArgumentError
from jslices._install import install_command
from jslices.accumulators import blocking
from jslices.accumulators._gradients import refuse_tracer
from jslices.accumulators._messages import pack, unpack
from jslices.accumulators._state import caller
from jslices.accumulators.blocking import RowMethods, SparseAccumulatorTakeGradient
from jslices.errors import FailedPreconditionError, UnavailableError

try:
    import grpc
except ImportError:
    grpc = None

#: Options of gRPC, ``("grpc.max_receive_message_length", 1 << 20)``.
Options = Sequence[tuple[str, Any]]

_LIMIT = "grpc.max_receive_message_length"
_METHOD = "/jslices.accumulators/1"  # its end is the version of messages
_CLIENT_SECONDS = 60.0  # without a sign of life, after which a server gives a client up
_SLOWEST = 1_000_000  # bytes of a message in a second
_LONGEST_SECONDS = 1_000_000


def _options(seconds: float, more: Options) -> Options:
    """Limits, and pings by which a lost peer is noticed after so many seconds."""
    half = int(seconds * 500)  # milliseconds until a ping, and again until its answer
    options = {
        "grpc.max_send_message_length": 2**31 - 1,
        _LIMIT: 2**31 - 1,
        "grpc.keepalive_time_ms": half,
        "grpc.keepalive_timeout_ms": half,  # of sent bytes, at a port
        "grpc.http2.ping_timeout_ms": half,
        "grpc.keepalive_permit_without_calls": 1,
        "grpc.http2.max_pings_without_data": 0,
        "grpc.http2.max_ping_strikes": 0,  # clients may ping as often as they like
        "grpc.min_reconnect_backoff_ms": 2 * half,  # how long an attempt may take
        "grpc.server_handshake_timeout_ms": 10_000,
        "grpc.so_reuseport": 0,  # else two servers may share a port
        "grpc.use_local_subchannel_pool": 1,
        "grpc.enable_retries": 0,  # nothing is sent twice
        "grpc.enable_http_proxy": 0,
    }
    return list({**options, **dict(more)}.items())  # gRPC takes the first of a name


# --- stand-ins ------------------------------------------------------------------------


class RemoteObject:
    """A stand-in for an object of another process: its public methods and its errors."""

    def __init__(self, client: "AccumulatorClient", name: str) -> None:
        self._client, self._name = client, name

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)
        return functools.partial(self._client._call, self._name, method)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._name!r} at {self._client.address}>"


class RemoteSparseAccumulator(RowMethods, RemoteObject):
    """One for rows: slices become arrays, and arrays slices, in the client."""

    def _take_within(
        self, num_required: int, timeout: float | None, **limits: int | None
    ) -> SparseAccumulatorTakeGradient:
        most = dict(self._client._options)[_LIMIT]
        take = functools.partial(self._client._call, self._name, "_take_within")
        taken = take(num_required, timeout=timeout, max_bytes=most, **limits)
        return SparseAccumulatorTakeGradient(*taken)


#: What messages call a kind of object.
_KINDS = {
    "sparse": blocking.SparseConditionalAccumulator,
    "dense": blocking.ConditionalAccumulatorBase,
    "object": object,
}


# --- the process that serves ----------------------------------------------------------


class _Threads(futures.Executor):
    """A thread for each call, however many wait. They do not keep a process from ending."""

    def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> futures.Future[Any]:
        future: futures.Future[Any] = futures.Future()

        def answer() -> None:
            try:
                future.set_result(function(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        while True:
            try:
                threading.Thread(target=answer, daemon=True, name="jslices serve").start()
                return future
            except RuntimeError:  # no more threads, until one ends
                time.sleep(0.1)


class AccumulatorServer:
    """Objects of this process that other processes may use; made by :func:`serve`.

    Attributes:
      address: where it listens, with the port that was chosen.
      token: the text that :func:`connect` must be given; ``""`` where there is none.
    """

    def __init__(
        self,
        objects: dict[str, object],
        address: str,
        token: str,
        credentials: Any,
        options: Options,
    ) -> None:
        self.token = token
        self._objects = objects
        self._kinds = {
            name: next(kind for kind, of in _KINDS.items() if isinstance(thing, of))
            for name, thing in objects.items()
        }
        self._server = grpc.server(
            _Threads(),
            handlers=[types.SimpleNamespace(service=self._handler)],
            options=_options(_CLIENT_SECONDS, options),
        )
        self.address = _listen(self._server, address, credentials)
        self._process = os.getpid()
        self._server.start()
        atexit.register(self.close)  # which keeps it alive until then

    def close(self) -> None:
        """Stops serving; clients get an UnavailableError. The objects live on here."""
        if self._process == os.getpid():  # not in a fork
            atexit.unregister(self.close)
            # Not None: it waits for a frozen client to read what has been sent to it.
            self._server.stop(0).wait(5)

    def __enter__(self) -> "AccumulatorServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _handler(self, details: Any) -> Any:
        """Find the handler of a call from its method and metadata."""
        sent = dict(details.invocation_metadata).get("authorization", "")
        if self.token and not hmac.compare_digest(sent, f"Bearer {self.token}"):
            code, text = "UNAUTHENTICATED", "the token is missing, or another one"
        elif details.method != _METHOD:
            code = "FAILED_PRECONDITION"
            text = (
                f"messages of version {_METHOD[-1]} are understood there, not "
                f"{details.method}; install the same jslices in both processes"
            )
        else:
            return grpc.unary_unary_rpc_method_handler(self._answer)
        return grpc.stream_unary_rpc_method_handler(  # it reads no message
            lambda _, context: context.abort(grpc.StatusCode[code], text)
        )

    def _answer(self, request: bytes, context: Any) -> bytes:
        """Carry out a call: ``[None, result]``, or ``[[type, text], None]`` of an error."""
        caller.set(context)
        try:
            name, method, arguments, options = unpack(request)
            return pack([None, self._method(name, method)(*arguments, **options)])
        except BaseException as error:  # also SystemExit: somebody waits for an answer
            is_text = len(error.args) == 1 and isinstance(error.args[0], str)
            text = error.args[0] if is_text else str(error)
            return pack([[type(error).__name__, text], None])

    def _method(self, name: str | None, method: str) -> Any:
        """Look up a method that a client may call."""
        if name is None:  # which objects are served
            return lambda: self._kinds
        if name not in self._objects:
            raise KeyError(f"{name!r} is not served; there are {sorted(self._objects)}")
        thing = self._objects[name]
        if method.startswith("_") and method != "_take_within":
            raise AttributeError(f"{method!r} of a {type(thing).__name__} is not served")
        return getattr(thing, method)


def _listen(server: Any, address: str, credentials: Any) -> str:
    """Have a server listen; the address, with the port that was chosen."""
    path = _path(address)
    if path and os.path.exists(path):
        with socket.socket(socket.AF_UNIX) as end:
            if end.connect_ex(path) == 0:  # gRPC would take it from the server there
                raise OSError(errno.EADDRINUSE, "another server listens there", path)
    mask = os.umask(0o177)  # of a new socket: only this user can connect
    try:
        port = server.add_secure_port(address, credentials)
        return address if path is not None else f"{address.rpartition(':')[0]}:{port}"
    except RuntimeError as error:
        raise OSError(
            f"nothing can listen at {address}: it is in use, not of this machine, too long "
            "for a path, or in no folder; gRPC has logged which"
        ) from error
    finally:
        os.umask(mask)


def _path(address: str) -> str | None:
    """The path of a Unix socket; None for a port."""
    if not address.startswith("unix:"):
        return None
    return address.removeprefix("unix:").removeprefix("//")


def _check(call: str, address: str, token: str | None) -> None:
    """Check what ``serve`` and ``connect`` have in common."""
    if grpc is None:
        raise ImportError(f"{call} uses gRPC: " + install_command("serve"))
    if not isinstance(address, str) or not (
        address.startswith("unix:") or address.rpartition(":")[2].isdecimal()
    ):
        raise InvalidArgumentError(
            f"{call}(address={address!r}): write 'unix:/path/of/a/socket', 'host:5000' or "
            "'[::1]:5000'"
        )
    if token is not None and not (isinstance(token, str) and token.isascii()):
        raise InvalidArgumentError(
            f"{call}(token=...) must be ASCII text, got {type(token).__name__}"
        )


def serve(
    objects: Mapping[str, object],
    address: str | None = None,
    token: str | None = None,
    *,
    credentials: Any = None,
    options: Options = (),
) -> AccumulatorServer:
    """Let other processes use the accumulators of this one.

    The objects stay here, and this process goes on using them. By default the others are
    those of this user; the page *Many workers* tells how to let more in, and what happens
    when a process fails.

    Args:
      objects: accumulators by name; also any other object, whose public methods can then
        be called (the parameters, say) with numbers, text, None, arrays, and lists, tuples
        and dicts of these. Messages hold nothing else: no code, no pickles.
      address: ``"unix:/path"``, ``"host:port"`` or ``"[::]:port"``; port 0 is a free one.
        None is a new Unix socket.
      token: a secret that clients must send; None makes a random one, except at a Unix
        socket; ``""`` demands none, for ``credentials`` that demand client certificates.
      credentials: of ``grpc.ssl_server_credentials``, say. None are gRPC's local ones,
        which refuse other machines and encrypt nothing.
      options: further options of the gRPC server, ``("grpc.max_receive_message_length",
        1 << 20)``.

    Returns:
      An :class:`AccumulatorServer`; use it in a ``with`` statement.

    Raises:
      InvalidArgumentError: for arguments of the wrong kind, and ``token=""`` at a port
        without credentials.
      OSError: when nothing can listen at the address.
      ImportError: without gRPC, the extra ``serve``.

    Example:
      >>> import jslices as js
      >>> mean = js.accumulators.SparseConditionalAccumulator("float32", (5, 1))
      >>> with js.accumulators.serve({"table": mean}) as server:
      ...     # in another process, given server.address and server.token:
      ...     table = js.accumulators.connect(server.address, server.token)["table"]
      ...     table.apply_grad([3], [[1.0]])
      >>> mean.take_grad(1).indices
      array([3])

    Source: TensorFlow's accumulators live on a parameter server, which uses gRPC as well.
    """
    if not objects or not all(isinstance(name, str) for name in objects):
        raise InvalidArgumentError(
            f"serve wants objects by name, {{'table': accumulator}}, got {objects!r}"
        )
    if address is None:
        socket_name = f"jslices-{secrets.token_hex(8)}"
        address = "unix:" + os.path.join(tempfile.gettempdir(), socket_name)
    _check("serve", address, token)
    is_port = _path(address) is None
    if token is None:
        token = secrets.token_hex(32) if is_port else ""
    if credentials is None:
        if is_port and not token:
            raise InvalidArgumentError(
                f"serve(address={address!r}, token='') lets everybody in: leave the token "
                "out, or pass credentials that demand client certificates"
            )
        credentials = grpc.local_server_credentials(_local(address))
    return AccumulatorServer(dict(objects), address, token, credentials, options)


def _local(address: str) -> Any:
    kinds = grpc.LocalConnectionType
    return kinds.LOCAL_TCP if _path(address) is None else kinds.UDS


# --- the processes that connect -------------------------------------------------------


class AccumulatorClient:
    """The objects that another process serves, by name; made by :func:`connect`.

    Attributes:
      address: that of the server.
      timeout: seconds without a sign of life after which a call fails.
    """

    def __init__(
        self, address: str, token: str, credentials: Any, timeout: float, options: Options
    ) -> None:
        self.address, self.timeout = address, timeout
        self._token, self._credentials = token, credentials
        self._options = _options(timeout, options)
        self._process = os.getpid()
        self._lock = threading.Lock()  # of the channel
        self._channel = self._new_channel()
        self._kinds: dict[Any, str] = {}  # but for the call that asks for them
        self._kinds = self._call(None, "kinds")

    def __getitem__(self, name: str) -> Any:
        """The stand-in for the object of that name: same methods, same errors."""
        if name not in self._kinds:
            raise KeyError(f"{name!r} is not served; there are {sorted(self._kinds)}")
        has_rows = self._kinds[name] == "sparse"
        return (RemoteSparseAccumulator if has_rows else RemoteObject)(self, name)

    def __reduce__(self) -> Any:
        """For a process that is being started; nothing else may hold the token."""
        processes.assert_spawning(self)
        private = self._token, self._credentials
        return type(self), (self.address, *private, self.timeout, self._options)

    def _new_channel(self) -> Any:
        local = grpc.local_channel_credentials(_local(self.address))
        return grpc.secure_channel(self.address, self._credentials or local, self._options)

    def _call(
        self, name: str | None, method: str, /, *arguments: object, **options: Any
    ) -> Any:
        """Have a method called."""
        for argument in (*arguments, *options.values()):
            refuse_tracer(f"an argument of {method}", argument)
        request = pack([name, method, list(arguments), options])
        if self._process != os.getpid():
            raise RuntimeError(
                "a connection does not survive a fork: connect in the new process, or "
                "start it with multiprocessing.get_context('spawn')"
            )
        self._check_owner()
        within = 0.0
        if self._kinds.get(name) == "object":  # whose methods may wait for ever
            within = math.inf
        elif method in ("take_grad", "_take_within"):
            timeout = options.get("timeout")
            within = math.inf if timeout is None else max(0.0, timeout)
        within += self.timeout + len(request) / _SLOWEST
        channel = self._channel
        metadata = [("authorization", f"Bearer {self._token}")] if self._token else None
        try:
            call = channel.unary_unary(_METHOD).future(request, metadata=metadata)
            try:
                problem, result = unpack(self._wait(call, channel, within))
            finally:
                call.cancel()
        except Exception as error:
            raise self._lost(error, method, channel) from error
        if problem is not None:
            raise _error(*problem)
        return result

    def _wait(self, call: Any, channel: Any, within: float) -> bytes:
        """Wait for an answer, unless another call has given the channel up.

        At a Unix socket whose buffer a frozen server does not empty, neither a deadline of
        gRPC nor a ping nor the end of the channel ends a call.
        """
        end = time.monotonic() + within
        while True:
            left = end - time.monotonic()
            try:
                return call.result(min(left, self.timeout / 2))
            except grpc.FutureTimeoutError:
                if left <= self.timeout / 2 or self._channel is not channel:
                    raise

    def _check_owner(self) -> None:
        """Refuse a Unix socket that another user listens at."""
        path = _path(self.address)
        try:
            owner = os.stat(path).st_uid if path else None
        except FileNotFoundError:
            return  # gRPC says that nobody listens
        if path and owner != os.geteuid():
            raise PermissionError(
                f"{path} belongs to user {owner}, not to {os.geteuid()}: only servers of "
                "the same user are used at a Unix socket; use a port, and credentials"
            )

    def _lost(self, error: Any, method: str, channel: Any) -> Exception:
        """What to raise, as there is no answer that can be read."""
        code, details = type(error).__name__, str(error) or "none in time"
        if isinstance(error, grpc.RpcError):
            code, details = error.code().name, error.details()
        problem = f"the server at {self.address}: {details}"
        if code == "UNAUTHENTICATED":
            return PermissionError(f"{problem}; pass that of the AccumulatorServer there")
        if code == "FAILED_PRECONDITION":
            return FailedPreconditionError(problem)
        if code == "RESOURCE_EXHAUSTED":
            return InvalidArgumentError(f"{problem}; send fewer rows at once")
        with self._lock:
            if self._channel is channel:
                self._channel = self._new_channel()
        # It ends the calls of other threads, and waits for what a frozen server must read.
        threading.Thread(target=channel.close, daemon=True).start()
        return UnavailableError(
            f"no answer from {self.address}: it is gone, frozen, overloaded, cut off, or "
            f"no such server ({code}: {details}). {method} was carried out or not, which "
            "cannot be known from here; the next call connects anew"
        )


def _error(name: str, text: str) -> Exception:
    """The error of a server, if it is one of jslices or Python."""
    homes = jslices.errors, jslices, builtins
    kind = next((vars(home)[name] for home in homes if name in vars(home)), None)
    with contextlib.suppress(TypeError):  # it wants more than a text
        if isinstance(kind, type) and issubclass(kind, Exception):
            return kind(text)
    return RuntimeError(f"{name}: {text}")


def connect(
    address: str,
    token: str = "",
    *,
    credentials: Any = None,
    timeout: float = 20.0,
    options: Options = (),
) -> AccumulatorClient:
    """Connect to the objects that another process serves.

    A call may wait for hours while the server lives, but ends in an ``UnavailableError``
    after ``timeout`` seconds without a sign of life, and one for each MB that it sends;
    ``take_grad(n, timeout=t)`` ends after ``t + timeout``. Such a call may have been
    carried out, or may be when a frozen server goes on, and is not sent again: go on with
    the next gradient, as an ``apply_grad`` that is called again may count twice. The next
    call connects anew, also to a server that was started again at this address.

    Args:
      address: that of the :class:`AccumulatorServer`, or a name for its machine and the
        port, ``"chief:5000"``.
      token: its token.
      credentials: of ``grpc.ssl_channel_credentials``, say. None are gRPC's local ones, for
        this machine alone; at a port the token is sent to whoever listens there.
      timeout: seconds, from 1 on.
      options: further options of the gRPC channel.

    Returns:
      A client; ``client["name"]`` is a stand-in with the methods of the object.

    Raises:
      UnavailableError: (a ``ConnectionError``) when nothing answers there.
      PermissionError: for another token, or a Unix socket of another user.
      FailedPreconditionError: for a server of another version.
      InvalidArgumentError: for arguments of the wrong kind, and by stand-ins for a message
        of more than 2 GiB, or than ``options`` allow.
      ImportError: without gRPC, the extra ``serve``.

    Example:
      >>> import jslices as js  # more in serve
      >>> js.accumulators.connect("127.0.0.1:1", "token")
      Traceback (most recent call last):
      jslices.errors.UnavailableError: no answer from 127.0.0.1:1: it is gone, ...
    """
    _check("connect", address, token)
    if not isinstance(timeout, int | float) or not 1 <= timeout <= _LONGEST_SECONDS:
        raise InvalidArgumentError(
            f"timeout={timeout!r}: it must be seconds, from 1 to {_LONGEST_SECONDS:,}"
        )
    return AccumulatorClient(address, token, credentials, timeout, options)
