"""Bags: several rows of a table looked up and combined into one."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jslices._arguments import OneOf
from jslices._jax import takes_tables
from jslices._lookup.columns import Matrix, bags_of, columns_of, is_of_kind
from jslices._lookup.embedding import Tables, as_tables, read_rows
from jslices._place.boundary import by_first_axis, looked_up, on_any_mesh
from jslices._rows.access import canonical_indices, per_row, static_int, where_rows
from jslices._rows.ids import as_ids
from jslices._rows.sums import add_rows, widened
from jslices._typing import PyTree

#: Ids in any of the ``FORMS``.
BagsOfIds: TypeAlias = Any
#: A matrix of ``jax.experimental.sparse``, which takes long to import.
Bcoo: TypeAlias = Any

COMBINER = OneOf("mean", "sum", "sqrtn", "max")
FORMS = (
    "an array [*B, L] (with a mask: (ids, mask)), (values, segment_ids, num_segments), "
    "(values, row_splits), or a BCOO matrix of ids"
)
#: What to type for a matrix of features.
FEATURES = "pass it as the weights, without ids: (table, None, m)"


@takes_tables(sparse=True)
def embedding_lookup_sparse(
    params: jax.Array | Sequence[jax.Array],
    sp_ids: BagsOfIds | None = None,
    sp_weights: ArrayLike | Matrix | None = None,
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
      sp_ids: integers, in one of these forms, all of static shape:
        an array ``[*B, L]``, a bag along the last axis, padded where ``mask`` is False:
        pass ``(ids, mask)`` or ``mask=``;
        ``(values [K], segment_ids [K], num_segments)``, in any order;
        ``(values [K], row_splits [B + 1])``, bag b from ``row_splits[b]`` to
        ``row_splits[b + 1]``, the rest unused;
        a ``jax.experimental.sparse.BCOO`` ``[*B, L]`` whose ``data`` are the ids (make it
        from ``(data, indices)``: ``BCOO.fromdense`` leaves out id 0).
        None for a matrix of weights by column number.
      sp_weights: numbers in the shape of the ids, or a BCOO of them, matched by position;
        without ids a sparse matrix ``[*B, V]``, BCOO, BCSR or SciPy's, whose column numbers
        are the ids: then ``combiner="sum"`` gives ``matrix @ params``.
      combiner: ``"mean"`` (also None), ``"sum"``, ``"sqrtn"`` or ``"max"``.
      max_norm: longer rows are scaled down to this L2 norm before they are combined.
      mask: ``[*B, L]`` bool, for ids given as an array.
      partition_strategy: for shards, as in :func:`embedding_lookup`.
      mode: what a bad id reads, as in :func:`embedding_lookup`; the default, NaN, shows in
        its bag. The ids of padding are ignored.

    Returns:
      ``[*B, *D]`` of the dtype of ``params``, a row for every bag. Duplicates count each
      time. A bag without ids, or whose weights cancel in ``"mean"``, is zero. 16-bit floats
      are combined in float32 and rounded once.

    Gradient: under :func:`jslices.grad` that of the table is IndexedSlices of K rows, with
    empty entries for padding; that of the weights is dense, of their own shape. For
    ``"max"``, equal largest elements share the gradient.

    Raises:
      TypeError: for ids that are not integers or of an unknown form; for integer tables.
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
    arrays, how = (params, sp_ids, sp_weights, mask), (partition_strategy, mode, max_norm)
    return _look_up_bags("embedding_lookup_sparse", arrays, combiner, how)


@takes_tables(sparse=True)
def safe_embedding_lookup_sparse(
    embedding_weights: jax.Array | Sequence[jax.Array],
    sparse_ids: BagsOfIds | None = None,
    sparse_weights: ArrayLike | Matrix | None = None,
    combiner: str | None = "mean",
    default_id: int | None = None,
    *,
    mask: ArrayLike | None = None,
    partition_strategy: str = "div",
    max_norm: float | jax.Array | None = None,
    mode: str = "fill",
) -> jax.Array:
    """:func:`embedding_lookup_sparse` for raw ids: bad ones are left out.

    Left out are negative ids and those whose weight is not positive (except with
    ``combiner="sum"``, where such weights mean something). A bag that is then empty gets
    the row of ``default_id``, or zeros.

    Args:
      embedding_weights: ``[V, *D]``, the table, or a list of its shards.
      sparse_ids: integers, as ``sp_ids`` of :func:`embedding_lookup_sparse`.
      sparse_weights: in the shape of the ids, or None; a matrix without ids, as there.
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
    read, and one entry to the gradient (empty if no bag needs it).

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> table = jnp.arange(8.0).reshape(4, 2)
      >>> js.safe_embedding_lookup_sparse(table, [[1, -1], [-1, -1]], default_id=3)
      Array([[2., 3.],
             [6., 7.]], dtype=float32)

    Source: ``tf.nn.safe_embedding_lookup_sparse``.
    """
    caller, how = "safe_embedding_lookup_sparse", (partition_strategy, mode, max_norm)
    arrays = embedding_weights, sparse_ids, sparse_weights, mask
    return _look_up_bags(caller, arrays, combiner, how, True, default_id)


def _look_up_bags(
    caller: str,
    arrays: tuple[Tables, BagsOfIds | None, ArrayLike | Matrix | None, ArrayLike | None],
    combiner: str | None,
    how: tuple[str, str, float | jax.Array | None],
    only_good: bool = False,
    default_id: int | None = None,
) -> jax.Array:
    """The bags of a table, ids, weights and a mask; of the good ids where ``only_good``.

    ``how`` rows are read: by a partition strategy, a mode and a largest norm.
    """
    combiner = "mean" if combiner is None else combiner
    COMBINER.check(caller, "combiner", combiner)
    params, sp_ids, sp_weights, mask = arrays
    shape = None
    if sp_ids is None:
        sp_ids, sp_weights, shape = columns_of(sp_weights, params, caller)

    @on_any_mesh(_split_by_bags)
    def look_up(
        params: Tables,
        sp_ids: BagsOfIds,
        sp_weights: ArrayLike | None,
        mask: ArrayLike | None,
    ) -> jax.Array:
        tables = as_tables(params, caller)
        if not jnp.issubdtype(tables[0].dtype, jnp.inexact):
            raise TypeError(f"{caller} wants a floating table, got {tables[0].dtype}")
        num_rows = sum(table.shape[0] for table in tables)
        bags = as_bags(sp_ids, sp_weights, mask, caller, num_rows)
        if only_good:
            good = bags.ids >= 0
            if bags.weights is not None and combiner != "sum":
                good &= bags.weights > 0
            bags = bags._replace(segments=jnp.where(good, bags.segments, bags.num_bags))
        keep, ids = bags.segments < bags.num_bags, bags.ids
        if default_id is not None:
            filled = jnp.zeros(bags.num_bags, bool).at[bags.segments].set(True, mode="drop")
            # The last id is an additional one, which is not read if no bag is empty.
            default = _row_number(default_id, num_rows, caller)
            ids = ids.astype(jnp.promote_types(ids.dtype, jnp.int32))
            ids = jnp.append(ids, jnp.asarray(default, ids.dtype))
            keep = jnp.append(keep, ~filled.all())
        rows = read_rows(tables, ids, caller, *how, keep=keep, original=bags.original)
        if default_id is None:
            combined = _combine(rows, bags, combiner)
        else:
            combined = _combine(rows[:-1], bags, combiner)
            combined = jnp.where(per_row(filled, combined), combined, rows[-1:])
        return combined.reshape(*bags.shape, *combined.shape[1:])

    combined = look_up(params, sp_ids, sp_weights, mask)
    return combined if shape is None else combined.reshape(*shape, *combined.shape[1:])


def _split_by_bags(params: Tables, ids: BagsOfIds, *more: PyTree) -> Any:
    """How results are split on a mesh of Explicit axes: as bags are in padded ids."""
    table, ids = jax.tree.leaves(params)[0], jax.tree.leaves(ids)[0]
    if jnp.ndim(ids) > 1:
        return looked_up(table, ids, combined=1)
    return by_first_axis(0, table, ids)


class Bags(NamedTuple):
    """K ids, each in a bag."""

    ids: jax.Array  #: ``[K]``
    segments: jax.Array  #: ``[K]``, which bag each is in; the number of bags: in none.
    shape: tuple[int, ...]  #: the leading axes of the result, one element for each bag.
    original: Any  #: the ids as the user passed them, for messages.
    padded: bool = False  #: whether each bag has as many places, one after the other.
    weights: jax.Array | None = None  #: ``[K]``

    @property
    def num_bags(self) -> int:
        return math.prod(self.shape)


def as_bags(
    sp_ids: BagsOfIds,
    sp_weights: ArrayLike | None,
    mask: ArrayLike | None,
    caller: str,
    num_rows: int,
) -> Bags:
    """Ids in any form of a table of so many rows, with or without weights."""
    if isinstance(sp_ids, tuple) and mask is not None:
        raise ValueError(f"{caller}: mask= goes with an array [*B, L] of ids, not a tuple")
    _check_form(sp_ids, caller)
    _refuse_features(sp_ids, num_rows, caller)
    if is_of_kind(sp_ids, "BCOO"):
        bags = _from_bcoo(sp_ids, caller)
    elif not isinstance(sp_ids, tuple):
        bags = _from_padded(sp_ids, mask, caller)
    elif len(sp_ids) == 3:
        bags = _from_segments(*sp_ids, caller)
    elif len(sp_ids) == 2 and jnp.asarray(sp_ids[1]).dtype == jnp.bool_:
        bags = _from_padded(*sp_ids, caller)
    elif len(sp_ids) == 2:
        _refuse_mask(*sp_ids, caller)
        bags = _from_splits(*sp_ids, caller)
    else:
        raise TypeError(f"{caller} wants ids as {FORMS}; got a tuple of {len(sp_ids)}")
    weights = _weights(sp_weights, bags.ids.shape, sp_ids, caller)
    segments = canonical_indices(bags.segments.reshape(-1), bags.num_bags)
    return bags._replace(ids=bags.ids.reshape(-1), segments=segments, weights=weights)


def _check_form(sp_ids: BagsOfIds, caller: str) -> None:
    """Refuses lists of bags of different lengths, masks, and others' sparse matrices."""
    dtype, help = getattr(sp_ids, "dtype", None), ""
    if dtype == np.object_ or _is_ragged(sp_ids):
        help = "; of lists of different lengths make (np.concatenate(lists).astype(int), "
        help += "np.cumsum([0, *map(len, lists)])), values and row_splits"
    elif hasattr(sp_ids, "dense_shape"):
        help = "; pass (x.values, x.indices[:, 0], x.dense_shape[0])"
    elif hasattr(sp_ids, "indptr") or hasattr(sp_ids, "tocsr"):
        help = f"; if its columns are the ids, {FEATURES}"
    elif dtype == np.bool_ and not is_of_kind(sp_ids, "BCOO"):
        help = "; where m says which columns are the ids of a row, bags, ids = "
        help += "np.nonzero(m), pass (ids, bags, len(m))"
    elif not isinstance(sp_ids, dict | set | str):
        return
    kind = type(sp_ids).__name__ if dtype != np.bool_ else "bools"
    raise TypeError(f"{caller} wants ids as {FORMS}; got {kind}{help}")


