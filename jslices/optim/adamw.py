"""Adam with decoupled weight decay."""

import jax

from jslices._typing import Change, PyTree, Record, Scalar, Schedule
from jslices.optim.adam import AdamState, Moments
from jslices.optim.engine import arguments, rule
from jslices.optim.engine.constructors import optimizer
from jslices.optim.engine.missed import MissedSteps, only_decay
from jslices.optim.engine.protocol import GradientTransformation
from jslices.optim.engine.transformation import transformation


@optimizer
def adamw(
    learning_rate: arguments.LearningRate,
    b1: arguments.Decay = 0.9,
    b2: arguments.Decay = 0.999,
    eps: arguments.NotNegative = 1e-8,
    eps_root: arguments.NotNegative = 0.0,
    mu_dtype: arguments.StateDtype | None = None,
    weight_decay: arguments.WeightDecay = 1e-4,
    mask: PyTree = None,
    *,
    nesterov: bool = False,
    eps_hat: arguments.EpsHat = False,
    untouched: arguments.Untouched = "lazy",
    weight_decay_mode: arguments.DecayMode | None = None,
) -> GradientTransformation:
    """AdamW: the step of :func:`jslices.adam`, and ``p -= lr * weight_decay * p``.

    Untouched rows: lazy or exact. Lazy: a row without gradient is neither read nor written,
    and nor is its state. Exact: its means decay, it moves on and its weights decay when it
    catches up, as in a dense optimizer.

    Arguments that are not listed are those of :func:`jslices.adam`.

    Args:
      weight_decay: a number, or a schedule of the step.
      mask: bools in the structure of params or a prefix of it, or a function from params to
        that: which of them decay.
      untouched: ``"lazy"`` or ``"exact"``, for the movement (see :mod:`jslices.optim`).
      weight_decay_mode: ``"touched"``, a row decays in the steps that touch it, or
        ``"all"``, every row decays in every step, once it catches up. None means touched
        for lazy and all for exact; lazy movement with ``"all"`` must catch up too.

    Returns:
      A :class:`GradientTransformation`; ``update`` needs the parameters. State per row:
      2 D numbers; 4 bytes more if rows catch up.

    Cost: as :func:`jslices.adam`, and ``U * D`` elements of the parameter read once more.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> tx = js.adamw(0.1, weight_decay=0.5, untouched="exact")
      >>> table = jnp.ones((4, 1))
      >>> state = tx.init(table)
      >>> grads = js.IndexedSlices(jnp.zeros((1, 1)), jnp.array([2]), (4, 1))
      >>> updates, state = tx.update(grads, state, table)
      >>> table, state = tx.flush(js.apply_updates(table, updates), state)
      >>> table.ravel()  # every row has decayed by lr * weight_decay
      Array([0.95, 0.95, 0.95, 0.95], dtype=float32)

    Source: Loshchilov and Hutter, 2019; ``optax.adamw``, with its names and defaults; dense
    gradients give its result. The modes are FBGEMM's ``DECOUPLE`` and ``DECOUPLE_GLOBAL``.
    PyTorch's decays by 1e-2 and refuses sparse gradients, Keras' by 4e-3.
    """
    exact = untouched == "exact"
    everywhere = weight_decay_mode == "all" or (exact and weight_decay_mode is None)
    moments = Moments(b1, b2, eps, eps_root, nesterov, eps_hat)

    def rule_of(rate: Scalar | Schedule) -> rule.Rule:
        def update(step: rule.Step) -> rule.Kernel:
            size, direction = step.size(learning_rate), moments.direction(step)

            def kernel(g: jax.Array, p: jax.Array, state: Record) -> Change:
                u, new = direction(g, state)
                return rule.scaled(size, rule.with_decay(u, p, rate, step.count)), new

            return kernel

        missed, decay = None, rate if everywhere else 0.0
        if exact:
            missed = moments.missed("adamw", learning_rate, decay)
        elif everywhere:
            missed = MissedSteps(only_decay, learning_rate, (), decay)
        state = {"mu": rule.zeros(mu_dtype), "nu": rule.zeros()}
        return rule.Rule(state, update, reads_params=True, missed=missed)

    return transformation(AdamState, rule_of(weight_decay), other=rule_of(0.0), mask=mask)
