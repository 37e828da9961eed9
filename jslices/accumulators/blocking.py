"""The sparse accumulator that threads share: apply, and wait to take the mean."""

from collections.abc import Sequence

import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jslices.accumulators._base import ConditionalAccumulatorBase
from jslices.accumulators._gradients import (
    check_rows,
    check_sparse,
    host_array,
    host_indices,
    partial_shape,
    positive,
    whole_number,
)
from jslices.accumulators._row_sums import RowSums, merged
from jslices.accumulators._slices_methods import (
    Limits,
    SlicesMethods,
    SparseAccumulatorTakeGradient,
)


class SparseConditionalAccumulator(ConditionalAccumulatorBase, SlicesMethods):
    """Collects row gradients from many threads until enough have come to take their mean.

    It holds the sum of every row, a count, and a step. :meth:`apply_grad` adds a gradient
    unless its ``local_step`` is below the step (a *stale* one: dropped, silently and
    unchecked). :meth:`take_grad` waits for ``num_required`` gradients, reduces **all**
    that came, empties the accumulator and adds one to the step.

    "MEAN" divides each row by the number of gradients that held **that row**, not by the
    number of gradients: ``{0: 1, 2: 2}`` and ``{2: 10, 3: 30}`` give
    ``{0: 1, 2: 6, 3: 30}``. Rows that no gradient held are not in the result.

    All methods may be called from any thread. It computes on the host with NumPy and
    never inside ``jit``; there use :func:`sparse_accumulator`. For other
    processes see :func:`jslices.accumulators.serve`.

    Args:
      dtype: floating dtype of the gradients. Gradients of one row are added in it, in the
        order they come, as TensorFlow does (duplicates within a gradient are summed in
        float32 and rounded once).
      shape: ``(V, *D)``; None for a length that is not known, and None or ``()`` when
        nothing is. Known ones are checked; a gradient's rows may have further axes.
      shared_name: accumulators of this process with the same one share their state for as
        long as one of them lives.
      name: for your own use.
      reduction_type: "MEAN" or "SUM".

    Raises:
      InvalidArgumentError: for arguments that are none of these, or a ``shared_name`` that
        stands for an accumulator of another dtype, shape or reduction.

    Example:
      >>> import numpy as np, jslices as js
      >>> mean = js.accumulators.SparseConditionalAccumulator("float32", shape=(5, 1))
      >>> mean.apply_grad([0, 2], [[1.0], [2.0]])
      >>> mean.apply_grad([2, 3], [[10.0], [30.0]], local_step=0)
      >>> mean.take_grad(2).indices
      array([0, 2, 3])
      >>> mean.apply_grad([0], [[1.0]], local_step=0)  # stale: the step is 1 now
      >>> mean.num_accumulated(), mean.global_step()
      (0, 1)

    Source: ``tf._jax.v1.SparseConditionalAccumulator``. Differences: indices need not be
    sorted or unique (TensorFlow returns duplicate rows then, each divided by a count of
    its own), and the result is always ascending; any floating dtype, bfloat16 included;
    wrong dtypes and indices that are no integers are errors, where TensorFlow aborts or
    truncates; two uses of one ``shared_name`` must agree; ``timeout``, ``close``,
    ``global_step`` and ``num_stale`` are new.
    """

    _store = RowSums

    def __init__(
        self,
        dtype: DTypeLike,
        shape: Sequence[int | None] | None = None,
        shared_name: str | None = None,
        name: str = "sparse_conditional_accumulator",
        reduction_type: str = "MEAN",
    ) -> None:
        known = partial_shape(type(self).__name__, shape) or None  # there must be rows
        super().__init__(dtype, known, shared_name, name, reduction_type)

    def apply_grad(
        self,
        grad_indices: ArrayLike,
        grad_values: ArrayLike,
        grad_shape: Sequence[int] | None = None,
        local_step: int = 0,
    ) -> None:
        """Adds a gradient, or drops it when ``local_step`` is below the step.

        Args:
          grad_indices: ``[K]`` integers, in any order; duplicates add, and count as one
            holding of the row. A negative one is an empty slot: it stays as it is and
            every operation on the taken slices drops it.
          grad_values: ``[K, *D]`` of the accumulator's dtype (a list takes it on).
          grad_shape: ``(V, *D)`` if known, to be compared with the accumulator's.
          local_step: the step on whose parameters the gradient was computed.

        Raises:
          InvalidArgumentError: for shapes, dtypes or indices that do not fit, V and
            beyond included. The accumulator is unchanged.
          CancelledError: after :meth:`close`.

        Cost: a sort of K integers unless they ascend, a search of K in U, and K rows.
        """

        def prepare() -> tuple[np.ndarray, np.ndarray]:
            indices = host_indices(grad_indices)
            values = host_array("grad_values", grad_values, self.dtype)
            shape = partial_shape("apply_grad", grad_shape, "grad_shape")
            check_sparse(indices, values, shape, self.shape, self.dtype)
            check_rows(indices, self.shape)
            return merged(indices, values)

        self._turns.apply(whole_number("local_step", local_step), prepare)

    def take_grad(
        self, num_required: int, *, timeout: float | None = None
    ) -> SparseAccumulatorTakeGradient:
        """Waits for ``num_required`` gradients and takes the mean (or sum) of all.

        Who came first is served first, also where a later one would need less.

        Args:
          num_required: at least 1.
          timeout: seconds to wait; None waits for ever.

        Returns:
          ``(indices [U] int64 ascending, values [U, *D], shape)``, NumPy arrays; ``shape``
          begins with -1 when V is not known.

        Raises:
          InvalidArgumentError: for ``num_required < 1``, at once.
          DeadlineExceededError: (a ``TimeoutError``) after ``timeout``; nothing is taken.
          CancelledError: when it is closed, also by another thread meanwhile.
        """
        return self._take_within(Limits(), num_required, timeout)

    def _take_within(
        self, limits: Limits, num_required: int, timeout: float | None
    ) -> SparseAccumulatorTakeGradient:
        number = positive(num_required)
        store, _ = self._turns.take(number, timeout, lambda s: limits.check(s.rows))
        rows, values = store.reduced(mean=self.reduction_type == "MEAN")
        num_rows = None if self.shape is None else self.shape[0]
        shape = (-1 if num_rows is None else num_rows, *values.shape[1:])
        return SparseAccumulatorTakeGradient(rows, values, np.array(shape, np.int64))