def _is_ragged(x: object) -> bool:
    if not isinstance(x, list):
        return False
    is_bag = lambda y: isinstance(y, list | tuple) or getattr(y, "ndim", 0) > 0  # noqa: E731
    return len(set(map(len, filter(is_bag, x)))) > 1


def _refuse_features(sp_ids: BagsOfIds, num_rows: int, caller: str) -> None:
    """Refuses a matrix ``[*B, V]`` of ones, whose columns are the ids."""
    if not is_of_kind(sp_ids, "BCOO") or sp_ids.shape[-1:] != (num_rows,):
        return
    data = sp_ids.data
    if isinstance(data, jax.core.Tracer) or data.size < 2 or not (data == 1).all():
        return
    raise TypeError(
        f"{caller} got a BCOO matrix [..., {num_rows}] whose data are ones, and takes the "
        f"data for the ids; if the columns are, {FEATURES}"
    )


def _refuse_mask(ids: ArrayLike, mask: ArrayLike, caller: str) -> None:
    """Refuses a mask that is not bool, which would be read as row splits."""
    array = jnp.asarray(mask)
    if array.ndim < 2:
        if array.shape != as_ids(ids, caller).shape:
            return
        if jnp.issubdtype(array.dtype, jnp.integer):
            is_concrete = not isinstance(array, jax.core.Tracer)
            if not is_concrete or array.size < 2 or not np.isin(array, (0, 1)).all():
                return
    raise TypeError(
        f"{caller} got (ids, mask) with a mask {array.dtype}{list(array.shape)}: a mask is "
        "bool, type (ids, mask != 0); weights are sp_weights=, and row_splits [B + 1] go "
        "with values [K]"
    )


