"""Reading, writing and selecting rows, and what an index means when it is out of range.

JAX's own operations disagree with one another: ``table[V]`` reads the last row,
``jnp.take`` gives NaN, ``.at[].add`` drops, and ``-1`` wraps round in all of them.
In jslices an index outside ``[0, V)``, a negative one included, marks an *empty entry*: a
read through it gives the fill value, and a write through it changes nothing.

XLA copies gathered rows by vector instructions on a CPU, and only once on a GPU. Primitives
that are the identity make it do so: only their lowering for one platform does more, every
transformation may drop them, and other platforms see nothing.
"""

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import batching, mlir
from jax.typing import ArrayLike

from jslices import _jax
from jslices._place.boundary import mesh_of, platform_of
from jslices._typing import Size

INT32_MAX = np.iinfo(np.int32).max
#: Gathered rows of so many elements would be copied by a scalar loop (see ``row_loop``).
SCALAR = range(32, 80)
#: XLA:TPU would pad rows of so many elements to more than twice their size. It gathers them
#: by columns from a table that is not an argument (but was just written, or is carried by a
#: loop), and copies all of it for that (libtpu 0.0.50). It does not if the gather also says
#: at which element, the first one, of a row to begin.
SHORT = range(2, 64)
#: How rows are written at indices that are not negative. JAX would check that, which takes
#: a kernel.
DROP: dict[str, Any] = {"mode": "drop", "wrap_negative_indices": False}


def static_int(value: Size, refusal: str) -> int:
    """``value`` as an int known before tracing; else a TypeError with the text given."""
    try:
        return operator.index(value)
    except (TypeError, jax.errors.ConcretizationTypeError) as error:
        raise TypeError(refusal) from error


def is_below(size: Size, other: Size | None) -> bool:
    """Whether one size is known to be smaller than the other; open sizes may not tell."""
    try:
        return other is not None and bool(size < other)
    except jax.errors.InconclusiveDimensionOperation:
        return False


def index_dtype(num_rows: int | None, dtype: np.dtype) -> np.dtype:
    """The dtype that holds every row number of a table and the empty index ``V``.

    Integers narrower than 32 bits become int32 (``V`` itself must fit); 64 bits stay.
    """
    if dtype.itemsize == 8:
        return np.dtype(np.int64)
    if is_below(INT32_MAX, num_rows):
        if not jax.config.read("jax_enable_x64"):
            raise ValueError(
                f"a table of {num_rows} rows needs 64-bit indices, got indices of "
                f"dtype {dtype}; switch them on with "
                "jax.config.update('jax_enable_x64', True) and pass int64 ids"
            )
        return np.dtype(np.int64)
    return np.dtype(np.int32)


def wide(ids: ArrayLike, num_rows: Size = 0) -> jax.Array:
    """``ids`` in a dtype of at least 32 bits that holds all of so many row numbers."""
    ids = jnp.asarray(ids)
    if ids.dtype.itemsize < 8 and is_below(INT32_MAX, num_rows):
        return ids.astype(index_dtype(num_rows, np.dtype(ids.dtype)))
    return ids.astype(jnp.int32) if ids.dtype.itemsize < 4 else ids


def empty_index(num_rows: int | None, dtype: np.dtype) -> int:
    """The canonical index of an empty entry: V, or the largest integer if V is unknown."""
    return int(np.iinfo(dtype).max) if num_rows is None else num_rows


def room_for_distinct(num_ids: int, num_rows: int | None) -> int:
    """U that suffices for the distinct rows among ``num_ids``: ``min(K, V)`` if known."""
    return num_rows if num_rows is not None and is_below(num_rows, num_ids) else num_ids


def canonical_indices(
    indices: jax.Array, num_rows: int | None, empties: jax.Array | None = None
) -> jax.Array:
    """``indices`` with the canonical empty index in place of every one out of range.

    Args:
      indices: ``[...]`` of any integer dtype.
      num_rows: V, or None when unknown (then only negative indices are out of range).
      empties: what is put there instead.

    Returns:
      ``[...]`` int32 (int64 where that came in or V needs it), each in ``[0, V]``.
    """
    dtype = index_dtype(num_rows, np.dtype(indices.dtype))
    empty = empty_index(num_rows, dtype)
    # An unsigned 32-bit value above 2^31 turns negative, and is out of range as well.
    wide = indices.astype(dtype)
    in_range = wide >= 0
    if num_rows is not None:
        in_range = in_range & (wide < empty)
    if empties is None:
        empties = jnp.array(empty, dtype)
    return jnp.where(in_range, wide, empties)


