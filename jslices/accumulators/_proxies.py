"""What another process holds in place of an accumulator: the same methods, sent over."""

import functools
import socket
from collections.abc import Sequence
from multiprocessing import connection
from multiprocessing.managers import BaseProxy
from typing import Any

import numpy as np
from jax.typing import ArrayLike

from jslices._errors import UnavailableError
from jslices.accumulators._gradients import refuse_tracer
from jslices.accumulators._slices_methods import (
    Limits,
    SlicesMethods,
    SparseAccumulatorTakeGradient,
)

STEPS = ("num_accumulated", "num_stale", "global_step", "set_global_step", "close")
DENSE = ("apply_grad", "take_grad", *STEPS)
SPARSE = ("apply_grad", "_take_within", *STEPS)


def send_at_once(conn: connection.Connection) -> None:
    """Switches off Nagle's algorithm.

    A message above 16 KB is written in two parts, and the second would wait, typically
    for 40 ms, until the other side has acknowledged the first.
    """
    try:
        with socket.fromfd(conn.fileno(), socket.AF_INET, socket.SOCK_STREAM) as end:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError:
        pass  # no TCP, so no Nagle


class RemoteObject(BaseProxy):
    """Any other object that another process holds: its public methods, by name.

    Every thread has a connection of its own.
    """

    _token: Any
    _tls: Any

    def _connect(self) -> None:
        super()._connect()  # type: ignore[misc]
        send_at_once(self._tls.connection)

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


class _RemoteSteps(RemoteObject):
    """Steps and counts."""

    def num_accumulated(self) -> int:
        """As in the accumulator."""
        return self._call("num_accumulated")

    def num_stale(self) -> int:
        """As in the accumulator."""
        return self._call("num_stale")

    def global_step(self) -> int:
        """As in the accumulator."""
        return self._call("global_step")

    def set_global_step(self, new_global_step: Any) -> None:
        """As in the accumulator."""
        self._call("set_global_step", _sendable("new_global_step", new_global_step))

    def close(self) -> None:
        """Closes the accumulator for everybody."""
        self._call("close")


class RemoteSparseAccumulator(_RemoteSteps, SlicesMethods):
    """A :class:`SparseConditionalAccumulator` that another process holds.

    Methods and errors are the same, and an ``UnavailableError`` when that process is gone.
    A gradient is applied wholly or not at all, also when this process is killed meanwhile;
    a process that is killed while it waits to take takes nothing.
    """

    def apply_grad(
        self,
        grad_indices: ArrayLike,
        grad_values: ArrayLike,
        grad_shape: Sequence[int] | None = None,
        local_step: int = 0,
    ) -> None:
        """As in the accumulator; K rows are sent."""
        indices = _sendable("grad_indices", grad_indices)
        values = _sendable("grad_values", grad_values)
        step = _sendable("local_step", local_step)
        self._call("apply_grad", indices, values, grad_shape, step)

    def take_grad(
        self, num_required: int, *, timeout: float | None = None
    ) -> SparseAccumulatorTakeGradient:
        """As in the accumulator; U rows are sent."""
        return self._take_within(Limits(), num_required, timeout)

    def _take_within(
        self, limits: Limits, num_required: int, timeout: float | None
    ) -> SparseAccumulatorTakeGradient:
        return self._call("_take_within", limits, num_required, timeout)


class RemoteAccumulator(_RemoteSteps):
    """A :class:`ConditionalAccumulator` that another process holds.

    Methods and errors are the same, and an ``UnavailableError`` when that process is gone.
    """

    def apply_grad(self, grad: ArrayLike, local_step: int = 0) -> None:
        """As in the accumulator; the array is sent."""
        self._call("apply_grad", _sendable("grad", grad), _sendable("step", local_step))

    def take_grad(self, num_required: int, *, timeout: float | None = None) -> np.ndarray:
        """As in the accumulator; an array is sent."""
        return self._call("take_grad", num_required, timeout=timeout)


def _sendable(name: str, value: Any) -> Any:
    """JAX arrays as NumPy arrays, which any process can read without a device."""
    refuse_tracer(name, value)
    return np.asarray(value) if hasattr(value, "dtype") else value