def _from_padded(original: ArrayLike, mask: ArrayLike | None, caller: str) -> Bags:
    ids = as_ids(original, caller)
    if ids.ndim < 1:
        raise TypeError(f"{caller} wants ids as {FORMS}; got a scalar")
    shape = ids.shape[:-1]
    count = math.prod(shape)
    numbers = jnp.arange(count).reshape(*shape, 1)
    segments = jnp.zeros_like(ids, numbers.dtype) + numbers  # placed as ids are
    if mask is not None:
        mask = jnp.asarray(mask)
        if mask.shape != ids.shape or mask.dtype != jnp.bool_:
            raise ValueError(
                f"{caller} wants a mask bool{list(ids.shape)}, one for each id, got "
                f"{mask.dtype}{list(mask.shape)}"
            )
        segments = jnp.where(mask, segments, count)
    return Bags(ids, segments, shape, original, padded=True)


def _from_segments(
    original: ArrayLike, segment_ids: ArrayLike, num_segments: int, caller: str
) -> Bags:
    ids, segments = as_ids(original, caller), as_ids(segment_ids, caller, "segment_ids")
    if ids.ndim != 1 or segments.shape != ids.shape:
        raise ValueError(
            f"{caller} wants values [K] and segment_ids [K], got {list(ids.shape)} and "
            f"{list(segments.shape)}"
        )
    count = static_int(
        num_segments,
        f"{caller}: num_segments is the number of bags in the result and must be an int "
        f"known before tracing, got {num_segments!r}",
    )
    if count < 0:
        raise ValueError(f"{caller}: num_segments must not be negative, got {count}")
    return Bags(ids, segments, (count,), original)


