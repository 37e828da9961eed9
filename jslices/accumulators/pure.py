"""The accumulators as pure functions on a state of static size, for use under ``jit``."""

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jslices import IndexedSlices, InvalidArgumentError
from jslices._rows.access import canonical_indices, empty_index, index_dtype
from jslices._rows.sums import sort_ids, sum_dtype
from jslices._slices import check_slices
from jslices.accumulators import _gradients

_State = TypeVar("_State", "SparseAccumulatorState", "DenseAccumulatorState")


class _PureAccumulator:
    """Functions of a state with ``num_accumulated`` and ``global_step``."""

    def num_accumulated(self, state: _State) -> jax.Array:
        """How many gradients have been accepted since the last take: int32 ``[]``."""
        return state.num_accumulated

    def global_step(self, state: _State) -> jax.Array:
        """The step below which a gradient's ``local_step`` is stale: int32 ``[]``."""
        return state.global_step

    def set_global_step(self, state: _State, new_global_step: ArrayLike) -> _State:
        """The state with another step, higher or lower; accumulated gradients stay."""
        step = jnp.asarray(new_global_step).astype(jnp.int32)
        return state._replace(global_step=step)

    def ready(self, state: _State, num_required: ArrayLike) -> jax.Array:
        """True once ``num_required`` gradients have been accumulated: bool ``[]``.

        Raises:
          InvalidArgumentError: for ``num_required < 1``, where it is a plain number.
        """
        if not isinstance(num_required, jax.core.Tracer):
            num_required = _gradients.positive(num_required)
        return state.num_accumulated >= num_required


def _after_take(ready: jax.Array, empty: _State, state: _State) -> _State:
    """The empty state, one step further; the same state if it was not ready."""
    new = empty._replace(global_step=state.global_step + 1)
    return jax.tree.map(lambda x, y: jnp.where(ready, x, y), new, state)  # type: ignore[no-any-return]


def _device_dtype(owner: str, dtype: DTypeLike) -> np.dtype:
    """Check that a dtype is a floating one that JAX has enabled."""
    result = _gradients.float_dtype(owner, dtype)
    if jax.dtypes.canonicalize_dtype(result) != result:
        raise InvalidArgumentError(
            f"{owner}(dtype='{result}') needs "
            "jax.config.update('jax_enable_x64', True) before it is made"
        )
    return result


# --- rows -----------------------------------------------------------------------------


