"""Numbering the distinct rows among some indices on a CPU: each gets a number.

The general way sorts the indices. Where the order of the rows is free, the first place of
each is found in a map: one of V integers if the table is small enough, else a hash map of 2
to 8 K integers, in which rows that collide try again with another hash.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jslices import _jax
from jslices._rows.bounds import empty_index

Numbered = tuple[jax.Array, jax.Array, jax.Array]

#: The map of all rows pays off up to so many rows of the table for each index: a step of
#: Adam with 1e5 ids then takes 0.6 to 0.8 of the time, with 1e4 ids 0.7 to 0.9.
ROWS_PER_ID = 32
#: With fewer ids than this a sort is as fast.
FEW = 512
#: The hash map has so many places for each id, or up to twice that. Where rows have fewer
#: than 16 elements half as many do, as fast: the map would be larger than the rows.
SPREAD = 4


def number_rows(indices: jax.Array, num_rows: int | None, capacity: int) -> Numbered:
    """Numbers the distinct rows in their order.

    Args:
      indices: ``[K]``, canonical, K at least 1.
      num_rows: V, or None when unknown.
      capacity: U, how many rows there is room for.

    Returns:
      ``(unique, numbers, distinct)``: the distinct rows ``[U]``, sorted, then the empty
      index; the number of each occurrence, int32 ``[K]``, U or more where it has none; how
      many distinct rows there are, int32 ``[]``.

    Cost: a sort of K integers.
    """
    empty = empty_index(num_rows, indices.dtype)
    ordered, positions = sort_ids(indices)
    is_first = jnp.concatenate([jnp.ones((1,), bool), ordered[1:] != ordered[:-1]])
    numbers = jnp.cumsum(is_first, dtype=jnp.int32) - 1
    # Equal indices share a number, so writes that collide store the same row.
    unique = (
        jnp.full((capacity,), empty, indices.dtype)
        .at[numbers]
        .set(ordered, mode="drop", indices_are_sorted=True)
    )
    # Back to the order of `indices`: moving K integers is cheaper than moving K rows.
    # The empty index got a number as well, which is sent out of range.
    numbers = jnp.where(ordered == empty, capacity, numbers)
    numbers = jnp.zeros_like(numbers).at[positions].set(numbers, unique_indices=True)
    distinct = jnp.sum(is_first & (ordered != empty), dtype=jnp.int32)
    return unique, numbers, distinct


def number_rows_in_any_order(
    indices: jax.Array, num_rows: int, capacity: int, row_bytes: int
) -> Numbered:
    """:func:`number_rows`, with the distinct rows in whatever order is fastest on a CPU.

    ``row_bytes`` is the size of a row: the map takes about as much memory as K rows.
    Cost: O(K), plus V integers written if V is small; or a sort of K integers.
    """
    num_ids, elements = indices.shape[0], row_bytes // 4
    if not _jax.definitely(lambda: num_ids >= FEW):
        return number_rows(indices, num_rows, capacity)
    # The map may take as much memory as the rows, or twice that where they are short.
    room = max(elements, min(2 * elements, 16))
    spread = SPREAD if elements >= 16 else SPREAD // 2
    if _jax.definitely(lambda: num_rows <= num_ids * min(ROWS_PER_ID, room)):
        first = _by_map(indices, num_rows)
    else:
        first = _by_hash(indices, num_rows, spread)
    return _number_firsts(indices, first, num_rows, capacity)


def _by_map(indices: jax.Array, num_rows: int) -> jax.Array:
    """Where each row occurs first: int32 ``[K]``, K for the empty index."""
    count = indices.shape[0]
    here = jnp.arange(count, dtype=jnp.int32)
    places = jnp.full((num_rows,), count, jnp.int32).at[indices].min(here, mode="drop")
    return places.at[indices].get(mode="fill", fill_value=count)


def _by_hash(indices: jax.Array, num_rows: int, spread: int) -> jax.Array:
    """The same. Rows that collide try again: 1e5 random ids need three rounds.

    Each round settles the first row in every place, hence the loop ends.
    """
    count = indices.shape[0]
    bits = (spread * count - 1).bit_length()
    here = jnp.arange(count, dtype=jnp.int32)
    unknown = count + 1
    key = indices.astype(jnp.uint32)
    if indices.dtype.itemsize == 8:
        key ^= (indices >> 32).astype(jnp.uint32) * jnp.uint32(0x85EBCA6B)

    def again(carry: Any) -> Any:
        first, multiplier = carry
        # Multiplicative hashing (Knuth): the high bits of a product with an odd number.
        place = (key * multiplier >> (32 - bits)).astype(jnp.int32)
        searching = first == unknown
        winner = (
            jnp.full((1 << bits,), count, jnp.int32)
            .at[jnp.where(searching, place, 1 << bits)]
            .min(here, mode="drop")
            .at[place]
            .get(mode="promise_in_bounds")
        )
        named = indices.at[jnp.minimum(winner, count - 1)].get(mode="promise_in_bounds")
        first = jnp.where(searching & (named == indices), winner, first)
        return first, multiplier + jnp.uint32(0x5BD1E996)

    start = jnp.where(indices < num_rows, unknown, count).astype(jnp.int32)
    searching = lambda carry: jnp.any(carry[0] == unknown)  # noqa: E731
    return lax.while_loop(searching, again, (start, jnp.uint32(2654435769)))[0]


def _number_firsts(
    indices: jax.Array, first: jax.Array, num_rows: int, capacity: int
) -> Numbered:
    """Numbers the distinct rows in the order of their first occurrences ``[K]``."""
    is_first = first == jnp.arange(indices.shape[0], dtype=jnp.int32)
    counted = jnp.cumsum(is_first, dtype=jnp.int32) - 1
    numbers = counted.at[first].get(mode="fill", fill_value=capacity)
    unique = (
        jnp.full((capacity,), num_rows, indices.dtype)
        .at[jnp.where(is_first, counted, capacity)]
        .set(indices, mode="drop")
    )
    return unique, numbers, jnp.sum(is_first, dtype=jnp.int32)


@jax.jit
def sort_ids(ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sorts non-negative ``ids`` along the last axis, fast on every platform.

    XLA:CPU sorts one 64-bit operand about five times as fast as two of 32 bits, so there
    the row number and its position are packed into one integer. Most programs run without
    64-bit types, hence a primitive: the packing exists only in its lowering for a CPU, and
    no transformation meets a 64-bit value. Elsewhere two operands are sorted (on a GPU
    that is a radix sort).

    Args:
      ids: ``[..., K]`` int32 or int64, none negative.

    Returns:
      ``(sorted, positions)``, both ``[..., K]``: ``sorted[k] == ids[positions[k]]``,
      equal ids in their original order; positions are int32. Cost: O(K log K).
    """
    ordered, positions = sort_ids_p.bind(ids)
    return ordered, positions


