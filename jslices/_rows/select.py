"""Selecting rows: some of one array and the rest of another, or those that a mask keeps."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jslices._rows.bounds import index_dtype, take_rows
from jslices._rows.ids import known_int

#: A select by one bool for each row is slow for rows of so many elements: LLVM unrolls the
#: loop over such a row, finds no vector form for the selects, and everything that XLA
#: fused with them stays scalar. An update of Adagrad takes 49 us for 2,048 rows of 8, and
#: 9 without the select; for rows of 16 it takes 93 and 33 (jax 0.10.2 and 0.12). Comparing
#: the number of each element with that of the first one not wanted costs next to nothing.
UNROLLED = range(2, 24)
_INT32_ELEMENTS = 2**31


def per_row(numbers: jax.Array, like: jax.Array) -> jax.Array:
    """``[n]`` as ``[n, 1, ...]``: one number for each row of ``like`` ``[n, *D]``."""
    return numbers.reshape(numbers.shape + (1,) * (jnp.ndim(like) - numbers.ndim))


def where_rows(wanted: jax.Array, rows: jax.Array, rest: jax.Array) -> jax.Array:
    """``jnp.where`` with one bool for each row.

    Args:
      wanted: bool ``[n]``.
      rows: ``[n, *D]``.
      rest: an array that broadcasts to that.

    Returns:
      ``[n, *D]``: the wanted ones of ``rows``, and ``rest``. Rows that are not selected may
      hold anything, NaN included.
    """
    length = math.prod(rows.shape[1:])
    if length not in UNROLLED:
        return jnp.where(per_row(wanted, rows), rows, rest)
    number = lax.broadcasted_iota(jnp.int32, (rows.shape[0], length), 1)
    stop = jnp.where(wanted, jnp.int32(length), jnp.int32(0))
    return jnp.where(number.reshape(rows.shape) < per_row(stop, rows), rows, rest)


def leading(rows: jax.Array, count: jax.Array, rest: jax.Array | None = None) -> jax.Array:
    """The first ``count`` rows of ``rows``, then those of ``rest``.

    Args:
      rows: ``[n, *D]``.
      count: integer ``[]``; 0 or less for none, n or more for all.
      rest: ``[n, *D]`` of the same dtype, or None for zeros.

    Returns:
      ``[n, *D]``. Rows that are not selected may hold anything, NaN included.
    """
    length = math.prod(rows.shape[1:])
    number = lax.broadcasted_iota(jnp.int32, rows.shape, 0)
    stop = jnp.clip(count, 0, rows.shape[0]).astype(jnp.int32)
    if length in UNROLLED and rows.size < _INT32_ELEMENTS:
        number = lax.broadcasted_iota(jnp.int32, (rows.shape[0], length), 0) * length
        number += lax.broadcasted_iota(jnp.int32, number.shape, 1)
        number, stop = number.reshape(rows.shape), stop * length
    zero = jnp.zeros((), rows.dtype)
    return jnp.where(number < stop, rows, zero if rest is None else rest)


def kept_positions(keep: jax.Array, size: int | None, caller: str) -> tuple[Any, Any]:
    """Where ``keep`` is True, in order.

    Args:
      keep: bool ``[K]``.
      size: U, the static number of positions; None for exactly as many as there are, or K
        under jit, where that is not known.
      caller: the public function, for messages.

    Returns:
      ``(positions, too_many)``: integers ``[U]``, K in unused entries; whether U were too
      few, which under jit is a bool ``[]`` and otherwise an error.
    """
    count = keep.shape[0]
    if size is not None:
        size = known_int(
            size, f"{caller} wants size as an int known before tracing, got {size!r}"
        )
    if size is not None and size < 0:
        raise ValueError(f"{caller}(size={size}): size must not be negative")
    # K itself marks an unused entry, and a table may have more rows than int32 can count.
    dtype = index_dtype(count, np.dtype(np.int32))
    if isinstance(keep, jax.core.Tracer):
        capacity = count if size is None else size
        entries = jnp.where(keep, jnp.cumsum(keep, dtype=dtype) - 1, capacity)
        positions = jnp.full((capacity,), count, dtype)
        positions = positions.at[entries].set(jnp.arange(count, dtype=dtype), mode="drop")
        return positions, jnp.sum(keep) > capacity
    found = np.flatnonzero(np.asarray(keep))
    if size is not None and len(found) > size:
        raise ValueError(
            f"{caller}(size={size}): {len(found)} rows do not fit; pass size={len(found)} "
            "or more, or leave size out"
        )
    unused = 0 if size is None else size - len(found)
    found = np.pad(found, (0, unused), constant_values=count)
    return jnp.asarray(found.astype(dtype)), False


def pick(rows: jax.Array, positions: jax.Array, too_many: Any) -> jax.Array:
    """``rows`` ``[K, *D]`` at ``positions``: zeros where unused, all NaN if too many."""
    picked = take_rows(rows, positions, fill_value=0)
    if too_many is False or not jnp.issubdtype(rows.dtype, jnp.inexact):
        return picked
    return jnp.where(too_many, jnp.array(jnp.nan, rows.dtype), picked)
