"""A step from a large gradient that is summed where it is used.

The distinct rows are stepped some at a time. For each few of them the gradients of their
slots are summed first, in cache, so that the sums need no array ``[K, D]``. Nor does the
update if the parameter is stepped along: that is ``tx.apply``.
Who adds the update himself is given one for each of K slots, however few rows are distinct.

At V = 1e6, D = 128 and 1e5 Zipf ids a step of Adam takes 0.43 of the time of ``fold``'s
with ``tx.apply``, and 0.8 in three calls.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jslices._rows.bounds import take_rows
from jslices._rows.numbering import sort_slots
from jslices.optim._engine.in_place import CHUNK, Kernel, in_chunks, like, step_in_chunks

#: ``source(slots, ids, table)``: the gradients ``[CHUNK, *D]`` of some slots, int32
#: ``[CHUNK]``, which are of the rows ``ids`` of the table (V for empty slots).
Source = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def step_streamed(
    kernel: Kernel,
    indices: jax.Array,
    source: Source,
    values: jax.Array,
    arrays: Sequence[jax.Array],
    reads: int,
) -> tuple[jax.Array, ...]:
    """Runs ``kernel`` on the rows that ``indices`` name.

    Args:
      kernel: the arithmetic; of its update there may be rows of no elements.
      indices: ``[K]``, canonical: in any order, with duplicates and empty slots (V); K is
        at least ``CHUNK``.
      source: the gradient, of slots and rows ``ids`` of the first array as it is by then.
      values: ``[K, *D]``, of which the shape and the dtype count.
      arrays: ``[V, ...]``, of which the first ``reads`` are only read.

    Returns:
      ``(indices, update, *state)``: indices ``[K]``, unique, then V; update ``[K, ...]``,
      zero there.
    """
    count, height = indices.shape[0], arrays[0].shape[0]
    ordered, positions, is_first, number = sort_slots(indices)
    # Where the slots of each distinct row begin; those of the last end at `count`.
    begin = jnp.full((count + CHUNK,), count, jnp.int32)
    begin = begin.at[jnp.where(is_first, number, count + CHUNK)].set(
        jnp.arange(count, dtype=jnp.int32), mode="drop"
    )
    unique = take_rows(ordered, begin[:count], fill_value=height)
    distinct = jnp.sum(unique < height, dtype=jnp.int32)

    def gradient_of(first: jax.Array, *arrays: jax.Array) -> jax.Array:
        """The gradients ``[CHUNK, *D]`` of distinct rows, from number ``first`` on."""

        def add(start: jax.Array, fresh: jax.Array, sums: Any) -> Any:
            cut = lambda x: lax.dynamic_slice_in_dim(x, start, CHUNK)  # noqa: E731
            goal = jnp.where(fresh, cut(number) - first, CHUNK)
            rows = source(cut(positions), cut(ordered), arrays[0])
            return [sums[0].at[goal].add(rows, mode="drop", wrap_negative_indices=False)]

        end, nothing = begin[first + CHUNK], like([values], CHUNK)
        (sums,) = in_chunks(end, count, CHUNK, add, nothing, begin[first])
        return sums

    new = step_in_chunks(
        kernel, unique, values, arrays, reads, distinct, CHUNK, gradient_of
    )
    return (unique, *new)
