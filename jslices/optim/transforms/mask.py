"""Freezing rows: a row without gradient cannot move."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jslices._rows.bounds import canonical_indices, empty_slot, take_rows
from jslices._slices import IndexedSlices, check_slices, is_slices
from jslices.optim.transforms.leaves import as_leaf

Keep = jax.Array | np.ndarray | Callable[[jax.Array], jax.Array]


def mask_rows(slices: Any, keep: Keep) -> Any:
    """The gradient without the rows that are to stay as they are.

    The slots of frozen rows become empty (index ``V``, zero values). A lazy optimizer
    neither reads nor writes a row that no slot names, so it cannot move: not by momentum,
    not by weight decay. Duplicates stay duplicates.

    Where rows catch up (``untouched="exact"``, or ``weight_decay_mode="all"``), a row
    without gradient goes on moving, and these gradients cannot tell that it is frozen: mark
    it in the optimizer's state, once, by :func:`jslices.optim.freeze_rows`. It then cannot
    move, decay included, and needs no mask.

    Args:
      slices: IndexedSlices with values ``[K, *D]``, or an array ``[V, *D]``.
      keep: which rows may move. bool ``[V]``, by row number; or a function that gets the
        indices ``[K]`` (``V`` in empty slots) and returns bool ``[K]``; or bool ``[K]``,
        slot by slot, where ``K`` is not ``V`` (where it is, or ``dense_shape`` is None, an
        array goes by row number: pass a function).

    Returns:
      IndexedSlices with values ``[K, *D]`` and indices ``[K]``, in the order they came.
      Of an array, the array with zeros in the frozen rows: then the gradient is zero, but
      an optimizer may still move them by momentum or decay.

    Raises:
      TypeError: for a tree of gradients, if ``keep`` is not bool, or if a foreign
        ``tree.map`` has changed the indices.
      ValueError: if it has another length.

    Cost: reads and writes ``K * D`` elements, and reads K bools.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> grads = js.IndexedSlices(jnp.array([1., 2., 3.]), jnp.array([7, 2, 7]), (9,))
      >>> js.mask_rows(grads, lambda indices: indices >= 5).indices  # new tokens only
      Array([7, 9, 7], dtype=int32)

    Source: ours. People train new tokens of a large vocabulary by copying the old rows
    back after every step, or zero the gradient and find that weight decay moved them.
    """
    if not is_slices(slices) and not hasattr(slices, "ndim"):
        raise TypeError(
            "mask_rows wants one gradient, IndexedSlices or an array, got a "
            f"{type(slices).__name__}; of a tree mask the leaf of each table: "
            '{**grads, "table": mask_rows(grads["table"], keep)}'
        )
    slices = as_leaf(slices)
    if not isinstance(slices, IndexedSlices):
        array = slices
        if array.ndim == 0:
            raise ValueError("mask_rows wants rows [V, *D], got a scalar")
        rows = jnp.arange(array.shape[0], dtype=jnp.int32)
        allowed = _allowed(keep, rows, array.shape[0])
        return _zeroed(array, allowed)
    check_slices(slices)
    num_rows = None if slices.dense_shape is None else slices.dense_shape[0]
    indices = canonical_indices(slices.indices, num_rows)
    empty = empty_slot(num_rows, indices.dtype)
    allowed = _allowed(keep, indices, num_rows) & (indices != empty)
    return IndexedSlices.tree_unflatten(
        slices.dense_shape,
        (
            _zeroed(slices.values, allowed),
            jnp.where(allowed, indices, jnp.array(empty, indices.dtype)),
        ),
    )


def _allowed(keep: Keep, indices: jax.Array, num_rows: int | None) -> jax.Array:
    """bool, like ``indices``: whether each slot's row may move."""
    by_slot = callable(keep)
    mask = jnp.asarray(keep(indices) if callable(keep) else keep)
    if mask.dtype != bool:
        raise TypeError(
            f"mask_rows wants keep to be bool, got {mask.dtype}{list(mask.shape)}; to keep "
            "rows by their numbers: keep=lambda indices: jnp.isin(indices, ids)"
        )
    if not by_slot and mask.ndim == 1 and num_rows in (None, mask.shape[0]):
        return take_rows(mask, indices, fill_value=False)
    if mask.shape != indices.shape:
        wanted = f"{list(indices.shape)} (one for each slot)"
        if not by_slot:
            wanted = f"[{num_rows}] (one for each row of the table) or {wanted}"
        raise ValueError(f"mask_rows wants keep of shape {wanted}, got {list(mask.shape)}")
    return mask


def _zeroed(rows: jax.Array, allowed: jax.Array) -> jax.Array:
    shape = allowed.shape + (1,) * (rows.ndim - allowed.ndim)
    return jnp.where(allowed.reshape(shape), rows, jnp.zeros((), rows.dtype))
