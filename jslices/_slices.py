"""IndexedSlices: some rows of an array, and what arithmetic on them means."""

import dataclasses
import functools
import inspect
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from jslices._densify import human_bytes, warn_dense
from jslices._jax import (
    called_by_jax_operator,
    is_staged,
    is_symbolic,
    refuse_misuse,
)
from jslices._place.boundary import (
    drop_sharding,
    everywhere,
    explicit_part,
    like_first,
    looked_up,
    mesh_of,
    on_any_mesh,
    restore_sharding,
    shardings_of,
    with_auto_axes,
)
from jslices._place.placement import Placement, on_each_device
from jslices._rows.access import (
    canonical_indices,
    empty_index,
    in_32_bits,
    index_dtype,
    kept_positions,
    per_row,
    pick,
    take_rows,
)
from jslices._rows.sums import Order, add_rows, check_combine, sum_duplicates
from jslices._typing import Aval, Index, Leaf, Operand, PyTree, Size

Axis = int | Sequence[int] | None
P = ParamSpec("P")
R = TypeVar("R")

_FACTORS = (
    "a number, slices.scale_rows(factors) with one factor for each row held, or factors "
    "of shape [V, 1, ...]"
)


class Facts(NamedTuple):
    """What is known of slices while tracing, besides shapes and dtypes.

    Attributes:
      distinct: whether no row is held twice, so that adding the rows takes no sort.
      every_row: whether there are V entries, and entry v is of row v, or empty: adding them
        is one pass over the array.
      placement: on which devices of a mesh the rows of the array stand; each of them holds
        the entries of its own rows. ``indices`` are row numbers of the whole array as ever.
        What reads or writes rows of the array then needs nothing from other devices.

    Slices keep their placement wherever JAX takes them apart and puts them together. They
    forget that rows are distinct, or are all rows: what a ``tree.map`` makes of ``values``
    and ``indices`` may hold other rows, and a ``lax.cond`` wants the same type of an update
    and of zeros. To tell them to a program of its own, use :func:`carry_facts`.
    """

    distinct: bool = False
    every_row: bool = False
    placement: Placement | None = None


NO_FACTS = Facts()
#: No row is held twice.
DISTINCT = Facts(distinct=True)


