"""The same for gradients that are whole arrays."""

from collections.abc import Sequence

import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jslices._errors import InvalidArgumentError
from jslices.accumulators._base import ConditionalAccumulatorBase
from jslices.accumulators._gradients import (
    check_dense,
    host_array,
    positive,
    whole_number,
)
from jslices.accumulators._row_sums import divided


class ArraySum:
    """The sum of the arrays seen so far; None before the first."""

    def __init__(self, dtype: np.dtype) -> None:
        self.dtype = dtype
        self.total: np.ndarray | None = None

    def add(self, grad: np.ndarray) -> None:
        """Adds ``grad``; the first settles the shape."""
        if self.total is None:
            self.total = np.array(grad)
            return
        if grad.shape != self.total.shape:
            wanted, given = (",".join(map(str, a.shape)) for a in (self.total, grad))
            raise InvalidArgumentError(
                f"Shape mismatch: expected [{wanted}], got [{given}]; the gradients since "
                "the last take have the first shape"
            )
        with np.errstate(all="ignore"):
            self.total += grad


class ConditionalAccumulator(ConditionalAccumulatorBase):
    """Collects dense gradients from many threads until enough have come to take the mean.

    Everything is as in :class:`SparseConditionalAccumulator`, except that a
    gradient is one array and "MEAN" divides by the number of gradients.

    Args:
      dtype: floating dtype of the gradients, in which they are added as they come.
      shape: of the gradients; None for a length that is not known, and None when nothing
        is. ``()`` is a scalar.
      shared_name: accumulators of this process with the same one share their state.
      name: for your own use.
      reduction_type: "MEAN" or "SUM".

    Raises:
      InvalidArgumentError: for arguments that are none of these.

    Example:
      >>> import numpy as np, jslices as js
      >>> mean = js.accumulators.ConditionalAccumulator("float32", shape=(2,))
      >>> mean.apply_grad([1.0, 5.0])
      >>> mean.apply_grad([3.0, 5.0])
      >>> mean.take_grad(2)
      array([2., 5.], dtype=float32)

    Source: ``tf._jax.v1.ConditionalAccumulator``.
    """

    _store = ArraySum

    def __init__(
        self,
        dtype: DTypeLike,
        shape: Sequence[int | None] | None = None,
        shared_name: str | None = None,
        name: str = "conditional_accumulator",
        reduction_type: str = "MEAN",
    ) -> None:
        super().__init__(dtype, shape, shared_name, name, reduction_type)

    def apply_grad(self, grad: ArrayLike, local_step: int = 0) -> None:
        """Adds ``grad``, of the accumulator's shape and dtype, unless it is stale.

        Raises:
          InvalidArgumentError: for another shape or dtype; nothing has changed.
          CancelledError: after :meth:`close`.
        """

        def prepare() -> tuple[np.ndarray]:
            array = host_array("grad", grad, self.dtype)
            check_dense(array, self.shape, self.dtype)
            return (array,)

        self._turns.apply(whole_number("local_step", local_step), prepare)

    def take_grad(self, num_required: int, *, timeout: float | None = None) -> np.ndarray:
        """Waits for ``num_required`` gradients; the mean (or sum) of all that came.

        Served in the order of coming. Empties the accumulator, adds one to the step.

        Raises:
          InvalidArgumentError: for ``num_required < 1``, at once.
          DeadlineExceededError: (a ``TimeoutError``) after ``timeout``; nothing is taken.
          CancelledError: when it is closed, also by another thread meanwhile.
        """
        store, count = self._turns.take(positive(num_required), timeout)
        return divided(store.total, count) if self.reduction_type == "MEAN" else store.total
