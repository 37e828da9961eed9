"""Whether gradients are numbers, for loss scaling."""

from typing import Any

import jax
import jax.numpy as jnp

from jslices._slices import is_slices
from jslices.optim.transforms.leaves import as_leaf, is_leaf, numbers


def all_finite(tree: Any) -> jax.Array:
    """Whether the gradient that ``tree`` stands for holds neither NaN nor infinity.

    Duplicate rows are summed first, in float32 and rounded once: two finite float16 rows
    whose sum overflows are seen. Empty slots (out-of-range indices) do not count, whatever
    they hold. Untouched rows are zero, hence finite.

    Args:
      tree: a pytree of arrays ``[...]``, IndexedSlices with values ``[K, *D]``, and None.
        Integers are always finite.

    Returns:
      bool ``[]``, for ``jnp.where`` or ``lax.cond``.

    Raises:
      TypeError: for slices whose indices a foreign ``tree.map`` has changed.

    Cost: a sort of K integers and one pass over ``K * D`` elements per IndexedSlices.

    Example:
      >>> import jax, jax.numpy as jnp, jslices as js
      >>> rows = jnp.full((2, 1), 60_000, jnp.float16)
      >>> js.all_finite(js.IndexedSlices(rows, jnp.array([3, 3]), (9, 1)))
      Array(False, dtype=bool)

      Dynamic loss scaling skips a step, parameters and state untouched, with ``lax.cond``
      (a ``jnp.where`` over the parameters would copy whole tables):

      >>> tx, table = js.adagrad(0.1), jnp.ones((4, 1), jnp.float16)
      >>> def loss(table, ids, scale):
      ...     return (table[ids] ** 2).sum().astype(jnp.float32) * scale
      >>> def apply(params, state, grads):
      ...     updates, state = tx.update(grads, state, params)
      ...     return js.apply_updates(params, updates), state
      >>> @jax.jit
      ... def step(params, state, scale, ids):
      ...     grads = js.grad(loss)(params, ids, scale)
      ...     finite = js.all_finite(grads)
      ...     grads = jax.tree.map(lambda g: g / scale, grads, is_leaf=js.is_slices)
      ...     skip = lambda params, state, grads: (params, state)
      ...     params, state = jax.lax.cond(finite, apply, skip, params, state, grads)
      ...     return params, state, jnp.where(finite, scale * 2, scale / 2)
      >>> ids = jnp.array([1, 1])
      >>> table, state, scale = step(table, tx.init(table), jnp.float32(2**15), ids)
      >>> table.ravel(), scale
      (Array([1., 1., 1., 1.], dtype=float16), Array(16384., dtype=float32))
      >>> table, state, scale = step(table, state, scale / 2, ids)
      >>> table.ravel().round(1), scale
      (Array([1. , 0.9, 1. , 1. ], dtype=float16), Array(16384., dtype=float32))

    Source: PyTorch's ``GradScaler``, which coalesces float16 gradients for the same
    reason; TensorFlow's ``LossScaleOptimizer`` looks at the values as they are.
    """
    leaves, _ = jax.tree.flatten(tree, is_leaf=is_leaf)
    finite = jnp.array(True)
    for x in map(as_leaf, leaves):
        if x is not None:
            unique = x.coalesce() if is_slices(x) else x
            finite &= jnp.all(jnp.isfinite(numbers(unique)))
    return finite