class _Static(NamedTuple):
    """The static part of slices as a pytree."""

    dense_shape: tuple[int, ...] | None
    placement: Placement | None = None


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False, repr=False, init=False)
class IndexedSlices:
    """Some rows of an array of shape ``dense_shape``; all others are zero.

    They stand for ``zeros(dense_shape).at[indices].add(values)``: **duplicates add**. An
    index outside ``[0, V)``, a negative one included, marks an *empty entry*, which every
    operation drops.

    A pytree with the children ``values`` and ``indices``; ``dense_shape`` is static. Under
    ``vmap`` the children gain leading axes and ``dense_shape`` stays that of one example.
    ``facts`` are what else is known of them while tracing: :class:`Facts`.

    Args:
      values: ``[K, *D]``, the rows, of any dtype.
      indices: ``[K]`` of any integer dtype, their row numbers.
      dense_shape: ``(V, *D)``, static; None when unknown.

    Raises:
      TypeError: if ``indices`` are not integers or ``dense_shape`` is not static.
      ValueError: if the shapes do not fit together.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> s = js.IndexedSlices(jnp.ones((3, 2)), jnp.array([1, 1, 4]), (5, 2))
      >>> s
      IndexedSlices(3 rows of float32[5, 2], indices int32[3]: 36 B, dense 40 B, saves 4 B)
      >>> s.to_dense()[1]
      Array([2., 2.], dtype=float32)

    Source: ``tf.IndexedSlices``, which checks nothing when constructed, drops negative
    indices but refuses those of V or more, and has no arithmetic but ``-s``.
    """

    values: jax.Array
    indices: jax.Array
    dense_shape: tuple[int, ...] | None

    # NumPy arrays then leave `array + slices` to `__radd__`.
    __array_ufunc__ = None
    # No field: nobody passes it, and each way of making slices says what is known of them.
    facts = NO_FACTS

    def __init__(
        self,
        values: ArrayLike,
        indices: ArrayLike,
        dense_shape: Sequence[int] | None = None,
    ) -> None:
        rows, numbers = as_array(values), _as_indices(indices)
        shape = _static_shape(dense_shape)
        _check_parts(rows, numbers, shape)
        object.__setattr__(self, "values", rows)
        object.__setattr__(self, "indices", numbers)
        object.__setattr__(self, "dense_shape", shape)

    # --- pytree -------------------------------------------------------------------

    def tree_flatten_with_keys(self) -> tuple[Any, _Static]:
        key = jax.tree_util.GetAttrKey
        children = ((key("values"), self.values), (key("indices"), self.indices))
        return children, _Static(self.dense_shape, self.facts.placement)

    def tree_flatten(self) -> tuple[Any, _Static]:
        refuse_misuse(self)
        static = _Static(self.dense_shape, self.facts.placement)
        return (self.values, self.indices), static

    @classmethod
    def tree_unflatten(
        cls, static: _Static | tuple[int, ...] | None, children: Sequence[Any]
    ) -> "IndexedSlices":
        # JAX unflattens with placeholders, too, so nothing is checked here. A shape alone
        # will do: slices with the axes of a batch are made so.
        shape, placement = static if isinstance(static, _Static) else (static, None)
        values, indices = children
        return slices_of(values, indices, shape, Facts(placement=placement))

    def with_values(self, values: jax.Array) -> "IndexedSlices":
        """The same indices with other ``values`` ``[K, *D]``, and what is known of them."""
        return slices_of(values, self.indices, self.dense_shape, self.facts)

    def _flattened(self) -> "IndexedSlices":
        """The sum over the leading axes that ``vmap`` or ``scan`` added."""
        placement = self.facts.placement
        if self.is_placed and placement is not None:
            entries = [(self.values, self.indices)]
            return join_entries(placement, self.dense_shape, entries)
        row = self.values.shape[self.indices.ndim :]
        values = self.values.reshape(self.indices.size, *row)
        return slices_of(values, self.indices.reshape(-1), self.dense_shape)

    # --- what it is ---------------------------------------------------------------

    @property
    def shape(self) -> tuple[int | None, ...]:
        """The shape of :meth:`to_dense`; V is None if ``dense_shape`` is unknown."""
        batch = tuple(self.indices.shape[:-1])
        if self.dense_shape is not None:
            return batch + self.dense_shape
        return (*batch, None, *self.values.shape[self.indices.ndim :])

    @property
    def ndim(self) -> int:
        """The number of axes of :meth:`to_dense`."""
        return self.values.ndim

    @property
    def dtype(self) -> np.dtype:
        """The dtype of ``values``."""
        return np.dtype(self.values.dtype)

    @property
    def device(self) -> Any:
        """The device of ``values``."""
        return self.values.device

    @property
    def sharding(self) -> Any:
        """The sharding of ``values``."""
        return self.values.sharding

    @property
    def is_placed(self) -> bool:
        """Whether the devices of a mesh hold the entries of their own rows.

        Not on the host, nor inside of a ``shard_map``.
        """
        placement = self.facts.placement
        return placement is not None and mesh_of(jax.typeof(self.values)) is not None

    @property
    def _num_rows(self) -> int | None:
        return None if self.dense_shape is None else self.dense_shape[0]

    def __repr__(self) -> str:
        try:
            rows = "x".join(map(str, self.indices.shape))
            shape = ", ".join("?" if n is None else str(n) for n in self.shape)
            held_bytes = _num_bytes(self.values) + _num_bytes(self.indices)
            size = human_bytes(held_bytes)
            if self.dense_shape is not None:
                dense = math.prod(self.indices.shape[:-1]) * math.prod(self.dense_shape)
                dense *= self.dtype.itemsize
                size += f", dense {human_bytes(dense)}"
                if dense > held_bytes:
                    size += f", saves {human_bytes(dense - held_bytes)}"
            return (
                f"IndexedSlices({rows} rows of {self.dtype}[{shape}], indices "
                f"{self.indices.dtype}[{', '.join(map(str, self.indices.shape))}]: "
                f"{size})"
            )
        except (AttributeError, TypeError):  # placeholders that JAX unflattened
            return (
                f"IndexedSlices(values={self.values!r}, indices={self.indices!r}, "
                f"dense_shape={self.dense_shape})"
            )

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
        return _dense(self)

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
        order of first appearance. ``combine`` takes the names that TensorFlow's
        ``embedding_lookup_sparse`` has; PyTorch has ``scale_grad_by_freq`` for the mean,
        for dense gradients only.
        """
        check_slices(self)
        check_combine(combine, self.values.dtype)
        if self.indices.ndim > 1:
            return jax.vmap(lambda s: s.coalesce(size, combine))(self)
        if self.is_placed and size is None:
            unique: IndexedSlices = each_shard(lambda s: s.coalesce(None, combine), self)
            return unique
        return _summed(self, size=size, combine=combine)

    def astype(self, dtype: DTypeLike) -> "IndexedSlices":
        """The same rows with ``values`` cast to ``dtype``."""
        return self.with_values(self.values.astype(dtype))

    @classmethod
    def from_dense(cls, x: ArrayLike, size: int | None = None) -> "IndexedSlices":
        """The rows of ``x`` that are not zero; see :func:`jslices.from_dense`."""
        array = as_array(x)
        if array.ndim < 1:
            raise ValueError("from_dense wants an array [V, *D], got a scalar")
        return cls(*_nonzero_rows(array, size=size), array.shape)

    # --- arithmetic -----------------------------------------------------------------

    def __neg__(self) -> "IndexedSlices":
        return self.with_values(-self.values)

    def __mul__(self, other: Operand) -> Any:
        """By a number, by one for each row ``[V, 1, ...]`` or for each held row ``[K]``."""
        factors = self._row_factors(other)
        if factors is None:
            return self._densely("slices * array", _FACTORS) * other
        return self.with_values(self.values * factors)

    __rmul__ = __mul__

    def __truediv__(self, other: Operand) -> Any:
        """By what ``*`` takes."""
        factors = self._row_factors(other)
        if factors is None:
            return self._densely("slices / array", _FACTORS) / other
        return self.with_values(self.values / factors)

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
        return self.with_values(self.values * per_row(factors, self.values))

    def _row_factors(self, other: Operand) -> Any:
        """What to multiply ``values`` by; None unless ``other`` has one number for a row.

        A factor distributes over the duplicates of a row, so scaling those is exact.
        """
        if isinstance(other, IndexedSlices):
            return None
        shape, held = np.shape(other), self.indices.shape
        if shape == ():
            return other
        ones = (1,) * (self.values.ndim - len(held))
        if len(held) > 1:
            return None
        fits = self.shape[0] in (None, shape[0])
        if ones and fits and shape == (shape[0], *ones):
            # Empty entries are scaled by one, which leaves them as they are.
            indices = canonical_indices(self.indices, shape[0])
            return rows_at(jnp.asarray(other), indices, fill_value=1)
        if shape == held and not _broadcasts(shape, self.shape):
            return jnp.asarray(other).reshape(*held, *ones)
        return None

    def __add__(self, other: Operand) -> Any:
        if isinstance(other, IndexedSlices):
            return concat_slices([self, other])
        if isinstance(other, int) and other == 0:  # the start of Python's sum()
            return self
        return self._densely("slices + array", "array + slices") + other

    def __radd__(self, other: Operand) -> Any:
        if isinstance(other, int) and other == 0:
            return self
        other = jnp.asarray(other)
        if self.indices.ndim > 1 or other.shape != self.dense_shape:
            if other.ndim and self.dense_shape is None:
                shape = (other.shape[0], *self.values.shape[1:])
                return other + slices_of(self.values, self.indices, shape)
            return other + self._densely("array + slices", "equal shapes")
        check_slices(self)
        if self.is_placed:
            return each_shard(lambda rows, array: array + rows, self, other)
        table = other.astype(jnp.result_type(other, self.values))
        indices = canonical_indices(self.indices, table.shape[0])
        values = self.values.astype(table.dtype)
        return _add(table, indices, values, distinct=self.facts.distinct)

    def __sub__(self, other: Operand) -> Any:
        return self + (-other)

    def __rsub__(self, other: Operand) -> Any:
        return other + (-self)

    # --- reductions -----------------------------------------------------------------

    def sum(
        self, axis: Axis = None, dtype: DTypeLike | None = None, out: None = None
    ) -> Any:
        """The sum of ``to_dense()`` over ``axis``, from the rows held.

        Args:
          axis: None for all; an int or several, counted in the dense array.
          dtype: of the result and of the summing; None: as ``jnp.sum``, except that 16-bit
            floats are summed in float32 and rounded once.
          out: must be None; ``np.sum(slices)`` passes it.

        Returns:
          An array without ``axis`` if the rows' own axis 0 is among them; otherwise
          IndexedSlices with the same ``indices`` and smaller rows. Duplicates add, empty
          entries drop.

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
        return slices_of(values, self.indices, shape)

    def mean(
        self, axis: Axis = None, dtype: DTypeLike | None = None, out: None = None
    ) -> Any:
        """The mean of ``to_dense()`` over ``axis``, zeros included.

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
            wide = self.astype(dtype)
        rows = wide.coalesce()._present()
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
        """``values`` with zeros in the empty entries."""
        indices = canonical_indices(self.indices, self._num_rows)
        present = indices != empty_index(self._num_rows, indices.dtype)
        zero = jnp.zeros((), self.values.dtype)
        return jnp.where(per_row(present, self.values), self.values, zero)

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
            _check_batch_index(number, length)
        return slices_of(self.values[key], self.indices[key], self.dense_shape)

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
        return self._densely("an implicit conversion", "`.values` and `.indices`")

    def __array__(
        self, dtype: DTypeLike | None = None, copy: bool | None = None
    ) -> np.ndarray:
        dense = self._densely("np.asarray(slices)", "`.values` and `.indices`")
        return np.asarray(dense, dtype=dtype)

    def _densely(self, what: str, instead: str) -> jax.Array:
        if self.dense_shape is not None:
            shape = (*self.indices.shape[:-1], *self.dense_shape)
            size = human_bytes(math.prod(shape) * self.dtype.itemsize)
            warn_dense(
                f"{what} turned {self.indices.shape[-1]} rows into a dense array of "
                f"shape {shape} ({size}). To stay sparse use "
                f"{instead}; to silence this convert on purpose with slices.to_dense()."
            )
        return self.to_dense()


def is_slices(x: object) -> bool:
    """True for IndexedSlices: ``jax.tree.map(f, grads, is_leaf=js.is_slices)``.

    Example:
      >>> import jslices as js
      >>> js.is_slices(3)
      False
    """
    return isinstance(x, IndexedSlices)


def check_slices(slices: "IndexedSlices") -> None:
    """Refuses slices whose indices a ``tree.map`` over their children has changed."""
    if not jnp.issubdtype(slices.indices.dtype, jnp.integer):
        raise TypeError(
            f"these IndexedSlices have indices of dtype {slices.indices.dtype}, which "
            "are not row numbers any more. A tree.map (of an Optax transformation, for "
            "example) was mapped over the slices and changed them. Wrap that "
            "transformation with jslices.from_optax(...), or map over whole slices: "
            "jax.tree.map(f, grads, is_leaf=jslices.is_slices)"
        )


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
    parts = [s for s in slices if s is not None]
    if not parts:
        raise ValueError("concat_slices got an empty sequence; it needs at least one")
    for s in parts:
        if not isinstance(s, IndexedSlices):
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
        shapes_in_words = ", ".join(str(s.shape) for s in parts)
        raise ValueError(
            f"cannot add slices of arrays of different shapes: {shapes_in_words}"
        )
    shape = shapes.pop() if shapes else None
    num_rows = None if shape is None else shape[0]
    dtype = jnp.result_type(*(s.values for s in parts))
    dtypes = [index_dtype(num_rows, np.dtype(s.indices.dtype)) for s in parts]
    widest = max(dtypes, key=lambda d: d.itemsize)
    # Widening keeps negative numbers negative, hence empty entries empty.
    indices = [s.indices.astype(widest) for s in parts]
    values = [s.values.astype(dtype) for s in parts]
    placement = parts[0].facts.placement
    if (
        placement is not None
        and all(s.facts.placement == placement and s.is_placed for s in parts)
        and parts[0].indices.ndim == 1
    ):
        return join_entries(placement, shape, list(zip(values, indices, strict=True)))
    axis = parts[0].indices.ndim - 1
    return slices_of(jnp.concatenate(values, axis), jnp.concatenate(indices, axis), shape)


def as_array(x: ArrayLike) -> jax.Array:
    """Lists, numbers and NumPy arrays as JAX arrays; anything that has a dtype as it is."""
    if isinstance(x, np.ndarray | np.generic) or not hasattr(x, "dtype"):
        return jnp.asarray(x)
    return x  # type: ignore[return-value]


def slices_of(
    values: jax.Array,
    indices: jax.Array,
    shape: tuple[int, ...] | None,
    facts: Facts = NO_FACTS,
) -> IndexedSlices:
    """IndexedSlices of parts that fit together, and what is known of them."""
    new = object.__new__(IndexedSlices)
    for name, part in zip(
        ("values", "indices", "dense_shape", "facts"),
        (values, indices, shape, facts),
        strict=True,
    ):
        object.__setattr__(new, name, part)
    return new


def deduplicated(slices: IndexedSlices) -> IndexedSlices:
    """``slices.coalesce()``, with the rows in whatever order is fastest."""
    check_slices(slices)
    if slices.facts.distinct:
        return slices
    if slices.indices.ndim > 1:
        return slices.coalesce()
    if slices.is_placed:
        unique: IndexedSlices = each_shard(deduplicated, slices)
        return unique
    return _summed(slices, order="any")


# --- on any mesh ------------------------------------------------------------------------

#: Rows of an array at indices of any shape, split as these are.
rows_at = on_any_mesh(looked_up)(take_rows)
_add = on_any_mesh(like_first)(add_rows)


@on_any_mesh(lambda slices: everywhere(slices.values, slices.indices))
def _sums(
    slices: IndexedSlices, *, size: int | None, combine: str, order: Order
) -> tuple[jax.Array, jax.Array]:
    values, indices, _ = sum_duplicates(
        slices.values, slices.indices, slices._num_rows, size, combine, order
    )
    return values, indices


def _summed(
    slices: IndexedSlices,
    size: int | None = None,
    combine: str = "sum",
    order: Order = "sorted",
) -> IndexedSlices:
    values, indices = _sums(slices, size=size, combine=combine, order=order)
    return slices_of(values, indices, slices.dense_shape, DISTINCT)


@on_any_mesh(everywhere)
def _nonzero_rows(array: jax.Array, *, size: int | None) -> tuple[jax.Array, jax.Array]:
    """The rows that are not all zero, and their numbers."""
    nonzero = jnp.any(array != 0, tuple(range(1, array.ndim)))
    positions, too_many = kept_positions(nonzero, size, "from_dense")
    return pick(array, positions, too_many), positions


# --- facts from one program to the next -------------------------------------------------


@jax.tree_util.register_pytree_node_class
class _Carried:
    """Slices, or a bool, as a pytree of which all but arrays is the static part."""

    def __init__(self, whole: "IndexedSlices | bool") -> None:
        self.whole = whole

    def tree_flatten(self) -> tuple[Any, Any]:
        x = self.whole
        if isinstance(x, bool):
            return (), x
        return (x.values, x.indices), (x.dense_shape, x.facts)

    @classmethod
    def tree_unflatten(cls, static: Any, children: Sequence[Any]) -> "_Carried":
        return cls(static if isinstance(static, bool) else slices_of(*children, *static))


def carry_facts(tree: PyTree) -> PyTree:
    """The tree with all facts of its slices, and bools, in its structure.

    So they pass the arguments and results of ``jit`` and ``shard_map``; :func:`carried`
    gives the tree back.
    """

    def is_whole(x: object) -> bool:
        return is_slices(x) or isinstance(x, bool)

    return jax.tree.map(lambda x: _Carried(x) if is_whole(x) else x, tree, is_leaf=is_whole)


def carried(tree: PyTree) -> PyTree:
    """The tree that was given to :func:`carry_facts`."""

    def is_carried(x: object) -> bool:
        return isinstance(x, _Carried)

    return jax.tree.map(lambda x: x.whole if is_carried(x) else x, tree, is_leaf=is_carried)


def one_program(fun: Callable[P, R]) -> Callable[P, R]:
    """``fun``, compiled as a whole outside of ``jax.jit``, not operation by operation.

    Its arguments are pytrees of arrays and slices, those that must be keywords static. With
    anything else than arrays, or arrays on different devices, it runs as it is. An array
    that it returns as it came is not copied.
    """
    signature = inspect.signature(fun)

    @functools.partial(jax.jit, static_argnums=0)
    def program(static: tuple[tuple[str, Any], ...], args: PyTree) -> Any:
        numbers = {id(x): _Argument(n) for n, x in enumerate(jax.tree.leaves(args))}
        result = carry_facts(fun(*carried(args), **dict(static)))
        return jax.tree.map(lambda x: numbers.get(id(x), x), result)

    @functools.wraps(fun)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        bound = signature.bind(*args, **kwargs)
        if is_staged() or not _are_of_one_program(bound.args):
            return fun(*args, **kwargs)
        args = carry_facts(bound.args)
        arrays = jax.tree.leaves(args)
        result = jax.tree.map(
            lambda x: arrays[x.number] if isinstance(x, _Argument) else x,
            program(tuple(bound.kwargs.items()), args),
            is_leaf=lambda x: isinstance(x, _Argument),
        )
        return carried(result)

    return run


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Argument:
    """What stands in a program's result for one of its arguments."""

    number: int


