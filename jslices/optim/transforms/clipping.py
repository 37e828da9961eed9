"""Clipping norms as TensorFlow has it, on what duplicate rows add up to.

Every function here, and ``clip_by_value``, sums duplicates first and returns unique rows,
so that slices give what the dense gradient would. Where that, or good sense, differs from
TensorFlow 2.21:

=============================  ========================  ================================
case                           TensorFlow                jslices
=============================  ========================  ================================
slices with duplicates         norms of raw values       sum first: equals dense
slices that come back          indices as they were      sorted, unique, then empty slots
``clip_by_average_norm``       a dense array             slices stay slices
``clip_by_value`` of slices,   untouched rows stay 0     an error: they would have to move
0 outside the bounds
``clip_by_norm``, norm is inf  zeros, NaN where inf      everything NaN, as its
                                                         ``clip_by_global_norm`` has it
limit 0, norm 0                NaN                       0
a negative limit               0, NaN or unclipped       an error; a traced one acts as 0
gradient of a global norm      NaN                       0, so that of clipping is the
where all is 0                                           identity, as in ``clip_by_norm``
16-bit floats                  squared in 16 bits:       norms in float32
                               float16 ends at 255
``global_norm`` of mixed       TypeError                 the widest of them
dtypes
one that is not a list         TypeError                 any pytree
=============================  ========================  ================================

A NaN or infinite norm makes every stored row NaN, as in TensorFlow since 1.15, so that it
is seen; untouched rows are not stored and stay as they are.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jslices._jax import flatten
from jslices._slices import IndexedSlices, is_slices
from jslices.optim.transforms.leaves import as_leaf, is_leaf, numbers
from jslices.optim.transforms.limits import check_limit, fitting
from jslices.optim.transforms.norms import (
    coalesced_leaves,
    norm_of_leaves,
    safe_sqrt,
    sum_of_squares,
    widened,
)


def clip_by_global_norm(
    tree: Any, clip_norm: ArrayLike, use_norm: ArrayLike | None = None
) -> tuple[Any, jax.Array]:
    """Scales all of ``tree`` down together, so that its global norm is at most a limit.

    Duplicates are summed first, so the result is that of the dense gradient; untouched
    rows are zero and stay so; out-of-range indices become empty slots.

    Args:
      tree: a pytree of arrays ``[...]``, IndexedSlices with values ``[K, *D]``, and None.
      clip_norm: the limit, ``[]``.
      use_norm: the norm to go by, ``[]``, if :func:`global_norm` is known already.

    Returns:
      ``(tree, norm)``: the tree in its structure and dtypes, slices with values
      ``[U, *D]`` and unique indices ``[U]``, None where that was; and the norm ``[]``
      before clipping. If the norm is NaN or infinite everything becomes NaN.

    Raises:
      TypeError: for integers, and for slices whose indices a foreign ``tree.map`` has
        changed.
      ValueError: for a limit that is negative or not a single number.

    Cost: a sort of K integers and two passes over ``K * D`` elements per IndexedSlices.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> values = jnp.array([[3., 0.], [5., 0.]])
      >>> rows = js.IndexedSlices(values, jnp.array([1, 1]), (9, 2))
      >>> clipped, norm = js.clip_by_global_norm([rows, None], 4.0)
      >>> clipped[0].to_dense()[1], norm
      (Array([4., 0.], dtype=float32), Array(8., dtype=float32))

    Source: ``tf.clip_by_global_norm``. ``js.optim.clip_by_global_norm`` is the same as a
    link of a chain, as in Optax.
    """
    name = "clip_by_global_norm"
    limit = check_limit(name, "clip_norm", clip_norm, single=True)
    leaves = coalesced_leaves(name, tree)
    if use_norm is None:
        norm = norm_of_leaves(leaves)
    else:
        norm = check_limit(name, "use_norm", use_norm, single=True)
    clipped = [x if x is None else shrunk(x, norm, limit) for x in leaves]
    return flatten(tree, is_leaf)[1].unflatten(clipped), norm


def clip_by_norm(
    t: Any, clip_norm: ArrayLike, axes: int | Sequence[int] | None = None
) -> Any:
    """Scales ``t`` down so that its norm, or each norm over ``axes``, is at most a limit.

    Duplicates are summed first, so the result is that of the dense gradient; untouched
    rows are zero and stay so; out-of-range indices become empty slots.

    Args:
      t: an array ``[...]``, or IndexedSlices with values ``[K, *D]``.
      clip_norm: the limit: ``[]``, or an array that broadcasts to the shape of ``t``
        (with 1 for the rows of slices).
      axes: the axes of the dense array to take norms over; None means all. ``axes=0``
        gives each column its norm, ``axes=-1`` each row of a table.

    Returns:
      What ``t`` is, in its dtype; slices with values ``[U, *D]`` and unique indices. What
      has a NaN or infinite norm becomes NaN.

    Raises:
      TypeError: for integers, and for slices whose indices a foreign ``tree.map`` has
        changed.
      ValueError: for an axis that ``t`` has not, or a limit that is negative or enlarges
        ``t``.

    Cost: a sort of K integers and two passes over ``K * D`` elements.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> js.clip_by_norm(jnp.array([3., 4.]), 1.0)
      Array([0.6, 0.8], dtype=float32)

    Source: ``tf.clip_by_norm``.
    """
    limit = check_limit("clip_by_norm", "clip_norm", clip_norm)
    return _clip_over(
        "clip_by_norm", t, limit, lambda t: _normalized_axes("clip_by_norm", t, axes)
    )


def clip_rows_by_norm(t: Any, max_norm: ArrayLike) -> Any:
    """Scales every row of ``t`` down whose own norm exceeds a limit.

    Duplicates are summed first, so the result is that of the dense gradient; untouched
    rows are zero and stay so; out-of-range indices become empty slots.

    Args:
      t: an array ``[V, *D]``, or IndexedSlices with values ``[K, *D]``.
      max_norm: the limit, ``[]``.

    Returns:
      What ``t`` is, in its dtype; slices with values ``[U, *D]`` and unique indices. A row
      that holds NaN or an infinity becomes NaN, the others do not.

    Raises:
      TypeError: for integers, and for slices whose indices a foreign ``tree.map`` has
        changed.
      ValueError: for a scalar ``t``, or a limit that is negative or not a single number.

    Cost: a sort of K integers and two passes over ``K * D`` elements.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> js.clip_rows_by_norm(jnp.array([[3., 4.], [0.3, 0.4]]), 1.0)
      Array([[0.6, 0.8],
             [0.3, 0.4]], dtype=float32)

    Source: ``clip_by_norm`` of TensorFlow over all axes but the first, and the
    ``max_norm`` that its ``embedding_lookup`` applies to rows.
    """
    name = "clip_rows_by_norm"
    limit = check_limit(name, "max_norm", max_norm, single=True)

    def row_axes(t: Any) -> tuple[int, ...]:
        first = t.indices.ndim if is_slices(t) else 1
        if t.ndim == 0:
            raise ValueError(f"{name} wants rows [V, *D], got a scalar")
        return tuple(range(first, t.ndim))

    return _clip_over(name, t, limit, row_axes)


def clip_by_average_norm(t: Any, clip_norm: ArrayLike) -> Any:
    """Scales ``t`` down so that its norm divided by its size is at most a limit.

    The size is that of the dense array, ``V * D``. Duplicates are summed first; untouched
    rows are zero and stay so; out-of-range indices become empty slots.

    Args:
      t: an array ``[...]``, or IndexedSlices with values ``[K, *D]``.
      clip_norm: the limit, ``[]``.

    Returns:
      What ``t`` is, in its dtype; slices with values ``[U, *D]`` and unique indices. If
      the norm is NaN or infinite everything becomes NaN.

    Raises:
      TypeError: for integers, and for slices whose indices a foreign ``tree.map`` has
        changed.
      ValueError: for slices with ``dense_shape=None``, or a limit that is negative or not
        a single number.

    Cost: a sort of K integers and two passes over ``K * D`` elements.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> js.clip_by_average_norm(jnp.array([3., 4.]), 0.5)
      Array([0.6, 0.8], dtype=float32)

    Source: ``tf.clip_by_average_norm`` of TensorFlow 1, which makes slices dense. It
    equals ``clip_by_norm(t, clip_norm * size)``.
    """
    name = "clip_by_average_norm"
    limit = check_limit(name, "clip_norm", clip_norm, single=True)
    t = as_leaf(t)
    if is_slices(t) and t.dense_shape is None:
        raise ValueError(
            f"{name} divides by the size of the dense array, and these slices have "
            "dense_shape=None; give it: IndexedSlices(s.values, s.indices, table.shape)"
        )
    return _clip_over(name, t, limit * float(math.prod(t.shape)), lambda _: None)


def shrunk(x: Any, norm: jax.Array, limit: jax.Array) -> Any:
    """A leaf divided by ``norm`` and multiplied by ``limit`` where the norm is larger.

    In the order of Optax: it rounds as that does. A norm that is no number gives NaN.
    """
    if isinstance(x, IndexedSlices):
        values = shrunk(x.values, norm, limit)
        return IndexedSlices.tree_unflatten(x.dense_shape, (values, x.indices))
    wide = widened(x)
    real = jnp.finfo(wide.dtype).dtype
    limit = jnp.maximum(limit, 0)
    inside = norm <= limit
    divisor = jnp.where(inside, jnp.ones_like(norm), norm).astype(real)
    out = jnp.where(inside, wide, wide / divisor * limit.astype(real))
    return jnp.where(jnp.isfinite(norm), out, jnp.array(jnp.nan, real)).astype(x.dtype)


def _clip_over(name: str, t: Any, limit: jax.Array, axes_of: Any) -> Any:
    (t,) = coalesced_leaves(name, t if is_slices(t) else jnp.asarray(t))
    x = numbers(t)
    norm = safe_sqrt(sum_of_squares(x, axes_of(t), keepdims=True))
    return shrunk(t, norm, fitting(name, "clip_norm", limit, t, dtype=norm.dtype))


def _normalized_axes(
    name: str, t: Any, axes: int | Sequence[int] | None
) -> tuple[int, ...] | None:
    if axes is None:
        return None
    if is_slices(t) and t.indices.ndim > 1:
        raise ValueError(
            f"{name}(axes={axes}) got {t}, which carries a batch axis from vmap; clip "
            "inside the vmap"
        )
    wanted = (axes,) if isinstance(axes, int) else tuple(axes)
    if any(not -t.ndim <= axis < t.ndim for axis in wanted):
        raise ValueError(
            f"{name}(axes={axes}): an array of shape {t.shape} has no such axis"
        )
    return tuple(axis % t.ndim for axis in wanted)
