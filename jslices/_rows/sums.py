"""Summing the rows that share an index, in an order that is the same every time.

A CPU gives each distinct row a number, at which its occurrences are added one after the
other. If the order of the rows is free, that is the entry at which it first occurs, looked
up in a hash map, as XLA:CPU sorts slowly. On other platforms the hardware orders additions
to one place as it likes, so there the indices are sorted, and the rows of each run of equal
indices are summed by blocks (:func:`sums_of_runs`). Then no two floating numbers are
written to one place.

On a CPU a sort of 1e5 ids packed with their positions takes 3.8 ms, one of two operands 18
to 21. On an H100 a sort takes 57 of 85 us of Adam's step with 1e4 ids. What was tried
instead is in docs/decisions.md. Begin with :func:`sum_duplicates`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jslices import _jax
from jslices._arguments import OneOf
from jslices._rows import access

#: From the number of occurrences to the divisor of their sum.
Divisor = Callable[[jax.Array], jax.Array]

COMBINERS: dict[str, Divisor | None] = {
    "sum": None,
    "mean": lambda n: n,
    "sqrtn": jnp.sqrt,
}
COMBINER = OneOf(*COMBINERS)

#: The order of distinct rows: sorted, or free, with empty entries at the end or anywhere.
Order = Literal["sorted", "packed", "any"]

#: The hash map has so many places for each id: then 1e5 random ids need three rounds.
PLACES_PER_ID = 4

#: Entries of a run are summed within blocks of so many. At most so many make one block: its
#: work is their square (on an H100, of 625 blocks of 64 numbers a fifth of Adam's step).
BLOCK, ONE_BLOCK = 16, 256


def sum_duplicates(
    values: jax.Array,
    indices: jax.Array,
    num_rows: int | None,
    size: int | None,
    combine: str = "sum",
    order: Order = "sorted",
    on_cpu: bool | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sums the rows that share an index.

    Args:
      values: ``[K, *D]`` of any dtype; 16-bit floats are summed in float32, rounded once.
      indices: ``[K]`` of any integer dtype; those out of range are dropped.
      num_rows: V, or None when unknown.
      size: U, the static number of entries returned; None: ``min(K, V)``, always enough.
      combine: a key of ``COMBINERS``.
      order: the order of the rows; ``"any"`` is fastest.
      on_cpu: whether a CPU will run it, if that is known.

    Returns:
      ``(values [U, *D], indices [U], distinct [])``: distinct rows and empty entries (index
      V, zero values). ``distinct``, int32, counts all distinct rows, even those beyond U.

    Raises:
      ValueError: if more than ``size`` distinct rows are present and the indices are
        concrete. Under jit, where nothing can be raised, floating values become NaN, which
        then shows in the loss.

    Cost: a sort of K integers (on a CPU, unless the rows are sorted, a few passes over
    them), one pass over ``[K, *D]`` and one over ``[U, *D]``.
    """
    num_ids = indices.shape[0]
    enough = access.room_for_distinct(num_ids, num_rows)
    capacity = enough if size is None else size
    if capacity < 0:
        raise ValueError(f"coalesce(size={size}): size must not be negative")
    how = num_rows, capacity, combine, order, on_cpu
    unique, summed, distinct = _sum_duplicates(values, indices, *how)
    if capacity != enough and not access.is_below(enough, capacity):
        summed = _refuse_overflow(summed, distinct, capacity)
    return summed, unique, distinct


