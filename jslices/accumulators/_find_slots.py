"""Where the rows of a gradient go among those that are held, in one sort."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jslices._rows.numbering import sort_ids


class Found(NamedTuple):
    """The slots of a gradient's K indices among U that are held.

    Attributes:
      slots: int32 ``[K]``, the slot of each index; of no meaning for an empty one.
      rows: ``[U + K]``, the held rows and those of the gradient, ascending.
      row_slots: int32 ``[U + K]``, the slot of each of ``rows``.
      is_new: bool ``[U + K]``, true once for every row that was not held.
      is_held: bool ``[U + K]``, true once for every row of the gradient.
      used: int32 ``[]``, the slots used with the new ones; may be more than there are.
    """

    slots: jax.Array
    rows: jax.Array
    row_slots: jax.Array
    is_new: jax.Array
    is_held: jax.Array
    used: jax.Array


def find_slots(held: jax.Array, indices: jax.Array, empty: int) -> Found:
    """Finds the slot of every index, giving new rows the next free ones.

    Args:
      held: ``[U]``, unique but for the slots that are free, which come last.
      indices: ``[K]`` of the same dtype, with duplicates and empty ones.
      empty: what free slots and empty indices hold; larger than every row number.

    Cost: a sort of U + K integers.
    """
    capacity, num_ids = held.shape[0], indices.shape[0]
    before = jnp.sum(held != empty, dtype=jnp.int32)
    rows, positions = sort_ids(jnp.concatenate([held, indices]))
    # The sort is stable: of equal numbers the held one, if any, comes first.
    is_first = jnp.concatenate([jnp.ones(1, bool), rows[1:] != rows[:-1]])
    place = jnp.arange(capacity + num_ids, dtype=jnp.int32)
    first = positions[lax.cummax(jnp.where(is_first, place, 0))]
    from_grad = (positions >= capacity) & (rows != empty)
    is_new = is_first & from_grad
    after_held = jnp.concatenate([jnp.zeros(1, bool), positions[:-1] < capacity])
    number = jnp.cumsum(is_new, dtype=jnp.int32)
    row_slots = jnp.where(first < capacity, first, before + number - 1)
    to = jnp.where(from_grad, positions - capacity, num_ids)
    slots = jnp.zeros(num_ids, jnp.int32).at[to].set(row_slots, mode="drop")
    is_held = from_grad & (is_first | after_held)
    return Found(slots, rows, row_slots, is_new, is_held, before + number[-1])
