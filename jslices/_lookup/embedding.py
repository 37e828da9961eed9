"""``embedding_lookup``, and reading the rows of a table or of its shards."""

import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jslices._arguments import Number, OneOf, is_on_host, refuse_host_memory
from jslices._densify import current_user_line
from jslices._jax import takes_tables
from jslices._lookup.mark import mark_table
from jslices._place.boundary import looked_up, on_any_mesh
from jslices._rows import access
from jslices._rows.ids import as_ids, check_mode, on_host, refuse_bad_ids, settle

#: A table, or its shards.
Tables = jax.Array | Sequence[jax.Array]

STRATEGY = OneOf("mod", "div")
NORM = Number(at_least=0, infinite=True)


@takes_tables(sparse=True)
def embedding_lookup(
    params: jax.Array | Sequence[jax.Array],
    ids: ArrayLike,
    *,
    partition_strategy: str = "mod",
    max_norm: float | jax.Array | None = None,
    padding_id: int | None = None,
    mode: str = "fill",
) -> jax.Array:
    """The rows of a table with the given row numbers.

    Under :func:`jslices.grad` and its relatives the gradient of ``params`` is an
    IndexedSlices, one for each shard, as for plain ``table[ids]`` and
    ``jnp.take(table, ids, axis=0)``; this function adds one meaning for every bad id.

    Args:
      params: ``[V, *D]``, the table; or a list of n shards of it, of any heights.
      ids: ``[*B]`` of any rank and integer dtype (of 64 bits ``jax.jit`` passes on 32).
      partition_strategy: how ids are distributed over n shards. ``"mod"``: id i is row
        ``i // n`` of shard ``i % n``. ``"div"``: the shards follow one another.
      max_norm: rows of a larger L2 norm are scaled down to it as they are read; the table
        itself is not changed. The gradient goes through the scaling.
      padding_id: this id reads zeros and contributes no gradient; it need not be a row.
      mode: what an id outside ``[0, V)`` reads; a negative id never wraps round.
        ``"fill"`` (or ``"drop"``): NaN (of an integer table the smallest integer), so that
        it is noticed, and no gradient. ``"clip"``: the nearest row, which then gets the
        gradient. ``"promise_in_bounds"``: undefined, for ids known to be in range.
        ``"check"``: it is an error.

    Returns:
      ``[*B, *D]`` of the dtype of ``params``. The gradients of duplicate ids add up.

    Raises:
      TypeError: if ``ids`` are not integers, ``max_norm`` is not one number, or it is given
        for an integer table.
      ValueError: for an unknown ``mode`` or ``partition_strategy``, a scalar table, no
        shards, or shards of different row shapes.
      IndexError: (also a ValueError) in mode ``"check"``, for the first bad id, naming
        position, value and range; under jit through ``jax.experimental.checkify``.

    Cost: reads ``K * D`` elements, K the number of ids, from every shard. The gradient of
    each shard has K entries; those of ids in other shards are empty. Under plain
    ``jax.grad`` the gradient is the ordinary dense ``[V, *D]``, with a
    :class:`DensificationWarning`.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> table = jnp.arange(6.0).reshape(3, 2)
      >>> js.embedding_lookup(table, [2, 0, -1])
      Array([[ 4.,  5.],
             [ 0.,  1.],
             [nan, nan]], dtype=float32)
      >>> js.embedding_lookup([table[0::2], table[1::2]], [1, 2])
      Array([[2., 3.],
             [4., 5.]], dtype=float32)
      >>> js.grad(lambda t: js.embedding_lookup(t, [2, 0, 2]).sum())(table).indices
      Array([2, 0, 2], dtype=int32)

    Source: ``tf.nn.embedding_lookup``, where a bad id is an error on the CPU and reads
    zeros on a GPU; ``padding_id`` is PyTorch's ``padding_idx``.
    """
    caller = "embedding_lookup"
    tables, numbers = as_tables(params, caller), as_ids(ids, caller)
    keep = None if padding_id is None else ~is_padding(ids, numbers, padding_id)
    how = partition_strategy, mode, max_norm
    return read_rows(tables, numbers, caller, *how, keep=keep, original=ids)


def is_padding(original: ArrayLike, ids: jax.Array, padding_id: int) -> jax.Array:
    """Where the ids as given are ``padding_id``; ``ids`` may be saturated to 32 bits."""
    try:
        number = operator.index(padding_id)
    except TypeError as error:
        raise TypeError(f"padding_id must be an int, got {padding_id!r}") from error
    host = on_host(original)
    array: Any = ids if host is None or not host.size else host
    limits = np.iinfo(array.dtype)
    if not limits.min <= number <= limits.max:
        return jnp.zeros(ids.shape, bool)
    return jnp.asarray(array == number)


def read_rows(
    tables: list[jax.Array],
    ids: jax.Array,
    caller: str,
    strategy: str,
    mode: str,
    max_norm: float | jax.Array | None,
    *,
    keep: jax.Array | None,
    original: ArrayLike,
) -> jax.Array:
    """Rows ``[*B, *D]`` of a table in one or more shards.

    Args:
      keep: ``[*B]`` bool; False: the row is zero and gets no gradient, whatever the id.
      original: the ids as the user passed them, for the message of mode ``"check"``: in the
        same order, but perhaps of another shape and without good ids added at the end.
    """
    check_mode(mode, caller)
    STRATEGY.check(caller, "partition_strategy", strategy)
    for table in tables if not is_on_host(ids) else []:
        refuse_host_memory(caller, table)
    heights = [table.shape[0] for table in tables]
    count = _num_ids(heights, strategy, caller, mode)
    access.index_dtype(count, np.dtype(ids.dtype))  # refuses one of too many rows
    if mode == "check":
        exempt = None
        if keep is not None:
            shape = as_ids(original, caller).shape
            exempt = (~keep).reshape(-1)[: math.prod(shape)].reshape(shape)
        refuse_bad_ids(original, count, caller, "ids", exempt)
    line = current_user_line()
    if jnp.issubdtype(tables[0].dtype, jnp.inexact):
        tables = [mark_table(x, line, "embedding_lookup", ids.size) for x in tables]
    rows = _read(tables, ids, keep, strategy=strategy, mode=mode, count=count)
    if max_norm is None:
        return rows
    return _clip_rows(rows, tables[0].ndim - 1, max_norm, caller)


