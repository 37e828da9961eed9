"""``scatter_nd_*`` and ``batch_scatter_update``: indices that reach deeper than rows."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jslices._place.boundary import like_first, on_any_mesh, one_program
from jslices._rows.access import DROP
from jslices._rows.ids import as_ids, check_mode, on_host, refuse_first, settle
from jslices._scatter.kernels import update
from jslices._scatter.rows import as_ref, as_updates, check_dtype, refuse_bad_rows


def scatter_nd_update(
    ref: ArrayLike, indices: ArrayLike, updates: ArrayLike, *, mode: str = "drop"
) -> jax.Array:
    """``ref`` with elements or slices replaced: ``ref[tuple(indices[k])] = updates[k]``.

    All of this holds for every ``scatter_nd_*``.

    Args:
      ref: ``[N1, N2, ...]`` of any dtype.
      indices: ``[*B, d]`` of any integer dtype, d at most the rank of ``ref``: the first d
        coordinates of what is changed.
      updates: ``[*B, *ref.shape[d:]]`` of the dtype of ``ref``, or one number.
      mode: as in :func:`scatter_update`, for every coordinate; negative never wraps.

    Returns:
      The shape and dtype of ``ref``; the rest of it untouched. The last of duplicates, in
      row-major order, stays.

    Raises:
      TypeError, ValueError: as :func:`scatter_update`.
      IndexError: (also a ValueError) in mode ``"check"``.

    Cost: a sort of K index tuples; writes only the named elements. No flat offsets are
    formed, so arrays of more than 2^31 elements work.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> js.scatter_nd_update(jnp.zeros((2, 2)), [[0, 1], [1, 0]], jnp.array([3., 4.]))
      Array([[0., 3.],
             [4., 0.]], dtype=float32)

    Source: ``tf.compat.v1.scatter_nd_update`` and ``tf.tensor_scatter_nd_update``, which
    raise for a bad index.
    """
    return _scatter_nd("update", ref, indices, updates, mode)


def scatter_nd_add(
    ref: ArrayLike, indices: ArrayLike, updates: ArrayLike, *, mode: str = "drop"
) -> jax.Array:
    """``ref`` with elements or slices added; duplicates accumulate.

    Shapes, modes and errors are those of :func:`scatter_nd_update`; no sort.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> js.scatter_nd_add(jnp.zeros((2, 2)), [[0, 1], [0, 1]], jnp.array([3., 4.]))[0]
      Array([0., 7.], dtype=float32)

    Source: ``tf.compat.v1.scatter_nd_add``; on zeros, ``tf.scatter_nd``.
    """
    return _scatter_nd("add", ref, indices, updates, mode)


def scatter_nd_sub(
    ref: ArrayLike, indices: ArrayLike, updates: ArrayLike, *, mode: str = "drop"
) -> jax.Array:
    """``ref`` with elements or slices subtracted; duplicates accumulate.

    Shapes, modes and errors are those of :func:`scatter_nd_update`; no sort.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> js.scatter_nd_sub(jnp.zeros((2, 2)), [[1]], jnp.array([[3., 4.]]))[1]
      Array([-3., -4.], dtype=float32)

    Source: ``tf.compat.v1.scatter_nd_sub``.
    """
    return _scatter_nd("sub", ref, indices, updates, mode)


def batch_scatter_update(
    ref: ArrayLike, indices: ArrayLike, updates: ArrayLike, *, mode: str = "drop"
) -> jax.Array:
    """Rows replaced in every example of a batch: ``ref[b, indices[b, k]] = updates[b, k]``.

    Args:
      ref: ``[*B, V, *D]`` of any dtype.
      indices: ``[*B, K]`` of any integer dtype; its leading axes are those of the batch.
      updates: ``[*B, K, *D]`` of the dtype of ``ref``, or one number.
      mode: as in :func:`scatter_update`.

    Returns:
      ``[*B, V, *D]``. The last of duplicates within an example stays.

    Raises:
      TypeError, ValueError, IndexError: as :func:`scatter_update`.

    Cost: a sort of K integers for each example; writes only the named rows.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> js.batch_scatter_update(jnp.zeros((2, 3)), [[0], [2]], jnp.array([[1.], [2.]]))
      Array([[1., 0., 0.],
             [0., 0., 2.]], dtype=float32)

    Source: ``tf.compat.v1.batch_scatter_update``.
    """
    caller = "batch_scatter_update"
    check_mode(mode, caller)
    ref, numbers = as_ref(ref, caller), as_ids(indices, caller, "indices")
    batch = numbers.shape[:-1]
    if numbers.ndim < 1 or ref.ndim < numbers.ndim or ref.shape[: len(batch)] != batch:
        raise ValueError(
            f"{caller} wants ref [*B, V, *D] and indices [*B, K] of the same batch *B, got "
            f"ref {list(ref.shape)} and indices {list(numbers.shape)}"
        )
    num_rows = ref.shape[len(batch)]
    rows = as_updates(updates, ref, (*numbers.shape, *ref.shape[numbers.ndim :]), caller)
    if mode == "check":
        numbers = refuse_bad_rows(indices, numbers, num_rows, caller, "indices")
    return _batch_update(ref, numbers, rows, mode=mode)


@one_program
@on_any_mesh(like_first)
def _batch_update(
    ref: jax.Array, indices: jax.Array, updates: jax.Array, *, mode: str
) -> jax.Array:
    axes = indices.ndim - 1
    one = update
    for _ in range(axes):
        one = jax.vmap(one)
    return one(ref, settle(indices, ref.shape[axes], mode), updates)


def _scatter_nd(
    op: str, ref: ArrayLike, indices: ArrayLike, updates: ArrayLike, mode: str
) -> jax.Array:
    caller = f"scatter_nd_{op}"
    check_mode(mode, caller)
    ref, numbers = as_ref(ref, caller), as_ids(indices, caller, "indices")
    check_dtype(ref, op, caller)
    depth = numbers.shape[-1] if numbers.ndim else 0
    if not 1 <= depth <= ref.ndim:
        raise ValueError(
            f"{caller} wants indices [..., d] with 1 <= d <= {ref.ndim}, the rank of ref, "
            f"got indices {list(numbers.shape)}; for rows: indices[..., None]"
        )
    shape = (*numbers.shape[:-1], *ref.shape[depth:])
    rows = as_updates(updates, ref, shape, caller)
    if mode == "check":
        numbers = _refuse_bad_elements(indices, numbers, ref.shape, caller)
    return _scatter_elements(ref, numbers, rows, op=op, mode=mode)


@one_program
@on_any_mesh(like_first)
def _scatter_elements(
    ref: jax.Array, indices: jax.Array, updates: jax.Array, *, op: str, mode: str
) -> jax.Array:
    depth = indices.shape[-1]
    flat = indices.reshape(-1, depth)
    where = [settle(flat[:, i], ref.shape[i], mode) for i in range(depth)]
    updates = updates.reshape(flat.shape[0], *ref.shape[depth:])
    if op == "update":
        last, unique = _last_of_each(where, ref.shape)
        return ref.at[tuple(last)].set(updates, **DROP, unique_indices=unique)
    updates = -updates if op == "sub" else updates
    return ref.at[tuple(where)].add(updates, **DROP)


def _last_of_each(
    where: list[jax.Array], shape: tuple[int, ...]
) -> tuple[list[jax.Array], bool]:
    """The coordinates, moved out of range wherever the same ones occur again later.

    Returns:
      ``(where, unique)``; if ``unique``, no two are equal, those out of range included.
    """
    count, dtype = where[0].shape[0], where[0].dtype
    if count == 0:
        return where, True
    order = lax.iota(jnp.int32, count)
    *ordered, positions = lax.sort((*where, order), num_keys=len(where), is_stable=True)
    again = jnp.stack([x[1:] == x[:-1] for x in ordered]).all(0)
    again = jnp.concatenate([again, jnp.zeros((1,), bool)])
    dropped = jnp.zeros(count, bool).at[positions].set(again, unique_indices=True)
    for at, length in zip(where, shape, strict=False):
        dropped |= at == length
    unique = shape[0] + count <= np.iinfo(dtype).max
    beyond = shape[0] + order.astype(dtype) if unique else jnp.asarray(shape[0], dtype)
    return [jnp.where(dropped, beyond, where[0]), *where[1:]], unique


def _refuse_bad_elements(
    original: ArrayLike, indices: jax.Array, shape: tuple[int, ...], caller: str
) -> jax.Array:
    """``indices`` ``[*B, d]``; raises for the first that is not within ``shape``.

    Under jit this goes through checkify, and all are out of range if one is, so that
    nothing is written. ``original`` are the indices as the user passed them.
    """
    host, lengths = on_host(original), shape[: indices.shape[-1]]
    if indices.size == 0:
        return indices
    message = f"{caller}: indices{{at}} = [{{value}}] does not index into shape {[*shape]}"
    if host is None and isinstance(indices, jax.core.Tracer):
        settled = [settle(indices[..., i], n, "drop") for i, n in enumerate(lengths)]
        bad = jnp.stack([x == n for x, n in zip(settled, lengths, strict=True)]).any(0)
        any_bad = refuse_first(bad, indices, message)
        return jnp.where(any_bad, -1, jnp.stack(settled, -1))
    array = np.asarray(indices) if host is None else host
    refuse_first(((array < 0) | (array >= lengths)).any(-1), array, message)
    return indices
