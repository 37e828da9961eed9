"""Clipping, as functions of gradients; ``clip_links`` has the transformations.

All functions first sum the entries of slices that name the same row, and return unique
rows, so that slices give what the dense gradient would. docs/operations.md lists the
differences to TensorFlow.

A NaN or infinite norm makes every stored row NaN, as in TensorFlow since 1.15, so that it
shows; untouched rows are not stored and stay as they are.
"""

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jslices._arguments import Number, check_array, is_real, refused
from jslices._jax import flatten, takes_tables
from jslices._place.boundary import one_program
from jslices._rows.sums import widened
from jslices._slices import IndexedSlices, deduplicated, is_slices, slices_of
from jslices._typing import Leaf, PyTree
from jslices.errors import InvalidArgumentError
from jslices.optim.engine.protocol import is_leaf
from jslices.optim.transforms import norms

Args = ParamSpec("Args")
Clipped = TypeVar("Clipped")


def _for_gradients(
    transformation: str,
) -> Callable[[Callable[Args, Clipped]], Callable[Args, Clipped]]:
    """Let a function of gradients say what to put into a chain instead."""

    def decorate(fun: Callable[Args, Clipped]) -> Callable[Args, Clipped]:
        @functools.wraps(fun)
        def of_gradients(*args: Args.args, **kwargs: Args.kwargs) -> Clipped:
            if len(args) + len(kwargs) == 1:
                raise TypeError(
                    f"jslices.{fun.__name__}{inspect.signature(fun)} clips gradients; a "
                    f"transformation, for jslices.optim.chain, is "
                    f"jslices.optim.{transformation}"
                )
            return fun(*args, **kwargs)

        return of_gradients

    return decorate


@_for_gradients("clip_by_global_norm(max_norm)")
@takes_tables(like=0, part=0)
def clip_by_global_norm(
    tree: PyTree, clip_norm: ArrayLike, use_norm: ArrayLike | None = None
) -> tuple[Any, jax.Array]:
    """Scales all of ``tree`` by one factor, so that its global norm is at most a limit.

    Duplicates are summed first, so the result is that of the dense gradient. Untouched
    rows are zero and stay so. Out-of-range indices become empty entries.

    Args:
      tree: a pytree of arrays ``[...]``, IndexedSlices with values ``[K, *D]``, and None.
      clip_norm: the limit, ``[]``.
      use_norm: the norm ``[]``, if it is known already from :func:`global_norm`.

    Returns:
      ``(tree, norm)``: the tree in its structure and dtypes, slices with values
      ``[U, *D]`` and unique indices ``[U]``, None where it had None; and the norm ``[]``
      before clipping. If the norm is NaN or infinite, everything becomes NaN.

    Raises:
      TypeError: for integers, and for indices that a foreign ``tree.map`` has changed.
      ValueError: for a limit that is negative or not a single number.

    Cost: a sort of K integers and two passes over ``K * D`` elements per IndexedSlices.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> values = jnp.array([[3., 0.], [5., 0.]])
      >>> rows = js.IndexedSlices(values, jnp.array([1, 1]), (9, 2))
      >>> clipped, norm = js.clip_by_global_norm([rows, None], 4.0)
      >>> clipped[0].to_dense()[1], norm
      (Array([4., 0.], dtype=float32), Array(8., dtype=float32))

    Source: ``tf.clip_by_global_norm``. :func:`jslices.optim.clip_by_global_norm` is the
    same as a transformation.
    """
    name = "clip_by_global_norm"
    limit = check_limit(name, "clip_norm", clip_norm, single=True)
    if use_norm is not None:
        use_norm = check_limit(name, "use_norm", use_norm, single=True)
    return _clipped_by_global_norm(tree, limit, use_norm)


@one_program
def _clipped_by_global_norm(
    tree: PyTree, limit: jax.Array, norm: jax.Array | None
) -> tuple[PyTree, jax.Array]:
    leaves = norms.coalesced_leaves("clip_by_global_norm", tree)
    norm = norms.norm_of_leaves(leaves) if norm is None else norm
    clipped = [x if x is None else shrunk(x, norm, limit) for x in leaves]
    return flatten(tree, is_leaf)[1].unflatten(clipped), norm