@on_any_mesh(lambda tables, ids, keep: looked_up(tables[0], ids))
def _read(
    tables: list[jax.Array],
    ids: jax.Array,
    keep: jax.Array | None,
    *,
    strategy: str,
    mode: str,
    count: int,
) -> jax.Array:
    if len(tables) == 1 and keep is None:
        direct = mode if mode in ("clip", "promise_in_bounds") else "fill"
        if ids.dtype.itemsize == 8 and direct == "fill":
            # JAX cuts them to 32 bits (jax 0.12).
            ids = access.canonical_indices(ids, count)
        return _take(tables[0], ids, mode=direct)
    settled = settle(ids, count, mode if mode == "clip" else "drop")
    settled = settled if keep is None else jnp.where(keep, settled, count)
    rows = _read_shards(tables, settled, strategy)
    return rows if keep is None else access.where_rows(keep, rows)


def _read_shards(tables: list[jax.Array], ids: jax.Array, strategy: str) -> jax.Array:
    """Rows of ids, none of which is negative."""
    if len(tables) == 1:
        return _take(tables[0], ids)
    missing = access.missing_value(np.dtype(tables[0].dtype))
    rows: Any = jnp.full((*ids.shape, *tables[0].shape[1:]), missing)
    first = 0
    for shard, table in enumerate(tables):
        height = table.shape[0]
        if strategy == "mod":
            local, own = ids // len(tables), ids % len(tables) == shard
        else:
            local, own = ids - first, ids >= first
            first += height
        own &= local < height
        # An id of another shard reads zeros, not NaN, which could leak into a gradient.
        mine = _take(table, jnp.where(own, local, height), fill_value=0)
        rows = access.where_rows(own, mine, rows)
    return rows


def _take(table: jax.Array, ids: jax.Array, **how: Any) -> jax.Array:
    rows = access.take_rows(table, ids, **how)
    if table.shape[0] or not jnp.issubdtype(table.dtype, jnp.inexact):
        return rows
    # A table without rows is not gathered from. Adding the sum of a slice of no rows
    # keeps the table in the program, so that its gradient is IndexedSlices, too.
    nothing = jax.lax.dynamic_slice_in_dim(table, 0, 0).sum(0)
    return rows + jnp.broadcast_to(nothing, rows.shape)


def _clip_rows(
    rows: jax.Array, row_ndim: int, max_norm: float | jax.Array, caller: str
) -> jax.Array:
    """``rows`` ``[*B, *D]``, each scaled down to an L2 norm of at most ``max_norm``."""
    if not jnp.issubdtype(rows.dtype, jnp.inexact):
        raise TypeError(f"{caller}(max_norm=...) wants a floating table, got {rows.dtype}")
    NORM.check(caller, "max_norm", max_norm)
    axes = tuple(range(rows.ndim - row_ndim, rows.ndim))
    wide = rows.astype(jnp.promote_types(rows.dtype, jnp.float32))
    squares = jnp.sum(jnp.abs(wide) ** 2, axes, keepdims=True)
    # Only long rows, hence no zeros, reach the root, whose slope is infinite at 0.
    long = squares > jnp.asarray(max_norm, squares.dtype) ** 2
    norms = jnp.sqrt(jnp.where(long, squares, 1))
    return (wide * jnp.where(long, max_norm / norms, 1)).astype(rows.dtype)


def as_tables(params: Tables, caller: str) -> list[jax.Array]:
    """The shards of a table, checked; one array is one shard."""
    if params is None or (isinstance(params, list | tuple) and not params):
        raise ValueError(f"{caller} wants a table or a list of shards, got {params!r}")
    if isinstance(params, dict | str):
        raise TypeError(
            f"{caller} wants a table or a list of shards, got a {type(params).__name__}"
        )
    shards = params if isinstance(params, list | tuple) else [params]
    tables = [jnp.asarray(shard) for shard in shards]
    if any(table.ndim < 1 for table in tables):
        raise ValueError(f"{caller} wants a table [V, *D], got a scalar")
    kinds = {(table.dtype, table.shape[1:]) for table in tables}
    if len(kinds) > 1:
        shapes = ", ".join(f"{t.dtype}{list(t.shape)}" for t in tables)
        raise ValueError(f"{caller} wants shards of one row shape and dtype, got {shapes}")
    return tables


def _num_ids(heights: Sequence[int], strategy: str, caller: str, mode: str) -> int:
    """The number of ids of a table whose shards have so many rows."""
    count, total = len(heights), sum(heights)
    if strategy == "div" or count == 1:
        return total
    regular = [(total - shard + count - 1) // count for shard in range(count)]
    if list(heights) == regular:
        return total
    if mode == "check":
        raise ValueError(
            f"{caller} got shards of {list(heights)} rows: under partition_strategy='mod' "
            f"not every id below the largest has a row, so mode='check' cannot name a "
            f"range; make them {regular}"
        )
    return max((count * (h - 1) + i + 1 for i, h in enumerate(heights) if h), default=0)