def _are_of_one_program(args: PyTree) -> bool:
    devices: set[tuple[jax.Device, ...]] = set()
    for x in jax.tree.leaves(args):
        if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer):
            if x.committed:
                devices.add(_devices_in_order(x.sharding))
        elif not isinstance(x, jax.Array | np.ndarray | np.generic | int | float | complex):
            return False
    return len(devices) < 2


def _devices_in_order(sharding: jax.sharding.Sharding) -> tuple[jax.Device, ...]:
    if isinstance(sharding, jax.sharding.NamedSharding):
        return tuple(sharding.mesh.devices.flat)
    return tuple(sorted(sharding.device_set, key=lambda device: device.id))


@one_program
def _dense(slices: IndexedSlices) -> jax.Array:
    if slices.indices.ndim > 1:
        return jax.vmap(_dense)(slices)
    if slices.is_placed:
        dense: jax.Array = each_shard(_dense, slices)
        return dense
    return _added_to_zeros(slices, distinct=slices.facts.distinct)


@on_any_mesh(lambda slices: everywhere(slices.values, slices.indices))
def _added_to_zeros(slices: IndexedSlices, *, distinct: bool) -> jax.Array:
    shape = slices.dense_shape
    assert shape is not None
    if slices.dtype.itemsize < 4:
        slices, distinct = slices.coalesce(), True
    indices = canonical_indices(slices.indices, shape[0])
    return add_rows(jnp.zeros(shape, slices.dtype), indices, slices.values, distinct)


