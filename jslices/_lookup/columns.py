"""Sparse matrices of weights, whose column numbers are the ids of bags."""

import math
import sys
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from jslices._lookup.embedding import Tables, as_tables
from jslices._rows.access import canonical_indices

#: A BCOO or BCSR matrix of ``jax.experimental.sparse``, or one of SciPy.
Matrix: TypeAlias = Any


def columns_of(
    matrix: Matrix, params: Tables, caller: str
) -> tuple[tuple[Any, jax.Array, int], jax.Array, tuple[int, ...]]:
    """``((ids [K], bags [K], number), weights [K], shape)`` of a matrix ``[*B, V]``.

    Elements with an index out of range are padding, and in no bag. ``shape`` is ``*B``.
    """
    if is_of_kind(matrix, "BCSR"):
        matrix = matrix.to_bcoo()
    is_bcoo = is_of_kind(matrix, "BCOO")
    if not is_bcoo and not hasattr(matrix, "tocoo"):
        raise TypeError(
            f"{caller} without ids wants as weights a BCOO or BCSR matrix [*B, V] of "
            "jax.experimental.sparse, or one of SciPy, whose column numbers are the ids; "
            f"got {type(matrix).__name__}"
        )
    shape, num_rows = tuple(matrix.shape), sum(len(x) for x in as_tables(params, caller))
    if not shape or shape[-1] > num_rows:
        raise ValueError(
            f"{caller} got weights {list(shape)}, whose columns are the ids, for a table "
            f"of {num_rows} rows"
        )
    if is_bcoo:
        weights, places = _elements(matrix, shape, caller)
    else:
        matrix = matrix.tocoo()
        weights, places = matrix.data, [matrix.row, matrix.col]
    weights = jnp.asarray(weights)
    weights = weights.astype(int) if weights.dtype == jnp.bool_ else weights
    ids = places[-1], bags_of(places, shape), math.prod(shape[:-1])
    return ids, weights, shape[:-1]


def _elements(
    matrix: Matrix, shape: tuple[int, ...], caller: str
) -> tuple[jax.Array, list[jax.Array]]:
    """The elements ``[K]`` of a BCOO matrix, and where they are along each axis."""
    batch, sparse = matrix.indices.ndim - 2, matrix.indices.shape[-1]
    if batch + sparse < len(shape) or not sparse:
        raise ValueError(
            f"{caller} wants a matrix of weights whose last axis is sparse, got data "
            f"{list(matrix.data.shape)}, indices {list(matrix.indices.shape)} and shape "
            f"{list(shape)}"
        )
    every = (*shape[:batch], matrix.indices.shape[-2])
    indices = jnp.broadcast_to(matrix.indices, (*every, sparse)).reshape(-1, sparse)
    places = [
        *(jax.lax.broadcasted_iota(jnp.int32, every, axis) for axis in range(batch)),
        *(indices[:, axis] for axis in range(sparse)),
    ]
    weights = jnp.broadcast_to(matrix.data, every).reshape(-1)
    return weights, [place.reshape(-1) for place in places]


def bags_of(places: Sequence[Any], shape: Sequence[int]) -> jax.Array:
    """The bag ``[K]`` of each element of a matrix ``[*B, V]``; -1 for padding.

    ``places`` ``[K]`` say where they are along each axis.
    """
    good, bags = jnp.array(True), jnp.zeros(places[0].shape, jnp.int32)
    for axis, (place, size) in enumerate(zip(places, shape, strict=True)):
        at = canonical_indices(jnp.asarray(place), size)
        good = good & (at < size)
        if axis < len(shape) - 1:
            bags = bags * size + at.astype(jnp.int32)
    return jnp.where(good, bags, -1)


def is_of_kind(x: object, kind: str) -> bool:
    """Whether an object is of this class of ``jax.experimental.sparse``."""
    sparse = sys.modules.get("jax.experimental.sparse")  # which takes long to import
    return sparse is not None and isinstance(x, getattr(sparse, kind))
