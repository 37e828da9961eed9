"""Summing the rows that share an index into a static number of distinct ones."""

import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from jslices import _jax
from jslices._rows.bounds import canonical_indices, empty_index, room_for_distinct
from jslices._rows.numbering import (
    number_rows,
    number_rows_in_any_order,
)

#: The order of the distinct rows.
Order = Literal["sorted", "any"]

#: What the sum of ``n`` occurrences of a row is divided by.
COMBINERS: dict[str, Callable[[jax.Array], jax.Array] | None] = {
    "sum": None,
    "mean": lambda n: n,
    "sqrtn": jnp.sqrt,
}


def sum_duplicates(
    values: jax.Array,
    indices: jax.Array,
    num_rows: int | None,
    size: int | None,
    combine: str = "sum",
    order: Order = "sorted",
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sums the rows that share an index.

    Args:
      values: ``[K, *D]`` of any dtype. 16-bit floats are summed in float32 and rounded
        once.
      indices: ``[K]`` of any integer dtype; those out of range are dropped.
      num_rows: V, or None when unknown.
      size: U, the static number of entries returned; None means ``min(K, V)``, which
        always suffices.
      combine: a key of ``COMBINERS``.
      order: "any" if the rows may come in any order, which can be faster.

    Returns:
      ``(values [U, *D], indices [U], distinct [])``: distinct rows, sorted unless another
      ``order`` is allowed, then empty entries (index V, zero values). ``distinct``, int32,
      is how many distinct rows there are, which may be more than U.

    Raises:
      ValueError: if more than ``size`` distinct rows are present and the indices are
        concrete. Under jit, where nothing can be raised, floating values become NaN, which
        then shows in the loss.

    Cost: a sort of K integers (or less, unless sorted), one pass over ``[K, *D]`` and
    one over ``[U, *D]``.
    """
    num_ids = indices.shape[0]
    enough = room_for_distinct(num_ids, num_rows)
    capacity = enough if size is None else size
    if capacity < 0:
        raise ValueError(f"coalesce(size={size}): size must not be negative")
    indices = canonical_indices(indices, num_rows)
    empty = empty_index(num_rows, indices.dtype)
    if _jax.holds(lambda: num_ids == 0 or capacity == 0):
        distinct = (
            jnp.zeros((), jnp.int32)
            if num_ids == 0
            else jnp.any(indices != empty).astype(jnp.int32)
        )
        unique = jnp.full((capacity,), empty, indices.dtype)
        summed = jnp.zeros((capacity, *values.shape[1:]), values.dtype)
    else:
        row_bytes = math.prod(values.shape[1:]) * values.dtype.itemsize
        if order == "sorted" or num_rows is None:
            numbered = number_rows(indices, num_rows, capacity)
        else:
            numbered = number_rows_in_any_order(indices, num_rows, capacity, row_bytes)
        unique, numbers, distinct = numbered
        summed = add_by_number(values, numbers, capacity, COMBINERS[combine])
    if not _jax.holds(lambda: capacity >= enough):
        summed = _refuse_overflow(summed, distinct, capacity)
    return summed, unique, distinct


def check_combine(combine: str, dtype: jnp.dtype) -> None:
    """Refuses an unknown way to combine, and fractions of integers."""
    if combine not in COMBINERS:
        raise ValueError(f"combine={combine!r}: it must be one of {tuple(COMBINERS)}")
    if combine != "sum" and not jnp.issubdtype(dtype, jnp.inexact):
        raise TypeError(
            f"combine={combine!r} divides, and these rows are {dtype}; cast them first: "
            "slices.astype('float32')"
        )


def add_by_number(
    values: jax.Array,
    numbers: jax.Array,
    capacity: int,
    divisor: Callable[[jax.Array], jax.Array] | None = None,
) -> jax.Array:
    """``[capacity, *D]``: the rows of ``values`` ``[K, *D]`` with the same number, summed.

    Slots of ``capacity`` or more drop. 16-bit floats are summed in float32 and rounded
    once.
    """
    dtype = values.dtype
    narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    wide = values.astype(jnp.float32) if narrow else values
    zeros = jnp.zeros((capacity, *values.shape[1:]), wide.dtype)
    summed = zeros.at[numbers].add(wide, mode="drop")
    if divisor is not None:
        # Counted in integers: exact beyond 2^24 occurrences.
        counts = jnp.zeros((capacity,), jnp.int32).at[numbers].add(1, mode="drop")
        weight = divisor(jnp.maximum(counts, 1).astype(jnp.finfo(wide.dtype).dtype))
        summed = summed / weight.reshape(-1, *(1,) * (summed.ndim - 1))
    return summed.astype(dtype)


def _refuse_overflow(summed: jax.Array, distinct: jax.Array, size: int) -> jax.Array:
    if not isinstance(distinct, jax.core.Tracer):
        if distinct > size:
            raise ValueError(
                f"coalesce(size={size}): {int(distinct)} distinct rows do not fit; "
                f"pass size={int(distinct)} or more, or leave size out"
            )
        return summed
    if not jnp.issubdtype(summed.dtype, jnp.inexact):
        return summed
    return jnp.where(distinct > size, jnp.array(jnp.nan, summed.dtype), summed)
