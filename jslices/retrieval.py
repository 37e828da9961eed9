"""What a trained table recommends, and the loss of two towers; imported by itself."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

import jslices as js
from jslices._arguments import Number
from jslices._place.boundary import like_first, on_any_mesh
from jslices._place.placement import Placement, on_each_device, placement_at_hand
from jslices._rows.access import index_dtype
from jslices._rows.ids import as_ids, settle
from jslices._rows.sums import sum_dtype
from jslices.extend import unboxed

__all__ = ["in_batch_softmax_loss", "top_k"]
__dir__ = __all__.copy

#: XLA has a kernel for so many of the largest on a GPU, and sorts everything for more, with
#: places. Up to 64 rounds of it read and write less than a sort that went over them once.
_ROUND, _MOST_BY_ROUNDS, _SHORTEST_BY_ROUNDS = 16, 64, 1 << 12


def top_k(
    table: jax.Array,
    queries: jax.Array,
    k: int,
    *,
    exclude: ArrayLike | None = None,
    block: int | None = None,
    precision: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """The k rows with the largest products with each query, block by block.

    Args:
      table: ``[V, D]`` of any floating dtype. Rows are taken as they are: under
        ``untouched="exact"`` pass that of ``tx.now(params, state)``.
      queries: ``[*B, D]`` of any floating dtype.
      k: how many; it may be more than there are rows.
      exclude: integers ``[*B, E]``, the rows to leave out for each query, as those that a
        user has seen. Ids outside ``[0, V)`` are padding; duplicates count once.
      block: rows at a time; by default 2^22 scores of all queries, 2^12 to 2^20 rows.
      precision: of the products, as in ``jnp.matmul``. By default a TPU rounds both factors
        to bfloat16, 8 bits: scores of 100,000 unit rows of 64 are off by up to 0.002, and
        the best ten are in another order for a third of the queries. ``"highest"`` takes
        float32, at six times the multiplications; or rank again what a larger k finds.

    Returns:
      ``(scores, ids)``, both ``[*B, k]``, the largest first: of equal scores (0.0 and -0.0)
      the lower id first, NaN before all. Scores are float32 or wider, ids int32.
      Where no row is left, or its score is -inf, the id is -1. Both are constants for
      differentiation: look the ids up for row gradients.

    On a mesh each device searches its own rows, and sends k scores and ids. On several Auto
    axes, under ``jax.jit``, no type tells which these are, and XLA gathers the rows.

    Raises:
      TypeError: if table or queries are not floats, or ``exclude`` not integers.
      InvalidArgumentError: (a ValueError) if shapes do not fit, for k or a block below 1.

    Cost: B V D products, divided by the devices, and room for ``[B, block]`` scores. A GPU
    reads the scores of a block once for each 16 of k, up to k = 64, and sorts them beyond.

    Example:
      >>> import jax.numpy as jnp
      >>> from jslices.retrieval import top_k
      >>> items, users = jnp.array([[1.0], [3.0], [2.0]]), jnp.array([[1.0], [-1.0]])
      >>> top_k(items, users, 2, exclude=[[1], [-1]])[1]
      Array([[2, 0],
             [0, 2]], dtype=int32)

    Source: ours; ``jax.lax.top_k(queries @ table.T, k)`` holds all V scores.
    """
    table, queries, dtype = _floats("top_k", table=table, queries=queries)
    shape = queries.shape[:-1]
    nothing = jnp.zeros((*shape, 0), jnp.int32)
    seen = as_ids(nothing if exclude is None else exclude, "top_k", "exclude")
    fits = table.ndim == 2 and len(table) and queries.shape[-1:] == table.shape[1:]
    if not fits or seen.ndim != queries.ndim or seen.shape[:-1] != shape:
        raise js.InvalidArgumentError(
            f"top_k wants a table [V, D], queries [*B, D] and exclude [*B, E], short lists "
            f"padded by -1, got {[list(x.shape) for x in (table, queries, seen)]}"
        )
    of_size = min(2**20, max(2**12, 2**22 // max(1, math.prod(shape))))
    block = of_size if block is None else block
    for name, value in (("k", k), ("block", block)):
        Number(at_least=1, integer=True).check("top_k", name, value)
    mesh, placement = jax.sharding.get_abstract_mesh(), placement_at_hand(table)
    if isinstance(table, jax.core.Tracer):
        by_one_axis = mesh.are_all_axes_auto and len(mesh.axis_names) == 1
        if by_one_axis and mesh.size > 1 and not len(table) % mesh.size:
            placement = Placement(mesh, (mesh.axis_names,))
    elif placement:  # of a constant of a program no type tells the devices
        devices: Any = table.sharding
        placement = dataclasses.replace(placement, mesh=devices.mesh)
    queries = queries.astype(dtype)
    how = {"k": int(k), "block": int(block), "precision": precision}
    return _top_k(queries, table, seen, place=placement, **how)


def in_batch_softmax_loss(
    queries: jax.Array,
    items: jax.Array,
    item_ids: ArrayLike,
    log_q: ArrayLike | None = None,
) -> jax.Array:
    """Softmax cross entropy of each query's item among the items of the batch.

    The logit of item j for query i is ``queries[i] . items[j] - log_q[j]``. Other places of
    the batch with the item of query i, accidental hits, are left out for it.

    Args:
      queries: ``[B, D]`` of any floating dtype; for a temperature divide them by it.
      items: ``[B, D]``, the row of each query's item.
      item_ids: integers ``[B]``. They are only compared, so any number will do.
      log_q: floats ``[B]``, the log of the probability that an item is in a batch; None
        corrects nothing, and popular items, which are often negatives, are punished.

    Returns:
      ``[B]`` losses, float32 or wider. Gradients of tables that are looked up are rows.

    Raises:
      TypeError: if queries or items are not floats, or ``item_ids`` not integers.
      InvalidArgumentError: (a ValueError) if shapes do not fit.

    Cost: B^2 D products and ``[B, B]`` logits.

    Example:
      >>> import jax.numpy as jnp
      >>> from jslices.retrieval import in_batch_softmax_loss
      >>> rows, log_q = jnp.eye(3), jnp.log(jnp.array([0.5, 0.5, 0.25]))
      >>> in_batch_softmax_loss(rows, rows, [7, 7, 2], log_q).shape
      (3,)

    Source: the ``Retrieval`` task of TensorFlow Recommenders (Yi et al., 2019), which sums
    the losses, and clips the probabilities at 1e-6.
    """
    caller = "in_batch_softmax_loss"
    queries, items, dtype = _floats(caller, queries=queries, items=items)
    ids = as_ids(item_ids, caller, "item_ids")
    bias = jnp.zeros(ids.shape, dtype) if log_q is None else jnp.asarray(log_q, dtype)
    rows_fit = queries.ndim == 2 and queries.shape == items.shape
    if not (rows_fit and ids.shape == bias.shape == queries.shape[:1]):
        raise js.InvalidArgumentError(
            f"{caller} wants queries and items [B, D], item_ids and log_q [B], got "
            f"{[list(x.shape) for x in (queries, items, ids, bias)]}"
        )
    return _in_batch_loss(queries.astype(dtype), items.astype(dtype), ids, bias)


def _floats(caller: str, **arrays: Any) -> list[Any]:
    """The arrays, and a dtype of 32 bits or more for sums of both."""
    for name, x in arrays.items():
        arrays[name] = x = jnp.asarray(unboxed(x))
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"{caller} wants {name} of floats, got {x.dtype}")
    wide = (sum_dtype(x.dtype) for x in arrays.values())
    return [*arrays.values(), jnp.promote_types(*wide)]


def _by_query(queries: jax.Array, *rest: Any) -> jax.NamedSharding | None:
    """The type of results of which each query has one, or a row."""
    split: Any = like_first(queries)
    return split and jax.NamedSharding(split.mesh, jax.P(*split.spec[: queries.ndim - 1]))


@on_any_mesh(_by_query)
def _in_batch_loss(
    queries: jax.Array, items: jax.Array, ids: jax.Array, log_q: jax.Array
) -> jax.Array:
    logits = queries @ items.T - log_q[None]
    hits = (ids[:, None] == ids[None]) & ~jnp.eye(len(ids), dtype=bool)
    logits = jnp.where(hits, -jnp.inf, logits)
    return jax.nn.logsumexp(logits, -1) - jnp.diagonal(logits)


@on_any_mesh(_by_query)
@functools.partial(jax.jit, static_argnames=("k", "block", "place", "precision"))
def _top_k(
    *arrays: jax.Array, k: int, block: int, place: Placement | None, precision: Any
) -> tuple[jax.Array, jax.Array]:
    queries, table, seen = map(lax.stop_gradient, arrays)
    shape, dtype = queries.shape[:-1], queries.dtype
    count, id_dtype = math.prod(shape), index_dtype(len(table), np.dtype("int32"))
    seen = settle(seen, len(table), "fill").reshape(count, seen.shape[-1])
    queries = queries.reshape(count, queries.shape[-1])

    def best(scores: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        scores, places = _largest(scores, k)
        return scores, jnp.take_along_axis(ids, places, -1)

    def search(table: Any, queries: Any, seen: Any, part: Any) -> Any:
        start, width = part[0] * len(table), min(block, len(table))

        def fold(number: jax.Array, result: Any) -> Any:
            # The last block begins early, and leaves out what the one before it had.
            first = jnp.minimum(number * width, len(table) - width)
            rows = lax.dynamic_slice_in_dim(table, first, width).astype(dtype)
            places = jnp.where(seen < start + first, width, seen - start - first)
            done = first + jnp.arange(width) < number * width
            scores = jnp.matmul(queries, rows.T, precision=precision)
            # lax.top_k goes by bits, and where an x86 computes NaN it has a sign.
            scores = jnp.where(jnp.isnan(scores), jnp.nan, scores)
            scores = jnp.where(scores == 0, 0, scores)
            scores = jnp.where(done[None], -jnp.inf, scores)
            leave_out = lambda x, i: x.at[i].set(-jnp.inf, mode="drop")  # noqa: E731
            scores = jax.vmap(leave_out)(scores, places)
            ids = jnp.broadcast_to(start + first + jnp.arange(width), scores.shape)
            # Lower ids stand first, so that of equal scores they stay first.
            pairs = zip(result, (scores, ids.astype(id_dtype)), strict=True)
            return best(*(jnp.concatenate(pair, -1) for pair in pairs))

        shape = len(queries), k
        result = jnp.full(shape, -jnp.inf, dtype), jnp.zeros(shape, id_dtype)
        result = lax.fori_loop(0, -(-len(table) // width), fold, result)
        if place and place.rows:
            gather = functools.partial(lax.all_gather, axis_name=place.rows, axis=1)
            result = best(*(gather(x, tiled=True) for x in result))
        return result

    each, first = search, jnp.zeros(1, jnp.int32)
    if place:
        copies = math.prod(place.mesh.shape[axis] for axis in place.repeated)
        split = jax.P(() if count % copies else place.repeated)
        specs, first = (place.by_rows, split, split, place.by_rows), place.numbers()
        each = on_each_device(place, search, specs, split, whole_rows=False)
    scores, ids = each(table, queries, seen, first)
    ids = jnp.where(scores == -jnp.inf, -1, ids)
    return scores.reshape(*shape, k), ids.reshape(*shape, k)


def _largest(scores: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """``lax.top_k`` of ``[B, n]``; on an NVIDIA GPU in rounds where these are cheaper.

    Where only -inf is left, rounds name a place twice.
    """

    def by_rounds(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
        found: list[Any] = []
        for start in range(0, k, _ROUND):
            if found:  # the others are left
                taken = found[-1][1]
                scores = jax.vmap(lambda x, i: x.at[i].set(-jnp.inf))(scores, taken)
            found.append(lax.top_k(scores, min(_ROUND, k - start)))
        best, places = (jnp.concatenate(x, -1) for x in zip(*found, strict=True))
        return best, places

    def at_once(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
        best, places = lax.top_k(scores, k)
        return best, places

    is_long = scores.shape[-1] >= _SHORTEST_BY_ROUNDS and scores.dtype == jnp.float32
    if not (is_long and _ROUND < k <= _MOST_BY_ROUNDS):
        return at_once(scores)
    return lax.platform_dependent(scores, cuda=by_rounds, default=at_once)  # type: ignore[no-any-return]
