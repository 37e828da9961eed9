"""A step from a large gradient with duplicates, in the gradient's own memory.

No second array of the gradient's size is made: the duplicates of a row are added to its
first occurrence, where it stands, and the update overwrites the sum.

At V = 1e6, D = 64 and 4e4 Zipf ids a step of Adam then takes 5 ms instead of 13. Below 4
MB, and for rows of fewer than 128 bytes, the sums are made faster apart.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jslices._rows.bounds import set_rows, take_rows
from jslices._rows.numbering import number_slots
from jslices.optim._engine.arithmetic import per_row
from jslices.optim._engine.in_place import CHUNK, Kernel, in_chunks


def step_folded(
    kernel: Kernel,
    indices: jax.Array,
    values: jax.Array,
    arrays: Sequence[jax.Array],
    reads: int,
) -> tuple[jax.Array, ...]:
    """Runs ``kernel`` on the rows that ``indices`` name.

    Args:
      kernel: the arithmetic; its update has the shape and dtype of the gradient.
      indices: ``[K]``, canonical: in any order, with duplicates and empty slots (V); K is
        at least ``CHUNK``.
      values: ``[K, *D]``, the gradient.
      arrays: ``[V, ...]``, of which the first ``reads`` are only read.

    Returns:
      ``(indices, update, *state)``. Indices ``[K]`` are those given, with V for every
      occurrence but the first; update ``[K, *D]`` is zero there.
    """
    count, height = indices.shape[0], arrays[0].shape[0]
    here = jnp.arange(count, dtype=jnp.int32)
    unique, slots, distinct = number_slots(indices, height, count)
    # Where each distinct row stands first, and that again for each of its occurrences.
    first = jnp.full((count,), count, jnp.int32).at[slots].min(here, mode="drop")
    target = first.at[slots].get(mode="fill", fill_value=count)
    summed = _fold(values, target)
    read, state = arrays[:reads], arrays[reads:]

    def body(start: jax.Array, fresh: jax.Array, carry: Any) -> Any:
        rows, *state = carry
        at = lambda x: lax.dynamic_slice_in_dim(x, start, CHUNK)  # noqa: E731
        ids = jnp.where(fresh, at(unique), height)
        place = jnp.where(fresh, at(first), count)
        gradient = _read(rows, place)
        update, *new = kernel(gradient, *(_read(x, ids) for x in (*read, *state)))
        state = [
            set_rows(x, ids, y.astype(x.dtype)) for x, y in zip(state, new, strict=True)
        ]
        return [set_rows(rows, place, update), *state]

    update, *new_state = in_chunks(distinct, count, CHUNK, body, [summed, *state])
    return (jnp.where(target == here, indices, height), update, *new_state)


def _fold(values: jax.Array, target: jax.Array) -> jax.Array:
    """Adds each row of ``values`` ``[K, *D]`` to the one at ``target`` ``[K]``."""
    count = target.shape[0]
    here = jnp.arange(count, dtype=jnp.int32)

    def body(start: jax.Array, fresh: jax.Array, carry: Any) -> Any:
        (rows,) = carry
        at = lambda x: lax.dynamic_slice_in_dim(x, start, CHUNK)  # noqa: E731
        moves = fresh & (at(target) != at(here))
        goal = jnp.where(moves, at(target), count)
        rows = rows.at[goal].add(at(rows), mode="drop", wrap_negative_indices=False)
        # From the rows as they now are, so that XLA has no older ones to keep a copy of.
        left = jnp.where(per_row(moves, rows), jnp.zeros((), rows.dtype), at(rows))
        return [lax.dynamic_update_slice_in_dim(rows, left, start, 0)]

    (rows,) = in_chunks(count, count, CHUNK, body, [values])
    return rows


def _read(x: jax.Array, ids: jax.Array) -> jax.Array:
    near = jnp.minimum(ids, max(x.shape[0] - 1, 0))
    return take_rows(x, near, mode="promise_in_bounds")
