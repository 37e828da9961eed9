"""Stochastic gradient descent, with or without momentum."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jslices.optim.base import (
    GradientTransformation,
    Scalar,
    Schedule,
    check_learning_rate,
    next_count,
    scaled,
    step_size,
    zero_count,
)
from jslices.optim.rows import update_leaves


class SgdState(NamedTuple):
    """State of :func:`sgd`."""

    count: jax.Array  # type: ignore[assignment]  #: int32 ``[]``, the steps taken.
    trace: Any  #: like params, the momentum; None without momentum.


def sgd(
    learning_rate: Scalar | Schedule,
    momentum: Scalar | None = None,
    nesterov: bool = False,
    accumulator_dtype: DTypeLike | None = None,
) -> GradientTransformation:
    """Gradient descent: ``p -= lr * g``, or with momentum ``t = g + momentum * t``.

    With momentum the update is ``-lr * t``, or ``-lr * (g + momentum * t)`` for Nesterov.

    Untouched rows: lazy. A row without gradient is neither read nor written, and nor is
    its momentum (a dense optimizer would let the momentum move it on). Without momentum
    lazy and dense are the same.

    Args:
      learning_rate: a number, or a schedule of the step (from 0).
      momentum: decay of the trace; None keeps no trace.
      nesterov: whether to look ahead.
      accumulator_dtype: dtype of the trace; None means that of the parameter.

    Returns:
      A :class:`GradientTransformation`. State per row: nothing, or D numbers with
      momentum.

    Cost: a step reads and writes ``U * D`` elements of each of the parameter and the
    trace.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> params = jnp.zeros((5, 1))
      >>> tx = js.sgd(0.5)
      >>> grads = js.IndexedSlices(jnp.ones((2, 1)), jnp.array([3, 3]), (5, 1))
      >>> updates, state = tx.update(grads, tx.init(params), params)
      >>> js.apply_updates(params, updates).ravel()
      Array([ 0.,  0.,  0., -1.,  0.], dtype=float32)

    Source: ``optax.sgd``, with its names and defaults; dense gradients give its result.
    TensorFlow's ``MomentumOptimizer`` multiplies the learning rate in the same place and
    is lazy on IndexedSlices as well.
    """
    check_learning_rate("sgd", learning_rate)

    def init(params: Any) -> SgdState:
        trace = None
        if momentum is not None:
            trace = jax.tree.map(
                lambda p: jnp.zeros_like(p, dtype=accumulator_dtype), params
            )
        return SgdState(zero_count(), trace)

    def update(grads: Any, state: SgdState, params: Any = None) -> tuple[Any, SgdState]:
        del params
        step = step_size(learning_rate, state.count)
        count = next_count(state.count)
        if momentum is None:
            updates, _ = update_leaves(lambda g: (scaled(step, g),), grads, ())
            return updates, SgdState(count, None)

        def kernel(g: jax.Array, trace: jax.Array) -> tuple[jax.Array, jax.Array]:
            new = g + momentum * trace
            direction = g + momentum * new if nesterov else new
            return scaled(step, direction), new.astype(trace.dtype)

        updates, (trace,) = update_leaves(kernel, grads, (state.trace,))
        return updates, SgdState(count, trace)

    return GradientTransformation(init, update)
