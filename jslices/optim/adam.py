"""Adam, lazy or exact on the rows that got no gradient."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jslices._typing import Change, Record, Scalar, Schedule
from jslices.optim.engine import arguments, rule
from jslices.optim.engine.constructors import optimizer
from jslices.optim.engine.missed import Missed, MissedSteps, faded, step_moments
from jslices.optim.engine.protocol import GradientTransformation
from jslices.optim.engine.quadrature import panel_ends
from jslices.optim.engine.transformation import transformation


class AdamState(NamedTuple):
    """State of :func:`adam` and :func:`jslices.adamw`."""

    count: jax.Array  # type: ignore[assignment]  #: int32 ``[]``, the steps taken.
    mu: Any  #: like params, the mean of the gradients.
    nu: Any  #: like params, the mean of their squares.
    clock: Any = None  #: how far each row is; None unless ``untouched="exact"``.
    #: The steps of each row, int32: ``[V]`` of a parameter ``[V, D]``, ``[L, V]`` of
    #: ``[L, V, D]``; None unless ``bias_correction="row"``.
    row_counts: Any = None


@optimizer
def adam(
    learning_rate: arguments.LearningRate,
    b1: arguments.Decay = 0.9,
    b2: arguments.Decay = 0.999,
    eps: arguments.NotNegative = 1e-8,
    eps_root: arguments.NotNegative = 0.0,
    mu_dtype: arguments.StateDtype | None = None,
    *,
    nesterov: bool = False,
    eps_hat: arguments.EpsHat = False,
    bias_correction: arguments.BiasCorrection = "step",
    untouched: arguments.Untouched = "lazy",
) -> GradientTransformation:
    """Adam. At step t (from 1), for every touched row::

        mu = b1 * mu + (1 - b1) * g
        nu = b2 * nu + (1 - b2) * g**2
        p -= lr * (mu / (1 - b1**t)) / (sqrt(nu / (1 - b2**t) + eps_root) + eps)

    Untouched rows: lazy or exact. Lazy: a row without gradient and its state are neither
    read nor written; t counts all steps, with ``bias_correction="row"`` the row's. Exact:
    its means decay and it moves on when it catches up, as in a dense optimizer.

    Args:
      learning_rate: a number, or a schedule of the step (from 0).
      b1: decay of the mean.
      b2: decay of the mean of squares.
      eps: added outside the root.
      eps_root: added inside the root.
      mu_dtype: dtype of ``mu``; None means that of the parameter.
      nesterov: whether to look ahead (NAdam).
      eps_hat: whether ``eps`` (and ``eps_root``) is the paper's "epsilon hat", beside the
        uncorrected root, ``p -= lr * sqrt(1 - b2**t) / (1 - b1**t) * mu / (sqrt(nu +
        eps_root) + eps)``, as in ``torch.optim.SparseAdam``, TensorFlow's ``Adam`` and
        ``LazyAdam``, and Keras. At step t it counts as much as an ``eps`` that is larger by
        ``1 / sqrt(1 - b2**t)``, at first 32 times: the steps of small gradients differ.
      bias_correction: whether t is the number of the ``"step"``, or of the steps that
        touched the ``"row"``: one that is first touched late then begins with a step of
        ``lr``, not of 3.2 times that. All rows of a dense gradient count as touched.
      untouched: ``"lazy"`` or ``"exact"`` (see :mod:`jslices.optim`).

    Returns:
      A :class:`GradientTransformation`. State per row: 2 D numbers; 4 bytes more if exact,
      or corrected by row.

    Raises:
      ValueError: for exact, unless ``b1**2 < b2``: what a row missed has no bound then; and
        with ``bias_correction="row"``, as rows that catch up take every step.

    Cost: a step reads and writes ``U * D`` elements of each of the parameter, ``mu`` and
    ``nu``; catching up the same once more, however many steps were missed.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> params = jnp.zeros((5, 1))
      >>> tx = js.adam(0.5)
      >>> grads = js.IndexedSlices(jnp.ones((1, 1)), jnp.array([3]), (5, 1))
      >>> updates, state = tx.update(grads, tx.init(params), params)
      >>> js.apply_updates(params, updates).ravel().round(3)
      Array([ 0. ,  0. ,  0. , -0.5,  0. ], dtype=float32)

    Source: Kingma and Ba, 2015; ``optax.adam``, with its names and defaults; dense
    gradients give its result. Lazy as ``tfa.optimizers.LazyAdam`` and
    ``torch.optim.SparseAdam``, with ``eps_hat=True``; TensorFlow's core Adam moves every
    row at every step. By row as DGL's ``SparseAdam`` and FBGEMM's ``ADAM`` with
    ``use_rowwise_bias_correction``. Exact has no model elsewhere: the sum over the
    missed steps is closed but for ``eps``, and taken by Gauss' quadrature with two nodes,
    in float64 for tables of float64.
    """
    moments = Moments(b1, b2, eps, eps_root, nesterov, eps_hat)
    by_row = bias_correction == "row"
    if by_row:
        why = "as rows that catch up take every step, and would all count the same"
        rule.check_lazy("adam", untouched, f'of bias_correction="row", {why}')

    def update(step: rule.Step) -> rule.Kernel:
        size, direction = step.size(learning_rate), moments.direction(step)

        def kernel(g: jax.Array, p: jax.Array, state: Record) -> Change:
            if not by_row:
                u, new = direction(g, state)
                return rule.scaled(size, u), new
            counts = state["row_counts"]
            u, new = moments.direction(rule.Step(rule.per_row(counts, g)))(g, state)
            return rule.scaled(size, u), {**new, "row_counts": rule.next_count(counts)}

        return kernel

    missed = moments.missed("adam", learning_rate) if untouched == "exact" else None
    state = {"mu": rule.zeros(mu_dtype), "nu": rule.zeros()}
    if by_row:
        state["row_counts"] = rule.row_of(0, jnp.int32)
    return transformation(AdamState, rule.Rule(state, update, missed=missed))


class Moments(NamedTuple):
    """The arithmetic of Adam and its relatives, with its arguments."""

    b1: Scalar
    b2: Scalar
    eps: Scalar
    eps_root: Scalar = 0.0
    nesterov: bool = False
    eps_hat: bool = False

    def direction(self, step: rule.Step) -> Callable[[jax.Array, Record], Change]:
        """``(g, state) -> (direction, new_state)`` of one step."""
        b1, b2, eps, eps_root, nesterov, eps_hat = self
        correct_mu, correct_nu = step.correction(b1), step.correction(b2, root=eps_hat)
        correct_next = step.correction(b1, ahead=True) if nesterov else None

        def direction(g: jax.Array, state: Record) -> Change:
            mu = rule.decayed(state["mu"], g, b1)
            nu = rule.decayed(state["nu"], rule.squared(g), b2)
            mu_hat = correct_mu(mu)
            if correct_next is not None:
                mu_hat = b1 * correct_next(mu) + (1 - b1) * correct_mu(g)
            if eps_hat:
                u = mu_hat / correct_nu(jnp.sqrt(nu + eps_root) + eps)
            else:
                u = mu_hat / (jnp.sqrt(correct_nu(nu) + eps_root) + eps)
            return u, {"mu": mu, "nu": nu}

        return direction

    def missed(
        self, name: str, learning_rate: Scalar | Schedule, decay: Scalar | Schedule = 0.0
    ) -> MissedSteps:
        """The missed steps of rows, with a weight ``decay``."""
        b1, b2, eps, eps_root, nesterov, eps_hat = self
        rule.check_known(name, b1=b1, b2=b2, eps_root=eps_root)  # which panels go by
        rule.check_fading(name, b1=b1, b2=b2)
        first, second, has_root = float(b1), float(b2), float(eps_root) != 0
        if not first**2 < second:
            raise ValueError(
                f'{name}(untouched="exact") needs b1**2 < b2, got b1={b1}, b2={b2}; '
                "otherwise the step of a row without gradients grows from step to step"
            )

        def advance(missed: Missed, p: jax.Array, state: Record) -> Change:
            mu, nu = state["mu"], state["nu"]
            root, move = jnp.sqrt(nu), missed.decay * p
            half = len(missed.sums) // 2
            for size, shrunk in zip(missed.sums[:half], missed.sums[half:], strict=True):
                if not has_root:
                    bottom = root * shrunk + eps
                else:
                    bottom = jnp.sqrt(nu * shrunk**2 + eps_root) + eps
                move = move - size * shrunk * mu / bottom
            return move, {"mu": faded(first, missed, mu), "nu": faded(second, missed, nu)}

        series = step_moments(first, second, nesterov, eps_hat)
        panels = panel_ends(first, second, has_root)
        of_rows = advance, learning_rate, series, decay
        return MissedSteps(*of_rows, panels=panels, numbers=self)