def _two_operands(ids: jax.Array) -> Sequence[jax.Array]:
    positions = lax.broadcasted_iota(jnp.int32, ids.shape, ids.ndim - 1)
    return lax.sort((ids, positions), dimension=ids.ndim - 1, num_keys=1)


def _packed(ids: jax.Array) -> Sequence[jax.Array]:
    if ids.dtype != jnp.int32:
        return _two_operands(ids)
    with jax.enable_x64(True):
        positions = lax.broadcasted_iota(jnp.int64, ids.shape, ids.ndim - 1)
        keys = lax.sort((ids.astype(jnp.int64) << 32) | positions)
        low = (keys & 0xFFFFFFFF).astype(jnp.int32)
        return [(keys >> 32).astype(jnp.int32), low]


def _abstract(ids: jax.core.ShapedArray) -> Sequence[jax.core.ShapedArray]:
    return [ids.update(weak_type=False), ids.update(dtype=np.int32, weak_type=False)]


def _batch(
    args: Sequence[jax.Array], dims: Sequence[int]
) -> tuple[Sequence[jax.Array], Sequence[int]]:
    (ids,), (dim,) = args, dims
    return sort_ids_p.bind(jnp.moveaxis(ids, dim, 0)), (0, 0)


sort_ids_p = Primitive("sort_ids")
sort_ids_p.multiple_results = True
sort_ids_p.def_abstract_eval(_abstract)
sort_ids_p.def_impl(_two_operands)
batching.primitive_batchers[sort_ids_p] = _batch
mlir.register_lowering(sort_ids_p, mlir.lower_fun(_two_operands))
mlir.register_lowering(sort_ids_p, mlir.lower_fun(_packed), platform="cpu")
