"""A step from a gradient of nearly as many rows as the table has: all rows at once.

Finding the distinct rows costs a sort, and reaching each of them a jump. When half of the
table is named, one pass over all of it is faster than both. Rows that the gradient does
not name keep what they have, as everywhere.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jslices._coalesce import add_by_slot
from jslices._slices import IndexedSlices
from jslices.optim.in_place import Kernel
from jslices.optim.select_rows import where_rows

#: Of a pass over all rows, LLVM leaves only those of so many elements scalar.
NARROW = range(2, 9)


@jax.tree_util.register_pytree_with_keys_class
class EveryRow(IndexedSlices):
    """IndexedSlices of V slots in which slot v is row v, or empty.

    As the type says so, adding them takes no scatter, only one pass over the array.
    """


def step_whole(
    kernel: Kernel,
    indices: jax.Array,
    values: jax.Array,
    height: int,
    arrays: Sequence[jax.Array],
    reads: int,
    still: bool,
) -> tuple[jax.Array, ...]:
    """Runs ``kernel`` on all rows, and keeps what it did to those that ``indices`` name.

    Args:
      kernel: the arithmetic.
      indices: ``[K]``, canonical: in any order, with duplicates and empty slots (V).
      values: ``[K, *D]``, the gradient.
      height: V.
      arrays: ``[V, ...]``, of which the first ``reads`` are only read.
      still: whether a row whose gradient is zero keeps all it has.

    Returns:
      ``(indices, update, *state)``: indices ``[V]``, each row's own or V where it is not
      named; update ``[V, *D]``, zero there.
    """
    named = jnp.zeros((height,), bool).at[indices].set(True, mode="drop")
    update, *new = kernel(add_by_slot(values, indices, height), *arrays)
    if not still:
        update = where_rows(named, update, jnp.zeros((), update.dtype), NARROW)
        new = [
            where_rows(named, x, old.astype(x.dtype), NARROW)
            for old, x in zip(arrays[reads:], new, strict=True)
        ]
    state = [x.astype(old.dtype) for old, x in zip(arrays[reads:], new, strict=True)]
    every = jnp.arange(height, dtype=indices.dtype)
    return (jnp.where(named, every, height), update, *state)
