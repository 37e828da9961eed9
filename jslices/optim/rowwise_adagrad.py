"""Row-wise Adagrad: one step size for each row, and one number of state."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jslices._typing import Change, PyTree, Record, Scalar, Schedule
from jslices.optim.engine import arguments, rule
from jslices.optim.engine.constructors import optimizer
from jslices.optim.engine.missed import MissedSteps, only_decay
from jslices.optim.engine.protocol import GradientTransformation
from jslices.optim.engine.transformation import transformation


class RowwiseAdagradState(NamedTuple):
    """State of :func:`rowwise_adagrad`."""

    count: jax.Array  # type: ignore[assignment]  #: int32 ``[]``, the steps taken.
    #: For each parameter ``[V, D]`` an array ``[V]``; for ``[L, V, D]`` ``[L, V]``.
    sum_of_squares: Any
    clock: Any = None  #: how far each row is; None unless rows decay exactly.


@optimizer
def rowwise_adagrad(
    learning_rate: arguments.LearningRate,
    initial_accumulator_value: arguments.NotNegative = 0.0,
    eps: arguments.NotNegative = 1e-8,
    *,
    weight_decay: arguments.WeightDecay = 0.0,
    mask: PyTree = None,
    untouched: arguments.Untouched = "lazy",
) -> GradientTransformation:
    """Row-wise Adagrad: ``s += mean(g**2)`` of the row, ``p -= lr * g / (sqrt(s) + eps)``.

    Rows are the entries along axis 0 of every parameter: for a rank-1 array this is
    Adagrad. Weight decay is decoupled, ``p -= lr * weight_decay * p``.

    Untouched rows: lazy or exact. Lazy: a row without gradient is neither read nor written,
    and nor is its state. Exact: its weights decay when it catches up, as in a dense
    optimizer. Without weight decay both are the same, and the same as dense.

    Other arguments are those of :func:`jslices.adagrad`; ``eps`` is added to the root.

    Args:
      weight_decay: a number, or a schedule of the step.
      mask: which parameters decay, as in :func:`jslices.adamw`.
      untouched: ``"lazy"``, a row decays in the steps that touch it, or ``"exact"``, every
        row decays in every step, once it catches up (see :mod:`jslices.optim`).

    Returns:
      A :class:`GradientTransformation`; with weight decay ``update`` needs the parameters.
      State per row: one number; 4 bytes more if rows decay exactly. A row is a vector along
      the last axis, whichever axes number the rows of slices.

    Cost: a step reads and writes ``U * D`` elements of the parameter and ``U`` numbers of
    state; catching up the same once more.

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

    Source: ``EXACT_ROWWISE_ADAGRAD`` of FBGEMM, with its default ``eps``; lazy decay is its
    ``DECOUPLE``. Its ``L2`` is ``js.from_optax(optax.add_decayed_weights(rate))`` before
    this one in :func:`jslices.optim.chain`. Optax and TensorFlow have none.
    """
    decays = rule.decays(weight_decay)

    def rule_of(rate: Scalar | Schedule) -> rule.Rule:
        def update(step: rule.Step) -> rule.Kernel:
            size = step.size(learning_rate)

            def kernel(g: jax.Array, p: jax.Array, state: Record) -> Change:
                total = state["sum_of_squares"] + rule.row_mean(rule.squared(g))
                root = rule.per_row(jnp.sqrt(total), g) + eps
                direction = jnp.where(root > 0, g / root, 0.0)
                direction = rule.with_decay(direction, p, rate, step.count)
                return rule.scaled(size, direction), {"sum_of_squares": total}

            return kernel

        missed = None
        if decays and untouched == "exact":
            missed = MissedSteps(only_decay, learning_rate, (), rate)
        state = {"sum_of_squares": rule.row_of(initial_accumulator_value)}
        return rule.Rule(state, update, reads_params=decays, missed=missed)

    first, other = rule_of(weight_decay), rule_of(0.0)
    return transformation(RowwiseAdagradState, first, other=other, mask=mask)
