"""FTRL-Proximal: sparse weights for sparse features."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jslices._rows.sums import widened
from jslices._typing import Change, Record
from jslices.optim.engine import arguments, rule
from jslices.optim.engine.constructors import optimizer
from jslices.optim.engine.protocol import GradientTransformation
from jslices.optim.engine.transformation import transformation


class FtrlState(NamedTuple):
    """State of :func:`ftrl`."""

    count: jax.Array  # type: ignore[assignment]  #: int32 ``[]``, the steps taken.
    accum: Any  #: like params, the sum of the squared gradients.
    linear: Any  #: like params; the parameter is computed from it.


@optimizer
def ftrl(
    learning_rate: arguments.PositiveRate,
    learning_rate_power: arguments.NotPositive = -0.5,
    initial_accumulator_value: arguments.NotNegative = 0.1,
    l1_regularization_strength: arguments.NotNegative = 0.0,
    l2_regularization_strength: arguments.NotNegative = 0.0,
    l2_shrinkage_regularization_strength: arguments.NotNegative = 0.0,
    beta: arguments.NotNegative = 0.0,
    *,
    untouched: arguments.Untouched = "lazy",
) -> GradientTransformation:
    """FTRL-Proximal, for every touched row, with ``y = -learning_rate_power``::

        new = accum + g**2
        linear += g + 2 * l2_shrinkage * p - (new**y - accum**y) / lr * p
        p = (clip(linear, -l1, l1) - linear) / ((new**y + beta) / lr + 2 * l2)
        accum = new

    Elements whose ``linear`` is within ``l1`` of zero become exactly zero.

    Untouched rows: lazy. A row without gradient is neither read nor written, and nor is its
    state. (Dense gradients compute every element anew from ``linear``, which sets elements
    to zero that never had a gradient.)

    Args:
      learning_rate: a number, or a schedule of the step (from 0); not zero.
      learning_rate_power: how the step falls with the squared gradients, at most 0.
      initial_accumulator_value: what ``accum`` starts from, at least 0.
      l1_regularization_strength: at least 0.
      l2_regularization_strength: at least 0.
      l2_shrinkage_regularization_strength: at least 0; a decay of the touched rows.
      beta: of the paper: makes the first steps of a row smaller, at least 0.
      untouched: ``"lazy"``; ``"exact"`` is refused.

    Returns:
      A :class:`GradientTransformation`; ``update`` needs parameters. State per row: 2 D.

    Raises:
      ValueError: for a hyperparameter out of its range, and for ``untouched="exact"``.

    Cost: a step reads ``U * D`` elements of the parameter, and reads and writes as many of
    it and of each of ``accum`` and ``linear``.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> tx = js.ftrl(0.5, l1_regularization_strength=2.0)
      >>> table = jnp.ones((3, 1))
      >>> grads = js.IndexedSlices(jnp.ones((1, 1)), jnp.array([1]), (3, 1))
      >>> updates, state = tx.update(grads, tx.init(table), table)
      >>> js.apply_updates(table, updates).ravel()
      Array([1., 0., 1.], dtype=float32)

    Source: McMahan et al., 2013; TensorFlow's ``FtrlOptimizer``, with its names, defaults
    and results; ``beta`` is that of Keras' ``Ftrl``. Optax has none.
    """
    rule.check_lazy("ftrl", untouched, "as a dense step computes rows anew from linear")
    l1, l2 = l1_regularization_strength, l2_regularization_strength
    shrinkage, power = l2_shrinkage_regularization_strength, -learning_rate_power

    def update(step: rule.Step) -> rule.Kernel:
        rate: Any = rule.value_at(learning_rate, step.count)

        def kernel(g: jax.Array, p: jax.Array, state: Record) -> Change:
            dtype = g.dtype
            # In 16 bits the differences below would lose up to four units of the result.
            g, p, accum, linear = map(widened, (g, p, state["accum"], state["linear"]))
            rule.check_real("ftrl", g)
            new = accum + g**2
            sigma = (new**power - accum**power) / rate
            linear = linear + g + 2 * shrinkage * p - sigma * p
            curvature = (new**power + beta) / rate + 2 * l2
            new_p = (jnp.clip(linear, -l1, l1) - linear) / curvature
            return (new_p - p).astype(dtype), {"accum": new, "linear": linear}

        return kernel

    state = {"accum": rule.full(initial_accumulator_value), "linear": rule.zeros()}
    return transformation(FtrlState, rule.Rule(state, update, reads_params=True))