# Traced once for all gradients of one shape, and one program outside ``jax.jit``.
@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5, 6))
def _sum_duplicates(
    values: jax.Array,
    indices: jax.Array,
    num_rows: int | None,
    capacity: int,
    combine: str,
    order: Order,
    on_cpu: bool | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """``(indices [U], sums [U, *D], distinct [])``, whether they fit or not."""
    num_ids = indices.shape[0]
    indices = indices.astype(access.index_dtype(num_rows, np.dtype(indices.dtype)))
    empty = access.empty_index(num_rows, indices.dtype)
    if num_ids == 0 or capacity == 0:
        named = access.canonical_indices(indices, num_rows) != empty
        distinct = jnp.any(named).astype(jnp.int32)
        unique = jnp.full((capacity,), empty, indices.dtype)
        summed = jnp.zeros((capacity, *values.shape[1:]), values.dtype)
    else:
        divisor = COMBINERS[combine]
        how = capacity, divisor, order
        in_turn = functools.partial(_in_turn, num_rows, *how)
        by_runs = functools.partial(_by_runs, jnp.array(empty, indices.dtype), *how)
        elsewhere = in_turn if _jax.is_symbolic(num_ids) else by_runs
        if on_cpu is not None:
            return (in_turn if on_cpu else elsewhere)(indices, values)
        ways = {"cpu": in_turn, "default": elsewhere}
        unique, summed, distinct = lax.platform_dependent(indices, values, **ways)
    return unique, summed, distinct


def _in_turn(
    num_rows: int | None,
    capacity: int,
    divisor: Divisor | None,
    order: Order,
    indices: jax.Array,
    values: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Each row is added to those before it, at the number of its index."""
    indices = access.canonical_indices(indices, num_rows)
    if order == "sorted" or num_rows is None or _jax.is_symbolic(indices.shape[0]):
        unique, numbers, distinct = number_rows(indices, num_rows, capacity)
    else:
        packed = order == "packed" or access.is_below(capacity, indices.shape[0])
        unique, numbers, distinct = number_by_first(indices, num_rows, capacity, packed)
    wide = widened(values)
    zeros = access.late_zeros((capacity, *values.shape[1:]), wide.dtype, numbers)
    (zeros,) = _jax.as_varying_as([wide], zeros)  # JAX adds no rows without elements
    summed = zeros.at[numbers].add(wide, **access.DROP)
    if divisor is not None:
        # Counted in integers: exact beyond 2^24 occurrences.
        counts = jnp.zeros((capacity,), jnp.int32).at[numbers].add(1, **access.DROP)
        summed = _divided(summed, jnp.maximum(counts, 1), divisor)
    return unique, summed.astype(values.dtype), distinct


# Traced once for all tables, of whatever height.
@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _by_runs(
    empty: jax.Array,
    capacity: int,
    divisor: Divisor | None,
    order: Order,
    indices: jax.Array,
    values: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The indices are sorted, and the rows of equal ones summed.

    Each sum is where its row occurs first among the sorted indices, and the other entries
    are empty: in any order there is nothing to move.
    """
    ordered, positions = sort_ids(indices)
    summed = sums_of_runs(ordered, _in_order(widened(values), positions))
    if divisor is not None:
        counts = sums_of_runs(ordered, jnp.ones(ordered.shape, jnp.int32))
        summed = _divided(summed, counts, divisor)
    named, unique = _first_of_runs(ordered, empty)
    summed = access.where_rows(named, summed).astype(values.dtype)
    distinct = jnp.sum(named, dtype=jnp.int32)
    if order != "any" or access.is_below(capacity, indices.shape[0]):
        numbers = jnp.cumsum(named, dtype=jnp.int32) - 1
        numbers = jnp.where(named, jnp.minimum(numbers, capacity), capacity)

        def in_front(rows: jax.Array, rest: jax.Array | int) -> jax.Array:
            all_empty = jnp.full((capacity, *rows.shape[1:]), rest, rows.dtype)
            return access.set_rows(all_empty, numbers, rows)

        unique, summed = in_front(unique, empty), in_front(summed, 0)
    return unique, summed, distinct


def _first_of_runs(ordered: jax.Array, empty: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Which sorted indices are the first of their row, and these, the others empty."""
    named = starts_of_runs(ordered) & (ordered >= 0) & (ordered < empty)
    return named, jnp.where(named, ordered, empty)


def add_rows(
    table: jax.Array, indices: jax.Array, rows: jax.Array, distinct: bool = False
) -> jax.Array:
    """``table`` with ``rows`` added at ``indices``: duplicates add, empty entries drop.

    Args:
      table: ``[V, *D]``; several of its axes may number the rows.
      indices: ``[K]`` of any integer dtype.
      rows: ``[K, *D]``, cast to the dtype of ``table``.
      distinct: whether no row is known to be named twice.

    In place when ``table`` is donated. Cost: one scatter of ``K * D`` elements; if rows may
    be named twice, and except on a CPU, also a sort of K integers and about two passes over
    ``K * D`` elements.
    """
    rows = rows.astype(table.dtype)
    if distinct:
        return access.add_distinct_rows(table, indices, rows)
    indices = access.canonical_indices(indices, access.height_of(table, rows))

    def in_turn(table: jax.Array, indices: jax.Array, rows: jax.Array) -> jax.Array:
        at = access.places_of(table, indices, rows)
        return at.add(rows, **access.DROP)  # type: ignore[no-any-return]

    def by_runs(table: jax.Array, indices: jax.Array, rows: jax.Array) -> jax.Array:
        empty = jnp.array(access.height_of(table, rows), indices.dtype)
        indices, rows, _ = _by_runs(empty, indices.shape[0], None, "any", indices, rows)
        return access.add_distinct_rows(table, indices, rows)

    inexact = jnp.issubdtype(table.dtype, jnp.inexact)
    if not inexact or _jax.is_symbolic(indices.shape[0]) or indices.shape[0] < 2:
        return in_turn(table, indices, rows)
    operands = table, indices, rows
    return lax.platform_dependent(*operands, cpu=in_turn, default=by_runs)  # type: ignore[no-any-return]


@jax.jit
def sums_of_runs(ids: jax.Array, rows: jax.Array) -> jax.Array:
    """For each entry the sum of its row and the later ones of its run.

    Args:
      ids: ``[n]``; a run is neighbours that are equal, and no two runs are of one id.
      rows: ``[n, *D]``.

    The order of the additions depends on ``ids`` alone. Cost: about two passes over
    ``n * D`` elements.
    """
    count, shape = rows.shape[0], rows.shape[1:]
    width = count if count <= ONE_BLOCK else BLOCK
    blocks = -(-count // width)
    beyond = blocks * width - count
    # Zeros are added at the end.
    ids = jnp.pad(ids, (0, beyond)).reshape(blocks, width)
    rows = jnp.pad(rows, ((0, beyond), *((0, 0),) * len(shape)))
    rows = rows.reshape(blocks, width, *shape)
    square = (1, width, width)
    later = lax.broadcasted_iota(int, square, 1) <= lax.broadcasted_iota(int, square, 2)
    in_run = (ids[:, :, None] == ids[:, None, :]) & later
    sums = jnp.sum(access.where_rows(in_run, rows[:, None]), 2, dtype=rows.dtype)
    if blocks > 1:
        # The rest, in later blocks, of the run that does not end in this one.
        first = ids[:, 0]
        follow = sums_of_runs(first, sums[:, 0])[1:]
        goes_on = ids[:-1] == first[1:, None]
        follow = access.where_rows(goes_on, follow[:, None])
        sums = sums + jnp.pad(follow, ((0, 1), *((0, 0),) * (sums.ndim - 1)))
    return sums.reshape(blocks * width, *shape)[:count]


@jax.custom_jvp
def _in_order(rows: jax.Array, positions: jax.Array) -> jax.Array:
    """All of ``rows``, in another order; with its own derivative, as it is not a lookup."""
    return rows.at[positions].get(mode="promise_in_bounds", unique_indices=True)


@_in_order.defjvp
def _(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    return _in_order(*primals), _in_order(tangents[0], primals[1])


def starts_of_runs(ids: jax.Array) -> jax.Array:
    """Which of ``ids`` ``[n]``, n at least 1, differ from the one before: bool ``[n]``."""
    return jnp.concatenate([jnp.ones((1,), bool), ids[1:] != ids[:-1]])


def widened(values: jax.Array) -> jax.Array:
    """Values in the dtype in which they are summed."""
    dtype = sum_dtype(values.dtype)
    return values if dtype == values.dtype else values.astype(dtype)


def sum_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype of sums: float32 for 16-bit floats, so that these are rounded once."""
    narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    return np.dtype(np.float32 if narrow else dtype)


def _divided(summed: jax.Array, counts: jax.Array, divisor: Divisor) -> jax.Array:
    weight = divisor(counts.astype(jnp.finfo(summed.dtype).dtype))
    return summed / access.per_row(weight, summed)


def _refuse_overflow(summed: jax.Array, distinct: jax.Array, size: int) -> jax.Array:
    if not isinstance(distinct, jax.core.Tracer):
        if distinct > size:
            raise ValueError(
                f"coalesce(size={size}): {int(distinct)} distinct rows do not fit; "
                f"pass size={int(distinct)} or more, or leave size out"
            )
        return summed
    if not jnp.issubdtype(summed.dtype, jnp.inexact):
        return summed
    return jnp.where(distinct > size, jnp.array(jnp.nan, summed.dtype), summed)


# --- numbering distinct rows ---


def number_rows(
    indices: jax.Array, num_rows: int | None, capacity: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
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
    empty = access.empty_index(num_rows, indices.dtype)
    ordered, positions = sort_ids(indices)
    is_first = starts_of_runs(ordered)
    numbers = jnp.cumsum(is_first, dtype=jnp.int32) - 1
    # Equal indices share a number, so writes that collide store the same row.
    unique = jnp.full((capacity,), empty, indices.dtype)
    unique = unique.at[numbers].set(ordered, indices_are_sorted=True, **access.DROP)
    # Back to the order of `indices`: moving K integers is cheaper than moving K rows.
    # The empty index got a number as well, which is sent out of range.
    numbers = jnp.where(ordered == empty, capacity, numbers)
    numbers = jnp.zeros_like(numbers).at[positions].set(numbers, unique_indices=True)
    distinct = jnp.sum(is_first & (ordered != empty), dtype=jnp.int32)
    return unique, numbers, distinct


def number_by_runs(indices: jax.Array, num_rows: int) -> tuple[jax.Array, jax.Array]:
    """:func:`number_rows`, with the distinct rows where they first occur when sorted.

    That is where sums over runs have them. Without the count: ``(unique [K], numbers
    [K])``, where empty entries have any number in ``[0, K)``.
    """
    indices = indices.astype(access.index_dtype(num_rows, np.dtype(indices.dtype)))
    ordered, positions = sort_ids(indices)
    _, unique = _first_of_runs(ordered, jnp.array(num_rows, ordered.dtype))
    here = jnp.arange(ordered.shape[0], dtype=jnp.int32)
    numbers = lax.cummax(jnp.where(starts_of_runs(ordered), here, 0))
    return unique, jnp.zeros_like(here).at[positions].set(numbers, unique_indices=True)


def number_by_first(
    indices: jax.Array, num_rows: int, capacity: int, packed: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """:func:`number_rows`, by the entries at which rows first occur, for a CPU.

    The rows are in that order, ``packed`` or with empty entries between, U being K then.
    Cost: some ten passes over K integers and one over 4 to 8 K, as often as ids collide.
    """
    first = first_entries(indices, num_rows)
    is_first = first == jnp.arange(first.shape[0], dtype=first.dtype)
    distinct = jnp.sum(is_first, dtype=jnp.int32)
    if not packed:
        return jnp.where(is_first, indices, num_rows), first, distinct
    counted = jnp.cumsum(is_first, dtype=jnp.int32) - 1
    numbers = access.take_rows(counted, first, fill_value=capacity)
    place = jnp.where(is_first, counted, capacity)
    unique = jnp.full((capacity,), num_rows, indices.dtype)
    return unique.at[place].set(indices, **access.DROP), numbers, distinct


def first_entries(indices: jax.Array, num_rows: int) -> jax.Array:
    """The entry at which the row of each entry first occurs: int32 ``[K]``, K if empty.

    A hash map: of the rows at one place the first is settled, the others try another hash.
    """
    count = indices.shape[0]
    here = jnp.arange(count, dtype=jnp.int32)
    bits = (PLACES_PER_ID * count - 1).bit_length()
    searching, empty = count + 1, count
    key = indices.astype(jnp.int32)
    if indices.dtype.itemsize == 8:
        key ^= (indices >> 32).astype(jnp.int32) * jnp.int32(0x45EBCA6B)

    def settle(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        first, multiplier = state
        # Multiplicative hashing (Knuth): the high bits of a product with an odd number.
        hashed = lax.shift_right_logical(key * multiplier, jnp.int32(32 - bits))
        place = jnp.where(first == searching, hashed, 1 << bits)
        first_at = jnp.full((1 << bits,), empty, jnp.int32)
        first_at = first_at.at[place].min(here, **access.DROP)
        entry = access.take_rows(first_at, hashed, mode="promise_in_bounds")
        same = access.take_rows(indices, entry, mode="clip") == indices
        first = jnp.where((first == searching) & same, entry, first)
        return first, multiplier + jnp.int32(0x5BD1E996)

    start = jnp.where(indices < num_rows, searching, empty).astype(jnp.int32)
    unsettled = lambda state: jnp.any(state[0] == searching)  # noqa: E731
    return lax.while_loop(unsettled, settle, (start, jnp.int32(-1640531527)))[0]


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
