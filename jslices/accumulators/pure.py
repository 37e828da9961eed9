"""The sparse accumulator as pure functions on a state of static size."""

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jslices._errors import InvalidArgumentError
from jslices._rows.bounds import add_rows, canonical_indices, empty_slot, index_dtype
from jslices._rows.sort import sort_ids
from jslices._slices import IndexedSlices, check_slices, is_slices
from jslices.accumulators._find_slots import find_slots
from jslices.accumulators._gradients import check_reduction, check_sparse, partial_shape
from jslices.accumulators._pure_base import PureSteps, device_dtype, sum_dtype, zero


class SparseAccumulatorState(NamedTuple):
    """What has been accumulated: a pytree of static shapes.

    A row keeps the slot that it first got; unused slots hold the empty index V.
    """

    rows: jax.Array  #: ``[U]`` int32 or int64, in the order of coming.
    sums: jax.Array  #: ``[U, *D]``, float32 where the dtype has 16 bits.
    counts: jax.Array  #: int32 ``[U]``, how many gradients held each row.
    num_accumulated: jax.Array  #: int32 ``[]``, gradients since the last take.
    global_step: jax.Array  #: int32 ``[]``.
    overflow: jax.Array  #: int32 ``[]``, gradients that did not fit since the last take.


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class SparseAccumulator(PureSteps):
    """The functions of one accumulator; made by :func:`sparse_accumulator`."""

    dtype: np.dtype
    shape: tuple[int | None, ...]
    capacity: int
    reduction_type: str

    def init(self) -> SparseAccumulatorState:
        """The state that holds nothing, at step 0."""
        rows = jnp.full(self.capacity, self._empty, self._index_dtype)
        sums = jnp.zeros((self.capacity, *self._row_shape), sum_dtype(self.dtype))
        counts = jnp.zeros(self.capacity, jnp.int32)
        return SparseAccumulatorState(rows, sums, counts, zero(), zero(), zero())

    def apply_grad(
        self, state: SparseAccumulatorState, grad: IndexedSlices, local_step: ArrayLike = 0
    ) -> tuple[SparseAccumulatorState, jax.Array]:
        """Adds a gradient: all of it, or nothing.

        Args:
          state: from :meth:`init` or another method.
          grad: ``values`` ``[K, *D]``, ``indices`` ``[K]`` in any order; duplicates add
            and count once, empty slots are dropped.
          local_step: int ``[]``, the step on whose parameters it was computed.

        Returns:
          ``(state, accepted)``; ``accepted`` is a bool ``[]``: False for a stale gradient
          (``local_step`` below the step), and for one that would bring more than U rows
          together: that one is counted in ``state.overflow``.

        Raises:
          InvalidArgumentError: for shapes and dtypes that do not fit.

        Cost: a sort of U + K integers, a scatter of K rows.
        """
        self._check(grad)
        empty = self._empty
        indices = canonical_indices(grad.indices, self.shape[0]).astype(self._index_dtype)
        found = find_slots(state.rows, indices, empty)
        fresh = jnp.asarray(local_step) >= state.global_step
        fits = found.used <= self.capacity
        accepted = fresh & fits

        def only(chosen: jax.Array, slots: jax.Array) -> jax.Array:
            return jnp.where(chosen & accepted, slots, self.capacity)  # others drop out

        to = only(indices != empty, found.slots)
        is_new, is_held = (only(x, found.row_slots) for x in (found.is_new, found.is_held))
        state = state._replace(
            rows=state.rows.at[is_new].set(found.rows, mode="drop"),
            sums=add_rows(state.sums, to, grad.values.astype(state.sums.dtype)),
            counts=state.counts.at[is_held].add(1, mode="drop"),
            num_accumulated=state.num_accumulated + accepted.astype(jnp.int32),
            overflow=state.overflow + (fresh & ~fits).astype(jnp.int32),
        )
        return state, accepted

    def take_grad(
        self, state: SparseAccumulatorState, num_required: ArrayLike
    ) -> tuple[SparseAccumulatorState, IndexedSlices]:
        """Takes the mean (or sum) of all gradients, if ``num_required`` have come.

        Returns:
          ``(state, slices)``: ``values`` ``[U, *D]`` and ``indices`` ``[U]``, ascending,
          then the empty slots; the state is empty again and one step further. A pure
          function cannot wait: when :meth:`ready` is False the state comes back as it
          was and all slots are empty, so that applying them changes nothing.

        Raises:
          InvalidArgumentError: for ``num_required < 1``, where it is a plain number.
          ValueError: if gradients have overflowed since the last take. Under jit, where
            nothing can be raised, the values become NaN instead. Who has dealt with the
            refused gradients says so: ``state._replace(overflow=0)``.

        Cost: a sort of U integers, reads and writes ``U * D`` elements.
        """
        ready = self.ready(state, num_required)
        overflow = ready & (state.overflow > 0)
        if not isinstance(overflow, jax.core.Tracer) and overflow:
            raise ValueError(self._overflow_message(int(state.overflow)))
        ordered, positions = sort_ids(state.rows)
        values = state.sums.at[positions].get(mode="promise_in_bounds")
        if self.reduction_type == "MEAN":
            counts = state.counts.at[positions].get(mode="promise_in_bounds")
            counts = jnp.maximum(counts, 1).astype(values.dtype)
            values = values / counts.reshape(-1, *[1] * (values.ndim - 1))
        values = jnp.where(overflow, jnp.nan, jnp.where(ready, values, 0))
        slices = IndexedSlices(
            values.astype(self.dtype),
            jnp.where(ready, ordered, jnp.array(self._empty, ordered.dtype)),
            None if self.shape[0] is None else self.shape,  # type: ignore[arg-type]
        )
        emptied = self.init()._replace(global_step=state.global_step + 1)
        new_state = jax.tree.map(
            lambda new, old: jnp.where(ready, new, old), emptied, state
        )
        return new_state, slices

    @property
    def _row_shape(self) -> tuple[int, ...]:
        return self.shape[1:]  # type: ignore[return-value]

    @property
    def _index_dtype(self) -> np.dtype:
        unknown = self.shape[0] is None and jax.config.read("jax_enable_x64")
        return index_dtype(self.shape[0], np.dtype(np.int64 if unknown else np.int32))

    @property
    def _empty(self) -> int:
        return empty_slot(self.shape[0], self._index_dtype)

    def _check(self, grad: Any) -> None:
        if not is_slices(grad):
            raise TypeError(
                "the sparse accumulator wants IndexedSlices, got a "
                f"{type(grad).__name__}; for dense gradients there is "
                "jslices.accumulators.dense_accumulator"
            )
        check_slices(grad)
        check_sparse(grad.indices, grad.values, grad.dense_shape, self.shape, self.dtype)
        if grad.values.ndim != len(self.shape):
            raise InvalidArgumentError(
                f"Shape mismatch: expected values rank {len(self.shape)}, got "
                f"{grad.values.ndim}"
            )

    def _overflow_message(self, refused: int) -> str:
        return (
            f"{refused} gradients were refused since the last take, because their rows "
            f"and those held are more than capacity={self.capacity}; make it larger, or "
            "take more often"
        )


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
      shape: ``(V, *D)`` of the table; V may be None, for not known.
      capacity: U, the number of distinct rows that can be held between two takes.
      reduction_type: "MEAN" divides each row by the number of gradients that held that
        row; "SUM" does not.

    Returns:
      A :class:`jslices.accumulators.SparseAccumulator` with the pure functions ``init()``,
      ``apply_grad(state, grad, local_step=0) -> (state, accepted)``,
      ``ready(state, num_required)``, ``take_grad(state, num_required) -> (state,
      slices)``, ``num_accumulated(state)``, ``global_step(state)`` and
      ``set_global_step(state, step)``. It is static: close over it, or pass it along.

    Raises:
      InvalidArgumentError: for arguments that are none of these.

    Cost: the state has ``U * D`` elements and 2 U integers; see the methods.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> accumulator = js.accumulators.sparse_accumulator("float32", (9, 1), capacity=4)
      >>> state = accumulator.init()
      >>> for rows, values in [([0, 2], [1.0, 2.0]), ([3, 2], [30.0, 10.0])]:
      ...     grad = js.IndexedSlices(jnp.array(values)[:, None], jnp.array(rows), (9, 1))
      ...     state, accepted = accumulator.apply_grad(state, grad)
      >>> state, mean = accumulator.take_grad(state, 2)
      >>> mean.indices, mean.values.ravel()
      (Array([0, 2, 3, 9], dtype=int32), Array([ 1.,  6., 30.,  0.], dtype=float32))

    Source: ``tf._jax.v1.SparseConditionalAccumulator``, which is an object, waits, and
    grows. ``optax.MultiSteps`` holds a dense array of V rows instead.
    """
    owner = "sparse_accumulator"
    found = partial_shape(owner, shape)
    if not found or None in found[1:]:
        raise InvalidArgumentError(
            f"{owner}(shape={shape!r}): its state has a static size; give (V, *D), where "
            "V alone may be None"
        )
    check_reduction(owner, reduction_type)
    try:
        size = operator.index(capacity)
    except TypeError:
        size = 0
    if size < 1:
        raise InvalidArgumentError(
            f"{owner}(capacity={capacity!r}): it must be a whole number from 1, the most "
            "distinct rows to be held at once"
        )
    return SparseAccumulator(device_dtype(owner, dtype), found, size, reduction_type)
