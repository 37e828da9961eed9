"""AMSGrad: Adam whose step sizes never grow back."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jslices._typing import Change, Record
from jslices.optim.engine import arguments, rule
from jslices.optim.engine.constructors import optimizer
from jslices.optim.engine.missed import Missed, MissedSteps, faded, momentum_series
from jslices.optim.engine.protocol import GradientTransformation
from jslices.optim.engine.transformation import transformation


class AmsgradState(NamedTuple):
    """State of :func:`amsgrad`."""

    count: jax.Array  # type: ignore[assignment]  #: int32 ``[]``, the steps taken.
    mu: Any  #: like params, the mean of the gradients.
    nu: Any  #: like params, the mean of their squares.
    nu_max: Any  #: like params, the largest corrected ``nu`` so far.
    clock: Any = None  #: how far each row is; None unless ``untouched="exact"``.


@optimizer
def amsgrad(
    learning_rate: arguments.LearningRate,
    b1: arguments.Decay = 0.9,
    b2: arguments.Decay = 0.999,
    eps: arguments.NotNegative = 1e-8,
    eps_root: arguments.NotNegative = 0.0,
    mu_dtype: arguments.StateDtype | None = None,
    bias_correction_mu: bool = True,
    bias_correction_nu: bool = True,
    *,
    untouched: arguments.Untouched = "lazy",
) -> GradientTransformation:
    """AMSGrad. At step t (from 1), for every touched row::

        mu = b1 * mu + (1 - b1) * g
        nu = b2 * nu + (1 - b2) * g**2
        nu_max = max(nu_max, nu / (1 - b2**t))
        p -= lr * (mu / (1 - b1**t)) / (sqrt(nu_max + eps_root) + eps)

    Untouched rows: lazy or exact. They are treated as by :func:`jslices.adam`, whose
    arguments are those that are not listed.

    Args:
      bias_correction_mu: whether ``mu`` is divided by the weight it has seen.
      bias_correction_nu: whether ``nu`` is.

    Returns:
      A :class:`GradientTransformation`. State per row: 3 D numbers; 4 bytes more if exact.

    Cost: a step reads and writes ``U * D`` elements of each of the parameter and three
    means; catching up the same once more.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> tx = js.amsgrad(0.5)
      >>> table = jnp.zeros((5, 1))
      >>> grads = js.IndexedSlices(jnp.ones((1, 1)), jnp.array([3]), (5, 1))
      >>> updates, state = tx.update(grads, tx.init(table), table)
      >>> js.apply_updates(table, updates).ravel().round(3)
      Array([ 0. ,  0. ,  0. , -0.5,  0. ], dtype=float32)

    Source: Reddi, Kale and Kumar, 2018; ``optax.amsgrad``, with its names and defaults;
    dense gradients give its result. PyTorch's keeps the largest *uncorrected* ``nu``, and
    its ``SparseAdam`` has no AMSGrad; nor has TensorFlow's ``LazyAdam``.
    """

    def update(step: rule.Step) -> rule.Kernel:
        size = step.size(learning_rate)
        correct_mu, correct_nu = step.correction(b1), step.correction(b2)

        def kernel(g: jax.Array, p: jax.Array, state: Record) -> Change:
            mu = rule.decayed(state["mu"], g, b1)
            nu = rule.decayed(state["nu"], rule.squared(g), b2)
            mu_hat = correct_mu(mu) if bias_correction_mu else mu
            nu_hat = correct_nu(nu) if bias_correction_nu else nu
            nu_max = jnp.maximum(state["nu_max"], nu_hat)
            u = mu_hat / (jnp.sqrt(nu_max + eps_root) + eps)
            return rule.scaled(size, u), {"mu": mu, "nu": nu, "nu_max": nu_max}

        return kernel

    missed = None
    if untouched == "exact":
        rule.check_fading("amsgrad", b1=b1, b2=b2)

        def advance(missed: Missed, p: jax.Array, state: Record) -> Change:
            # Without gradients the corrected mean of squares only falls: its maximum stays.
            bottom = jnp.sqrt(state["nu_max"] + eps_root) + eps
            mu, nu = faded(b1, missed, state["mu"]), faded(b2, missed, state["nu"])
            return -missed.sums[0] * state["mu"] / bottom, {"mu": mu, "nu": nu}

        series = momentum_series(b1, corrected=bias_correction_mu)
        numbers = b1, b2, eps, eps_root
        missed = MissedSteps(advance, learning_rate, (series,), numbers=numbers)
    state = {"mu": rule.zeros(mu_dtype), "nu": rule.zeros(), "nu_max": rule.zeros()}
    return transformation(AmsgradState, rule.Rule(state, update, missed=missed))
