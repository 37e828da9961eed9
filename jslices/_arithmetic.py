"""Arithmetic of IndexedSlices: what can stay rows stays rows."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jslices._densify import human_bytes, warn_dense
from jslices._rows.bounds import add_rows, canonical_indices, index_dtype, take_rows
from jslices._rows.check import check_batch_index, check_slices

if TYPE_CHECKING:
    from jslices._slices import IndexedSlices

_SPARSE_PRODUCTS = (
    "a number, slices.scale_rows(factors) with one factor for each row held, or factors "
    "of shape [V, 1, ...]"
)


class RowArithmetic:
    """The operators of IndexedSlices."""

    values: jax.Array
    indices: jax.Array
    dense_shape: tuple[int, ...] | None
    shape: Any
    tree_unflatten: Any
    to_dense: Callable[[], jax.Array]

    def _with(self, values: jax.Array) -> "IndexedSlices":
        return type(self).tree_unflatten(self.dense_shape, (values, self.indices))

    def __neg__(self) -> "IndexedSlices":
        return self._with(-self.values)

    def __mul__(self, other: Any) -> Any:
        """By a number, one number a row ``[V, 1, ...]``, or one a held row ``[K]``."""
        factors = self._row_factors(other)
        if factors is None:
            return self._densely("slices * array", _SPARSE_PRODUCTS) * other
        return self._with(self.values * factors)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        """By the same as ``*``."""
        factors = self._row_factors(other)
        if factors is None:
            return self._densely("slices / array", _SPARSE_PRODUCTS) / other
        return self._with(self.values / factors)

    def scale_rows(self, factors: ArrayLike) -> "IndexedSlices":
        """Every held row times its own number.

        Args:
          factors: ``[K]`` (after vmap ``[*B, K]``), one for each of ``indices``.

        Returns:
          The same ``indices``; ``values`` ``[K, *D]`` of the common dtype.

        Raises:
          ValueError: if there are not as many factors as rows held.

        Cost: one pass over ``K * D`` elements.

        Example:
          >>> import jax.numpy as jnp, jslices as js
          >>> s = js.IndexedSlices(jnp.ones((2, 2)), jnp.array([3, 1]), (4, 2))
          >>> s.scale_rows([10., 2.]).values
          Array([[10., 10.],
                 [ 2.,  2.]], dtype=float32)
        """
        factors = jnp.asarray(factors)
        if factors.shape != self.indices.shape:
            raise ValueError(
                f"scale_rows wants one factor for each row held, {self.indices.shape}, got "
                f"{factors.shape}; for one per row of the array: slices * factors[:, None]"
            )
        row_ndim = self.values.ndim - self.indices.ndim
        return self._with(self.values * factors.reshape(*factors.shape, *(1,) * row_ndim))

    def _row_factors(self, other: Any) -> Any:
        """What ``values`` are to be scaled by; None if ``other`` is no factor of rows.

        A factor of a row distributes over duplicates, so scaling what is held is exact.
        """
        if isinstance(other, RowArithmetic):
            return None
        shape, held = np.shape(other), self.indices.shape
        if shape == ():
            return other
        ones = (1,) * (self.values.ndim - len(held))
        if len(held) > 1:
            return None
        known = self.shape[0] in (None, shape[0])
        if ones and known and shape == (shape[0], *ones):
            # Empty slots are scaled by one, so that they stay what they are.
            indices = canonical_indices(self.indices, shape[0])
            return take_rows(jnp.asarray(other), indices, fill_value=1)
        if shape == held and not _broadcasts(shape, self.shape):
            return jnp.asarray(other).reshape(*held, *ones)
        return None

    def __add__(self, other: Any) -> Any:
        if isinstance(other, RowArithmetic):
            return concat_slices([self, other])  # type: ignore[list-item]
        if isinstance(other, int) and other == 0:  # the start of Python's sum()
            return self
        return self._densely("slices + array", "array + slices") + other

    def __radd__(self, other: Any) -> Any:
        if isinstance(other, int) and other == 0:
            return self
        other = jnp.asarray(other)
        if self.indices.ndim > 1 or other.shape != self.dense_shape:
            if other.ndim and self.dense_shape is None:
                shape = (other.shape[0], *self.values.shape[1:])
                known = type(self).tree_unflatten(shape, (self.values, self.indices))
                return other + known
            return other + self._densely("array + slices", "equal shapes")
        check_slices(self)
        table = other.astype(jnp.result_type(other, self.values))
        indices = canonical_indices(self.indices, table.shape[0])
        return add_rows(table, indices, self.values.astype(table.dtype))

    def __sub__(self, other: Any) -> Any:
        return self + (-other)

    def __rsub__(self, other: Any) -> Any:
        return other + (-self)

    def __getitem__(self, key: Any) -> "IndexedSlices":
        """Indexes the leading axes that ``vmap`` gave: ``batch[0]``, ``batch[:2]``."""
        axes = self.indices.ndim - 1
        keys = key if isinstance(key, tuple) else (key,)
        if axes == 0 or len(keys) > axes or any(k is None or k is Ellipsis for k in keys):
            raise TypeError(
                f"slices have {axes} batch axes from vmap, which are all that can be "
                f"indexed, got [{key!r}]; for rows use slices.to_dense()[...], or .values "
                "and .indices"
            )
        for number, length in zip(keys, self.indices.shape, strict=False):
            check_batch_index(number, length)
        children = (self.values[key], self.indices[key])
        return type(self).tree_unflatten(self.dense_shape, children)

    def __iter__(self) -> "Iterator[IndexedSlices]":
        """The examples of a batch; slices without one are not iterable."""
        if self.indices.ndim < 2:
            raise TypeError(f"cannot iterate over {self}: it is an array, given by rows")
        return (self[i] for i in range(self.indices.shape[0]))

    def _densely(self, what: str, instead: str) -> jax.Array:
        if self.dense_shape is not None:
            count = math.prod(self.shape) * self.values.dtype.itemsize
            warn_dense(
                f"{what} turned {self.indices.shape[-1]} rows into a dense array of "
                f"shape {self.shape} ({human_bytes(count)}). To stay sparse use "
                f"{instead}; to silence this convert on purpose with slices.to_dense()."
            )
        return self.to_dense()


def concat_slices(slices: "Sequence[IndexedSlices | None]") -> "IndexedSlices":
    """The sum of several slices of one array: their rows, one after the other.

    Args:
      slices: at least one; the row shapes must agree, and so must the ``dense_shape``
        of those that know it. None, no gradient, is skipped.

    Returns:
      ``values`` ``[K1 + K2 + ..., *D]`` of the common dtype and ``indices`` of the
      wider integer dtype. Nothing is merged; ``coalesce()`` does that.

    Raises:
      TypeError: if something else is among them.
      ValueError: if there are none, or the shapes differ.

    Cost: copies every row once.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> s = js.IndexedSlices(jnp.ones((1, 2)), jnp.array([3]), (4, 2))
      >>> js.concat_slices([s, s]).indices
      Array([3, 3], dtype=int32)

    Source: TensorFlow's aggregation of gradients, where an unknown ``dense_shape`` of
    the first wins; here a known one does.
    """
    parts = [s for s in slices if s is not None]
    if not parts:
        raise ValueError("concat_slices got an empty sequence; it needs at least one")
    for s in parts:
        if not isinstance(s, RowArithmetic):
            raise TypeError(
                f"concat_slices wants IndexedSlices, got {type(s).__name__}; to add an "
                "array: array + slices"
            )
    batches = {tuple(s.indices.shape[:-1]) for s in parts}
    if len(batches) > 1:
        raise ValueError(
            f"concat_slices got slices of different batches {sorted(batches)}; make the "
            "axes of a batch alike with vmap, or take examples out of it: slices[0]"
        )
    shapes = {s.dense_shape for s in parts if s.dense_shape is not None}
    rows = {s.values.shape[s.indices.ndim :] for s in parts}
    if len(shapes) > 1 or len(rows) > 1:
        given = ", ".join(str(s.shape) for s in parts)
        raise ValueError(f"cannot add slices of arrays of different shapes: {given}")
    shape = shapes.pop() if shapes else None
    num_rows = None if shape is None else shape[0]
    dtype = jnp.result_type(*(s.values for s in parts))
    wanted = [index_dtype(num_rows, np.dtype(s.indices.dtype)) for s in parts]
    widest = max(wanted, key=lambda d: d.itemsize)
    axis = parts[0].indices.ndim - 1
    # Widening keeps negative numbers negative, and so empty slots empty.
    indices = [s.indices.astype(widest) for s in parts]
    return type(parts[0]).tree_unflatten(
        shape,
        (
            jnp.concatenate([s.values.astype(dtype) for s in parts], axis),
            jnp.concatenate(indices, axis),
        ),
    )


def _broadcasts(shape: tuple[int, ...], onto: tuple[int | None, ...]) -> bool:
    trailing = onto[len(onto) - len(shape) :]
    return len(shape) <= len(onto) and all(
        n in (1, wanted) for n, wanted in zip(shape, trailing, strict=True)
    )
