"""Decaying means, which most optimizers are made of."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jslices.optim._engine.arithmetic import Scalar
from jslices.optim._engine.one_step import single_array
from jslices.optim._exact.drift import Series


def decayed(mean: jax.Array, new: jax.Array, decay: Scalar) -> jax.Array:
    """``decay * mean + (1 - decay) * new``."""
    return (1 - decay) * new + decay * mean


@functools.partial(jax.jit, inline=True)
def weight_seen(decay: Scalar, count: jax.Array) -> jax.Array:
    """What the weights of ``count`` terms of a decaying mean add up to.

    A jit of its own, because the power rounds differently outside one, and 1 - 0.999 has
    only four digits of it left.
    """
    return 1 - decay**count


def divided(mean: jax.Array, weight: Any) -> jax.Array:
    """A decaying mean that started from zero, divided by the weight it has seen.

    The weight is broadcast by a step of its own, or XLA makes a product with the
    reciprocal, which rounds otherwise. Optax's steps divide; those of a single array,
    without jit, are such products.
    """
    weight = weight.astype(mean.dtype)
    if single_array() and not isinstance(mean, jax.core.Tracer):
        return mean * (1 / weight)
    return mean / jnp.broadcast_to(weight, mean.shape)


def momentum_series(b1: float, nesterov: bool = False, corrected: bool = True) -> Series:
    """How a first moment ``m`` goes on without gradients, ``b1**j * m`` after j steps."""

    def weight(step: jax.Array) -> jax.Array:
        ahead = b1 if nesterov else 1.0
        if not corrected:
            return jnp.full(step.shape, ahead)
        return ahead / weight_seen(b1, step + 1 if nesterov else step)

    return Series(b1, weight)


def step_moments(b1: float, b2: float, nesterov: bool = False) -> tuple[Series, ...]:
    """Sums over the missed steps of Adam, of ``w/q``, ``w``, ``w*q`` and ``w*q**2``.

    ``w`` is how far a step goes, and ``q`` how far the root of the corrected second moment
    has shrunk: a step moves by ``w * m / (sqrt(v) * q + eps)``.
    """
    first = momentum_series(b1, nesterov)

    def power(of: int) -> Series:
        def weight(step: jax.Array) -> jax.Array:
            return first.weight(step) * weight_seen(b2, step) ** (-of / 2)

        return Series(b1 * b2 ** (of / 2), weight)

    return tuple(power(of) for of in (-1, 0, 1, 2))


def two_steps(sums: Sequence[jax.Array]) -> tuple[tuple[jax.Array, jax.Array], ...]:
    """Two pairs ``(w/q, q)`` that stand for all the missed steps, given their moments.

    This is Gauss' quadrature with two nodes: exact for every cubic in ``q``, and so for a
    step whose ``eps`` is nothing, or everything, against the root.
    """
    total = jnp.where(sums[0] != 0, sums[0], 1.0)
    mean, square, cube = (x / total for x in sums[1:])
    variance = jnp.maximum(square - mean**2, 0.0)
    third = cube - 3 * mean * square + 2 * mean**3
    skew = jnp.where(variance > 0, third / jnp.where(variance > 0, 2 * variance, 1), 0.0)
    apart = jnp.sqrt(skew**2 + variance)
    upper = jnp.where(apart > 0, (apart - skew) / jnp.where(apart > 0, 2 * apart, 1), 0.5)
    low, high = jnp.maximum(mean + skew - apart, 0.0), mean + skew + apart
    # Learning rates of both signs have no mean; the root is then taken as it was.
    usual = (mean > 0) & (square > 0)
    low, high = jnp.where(usual, low, 1.0), jnp.where(usual, high, 1.0)
    return ((1 - upper) * sums[0], low), (upper * sums[0], high)
