"""The forms in which bags of ids come, and the one form they are worked off in."""

import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jslices._rows.bounds import canonical_indices
from jslices._rows.ids import as_ids

FORMS = (
    "an array [*B, L] (with a mask: (ids, mask)), (values, segment_ids, num_segments), "
    "(values, row_splits), or a BCOO matrix of ids"
)


class Bags(NamedTuple):
    """K ids, each in a bag."""

    ids: jax.Array  #: ``[K]``
    segments: jax.Array  #: ``[K]``, the number of the bag; the number of bags drops the id.
    weights: jax.Array | None  #: ``[K]``
    shape: tuple[int, ...]  #: the leading axes of the result, one element a bag.
    given: Any  #: the ids as they were passed, for messages.

    @property
    def num_bags(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))


def as_bags(sp_ids: Any, sp_weights: Any, mask: Any, who: str) -> Bags:
    """Any form of ids, with or without weights, as one."""
    if isinstance(sp_ids, tuple) and mask is not None:
        raise ValueError(f"{who}: mask= goes with an array [*B, L] of ids, not a tuple")
    if _is_bcoo(sp_ids):
        ids, segments, shape, given = _from_bcoo(sp_ids, who)
    elif not isinstance(sp_ids, tuple):
        ids, segments, shape, given = _from_padded(sp_ids, mask, who)
    elif len(sp_ids) == 3:
        ids, segments, shape, given = _from_segments(*sp_ids, who)
    elif len(sp_ids) == 2 and jnp.asarray(sp_ids[1]).dtype == jnp.bool_:
        ids, segments, shape, given = _from_padded(*sp_ids, who)
    elif len(sp_ids) == 2:
        ids, segments, shape, given = _from_splits(*sp_ids, who)
    else:
        raise TypeError(f"{who} wants ids as {FORMS}; got a tuple of {len(sp_ids)}")
    weights = _weights(sp_weights, ids.shape, who)
    bags = Bags(ids.reshape(-1), segments.reshape(-1), weights, shape, given)
    return bags._replace(segments=canonical_indices(bags.segments, bags.num_bags))


_Form = tuple[jax.Array, jax.Array, tuple[int, ...], Any]


def _is_bcoo(x: Any) -> bool:
    return all(hasattr(x, name) for name in ("data", "indices", "shape"))


def _from_padded(given: Any, mask: Any, who: str) -> _Form:
    ids = as_ids(given, who)
    if ids.ndim < 1:
        raise TypeError(f"{who} wants ids as {FORMS}; got a scalar")
    shape = ids.shape[:-1]
    count = int(np.prod(shape, dtype=np.int64))
    segments = jnp.broadcast_to(jnp.arange(count).reshape(*shape, 1), ids.shape)
    if mask is not None:
        mask = jnp.asarray(mask)
        if mask.shape != ids.shape or mask.dtype != jnp.bool_:
            raise ValueError(
                f"{who} wants a mask bool{list(ids.shape)}, one for each id, got "
                f"{mask.dtype}{list(mask.shape)}"
            )
        segments = jnp.where(mask, segments, count)
    return ids, segments, shape, given


def _from_segments(given: Any, segment_ids: Any, num_segments: Any, who: str) -> _Form:
    ids, segments = as_ids(given, who), as_ids(segment_ids, who, "segment_ids")
    if ids.ndim != 1 or segments.shape != ids.shape:
        raise ValueError(
            f"{who} wants values [K] and segment_ids [K], got {list(ids.shape)} and "
            f"{list(segments.shape)}"
        )
    try:
        count = operator.index(num_segments)
    except (TypeError, jax.errors.ConcretizationTypeError) as error:
        raise TypeError(
            f"{who}: num_segments is the number of bags in the result and must be an int "
            f"known before tracing, got {num_segments!r}"
        ) from error
    if count < 0:
        raise ValueError(f"{who}: num_segments must not be negative, got {count}")
    return ids, segments, (count,), given


def _from_splits(given: Any, row_splits: Any, who: str) -> _Form:
    ids, splits = as_ids(given, who), as_ids(row_splits, who, "row_splits")
    if ids.ndim != 1 or splits.ndim != 1 or splits.shape[0] < 1:
        raise ValueError(
            f"{who} wants values [K] and row_splits [B + 1], got {list(ids.shape)} and "
            f"{list(splits.shape)}; bag b is values[row_splits[b]:row_splits[b + 1]]"
        )
    if not isinstance(splits, jax.core.Tracer):
        ends = np.asarray(splits)
        if ends[0] != 0 or (np.diff(ends) < 0).any() or ends[-1] > ids.shape[0]:
            raise ValueError(
                f"{who} got row_splits {ends.tolist()} for {ids.shape[0]} values; they "
                "must begin with 0, never fall, and end within the values (and a mask must "
                "be bool)"
            )
    count = splits.shape[0] - 1
    places = jnp.arange(ids.shape[0], dtype=splits.dtype)
    # What lies before the first split, or after the last, is in bag -1, or in bag B.
    segments = jnp.searchsorted(splits, places, side="right") - 1
    return ids, segments, (count,), given


def _from_bcoo(matrix: Any, who: str) -> _Form:
    ids, indices = as_ids(matrix.data, who), jnp.asarray(matrix.indices)
    shape = tuple(matrix.shape)
    if ids.ndim != 1 or indices.shape != (ids.shape[0], len(shape)):
        raise ValueError(
            f"{who} wants a BCOO matrix without batch or dense axes, got data "
            f"{list(ids.shape)}, indices {list(indices.shape)} and shape {list(shape)}"
        )
    good, segments = jnp.ones(ids.shape, bool), jnp.zeros(ids.shape, jnp.int32)
    for axis, size in enumerate(shape):
        at = canonical_indices(indices[:, axis], size)
        good &= at < size  # BCOO pads with what is out of range, on any axis
        if axis < len(shape) - 1:
            segments = segments * size + at.astype(jnp.int32)
    return ids, jnp.where(good, segments, -1), shape[:-1], matrix.data


def _weights(given: Any, shape: tuple[int, ...], who: str) -> jax.Array | None:
    if given is None:
        return None
    weights = jnp.asarray(given.data if _is_bcoo(given) else given)
    if weights.shape != tuple(shape):
        raise ValueError(
            f"{who} wants one weight for each id, {list(shape)}, got {list(weights.shape)}"
        )
    if not jnp.issubdtype(weights.dtype, jnp.number):
        raise TypeError(f"{who} wants numbers as weights, got {weights.dtype}")
    return weights.reshape(-1)
