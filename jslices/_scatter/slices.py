"""``apply_slices``: a scatter whose indices and updates are IndexedSlices."""

import jax
from jax.typing import ArrayLike

from jslices._rows.ids import as_ids, check_mode
from jslices._scatter.arguments import as_ref, as_updates, check_dtype
from jslices._scatter.kernels import KERNELS
from jslices._scatter.rows import refuse_bad_rows, scatter_rows
from jslices._slices import IndexedSlices, check_slices


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
    if op not in KERNELS:
        raise ValueError(f"apply_slices got op={op!r}; it must be one of {list(KERNELS)}")
    who = f"apply_slices(op={op!r})"
    check_slices(slices)
    ref = as_ref(ref, who)
    rows_fit = slices.shape[1:] == ref.shape[1:] and slices.shape[0] in (None, ref.shape[0])
    if not rows_fit:
        raise ValueError(
            f"{who} got slices of an array of shape {slices.shape} for ref of shape "
            f"{ref.shape}"
        )
    check_mode(mode, who)
    check_dtype(ref, op, who)
    indices = as_ids(slices.indices, who, "slices.indices")
    values = as_updates(slices.values, ref, slices.values.shape, who, "slices")
    axes = indices.ndim - 1
    if mode == "check":
        num_rows = ref.shape[axes]
        indices = refuse_bad_rows(slices.indices, indices, num_rows, who, "slices.indices")

    def one(ref: jax.Array, indices: jax.Array, values: jax.Array) -> jax.Array:
        return scatter_rows(op, ref, indices, values, mode)

    for _ in range(axes):
        one = jax.vmap(one)
    return one(ref, indices, values)
