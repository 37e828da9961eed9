"""The best rows of a table for queries, and ranks of held-out ones, by blocks of rows."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

import jslices as js
from jslices import extend
from jslices.retrieval.arguments import by_query
from jslices.retrieval.blocks import (
    Axes,
    Place,
    checked,
    fold_blocks,
    on_each_device,
    prepared,
)


def top_k(
    table: jax.Array,
    queries: jax.Array,
    k: int,
    *,
    exclude: ArrayLike | None = None,
    block: int | None = None,
    axis: Axes = None,
) -> tuple[jax.Array, jax.Array]:
    """The k rows with the largest products with each query, block by block.

    Args:
      table: ``[V, D]`` of any floating dtype.
      queries: ``[*B, D]`` of any floating dtype.
      k: how many; more than there are rows is allowed.
      exclude: integers ``[*B, E]``, for each query the rows to leave out, as those that a
        user has seen. Ids outside ``[0, V)`` are padding; duplicates count once.
      block: rows at a time; by default as many as have 2^22 scores with all queries, at
        least 2^12 and at most 2^20.
      axis: of the mesh, that along which rows are split, or several; ``()`` for none. To
        be named only under ``jax.jit`` on several Auto axes, where no type tells it.

    Returns:
      ``(scores, ids)``, both ``[*B, k]``, in the order of ``jax.lax.top_k``: largest first,
      of equal ones the lower id first, NaN before all. Scores are float32, or float64 if an
      argument is; ids int32. Where fewer than k rows are left, the rest is -inf with id -1;
      a row whose score is -inf counts as left out. Both are constants for differentiation:
      for scores with row gradients look the ids up, ``js.embedding_lookup(table, ids)``.

    On a mesh each device searches its own rows, then the best of all are compared: k scores
    and ids of each device are sent, no rows. Queries are divided over the other axes, and
    rows are to be whole: of a table that is split by columns as well, they are gathered.

    Raises:
      TypeError: if table or queries are not floats, or ``exclude`` not integers.
      InvalidArgumentError: (a ValueError) if shapes do not fit, for k or a block below 1,
        for an axis that is missing or not of the mesh.

    Cost: B V D products in ``jax.default_matmul_precision``, and room for ``[B, block]``
    scores; a device of N has V / N rows, and blocks of at most these.

    Example:
      >>> import jax.numpy as jnp
      >>> from jslices.retrieval import top_k
      >>> items, users = jnp.array([[1.0], [3.0], [2.0]]), jnp.array([[1.0], [-1.0]])
      >>> top_k(items, users, 2, exclude=[[1], [-1]])[1]
      Array([[2, 0],
             [0, 2]], dtype=int32)

    Source: ours, as the ``Streaming`` layer of TensorFlow Recommenders, which excludes by
    fetching more. ``jax.lax.top_k(queries @ table.T, k)`` holds all V scores.
    """
    extend.Number(at_least=1, integer=True).check("top_k", "k", k)
    arrays, _, how = checked("top_k", table, queries, exclude, block, axis)
    return _top_k(*arrays, k=int(k), **how)


def ranks(
    table: jax.Array,
    queries: jax.Array,
    items: ArrayLike,
    *,
    exclude: ArrayLike | None = None,
    block: int | None = None,
    axis: Axes = None,
) -> jax.Array:
    """The rank of one item for each query, from 1: how many rows are better, plus 1.

    Recall at k, hit rate and MRR are ``(ranks <= k).mean()`` and ``(1 / ranks).mean()``.

    Args:
      table, queries, exclude, block, axis: as for :func:`top_k`.
      items: integers ``[*B]``, the held-out row of each query. One that is also in
        ``exclude`` keeps its rank.

    Returns:
      ``[*B]`` int32. Rows that score as much as the item are not better, but for rounding:
      its own score is computed apart. NaN is better than any score. An id outside
      ``[0, V)`` comes after all rows that are not left out, and a score of NaN is last.

    Raises:
      TypeError, InvalidArgumentError: as :func:`top_k`, and for ``items``.

    Cost: that of :func:`top_k`, and a lookup of B rows; devices send one number a query.

    Example:
      >>> import jax.numpy as jnp
      >>> from jslices.retrieval import ranks
      >>> items, users = jnp.array([[1.0], [3.0], [2.0]]), jnp.array([[1.0], [-1.0]])
      >>> ranks(items, users, [0, 0]), ranks(items, users, [0, 0], exclude=[[1], [1]])
      (Array([3, 1], dtype=int32), Array([2, 1], dtype=int32))

    Source: ours; the filtered ranks of knowledge graphs (Bordes et al., 2013).
    """
    arrays, shape, how = checked("ranks", table, queries, exclude, block, axis)
    wanted = extend.as_ids(items, "ranks", "items")
    if wanted.shape != shape:
        raise js.InvalidArgumentError(
            f"ranks wants items {list(shape)}, one for each query, got {list(wanted.shape)}"
        )
    return _ranks(*arrays, wanted[..., None], **how)


@extend.on_any_mesh(lambda table, queries, *ids: by_query(queries))
@functools.partial(jax.jit, static_argnames=("k", "block", "place"))
def _top_k(
    *arrays: jax.Array, k: int, block: int, place: Place | None
) -> tuple[jax.Array, jax.Array]:
    table, queries, seen = prepared(*arrays)
    dtype = extend.index_dtype(len(table), np.dtype("int32"))

    def best(scores: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        scores, places = lax.top_k(scores, k)
        return scores, jnp.take_along_axis(ids, places, -1)

    def search(table: jax.Array, queries: jax.Array, seen: jax.Array, first: Any) -> Any:
        def fold(result: Any, scores: jax.Array, start: jax.Array) -> Any:
            found, places = lax.top_k(scores, min(k, scores.shape[-1]))
            new = found, (places + (first + start)).astype(dtype)
            # Lower ids stand first, so that of equal scores they stay first.
            pairs = zip(result, new, strict=True)
            return best(*(jnp.concatenate(pair, -1) for pair in pairs))

        shape = len(queries), k
        result = jnp.full(shape, -jnp.inf, queries.dtype), jnp.zeros(shape, dtype)
        result = fold_blocks(fold, result, table, queries, seen - first, block)
        if place and place.rows:
            result = best(
                *(lax.all_gather(x, place.rows, axis=1, tiled=True) for x in result)
            )
        return result

    scores, ids = on_each_device(search, place, table, queries, seen)
    ids = jnp.where(scores == -jnp.inf, -1, ids)
    shape = *arrays[1].shape[:-1], k
    return scores.reshape(shape), ids.reshape(shape)


@extend.on_any_mesh(lambda table, queries, *ids: by_query(queries))
@functools.partial(jax.jit, static_argnames=("block", "place"))
def _ranks(*arrays: jax.Array, block: int, place: Place | None) -> jax.Array:
    table, queries, seen, items = prepared(*arrays)
    own = jnp.sum(
        js.embedding_lookup(table, items[:, 0]).astype(queries.dtype) * queries, -1
    )
    left_out = jnp.concatenate([items, seen], 1)

    def search(table: Any, queries: Any, left_out: Any, own: Any, first: Any) -> Any:
        def fold(result: jax.Array, scores: jax.Array, _: jax.Array) -> jax.Array:
            # Not `>`: a diverged model, whose scores are NaN, is not to rank items first.
            better = ~(scores <= own[:, None]) & (scores != -jnp.inf)
            return result + jnp.sum(better, -1, dtype=result.dtype)

        dtype = extend.index_dtype(len(table), np.dtype("int32"))
        result = jnp.zeros(len(queries), dtype)
        result = fold_blocks(fold, result, table, queries, left_out - first, block)
        return lax.psum(result, place.rows) if place and place.rows else result

    better = on_each_device(search, place, table, queries, left_out, own)
    return 1 + better.reshape(arrays[1].shape[:-1])
