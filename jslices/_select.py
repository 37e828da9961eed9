"""Select rows: ``sparse_mask`` drops some, ``from_dense`` takes those not zero."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jslices._place.boundary import everywhere, on_any_mesh
from jslices._rows import access
from jslices._rows.ids import as_ids
from jslices._slices import IndexedSlices, check_slices, is_slices, slices_of


def sparse_mask(
    a: IndexedSlices, mask_indices: ArrayLike, size: int | None = None
) -> IndexedSlices:
    """``a`` without the rows at ``mask_indices``.

    Args:
      a: IndexedSlices, ``values`` ``[K, *D]``, ``indices`` ``[K]``.
      mask_indices: ``[M]`` integers, the rows to leave out, unique or not, in ``a`` or not.
      size: U, the static number of entries of the result. None: as many as are kept, or K
        under jit, where that is not known.

    Returns:
      IndexedSlices of the same ``dense_shape``: the entries whose index is *not* in
      ``mask_indices``, in their order and with their duplicates; then empty entries (index
      V, zero values) up to ``size``. With ``size``, or under jit, empty entries of ``a``
      make room for others; otherwise they stay, as in TensorFlow, unless masked.

    Raises:
      TypeError: if ``a`` is not IndexedSlices or ``mask_indices`` are not integers.
      ValueError: if ``mask_indices`` do not have one axis, or if more than ``size`` rows
        are kept; under jit, where nothing can be raised, floating values become NaN.

    Cost: a sort of K + M integers, copies the rows kept. Differentiable in ``a.values``.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> a = js.IndexedSlices(jnp.ones((4, 2)), jnp.array([12, 26, 37, 45]), (50, 2))
      >>> js.sparse_mask(a, [12, 45]).indices
      Array([26, 37], dtype=int32)

    Source: ``tf.sparse.mask``, whose documentation says the opposite of what the function
    and its own example do. There both index dtypes must be the same.
    """
    if not isinstance(a, IndexedSlices):
        raise TypeError(
            f"sparse_mask wants IndexedSlices, got {type(a).__name__}; for an array: "
            "sparse_mask(from_dense(array), mask_indices)"
        )
    check_slices(a)
    masked = as_ids(mask_indices, "sparse_mask", "mask_indices")
    if masked.ndim != 1:
        raise ValueError(
            f"sparse_mask wants mask_indices with one axis, got {list(masked.shape)}; "
            "flatten them: mask_indices.reshape(-1)"
        )
    if a.indices.ndim > 1:
        size = a.indices.shape[-1] if size is None else size
        return jax.vmap(lambda s: sparse_mask(s, masked, size))(a)
    parts = _not_masked(a.values, a.indices, masked, num_rows=a.num_rows, size=size)
    return slices_of(*parts, a.dense_shape)


@on_any_mesh(everywhere)
def _not_masked(
    values: jax.Array,
    indices: jax.Array,
    masked: jax.Array,
    *,
    num_rows: int | None,
    size: int | None,
) -> tuple[jax.Array, jax.Array]:
    """The values and indices of the entries that are not masked."""
    canonical = access.canonical_indices(indices, num_rows)
    empty = access.empty_index(num_rows, canonical.dtype)
    keep = ~jnp.isin(indices, masked)
    exact = size is None and not isinstance(keep, jax.core.Tracer)
    keep = keep if exact else keep & (canonical != empty)
    positions, too_many = access.kept_positions(keep, size, "sparse_mask")
    if exact:
        indices = access.take_rows(indices, positions, fill_value=0)
    else:
        indices = access.take_rows(canonical, positions, fill_value=empty)
    return access.pick(values, positions, too_many), indices


def from_dense(x: ArrayLike, size: int | None = None) -> IndexedSlices:
    """The rows of an array that are not all zero, as IndexedSlices.

    Args:
      x: ``[V, *D]`` of any dtype.
      size: U, the static number of entries. None: as many as there are such rows; under
        jit, where that is not known, V.

    Returns:
      ``values`` ``[U, *D]``, ``indices`` ``[U]`` sorted and unique (int32), then empty
      entries (index V, zero values). ``to_dense()`` gives ``x`` back.

    Raises:
      TypeError: for IndexedSlices, or a ``size`` that is not an int.
      ValueError: for a scalar, or if more than ``size`` rows are not zero; under jit,
        where nothing can be raised, floating values become NaN.

    Cost: reads ``V * D`` elements.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> js.from_dense(jnp.array([0., 3., 0., 4.])).indices
      Array([1, 3], dtype=int32)

    Source: ``jax.experimental.sparse.BCOO.fromdense``, for rows.
    """
    if is_slices(x):
        raise TypeError(f"from_dense wants an array, got {x}, which holds rows already")
    return IndexedSlices.from_dense(x, size)