# --- slices on a mesh -------------------------------------------------------------------


def join_entries(
    placement: Placement,
    shape: tuple[int, ...] | None,
    parts: Sequence[tuple[jax.Array, jax.Array]],
) -> IndexedSlices:
    """Entries ``[..., n, *D]`` and ``[..., n]`` of several lookups, as those of one.

    Only ``n`` is split over devices; each device joins what it has.
    """
    facts = Facts(placement=placement)

    def local(parts: Sequence[tuple[jax.Array, jax.Array]]) -> list[jax.Array]:
        values = [v.reshape(i.size, *v.shape[i.ndim :]) for v, i in parts]
        indices = [i.reshape(-1) for _, i in parts]
        widest = max((i.dtype for i in indices), key=lambda dtype: dtype.itemsize)
        return [
            jnp.concatenate(values),
            jnp.concatenate([i.astype(widest) for i in indices]),
        ]

    if len(parts) == 1 and parts[0][1].ndim == 1:
        ((values, indices),) = parts
        return slices_of(values, indices, shape, facts)
    specs = [
        (PartitionSpec(*(None,) * (i.ndim - 1), placement.rows or None),) * 2
        for _, i in parts
    ]
    run = on_each_device(placement, local, (specs,), placement.by_rows)
    values, indices = run(parts)
    return slices_of(values, indices, shape, facts)