def _from_splits(original: ArrayLike, row_splits: ArrayLike, caller: str) -> Bags:
    ids, splits = as_ids(original, caller), as_ids(row_splits, caller, "row_splits")
    if ids.ndim != 1 or splits.ndim != 1 or splits.shape[0] < 1:
        raise ValueError(
            f"{caller} wants values [K] and row_splits [B + 1], got {list(ids.shape)} and "
            f"{list(splits.shape)}; bag b is values[row_splits[b]:row_splits[b + 1]]"
        )
    if not isinstance(splits, jax.core.Tracer):
        ends = np.asarray(splits)
        if ends[0] < 0 or (np.diff(ends) < 0).any() or ends[-1] > ids.shape[0]:
            raise ValueError(
                f"{caller} got row_splits {ends.tolist()} for {ids.shape[0]} values; they "
                "must lie within the values and never fall"
            )
    count = splits.shape[0] - 1
    places = jnp.arange(ids.shape[0], dtype=splits.dtype)
    # Values before the first split are in bag -1, those after the last in bag B: in none.
    segments = jnp.searchsorted(splits, places, side="right") - 1
    return Bags(ids, segments, (count,), original)


def _from_bcoo(matrix: Bcoo, caller: str) -> Bags:
    if not jnp.issubdtype(matrix.data.dtype, jnp.integer):
        raise TypeError(
            f"{caller} got a BCOO matrix of {matrix.data.dtype}, and wants one whose data "
            f"are the ids; if its columns are, {FEATURES}"
        )
    ids, indices = as_ids(matrix.data, caller), jnp.asarray(matrix.indices)
    shape = tuple(matrix.shape)
    if ids.ndim != 1 or indices.shape != (ids.shape[0], len(shape)):
        raise ValueError(
            f"{caller} wants a BCOO matrix without batch or dense axes, got data "
            f"{list(ids.shape)}, indices {list(indices.shape)} and shape {list(shape)}"
        )
    places = [indices[:, axis] for axis in range(len(shape))]
    return Bags(ids, bags_of(places, shape), shape[:-1], matrix.data)


