"""Picking some rows out of many, exactly or into a static number of slots."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jslices._rows.bounds import index_dtype, take_rows
from jslices._rows.check import known_int


def kept_positions(keep: jax.Array, size: int | None, who: str) -> tuple[Any, Any]:
    """Where ``keep`` ``[K]`` is True, in order.

    Returns:
      ``(positions, too_many)``: positions ``[U]``, K in unused slots. ``size`` is U; None
      means exactly as many as there are, or K under jit, where that is not known. Of
      concrete ``keep`` too many are refused; else ``too_many`` tells of them.
    """
    count = keep.shape[0]
    if size is not None:
        size = known_int(
            size, f"{who} wants size as an int known before tracing, got {size!r}"
        )
    if size is not None and size < 0:
        raise ValueError(f"{who}(size={size}): size must not be negative")
    if isinstance(keep, jax.core.Tracer):
        capacity = count if size is None else size
        # V may be more than int32 holds, and is the empty slot.
        dtype = index_dtype(count, np.dtype(np.int32))
        slots = jnp.where(keep, jnp.cumsum(keep, dtype=dtype) - 1, capacity)
        places = jnp.full((capacity,), count, dtype)
        places = places.at[slots].set(jnp.arange(count, dtype=dtype), mode="drop")
        return places, jnp.sum(keep) > capacity
    found = np.flatnonzero(np.asarray(keep))
    if size is not None and len(found) > size:
        raise ValueError(
            f"{who}(size={size}): {len(found)} rows do not fit; pass size={len(found)} or "
            "more, or leave size out"
        )
    unused = 0 if size is None else size - len(found)
    found = np.pad(found, (0, unused), constant_values=count)
    return jnp.asarray(found.astype(index_dtype(count, np.dtype(np.int32)))), False


def pick(rows: jax.Array, positions: jax.Array, too_many: Any) -> jax.Array:
    """``rows`` ``[K, *D]`` at ``positions``; zeros in unused slots, NaN if too many."""
    picked = take_rows(rows, positions, fill_value=0)
    if too_many is False or not jnp.issubdtype(rows.dtype, jnp.inexact):
        return picked
    return jnp.where(too_many, jnp.array(jnp.nan, rows.dtype), picked)


def nonzero_rows(x: jax.Array, size: int | None) -> tuple[jax.Array, jax.Array]:
    """The rows of ``x`` ``[V, *D]`` that are not all 0, and their numbers."""
    if x.ndim < 1:
        raise ValueError("from_dense wants an array [V, *D], got a scalar")
    keep = jnp.any(x != 0, tuple(range(1, x.ndim)))
    positions, too_many = kept_positions(keep, size, "from_dense")
    return pick(x, positions, too_many), positions
