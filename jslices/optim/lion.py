"""Lion: steps of one size, in the direction of a sign."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jslices._typing import Change, PyTree, Record, Scalar, Schedule
from jslices.optim.engine import arguments, rule
from jslices.optim.engine.constructors import optimizer
from jslices.optim.engine.missed import Missed, MissedSteps, faded
from jslices.optim.engine.protocol import GradientTransformation
from jslices.optim.engine.transformation import transformation


class LionState(NamedTuple):
    """State of :func:`lion`."""

    count: jax.Array  # type: ignore[assignment]  #: int32 ``[]``, the steps taken.
    mu: Any  #: like params, the mean of the gradients.
    clock: Any = None  #: how far each row is; None unless rows catch up.


@optimizer
def lion(
    learning_rate: arguments.LearningRate,
    b1: arguments.Decay = 0.9,
    b2: arguments.Decay = 0.99,
    mu_dtype: arguments.StateDtype | None = None,
    weight_decay: arguments.WeightDecay = 1e-3,
    mask: PyTree = None,
    *,
    untouched: arguments.Untouched = "lazy",
    weight_decay_mode: arguments.DecayMode | None = None,
) -> GradientTransformation:
    """Lion, for every touched row::

        p -= lr * (sign(b1 * mu + (1 - b1) * g) + weight_decay * p)
        mu = b2 * mu + (1 - b2) * g

    Untouched rows: lazy or exact. Lazy: a row without gradient is neither read nor written,
    and nor is its state. Exact: its mean decays, it moves on by the sign of it and its
    weights decay when it catches up, as in a dense optimizer.

    Arguments that are not listed are those of :func:`jslices.adamw`.

    Args:
      b1: weight of the mean in the direction.
      b2: decay of the mean.
      weight_decay: a number, or (unless rows catch up) a schedule of the step.
      weight_decay_mode: ``"touched"`` or ``"all"``, as in :func:`jslices.adamw`; a row that
        moves exactly decays in all steps.

    Returns:
      A :class:`GradientTransformation`; ``update`` needs the parameters. State per row:
      D numbers; 4 bytes more if rows catch up.

    Cost: a step reads ``U * D`` elements of the parameter and reads and writes as many of
    it and of ``mu``; catching up the same once more.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> tx = js.lion(0.5, weight_decay=0.0)
      >>> table = jnp.zeros((5, 1))
      >>> grads = js.IndexedSlices(jnp.ones((1, 1)), jnp.array([3]), (5, 1))
      >>> updates, state = tx.update(grads, tx.init(table), table)
      >>> js.apply_updates(table, updates).ravel()
      Array([ 0. ,  0. ,  0. , -0.5,  0. ], dtype=float32)

    Source: Chen et al., 2023; ``optax.lion``, with its names and defaults; dense gradients
    give its result. If exact, an element stops where it does in a dense optimizer: when
    its mean falls below the least normal number, after some 8,000 steps without gradient.
    """
    exact = untouched == "exact"
    everywhere = weight_decay_mode == "all" or (exact and weight_decay_mode is None)
    if (exact or everywhere) and callable(weight_decay):
        raise ValueError(
            'lion with rows that catch up (untouched="exact", or weight_decay_mode="all") '
            "takes a number for weight_decay, got a schedule"
        )
    if exact and b2 == 0:
        raise ValueError('lion(untouched="exact") needs b2 above 0, got 0')
    if exact and not everywhere:
        raise ValueError(
            'lion(untouched="exact", weight_decay_mode="touched"): the missed movement is '
            'closed together with the missed decay; use "all", or weight_decay=0'
        )

    def rule_of(rate: Scalar | Schedule) -> rule.Rule:
        def update(step: rule.Step) -> rule.Kernel:
            size = step.size(learning_rate)

            def kernel(g: jax.Array, p: jax.Array, state: Record) -> Change:
                mu = state["mu"]
                direction = jnp.sign((1.0 - b1) * g + b1 * mu)
                direction = rule.with_decay(direction, p, rate, step.count)
                return rule.scaled(size, direction), {"mu": rule.decayed(mu, g, b2)}

            return kernel

        missed = lion_missed(rate) if exact or everywhere else None
        state = {"mu": rule.zeros(mu_dtype)}
        return rule.Rule(state, update, reads_params=True, missed=missed)

    def lion_missed(rate: Any) -> MissedSteps:
        rule.check_fading("lion", b1=b1, b2=b2)

        def advance(missed: Missed, p: jax.Array, state: Record) -> Change:
            if not exact:
                return missed.decay * p, {}
            mu = state["mu"]
            decay_since, rates_since = _since_signs_stopped(missed, b1, b2, mu)
            far = missed.rates - rates_since
            if rule.decays(rate):  # p + sign / rate shrinks by the same factor in each step
                shrinks = (decay_since - missed.decay) / jnp.where(rate == 0, 1, rate)
                far = jnp.where(rate == 0, far, shrinks)
            move = missed.decay * p - far * jnp.sign(b1 * mu)
            return move, {"mu": faded(b2, missed, mu)}

        return MissedSteps(
            advance, learning_rate, (), rate, True, exact, numbers=(b1, b2, rate) * exact
        )

    return transformation(LionState, rule_of(weight_decay), other=rule_of(0.0), mask=mask)


def _since_signs_stopped(
    missed: Missed, b1: Any, b2: Any, mu: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """What decay added, and the rates, of the missed steps in which elements stood still.

    In a dense optimizer the mean becomes zero where it falls below the least normal number.
    Few rows wait as long as that.
    """
    dtype = missed.decay.dtype
    if mu.dtype == jnp.float16:  # whose means stop falling instead
        return jnp.zeros((), dtype), jnp.zeros((), dtype)
    least = float(jnp.finfo(mu.dtype).tiny)
    size = jnp.maximum(jnp.abs(b1 * mu).astype(dtype), least)
    moves = (jnp.log(size) - math.log(least)) / -math.log(b2)
    moves = jnp.where(size > least, jnp.floor(moves) + 1, 0).astype(jnp.int32)
    moves = jnp.minimum(moves, missed.steps)
    nothing = lambda moves: (jnp.zeros(moves.shape, dtype),) * 2  # noqa: E731

    def if_any(moves: jax.Array) -> Any:
        stops = jnp.any(moves < missed.steps)
        return lax.cond(stops, missed.without_first, nothing, moves)

    # On a GPU it takes longer to wait for what has been computed than to compute.
    each = lambda moves: missed.without_first(moves)  # noqa: E731
    how = {"cuda": each, "rocm": each, "default": if_any}
    return lax.platform_dependent(moves, **how)  # type: ignore[no-any-return]