def _weights(
    original: BagsOfIds, shape: tuple[int, ...], sp_ids: BagsOfIds, caller: str
) -> jax.Array | None:
    if original is None:
        return None
    is_bcoo = is_of_kind(original, "BCOO")
    if is_bcoo and is_of_kind(sp_ids, "BCOO") and _differ(original, sp_ids):
        raise ValueError(
            f"{caller} got ids and weights in BCOO matrices of different indices, and "
            "matches them by position; make both of the same indices"
        )
    if isinstance(original, str):
        raise TypeError(
            f"{caller}(sp_weights={original!r}): wanted a number for each id; for the "
            f"combiner type combiner={original!r}"
        )
    weights = jnp.asarray(original.data if is_bcoo else original)
    if weights.shape != tuple(shape):
        raise ValueError(
            f"{caller} wants one weight for each id, {list(shape)}, got "
            f"{list(weights.shape)}"
        )
    if not jnp.issubdtype(weights.dtype, jnp.number):
        raise TypeError(f"{caller} wants numbers as weights, got {weights.dtype}")
    return weights.reshape(-1)


def _differ(one: Bcoo, other: Bcoo) -> bool:
    """Whether matrices have other elements, as far as is known while tracing."""
    if one.indices is other.indices:
        return False
    pair = one.indices, other.indices
    if any(isinstance(x, jax.core.Tracer) for x in pair):
        return False
    return not np.array_equal(*pair)


def _combine(rows: jax.Array, bags: Bags, combiner: str) -> jax.Array:
    """``rows`` ``[K, *D]`` as one ``[*D]`` for each bag: ``[num_bags, *D]``."""
    dtype, count, segments = rows.dtype, bags.num_bags, bags.segments
    if not segments.size or not count:
        # JAX omits a scatter of nothing; this keeps the table in the program, so that its
        # gradient is IndexedSlices of no rows.
        return jnp.broadcast_to(rows.sum(0), (count, *rows.shape[1:]))
    wide = widened(rows)
    weights = jnp.ones(segments.shape, wide.dtype)
    if bags.weights is not None:
        # Ids in no bag may have any weight, whose square must not reach a gradient.
        weights = jnp.where(segments < count, bags.weights, 0).astype(wide.dtype)
        wide = wide * per_row(weights, wide)

    def total(x: jax.Array) -> jax.Array:
        if bags.padded:
            x = where_rows(segments < count, x)
            return x.reshape(count, -1, *x.shape[1:]).sum(1)
        return add_rows(jnp.zeros((count, *x.shape[1:]), x.dtype), segments, x)

    if combiner == "max":
        lowest = jnp.full((count, *wide.shape[1:]), -jnp.inf, wide.dtype)
        largest = lowest.at[segments].max(wide, mode="drop", wrap_negative_indices=False)
        filled = jnp.zeros(count, bool).at[segments].set(True, mode="drop")
        return jnp.where(per_row(filled, largest), largest, 0).astype(dtype)
    summed = total(wide)
    if combiner != "sum":
        divisor = total(weights if combiner == "mean" else weights**2)
        # If the divisor is zero, so is the result, and the slope of the root is infinite.
        usable = divisor != 0
        divisor = jnp.where(usable, divisor, 1)
        divisor = divisor if combiner == "mean" else jnp.sqrt(divisor)
        quotient = summed / per_row(divisor, summed)
        summed = jnp.where(per_row(usable, summed), quotient, 0)
    return summed.astype(dtype)


def _row_number(default_id: int, num_rows: int, caller: str) -> int:
    number = static_int(
        default_id,
        f"{caller}: default_id must be an int known before tracing, got {default_id!r}",
    )
    if not 0 <= number < num_rows:
        raise ValueError(f"{caller}: default_id = {number} is not in [0, {num_rows})")
    return number
