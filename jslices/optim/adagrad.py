"""Adagrad: step sizes that shrink with the squared gradients seen so far."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jslices._typing import Change, Record
from jslices.optim.engine import arguments, rule
from jslices.optim.engine.constructors import optimizer
from jslices.optim.engine.protocol import GradientTransformation
from jslices.optim.engine.transformation import transformation


class AdagradState(NamedTuple):
    """State of :func:`adagrad`."""

    count: jax.Array  # type: ignore[assignment]  #: int32 ``[]``, the steps taken.
    sum_of_squares: Any  #: like params.


@optimizer
def adagrad(
    learning_rate: arguments.LearningRate,
    initial_accumulator_value: arguments.NotNegative = 0.1,
    eps: arguments.NotNegative = 1e-7,
    *,
    eps_in_sqrt: bool = True,
    untouched: arguments.Untouched = "lazy",
) -> GradientTransformation:
    """Adagrad: ``s += g**2``, then ``p -= lr * g / sqrt(s + eps)``.

    Untouched rows: as dense. A row without gradient is neither read nor written, and the
    dense optimizer would leave it and its state alone too.

    Args:
      learning_rate: a number, or a schedule of the step (from 0).
      initial_accumulator_value: what ``s`` starts from.
      eps: keeps the root away from zero.
      eps_in_sqrt: whether ``eps`` is added inside the root.
      untouched: ``"lazy"`` or ``"exact"``, which are the same here.

    Returns:
      A :class:`GradientTransformation`. State per row: D numbers.

    Cost: a step reads and writes ``U * D`` elements of each of the parameter and ``s``.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> params = jnp.zeros((5, 1))
      >>> tx = js.adagrad(0.5)
      >>> grads = js.IndexedSlices(jnp.ones((1, 1)), jnp.array([3]), (5, 1))
      >>> updates, state = tx.update(grads, tx.init(params), params)
      >>> state.sum_of_squares.ravel()
      Array([0.1, 0.1, 0.1, 1.1, 0.1], dtype=float32)

    Source: Duchi, Hazan and Singer, 2011; ``optax.adagrad``, with its names and defaults.
    TensorFlow's ``AdagradOptimizer`` has no ``eps``. PyTorch's and FBGEMM's
    ``EXACT_ADAGRAD`` start from 0 and add ``eps`` outside the root, 1e-10 and 1e-8.
    """

    def update(step: rule.Step) -> rule.Kernel:
        size = step.size(learning_rate)

        def kernel(g: jax.Array, p: jax.Array, state: Record) -> Change:
            total = rule.squared(g) + state["sum_of_squares"]
            scale = lax.rsqrt(total + eps) if eps_in_sqrt else 1 / (jnp.sqrt(total) + eps)
            scale = jnp.where(total > 0, scale, 0.0)
            return rule.scaled(size, scale * g), {"sum_of_squares": total}

        return kernel

    state = {"sum_of_squares": rule.full(initial_accumulator_value)}
    return transformation(AdagradState, rule.Rule(state, update))
