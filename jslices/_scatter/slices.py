"""``apply_slices``: a scatter whose indices and updates are IndexedSlices."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jslices._scatter import rows
from jslices._scatter.arguments import as_ref
from jslices._slices import IndexedSlices, check_slices

_SCATTERS = {
    "add": rows.scatter_add,
    "sub": rows.scatter_sub,
    "update": rows.scatter_update,
    "mul": rows.scatter_mul,
    "div": rows.scatter_div,
    "min": rows.scatter_min,
    "max": rows.scatter_max,
}


def apply_slices(
    ref: ArrayLike, slices: IndexedSlices, op: str = "add", *, mode: str = "drop"
) -> jax.Array:
    """``ref`` changed by the rows of ``slices``, in place under jit with donation.

    Args:
      ref: ``[V, *D]`` (after ``vmap`` of the slices ``[*B, V, *D]``).
      slices: IndexedSlices of such an array, of the same dtype: ``values`` ``[K, *D]``,
        ``indices`` ``[K]``.
      op: ``"add"``, ``"sub"``, ``"mul"``, ``"div"``, ``"min"``, ``"max"`` or ``"update"``.
      mode: as in :func:`scatter_update`; with ``"check"`` an empty slot is an error.

    Returns:
      ``[V, *D]``: what ``scatter_<op>(ref, slices.indices, slices.values)`` gives.
      Untouched rows stay, duplicates are worked off in order, empty slots drop.

    Raises:
      TypeError: if ``slices`` are none, or of another dtype.
      ValueError: for an unknown ``op``, or if ``dense_shape`` is not the shape of ``ref``.

    Cost: that of the scatter; ``K * D`` elements.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> s = js.IndexedSlices(jnp.array([1., 2.]), jnp.array([3, 3]), (4,))
      >>> js.apply_slices(jnp.ones(4), s, "sub")
      Array([ 1.,  1.,  1., -2.], dtype=float32)

    Source: ``tf.Variable.scatter_add`` and its relatives, which never look at
    ``dense_shape``.
    """
    if not isinstance(slices, IndexedSlices):
        raise TypeError(
            f"apply_slices wants IndexedSlices, got {type(slices).__name__}; for arrays "
            "there is scatter_add(ref, indices, updates)"
        )
    if op not in _SCATTERS:
        raise ValueError(f"apply_slices got op={op!r}; it must be one of {list(_SCATTERS)}")
    check_slices(slices)
    ref = as_ref(ref, "apply_slices")
    rows_fit = slices.shape[1:] == ref.shape[1:] and slices.shape[0] in (None, ref.shape[0])
    if not rows_fit:
        raise ValueError(
            f"apply_slices got slices of an array of shape {slices.shape} for ref of shape "
            f"{ref.shape}"
        )
    scatter = _SCATTERS[op]
    if slices.indices.ndim == 1:
        return scatter(ref, slices.indices, slices.values, mode=mode)

    def one(ref: jax.Array, indices: jax.Array, values: jax.Array) -> jax.Array:
        return scatter(ref, indices, values, mode=mode)

    for _ in slices.indices.shape[:-1]:
        one = jax.vmap(one)
    return one(ref, slices.indices, jnp.asarray(slices.values))
