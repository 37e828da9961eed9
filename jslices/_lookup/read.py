"""Reading rows of a table or of its shards: what every lookup here is made of."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jslices._densify import current_user_line
from jslices._lookup.mark import mark_table
from jslices._lookup.partition import local_rows, num_ids
from jslices._rows.bounds import index_dtype, missing_value, take_rows
from jslices._rows.ids import as_ids, refuse_bad_ids, settle


def read_rows(
    tables: list[jax.Array],
    ids: jax.Array,
    who: str,
    *,
    strategy: str,
    mode: str,
    max_norm: Any = None,
    keep: jax.Array | None = None,
    given: Any = None,
) -> jax.Array:
    """Rows of a table in one or more shards.

    Args:
      tables: the shards, ``[V, *D]`` each.
      ids: ``[*B]`` integers.
      who: the function that speaks.
      strategy: how ids are dealt out over several shards.
      mode: what a bad id reads.
      max_norm: longer rows are scaled down to this norm.
      keep: ``[*B]`` bool; where False the id may be anything, the row is zero and gets
        no gradient.
      given: the ids as the user passed them, for the message of mode ``"check"``; it may
        have another shape, but not another order, and may lack good ids at the end.

    Returns:
      ``[*B, *D]``.
    """
    heights = [table.shape[0] for table in tables]
    count = num_ids(heights, strategy, who, mode)
    index_dtype(count, np.dtype(ids.dtype))  # refuses what ids of 32 bits cannot reach
    if mode == "check":
        given = ids if given is None else given
        exempt = None
        if keep is not None:
            shape = as_ids(given, who).shape
            exempt = (~keep).reshape(-1)[: math.prod(shape)].reshape(shape)
        refuse_bad_ids(given, count, who, "ids", exempt)
    line = current_user_line()
    if jnp.issubdtype(tables[0].dtype, jnp.inexact):
        tables = [mark_table(table, ids.size, line) for table in tables]
    if len(tables) == 1 and keep is None:
        direct = mode if mode in ("clip", "promise_in_bounds") else "fill"
        rows = _take(tables[0], ids, mode=direct)
    else:
        settled = settle(ids, count, mode if mode == "clip" else "drop")
        settled = settled if keep is None else jnp.where(keep, settled, count)
        rows = _read_shards(tables, settled, heights, strategy)
        if keep is not None:
            zero = jnp.zeros((), rows.dtype)
            rows = jnp.where(_along_rows(keep, rows), rows, zero)
    return rows if max_norm is None else clip_rows(rows, tables[0].ndim - 1, max_norm, who)


def _read_shards(
    tables: list[jax.Array], ids: jax.Array, heights: list[int], strategy: str
) -> jax.Array:
    if len(tables) == 1:
        return _take(tables[0], ids)
    rows = missing_value(np.dtype(tables[0].dtype))
    found: Any = jnp.full((*ids.shape, *tables[0].shape[1:]), rows)
    places = local_rows(ids, heights, strategy)
    for table, (own, local) in zip(tables, places, strict=True):
        # A foreign id reads zeros, not NaN: nothing of it can leak into a gradient.
        mine = _take(table, local, fill_value=0)
        found = jnp.where(_along_rows(own, mine), mine, found)
    return found


def _take(table: jax.Array, ids: jax.Array, **how: Any) -> jax.Array:
    rows = take_rows(table, ids, **how)
    if table.shape[0] or not jnp.issubdtype(table.dtype, jnp.inexact):
        return rows
    # A table without rows is not gathered from. A slice of no rows, which adds zero, shows
    # that it was looked up: its gradient is IndexedSlices as well.
    nothing = jax.lax.dynamic_slice_in_dim(table, 0, 0).sum(0)
    return rows + jnp.broadcast_to(nothing, rows.shape)


def _along_rows(mask: jax.Array, rows: jax.Array) -> jax.Array:
    return mask.reshape(*mask.shape, *(1,) * (rows.ndim - mask.ndim))


def clip_rows(rows: jax.Array, row_ndim: int, max_norm: Any, who: str) -> jax.Array:
    """``rows`` ``[*B, *D]``, each scaled down to an L2 norm of at most ``max_norm``."""
    if not jnp.issubdtype(rows.dtype, jnp.inexact):
        raise TypeError(f"{who}(max_norm=...) wants a floating table, got {rows.dtype}")
    if isinstance(max_norm, str) or np.ndim(max_norm):
        raise TypeError(f"{who}(max_norm={max_norm!r}): it must be one number")
    if not isinstance(max_norm, jax.core.Tracer) and not np.asarray(max_norm) >= 0:
        raise ValueError(f"{who}(max_norm={max_norm}): a norm must not be negative or NaN")
    axes = tuple(range(rows.ndim - row_ndim, rows.ndim))
    wide = rows.astype(jnp.promote_types(rows.dtype, jnp.float32))
    squares = jnp.sum(jnp.abs(wide) ** 2, axes, keepdims=True)
    # Rows short enough, zeros among them, never meet the root: its slope is infinite at 0.
    long = squares > jnp.asarray(max_norm, squares.dtype) ** 2
    norms = jnp.sqrt(jnp.where(long, squares, 1))
    return (wide * jnp.where(long, max_norm / norms, 1)).astype(rows.dtype)