class SparseAccumulatorState(NamedTuple):
    """The sums of the rows since the last take: a pytree of static shapes.

    A row keeps its first entry; unused entries hold the empty index V.
    """

    rows: jax.Array  #: ``[U]`` int32 or int64, in the order in which they came.
    sums: jax.Array  #: ``[U, *D]``, float32 where the dtype has 16 bits.
    counts: jax.Array  #: int32 ``[U]``, how many gradients held each row.
    num_accumulated: jax.Array  #: int32 ``[]``, gradients since the last take.
    global_step: jax.Array  #: int32 ``[]``.
    overflow: jax.Array  #: int32 ``[]``, gradients that did not fit since the last take.


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class SparseAccumulator(_PureAccumulator):
    """The functions of one accumulator; made by :func:`sparse_accumulator`."""

    dtype: np.dtype
    shape: tuple[int | None, ...]
    capacity: int
    reduction_type: str

    def init(self) -> SparseAccumulatorState:
        """The empty state, at step 0."""
        rows = jnp.full(self.capacity, self._empty, self._index_dtype)
        shape: Any = (self.capacity, *self.shape[1:])
        sums = jnp.zeros(shape, sum_dtype(self.dtype))
        counts, zero = jnp.zeros(self.capacity, jnp.int32), jnp.int32(0)
        return SparseAccumulatorState(rows, sums, counts, zero, zero, zero)

    def apply_grad(
        self, state: SparseAccumulatorState, grad: IndexedSlices, local_step: ArrayLike = 0
    ) -> tuple[SparseAccumulatorState, jax.Array]:
        """Adds a gradient: all of it, or nothing.

        Args:
          grad: ``values`` ``[K, *D]``, ``indices`` ``[K]`` in any order; duplicates add
            and count once, empty entries are dropped.
          local_step: int ``[]``, the step on whose parameters it was computed.

        Returns:
          ``(state, accepted)``; ``accepted`` is a bool ``[]``: False for a stale gradient
          (``local_step`` below the step), and for one that would make more than U rows,
          which is counted in ``state.overflow``.

        Raises:
          InvalidArgumentError: for shapes and dtypes that do not fit.

        Cost: a sort of K integers, a search of U in K, sums and a scatter of K rows.
        """
        _gradients.check_is_slices("the sparse accumulator", grad, "dense_accumulator")
        check_slices(grad)
        _gradients.check_sparse(
            grad.indices, grad.values, grad.dense_shape, self.shape, self.dtype, exact=True
        )
        unique = grad.with_values(grad.values.astype(state.sums.dtype)).coalesce()
        rows = canonical_indices(unique.indices, self.shape[0]).astype(self._index_dtype)
        entries = self._entries(state.rows, rows)
        is_new = (rows != self._empty) & (entries == self.capacity)
        used = jnp.sum(state.rows != self._empty, dtype=jnp.int32)
        entries = jnp.where(is_new, used + jnp.cumsum(is_new, dtype=jnp.int32) - 1, entries)
        fits = used + jnp.sum(is_new, dtype=jnp.int32) <= self.capacity
        fresh = jnp.asarray(local_step) >= state.global_step
        accepted = fresh & fits
        to = jnp.where(accepted, entries, self.capacity)  # where nothing is written
        state = state._replace(
            rows=state.rows.at[to].set(rows, mode="drop"),
            sums=state.sums.at[to].add(unique.values, mode="drop"),
            counts=state.counts.at[to].add(1, mode="drop"),
            num_accumulated=state.num_accumulated + accepted.astype(jnp.int32),
            overflow=state.overflow + (fresh & ~fits).astype(jnp.int32),
        )
        return state, accepted

    def take_grad(
        self, state: SparseAccumulatorState, num_required: ArrayLike
    ) -> tuple[SparseAccumulatorState, IndexedSlices]:
        """Takes the mean (or sum) of all gradients, if there are ``num_required``.

        Returns:
          ``(state, slices)``: ``values`` ``[U, *D]`` and ``indices`` ``[U]``, ascending,
          then the empty entries; the state is empty again and one step further. A pure
          function cannot wait: when :meth:`ready` is False the state comes back as it
          was and all entries are empty, so that applying them changes nothing.

        Raises:
          InvalidArgumentError: for ``num_required < 1``, where it is a plain number.
          ValueError: if gradients have overflowed since the last take. Under jit, where
            nothing can be raised, the values become NaN instead. Once the refused
            gradients have been dealt with, clear it: ``state._replace(overflow=0)``.

        Cost: a sort of U integers, reads and writes ``U * D`` elements.
        """
        ready = self.ready(state, num_required)
        overflow = ready & (state.overflow > 0)
        if not isinstance(overflow, jax.core.Tracer) and overflow:
            raise ValueError(
                f"{int(state.overflow)} gradients were refused since the last take, "
                "because their rows and those held are more than "
                f"capacity={self.capacity}; make it larger, or take more often"
            )
        ordered, positions = sort_ids(state.rows)
        values = state.sums
        if self.reduction_type == "MEAN":
            counts = jnp.maximum(state.counts, 1).astype(values.dtype)
            values = values / counts.reshape(-1, *[1] * (values.ndim - 1))
        values = values.at[positions].get(mode="promise_in_bounds")
        values = jnp.where(overflow, jnp.nan, jnp.where(ready, values, 0))
        slices = IndexedSlices(
            values.astype(self.dtype),
            jnp.where(ready, ordered, jnp.array(self._empty, ordered.dtype)),
            None if self.shape[0] is None else self.shape,  # type: ignore[arg-type]
        )
        return _after_take(ready, self.init(), state), slices

    def _entries(self, held: jax.Array, rows: jax.Array) -> jax.Array:
        """The entry in ``held`` of each of ``rows``, which ascend; U if new or empty."""
        at = jnp.searchsorted(rows, held)
        is_same = rows.at[at].get(mode="fill", fill_value=self._empty) == held
        at = jnp.where(is_same & (held != self._empty), at, rows.size)
        entries = jnp.full(rows.size, self.capacity, jnp.int32)
        return entries.at[at].set(jnp.arange(held.size, dtype=jnp.int32), mode="drop")

    @property
    def _index_dtype(self) -> np.dtype:
        unknown = self.shape[0] is None and jax.config.read("jax_enable_x64")
        return index_dtype(self.shape[0], np.dtype(np.int64 if unknown else np.int32))

    @property
    def _empty(self) -> int:
        return empty_index(self.shape[0], self._index_dtype)


