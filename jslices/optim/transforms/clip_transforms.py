"""Clipping as a link of a chain, under Optax's names.

Each is stateless, sums duplicates first, and hands on unique rows. The limits of norms
treat NaN and infinite norms as :mod:`clipping` says: everything becomes NaN.
"""

import math
from typing import Any

import jax

from jslices._slices import is_slices
from jslices.optim._engine.protocol import GradientTransformation
from jslices.optim.transforms import clipping
from jslices.optim.transforms.clip_value import clip_by_value
from jslices.optim.transforms.limits import check_limit
from jslices.optim.transforms.stateless import each_leaf, stateless


def clip_by_global_norm(max_norm: float | jax.Array) -> GradientTransformation:
    """Scales all gradients down together, so that their global norm is at most a limit.

    Duplicates are summed first: the result is that of the dense gradient. Untouched rows
    stay untouched.

    Args:
      max_norm: the limit, ``[]``.

    Returns:
      A stateless :class:`jslices.GradientTransformation`.

    Raises:
      TypeError, ValueError: as :func:`jslices.clip_by_global_norm`; the limit is checked
        at once.

    Cost: a sort of K integers and two passes over ``K * D`` elements per IndexedSlices.

    Example:
      >>> import jax.numpy as jnp, jslices as js, optax
      >>> tx = optax.chain(js.optim.clip_by_global_norm(4.0), js.sgd(1.0))
      >>> table = jnp.zeros((4, 2))
      >>> values = jnp.array([[3., 0.], [5., 0.]])
      >>> grads = js.IndexedSlices(values, jnp.array([1, 1]), (4, 2))
      >>> updates, state = tx.update(grads, tx.init(table), table)
      >>> js.apply_updates(table, updates)[1]
      Array([-4.,  0.], dtype=float32)

    Source: ``optax.clip_by_global_norm``, which gives the same on dense gradients, and
    lets an infinite norm turn finite numbers into zeros, where this gives NaN.
    """
    check_limit("clip_by_global_norm", "max_norm", max_norm, single=True)
    return stateless(lambda grads: clipping.clip_by_global_norm(grads, max_norm)[0])


def clip(max_delta: float | jax.Array) -> GradientTransformation:
    """Brings every number of the gradients into ``[-max_delta, max_delta]``.

    Duplicates are summed first: the result is that of the dense gradient. Untouched rows
    stay untouched.

    Args:
      max_delta: the limit, ``[]``.

    Returns:
      A stateless :class:`jslices.GradientTransformation`.

    Raises:
      ValueError: for a limit that is negative or not a single number.

    Cost: a sort of K integers and one pass over ``K * D`` elements per IndexedSlices.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> grads = js.IndexedSlices(jnp.array([2., 3.]), jnp.array([1, 1]), (9,))
      >>> js.optim.clip(4.0).update(grads, ())[0].values
      Array([4., 0.], dtype=float32)

    Source: ``optax.clip``.
    """
    limit = check_limit("clip", "max_delta", max_delta, single=True)
    return each_leaf(lambda g: clip_by_value(g, -limit, limit))


def clip_rows_by_norm(max_norm: float | jax.Array) -> GradientTransformation:
    """Scales every row of the gradients down whose own norm exceeds a limit.

    Duplicates are summed first. Untouched rows stay untouched. A row of an array is what
    its first axis counts; put this on tables only (``optax.masked``,
    ``optax.multi_transform``) if the tree holds other arrays.

    Args:
      max_norm: the limit, ``[]``.

    Returns:
      A stateless :class:`jslices.GradientTransformation`.

    Raises:
      TypeError, ValueError: as :func:`jslices.clip_rows_by_norm`; the limit is checked at
        once.

    Cost: a sort of K integers and two passes over ``K * D`` elements per IndexedSlices.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> values = jnp.array([[3., 0.], [5., 0.]])
      >>> grads = js.IndexedSlices(values, jnp.array([1, 1]), (9, 2))
      >>> js.optim.clip_rows_by_norm(4.0).update(grads, ())[0].values[0]
      Array([4., 0.], dtype=float32)

    Source: ours; per-row clipping keeps one frequent row from scaling down all others.
    """
    check_limit("clip_rows_by_norm", "max_norm", max_norm, single=True)
    return each_leaf(lambda g: clipping.clip_rows_by_norm(g, max_norm))


def clip_by_block_rms(threshold: float | jax.Array) -> GradientTransformation:
    """Scales each array's gradient down so that its root mean square is at most a limit.

    The mean is over the dense array, untouched rows included: the result is that of the
    dense gradient. Duplicates are summed first. Untouched rows stay untouched.

    Args:
      threshold: the limit, ``[]``.

    Returns:
      A stateless :class:`jslices.GradientTransformation`.

    Raises:
      ValueError: for a limit that is negative or not a single number; from ``update``, for
        slices with ``dense_shape=None``.

    Cost: a sort of K integers and two passes over ``K * D`` elements per IndexedSlices.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> grads = js.IndexedSlices(jnp.array([[3., 3.]]), jnp.array([1]), (9, 2))
      >>> js.optim.clip_by_block_rms(0.5).update(grads, ())[0].values
      Array([[1.5, 1.5]], dtype=float32)

    Source: ``optax.clip_by_block_rms``.
    """
    limit = check_limit("clip_by_block_rms", "threshold", threshold, single=True)

    def clipped(g: Any) -> Any:
        if is_slices(g) and g.dense_shape is None:
            raise ValueError(
                "clip_by_block_rms takes the mean over the dense array, and these slices "
                "have dense_shape=None; give it: IndexedSlices(s.values, s.indices, "
                "table.shape)"
            )
        return clipping.clip_by_norm(g, limit * math.sqrt(math.prod(g.shape)))

    return each_leaf(clipped)
