"""Adam, lazy on the rows that got no gradient."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jslices.optim.base import (
    GradientTransformation,
    Scalar,
    Schedule,
    check_learning_rate,
    next_count,
    scaled,
    step_size,
    zero_count,
)
from jslices.optim.rows import update_leaves


class AdamState(NamedTuple):
    """State of :func:`adam`."""

    count: jax.Array  # type: ignore[assignment]  #: int32 ``[]``, the steps taken.
    mu: Any  #: like params, the mean of the gradients.
    nu: Any  #: like params, the mean of their squares.


def adam(
    learning_rate: Scalar | Schedule,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    eps_root: Scalar = 0.0,
    mu_dtype: DTypeLike | None = None,
    *,
    nesterov: bool = False,
) -> GradientTransformation:
    """Adam. At step t (from 1), for every touched row::

        mu = b1 * mu + (1 - b1) * g
        nu = b2 * nu + (1 - b2) * g**2
        p -= lr * (mu / (1 - b1**t)) / (sqrt(nu / (1 - b2**t) + eps_root) + eps)

    Untouched rows: lazy. A row without gradient is neither read nor written, and nor is
    its state (a dense optimizer would let both means decay and the row move on). The
    bias correction counts all steps, not those of the row.

    Args:
      learning_rate: a number, or a schedule of the step (from 0).
      b1: decay of the mean.
      b2: decay of the mean of squares.
      eps: added outside the root.
      eps_root: added inside the root.
      mu_dtype: dtype of ``mu``; None means that of the parameter.
      nesterov: whether to look ahead (NAdam).

    Returns:
      A :class:`GradientTransformation`. State per row: 2 D numbers.

    Cost: a step reads and writes ``U * D`` elements of each of the parameter, ``mu`` and
    ``nu``.

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
    ``torch.optim.SparseAdam``; TensorFlow's core Adam moves every row at every step, and
    puts ``eps`` beside the uncorrected root.
    """
    check_learning_rate("adam", learning_rate)

    def init(params: Any) -> AdamState:
        mu = jax.tree.map(lambda p: jnp.zeros_like(p, dtype=mu_dtype), params)
        return AdamState(zero_count(), mu, jax.tree.map(jnp.zeros_like, params))

    def update(grads: Any, state: AdamState, params: Any = None) -> tuple[Any, AdamState]:
        del params
        step = step_size(learning_rate, state.count)
        count = next_count(state.count)

        # Scalars, computed once for all leaves.
        whole_mu, whole_nu = weight_seen(b1, count), weight_seen(b2, count)
        further_mu = weight_seen(b1, next_count(count)) if nesterov else None

        def kernel(g: jax.Array, mu: jax.Array, nu: jax.Array) -> tuple[jax.Array, ...]:
            new_mu = (1 - b1) * g + b1 * mu
            new_nu = (1 - b2) * g**2 + b2 * nu
            ahead = divided(new_mu, whole_mu)
            if nesterov:
                further = divided(new_mu, further_mu)
                ahead = b1 * further + (1 - b1) * divided(g, whole_mu)
            root = jnp.sqrt(divided(new_nu, whole_nu) + eps_root)
            return (
                scaled(step, ahead / (root + eps)),
                new_mu.astype(mu.dtype),
                new_nu.astype(nu.dtype),
            )

        updates, (mu, nu) = update_leaves(kernel, grads, (state.mu, state.nu))
        return updates, AdamState(count, mu, nu)

    return GradientTransformation(init, update)


@functools.partial(jax.jit, inline=True)
def weight_seen(decay: Scalar, count: jax.Array) -> jax.Array:
    """What the weights of ``count`` terms of a decaying mean add up to.

    A jit of its own, because the power rounds differently outside one, and 1 - 0.999 has
    only four digits of it left.
    """
    return 1 - decay**count


def divided(mean: jax.Array, weight: Any) -> jax.Array:
    """A decaying mean that started from zero, divided by the weight it has seen."""
    return mean / weight.astype(mean.dtype)
