"""Adadelta: steps in the units of the parameters."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jslices._typing import Change, PyTree, Record, Scalar, Schedule
from jslices.optim.engine import arguments, rule
from jslices.optim.engine.constructors import optimizer
from jslices.optim.engine.missed import Missed, MissedSteps, faded
from jslices.optim.engine.protocol import GradientTransformation
from jslices.optim.engine.transformation import transformation


class AdadeltaState(NamedTuple):
    """State of :func:`adadelta`."""

    count: jax.Array  # type: ignore[assignment]  #: int32 ``[]``, the steps taken.
    e_g: Any  #: like params, the mean of the squared gradients.
    e_x: Any  #: like params, the mean of the squared steps.
    clock: Any = None  #: how far each row is; None unless ``untouched="exact"``.


@optimizer
def adadelta(
    learning_rate: arguments.LearningRate = 1.0,
    rho: arguments.Decay = 0.9,
    eps: arguments.NotNegative = 1e-6,
    weight_decay: arguments.WeightDecay = 0.0,
    weight_decay_mask: PyTree = None,
    *,
    untouched: arguments.Untouched = "lazy",
) -> GradientTransformation:
    """Adadelta, for every touched row::

        g = g + weight_decay * p
        e_g = rho * e_g + (1 - rho) * g**2
        x = sqrt(e_x + eps) / sqrt(e_g + eps) * g
        e_x = rho * e_x + (1 - rho) * x**2
        p -= lr * x

    Untouched rows: lazy or exact. Lazy: a row without gradient is neither read nor written,
    and nor is its state. Exact: its means decay when it catches up, as in a dense optimizer
    (without gradient it does not move).

    Args:
      learning_rate: a number, or a schedule of the step (from 0).
      rho: decay of the means.
      eps: keeps the roots away from zero.
      weight_decay: a number, or a schedule of the step; of touched rows. It is part of the
        gradient here (L2), not decoupled.
      weight_decay_mask: which parameters decay, the ``mask`` of :func:`jslices.adamw`.
      untouched: ``"lazy"`` or ``"exact"`` (see :mod:`jslices.optim`).

    Returns:
      A :class:`GradientTransformation`. State per row: 2 D numbers; 4 bytes more if exact.

    Raises:
      ValueError: for exact with weight decay: rows would move by themselves, in a way that
        has no closed form.

    Cost: a step reads and writes ``U * D`` elements of each of the parameter and the means;
    catching up the same once more.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> tx = js.adadelta(1.0)
      >>> table = jnp.zeros((5, 1))
      >>> grads = js.IndexedSlices(jnp.ones((1, 1)), jnp.array([3]), (5, 1))
      >>> updates, state = tx.update(grads, tx.init(table), table)
      >>> state.e_g.ravel().round(3)
      Array([0. , 0. , 0. , 0.1, 0. ], dtype=float32)

    Source: Zeiler, 2012; ``optax.adadelta``, with its names and defaults; dense gradients
    give its result. Its default for the learning rate, None, is 1 as well, but without the
    minus sign: ``optax.adadelta()`` climbs. TensorFlow's defaults are ``rho=0.95``,
    ``eps=1e-8`` and a learning rate of 0.001.
    """
    exact, decays = untouched == "exact", rule.decays(weight_decay)
    if exact and decays:
        raise ValueError(
            'adadelta(untouched="exact") takes no weight_decay: it is part of the gradient '
            "here, so that a row without one still moves, and not in closed form; use "
            'untouched="lazy", or adamw for a decay of all rows'
        )

    missed = None
    if exact:
        rule.check_fading("adadelta", rho=rho)

        def advance(missed: Missed, p: jax.Array, state: Record) -> Change:
            means = {name: faded(rho, missed, state[name]) for name in ("e_g", "e_x")}
            return jnp.zeros_like(p), means

        missed = MissedSteps(advance, learning_rate, numbers=(rho,))

    def rule_of(rate: Scalar | Schedule) -> rule.Rule:
        def update(step: rule.Step) -> rule.Kernel:
            size = step.size(learning_rate)

            def kernel(g: jax.Array, p: jax.Array, state: Record) -> Change:
                g = rule.with_decay(g, p, rate, step.count)
                e_g, e_x = rule.decayed(state["e_g"], g**2, rho), state["e_x"]
                x = (jnp.sqrt(e_x + eps) / jnp.sqrt(e_g + eps)) * g
                new = {"e_g": e_g, "e_x": rule.decayed(e_x, x**2, rho)}
                return rule.scaled(size, x), new

            return kernel

        state = {"e_g": rule.zeros(), "e_x": rule.zeros()}
        return rule.Rule(state, update, reads_params=decays, missed=missed)

    first, other = rule_of(weight_decay), rule_of(0.0)
    return transformation(AdadeltaState, first, other=other, mask=weight_decay_mask)
