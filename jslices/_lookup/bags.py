"""Bags: several rows of a table looked up and combined into one.

What differs from TensorFlow on purpose is listed in docs/operations.md.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jslices._lookup.bag_forms import Bags, as_bags
from jslices._lookup.partition import as_tables, check_strategy
from jslices._lookup.read import read_rows
from jslices._rows.bounds import add_rows
from jslices._rows.check import known_int
from jslices._rows.ids import check_mode

COMBINERS = ("mean", "sum", "sqrtn", "max")


def embedding_lookup_sparse(
    params: jax.Array | Sequence[jax.Array],
    sp_ids: Any,
    sp_weights: ArrayLike | None = None,
    combiner: str | None = "mean",
    max_norm: float | jax.Array | None = None,
    *,
    mask: ArrayLike | None = None,
    partition_strategy: str = "mod",
    mode: str = "fill",
) -> jax.Array:
    """For each bag of ids, the rows of the table combined into one.

    With ``e`` the rows and ``w`` the weights (1 where none are given) of one bag,
    ``"sum"`` is ``S(w e)``, ``"mean"`` ``S(w e) / S(w)``, ``"sqrtn"``
    ``S(w e) / sqrt(S(w^2))`` and ``"max"`` the largest ``w e``, element by element.

    Args:
      params: ``[V, *D]``, a floating table, or a list of its shards.
      sp_ids: integers, in one of these forms, all static in shape:
        an array ``[*B, L]``, each last axis a bag, padded where ``mask`` is False: pass
        ``(ids, mask)`` or ``mask=``;
        ``(values [K], segment_ids [K], num_segments)``, in any order;
        ``(values [K], row_splits [B + 1])``, bag b from ``row_splits[b]`` to
        ``row_splits[b + 1]``, the rest unused;
        a ``jax.experimental.sparse.BCOO`` ``[*B, L]`` whose ``data`` are the ids (make it
        from ``(data, indices)``: ``BCOO.fromdense`` leaves out id 0).
      sp_weights: numbers in the shape of the ids, or a BCOO of them, matched by position.
      combiner: ``"mean"`` (also None), ``"sum"``, ``"sqrtn"`` or ``"max"``.
      max_norm: longer rows are scaled down to this L2 norm before they are combined.
      mask: ``[*B, L]`` bool, for ids given as an array.
      partition_strategy: for shards, as in :func:`embedding_lookup`.
      mode: what a bad id reads, as in :func:`embedding_lookup`: the default NaN shows in
        its bag. Ids of padding are never looked at.

    Returns:
      ``[*B, *D]`` of the dtype of ``params``, a row for every bag. Duplicates count each
      time. A bag without ids, or whose weights cancel in ``"mean"``, is zero. 16-bit floats
      are combined in float32 and rounded once.

    Gradient: under :func:`jslices.grad` the table gets IndexedSlices of K rows, with empty
    slots for padding; the weights get a dense gradient of their own shape. Equal largest
    elements share that of ``"max"``.

    Raises:
      TypeError: for ids that are no integers or of no known form, and for integer tables.
      ValueError: if shapes do not fit, or for an unknown ``combiner`` or ``mode``.

    Cost: reads and adds ``K * D`` elements (K = B * L for a padded array).

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> table = jnp.arange(8.0).reshape(4, 2)
      >>> bags = jnp.array([1, 3, 2]), jnp.array([0, 0, 2]), 4
      >>> js.embedding_lookup_sparse(table, bags)
      Array([[4., 5.],
             [0., 0.],
             [4., 5.],
             [0., 0.]], dtype=float32)

    Source: ``tf.nn.embedding_lookup_sparse``; ``"max"`` is from ``torch.nn.EmbeddingBag``.
    """
    who = "embedding_lookup_sparse"
    combiner = _check(combiner, partition_strategy, mode, who)
    tables, bags = _float_tables(params, who), as_bags(sp_ids, sp_weights, mask, who)
    keep = bags.segments < bags.num_bags
    rows = read_rows(
        tables,
        bags.ids,
        who,
        strategy=partition_strategy,
        mode=mode,
        max_norm=max_norm,
        keep=keep,
        given=bags.given,
    )
    return _shaped(combine(rows, bags, combiner), bags)


def safe_embedding_lookup_sparse(
    embedding_weights: jax.Array | Sequence[jax.Array],
    sparse_ids: Any,
    sparse_weights: ArrayLike | None = None,
    combiner: str | None = "mean",
    default_id: int | None = None,
    *,
    mask: ArrayLike | None = None,
    partition_strategy: str = "div",
    max_norm: float | jax.Array | None = None,
    mode: str = "fill",
) -> jax.Array:
    """:func:`embedding_lookup_sparse` for ids as they come: bad entries are left out.

    Negative ids are left out, and entries whose weight is not positive (except with
    ``combiner="sum"``, where they have a meaning). A bag that is then empty gets the row of
    ``default_id`` as it stands, or zeros.

    Args:
      embedding_weights: ``[V, *D]``, the table, or a list of its shards.
      sparse_ids: integers, as ``sp_ids`` of :func:`embedding_lookup_sparse`.
      sparse_weights: in the shape of the ids, or None.
      combiner: as there.
      default_id: the row for empty bags.
      mask: ``[*B, L]`` bool, for ids given as an array.
      partition_strategy: for shards; here ``"div"`` is the default, as in TensorFlow.
      max_norm: as there; the row of ``default_id`` is scaled down as well.
      mode: what an id of V or more reads.

    Returns:
      ``[*B, *D]`` of the dtype of ``embedding_weights``, a row for every bag.

    Raises:
      TypeError, ValueError: as :func:`embedding_lookup_sparse`, and for a ``default_id``
        that is not a row of the table.

    Cost: that of :func:`embedding_lookup_sparse`; ``default_id`` adds one row to what is
    read, and one slot to the gradient (empty if no bag needs it).

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> table = jnp.arange(8.0).reshape(4, 2)
      >>> js.safe_embedding_lookup_sparse(table, [[1, -1], [-1, -1]], default_id=3)
      Array([[2., 3.],
             [6., 7.]], dtype=float32)

    Source: ``tf.nn.safe_embedding_lookup_sparse``.
    """
    who = "safe_embedding_lookup_sparse"
    combiner = _check(combiner, partition_strategy, mode, who)
    tables = _float_tables(embedding_weights, who)
    bags = as_bags(sparse_ids, sparse_weights, mask, who)
    good = bags.ids >= 0
    if bags.weights is not None and combiner != "sum":
        good &= bags.weights > 0
    bags = bags._replace(segments=jnp.where(good, bags.segments, bags.num_bags))
    keep, ids = bags.segments < bags.num_bags, bags.ids
    filled = jnp.zeros(bags.num_bags, bool).at[bags.segments].set(True, mode="drop")
    if default_id is not None:
        # One more id to look up, the last; if no bag is empty it is not read.
        default = _row_number(default_id, sum(len(table) for table in tables), who)
        ids = ids.astype(jnp.promote_types(ids.dtype, jnp.int32))
        ids = jnp.append(ids, jnp.asarray(default, ids.dtype))
        keep = jnp.append(keep, ~filled.all())
    rows = read_rows(
        tables,
        ids,
        who,
        strategy=partition_strategy,
        mode=mode,
        max_norm=max_norm,
        keep=keep,
        given=bags.given,
    )
    combined = combine(rows[: len(bags.ids)], bags, combiner)
    if default_id is not None:
        empty = ~filled.reshape(-1, *(1,) * (rows.ndim - 1))
        combined = jnp.where(empty, rows[-1:], combined)
    return _shaped(combined, bags)


def combine(rows: jax.Array, bags: Bags, combiner: str) -> jax.Array:
    """``rows`` ``[K, *D]`` as one ``[*D]`` for each bag: ``[num_bags, *D]``."""
    dtype, count, segments = rows.dtype, bags.num_bags, bags.segments
    if not segments.size or not count:
        # JAX leaves out a scatter of nothing; this keeps the table in the program, whose
        # gradient is then IndexedSlices of no rows.
        return jnp.broadcast_to(rows.sum(0), (count, *rows.shape[1:]))
    wide = rows.astype(jnp.promote_types(dtype, jnp.float32))
    weights = jnp.ones(segments.shape, wide.dtype)
    if bags.weights is not None:
        # What is in no bag may be anything, and its square must not meet a gradient.
        weights = jnp.where(segments < count, bags.weights, 0).astype(wide.dtype)
        wide = wide * weights.reshape(-1, *(1,) * (rows.ndim - 1))

    def total(x: jax.Array) -> jax.Array:
        return add_rows(jnp.zeros((count, *x.shape[1:]), x.dtype), segments, x)

    if combiner == "max":
        return _largest(wide, segments, count).astype(dtype)
    summed = total(wide)
    if combiner != "sum":
        divisor = total(weights if combiner == "mean" else weights**2)
        # Where the divisor is zero so is the result; the root must not meet it.
        usable = divisor != 0
        divisor = jnp.where(usable, divisor, 1)
        divisor = divisor if combiner == "mean" else jnp.sqrt(divisor)
        column = (-1, *(1,) * (rows.ndim - 1))
        summed = jnp.where(usable.reshape(column), summed / divisor.reshape(column), 0)
    return summed.astype(dtype)


def _largest(rows: jax.Array, segments: jax.Array, count: int) -> jax.Array:
    lowest = jnp.full((count, *rows.shape[1:]), -jnp.inf, rows.dtype)
    largest = lowest.at[segments].max(rows, mode="drop", wrap_negative_indices=False)
    filled = jnp.zeros(count, bool).at[segments].set(True, mode="drop")
    return jnp.where(filled.reshape(-1, *(1,) * (rows.ndim - 1)), largest, 0)


def _check(combiner: str | None, strategy: str, mode: str, who: str) -> str:
    combiner = "mean" if combiner is None else combiner
    if combiner not in COMBINERS:
        raise ValueError(f"{who} got combiner={combiner!r}; it must be one of {COMBINERS}")
    check_mode(mode, who)
    check_strategy(strategy, who)
    return combiner


def _float_tables(params: Any, who: str) -> list[jax.Array]:
    tables = as_tables(params, who)
    if not jnp.issubdtype(tables[0].dtype, jnp.inexact):
        raise TypeError(f"{who} wants a floating table, got {tables[0].dtype}")
    return tables


def _row_number(default_id: Any, num_rows: int, who: str) -> int:
    number = known_int(
        default_id,
        f"{who}: default_id must be an int known before tracing, got {default_id!r}",
    )
    if not 0 <= number < num_rows:
        raise ValueError(f"{who}: default_id = {number} is not in [0, {num_rows})")
    return number


def _shaped(combined: jax.Array, bags: Bags) -> jax.Array:
    return combined.reshape(*bags.shape, *combined.shape[1:])
