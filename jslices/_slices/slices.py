"""IndexedSlices and their arithmetic."""

import math
import operator
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jslices._densify import human_bytes, warn_at_line
from jslices._jax import called_by_jax_operator
from jslices._place import boundary
from jslices._place.boundary import everywhere, on_any_mesh
from jslices._rows import access
from jslices._rows.sums import COMBINER, Order, add_rows, sum_duplicates
from jslices._slices import parts
from jslices._slices.entries import NO_FACTS, Facts, check_slices
from jslices._slices.refusals import Refusals
from jslices._slices.shards import each_shard, join_entries
from jslices._typing import Index, Operand

Axis = int | Sequence[int] | None

_FACTORS = (
    "a number, slices.scale_rows(factors) with one factor for each row held, or factors "
    "of shape [V, 1, ...]"
)


@jax.tree_util.register_pytree_with_keys_class
class IndexedSlices(Refusals):
    """Some rows of an array of shape ``dense_shape``; all others are zero.

    They mean ``zeros(dense_shape).at[indices].add(values)``: **duplicates add**. An
    index outside ``[0, V)``, a negative one included, marks an *empty entry*, which every
    operation drops.

    A pytree with the children ``values`` and ``indices``; the rest is static. Under
    ``vmap`` the children gain leading axes, and ``dense_shape`` is that of one example.
    ``facts`` are known while tracing: :class:`Facts`.

    Args:
      values: ``[K, *D]``, the rows, of any dtype.
      indices: ``[K]`` of any integer dtype, their row numbers.
      dense_shape: ``(V, *D)``, static; None when unknown.
      row_axes: how many leading axes number the rows, static. With 2, ``dense_shape`` is
        ``(L, V, *D)`` (a table for each of L layers, in one array), and row v of layer l
        has the number ``l * V + v``; the indices then lie in ``[0, L * V)``.

    Raises:
      TypeError: if ``indices`` are not integers or ``dense_shape`` is not static.
      ValueError: if the shapes do not fit together.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> s = js.IndexedSlices(jnp.ones((3, 2)), jnp.array([1, 1, 4]), (5, 2))
      >>> s
      IndexedSlices(3 rows of float32[5, 2], indices int32[3] (1, 1, 4): 36 B, dense 40 B,
      saves 4 B)
      >>> s.to_dense()[1]
      Array([2., 2.], dtype=float32)

    Source: ``tf.IndexedSlices``, which checks nothing when constructed, drops negative
    indices but refuses those of V or more, has no arithmetic but ``-s``, and rows numbered
    by the first axis alone.
    """

    # NumPy arrays then leave `array + slices` to `__radd__`, as they do for JAX's.
    __array_priority__ = 100

    def __init__(
        self,
        values: ArrayLike,
        indices: ArrayLike,
        dense_shape: Sequence[int] | None = None,
        row_axes: int = 1,
    ) -> None:
        rows, numbers = parts.as_array(values), parts.as_indices(indices)
        shape = parts.static_shape(dense_shape)
        parts.check_parts(rows, numbers, shape, parts.static_row_axes(row_axes))
        vars(self).update(vars(self.of(rows, numbers, shape)))

    def _flattened(self) -> "IndexedSlices":
        """The sum over the leading axes that ``vmap`` or ``scan`` added."""
        placement = self.facts.placement
        if self.is_placed and placement is not None:
            entries = join_entries(placement, [(self.values, self.indices)])
            return self._like(*entries, Facts(placement=placement))
        row = self.values.shape[self.indices.ndim :]
        values = self.values.reshape(self.indices.size, *row)
        return self._like(values, self.indices.reshape(-1))

    def _like(
        self, values: jax.Array, indices: jax.Array, facts: Facts = NO_FACTS
    ) -> "IndexedSlices":
        """Other entries of the same array."""
        facts = self.facts._replace(distinct=facts.distinct, placement=facts.placement)
        return slices_of(values, indices, self.dense_shape, facts)

    # --- conversions ----------------------------------------------------------------

    def to_dense(self) -> jax.Array:
        """The whole array ``[V, *D]``: duplicates added, empty entries dropped.

        Silent, as it is explicit. 16-bit floats are summed in float32 and rounded once.

        Raises:
          ValueError: if ``dense_shape`` is unknown.

        Cost: writes ``V * D`` elements.

        Example:
          >>> import jax.numpy as jnp, jslices as js
          >>> js.IndexedSlices(jnp.array([3., 4.]), jnp.array([0, 9]), (2,)).to_dense()
          Array([3., 0.], dtype=float32)
        """
        check_slices(self)
        if self.dense_shape is None:
            raise ValueError(
                "these IndexedSlices have dense_shape=None, so the number of rows is "
                "not known; give it: IndexedSlices(s.values, s.indices, (num_rows, "
                f"{', '.join(map(str, self.values.shape[self.indices.ndim :]))}))"
            )
        return _dense(self)  # type: ignore[no-any-return]

    def coalesce(self, size: int | None = None, combine: str = "sum") -> "IndexedSlices":
        """The same array with every row at most once, in a static number of entries.

        Args:
          size: U, the number of entries; None means ``min(K, V)``, which always suffices.
          combine: ``"sum"``; or, so that frequent rows weigh less, ``"mean"`` (the sum
            divided by the number of occurrences) or ``"sqrtn"`` (divided by its square
            root). 16-bit floats are combined in float32 and rounded once.

        Returns:
          ``values`` ``[U, *D]``, ``indices`` ``[U]`` (int32, or int64 where that came
          in): sorted and unique, the remaining entries empty (index V, zero values).

        Raises:
          ValueError: if more than ``size`` distinct rows are present; under jit, where
            nothing can be raised, floating values become NaN instead. For an unknown
            ``combine``.
          TypeError: for a mean of integers.

        Cost: a sort of K integers, reads ``K * D`` and writes ``U * D`` elements.

        Example:
          >>> import jax.numpy as jnp, jslices as js
          >>> s = js.IndexedSlices(jnp.array([1., 2., 4.]), jnp.array([7, 2, 7]), (9,))
          >>> s.coalesce().indices, s.coalesce().values
          (Array([2, 7, 9], dtype=int32), Array([2., 5., 0.], dtype=float32))
          >>> s.coalesce(combine="mean").values
          Array([2. , 2.5, 0. ], dtype=float32)

        Source: ``torch.Tensor.coalesce``. TensorFlow's optimizers do it internally, in
        order of first appearance. ``combine`` takes the names of TensorFlow's
        ``embedding_lookup_sparse``; PyTorch has ``scale_grad_by_freq`` for the mean, for
        dense gradients only.
        """
        check_slices(self)
        COMBINER.check("coalesce", "combine", combine)
        if combine != "sum" and not jnp.issubdtype(self.dtype, jnp.inexact):
            raise TypeError(
                f"combine={combine!r} divides, and these rows are {self.dtype}; cast them "
                "first: slices.astype('float32')"
            )
        return _summed(self, size, combine)

    def astype(self, dtype: DTypeLike) -> "IndexedSlices":
        """The same rows with ``values`` cast to ``dtype``."""
        return self._changed(values=self.values.astype(dtype))

    def conj(self) -> "IndexedSlices":
        """The same rows, conjugated: what a step takes of a gradient by complex numbers."""
        return self.with_values(self.values.conj())

    @classmethod
    def from_dense(cls, x: ArrayLike, size: int | None = None) -> "IndexedSlices":
        """The rows of ``x`` that are not zero; see :func:`jslices.from_dense`."""
        array = parts.as_array(x)
        if array.ndim < 1:
            raise ValueError("from_dense wants an array [V, *D], got a scalar")
        return cls(*_nonzero_rows(array, size=size), array.shape)

    # --- arithmetic -----------------------------------------------------------------

    def __neg__(self) -> "IndexedSlices":
        return self._changed(values=-self.values)

    def __mul__(self, other: Operand) -> Any:
        """By a number, by one for each row ``[V, 1, ...]`` or for each held row ``[K]``."""
        factors = self._row_factors(other)
        if factors is None:
            return self._densely("slices * array", _FACTORS) * other
        return self._changed(values=self.values * factors)

    __rmul__ = __mul__

    def __truediv__(self, other: Operand) -> Any:
        """By the same factors as ``*``."""
        factors = self._row_factors(other)
        if factors is None:
            return self._densely("slices / array", _FACTORS) / other
        return self._changed(values=self.values / factors)

    def scale_rows(self, factors: ArrayLike) -> "IndexedSlices":
        """Every held row times a number of its own.

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
        return self._changed(values=self.values * access.per_row(factors, self.values))

    def _row_factors(self, other: Operand) -> Any:
        """The factor of ``values``; None unless ``other`` has one number for a row.

        A factor distributes over the duplicates of a row, so scaling those is exact.
        """
        if isinstance(other, IndexedSlices):
            return None
        shape, held, axes = np.shape(other), self.indices.shape, self.row_axes
        if shape == ():
            return other
        ones = (1,) * (self.values.ndim - len(held))
        if len(held) > 1:
            return None
        fits = self.dense_shape is None or shape[:axes] == self.dense_shape[:axes]
        if ones and fits and shape == (*shape[:axes], *ones) and len(shape) == self.ndim:
            # Empty entries are scaled by one, which leaves them as they are.
            factors = jnp.asarray(other).reshape(-1, *ones)
            indices = access.canonical_indices(self.indices, factors.shape[0])
            return rows_at(factors, indices, fill_value=1)
        if shape == held and shape[0] not in (1, self.shape[-1]):  # else it broadcasts
            return jnp.asarray(other).reshape(*held, *ones)
        return None

    def __add__(self, other: Operand) -> Any:
        if isinstance(other, IndexedSlices):
            return concat_slices([self, other])
        if isinstance(other, int) and other == 0:  # the start of Python's sum()
            return self
        if self.indices.shape == (0,):  # nothing to add: there was no gradient
            return self.__radd__(other)
        return self._densely("slices + array", "array + slices") + other

    def __radd__(self, other: Operand) -> Any:
        if isinstance(other, int) and other == 0:
            return self
        other = jnp.asarray(other)
        if self.indices.ndim > 1 or other.shape != self.dense_shape:
            if other.ndim and self.dense_shape is None:
                row = self.values.shape[self.indices.ndim :]
                return other + self.numbered_as((other.shape[0], *row))
            return other + self._densely("array + slices", "equal shapes")
        check_slices(self)
        if self.is_placed:
            return each_shard(lambda rows, array: array + rows, self, other)
        table = other.astype(jnp.result_type(other, self.values))
        return _add(table, self.with_values(self.values.astype(table.dtype)))

    def __sub__(self, other: Operand) -> Any:
        return self + (-other)

    def __rsub__(self, other: Operand) -> Any:
        return other + (-self)

    def __getattr__(self, name: str) -> NoReturn:
        # Python comes here if a property of ours has failed, as when values are not arrays.
        if name.startswith("_") or hasattr(IndexedSlices, name):
            raise AttributeError(f"'IndexedSlices' object has no attribute {name!r}")
        raise self._no_attribute(name)

    # --- reductions -----------------------------------------------------------------

    def sum(
        self, axis: Axis = None, dtype: DTypeLike | None = None, out: None = None
    ) -> Any:
        """The sum of ``to_dense()`` over ``axis``, from the rows held.

        Args:
          axis: None for all; an int or several, counted in the dense array.
          dtype: of the result and of the summing; None: as ``jnp.sum``, which sums 16-bit
            floats in float32 and rounds once.
          out: must be None; ``np.sum(slices)`` passes it.

        Returns:
          An array without ``axis`` if all axes that number rows are among them; otherwise
          IndexedSlices of as many entries, of smaller rows, of rows that fewer axes
          number, or of all examples of a batch. Duplicates add, empty entries drop.

        Cost: one pass over ``K * D`` elements.

        Example:
          >>> import jax.numpy as jnp, jslices as js
          >>> s = js.IndexedSlices(jnp.ones((3, 2)), jnp.array([1, 1, 9]), (5, 2))
          >>> s.sum(), s.sum(0), s.sum(1).indices
          (Array(4., dtype=float32), Array([2., 2.], dtype=float32),
           Array([1, 1, 9], dtype=int32))
        """
        if out is not None:
            raise TypeError("out= is not supported: JAX arrays cannot be written to")
        check_slices(self)
        axes, batch = self._axes(axis), self.indices.ndim - 1
        numbering = set(range(batch, batch + self.row_axes))
        # In `values` one axis numbers the rows.
        more = self.row_axes - 1
        within = tuple(a - more for a in axes if a > batch + more)
        of_batch = tuple(a for a in axes if a < batch)
        if numbering <= set(axes):
            return jnp.sum(self._present(), (*of_batch, batch, *within), dtype)
        if batch and axes == tuple(range(batch)):
            summed = jax.eval_shape(lambda x: jnp.sum(x, dtype=dtype), self.values)
            return self._flattened().astype(summed.dtype)
        if of_batch:
            raise ValueError(
                f"cannot sum slices over axis={axis}; sum all {batch} axes of the batch"
            )
        rows = self._without_row_axes([a - batch for a in numbering.intersection(axes)])
        shape = rows.dense_shape
        if shape is not None:
            moved = {a - batch - 1 + rows.row_axes for a in within}
            shape = tuple(n for i, n in enumerate(shape) if i not in moved)
        values = jnp.sum(self.values, within, dtype)
        return slices_of(values, rows.indices, shape)

    def mean(
        self, axis: Axis = None, dtype: DTypeLike | None = None, out: None = None
    ) -> Any:
        """The mean of ``to_dense()`` over ``axis``, zeros included.

        All else is as in :meth:`sum`; integers give floats, as in ``jnp.mean``.

        Raises:
          ValueError: if the mean is over the rows and ``dense_shape`` is unknown.

        Example:
          >>> import jax.numpy as jnp, jslices as js
          >>> js.IndexedSlices(jnp.ones((2, 2)), jnp.array([1, 1]), (5, 2)).mean()
          Array(0.4, dtype=float32)
        """
        axes, batch = self._axes(axis), self.indices.ndim - 1
        over_rows = any(batch <= a < batch + self.row_axes for a in axes)
        if self.dense_shape is None and over_rows:
            raise ValueError(
                "the mean of slices with dense_shape=None is not known, as the number of "
                "rows is not; give it: IndexedSlices(s.values, s.indices, table.shape)"
            )
        counts = [n for n in map(self.shape.__getitem__, axes) if n is not None]
        dtype_in = np.dtype(self.values.dtype)
        if dtype is None and not jnp.issubdtype(dtype_in, jnp.inexact):
            dtype = jnp.result_type(float)
        if dtype is None and dtype_in.itemsize < 4:  # its sum may overflow
            wide = self.sum(axis, jnp.float32, out) / math.prod(counts)
            return wide.astype(dtype_in)
        return self.sum(axis, dtype, out) / math.prod(counts)

    def square_sum(self) -> jax.Array:
        """The sum of the squared magnitudes of ``to_dense()``: duplicates add first.

        Returns:
          A real scalar (after vmap one for each example); float32 for 16-bit floats.

        Cost: that of :meth:`coalesce`.

        Example:
          >>> import jax.numpy as jnp, jslices as js
          >>> s = js.IndexedSlices(jnp.ones((3, 1)), jnp.array([1, 1, 4]), (5, 1))
          >>> s.square_sum()
          Array(5., dtype=float32)

        Source: ``tf.linalg.global_norm``, which squares each value: wrong with duplicates.
        """
        wide = self
        if self.dtype.itemsize < 4:
            floats = jnp.issubdtype(self.dtype, jnp.floating)
            wide = self.astype(jnp.float32 if floats else jnp.int32)
        rows = wide.coalesce()._present()
        return jnp.sum(jnp.abs(rows) ** 2, tuple(range(self.indices.ndim - 1, rows.ndim)))

    def _axes(self, axis: Axis) -> tuple[int, ...]:
        if axis is None:
            return tuple(range(self.ndim))
        axes = tuple(axis) if isinstance(axis, Sequence) else (operator.index(axis),)
        for a in axes:
            if not -self.ndim <= a < self.ndim:
                raise ValueError(f"axis {a} is out of range for {self.ndim} axes")
        return tuple(sorted({a % self.ndim for a in axes}))

    def _without_row_axes(self, axes: Sequence[int]) -> "IndexedSlices":
        """The sum over some of the axes that number rows: rows have other numbers."""
        shape, num_rows = self.dense_shape, self.num_rows
        if not axes or shape is None or num_rows is None:
            return self
        sizes = shape[: self.row_axes]
        left = [a for a in range(self.row_axes) if a not in axes]
        indices = access.canonical_indices(self.indices, num_rows)
        along, rest = access.places(indices, shape, self.row_axes), [sizes[a] for a in left]
        number = jnp.zeros_like(indices)
        for a in left:
            number = number * sizes[a] + along[a]
        number = jnp.where(indices < num_rows, number, math.prod(rest))
        return slices_of(self.values, number, (*rest, *shape[self.row_axes :]))

    def _present(self) -> jax.Array:
        """``values`` with zeros in the empty entries."""
        indices = access.canonical_indices(self.indices, self.num_rows)
        present = indices != access.empty_index(self.num_rows, indices.dtype)
        return access.where_rows(present, self.values)

    # --- the batch axes of vmap -----------------------------------------------------

    def __getitem__(self, key: Index | tuple[Index, ...]) -> "IndexedSlices":
        """Indexes the leading axes that ``vmap`` added: ``batch[0]``, ``batch[:2]``.

        ``slices[...]`` is the slices, as Flax reads a variable by ``variable[...]``.
        """
        if key is Ellipsis:
            return self
        axes = self.indices.ndim - 1
        keys = key if isinstance(key, tuple) else (key,)
        if axes == 0 or len(keys) > axes or any(k is None or k is Ellipsis for k in keys):
            raise TypeError(
                f"slices have {axes} batch axes from vmap, which are all that can be "
                f"indexed, got [{key!r}]; for rows use slices.to_dense()[...], or .values "
                "and .indices"
            )
        for number, length in zip(keys, self.indices.shape, strict=False):
            parts.check_batch_index(number, length)
        return self._like(self.values[key], self.indices[key])

    def __iter__(self) -> Iterator["IndexedSlices"]:
        """The examples of a batch; slices without a batch axis are not iterable."""
        if self.indices.ndim < 2:
            raise TypeError(f"cannot iterate over {self}: it is an array, given by rows")
        return (self[i] for i in range(self.indices.shape[0]))

    # --- implicit conversion to an array --------------------------------------------

    def __jax_array__(self) -> Any:
        if called_by_jax_operator():
            # `array + slices` asks for an array first. Handing back the slices makes
            # JAX return NotImplemented, so that Python calls `__radd__`.
            return self
        of_keras = ", and jslices.keras.Optimizer for an optimizer of Keras"
        instead = "`.values` and `.indices`" + of_keras * ("keras" in sys.modules)
        return self._densely("an implicit conversion", instead)

    def __array__(
        self, dtype: DTypeLike | None = None, copy: bool | None = None
    ) -> np.ndarray:
        dense = self._densely("np.asarray(slices)", "`.values` and `.indices`")
        return np.asarray(dense, dtype=dtype)

    def _densely(self, what: str, instead: str) -> jax.Array:
        if self.dense_shape is not None:
            shape = (*self.indices.shape[:-1], *self.dense_shape)
            size = human_bytes(math.prod(shape) * self.dtype.itemsize)
            warn_at_line(
                f"{what} turned {self.indices.shape[-1]} rows into a dense array of "
                f"shape {shape} ({size}). To stay sparse use "
                f"{instead}; to silence this convert on purpose with slices.to_dense()."
            )
        return self.to_dense()


#: IndexedSlices of parts that fit together, and facts about them.
slices_of = IndexedSlices.of


def is_slices(x: object) -> bool:
    """True for IndexedSlices: ``jax.tree.map(f, grads, is_leaf=js.is_slices)``.

    Example:
      >>> import jslices as js
      >>> js.is_slices(3)
      False
    """
    return isinstance(x, IndexedSlices)


def concat_slices(slices: Sequence[IndexedSlices | None]) -> IndexedSlices:
    """The sum of several slices of one array: their rows, one after the other.

    Args:
      slices: at least one; the row shapes must agree, and so must every ``dense_shape``
        that is known. None (no gradient) is skipped.

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
    given = [s for s in slices if s is not None]
    if not given:
        raise ValueError("concat_slices got an empty sequence; it needs at least one")
    for s in given:
        if not isinstance(s, IndexedSlices):
            raise TypeError(
                f"concat_slices wants IndexedSlices, got {type(s).__name__}; to add an "
                "array: array + slices"
            )
    shape = parts.common_shape(given)
    num_rows = given[0].numbered_as(shape).num_rows
    dtype = jnp.result_type(*(s.values for s in given))
    dtypes = [access.index_dtype(num_rows, np.dtype(s.indices.dtype)) for s in given]
    widest = max(dtypes, key=lambda d: d.itemsize)
    # Widening keeps negative numbers negative, hence empty entries empty.
    indices = [s.indices.astype(widest) for s in given]
    values = [s.values.astype(dtype) for s in given]
    facts = Facts(
        packed=max(s.facts.packed for s in given),
        at_now=all(s.facts.at_now for s in given),
        unconjugated=any(s.facts.unconjugated for s in given),
        as_taken=any(s.facts.as_taken for s in given),
    )
    placement = given[0].facts.placement
    alike = all(s.facts.placement == placement and s.is_placed for s in given)
    if placement is not None and alike and given[0].indices.ndim == 1:
        entries = join_entries(placement, list(zip(values, indices, strict=True)))
        return slices_of(*entries, shape, facts._replace(placement=placement))
    axis = given[0].indices.ndim - 1
    together = jnp.concatenate(values, axis), jnp.concatenate(indices, axis)
    return slices_of(*together, shape, facts)