@takes_tables(like=0)
def clip_by_norm(
    t: Leaf, clip_norm: ArrayLike, axes: int | Sequence[int] | None = None
) -> Any:
    """Scales ``t`` down so that its norm, or each norm over ``axes``, is at most a limit.

    Duplicates are summed first, so the result is that of the dense gradient. Untouched
    rows are zero and stay so. Out-of-range indices become empty entries.

    Args:
      t: an array ``[...]``, or IndexedSlices with values ``[K, *D]``.
      clip_norm: the limit: ``[]``, or an array that broadcasts to the shape of ``t``
        (with 1 for the rows of slices).
      axes: the axes of the dense array to take norms over; None means all. ``axes=0``
        gives each column its norm, ``axes=-1`` each row of a table.

    Returns:
      An array or slices, as ``t``, in its dtype; slices with values ``[U, *D]`` and unique
      indices. Where the norm is NaN or infinite, the result is NaN.

    Raises:
      TypeError: for integers, and for indices that a foreign ``tree.map`` has changed.
      ValueError: for an axis that ``t`` does not have, or a limit that is negative or has
        more elements along an axis than ``t``.

    Cost: a sort of K integers and two passes over ``K * D`` elements.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> js.clip_by_norm(jnp.array([3., 4.]), 1.0)
      Array([0.6, 0.8], dtype=float32)

    Source: ``tf.clip_by_norm``.
    """
    limit = check_limit("clip_by_norm", "clip_norm", clip_norm)
    t = norms.one_leaf(t, "clip_by_norm")
    axes = _normalized_axes("clip_by_norm", t, axes)
    return _clip_over(t, limit, name="clip_by_norm", axes=axes)


@_for_gradients("clip_rows_by_norm(max_norm)")
@takes_tables(like=0)
def clip_rows_by_norm(t: Leaf, max_norm: ArrayLike) -> Any:
    """Scales down the rows of ``t`` whose own norm exceeds a limit.

    Results, errors and cost are those of :func:`clip_by_norm` over the axes within a row.

    Args:
      t: an array ``[V, *D]``, or IndexedSlices with values ``[K, *D]``.
      max_norm: the limit, ``[]``, or one for each row: ``[V]`` of an array, ``[K]`` of
        slices, where those of a row's entries add up, as the entries do.

    Returns:
      An array or slices, as ``t``. Rows with NaN or an infinity become NaN, others do not.

    Raises:
      TypeError, ValueError: as there, and for a scalar ``t``.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> js.clip_rows_by_norm(jnp.array([[3., 4.], [0.3, 0.4]]), 1.0)
      Array([[0.6, 0.8],
             [0.3, 0.4]], dtype=float32)

    Source: ``tf.clip_by_norm`` over all axes but the first, and the ``max_norm`` that
    ``tf.nn.embedding_lookup`` applies to rows. :func:`jslices.optim.clip_rows_by_norm` is
    the same as a transformation.
    """
    name = "clip_rows_by_norm"
    limit = check_limit(name, "max_norm", max_norm)
    t = norms.one_leaf(t, name)
    if t.ndim == 0:
        raise ValueError(f"{name} wants rows [V, *D], got a scalar")
    first = t.indices.ndim - 1 + t.row_axes if is_slices(t) else 1
    if limit.ndim:
        rows = t.indices.shape if is_slices(t) else t.shape[:1]
        if limit.shape != rows:
            raise ValueError(
                f"{name} wants max_norm [], or {list(rows)} for each row, got {limit.shape}"
            )
        if is_slices(t):
            limits = slices_of(limit, t.indices, t.shape[: t.row_axes], t.facts)
            t, limit = t.coalesce(), limits.coalesce().values
        limit = limit.reshape(*limit.shape, *(1,) * (norms.values_of(t).ndim - limit.ndim))
    return _clip_over(t, limit, name=name, axes=tuple(range(first, t.ndim)), by_row=True)


@takes_tables(like=0)
def clip_by_average_norm(t: Leaf, clip_norm: ArrayLike) -> Any:
    """Scales ``t`` down so that its norm divided by its size is at most a limit.

    It is ``clip_by_norm(t, clip_norm * size)``, with the results, errors and cost of that.
    The size is that of the dense array, ``V * D``.

    Args:
      t: an array ``[...]``, or IndexedSlices with values ``[K, *D]``.
      clip_norm: the limit, ``[]``.

    Returns:
      An array or slices, as ``t``.

    Raises:
      TypeError, ValueError: as there, and for slices with ``dense_shape=None``.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> js.clip_by_average_norm(jnp.array([3., 4.]), 0.5)
      Array([0.6, 0.8], dtype=float32)

    Source: ``tf.clip_by_average_norm`` of TensorFlow 1, which makes slices dense.
    """
    name = "clip_by_average_norm"
    limit = check_limit(name, "clip_norm", clip_norm, single=True)
    t = norms.one_leaf(t, name)
    if is_slices(t) and t.dense_shape is None:
        raise ValueError(
            f"{name} divides by the size of the dense array, and these slices have "
            "dense_shape=None; give it: IndexedSlices(s.values, s.indices, table.shape)"
        )
    return _clip_over(t, limit * float(math.prod(t.shape)), name=name, axes=None)


