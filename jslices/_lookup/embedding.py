"""``embedding_lookup``: the lookup that people write."""

import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jslices._lookup.partition import as_tables, check_strategy
from jslices._lookup.read import read_rows
from jslices._rows.ids import as_ids, check_mode, on_host


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
    IndexedSlices, one for each shard. Plain ``table[ids]`` and ``jnp.take(table, ids,
    axis=0)`` do the same there; what this adds is one meaning for every bad id.

    Args:
      params: ``[V, *D]``, the table; or a list of n shards of it, of any heights.
      ids: ``[*B]`` of any integer dtype and any rank.
      partition_strategy: how the ids are dealt out over n shards. ``"mod"``: id i is row
        ``i // n`` of shard ``i % n``. ``"div"``: the shards follow one another.
      max_norm: rows whose L2 norm is larger are scaled down to it as they are read; the
        table keeps them. The gradient goes through the scaling.
      padding_id: this id reads zeros, and nothing gets a gradient from it. It need not be
        a row of the table.
      mode: what an id outside ``[0, V)`` reads; a negative id never wraps round.
        ``"fill"`` (or ``"drop"``): NaN (the smallest integer in an integer table), so that
        it is seen, and no gradient. ``"clip"``: the nearest row, which gets the gradient
        as well. ``"promise_in_bounds"``: undefined, for ids known to be right.
        ``"check"``: it is an error.

    Returns:
      ``[*B, *D]`` of the dtype of ``params``. Duplicate ids read the same row, and their
      gradients add up.

    Raises:
      TypeError: if ``ids`` are not integers, or ``max_norm`` is not one number or meets an
        integer table.
      ValueError: for an unknown ``mode`` or ``partition_strategy``, a table without rows'
        axis, no shards, or shards of different row shapes.
      IndexError: (also a ValueError) in mode ``"check"``, for the first bad id, naming
        position, value and range; under jit through ``jax.experimental.checkify``.

    Cost: reads ``K * D`` elements, K the number of ids, from every shard. The gradient of
    each shard has K slots; those of ids that live elsewhere are empty. Under plain
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
    who = "embedding_lookup"
    check_mode(mode, who)
    check_strategy(partition_strategy, who)
    tables, numbers = as_tables(params, who), as_ids(ids, who)
    keep = None if padding_id is None else ~_equal(ids, numbers, padding_id)
    return read_rows(
        tables,
        numbers,
        who,
        strategy=partition_strategy,
        mode=mode,
        max_norm=max_norm,
        keep=keep,
        given=ids,
    )


def _equal(given: Any, ids: jax.Array, padding_id: Any) -> jax.Array:
    """Where the ids are ``padding_id``, as given: ``ids`` may be cut to 32 bits."""
    try:
        number = operator.index(padding_id)
    except TypeError as error:
        raise TypeError(f"padding_id must be an int, got {padding_id!r}") from error
    host = on_host(given)
    array: Any = ids if host is None or not host.size else host
    limits = np.iinfo(array.dtype)
    if not limits.min <= number <= limits.max:
        return jnp.zeros(ids.shape, bool)
    return jnp.asarray(array == number)
