"""Partial row-wise Adam: a mean for every element, one mean of squares for each row."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jslices._typing import Change, PyTree, Record, Scalar, Schedule
from jslices.optim.adam import Moments
from jslices.optim.engine import arguments, rule
from jslices.optim.engine.constructors import optimizer
from jslices.optim.engine.missed import Missed
from jslices.optim.engine.protocol import GradientTransformation
from jslices.optim.engine.transformation import transformation


class PartialRowwiseAdamState(NamedTuple):
    """State of :func:`partial_rowwise_adam`."""

    count: jax.Array  # type: ignore[assignment]  #: int32 ``[]``, the steps taken.
    mu: Any  #: like params, the mean of the gradients.
    #: The mean of squares: ``[V]`` of a parameter ``[V, D]``, ``[L, V]`` of ``[L, V, D]``.
    nu: Any
    clock: Any = None  #: how far each row is; None unless ``untouched="exact"``.


@optimizer
def partial_rowwise_adam(
    learning_rate: arguments.LearningRate,
    b1: arguments.Decay = 0.9,
    b2: arguments.Decay = 0.999,
    eps: arguments.NotNegative = 1e-8,
    mu_dtype: arguments.StateDtype | None = None,
    weight_decay: arguments.WeightDecay = 0.0,
    mask: PyTree = None,
    *,
    untouched: arguments.Untouched = "lazy",
) -> GradientTransformation:
    """Adam with one second moment for each row: ``nu = b2 * nu + (1 - b2) * mean(g**2)``.

    Rows are the entries along axis 0 of every parameter: for a rank-1 array this is Adam.
    Weight decay is decoupled, ``p -= lr * weight_decay * p``.

    Untouched rows: lazy or exact. They are treated as by :func:`jslices.adamw`: exact, they
    decay in all steps.

    Arguments that are not listed are those of :func:`jslices.adam`.

    Args:
      weight_decay: a number, or a schedule of the step.
      mask: which parameters decay, as in :func:`jslices.adamw`.

    Returns:
      A :class:`GradientTransformation`; with weight decay ``update`` needs the parameters.
      State per row: D + 1 numbers; 4 bytes more if exact.

    Raises:
      ValueError: for exact, unless ``b1**2 < b2``.

    Cost: a step reads and writes ``U * D`` elements of each of the parameter and ``mu``;
    catching up the same once more.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> tx = js.partial_rowwise_adam(0.5)
      >>> table = jnp.zeros((5, 2))
      >>> grads = js.IndexedSlices(jnp.array([[1.0, 7.0]]), jnp.array([3]), (5, 2))
      >>> updates, state = tx.update(grads, tx.init(table), table)
      >>> (updates.values * 10).round()
      Array([[-1., -7.]], dtype=float32)

    Source: ``PARTIAL_ROWWISE_ADAM`` of FBGEMM, whose decay is the lazy one here; Optax and
    TensorFlow have none.
    """

    def rule_of(rate: Scalar | Schedule) -> rule.Rule:
        def update(step: rule.Step) -> rule.Kernel:
            size = step.size(learning_rate)
            correct_mu, correct_nu = step.correction(b1), step.correction(b2)

            def kernel(g: jax.Array, p: jax.Array, state: Record) -> Change:
                mu = rule.decayed(state["mu"], g, b1)
                nu = rule.decayed(state["nu"], rule.row_mean(rule.squared(g)), b2)
                root = rule.per_row(jnp.sqrt(correct_nu(nu)), g) + eps
                u = rule.with_decay(correct_mu(mu) / root, p, rate, step.count)
                return rule.scaled(size, u), {"mu": mu, "nu": nu}

            return kernel

        missed = None
        if untouched == "exact":
            adam = Moments(b1, b2, eps).missed("partial_rowwise_adam", learning_rate, rate)

            def advance(missed: Missed, p: jax.Array, state: Record) -> Change:
                nu = state["nu"]
                spread = {"mu": state["mu"], "nu": rule.per_row(nu, p)}
                move, new = adam.advance(missed, p, spread)
                return move, {"mu": new["mu"], "nu": new["nu"].reshape(nu.shape)}

            missed = dataclasses.replace(adam, advance=advance)
        state = {"mu": rule.zeros(mu_dtype), "nu": rule.row_of(0)}
        decays = rule.decays(weight_decay)
        return rule.Rule(state, update, reads_params=decays, missed=missed)

    first, other = rule_of(weight_decay), rule_of(0.0)
    return transformation(PartialRowwiseAdamState, first, other=other, mask=mask)