@_for_gradients("clip(max_delta)")
@takes_tables(like=0)
def clip_by_value(t: Leaf, clip_value_min: ArrayLike, clip_value_max: ArrayLike) -> Any:
    """Brings every element of ``t`` between two bounds.

    Slices are treated as by :func:`clip_by_norm`: duplicates are summed first, and as
    untouched rows stay zero, the bounds must include 0.

    Args:
      t: an array ``[...]``, or IndexedSlices with values ``[K, *D]``; any real dtype.
      clip_value_min: ``[]``, or an array that broadcasts to the shape of ``t`` (with 1 for
        the rows of slices).
      clip_value_max: the same. If it is less than ``clip_value_min``, that one wins.

    Returns:
      An array or slices, as ``t``, in its dtype; slices with values ``[U, *D]`` and unique
      indices. NaN stays NaN. The gradient is 1 from bound to bound, both included, else 0.

    Raises:
      TypeError: for floating bounds of integers, complex numbers, and slices whose
        indices a foreign ``tree.map`` has changed.
      ValueError: for bounds with more elements along an axis than ``t``; for slices if the
        bounds exclude 0 (if the bounds are traced, nothing can be raised: floating values
        then become NaN).

    Cost: a sort of K integers and one pass over ``K * D`` elements.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> rows = js.IndexedSlices(jnp.array([[2.], [3.]]), jnp.array([1, 1]), (9, 1))
      >>> js.clip_by_value(rows, -4.0, 4.0).values.ravel()
      Array([4., 0.], dtype=float32)

    Source: ``tf.clip_by_value``, which clips the two rows of the example one by one and
    leaves them to add up to 5. ``jnp.clip`` lets the upper bound win, and has gradient
    0.5 at the bounds.
    """
    name = "clip_by_value"
    t = norms.one_leaf(t, name)
    t = deduplicated(t) if is_slices(t) else t
    bounds = {"clip_value_min": clip_value_min, "clip_value_max": clip_value_max}
    dtype = norms.values_of(t).dtype
    for what, bound in bounds.items():
        check_array(f"{name}({what}=...)", bound)
    low, high = (
        _fitting(name, what, _comparable(name, what, jnp.asarray(bound), dtype), t, dtype)
        for what, bound in bounds.items()
    )
    x = _within(norms.values_of(t), low, high)
    if not isinstance(t, IndexedSlices):
        return x
    holds_zero = jnp.all((low <= 0) & (high >= 0))
    if not isinstance(holds_zero, jax.core.Tracer):
        if not holds_zero:
            raise ValueError(
                f"{name} with bounds {clip_value_min} and {clip_value_max} would move the "
                "untouched rows, which are 0, and slices do not store them; clip the dense "
                "array: clip_by_value(slices.to_dense(), ...)"
            )
    elif jnp.issubdtype(x.dtype, jnp.floating):
        x = jnp.where(holds_zero, x, jnp.array(jnp.nan, x.dtype))
    return t.with_values(x)


# --- Arithmetic -----------------------------------------------------------------------


def shrunk(x: Leaf, norm: jax.Array, limit: jax.Array) -> Any:
    """A leaf divided by ``norm`` and multiplied by ``limit``, where the norm is larger.

    In this order it is rounded as Optax rounds it. A NaN or infinite norm gives NaN.
    """
    if isinstance(x, IndexedSlices):
        facts = x.facts._replace(as_taken=False)
        return x.with_values(shrunk(x.values, norm, limit)).with_facts(facts)
    wide = widened(x)
    real = jnp.finfo(wide.dtype).dtype
    limit = jnp.maximum(limit, 0)
    inside = norm <= limit
    divisor = jnp.where(inside, jnp.ones_like(norm), norm).astype(real)
    out = jnp.where(inside, wide, wide / divisor * limit.astype(real))
    return jnp.where(jnp.isfinite(norm), out, jnp.array(jnp.nan, real)).astype(x.dtype)


@one_program
def _clip_over(
    t: Leaf,
    limit: jax.Array,
    *,
    name: str,
    axes: tuple[int, ...] | None,
    by_row: bool = False,
) -> Any:
    """``t`` with each norm over ``axes`` at most ``limit``; ``by_row`` it fits already."""
    (t,) = norms.coalesced_leaves(name, t)
    if isinstance(t, IndexedSlices) and axes is not None and t.row_axes > 1:
        axes = _axes_of_values(name, t, axes)
    norm = norms.safe_sqrt(norms.sum_of_squares(norms.values_of(t), axes, keepdims=True))
    if not by_row:
        limit = _fitting(name, "clip_norm", limit, t, norm.dtype)
    return shrunk(t, norm, limit.astype(norm.dtype))


