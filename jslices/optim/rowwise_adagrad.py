"""Row-wise Adagrad: one step size for each row, and one number of state."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jslices._typing import Arrays
from jslices.optim.engine import arguments, rule
from jslices.optim.engine.constructors import optimizer
from jslices.optim.engine.protocol import GradientTransformation
from jslices.optim.engine.transformation import transformation


class RowwiseAdagradState(NamedTuple):
    """State of :func:`rowwise_adagrad`."""

    count: jax.Array  # type: ignore[assignment]  #: int32 ``[]``, the steps taken.
    #: For each parameter ``[V, D]`` an array ``[V]``; for ``[L, V, D]`` ``[L, V]``.
    sum_of_squares: Any


@optimizer
def rowwise_adagrad(
    learning_rate: arguments.LearningRate,
    initial_accumulator_value: arguments.NotNegative = 0.0,
    eps: arguments.NotNegative = 1e-8,
    *,
    untouched: arguments.Untouched = "lazy",
) -> GradientTransformation:
    """Row-wise Adagrad: ``s += mean(g**2)`` of the row, ``p -= lr * g / (sqrt(s) + eps)``.

    Rows are the entries along axis 0 of every parameter: for a rank-1 array this is
    Adagrad.

    Untouched rows: as dense. A row without gradient is neither read nor written, and the
    same optimizer on dense gradients would leave it and its state alone too.

    Arguments are those of :func:`jslices.adagrad`; ``eps`` is added to the root.

    Returns:
      A :class:`GradientTransformation`. State per row: one number. A
      row is a vector along the last axis, whichever axes number the rows of slices.

    Cost: a step reads and writes ``U * D`` elements of the parameter and ``U`` numbers of
    state.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> params = jnp.zeros((4, 2))
      >>> tx = js.rowwise_adagrad(0.5)
      >>> grads = js.IndexedSlices(jnp.array([[1.0, 7.0]]), jnp.array([2]), (4, 2))
      >>> updates, state = tx.update(grads, tx.init(params), params)
      >>> state.sum_of_squares
      Array([ 0.,  0., 25.,  0.], dtype=float32)
      >>> (updates.values * 10).round()
      Array([[-1., -7.]], dtype=float32)

    Source: ``EXACT_ROWWISE_ADAGRAD`` of FBGEMM, with its default ``eps``; Optax and
    TensorFlow have none.
    """
    del untouched  # the same in both forms

    def update(step: rule.Step) -> rule.Kernel:
        size = step.size(learning_rate)

        def kernel(g: jax.Array, p: jax.Array, total: jax.Array) -> Arrays:
            total = total + rule.row_mean(rule.squared(g))
            root = rule.per_row(jnp.sqrt(total), g) + eps
            return rule.scaled(size, jnp.where(root > 0, g / root, 0.0)), total

        return kernel

    state = {"sum_of_squares": rule.row_of(initial_accumulator_value)}
    return transformation(RowwiseAdagradState, rule.Rule(state, update))
