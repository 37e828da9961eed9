"""Sums and means of IndexedSlices, without the zeros in between."""

import math
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jslices._rows.bounds import canonical_indices, empty_slot
from jslices._rows.check import check_slices

if TYPE_CHECKING:
    from jslices._slices import IndexedSlices

Axis = int | Sequence[int] | None


class RowReductions:
    """The reductions of IndexedSlices: those of the dense array they stand for."""

    values: jax.Array
    indices: jax.Array
    dense_shape: tuple[int, ...] | None
    ndim: Any
    tree_unflatten: Any
    coalesce: Callable[[], "IndexedSlices"]

    def sum(
        self, axis: Axis = None, dtype: DTypeLike | None = None, out: None = None
    ) -> Any:
        """The sum of ``to_dense()`` over ``axis``, from the rows held.

        Args:
          axis: None for all; an int or several, counted in the dense array.
          dtype: of the result and of the summing; None: as ``jnp.sum``, except that 16-bit
            floats are summed in float32 and rounded once.
          out: None; it is there because ``np.sum(slices)`` passes it.

        Returns:
          An array without ``axis`` if the rows' axis 0 is summed over; otherwise
          IndexedSlices with the same ``indices`` and smaller rows. Duplicates add, empty
          slots drop.

        Cost: one pass over ``K * D`` elements.

        Example:
          >>> import jax.numpy as jnp, jslices as js
          >>> s = js.IndexedSlices(jnp.ones((3, 2)), jnp.array([1, 1, 9]), (5, 2))
          >>> s.sum(), s.sum(0), s.sum(1).indices
          (Array(4., dtype=float32), Array([2., 2.], dtype=float32),
           Array([1, 1, 9], dtype=int32))
        """
        _refuse_out(out)
        check_slices(self)
        axes, batch = self._axes(axis), self.indices.ndim - 1
        if batch in axes:
            return _sum(self._present(), axes, dtype)
        moved = tuple(a for a in axes if a > batch)
        if len(moved) < len(axes):
            raise ValueError(
                f"cannot sum slices over the batch axis alone (axis={axis}); sum their "
                "rows as well, or use IndexedSlices(s.values.reshape(-1, ...), "
                "s.indices.reshape(-1), s.dense_shape)"
            )
        shape = self.dense_shape
        if shape is not None:
            shape = tuple(n for i, n in enumerate(shape) if i + batch not in axes)
        values = _sum(self.values, moved, dtype)
        return type(self).tree_unflatten(shape, (values, self.indices))

    def mean(
        self, axis: Axis = None, dtype: DTypeLike | None = None, out: None = None
    ) -> Any:
        """The mean of ``to_dense()`` over ``axis``, its zeros counted.

        Args, result and cost are those of :meth:`sum`; integers give floats, as in
        ``jnp.mean``.

        Raises:
          ValueError: if the mean is over the rows and ``dense_shape`` is unknown.

        Example:
          >>> import jax.numpy as jnp, jslices as js
          >>> js.IndexedSlices(jnp.ones((2, 2)), jnp.array([1, 1]), (5, 2)).mean()
          Array(0.4, dtype=float32)
        """
        axes, batch = self._axes(axis), self.indices.ndim - 1
        if self.dense_shape is None and batch in axes:
            raise ValueError(
                "the mean of slices with dense_shape=None is not known, as the number of "
                "rows is not; give it: IndexedSlices(s.values, s.indices, table.shape)"
            )
        counts = [self.values.shape[a] for a in axes if a != batch]
        if batch in axes and self.dense_shape is not None:
            counts.append(self.dense_shape[0])
        given = np.dtype(self.values.dtype)
        if dtype is None and not jnp.issubdtype(given, jnp.inexact):
            dtype = jnp.result_type(float)
        if dtype is None and given.itemsize < 4:  # its sum may overflow
            wide = self.sum(axis, jnp.float32, out) / math.prod(counts)
            return wide.astype(given)
        return self.sum(axis, dtype, out) / math.prod(counts)

    def square_sum(self) -> jax.Array:
        """The sum of the squared magnitudes of ``to_dense()``: duplicates add first.

        Returns:
          A scalar (after vmap ``[*B]``, one for each example), real; float32 for 16-bit
          floats.

        Cost: that of :meth:`coalesce`.

        Example:
          >>> import jax.numpy as jnp, jslices as js
          >>> s = js.IndexedSlices(jnp.ones((3, 1)), jnp.array([1, 1, 4]), (5, 1))
          >>> s.square_sum()
          Array(5., dtype=float32)

        Source: ``tf.linalg.global_norm`` squares the values as they are, which is wrong
        with duplicates.
        """
        floats = jnp.issubdtype(self.values.dtype, jnp.floating)
        wide = self
        if self.values.dtype.itemsize < 4:
            dtype = jnp.float32 if floats else jnp.int32
            children = (self.values.astype(dtype), self.indices)
            wide = type(self).tree_unflatten(self.dense_shape, children)
        rows = RowReductions._present(wide.coalesce())
        batch = self.indices.ndim - 1
        return jnp.sum(jnp.abs(rows) ** 2, tuple(range(batch, rows.ndim)))

    def _axes(self, axis: Axis) -> tuple[int, ...]:
        if axis is None:
            return tuple(range(self.ndim))
        axes = tuple(axis) if isinstance(axis, Sequence) else (operator.index(axis),)
        for a in axes:
            if not -self.ndim <= a < self.ndim:
                raise ValueError(f"axis {a} is out of range for {self.ndim} axes")
        return tuple(sorted({a % self.ndim for a in axes}))

    def _present(self) -> jax.Array:
        """``values`` with zeros in the empty slots."""
        num_rows = None if self.dense_shape is None else self.dense_shape[0]
        indices = canonical_indices(self.indices, num_rows)
        present = indices != empty_slot(num_rows, indices.dtype)
        present = present.reshape(*present.shape, *(1,) * (self.values.ndim - present.ndim))
        return jnp.where(present, self.values, jnp.zeros((), self.values.dtype))


def _sum(x: jax.Array, axes: tuple[int, ...], dtype: DTypeLike | None) -> jax.Array:
    if dtype is None and jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4:
        return jnp.sum(x.astype(jnp.float32), axes).astype(x.dtype)
    return jnp.sum(x, axes, dtype=dtype)


def _refuse_out(out: Any) -> None:
    if out is not None:
        raise TypeError("out= is not supported: JAX arrays cannot be written to")
