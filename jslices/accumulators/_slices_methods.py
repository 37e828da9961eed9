"""Sparse gradients as IndexedSlices, in terms of their parts.

The accumulator and its stand-in for other processes both have these two methods.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jslices._errors import InvalidArgumentError
from jslices._rows.bounds import INT32_MAX, empty_slot
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


class Limits(NamedTuple):
    """What a taker can hold; more is refused before it is taken."""

    max_index: int | None = None
    max_rows: int | None = None

    def check(self, rows: np.ndarray) -> None:
        """Refuses ``rows`` ``[U]``, ascending, beyond the limits."""
        if self.max_index is not None and rows.size and rows[-1] > self.max_index:
            raise InvalidArgumentError(
                f"row {rows[-1]} needs 64-bit indices; switch them on with "
                "jax.config.update('jax_enable_x64', True), or use take_grad"
            )
        if self.max_rows is not None and rows.size > self.max_rows:
            raise InvalidArgumentError(
                f"take_indexed_slices_grad(size={self.max_rows}): {rows.size} rows have "
                f"been accumulated; pass size={rows.size} or more, or leave size out"
            )


class SlicesMethods:
    """The same as ``apply_grad`` and ``take_grad`` for IndexedSlices."""

    def apply_grad(
        self, grad_indices: Any, grad_values: Any, grad_shape: Any, local_step: Any
    ) -> None:
        raise NotImplementedError

    def _take_within(
        self, limits: Limits, num_required: int, timeout: float | None
    ) -> SparseAccumulatorTakeGradient:
        raise NotImplementedError

    def apply_indexed_slices_grad(self, grad: IndexedSlices, local_step: Any = 0) -> None:
        """Like :meth:`apply_grad`, for slices ``values`` ``[K, *D]``, ``indices`` ``[K]``.

        Empty slots made on purpose (negative indices, and the canonical index V with which
        ``coalesce`` fills up) are left out. An index beyond V comes of a wrong id and is
        refused, as in TensorFlow. ``dense_shape`` counts as ``grad_shape``.
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
        self, num_required: int, *, timeout: float | None = None, size: int | None = None
    ) -> IndexedSlices:
        """Like :meth:`take_grad`, as IndexedSlices on JAX's default device.

        Args:
          num_required: at least 1.
          timeout: seconds to wait; None waits for ever.
          size: U, the number of slots; those that are left over are empty. None means as
            many as there are rows, which differs from take to take, so that a jitted
            function of the slices is compiled again and again: give one there.

        Returns:
          ``values`` ``[U, *D]`` and ``indices`` ``[U]`` ascending, in the widest dtypes
          that JAX has switched on: without ``jax_enable_x64`` float32 and int32.
          ``dense_shape`` is None when V is not known.

        Raises:
          InvalidArgumentError: (nothing is taken) for more than ``size`` rows, or a row
            number that needs ``jax_enable_x64``; and as in :meth:`take_grad`.
        """
        wide = jax.config.read("jax_enable_x64")
        limits = Limits(None if wide else INT32_MAX, size)
        taken = self._take_within(limits, num_required, timeout)
        shape = None if taken.shape[0] < 0 else tuple(int(n) for n in taken.shape)
        index_type = np.int64 if wide else np.int32
        values, indices = taken.values, taken.indices.astype(index_type)
        if size is not None and (missing := size - indices.size):
            empty = empty_slot(shape[0] if shape else None, np.dtype(index_type))
            if empty > np.iinfo(index_type).max:
                empty = -1  # V itself cannot be written, but any negative index is empty
            indices = np.append(indices, np.full(missing, empty, index_type))
            room = np.zeros((missing, *values.shape[1:]), values.dtype)
            values = np.concatenate([values, room])
        return IndexedSlices(jnp.asarray(values), jnp.asarray(indices), shape)
