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


class _InitUpdate(NamedTuple):
    init: Callable[[Any], Any]
    update: Callable[..., tuple[Any, Any]]


class GradientTransformation(_InitUpdate):
    """A pair of pure functions, in Optax's protocol, and two more for exact optimizers.

    It is a pair, so ``init, update = tx`` holds and Optax's combinators take it.

    Attributes:
      init: ``init(params) -> state``.
      update: ``update(grads, state, params=None) -> (updates, state)``. ``grads`` mirrors
        ``params``, with an IndexedSlices where the gradient is sparse, None where there
        is none; so do the updates, which :func:`jslices.apply_updates` (or, without None,
        ``optax.apply_updates``) adds.
      catch_up: ``catch_up(params, state, ids) -> (params, state)``. With
        ``untouched="exact"``, brings the rows that are about to be read up to date. ``ids``
        mirrors ``params``: integers of any shape for a table, out-of-range ones being
        dropped; None for what needs nothing, True for all rows of it. Other optimizers
        return what they got.
      flush: ``flush(params, state) -> (params, state)``. The same for every row, before
        parameters are saved or evaluated.
      catches_up: whether rows have to catch up.

    Example:
      >>> import jslices as js
      >>> init, update = js.sgd(0.1)
      >>> js.adam(0.1, untouched="exact").flush is not None
      True
    """

    catch_up: Callable[[Any, Any, Any], tuple[Any, Any]]
    flush: Callable[[Any, Any], tuple[Any, Any]]
    catches_up: bool

    def __new__(
        cls,
        init: Callable[[Any], Any],
        update: Callable[..., tuple[Any, Any]],
        catch_up: Callable[[Any, Any, Any], tuple[Any, Any]] | None = None,
        flush: Callable[[Any, Any], tuple[Any, Any]] | None = None,
    ) -> "GradientTransformation":
        new = super().__new__(cls, init, update)
        new.catches_up = catch_up is not None
        new.catch_up = catch_up or (lambda params, state, ids: (params, state))
        new.flush = flush or (lambda params, state: (params, state))
        return new


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


def per_row(numbers: jax.Array, like: jax.Array) -> jax.Array:
    """``[n]`` as ``[n, 1, ...]``, one number for each row of ``like`` ``[n, *D]``."""
    return numbers.reshape(numbers.shape + (1,) * (jnp.ndim(like) - numbers.ndim))


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
