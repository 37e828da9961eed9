"""Numbering the distinct rows that some indices name, so that each has one slot.

The general way sorts the indices. A CPU can instead look up in a map of V integers which
position names a row first, as long as that map is small beside the rows themselves.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jslices._bounds import empty_slot
from jslices._sort import sort_ids

#: The map pays up to so many rows of the table for each index, measured: a step of Adam
#: with 1e5 ids then takes 0.6 to 0.8 of the time, with 1e4 ids 0.7 to 0.9.
ROWS_PER_ID = 32
#: Below so many ids nothing is won by choosing.
FEW = 512


def number_slots(
    indices: jax.Array, num_rows: int | None, capacity: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Numbers the distinct rows in their order.

    Args:
      indices: ``[K]``, canonical, K at least 1.
      num_rows: V, or None when unknown.
      capacity: U, the number of slots.

    Returns:
      ``(unique, slots, distinct)``: the distinct rows ``[U]``, sorted, then empty slots;
      the slot of each occurrence, int32 ``[K]``, U or more where it has none; how many
      distinct rows there are, int32 ``[]``.

    Cost: a sort of K integers.
    """
    empty = empty_slot(num_rows, indices.dtype)
    ordered, positions = sort_ids(indices)
    is_first = jnp.concatenate([jnp.ones((1,), bool), ordered[1:] != ordered[:-1]])
    slots = jnp.cumsum(is_first, dtype=jnp.int32) - 1
    # Equal indices share a slot, so a colliding write stores the same number twice.
    unique = (
        jnp.full((capacity,), empty, indices.dtype)
        .at[slots]
        .set(ordered, mode="drop", indices_are_sorted=True)
    )
    # Back to the order of `indices`: moving K integers is cheaper than K rows.
    # The slot that the empty index got is sent out of range.
    slots = jnp.where(ordered == empty, capacity, slots)
    slots = jnp.zeros_like(slots).at[positions].set(slots, unique_indices=True)
    distinct = jnp.sum(is_first & (ordered != empty), dtype=jnp.int32)
    return unique, slots, distinct


def number_slots_in_any_order(
    indices: jax.Array, num_rows: int, capacity: int, row_bytes: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """:func:`number_slots`, the distinct rows in the order in which it is fastest.

    The map is made if it takes no more memory than the K rows of ``row_bytes`` bytes do.
    Cost: O(K) and V integers written, or a sort of K integers.
    """
    num_ids = indices.shape[0]
    most = num_ids * min(ROWS_PER_ID, row_bytes // 4)
    if num_ids < FEW or num_rows > most:
        return number_slots(indices, num_rows, capacity)

    def by_map(indices: jax.Array) -> Any:
        return _number_by_map(indices, num_rows, capacity)

    def by_sort(indices: jax.Array) -> Any:
        return number_slots(indices, num_rows, capacity)

    numbered: tuple[jax.Array, jax.Array, jax.Array] = lax.platform_dependent(
        indices, cpu=by_map, default=by_sort
    )
    return numbered


def _number_by_map(
    indices: jax.Array, num_rows: int, capacity: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The distinct rows in the order of their first occurrence."""
    num_ids = indices.shape[0]
    here = jnp.arange(num_ids, dtype=jnp.int32)
    map_ = jnp.full((num_rows,), num_ids, jnp.int32).at[indices].min(here, mode="drop")
    first = map_.at[indices].get(mode="fill", fill_value=num_ids)
    is_first = first == here
    numbers = jnp.cumsum(is_first, dtype=jnp.int32) - 1
    slots = numbers.at[first].get(mode="fill", fill_value=capacity)
    unique = (
        jnp.full((capacity,), num_rows, indices.dtype)
        .at[jnp.where(is_first, numbers, capacity)]
        .set(indices, mode="drop")
    )
    return unique, slots, jnp.sum(is_first, dtype=jnp.int32)
