"""What another process holds in place of an accumulator: the same methods, sent over."""

from collections.abc import Sequence
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


class _Remote(BaseProxy):
    """Steps and counts; every thread has a connection of its own."""

    _token: Any

    def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        try:
            return self._callmethod(method, arguments, options)
        except (EOFError, ConnectionError) as error:
            raise UnavailableError(
                f"the process that served this accumulator at {self._token.address} is "
                f"gone ({type(error).__name__})"
            ) from error

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


class RemoteSparseAccumulator(_Remote, SlicesMethods):
    """A :class:`jslices.SparseConditionalAccumulator` that another process holds.

    Methods and errors are the same, and an ``UnavailableError`` when that process is gone.
    A gradient is applied wholly or not at all, also when this process is killed; a take of
    a process that was killed meanwhile takes nothing.
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


class RemoteAccumulator(_Remote):
    """A :class:`jslices.ConditionalAccumulator` that another process holds.

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
