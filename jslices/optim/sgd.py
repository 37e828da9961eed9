"""Stochastic gradient descent, with or without momentum."""

from typing import Any, NamedTuple

import jax

from jslices._typing import Change, Record
from jslices.optim.engine import arguments, rule
from jslices.optim.engine.constructors import optimizer
from jslices.optim.engine.missed import Missed, MissedSteps, faded, momentum_series
from jslices.optim.engine.protocol import GradientTransformation
from jslices.optim.engine.transformation import transformation


class SgdState(NamedTuple):
    """State of :func:`sgd`."""

    count: jax.Array  # type: ignore[assignment]  #: int32 ``[]``, the steps taken.
    trace: Any = None  #: like params, the momentum; None without momentum.
    clock: Any = None  #: how far each row is; None unless ``untouched="exact"``.


@optimizer
def sgd(
    learning_rate: arguments.LearningRate,
    momentum: arguments.Momentum | None = None,
    nesterov: bool = False,
    accumulator_dtype: arguments.StateDtype | None = None,
    *,
    untouched: arguments.Untouched = "lazy",
) -> GradientTransformation:
    """Gradient descent: ``p -= lr * g``, or with momentum ``t = g + momentum * t``.

    With momentum the update is ``-lr * t``, or ``-lr * (g + momentum * t)`` for Nesterov.

    Untouched rows: lazy or exact. Without momentum both are the same, and the same as
    dense. Lazy: a row without gradient is neither read nor written, and nor is its
    momentum. Exact: its momentum moves it on when it catches up, as in a dense optimizer.

    Args:
      learning_rate: a number, or a schedule of the step (from 0).
      momentum: decay of the trace; None keeps no trace.
      nesterov: whether to look ahead.
      accumulator_dtype: dtype of the trace; None means that of the parameter.
      untouched: ``"lazy"`` or ``"exact"`` (see :mod:`jslices.optim`).

    Returns:
      A :class:`GradientTransformation`. State per row: nothing; D numbers with momentum;
      4 bytes more if exact.

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

    Source: ``optax.sgd``, with its names and defaults; dense gradients give its result.
    TensorFlow's ``MomentumOptimizer`` multiplies the learning rate in the same place and
    is lazy on IndexedSlices; PyTorch's has ``dampening`` and makes sparse rows dense.
    """
    exact = untouched == "exact"

    def update(step: rule.Step) -> rule.Kernel:
        size = step.size(learning_rate)

        def kernel(g: jax.Array, p: jax.Array, state: Record) -> Change:
            if momentum is None:
                return rule.scaled(size, g), {}
            trace = g + momentum * state["trace"]
            direction = g + momentum * trace if nesterov else trace
            return rule.scaled(size, direction), {"trace": trace}

        return kernel

    if momentum is None:
        return transformation(SgdState, rule.Rule({}, update, linear=True))
    missed = None
    if exact:
        rule.check_fading("sgd", momentum=momentum)

        def advance(missed: Missed, p: jax.Array, state: Record) -> Change:
            trace = state["trace"]
            return -missed.sums[0] * trace, {"trace": faded(momentum, missed, trace)}

        series = momentum_series(momentum, nesterov, corrected=False)
        missed = MissedSteps(advance, learning_rate, (series,), numbers=(momentum,))
    state = {"trace": rule.zeros(accumulator_dtype)}
    return transformation(SgdState, rule.Rule(state, update, missed=missed))
