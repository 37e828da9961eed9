"""Permute ids so that shards receive equal load."""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jslices._arguments import Number
from jslices._place.boundary import like_first, on_any_mesh
from jslices._rows.access import index_dtype
from jslices._rows.ids import as_ids


def spread_ids(
    ids: ArrayLike, num_rows: int, shards: int = 4096, *, inverse: bool = False
) -> jax.Array:
    """The rows of a table for ids whose neighbours are about as frequent.

    Ids are mostly numbered by frequency, the most frequent first. If a table is split by
    rows, nearly all requests then go to the first device. This permutation of ``[0, V)``
    puts neighbours into different ones of ``shards`` parts, and neighbours among the parts
    far apart, so that every device holds rare rows and frequent ones. It does not depend on
    the number of devices, so that a checkpoint can be restored on another.

    Look up ``table[js.spread_ids(ids, V)]`` wherever you would ``table[ids]``. The table in
    the order of ids is ``table[js.spread_ids(jnp.arange(V), V)]``. What goes by row numbers
    (``freeze_rows``, ``scale``) gets rows of the table, whose ids ``inverse`` tells.

    Args:
      ids: ``[...]`` integers, NumPy's or JAX's, under ``jit`` and ``vmap`` too. Ids outside
        ``[0, V)`` stay as they are; negative ids do not wrap.
      num_rows: V, all rows of the table, with those that :func:`jslices.padded_rows` added.
      shards: the largest number of devices to spread ids over; never change it for a table.
      inverse: takes rows instead, and returns the id of each.

    Returns:
      ``[...]`` int32, int64 where ``ids`` are or V needs it; distinct for distinct ids.

    Raises:
      InvalidArgumentError: for a negative V or ``shards`` below 1.
      TypeError: if ``ids``, V or ``shards`` are not integers.
      ValueError: if V needs 64 bits and these are switched off.

    Cost: K reads from an array of ``shards`` numbers; for ``inverse`` a search in it.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> js.spread_ids(jnp.arange(8), 16, shards=4)
      Array([ 0,  8,  4, 12,  1,  9,  5, 13], dtype=int32)
      >>> js.spread_ids(jnp.array([8, 16, -1]), 16, shards=4, inverse=True)
      Array([ 1, 16, -1], dtype=int32)

    Source: TensorFlow's ``partition_strategy="mod"``, which depends on the number of parts;
    here there are ``shards`` of them, in the order of van der Corput's sequence.
    """
    Number(at_least=0, integer=True).check("spread_ids", "num_rows", num_rows)
    Number(at_least=1, integer=True).check("spread_ids", "shards", shards)
    num_rows, shards = operator.index(num_rows), operator.index(shards)
    numbers = as_ids(ids, "spread_ids")
    dtype = index_dtype(num_rows, np.dtype(numbers.dtype))
    find = _ids if inverse else _rows

    @on_any_mesh(like_first)
    def moved(x: jax.Array) -> jax.Array:
        x = x.astype(dtype)
        in_range = (x >= 0) & (x < num_rows)
        return jnp.where(in_range, find(jnp.where(in_range, x, 0), num_rows, shards), x)

    return moved(numbers)


def _rows(ids: jax.Array, num_rows: int, shards: int) -> jax.Array:
    first = np.empty((shards,), ids.dtype)
    order, starts = _parts(num_rows, shards)
    first[order] = starts
    return jnp.asarray(first)[ids % shards] + ids // shards


def _ids(rows: jax.Array, num_rows: int, shards: int) -> jax.Array:
    order, starts = (jnp.asarray(x.astype(rows.dtype)) for x in _parts(num_rows, shards))
    part = jnp.searchsorted(starts, rows, side="right") - 1
    return (rows - starts[part]) * shards + order[part]


@functools.lru_cache(maxsize=32)
def _parts(num_rows: int, shards: int) -> tuple[Any, Any]:
    """The remainders of ids by ``shards`` in the order of their parts, and each start."""
    parts = np.arange(shards)
    bits = max((shards - 1).bit_length(), 1)
    backwards = sum(((parts >> n) & 1) << (bits - 1 - n) for n in range(bits))
    order = np.argsort(backwards)
    sizes = num_rows // shards + (order < num_rows % shards)
    return order, np.cumsum(sizes) - sizes
