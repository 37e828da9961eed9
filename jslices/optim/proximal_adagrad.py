"""Proximal Adagrad: Adagrad with weights that L1 and L2 penalties pull to zero."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jslices._typing import Change, Record
from jslices.optim.engine import arguments, rule
from jslices.optim.engine.constructors import optimizer
from jslices.optim.engine.missed import Missed, MissedSteps
from jslices.optim.engine.protocol import GradientTransformation
from jslices.optim.engine.transformation import transformation


class ProximalAdagradState(NamedTuple):
    """State of :func:`proximal_adagrad`."""

    count: jax.Array  # type: ignore[assignment]  #: int32 ``[]``, the steps taken.
    accum: Any  #: like params, the sum of the squared gradients.
    clock: Any = None  #: how far each row is; None unless ``untouched="exact"``.


@optimizer
def proximal_adagrad(
    learning_rate: arguments.LearningRate,
    initial_accumulator_value: arguments.Positive = 0.1,
    l1_regularization_strength: arguments.NotNegative = 0.0,
    l2_regularization_strength: arguments.NotNegative = 0.0,
    *,
    untouched: arguments.Untouched = "lazy",
) -> GradientTransformation:
    """Proximal Adagrad, for every touched row::

        s += g**2
        e = lr / sqrt(s)
        q = p - e * g
        p = sign(q) * max(abs(q) - e * l1, 0) / (1 + l2 * e)

    Untouched rows: lazy or exact. Lazy: a row without gradient is neither read nor written,
    and nor is its state. Exact: the penalties pull it on when it catches up, as a dense
    optimizer does in every step.

    Args:
      learning_rate: a number, or a schedule of the step (from 0).
      initial_accumulator_value: what ``s`` starts from, above 0.
      l1_regularization_strength: at least 0.
      l2_regularization_strength: at least 0.
      untouched: ``"lazy"`` or ``"exact"`` (see :mod:`jslices.optim`).

    Returns:
      A :class:`GradientTransformation`; ``update`` needs the parameters. State per row: D
      numbers; 4 bytes more if exact.

    Raises:
      ValueError: for a hyperparameter out of its range; for exact with an
        ``l2_regularization_strength`` and a rate that is no number.

    Cost: a step reads ``U * D`` elements of the parameter, and reads and writes as many of
    it and of ``s``; catching up the same once more.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> tx = js.proximal_adagrad(0.5, l1_regularization_strength=9.0)
      >>> table = jnp.ones((3, 1))
      >>> grads = js.IndexedSlices(jnp.ones((1, 1)), jnp.array([1]), (3, 1))
      >>> updates, state = tx.update(grads, tx.init(table), table)
      >>> js.apply_updates(table, updates).ravel()
      Array([1., 0., 1.], dtype=float32)

    Source: Duchi and Singer, 2009; TensorFlow's ``ProximalAdagradOptimizer``, with its
    names, defaults and results (lazy on IndexedSlices). Optax has none.
    """
    exact = untouched == "exact"
    l1, l2 = l1_regularization_strength, l2_regularization_strength
    if exact:
        rule.check_known("proximal_adagrad", l2_regularization_strength=l2)
    if exact and not isinstance(learning_rate, int | float) and l2 != 0:
        raise ValueError(
            'proximal_adagrad(untouched="exact") with l2_regularization_strength takes a '
            "number as learning_rate, got a schedule or an array: the missed pulls have no "
            "closed form then"
        )

    def update(step: rule.Step) -> rule.Kernel:
        rate: Any = rule.value_at(learning_rate, step.count)

        def kernel(g: jax.Array, p: jax.Array, state: Record) -> Change:
            rule.check_real("proximal_adagrad", g)
            accum = state["accum"] + g**2
            size = rate / jnp.sqrt(accum)
            q = p - size * g
            shrunk = jnp.sign(q) * jnp.maximum(jnp.abs(q) - size * l1, 0)
            return (shrunk / (1 + l2 * size) - p).astype(g.dtype), {"accum": accum}

        return kernel

    missed = None
    if exact:
        constant: Any = learning_rate

        def advance(missed: Missed, p: jax.Array, state: Record) -> Change:
            root = jnp.sqrt(state["accum"])
            if l2 == 0:
                longer = -missed.rates / root * l1
            else:
                size = constant / root
                shrink = jnp.expm1(-missed.steps * jnp.log1p(l2 * size))
                longer = shrink * (jnp.abs(p) + l1 / l2)
            return jnp.sign(p) * jnp.maximum(longer, -jnp.abs(p)), {}

        numbers = l1, l2, constant if l2 else 0
        missed = MissedSteps(advance, learning_rate, keeps_rates=True, numbers=numbers)
    state = {"accum": rule.full(initial_accumulator_value)}
    own = rule.Rule(state, update, reads_params=True, missed=missed)
    return transformation(ProximalAdagradState, own)
