"""The protocol of an optimizer, and what all of them share."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

#: A hyperparameter: a number, or an array ``[]``.
Scalar = float | jax.Array
#: The step size as a function of the step, which counts from 0.
Schedule = Callable[[jax.Array], Scalar]


class GradientTransformation(NamedTuple):
    """A pair of pure functions, in Optax's protocol.

    Attributes:
      init: ``init(params) -> state``.
      update: ``update(grads, state, params=None) -> (updates, state)``. ``grads`` mirrors
        ``params``, with an IndexedSlices where the gradient is sparse, None where there
        is none; so do the updates, which :func:`jslices.apply_updates` (or
        ``optax.apply_updates``) adds.

    Example:
      >>> import jslices as js
      >>> js.sgd(0.1)._fields
      ('init', 'update')
    """

    init: Callable[[Any], Any]
    update: Callable[..., tuple[Any, Any]]


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


def check_learning_rate(name: str, learning_rate: Any) -> None:
    """Refuses what is neither a number nor a function of the step."""
    number = isinstance(learning_rate, int | float | np.generic | np.ndarray | jax.Array)
    if callable(learning_rate) or (number and np.ndim(learning_rate) == 0):
        return
    raise TypeError(
        f"{name}(learning_rate=...) wants a number or a schedule (a function of the "
        f"step), got {learning_rate!r}"
    )
