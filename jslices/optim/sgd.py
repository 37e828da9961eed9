"""Stochastic gradient descent, with or without momentum."""

from typing import Any, NamedTuple

import jax

from jslices._typing import Change, PyTree, Record, Scalar, Schedule
from jslices.optim.engine import arguments, rule
from jslices.optim.engine.constructors import optimizer
from jslices.optim.engine.missed import (
    Missed,
    MissedSteps,
    faded,
    momentum_series,
    only_decay,
)
from jslices.optim.engine.protocol import GradientTransformation
from jslices.optim.engine.transformation import transformation


class SgdState(NamedTuple):
    """State of :func:`sgd`."""

    count: jax.Array  # type: ignore[assignment]  #: int32 ``[]``, the steps taken.
    trace: Any = None  #: like params, the momentum; None without momentum.
    clock: Any = None  #: how far each row is; None unless rows catch up.


@optimizer
def sgd(
    learning_rate: arguments.LearningRate,
    momentum: arguments.Momentum | None = None,
    nesterov: bool = False,
    accumulator_dtype: arguments.StateDtype | None = None,
    *,
    weight_decay: arguments.WeightDecay = 0.0,
    mask: PyTree = None,
    untouched: arguments.Untouched = "lazy",
) -> GradientTransformation:
    """Gradient descent: ``p -= lr * g``, or with momentum ``t = g + momentum * t``.

    With momentum the update is ``-lr * t``, or ``-lr * (g + momentum * t)`` for Nesterov.
    Weight decay (L2) is part of the gradient: ``g + weight_decay * p`` in place of ``g``.

    Untouched rows: lazy or exact. Without momentum and weight decay both are as dense.
    Lazy: a row without gradient and its momentum are neither read nor written. Exact: its
    momentum moves it on, or its weights decay, when it catches up, as in a dense optimizer.

    Args:
      learning_rate: a number, or a schedule of the step (from 0).
      momentum: decay of the trace; None keeps no trace.
      nesterov: whether to look ahead.
      accumulator_dtype: dtype of the trace; None means that of the parameter.
      weight_decay: a number, or a schedule of the step.
      mask: which parameters decay, as in :func:`jslices.adamw`.
      untouched: ``"lazy"`` or ``"exact"`` (see :mod:`jslices.optim`).

    Returns:
      A :class:`GradientTransformation`; with weight decay ``update`` needs the parameters.
      State per row: nothing; D numbers with momentum; 4 bytes more if rows catch up.

    Raises:
      ValueError: for exact with both momentum and weight decay.

    Cost: a step reads and writes ``U * D`` elements of each of the parameter and the
    trace; catching up the same once more.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> params = jnp.zeros((5, 1))
      >>> tx = js.sgd(0.5)
      >>> grads = js.IndexedSlices(jnp.ones((2, 1)), jnp.array([3, 3]), (5, 1))
      >>> updates, state = tx.update(grads, tx.init(params), params)
      >>> js.apply_updates(params, updates).ravel()
      Array([ 0.,  0.,  0., -1.,  0.], dtype=float32)

    Source: ``optax.sgd``, with its names and defaults; dense gradients give its result, or
    that of ``optax.add_decayed_weights`` before it. PyTorch's ``weight_decay`` is the same;
    it has ``dampening`` and makes sparse rows dense. TensorFlow's ``MomentumOptimizer``
    multiplies the learning rate in the same place and is lazy on IndexedSlices.
    """
    decays = rule.decays(weight_decay)
    if decays and momentum is not None:
        why = "as what weight_decay adds to the momentum of a row depends on where it is"
        rule.check_lazy("sgd", untouched, f"{why} by then (jslices.adamw decouples it)")

    def rule_of(rate: Scalar | Schedule) -> rule.Rule:
        def update(step: rule.Step) -> rule.Kernel:
            size = step.size(learning_rate)

            def kernel(g: jax.Array, p: jax.Array, state: Record) -> Change:
                g = rule.with_decay(g, p, rate, step.count)
                if momentum is None:
                    return rule.scaled(size, g), {}
                trace = g + momentum * state["trace"]
                direction = g + momentum * trace if nesterov else trace
                return rule.scaled(size, direction), {"trace": trace}

            return kernel

        missed = None
        if untouched == "exact" and momentum is not None:
            rule.check_fading("sgd", momentum=momentum)

            def advance(missed: Missed, p: jax.Array, state: Record) -> Change:
                trace = state["trace"]
                return -missed.sums[0] * trace, {"trace": faded(momentum, missed, trace)}

            series = momentum_series(momentum, nesterov, corrected=False)
            missed = MissedSteps(advance, learning_rate, (series,), numbers=(momentum,))
        elif untouched == "exact" and decays:
            missed = MissedSteps(only_decay, learning_rate, (), rate)
        state = {} if momentum is None else {"trace": rule.zeros(accumulator_dtype)}
        linear = momentum is None and not decays
        return rule.Rule(state, update, reads_params=decays, linear=linear, missed=missed)

    return transformation(SgdState, rule_of(weight_decay), other=rule_of(0.0), mask=mask)
