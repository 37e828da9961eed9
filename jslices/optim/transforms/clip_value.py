"""Bringing every number of a gradient between two bounds."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jslices._slices import IndexedSlices, is_slices
from jslices.optim.transforms.leaves import as_leaf, numbers
from jslices.optim.transforms.limits import fitting


def clip_by_value(t: Any, clip_value_min: ArrayLike, clip_value_max: ArrayLike) -> Any:
    """Every number of ``t`` brought between two bounds.

    Duplicates are summed first, so the result is that of the dense gradient; untouched
    rows are zero and stay so, which is why 0 must be within the bounds for slices;
    out-of-range indices become empty slots.

    Args:
      t: an array ``[...]``, or IndexedSlices with values ``[K, *D]``; any real dtype.
      clip_value_min: ``[]``, or an array that broadcasts to the shape of ``t`` (with 1 for
        the rows of slices).
      clip_value_max: the same. Where it is below the other, that one wins.

    Returns:
      What ``t`` is, in its dtype; slices with values ``[U, *D]`` and unique indices. NaN
      stays NaN. The gradient is 1 from bound to bound, both included, and 0 outside.

    Raises:
      TypeError: for floating bounds of integers, complex numbers, and slices whose
        indices a foreign ``tree.map`` has changed.
      ValueError: for bounds that enlarge ``t``; for slices if 0 is not within the bounds
        (for traced bounds nothing can be raised: floating values then become NaN).

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
    t = as_leaf(t)
    t = t.coalesce() if is_slices(t) else t
    bounds = {"clip_value_min": clip_value_min, "clip_value_max": clip_value_max}
    dtype = numbers(t).dtype
    low, high = (
        fitting(name, what, _comparable(name, what, jnp.asarray(bound), dtype), t, dtype)
        for what, bound in bounds.items()
    )
    x = _within(numbers(t), low, high)
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
    return IndexedSlices.tree_unflatten(t.dense_shape, (x, t.indices))


def _within(x: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
    """``x`` between the bounds; the lower wins, NaN stays, the gradient is 1 at both."""
    x = jnp.where((x <= high) | jnp.isnan(x), x, high)
    return jnp.where((x >= low) | jnp.isnan(x), x, low)


def _comparable(name: str, what: str, limit: jax.Array, dtype: Any) -> jax.Array:
    if jnp.issubdtype(dtype, jnp.complexfloating) or jnp.iscomplexobj(limit):
        raise TypeError(f"{name} cannot order complex numbers, got {dtype}")
    if jnp.issubdtype(dtype, jnp.floating):
        return limit
    if jnp.issubdtype(limit.dtype, jnp.floating):
        raise TypeError(
            f"{name} got {what} of dtype {limit.dtype} for {dtype}; cast one of them"
        )
    # A bound beyond what the integers can hold must not wrap round.
    info = jnp.iinfo(dtype)
    return jnp.clip(limit, info.min, info.max)