def sparse_accumulator(
    dtype: DTypeLike,
    shape: Sequence[int | None],
    capacity: int,
    reduction_type: str = "MEAN",
) -> SparseAccumulator:
    """Row gradients of several micro-batches or workers, summed up under ``jit``.

    The pure form of :class:`SparseConditionalAccumulator`: functions of a state
    that ``jit``, ``scan`` and ``vmap`` take along. No array of V rows is ever made.

    Args:
      dtype: floating dtype of the gradients. 16-bit floats are summed in float32 and
        rounded once, when they are taken.
      shape: ``(V, *D)`` of the table; V may be None, if unknown.
      capacity: U, the number of distinct rows that can be held between two takes.
      reduction_type: "MEAN" or "SUM", as there.

    Returns:
      A :class:`jslices.accumulators.SparseAccumulator`, whose methods are pure functions.
      It is static: close over it, or pass it along.

    Raises:
      InvalidArgumentError: for other arguments.

    Cost: the state has ``U * D`` elements and 2 U integers; see the methods.

    Example:
      >>> import jax, jax.numpy as jnp, jslices as js
      >>> accumulator = js.accumulators.sparse_accumulator("float32", (9, 1), capacity=4)
      >>> state, add = accumulator.init(), jax.jit(accumulator.apply_grad)
      >>> for rows, values in [([0, 2], [1.0, 2.0]), ([3, 2], [30.0, 10.0])]:
      ...     grad = js.IndexedSlices(jnp.array(values)[:, None], jnp.array(rows), (9, 1))
      ...     state, accepted = add(state, grad)
      >>> state, mean = jax.jit(accumulator.take_grad)(state, 2)
      >>> mean.indices, mean.values.ravel()
      (Array([0, 2, 3, 9], dtype=int32), Array([ 1.,  6., 30.,  0.], dtype=float32))

    Source: ``tf.compat.v1.SparseConditionalAccumulator``, which is an object, waits, and
    grows. ``optax.MultiSteps`` holds a dense array of V rows instead.
    """
    owner = "sparse_accumulator"
    sizes = _gradients.partial_shape(owner, shape)
    if not sizes or None in sizes[1:]:
        raise InvalidArgumentError(
            f"{owner}(shape={shape!r}): its state has a static size; give (V, *D), where "
            "V alone may be None"
        )
    _gradients.REDUCTIONS.check(owner, "reduction_type", reduction_type)
    try:
        room = operator.index(capacity)
    except TypeError:
        room = 0
    if room < 1:
        raise InvalidArgumentError(
            f"{owner}(capacity={capacity!r}): it must be a whole number from 1, the most "
            "distinct rows to be held at once"
        )
    return SparseAccumulator(_device_dtype(owner, dtype), sizes, room, reduction_type)


# --- whole arrays ---------------------------------------------------------------------


class DenseAccumulatorState(NamedTuple):
    """The sum of the gradients since the last take: a pytree of static shapes."""

    total: jax.Array  #: like the gradient, float32 where it has 16 bits.
    num_accumulated: jax.Array  #: int32 ``[]``, gradients since the last take.
    global_step: jax.Array  #: int32 ``[]``.


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class DenseAccumulator(_PureAccumulator):
    """The functions of one accumulator; made by :func:`dense_accumulator`."""

    dtype: np.dtype
    shape: tuple[int, ...]
    reduction_type: str

    def init(self) -> DenseAccumulatorState:
        """The empty state, at step 0."""
        total = jnp.zeros(self.shape, sum_dtype(self.dtype))
        return DenseAccumulatorState(total, jnp.int32(0), jnp.int32(0))

    def apply_grad(
        self, state: DenseAccumulatorState, grad: ArrayLike, local_step: ArrayLike = 0
    ) -> tuple[DenseAccumulatorState, jax.Array]:
        """``(state, accepted)``: adds a gradient unless ``local_step`` is stale.

        Another shape or dtype is an InvalidArgumentError.
        """
        grad = jnp.asarray(grad)
        _gradients.check_dense(grad, self.shape, self.dtype)
        accepted = jnp.asarray(local_step) >= state.global_step
        # A choice, not a product: a stale gradient may hold NaN.
        added = jnp.where(accepted, grad.astype(state.total.dtype), 0)
        count = state.num_accumulated + accepted.astype(jnp.int32)
        return state._replace(total=state.total + added, num_accumulated=count), accepted

    def take_grad(
        self, state: DenseAccumulatorState, num_required: ArrayLike
    ) -> tuple[DenseAccumulatorState, jax.Array]:
        """``(state, mean)`` of all gradients; zeros and the same state when not ready."""
        ready = self.ready(state, num_required)
        total = jnp.where(ready, state.total, 0)
        if self.reduction_type == "MEAN":
            total = total / jnp.maximum(state.num_accumulated, 1).astype(total.dtype)
        return _after_take(ready, self.init(), state), total.astype(self.dtype)


def dense_accumulator(
    dtype: DTypeLike, shape: Sequence[int], reduction_type: str = "MEAN"
) -> DenseAccumulator:
    """Dense gradients of several micro-batches, summed up under ``jit``.

    The pure form of :class:`jslices.accumulators.ConditionalAccumulator`, for use beside
    :func:`sparse_accumulator` for the dense leaves of a model.

    Args:
      dtype: floating dtype of the gradients; 16-bit floats are summed in float32.
      shape: of the gradients, all of it known; ``()`` is a scalar here.
      reduction_type: "MEAN" divides by the number of gradients, "SUM" does not.

    Returns:
      An accumulator with the methods and errors of that of :func:`sparse_accumulator`.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> accumulator = js.accumulators.dense_accumulator("float32", (2,))
      >>> state, accepted = accumulator.apply_grad(accumulator.init(), jnp.ones(2))
      >>> accumulator.take_grad(state, 1)[1]
      Array([1., 1.], dtype=float32)

    Source: ``tf.compat.v1.ConditionalAccumulator``.
    """
    owner = "dense_accumulator"
    sizes = _gradients.partial_shape(owner, shape)
    if sizes is None or None in sizes:
        raise InvalidArgumentError(
            f"{owner}(shape={shape!r}): its state has a static size; give the shape of "
            "the gradients"
        )
    _gradients.REDUCTIONS.check(owner, "reduction_type", reduction_type)
    all_sizes = tuple(n for n in sizes if n is not None)
    return DenseAccumulator(_device_dtype(owner, dtype), all_sizes, reduction_type)
