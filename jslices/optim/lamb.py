"""LAMB: Adam with steps in proportion to the size of the parameters."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jslices._typing import Change, PyTree, Record, Scalar, Schedule
from jslices.optim.adam import Moments
from jslices.optim.engine import arguments, rule
from jslices.optim.engine.constructors import optimizer
from jslices.optim.engine.protocol import GradientTransformation
from jslices.optim.engine.transformation import transformation


class LambState(NamedTuple):
    """State of :func:`lamb`."""

    count: jax.Array  # type: ignore[assignment]  #: int32 ``[]``, the steps taken.
    mu: Any  #: like params, the mean of the gradients.
    nu: Any  #: like params, the mean of their squares.


@optimizer
def lamb(
    learning_rate: arguments.LearningRate,
    b1: arguments.Decay = 0.9,
    b2: arguments.Decay = 0.999,
    eps: arguments.NotNegative = 1e-6,
    eps_root: arguments.NotNegative = 0.0,
    weight_decay: arguments.WeightDecay = 0.0,
    mask: PyTree = None,
    *,
    untouched: arguments.Untouched = "lazy",
) -> GradientTransformation:
    """LAMB: with Adam's direction ``u`` plus ``weight_decay * p``, ``p -= lr * r * u``.

    The trust ratio is ``r = norm(p) / norm(u)``, or 1 where either is zero: of the whole
    array for a dense gradient, **of each row by itself** for IndexedSlices. The norm of a
    whole table would cost a pass over all of it.

    Untouched rows: lazy. A row without gradient is neither read nor written, and nor is its
    state. (There is no exact form: what a row misses depends on its own path.)

    Arguments that are not listed are those of :func:`jslices.adam`.

    Args:
      weight_decay: a number, or a schedule of the step; of touched rows.
      mask: which parameters decay, as in :func:`jslices.adamw`.
      untouched: ``"lazy"``; ``"exact"`` is refused.

    Returns:
      A :class:`GradientTransformation`; ``update`` needs parameters. State per row: 2 D.

    Raises:
      ValueError: for ``untouched="exact"``.

    Cost: a step reads ``U * D`` elements of the parameter, and reads and writes as many of
    it and of each of the means.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> tx = js.lamb(0.5)
      >>> table = jnp.array([[1.0], [8.0]])
      >>> grads = js.IndexedSlices(jnp.ones((2, 1)), jnp.array([0, 1]), (2, 1))
      >>> updates, state = tx.update(grads, tx.init(table), table)
      >>> js.apply_updates(table, updates).ravel()  # each row loses half of itself
      Array([0.5, 4. ], dtype=float32)

    Source: You et al., 2020; ``optax.lamb``, with its names and defaults; dense gradients
    give its result. A ratio for each row is ``LAMB`` of FBGEMM, by which rows of zeros
    never move; its ``PARTIAL_ROWWISE_LAMB`` keeps one second moment for each row.
    """
    rule.check_lazy("lamb", untouched, "as what a row misses depends on its own path")

    def rule_of(rate: Scalar | Schedule) -> rule.Rule:
        def update(step: rule.Step, by_row: bool = False) -> rule.Kernel:
            size = step.size(learning_rate)
            direction = Moments(b1, b2, eps, eps_root).direction(step)

            def kernel(g: jax.Array, p: jax.Array, state: Record) -> Change:
                u, new = direction(g, state)
                u = rule.with_decay(u, p, rate, step.count)
                return rule.scaled(size, u * trust_ratio(p, u, by_row)), new

            return kernel

        state = {"mu": rule.zeros(), "nu": rule.zeros()}
        by_row = functools.partial(update, by_row=True)
        return rule.Rule(state, update, update_rows=by_row, reads_params=True)

    return transformation(LambState, rule_of(weight_decay), other=rule_of(0.0), mask=mask)


def trust_ratio(p: jax.Array, update: jax.Array, by_row: bool) -> jax.Array:
    """How large ``p`` is for each unit of ``update``; 1 where either is zero."""
    size, step = _norm(p, by_row), _norm(update, by_row)
    nothing = (size == 0) | (step == 0)
    ratio = jnp.where(nothing, 1.0, size / jnp.where(nothing, 1.0, step))
    return ratio.astype(p.dtype)


def _norm(x: jax.Array, by_row: bool) -> jax.Array:
    if not by_row:
        return jnp.linalg.norm(x)
    squares = jnp.sum(rule.squared(x), axis=tuple(range(1, x.ndim)))
    return rule.per_row(jnp.sqrt(squares), x)
