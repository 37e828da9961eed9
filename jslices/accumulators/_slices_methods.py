"""Sparse gradients as IndexedSlices, in terms of their parts.

The accumulator and its stand-in for other processes both have these two methods.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jslices._bounds import INT32_MAX
from jslices._errors import InvalidArgumentError
from jslices._slices import IndexedSlices, is_slices
from jslices.accumulators._gradients import occupied_rows


class SparseAccumulatorTakeGradient(NamedTuple):
    """What ``take_grad`` returns.

    Attributes:
      indices: ``[U]`` int64, ascending.
      values: ``[U, *D]`` of the accumulator's dtype.
      shape: int64, ``(V, *D)``; V is -1 when it is not known.
    """

    indices: np.ndarray
    values: np.ndarray
    shape: np.ndarray


class SlicesMethods:
    """The same as ``apply_grad`` and ``take_grad`` for IndexedSlices."""

    def apply_grad(
        self, grad_indices: Any, grad_values: Any, grad_shape: Any, local_step: Any
    ) -> None:
        raise NotImplementedError

    def _take_checked(
        self, num_required: int, timeout: float | None, max_index: int | None
    ) -> SparseAccumulatorTakeGradient:
        raise NotImplementedError

    def apply_indexed_slices_grad(self, grad: IndexedSlices, local_step: Any = 0) -> None:
        """Like :meth:`apply_grad`, for slices ``values`` ``[K, *D]``, ``indices`` ``[K]``.

        Empty slots (negative indices, and the canonical index V with which ``coalesce``
        fills up) are left out. ``dense_shape`` counts as ``grad_shape``.
        """
        if not is_slices(grad):
            raise TypeError(
                "apply_indexed_slices_grad wants IndexedSlices, got a "
                f"{type(grad).__name__}; a dense gradient goes to a "
                "jslices.ConditionalAccumulator"
            )
        values, indices = occupied_rows(grad)
        self.apply_grad(indices, values, grad.dense_shape, local_step)

    def take_indexed_slices_grad(
        self, num_required: int, *, timeout: float | None = None
    ) -> IndexedSlices:
        """Like :meth:`take_grad`, as IndexedSlices on JAX's default device.

        ``values`` ``[U, *D]`` and ``indices`` ``[U]`` ascending, in the widest dtypes
        that JAX has switched on: without ``jax_enable_x64`` those are float32 and int32.
        ``dense_shape`` is None when V is not known.

        Raises:
          InvalidArgumentError: for a row number that needs ``jax_enable_x64``; nothing is
            taken then.
        """
        limit = None if jax.config.read("jax_enable_x64") else INT32_MAX
        taken = self._take_checked(num_required, timeout, limit)
        shape = None if taken.shape[0] < 0 else tuple(int(n) for n in taken.shape)
        return IndexedSlices(jnp.asarray(taken.values), jnp.asarray(taken.indices), shape)


def check_max_index(rows: np.ndarray, max_index: int | None) -> None:
    """Refuses rows that the taker cannot number."""
    if max_index is not None and rows.size and rows[-1] > max_index:
        raise InvalidArgumentError(
            f"row {rows[-1]} needs 64-bit indices; switch them on with "
            "jax.config.update('jax_enable_x64', True), or use take_grad"
        )
