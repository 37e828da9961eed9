"""Decaying means, which most optimizers are made of."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jslices.optim.base import Scalar
from jslices.optim.drift import Series


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
    """A decaying mean that started from zero, divided by the weight it has seen."""
    return mean / weight.astype(mean.dtype)


def momentum_series(b1: float, nesterov: bool = False, corrected: bool = True) -> Series:
    """How a first moment ``m`` goes on without gradients, ``b1**j * m`` after j steps."""

    def weight(step: jax.Array) -> jax.Array:
        ahead = b1 if nesterov else 1.0
        if not corrected:
            return jnp.full(step.shape, ahead)
        return ahead / weight_seen(b1, step + 1 if nesterov else step)

    return Series(b1, weight)


def ratio_series(b1: float, b2: float, nesterov: bool = False) -> Series:
    """The same of ``m / sqrt(v)``, for the second moment ``b2**j * v``."""
    first = momentum_series(b1, nesterov)

    def weight(step: jax.Array) -> jax.Array:
        return first.weight(step) * jnp.sqrt(weight_seen(b2, step))

    return Series(b1 / b2**0.5, weight)
