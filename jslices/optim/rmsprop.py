"""RMSProp: gradients divided by their recent size."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jslices._typing import Change, Record
from jslices.optim.engine import arguments, rule
from jslices.optim.engine.constructors import optimizer
from jslices.optim.engine.missed import Missed, MissedSteps, Series, faded, momentum_series
from jslices.optim.engine.protocol import GradientTransformation
from jslices.optim.engine.transformation import transformation


class RmspropState(NamedTuple):
    """State of :func:`rmsprop`."""

    count: jax.Array  # type: ignore[assignment]  #: int32 ``[]``, the steps taken.
    nu: Any  #: like params, the mean of the squared gradients.
    mu: Any = None  #: like params, the mean of the gradients; None unless centered.
    trace: Any = None  #: like params, the momentum; None without.
    clock: Any = None  #: how far each row is; None unless ``untouched="exact"``.


@optimizer
def rmsprop(
    learning_rate: arguments.LearningRate,
    decay: arguments.Decay = 0.9,
    eps: arguments.NotNegative = 1e-8,
    initial_scale: arguments.NotNegative = 0.0,
    eps_in_sqrt: bool = True,
    centered: bool = False,
    momentum: arguments.Momentum | None = None,
    nesterov: bool = False,
    bias_correction: bool = False,
    *,
    untouched: arguments.Untouched = "lazy",
) -> GradientTransformation:
    """RMSProp: ``nu = decay * nu + (1 - decay) * g**2``, ``p -= lr * g / sqrt(nu + eps)``.

    Centered, ``nu - mu**2`` replaces ``nu``, with the mean ``mu`` of the gradients. With
    momentum the steps, learning rate included, add up in ``t = momentum * t + step``.

    Untouched rows: lazy or exact. Lazy: a row without gradient is neither read nor written,
    and nor is its state. Exact: its means decay and its momentum moves it on when it
    catches up, as in a dense optimizer.

    Args:
      learning_rate: a number, or a schedule of the step (from 0).
      decay: of the means.
      eps: keeps the root away from zero.
      initial_scale: what ``nu`` starts from.
      eps_in_sqrt: whether ``eps`` is added inside the root.
      centered: whether to subtract the squared mean.
      momentum: decay of the trace; None keeps no trace.
      nesterov: whether to look ahead.
      bias_correction: whether the means are divided by the weight they have seen.
      untouched: ``"lazy"`` or ``"exact"`` (see :mod:`jslices.optim`).

    Returns:
      A :class:`GradientTransformation`. State per row: D numbers, D more if centered, D
      more with momentum; 4 bytes more if exact.

    Cost: a step reads and writes ``U * D`` elements of the parameter and of each of these;
    catching up the same once more.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> tx = js.rmsprop(0.5)
      >>> table = jnp.zeros((5, 1))
      >>> grads = js.IndexedSlices(jnp.ones((1, 1)), jnp.array([3]), (5, 1))
      >>> updates, state = tx.update(grads, tx.init(table), table)
      >>> state.nu.ravel().round(3)
      Array([0. , 0. , 0. , 0.1, 0. ], dtype=float32)

    Source: Hinton, 2012; ``optax.rmsprop``, with its names and defaults; dense gradients
    give its result. TensorFlow's ``nu`` starts from 1 and its ``eps`` is 1e-10; PyTorch's
    ``eps`` is outside the root and its ``decay`` is 0.99.
    """
    starts = {"nu": rule.full(initial_scale)}
    if centered:
        starts["mu"] = rule.zeros()
    if momentum is not None:
        starts["trace"] = rule.zeros()

    def update(step: rule.Step) -> rule.Kernel:
        size = step.size(learning_rate)
        correct = step.correction(decay) if bias_correction else lambda mean: mean

        def kernel(g: jax.Array, p: jax.Array, state: Record) -> Change:
            new = {"nu": rule.decayed(state["nu"], rule.squared(g), decay)}
            square = correct(new["nu"])
            if centered:
                new["mu"] = rule.decayed(state["mu"], g, decay)
                square = square - rule.squared(correct(new["mu"]))
            scale = lax.rsqrt(square + eps) if eps_in_sqrt else 1 / (jnp.sqrt(square) + eps)
            u = rule.scaled(size, scale * g)
            if momentum is not None:
                small = u
                u = new["trace"] = small + momentum * state["trace"]
                if nesterov:
                    u = small + momentum * u
            return u, new

        return kernel

    missed = None
    if untouched == "exact":
        rule.check_fading("rmsprop", decay=decay, momentum=momentum)

        def advance(missed: Missed, p: jax.Array, state: Record) -> Change:
            new = {name: faded(decay, missed, state[name]) for name in starts}
            move = jnp.zeros_like(p)
            if momentum is not None:
                move = missed.sums[0] * state["trace"]
                new["trace"] = faded(momentum, missed, state["trace"])
            return move, new

        series: tuple[Series, ...] = ()
        if momentum is not None:  # the trace has its learning rates in it
            trace = momentum_series(float(momentum), nesterov, corrected=False)
            series = (trace._replace(times_learning_rate=False),)
        missed = MissedSteps(advance, learning_rate, series, numbers=(decay, momentum or 0))
    return transformation(RmspropState, rule.Rule(starts, update, missed=missed))
