"""What a handle holds, and how it is assigned to: whole, by rows, or counting."""

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jslices._errors import OutOfRangeError
from jslices._scatter import apply_slices
from jslices._slices import IndexedSlices, check_slices, is_slices
from jslices.tf1._elements import ElementMethods, check_is_slices
from jslices.tf1._values import as_value, check_shape


class Assignable(ElementMethods):
    """The part of :class:`jslices.Variable` that reads and writes."""

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the value."""
        return self._cell.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the value."""
        return self._cell.shape

    def value(self) -> Any:
        """The array it holds now; a later assignment does not change that array.

        Raises:
          FailedPreconditionError: if it is only declared.
          RuntimeError: after the run that made the handle.
        """
        return self._cell.read()

    # --- assigning ----------------------------------------------------------------

    def assign(self, value: Any, use_locking: bool = False) -> Any:
        """Replaces the value, and returns the new one.

        ``value``: of exactly this shape and dtype (Python's numbers become it); nothing is
        broadcast. IndexedSlices become dense, with a warning.

        Raises:
          ValueError, TypeError: for another shape or dtype, naming the variable.
        """
        del use_locking
        return self._assign("assign", value, lambda old, new: new)

    def assign_add(self, delta: Any, use_locking: bool = False) -> Any:
        """Adds ``delta``, and returns the new value; see :meth:`assign`.

        IndexedSlices are added row by row: duplicates add, empty slots are dropped.
        """
        del use_locking
        if is_slices(delta):
            return self._scatter("assign_add", "add", delta, whole=True)
        return self._assign("assign_add", delta, operator.add)

    def assign_sub(self, delta: Any, use_locking: bool = False) -> Any:
        """Subtracts ``delta``, and returns the new value; see :meth:`assign_add`."""
        del use_locking
        if is_slices(delta):
            return self._scatter("assign_sub", "sub", delta, whole=True)
        return self._assign("assign_sub", delta, operator.sub)

    def count_up_to(self, limit: int) -> Any:
        """Increments an integer scalar until it reaches ``limit``.

        Returns:
          ``[]``, the value before the increment.

        Raises:
          OutOfRangeError: at the limit; the variable is unchanged. Under ``jit``, where
            nothing can be raised, and in ``init``, it stays unchanged and is returned: a
            result of at least ``limit`` means that.
          TypeError, ValueError: if the variable is no integer scalar or ``limit`` no int.
        """
        what = f"count_up_to of {self.name}"
        if not isinstance(limit, int | np.integer) or isinstance(limit, bool):
            raise TypeError(f"{what} wants a Python int as limit, got {limit!r}")
        if not jnp.issubdtype(self.dtype, jnp.integer):
            raise TypeError(f"{what} wants an integer variable, this is {self.dtype}")
        if self.shape:
            raise ValueError(f"{what} wants a scalar variable, this has {self.shape}")
        if not jnp.iinfo(self.dtype).min <= limit <= jnp.iinfo(self.dtype).max:
            raise ValueError(f"{what}: the limit {limit} is no {self.dtype}")
        before = self.value()
        seen = self._cell.computes and not isinstance(before, jax.core.Tracer)
        if seen and int(before) >= limit:
            raise OutOfRangeError(f"Reached limit of {limit}: {self.name}")
        self._cell.write(jnp.where(before < limit, before + 1, before), what)
        return before

    # --- rows ---------------------------------------------------------------------

    def scatter_add(self, sparse_delta: IndexedSlices, use_locking: bool = False) -> Any:
        """Adds rows: ``v[indices[k]] += values[k]``; duplicates accumulate.

        As in all scatter methods: ``sparse_delta`` holds K rows ``[K, *D]`` for a variable
        ``[V, *D]``, of its dtype; a row number outside ``[0, V)`` is dropped (TensorFlow
        raises); ``dense_shape`` is not looked at; the new value is returned.

        Raises:
          ValueError: for something else than IndexedSlices, or rows of another shape.
          TypeError: for another dtype.

        Cost: reads and writes K rows, in place when the variables are donated.
        """
        del use_locking
        return self._scatter("scatter_add", "add", sparse_delta)

    def scatter_sub(self, sparse_delta: IndexedSlices, use_locking: bool = False) -> Any:
        """Subtracts rows; duplicates accumulate. See :meth:`scatter_add`."""
        del use_locking
        return self._scatter("scatter_sub", "sub", sparse_delta)

    def scatter_mul(self, sparse_delta: IndexedSlices, use_locking: bool = False) -> Any:
        """Multiplies by rows; duplicates compound. See :meth:`scatter_add`."""
        del use_locking
        return self._scatter("scatter_mul", "mul", sparse_delta)

    def scatter_div(self, sparse_delta: IndexedSlices, use_locking: bool = False) -> Any:
        """Divides by rows; duplicates compound, integers truncate towards zero."""
        del use_locking
        return self._scatter("scatter_div", "div", sparse_delta)

    def scatter_min(self, sparse_delta: IndexedSlices, use_locking: bool = False) -> Any:
        """The smaller of old and new, elementwise. See :meth:`scatter_add`."""
        del use_locking
        return self._scatter("scatter_min", "min", sparse_delta)

    def scatter_max(self, sparse_delta: IndexedSlices, use_locking: bool = False) -> Any:
        """The larger of old and new, elementwise. See :meth:`scatter_add`."""
        del use_locking
        return self._scatter("scatter_max", "max", sparse_delta)

    def scatter_update(self, sparse_delta: IndexedSlices, use_locking: bool = False) -> Any:
        """Replaces rows; of duplicates the last wins. See :meth:`scatter_add`."""
        del use_locking
        return self._scatter("scatter_update", "update", sparse_delta)

    # --- how ----------------------------------------------------------------------

    def _assign(self, verb: str, value: Any, combine: Callable[[Any, Any], Any]) -> Any:
        what = f"{verb} to {self.name}"
        if verb != "assign" and self.dtype == jnp.bool_:
            raise TypeError(f"{what} wants numbers, the variable is bool")
        value = as_value(value, self.dtype, what)
        check_shape(value, self.shape, what)
        old = self.value() if verb != "assign" else None
        self._cell.write(combine(old, value), what)
        return self.value()

    def _scatter(self, verb: str, how: str, delta: Any, whole: bool = False) -> Any:
        what = f"{verb} to {self.name}"
        check_is_slices(delta, what)
        check_slices(delta)
        rows, shape = tuple(delta.values.shape[1:]), self.shape
        if delta.indices.ndim != 1 or not shape or rows != shape[1:]:
            raise ValueError(
                f"{what}: a variable of shape {shape} takes rows of shape {shape[1:]}, "
                f"got values {tuple(delta.values.shape)}"
            )
        if whole and delta.dense_shape not in (None, shape):
            raise ValueError(
                f"{what}: the variable has shape {shape}, the slices {delta.dense_shape}"
            )
        if delta.dtype != self.dtype or (self.dtype == jnp.bool_ and how != "update"):
            raise TypeError(
                f"{what}: the variable is {self.dtype}, the slices are {delta.dtype}; "
                f"cast them: slices.astype('{self.dtype}')"
            )
        # Of what shape the slices say they are, TensorFlow's scatters never ask.
        rows_only = IndexedSlices(delta.values, delta.indices)
        self._cell.write(apply_slices(self.value(), rows_only, how), what)
        return self.value()
