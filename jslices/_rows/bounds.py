"""What an index means when it is out of range: settled here, once, for all of jslices.

JAX's own operations disagree with one another: ``table[V]`` reads the last row,
``jnp.take`` gives NaN, ``.at[].add`` drops, and ``-1`` wraps round in all of them.
In jslices an index outside ``[0, V)``, a negative one included, marks an *empty entry*: a
read through it gives the fill value, and a write through it changes nothing.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jslices import _jax
from jslices._rows.loops import row_loop

INT32_MAX = np.iinfo(np.int32).max


def index_dtype(num_rows: int | None, dtype: np.dtype) -> np.dtype:
    """The dtype that holds every row number of a table and the empty index ``V``.

    Integers narrower than 32 bits become int32 (``V`` itself must fit); 64 bits stay.
    """
    if dtype.itemsize == 8:
        return np.dtype(np.int64)
    if num_rows is not None and _jax.definitely(lambda: num_rows > INT32_MAX):
        if not jax.config.read("jax_enable_x64"):
            raise ValueError(
                f"a table of {num_rows} rows needs 64-bit indices, got indices of "
                f"dtype {dtype}; switch them on with "
                "jax.config.update('jax_enable_x64', True) and pass int64 ids"
            )
        return np.dtype(np.int64)
    return np.dtype(np.int32)


def empty_index(num_rows: int | None, dtype: np.dtype) -> int:
    """The canonical index of an empty entry: V, or the largest integer if V is unknown."""
    return int(np.iinfo(dtype).max) if num_rows is None else num_rows


def room_for_distinct(num_ids: int, num_rows: int | None) -> int:
    """U that suffices for the distinct rows among ``num_ids``: ``min(K, V)`` if known."""
    if num_rows is None or not _jax.definitely(lambda: num_rows < num_ids):
        return num_ids
    return num_rows


def canonical_indices(indices: jax.Array, num_rows: int | None) -> jax.Array:
    """``indices`` with the canonical empty index in place of every one out of range.

    Args:
      indices: ``[...]`` of any integer dtype.
      num_rows: V, or None when unknown (then only negative indices are out of range).

    Returns:
      ``[...]`` int32 (int64 where that came in or V needs it), each in ``[0, V]``.
    """
    dtype = index_dtype(num_rows, np.dtype(indices.dtype))
    empty = empty_index(num_rows, dtype)
    if jnp.issubdtype(indices.dtype, jnp.unsignedinteger):
        # An unsigned 32-bit value above 2^31 would turn negative in the cast below,
        # and that is out of range as well: nothing is lost.
        in_range = indices.astype(dtype) >= 0
    else:
        in_range = indices >= 0
    wide = indices.astype(dtype)
    if num_rows is not None:
        in_range = in_range & (wide < empty)
    return jnp.where(in_range, wide, jnp.array(empty, dtype))


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


def take_rows(
    table: jax.Array,
    indices: jax.Array,
    *,
    mode: str | lax.GatherScatterMode = "fill",
    fill_value: ArrayLike | None = None,
) -> jax.Array:
    """Rows ``[..., *D]`` of ``table`` ``[V, *D]``; negative indices never wrap.

    With ``mode="fill"`` an index out of range reads ``fill_value`` (by default NaN, or the
    smallest integer); with ``"clip"`` it reads the nearest row; with
    ``"promise_in_bounds"`` the caller knows that there is none. Cost: one gather of
    ``K * D`` elements.

    Traced as a ``gather`` even without any indices, where ``table[indices]`` is not.
    """
    row = table.shape[1:]
    if table.shape[0] == 0:  # XLA refuses to gather from nothing
        missing: Any = missing_value(table.dtype) if fill_value is None else fill_value
        return jnp.full((*indices.shape, *row), missing, table.dtype)
    if indices.dtype.itemsize < 4:
        indices = indices.astype(jnp.int32)
    rows = lax.gather(
        table,
        indices[..., None],
        lax.GatherDimensionNumbers(
            offset_dims=tuple(range(indices.ndim, indices.ndim + len(row))),
            collapsed_slice_dims=(0,),
            start_index_map=(0,),
        ),
        slice_sizes=(1, *row),
        mode=mode,
        fill_value=fill_value,
    )
    return row_loop(rows, indices)


def add_distinct_rows(table: jax.Array, indices: jax.Array, rows: jax.Array) -> jax.Array:
    """``table`` with ``rows`` added at ``indices``, which are unique or V (dropped).

    As :func:`set_rows`.
    """
    places, how = _distinct_places(table, indices)
    return places.add(rows, **how)


def set_rows(table: jax.Array, indices: jax.Array, rows: jax.Array) -> jax.Array:
    """``table`` with ``rows`` written at ``indices``, which are unique or V (dropped).

    In place when ``table`` is donated. XLA is told that no two writes collide: on a GPU a
    scatter that may collide is lowered to slow atomics (jax-ml/jax#38806).
    """
    places, how = _distinct_places(table, indices)
    return places.set(rows, **how)


def _distinct_places(table: jax.Array, indices: jax.Array) -> tuple[Any, dict[str, Any]]:
    indices, unique = _spread(indices, table.shape[0])
    how = {"mode": "drop", "wrap_negative_indices": False, "unique_indices": unique}
    return table.at[indices], how


def _spread(indices: jax.Array, num_rows: int) -> tuple[jax.Array, bool]:
    """``indices`` made unique where they are V, too; and whether the dtype allows it."""
    count = indices.shape[0]
    if not _jax.definitely(lambda: num_rows + count <= np.iinfo(indices.dtype).max):
        return indices, False
    beyond = num_rows + jnp.arange(count, dtype=indices.dtype)
    return jnp.where(indices == num_rows, beyond, indices), True