def sent_to_owners(placement: Placement, num_rows: int, ids: jax.Array) -> IndexedSlices:
    """Entries without elements for ``ids`` ``[K]``, each on the device that has its row."""

    def own(number: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        height = num_rows // placement.shards
        first = number[0].astype(ids.dtype) * height
        mine = (ids >= first) & (ids < first + height)
        return jnp.zeros((*ids.shape, 0)), jnp.where(mine, ids, num_rows)

    mesh = placement.mesh if placement.mesh.explicit_axes else None
    with with_auto_axes(mesh):
        specs = placement.by_rows, PartitionSpec()
        run = on_each_device(placement, own, specs, placement.by_rows)
        entries = run(placement.numbers(), canonical_indices(drop_sharding(ids), num_rows))
    if mesh is not None:
        entries = restore_sharding(entries, explicit_part(mesh, placement.by_rows))
    none, indices = entries
    return slices_of(none, indices, (num_rows, 0), Facts(placement=placement))


def each_shard(
    fun: Callable[..., Any], slices: IndexedSlices, *arrays: PyTree, shared: PyTree = ()
) -> Any:
    """``fun(slices, *arrays)``, each device for its own rows, without communication.

    Args:
      fun: gets slices of this device's rows, numbered from 0, and its rows of the arrays.
        Returns a pytree of slices and arrays whose first axis goes by rows or by entries.
      slices: with a placement.
      *arrays: pytrees of arrays ``[V, ...]``, placed as the table.
      shared: arrays that ``fun`` gets whole, after the others.
    """
    placement, dense_shape = slices.facts.placement, slices.dense_shape
    here = slices.facts._replace(placement=None)
    if placement is None or dense_shape is None or not slices.is_placed:
        plain = slices_of(slices.values, slices.indices, dense_shape, here)
        return fun(plain, *arrays, *shared)
    height = dense_shape[0] // placement.shards

    def local(
        shared: PyTree,
        number: jax.Array,
        values: jax.Array,
        indices: jax.Array,
        *arrays: PyTree,
    ) -> Any:
        first = number[0].astype(indices.dtype) * height
        mine = slices_of(values, indices - first, (height, *dense_shape[1:]), here)
        result = fun(mine, *arrays, *shared)

        def of_all(x: Leaf) -> Any:
            return _of_all_shards(placement, x, first) if is_slices(x) else x

        return carry_facts(jax.tree.map(of_all, result, is_leaf=is_slices))

    operands = placement.numbers(), slices.values, slices.indices, *arrays
    specs = PartitionSpec(), *(placement.by_rows for _ in operands)
    run = on_each_device(placement, local, specs, placement.by_rows)
    run = on_any_mesh(lambda shared, numbers, values, *rest: shardings_of(values))(run)
    return carried(run(shared, *operands))


def _of_all_shards(
    placement: Placement, x: IndexedSlices, first: jax.Array
) -> IndexedSlices:
    """Slices of the rows from ``first`` on as slices of the whole table."""
    assert x.dense_shape is not None
    height, *row = x.dense_shape
    indices = canonical_indices(x.indices, height)
    shape = (height * placement.shards, *row)
    indices = jnp.where(indices < height, indices + first, shape[0])
    return slices_of(x.values, indices, shape, x.facts._replace(placement=placement))


def _as_indices(x: ArrayLike) -> Any:
    """:func:`as_array` for row numbers, none of which turns into another."""
    if isinstance(x, list | tuple) and all(type(n) is int for n in x):
        x = np.asarray(x, np.int64)
    return as_array(in_32_bits(x) if isinstance(x, np.ndarray) and x.size else x)


def _static_shape(shape: Sequence[Size] | None) -> tuple[int, ...] | None:
    """``dense_shape`` as a tuple of ints."""
    if shape is None:
        return None
    try:
        return tuple(n if is_symbolic(n) else operator.index(n) for n in shape)
    except (jax.errors.ConcretizationTypeError, TypeError, ValueError) as error:
        raise TypeError(
            f"dense_shape must be a tuple of ints known before tracing, got {shape!r}; "
            "pass the shape of the table: dense_shape=table.shape"
        ) from error


def _check_parts(
    values: jax.Array, indices: jax.Array, shape: tuple[int, ...] | None
) -> None:
    """Refuses parts that do not fit together, with all that is wrong in one message."""
    got = (
        f"values {values.dtype}[{', '.join(map(str, values.shape))}], indices "
        f"{indices.dtype}[{', '.join(map(str, indices.shape))}], dense_shape {shape}"
    )
    if not jnp.issubdtype(indices.dtype, jnp.integer):
        hint = (
            "; the order is IndexedSlices(values, indices, dense_shape)"
            if jnp.issubdtype(values.dtype, jnp.integer)
            else "; cast them: indices.astype('int32')"
        )
        raise TypeError(f"IndexedSlices wants integer indices, got {got}{hint}")
    problems = []
    if indices.ndim != 1:
        problems.append(
            f"indices must have one axis, not {indices.ndim}: flatten both with "
            "values.reshape(-1, *row_shape) and indices.reshape(-1)"
        )
    elif values.ndim < 1 or values.shape[0] != indices.shape[0]:
        problems.append("values and indices must have equally many rows")
    if shape is not None:
        if len(shape) < 1 or any(n < 0 for n in shape):
            problems.append("dense_shape must be (V, *row_shape), none negative")
        elif indices.ndim == 1 and tuple(values.shape[1:]) != shape[1:]:
            rows = (shape[0], *values.shape[1:])
            problems.append(
                f"the rows of values have shape {tuple(values.shape[1:])}, those of "
                f"dense_shape {shape[1:]}: did you mean dense_shape={rows}?"
            )
    if problems:
        raise ValueError(f"IndexedSlices got {got}; " + "; ".join(problems))


def _check_batch_index(key: Index, length: int) -> None:
    """Refuses known numbers out of range, which JAX would clamp."""
    if isinstance(key, slice | jax.core.Tracer):
        return
    numbers = np.asarray(key)
    if numbers.dtype == np.bool_ and numbers.ndim != 1:
        # JAX would add an axis for it, or merge a batch axis with the rows.
        raise TypeError(
            f"a mask of a batch axis has one axis, got bool{list(numbers.shape)}"
        )
    if not np.issubdtype(numbers.dtype, np.integer):
        return
    bad = numbers[(numbers < -length) | (numbers >= length)]
    if bad.size:
        raise IndexError(f"batch index {bad[0]} is out of range for {length}")


def _sum(x: jax.Array, axes: tuple[int, ...], dtype: DTypeLike | None) -> jax.Array:
    if dtype is None and jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4:
        return jnp.sum(x.astype(jnp.float32), axes).astype(x.dtype)
    return jnp.sum(x, axes, dtype=dtype)


def _refuse_out(out: object) -> None:
    if out is not None:
        raise TypeError("out= is not supported: JAX arrays cannot be written to")


def _broadcasts(shape: tuple[int, ...], onto: tuple[int | None, ...]) -> bool:
    trailing = onto[len(onto) - len(shape) :]
    return len(shape) <= len(onto) and all(
        n in (1, size) for n, size in zip(shape, trailing, strict=True)
    )


def _num_bytes(x: Aval) -> int:
    return math.prod(x.shape) * np.dtype(x.dtype).itemsize
