"""What the arithmetic of all optimizers shares: hyperparameters, counts, rows."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jslices._rows.select import per_row as per_row

#: A hyperparameter: a number, or an array ``[]``.
Scalar = float | jax.Array
#: The step size as a function of the step, which counts from 0.
Schedule = Callable[[jax.Array], Scalar]


def step_size(learning_rate: Scalar | Schedule, count: jax.Array) -> Any:
    """The factor on the update of step ``count``: minus the learning rate.

    A constant stays a Python number, as in Optax, so that it takes on the dtype of the
    array it multiplies; what a schedule returns is cast to it by :func:`scaled`.
    """
    if callable(learning_rate):
        return jnp.asarray(-1 * learning_rate(count))
    return -1 * learning_rate


def scaled(step: Any, update: jax.Array) -> jax.Array:
    """``step * update`` in the dtype of ``update``."""
    if isinstance(step, jax.Array):
        step = step.astype(update.dtype)
    return step * update


def next_count(count: jax.Array) -> jax.Array:
    """``count + 1``; it stays at the largest integer instead of turning negative."""
    largest = jnp.iinfo(count.dtype).max
    return jnp.where(count < largest, count + 1, largest)


def zero_count() -> jax.Array:
    """The number of steps taken so far: int32, ``[]``."""
    return jnp.zeros([], jnp.int32)


def value_at(value: Scalar | Schedule, count: jax.Array) -> Any:
    """A hyperparameter at step ``count``: a number, or what its schedule returns."""
    return value(count) if callable(value) else value


def row_mean(x: jax.Array) -> jax.Array:
    """``[n]``, the mean of each row of ``[n, *D]``."""
    return jnp.mean(x, axis=tuple(range(1, x.ndim))) if x.ndim > 1 else x


def check_learning_rate(name: str, learning_rate: Any) -> None:
    """Refuses what is neither a number nor a function of the step."""
    number = isinstance(learning_rate, int | float | np.generic | np.ndarray | jax.Array)
    if callable(learning_rate) or (number and np.ndim(learning_rate) == 0):
        return
    raise TypeError(
        f"{name}(learning_rate=...) wants a number or a schedule (a function of the "
        f"step), got {learning_rate!r}"
    )
