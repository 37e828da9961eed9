"""Adding updates to parameters."""

from typing import Any

import jax
import jax.numpy as jnp

from jslices._rows.bounds import add_rows, canonical_indices
from jslices._slices import IndexedSlices, check_slices, is_slices
from jslices.optim._engine.whole import EveryRow


def apply_updates(params: Any, updates: Any) -> Any:
    """``params`` plus ``updates``, in place where ``params`` are donated.

    Args:
      params: a pytree of arrays.
      updates: the same tree with, for each array ``[V, *D]``, an array of that shape, an
        IndexedSlices of it, or None (the array then stays).

    Returns:
      The new parameters, each in the dtype it had. Rows that an IndexedSlices does not
      name are neither read nor written; duplicates add; out-of-range indices drop.

    Raises:
      ValueError: for slices of an array of another shape.
      TypeError: for slices whose indices a foreign ``tree.map`` has changed.

    Cost: one scatter of ``U * D`` elements per IndexedSlices.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> params = {"table": jnp.zeros((4, 1)), "w": jnp.ones(2)}
      >>> rows = js.IndexedSlices(jnp.array([[5.0]]), jnp.array([2]), (4, 1))
      >>> js.apply_updates(params, {"table": rows, "w": None})["table"].ravel()
      Array([0., 0., 5., 0.], dtype=float32)

    Source: ``optax.apply_updates``, which gives the same result on these updates (but takes
    no None).
    """
    return jax.tree.map(_add, updates, params, is_leaf=lambda x: x is None or is_slices(x))


def _add(update: Any, param: Any) -> Any:
    if update is None or param is None:
        return param
    if not isinstance(update, IndexedSlices):
        return jnp.asarray(param + update).astype(jnp.asarray(param).dtype)
    param = jnp.asarray(param)
    check_fits(update, param)
    indices = canonical_indices(update.indices, param.shape[0])
    values = update.values.astype(param.dtype)
    if isinstance(update, EveryRow) and len(indices) == len(param):
        return param + values
    return add_rows(param, indices, values)


def check_fits(slices: IndexedSlices, param: jax.Array) -> None:
    """Raises unless ``slices`` are of an array of the parameter's shape."""
    check_slices(slices)
    rows = slices.values.shape[slices.indices.ndim :]
    expected = param.shape[:1] if slices.dense_shape is None else slices.dense_shape
    if param.shape != (*expected[:1], *rows) or slices.indices.ndim != 1:
        raise ValueError(
            f"cannot add {slices} to a parameter of shape {param.shape}; the shapes must "
            "be equal"
        )
