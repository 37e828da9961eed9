"""``scatter_add`` and its six relatives, ``apply_slices``: changing rows of an array."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jslices._arguments import OneOf
from jslices._place.boundary import like_first, on_any_mesh, one_program, row_major_array
from jslices._rows.access import height_of, rows_numbered
from jslices._rows.ids import as_ids, check_mode, refuse_bad_ids, settle
from jslices._scatter.kernels import KERNELS
from jslices._slices import IndexedSlices, check_slices, each_shard, is_slices


def scatter_update(
    ref: ArrayLike, indices: ArrayLike, updates: ArrayLike, *, mode: str = "drop"
) -> jax.Array:
    """``ref`` with rows replaced: ``ref[indices[k]] = updates[k]``, for every k in order.

    A pure function: the result is a new array, which under jit is written in place when
    ``ref`` is donated. All of this holds for every ``scatter_*``.

    Args:
      ref: ``[V, *D]`` of any dtype.
      indices: ``[*B]`` of any integer dtype and any rank, a scalar included.
      updates: ``[*B, *D]`` of the dtype of ``ref`` (an array of another dtype is refused,
        a Python number or list takes it), or one number for all rows.
      mode: what an index outside ``[0, V)`` does; a negative one never wraps round.
        ``"drop"`` (or ``"fill"``): nothing. ``"clip"``: it means the nearest row.
        ``"promise_in_bounds"``: undefined, for indices known to be in range. ``"check"``:
        it is an error, and nothing at all is written.

    Returns:
      ``[V, *D]``, the dtype of ``ref``. Rows that no index names are untouched. The last of
      duplicates, in row-major order, stays on every backend.

    Raises:
      TypeError: if ``indices`` are not integers or the dtypes differ.
      ValueError: if the shapes do not fit together, or for an unknown ``mode``.
      IndexError: (also a ValueError) in mode ``"check"``, for the first bad index, naming
        position, value and range; under jit through ``jax.experimental.checkify``.

    Cost: a sort of K integers, writes ``K * D`` elements.

    Differentiable in ``ref`` (zero for replaced rows) and in ``updates`` (zero for those
    that were overwritten).

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> js.scatter_update(jnp.zeros(4), [1, 3, 1, 9], jnp.array([1., 2., 5., 7.]))
      Array([0., 5., 0., 2.], dtype=float32)

    Source: ``tf.compat.v1.scatter_update``, which changes a variable and raises for a bad
    index only after it has changed the rows before it.
    """
    return _scatter("update", ref, indices, updates, mode)


def scatter_add(
    ref: ArrayLike, indices: ArrayLike, updates: ArrayLike, *, mode: str = "drop"
) -> jax.Array:
    """``ref`` with rows added: ``ref[indices[k]] += updates[k]``.

    Duplicates accumulate. Shapes, modes and errors are those of :func:`scatter_update`.

    Cost: one scatter of ``K * D`` elements. Differentiable in ``ref`` and ``updates``.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> js.scatter_add(jnp.zeros(3), [0, 2, 0], jnp.array([1., 2., 3.]))
      Array([4., 0., 2.], dtype=float32)

    Source: ``tf.compat.v1.scatter_add``.
    """
    return _scatter("add", ref, indices, updates, mode)


def scatter_sub(
    ref: ArrayLike, indices: ArrayLike, updates: ArrayLike, *, mode: str = "drop"
) -> jax.Array:
    """``ref`` with rows subtracted: ``ref[indices[k]] -= updates[k]``.

    Duplicates accumulate; unsigned integers wrap. All else, shapes, modes and errors, is
    as in :func:`scatter_update`.

    Cost: one scatter of ``K * D`` elements. Differentiable in ``ref`` and ``updates``.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> js.scatter_sub(jnp.zeros(3), [0, 2, 0], 1)
      Array([-2.,  0., -1.], dtype=float32)

    Source: ``tf.compat.v1.scatter_sub``.
    """
    return _scatter("sub", ref, indices, updates, mode)


def scatter_mul(
    ref: ArrayLike, indices: ArrayLike, updates: ArrayLike, *, mode: str = "drop"
) -> jax.Array:
    """``ref`` with rows multiplied: ``ref[indices[k]] *= updates[k]``.

    Duplicates compound. Shapes, modes and errors are those of :func:`scatter_update`.

    Cost: one scatter of ``K * D`` elements; the derivative sorts K integers as well.
    Differentiable in ``ref`` and ``updates``, also where a factor is zero.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> js.scatter_mul(jnp.ones(3), [0, 2, 0], jnp.array([2., 5., 3.]))
      Array([6., 1., 5.], dtype=float32)

    Source: ``tf.compat.v1.scatter_mul``.
    """
    return _scatter("mul", ref, indices, updates, mode)


def scatter_div(
    ref: ArrayLike, indices: ArrayLike, updates: ArrayLike, *, mode: str = "drop"
) -> jax.Array:
    """``ref`` with rows divided: ``ref[indices[k]] /= updates[k]``.

    Duplicates compound: floats are divided once, by the product of their divisors (of 16
    bits as float32); integers truncate towards zero each time. An integer divided by zero
    is -1 (all bits set, XLA's rule); in TensorFlow it kills the process. All else, shapes,
    modes and errors, is as in :func:`scatter_update`.

    Cost: a sort of K integers and a scan of ``K * D`` elements; for integers a loop of K
    steps. Differentiable in ``ref`` and ``updates``.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> js.scatter_div(jnp.array([7, 7, -7]), [0, 2, 0], jnp.array([2, 2, 2]))
      Array([ 1,  7, -3], dtype=int32)

    Source: ``tf.compat.v1.scatter_div``.
    """
    return _scatter("div", ref, indices, updates, mode)


def scatter_min(
    ref: ArrayLike, indices: ArrayLike, updates: ArrayLike, *, mode: str = "drop"
) -> jax.Array:
    """``ref`` with rows lowered: minimum of ``ref[indices[k]]`` and ``updates[k]``.

    Duplicates fold. A NaN wins, as in ``jnp.minimum`` (in TensorFlow the stored value
    wins). All else, shapes, modes and errors, is as in :func:`scatter_update`.

    Cost: one scatter of ``K * D`` elements. Differentiable; where several are smallest they
    share the gradient, as in ``jnp.min``.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> js.scatter_min(jnp.zeros(3), [0, 2, 0], jnp.array([1., 2., -3.]))
      Array([-3.,  0.,  0.], dtype=float32)

    Source: ``tf.compat.v1.scatter_min``, which supports fewer dtypes.
    """
    return _scatter("min", ref, indices, updates, mode)


def scatter_max(
    ref: ArrayLike, indices: ArrayLike, updates: ArrayLike, *, mode: str = "drop"
) -> jax.Array:
    """``ref`` with rows raised: maximum of ``ref[indices[k]]`` and ``updates[k]``.

    Duplicates fold. A NaN wins. All else is as in :func:`scatter_min`, derivatives
    included.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> js.scatter_max(jnp.zeros(3), [0, 2, 0], jnp.array([1., 2., -3.]))
      Array([1., 0., 2.], dtype=float32)

    Source: ``tf.compat.v1.scatter_max``, which supports fewer dtypes.
    """
    return _scatter("max", ref, indices, updates, mode)


def apply_slices(
    ref: ArrayLike, slices: IndexedSlices, op: str = "add", *, mode: str = "drop"
) -> jax.Array:
    """``ref`` changed by the rows of ``slices``; under jit in place if ``ref`` is donated.

    Args:
      ref: ``[V, *D]`` (after ``vmap`` of the slices ``[*B, V, *D]``).
      slices: IndexedSlices of such an array, of the same dtype: ``values`` ``[K, *D]``,
        ``indices`` ``[K]``.
      op: ``"add"``, ``"sub"``, ``"mul"``, ``"div"``, ``"min"``, ``"max"`` or ``"update"``.
      mode: as in :func:`scatter_update`; with ``"check"`` an empty entry is an error.

    Returns:
      ``[V, *D]``: what ``scatter_<op>(ref, slices.indices, slices.values)`` gives.
      Untouched rows stay, duplicates apply one after the other, empty entries drop.

    Raises:
      TypeError: for anything but IndexedSlices, or another dtype.
      ValueError: for an unknown ``op``, or if ``dense_shape`` is not the shape of ``ref``.

    Cost: that of the scatter; ``K * D`` elements.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> s = js.IndexedSlices(jnp.array([1., 2.]), jnp.array([3, 3]), (4,))
      >>> js.apply_slices(jnp.ones(4), s, "sub")
      Array([ 1.,  1.,  1., -2.], dtype=float32)

    Source: ``tf.Variable.scatter_add`` and its relatives, which ignore ``dense_shape``.
    """
    if not isinstance(slices, IndexedSlices):
        raise TypeError(
            f"apply_slices wants IndexedSlices, got {type(slices).__name__}; for arrays "
            "there is scatter_add(ref, indices, updates)"
        )
    OneOf(*KERNELS).check("apply_slices", "op", op)
    caller = f"apply_slices(op={op!r})"
    check_slices(slices)
    ref = as_ref(ref, caller)
    axes, shape = slices.indices.ndim - 1, slices.shape
    first = axes + slices.row_axes  # the first axis within a row
    sizes = zip(shape[:first], ref.shape, strict=False)
    if shape[first:] != ref.shape[first:] or any(n not in (None, m) for n, m in sizes):
        raise ValueError(
            f"{caller} got slices of an array of shape {shape} for ref of shape {ref.shape}"
        )
    check_mode(mode, "apply_slices")
    check_dtype(ref, op, caller)
    indices = as_ids(slices.indices, caller, "slices.indices")
    values = as_updates(slices.values, ref, slices.values.shape, caller, "slices")
    scatter: Callable[..., jax.Array] = functools.partial(scatter_rows, op=op, mode=mode)
    if slices.is_placed and axes == 0 and mode in ("drop", "fill"):
        own = lambda rows, ref: scatter(ref, rows.indices, rows.values)  # noqa: E731
        return each_shard(own, slices.with_values(values), ref)  # type: ignore[no-any-return]
    if mode == "check":
        num_rows = rows_numbered(ref.shape[axes:], slices.row_axes)
        indices = refuse_bad_rows(
            slices.indices, indices, num_rows, caller, "slices.indices"
        )
    for _ in range(axes):
        scatter = jax.vmap(scatter)
    return scatter(ref, indices, values)


def _scatter(
    op: str, ref: ArrayLike, indices: ArrayLike, updates: ArrayLike, mode: str
) -> jax.Array:
    caller = f"scatter_{op}"
    check_mode(mode, caller)
    ref, numbers = as_ref(ref, caller), as_ids(indices, caller, "indices")
    check_dtype(ref, op, caller)
    rows = as_updates(updates, ref, (*numbers.shape, *ref.shape[1:]), caller)
    if mode == "check":
        numbers = refuse_bad_rows(indices, numbers, ref.shape[0], caller, "indices")
    return scatter_rows(ref, numbers, rows, op=op, mode=mode)


def refuse_bad_rows(
    original: ArrayLike, indices: jax.Array, num_rows: int, caller: str, name: str
) -> jax.Array:
    """``indices``; raises if one of them is bad. Under jit all become bad if one is.

    Nothing at all is written then. ``original`` are the indices as the user passed them.
    """
    any_bad = refuse_bad_ids(original, num_rows, caller, name)
    if any_bad is None:
        return indices
    return jnp.where(any_bad, -1, settle(indices, num_rows, "drop"))


@one_program
@on_any_mesh(like_first)
def scatter_rows(
    ref: jax.Array, indices: jax.Array, updates: jax.Array, *, op: str, mode: str
) -> jax.Array:
    """The scatter of checked arguments: ``indices`` ``[*B]``, ``updates`` ``[*B, *D]``."""
    updates = updates.reshape(indices.size, *updates.shape[indices.ndim :])
    flat = settle(indices.reshape(-1), height_of(ref, updates), mode)
    return row_major_array(KERNELS[op](ref, flat, updates))


def as_ref(ref: ArrayLike, caller: str) -> jax.Array:
    """``ref`` as an array with at least one axis."""
    if is_slices(ref):
        raise TypeError(f"{caller} wants an array to change, got {ref}; use ref.to_dense()")
    _refuse_non_numbers(ref, caller, "an array to change")
    array = jnp.asarray(ref)
    if array.ndim < 1:
        raise ValueError(f"{caller} wants ref [V, *D], got a scalar")
    return array


def as_updates(
    updates: ArrayLike,
    ref: jax.Array,
    shape: tuple[int, ...],
    caller: str,
    name: str = "updates",
) -> Any:
    """``updates`` as an array of the dtype of ``ref`` and the shape wanted.

    Numbers and lists take the dtype of ``ref`` if it can hold their kind; arrays are never
    cast. A scalar goes to every row. ``name`` is what messages call them.

    Raises:
      TypeError, ValueError: with all that is wrong in one message.
    """
    if is_slices(updates):
        raise TypeError(
            f"{caller} wants {name} as an array, got {updates}; their rows are written "
            "with apply_slices(ref, slices, op)"
        )
    _refuse_non_numbers(updates, caller, f"{name} as an array or a number")
    array, problems = _in_dtype(updates, ref.dtype, name)
    if array.shape != shape and array.shape != ():
        problems.append(
            f"{name}.shape must be indices.shape + the row shape = {shape}, or () for "
            f"a scalar, not {array.shape}"
        )
    if problems:
        error = TypeError if "dtype" in problems[0] else ValueError
        raise error(
            f"{caller} got {name} {array.dtype}{list(array.shape)} for ref "
            f"{ref.dtype}{list(ref.shape)}: " + "; ".join(problems)
        )
    return jnp.broadcast_to(array, shape)


def check_dtype(ref: jax.Array, op: str, caller: str) -> None:
    """Refuses arithmetic that the dtype of ``ref`` does not support."""
    dtype = ref.dtype
    if dtype == jnp.bool_ and op != "update":
        raise TypeError(
            f"{caller} cannot calculate with bool; cast ref: ref.astype('int32')"
        )
    if jnp.issubdtype(dtype, jnp.complexfloating) and op in ("min", "max"):
        raise TypeError(
            f"{caller} got ref of dtype {dtype}, and complex numbers have no order"
        )


def _in_dtype(updates: ArrayLike, dtype: np.dtype, name: str) -> tuple[Any, list[str]]:
    array = jnp.asarray(updates)
    literal = not hasattr(updates, "dtype") or getattr(updates, "weak_type", False)
    if array.dtype == dtype:
        return array, []
    if literal and _kind(array.dtype) <= _kind(dtype):
        try:
            return jnp.asarray(updates, dtype), []
        except OverflowError:  # of Python's integers, which know no dtype
            return array, [f"{name} must fit into the dtype of ref, {dtype}"]
    return array, [
        f"both must have one dtype, as nothing is cast: {name}.astype('{dtype}')"
    ]


def _refuse_non_numbers(x: object, caller: str, expected: str) -> None:
    if x is None or isinstance(x, str | bytes):
        raise TypeError(f"{caller} wants {expected}, got {x!r}")


def _kind(dtype: np.dtype) -> int:
    kinds = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)
    return next(i for i, kind in enumerate(kinds) if jnp.issubdtype(dtype, kind))