def _axes_of_values(name: str, t: IndexedSlices, axes: tuple[int, ...]) -> tuple[int, ...]:
    """Axes of the dense array as those of ``values``."""
    among = [axis for axis in axes if axis < t.row_axes]
    if among and len(among) < t.row_axes:
        raise ValueError(
            f"{name}(axes={axes}) got slices {t.shape} whose rows {t.row_axes} axes "
            "number: a norm is over all of these axes or none"
        )
    within = tuple(axis - t.row_axes + 1 for axis in axes if axis >= t.row_axes)
    return (0, *within) if among else within


def _normalized_axes(
    name: str, t: Leaf, axes: int | Sequence[int] | None
) -> tuple[int, ...] | None:
    if axes is None:
        return None
    if is_slices(t) and t.indices.ndim > 1:
        raise ValueError(
            f"{name}(axes={axes}) got {t}, which carries a batch axis from vmap; clip "
            "inside the vmap"
        )
    all_axes = (axes,) if isinstance(axes, int) else tuple(axes)
    if any(not -t.ndim <= axis < t.ndim for axis in all_axes):
        raise ValueError(
            f"{name}(axes={axes}): an array of shape {t.shape} has no such axis"
        )
    return tuple(axis % t.ndim for axis in all_axes)


def _within(x: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
    """``x`` between the bounds; the lower wins, NaN stays, the gradient is 1 at both."""
    x = jnp.where((x <= high) | jnp.isnan(x), x, high)
    return jnp.where((x >= low) | jnp.isnan(x), x, low)


# --- Limits ---------------------------------------------------------------------------

#: Infinity limits nothing.
LIMIT = Number(at_least=0, infinite=True)


def check_limit(name: str, what: str, limit: Any, single: bool = False) -> jax.Array:
    """``limit`` as an array; refuses anything but numbers, and negative ones if known."""
    if single or np.ndim(limit) == 0 or not is_real(limit.dtype):
        LIMIT.check(name, what, limit)
    array: Any = limit
    if not isinstance(limit, jax.Array):
        array = np.asarray(limit)  # JAX would compile a program to make one
        array = array.astype(jax.dtypes.canonicalize_dtype(array.dtype))
    if jnp.issubdtype(array.dtype, jnp.integer):
        array = array.astype(jnp.float32)
    if not isinstance(array, jax.core.Tracer) and not np.all(np.asarray(array) >= 0):
        raise refused(InvalidArgumentError, name, what, limit, f"{LIMIT} everywhere")
    return widened(array)


def _fitting(
    name: str, what: str, limit: jax.Array, t: Leaf, dtype: DTypeLike
) -> jax.Array:
    """``limit`` with the rank of the values of ``t``; refuses a larger shape."""
    shape = (1,) * (t.ndim - limit.ndim) + limit.shape
    fits = len(shape) == t.ndim and all(
        n == 1 or m in (n, None) for n, m in zip(shape, t.shape, strict=True)
    )
    if not fits:
        raise ValueError(
            f"{name} got {what} of shape {limit.shape}, which does not broadcast to the "
            f"shape {t.shape} of what is clipped"
        )
    if isinstance(t, IndexedSlices):
        first = t.indices.ndim - 1 + t.row_axes
        if any(n > 1 for n in shape[:first]):
            raise ValueError(
                f"{name} got {what} of shape {limit.shape} for {t}: rows cannot have "
                "limits of their own, because slices are sorted by row first"
            )
        shape = (1,) * t.indices.ndim + shape[first:]
    return limit.reshape(shape).astype(dtype)


def _comparable(name: str, what: str, limit: jax.Array, dtype: DTypeLike) -> jax.Array:
    """``limit`` as a number that elements of ``dtype`` can be compared with."""
    if jnp.issubdtype(dtype, jnp.complexfloating) or jnp.iscomplexobj(limit):
        raise TypeError(f"{name} cannot order complex numbers, got {dtype}")
    if jnp.issubdtype(dtype, jnp.floating):
        return limit
    if jnp.issubdtype(limit.dtype, jnp.floating):
        raise TypeError(
            f"{name} got {what} of dtype {limit.dtype} for {dtype}; cast one of them"
        )
    # A bound out of the integers' range must not wrap around.
    info = jnp.iinfo(dtype)
    return jnp.clip(limit, info.min, info.max)