def clipped_indices(indices: jax.Array, num_rows: int) -> jax.Array:
    """``indices`` of any integer dtype, those out of range those of the nearest row.

    ``[...]`` int32 (int64 where that came in or V needs it), as XLA clamps them.
    """
    dtype = index_dtype(num_rows, np.dtype(indices.dtype))
    last = jnp.array(max(num_rows - 1, 0), dtype)
    if jnp.issubdtype(indices.dtype, jnp.signedinteger):
        return lax.clamp(jnp.zeros_like(last), indices.astype(dtype), last)
    inside = canonical_indices(indices, num_rows)
    return jnp.where(inside < num_rows, inside, jnp.where(indices > 0, last, 0))


def missing_value(dtype: np.dtype) -> Any:
    """What a read out of range gives: NaN, or the integer least likely to be a value."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.array(np.nan, dtype)[()]
    if dtype == np.bool_:
        return np.bool_(True)
    limits = jnp.iinfo(dtype)
    unsigned = jnp.issubdtype(dtype, jnp.unsignedinteger)
    return np.array(limits.max if unsigned else limits.min, dtype)[()]


def in_32_bits(ids: np.ndarray) -> np.ndarray:
    """NumPy integers in a dtype that JAX can hold; what does not fit stays out of range."""
    if ids.size == 0 and not np.issubdtype(ids.dtype, np.integer):
        return ids.astype(np.int32)  # np.asarray([]) is float64
    wide = np.issubdtype(ids.dtype, np.integer) and ids.dtype.itemsize == 8
    if not wide or jax.config.read("jax_enable_x64"):
        return ids
    ids = np.minimum(ids, INT32_MAX)
    if np.issubdtype(ids.dtype, np.signedinteger):
        ids = np.maximum(ids, -INT32_MAX)
    return ids.astype(np.int32)


def rows_numbered(shape: Sequence[int], row_axes: int) -> int:
    """How many rows the first ``row_axes`` axes of an array number."""
    return shape[0] if row_axes == 1 else math.prod(shape[:row_axes])


def places(
    indices: jax.Array, shape: Sequence[int], row_axes: int
) -> tuple[jax.Array, ...]:
    """Where rows are along each of the ``row_axes`` axes that number them.

    A number out of range is out of range along one axis at least. So an array
    ``[L, V, *D]`` is read and written as it is: as ``[L * V, *D]`` it would have to be
    copied on a TPU, where V does not fill its tiles, and sent over the devices of a mesh
    that divide it along V.
    """
    along: list[jax.Array] = []
    for length in shape[row_axes - 1 : 0 : -1]:
        size = jnp.asarray(length, indices.dtype)
        along, indices = [lax.rem(indices, size), *along], lax.div(indices, size)
    return indices, *along


def take_rows(
    table: jax.Array,
    indices: jax.Array,
    *,
    mode: str | lax.GatherScatterMode = "fill",
    fill_value: ArrayLike | None = None,
    row_axes: int = 1,
) -> jax.Array:
    """Rows ``[..., *D]`` of ``table`` ``[V, *D]``; negative indices never wrap.

    With ``mode="fill"`` an index out of range reads ``fill_value`` (by default NaN, or the
    smallest integer); with ``"clip"`` it reads the nearest row; with
    ``"promise_in_bounds"`` the caller knows that there is none. Cost: one gather of
    ``K * D`` elements. ``row_axes``: how many axes of ``table`` number its rows.

    Traced as a ``gather`` even without any indices, where ``table[indices]`` is not.
    """
    row, num_rows = table.shape[row_axes:], rows_numbered(table.shape, row_axes)
    if num_rows == 0:  # XLA refuses to gather from an empty array
        missing: Any = missing_value(table.dtype) if fill_value is None else fill_value
        return jnp.full((*indices.shape, *row), missing, table.dtype)
    if indices.dtype.itemsize < 4:
        indices = indices.astype(jnp.int32)
    starts = lax.expand_dims(indices, (indices.ndim,))
    mode = lax.GatherScatterMode.from_any(mode)
    if row_axes > 1:
        if mode != lax.GatherScatterMode.FILL_OR_DROP:  # XLA clamps each axis by itself
            indices = clipped_indices(indices, num_rows)
        starts = jnp.stack(places(indices, table.shape, row_axes), axis=-1)
    if len(row) == 1 and row[0] in SHORT and platform_of(table) == "tpu":
        starts = jnp.concatenate([starts, jnp.zeros_like(starts[..., :1])], axis=-1)
        if mode == lax.GatherScatterMode.PROMISE_IN_BOUNDS:
            mode = lax.GatherScatterMode.CLIP  # or no planner would trust the zeros
    dims = lax.GatherDimensionNumbers(
        offset_dims=tuple(range(indices.ndim, indices.ndim + len(row))),
        collapsed_slice_dims=tuple(range(row_axes)),
        start_index_map=tuple(range(starts.shape[-1])),
    )
    sizes = (*(1,) * row_axes, *row)
    rows = lax.gather(table, starts, dims, sizes, mode=mode, fill_value=fill_value)
    return row_loop(rows, indices)


# Traced once for all arrays of one shape.
@functools.partial(jax.jit, inline=True)
def add_distinct_rows(table: jax.Array, indices: jax.Array, rows: jax.Array) -> jax.Array:
    """``table`` with ``rows`` added at ``indices``, which are unique or out of range.

    As :func:`set_rows`.
    """
    at, how = _distinct_places(table, indices, rows)
    return at.add(rows, **how)


# Traced once for all arrays of one shape.
@functools.partial(jax.jit, inline=True)
def set_rows(table: jax.Array, indices: jax.Array, rows: jax.Array) -> jax.Array:
    """``table`` with ``rows`` written at ``indices``: unique, or out of range and dropped.

    In place when ``table`` is donated. It tells XLA that no two writes collide: on a GPU a
    scatter that may collide is lowered to slow atomics (jax-ml/jax#38806).

    ``table`` ``[V, *D]`` may have several axes that number its rows ``[K, *D]``.
    """
    at, how = _distinct_places(table, indices, rows)
    return at.set(rows, **how)


def places_of(table: jax.Array, indices: jax.Array, rows: jax.Array) -> Any:
    """``table.at[...]`` for rows ``[K, *D]``, whatever axes of ``table`` number them."""
    return table.at[places(indices, table.shape, 1 + table.ndim - rows.ndim)]


def height_of(table: jax.Array, rows: jax.Array) -> int:
    """V of a table, whatever axes number its rows, which are like ``rows`` ``[K, *D]``."""
    return rows_numbered(table.shape, 1 + table.ndim - rows.ndim)


def _distinct_places(
    table: jax.Array, indices: jax.Array, rows: jax.Array
) -> tuple[Any, dict[str, Any]]:
    """``table.at[...]``; each empty entry gets a distinct out-of-range row."""
    num_rows, count = height_of(table, rows), indices.shape[0]
    dtype = index_dtype(num_rows, np.dtype(indices.dtype))
    unique = is_below(num_rows + count - 1, np.iinfo(dtype).max)
    beyond = num_rows + jnp.arange(count, dtype=dtype) if unique else None
    indices = canonical_indices(indices, num_rows, beyond)
    return places_of(table, indices, rows), {**DROP, "unique_indices": unique}


# --- selecting ---


def per_row(numbers: jax.Array, like: jax.Array) -> jax.Array:
    """``[n]`` as ``[n, 1, ...]``: one number for each row of ``like`` ``[n, *D]``."""
    return numbers.reshape(numbers.shape + (1,) * (jnp.ndim(like) - numbers.ndim))


def where_rows(selected: jax.Array, rows: jax.Array, rest: ArrayLike = 0) -> jax.Array:
    """``jnp.where`` with a bool ``[n]`` for each of ``rows`` ``[n, *D]``; in their dtype.

    Or ``[n, m]``, for each part of rows ``[n, m, *D]``. Rows not selected may be NaN.
    """
    return jnp.where(per_row(selected, rows), rows, jnp.asarray(rest, rows.dtype))


def kept_positions(keep: jax.Array, size: int | None, caller: str) -> tuple[Any, Any]:
    """``(positions, too_many)``: where ``keep``, bool ``[K]``, is True, in order.

    The positions are integers ``[size]``, K in unused entries. With None there are exactly
    as many as needed, or K under jit, where that is not known. Too many for ``size`` are an
    error that names the ``caller``, and under jit a bool ``[]``.
    """
    count = keep.shape[0]
    if size is not None:
        size = static_int(
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
    here = np.flatnonzero(np.asarray(keep))
    if size is not None and len(here) > size:
        raise ValueError(
            f"{caller}(size={size}): {len(here)} rows do not fit; pass "
            f"size={len(here)} or more, or leave size out"
        )
    unused = 0 if size is None else size - len(here)
    here = np.pad(here, (0, unused), constant_values=count)
    return jnp.asarray(here.astype(dtype)), False


def pick(rows: jax.Array, positions: jax.Array, too_many: jax.Array | bool) -> jax.Array:
    """``rows`` ``[K, *D]`` at ``positions``: zeros where unused, all NaN if too many."""
    picked = take_rows(rows, positions, fill_value=0)
    if too_many is False or not jnp.issubdtype(rows.dtype, jnp.inexact):
        return picked
    return jnp.where(too_many, jnp.array(jnp.nan, rows.dtype), picked)


# --- how gathered rows are copied ---


def row_loop(rows: jax.Array, ids: jax.Array) -> jax.Array:
    """``rows`` ``[..., *D]``, just gathered at ``ids`` ``[...]``, unchanged.

    LLVM unrolls the loop over a row completely while its elements times the instructions
    for each stay below about 300, and code that it has unrolled stays scalar (full
    unrolling runs before the loop vectorizer). A gather spends four instructions on an
    element, so rows of 32 to 79 elements, 64 among them, are copied one element at a time:
    65 ns for a row of 64 where a row of 80 takes 28 (jax 0.10.2 and 0.12). On a CPU such
    rows therefore get some more instructions, which change no value; the loop then remains
    a loop and is vectorized.
    """
    if math.prod(rows.shape[ids.ndim :]) in SCALAR and rows.size:
        return row_loop_p.bind(rows, ids)
    return rows


def _more_instructions(rows: jax.Array, ids: jax.Array) -> jax.Array:
    width = rows.dtype.itemsize * 8
    length = math.prod(rows.shape[ids.ndim :])
    if width not in (16, 32) or jnp.issubdtype(rows.dtype, jnp.complexfloating):
        return rows
    bits = np.dtype(f"int{width}")
    flat = lax.bitcast_convert_type(rows.reshape(-1, length), bits)
    # One of two neighbouring integers is even; no compiler sees that these are zeros.
    zero = ((ids * (ids + 1)) & 1).astype(bits).reshape(-1, 1)
    for i in range(max(1, math.ceil(320 / length) - 4)):
        flat = flat ^ zero if i % 2 == 0 else flat + zero
    flat = lax.bitcast_convert_type(flat, rows.dtype)
    # XLA repeats cheap operations in each of their users, which would separate these from
    # the gather above. It does not repeat a gather, so a second one ends the loop.
    here = jnp.arange(flat.shape[0], dtype=jnp.int32)
    return flat.at[here].get(mode="promise_in_bounds").reshape(rows.shape)


def gathered_once(rows: jax.Array) -> jax.Array:
    """``rows``, just gathered from a table, unchanged.

    XLA:GPU repeats a gather in each kernel that reads its rows. If one of these runs after
    the table is written, the gradient of a dense layer say, the whole table is copied first
    (jax 0.12). On a GPU the rows are therefore stored once.
    """
    return gathered_once_p.bind(rows)


def late_zeros(shape: tuple[int, ...], dtype: np.dtype, after: jax.Array) -> jax.Array:
    """Zeros that are made when ``after`` is known, floats or integers from 0 on.

    XLA:CPU makes other zeros at once, and has no room in them for what is dead by then: a
    step of rows of 26 MB takes 78 MB for 52, more than a heap of glibc keeps for the next.
    """
    if is_below(after.size, 1) or mesh_of(jax.typeof(after)):
        return jnp.zeros(shape, dtype)
    first = after[(0,) * after.ndim].real
    never = first > np.inf if jnp.issubdtype(first.dtype, jnp.inexact) else first < 0
    return jnp.full(shape, jnp.where(never, 1, 0), dtype)


def at_once(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """The arrays, unchanged, but none of them before all are computed.

    Where one of them says which rows to write, and others were read from the same table,
    XLA then reads first, and need not copy the table. A barrier does it, but XLA:CPU takes
    it out before it fuses and looks for copies (jax 0.10.2; 0.12 does not). There a branch
    stays, if XLA cannot tell that it is never taken, as nothing exceeds infinity.
    """
    barrier = lambda *arrays: lax.optimization_barrier(list(arrays))  # noqa: E731
    types = [jax.typeof(x) for x in arrays]
    real = [x for x in arrays if jnp.issubdtype(x.dtype, jnp.floating)]
    number = next((x[(0,) * x.ndim] for x in real if is_below(0, x.size)), None)
    if number is None or any(map(mesh_of, types)) or _jax.varying_axes(*types):
        return barrier(*arrays)  # type: ignore[no-any-return]

    def branch(never: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
        other = lambda x: ~x if x.dtype.kind in "biu" else -x  # noqa: E731
        changed = lambda *arrays: list(map(other, arrays))  # noqa: E731
        return lax.cond(never, changed, lambda *arrays: list(arrays), *arrays)  # type: ignore[no-any-return]

    never = number.astype(jnp.float32) > jnp.inf
    others = lambda _, *arrays: barrier(*arrays)  # noqa: E731
    return lax.platform_dependent(never, *arrays, cpu=branch, default=others)  # type: ignore[no-any-return]


row_loop_p = _jax.identity_primitive("row_loop")
_on_cpu = mlir.lower_fun(_more_instructions, multiple_results=False)
mlir.register_lowering(row_loop_p, _on_cpu, platform="cpu")

gathered_once_p = _jax.identity_primitive("gathered_once")
batching.defvectorized(gathered_once_p)
_on_gpu = mlir.lower_fun(lax.optimization_barrier, multiple_results=False)
for _platform in ("cuda", "rocm"):
    mlir.register_lowering(gathered_once_p, _on_gpu, platform=_platform)