def deduplicated(slices: IndexedSlices) -> IndexedSlices:
    """``slices.coalesce()``, with the rows in whatever order is fastest."""
    check_slices(slices)
    return slices if slices.facts.distinct else _summed(slices, order="any")


# --- on any mesh ------------------------------------------------------------------------

#: Rows of an array at indices of any shape, split as these are.
rows_at = on_any_mesh(boundary.looked_up)(access.take_rows)


@on_any_mesh(boundary.like_first)
def _add(table: jax.Array, slices: IndexedSlices) -> jax.Array:
    return add_rows(table, slices.indices, slices.values, slices.facts.distinct)


def _summed(
    slices: IndexedSlices,
    size: int | None = None,
    combine: str = "sum",
    order: Order = "sorted",
) -> IndexedSlices:
    if slices.indices.ndim > 1:
        return jax.vmap(lambda s: _summed(s, size, combine, order))(slices)
    if slices.is_placed and size is None:
        run = lambda s: _summed(s, None, combine, order)  # noqa: E731
        return each_shard(run, slices)  # type: ignore[no-any-return]
    values, indices = _sums(slices, size=size, combine=combine, order=order)
    return slices._like(values, indices, Facts(distinct=True))


@on_any_mesh(lambda slices: everywhere(slices.values, slices.indices))
def _sums(
    slices: IndexedSlices, *, size: int | None, combine: str, order: Order
) -> tuple[jax.Array, jax.Array]:
    how = slices.num_rows, size, combine, order
    return sum_duplicates(slices.values, slices.indices, *how)[:2]


@on_any_mesh(everywhere)
def _nonzero_rows(array: jax.Array, *, size: int | None) -> tuple[jax.Array, jax.Array]:
    """The rows that are not all zero, and their numbers."""
    nonzero = jnp.any(array != 0, tuple(range(1, array.ndim)))
    positions, too_many = access.kept_positions(nonzero, size, "from_dense")
    return access.pick(array, positions, too_many), positions


@boundary.one_program
def _dense(slices: IndexedSlices) -> jax.Array:
    if slices.indices.ndim > 1:
        return jax.vmap(_dense)(slices)
    if slices.is_placed:
        return each_shard(_dense, slices)  # type: ignore[no-any-return]
    return _added_to_zeros(slices, distinct=slices.facts.distinct)


@on_any_mesh(lambda slices: everywhere(slices.values, slices.indices))
def _added_to_zeros(slices: IndexedSlices, *, distinct: bool) -> jax.Array:
    assert slices.dense_shape is not None
    if slices.dtype.itemsize < 4:
        slices, distinct = slices.coalesce(), True
    zeros = jnp.zeros(slices.dense_shape, slices.dtype)
    return add_rows(zeros, slices.indices, slices.values, distinct)
