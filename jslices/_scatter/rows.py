"""``scatter_add`` and its six relatives: changing the rows that indices name."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jslices._rows.ids import as_ids, check_mode, refuse_bad_ids, settle
from jslices._scatter.arguments import as_ref, as_updates, check_dtype
from jslices._scatter.eager import compiled
from jslices._scatter.kernels import KERNELS


def scatter_update(
    ref: ArrayLike, indices: ArrayLike, updates: ArrayLike, *, mode: str = "drop"
) -> jax.Array:
    """``ref`` with rows replaced: ``ref[indices[k]] = updates[k]``, for every k in order.

    A pure function: the result is a new array, and under jit with ``ref`` donated it is
    written in place. This text holds for all of ``scatter_*``.

    Args:
      ref: ``[V, *D]`` of any dtype.
      indices: ``[*B]`` of any integer dtype and any rank, a scalar included.
      updates: ``[*B, *D]`` of the dtype of ``ref`` (an array of another dtype is refused,
        a Python number or list takes it), or one number for all rows.
      mode: what an index outside ``[0, V)`` does; a negative one never wraps round.
        ``"drop"`` (or ``"fill"``): nothing. ``"clip"``: it means the nearest row.
        ``"promise_in_bounds"``: undefined, for indices known to be right. ``"check"``: it
        is an error, and nothing at all is written.

    Returns:
      ``[V, *D]``, the dtype of ``ref``. Rows that no index names are untouched. Of
      duplicates the last in row-major order stays, on every backend.

    Raises:
      TypeError: if ``indices`` are not integers or the dtypes differ.
      ValueError: if the shapes do not fit together, or for an unknown ``mode``.
      IndexError: (also a ValueError) in mode ``"check"``, for the first bad index, naming
        position, value and range; under jit through ``jax.experimental.checkify``.

    Cost: a sort of K integers, writes ``K * D`` elements.

    Differentiable in ``ref`` (nothing for replaced rows) and in ``updates`` (nothing for
    those that were overwritten).

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> js.scatter_update(jnp.zeros(4), [1, 3, 1, 9], jnp.array([1., 2., 5., 7.]))
      Array([0., 5., 0., 2.], dtype=float32)

    Source: ``tf._jax.v1.scatter_update``, which changes a variable, and raises for a bad
    index after having changed the rows before it.
    """
    return _scatter("update", ref, indices, updates, mode)


def scatter_add(
    ref: ArrayLike, indices: ArrayLike, updates: ArrayLike, *, mode: str = "drop"
) -> jax.Array:
    """``ref`` with rows added: ``ref[indices[k]] += updates[k]``.

    Duplicates accumulate. ``ref`` is ``[V, *D]``, ``indices`` ``[*B]``, ``updates`` ``[*B,
    *D]`` or one number, the result ``[V, *D]``; untouched rows, bad indices (``mode``),
    dtypes and errors are as in :func:`scatter_update`.

    Cost: one scatter of ``K * D`` elements. Differentiable in ``ref`` and ``updates``.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> js.scatter_add(jnp.zeros(3), [0, 2, 0], jnp.array([1., 2., 3.]))
      Array([4., 0., 2.], dtype=float32)

    Source: ``tf._jax.v1.scatter_add``.
    """
    return _scatter("add", ref, indices, updates, mode)


def scatter_sub(
    ref: ArrayLike, indices: ArrayLike, updates: ArrayLike, *, mode: str = "drop"
) -> jax.Array:
    """``ref`` with rows subtracted: ``ref[indices[k]] -= updates[k]``.

    Duplicates accumulate; unsigned integers wrap. ``ref`` is ``[V, *D]``, ``indices``
    ``[*B]``, ``updates`` ``[*B, *D]`` or one number, the result ``[V, *D]``; untouched
    rows, bad indices (``mode``), dtypes and errors are as in :func:`scatter_update`.

    Cost: one scatter of ``K * D`` elements. Differentiable in ``ref`` and ``updates``.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> js.scatter_sub(jnp.zeros(3), [0, 2, 0], 1)
      Array([-2.,  0., -1.], dtype=float32)

    Source: ``tf._jax.v1.scatter_sub``.
    """
    return _scatter("sub", ref, indices, updates, mode)


def scatter_mul(
    ref: ArrayLike, indices: ArrayLike, updates: ArrayLike, *, mode: str = "drop"
) -> jax.Array:
    """``ref`` with rows multiplied: ``ref[indices[k]] *= updates[k]``.

    Duplicates compound. ``ref`` is ``[V, *D]``, ``indices`` ``[*B]``, ``updates`` ``[*B,
    *D]`` or one number, the result ``[V, *D]``; untouched rows, bad indices (``mode``),
    dtypes and errors are as in :func:`scatter_update`.

    Cost: one scatter of ``K * D`` elements; the derivative sorts K integers as well.
    Differentiable in ``ref`` and ``updates``, also where a factor is zero.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> js.scatter_mul(jnp.ones(3), [0, 2, 0], jnp.array([2., 5., 3.]))
      Array([6., 1., 5.], dtype=float32)

    Source: ``tf._jax.v1.scatter_mul``.
    """
    return _scatter("mul", ref, indices, updates, mode)


def scatter_div(
    ref: ArrayLike, indices: ArrayLike, updates: ArrayLike, *, mode: str = "drop"
) -> jax.Array:
    """``ref`` with rows divided: ``ref[indices[k]] /= updates[k]``.

    Duplicates compound: floats are divided once, by the product of their divisors (of 16
    bits as float32); integers truncate towards zero each time. An integer divided by zero
    is -1 (all bits set, XLA's rule); TensorFlow's process dies of it. ``ref`` is ``[V,
    *D]``, ``indices`` ``[*B]``, ``updates`` ``[*B, *D]`` or one number, the result ``[V,
    *D]``; untouched rows, bad indices (``mode``), dtypes and errors are as in
    :func:`scatter_update`.

    Cost: a sort of K integers and a scan of ``K * D`` elements; for integers a loop of K
    steps. Differentiable in ``ref`` and ``updates``.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> js.scatter_div(jnp.array([7, 7, -7]), [0, 2, 0], jnp.array([2, 2, 2]))
      Array([ 1,  7, -3], dtype=int32)

    Source: ``tf._jax.v1.scatter_div``.
    """
    return _scatter("div", ref, indices, updates, mode)


def scatter_min(
    ref: ArrayLike, indices: ArrayLike, updates: ArrayLike, *, mode: str = "drop"
) -> jax.Array:
    """``ref`` with rows lowered: minimum of ``ref[indices[k]]`` and ``updates[k]``.

    Duplicates fold. A NaN wins, as in ``jnp.minimum`` (in TensorFlow the stored value
    does). ``ref`` is ``[V, *D]``, ``indices`` ``[*B]``, ``updates`` ``[*B, *D]`` or one
    number, the result ``[V, *D]``; untouched rows, bad indices (``mode``), dtypes and
    errors are as in :func:`scatter_update`.

    Cost: one scatter of ``K * D`` elements. Differentiable; where several are smallest they
    share the gradient, as in ``jnp.min``.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> js.scatter_min(jnp.zeros(3), [0, 2, 0], jnp.array([1., 2., -3.]))
      Array([-3.,  0.,  0.], dtype=float32)

    Source: ``tf._jax.v1.scatter_min``, which knows fewer dtypes.
    """
    return _scatter("min", ref, indices, updates, mode)


def scatter_max(
    ref: ArrayLike, indices: ArrayLike, updates: ArrayLike, *, mode: str = "drop"
) -> jax.Array:
    """``ref`` with rows raised: maximum of ``ref[indices[k]]`` and ``updates[k]``.

    Duplicates fold. A NaN wins, as in ``jnp.maximum``. ``ref`` is ``[V, *D]``, ``indices``
    ``[*B]``, ``updates`` ``[*B, *D]`` or one number, the result ``[V, *D]``; untouched
    rows, bad indices (``mode``), dtypes and errors are as in :func:`scatter_update`.

    Cost: one scatter of ``K * D`` elements. Differentiable; where several are largest they
    share the gradient, as in ``jnp.max``.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> js.scatter_max(jnp.zeros(3), [0, 2, 0], jnp.array([1., 2., -3.]))
      Array([1., 0., 2.], dtype=float32)

    Source: ``tf._jax.v1.scatter_max``, which knows fewer dtypes.
    """
    return _scatter("max", ref, indices, updates, mode)


def _scatter(op: str, ref: Any, indices: Any, updates: Any, mode: str) -> jax.Array:
    who = f"scatter_{op}"
    check_mode(mode, who)
    ref, numbers = as_ref(ref, who), as_ids(indices, who, "indices")
    check_dtype(ref, op, who)
    updates = as_updates(updates, ref, (*numbers.shape, *ref.shape[1:]), who)
    if mode == "check":
        numbers = refuse_bad_rows(indices, numbers, ref.shape[0], who, "indices")
    return scatter_rows(op, ref, numbers, updates, mode)


def refuse_bad_rows(
    given: Any, indices: jax.Array, num_rows: int, who: str, name: str
) -> jax.Array:
    """``indices``; raises if one of them is bad, and under jit makes all of them bad then.

    So nothing at all is written. ``given`` are the same as the user passed them.
    """
    any_bad = refuse_bad_ids(given, num_rows, who, name)
    if any_bad is None:
        return indices
    return jnp.where(any_bad, -1, settle(indices, num_rows, "drop"))


@compiled(0, 4)
def scatter_rows(
    op: str, ref: jax.Array, indices: jax.Array, updates: jax.Array, mode: str
) -> jax.Array:
    """The scatter itself, of checked arguments: ``indices [*B]``, ``updates [*B, *D]``."""
    flat = settle(indices.reshape(-1), ref.shape[0], mode)
    return KERNELS[op](ref, flat, updates.reshape(flat.shape[0], *ref.shape[1:]))
