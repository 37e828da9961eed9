"""What the arithmetic of all optimizers shares: steps, hyperparameters, means, decay."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jslices._rows.access import per_row as per_row

#: A hyperparameter: a number, or an array ``[]``.
Scalar = float | jax.Array
#: The step size as a function of the step, which counts from 0.
Schedule = Callable[[jax.Array], Scalar]


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """One step of an optimizer: its number, and what all arrays of it share.

    They share it to be rounded as Optax rounds them: XLA divides by a number that many
    arrays share, multiplies by the reciprocal of one that is used once, and Optax computes
    a bias correction once for all arrays.

    Attributes:
      count: int32 ``[]``, the steps taken before.
      single: whether it is a step of a single array.
    """

    count: jax.Array
    single: bool = False
    _weights: dict[Any, tuple[Any, jax.Array]] = dataclasses.field(default_factory=dict)

    @property
    def number(self) -> jax.Array:
        """The number of this step, from 1."""
        return next_count(self.count)

    def size(self, learning_rate: Scalar | Schedule) -> Any:
        """The factor on the update: minus the learning rate.

        A constant stays a Python number, as in Optax, so that it takes on the dtype of the
        array it multiplies; what a schedule returns is cast to it by :func:`scaled`.
        """
        if callable(learning_rate):
            return jnp.asarray(-1 * learning_rate(self.count))
        return -1 * learning_rate

    def correction(
        self, decay: Scalar, ahead: bool = False
    ) -> Callable[[jax.Array], jax.Array]:
        """Divides a decaying mean that started from zero by the weight it has seen.

        To be called outside of the kernel. ``ahead``: by the weight seen in the next step.

        The weight is broadcast by a step of its own, or XLA makes a product with the
        reciprocal, which rounds otherwise. Optax's steps divide; those of a single array,
        without jit, are such products.
        """
        key = (id(decay), ahead)
        if key not in self._weights:
            number = next_count(self.number) if ahead else self.number
            self._weights[key] = decay, weight_seen(decay, number)
        whole = self._weights[key][1]

        def corrected(mean: jax.Array) -> jax.Array:
            weight = whole.astype(mean.dtype)
            if self.single and not isinstance(mean, jax.core.Tracer):
                return mean * (1 / weight)
            return mean / jnp.broadcast_to(weight, mean.shape)

        return corrected


@functools.partial(jax.jit, inline=True)
def weight_seen(decay: Scalar, count: jax.Array) -> jax.Array:
    """What the weights of ``count`` terms of a decaying mean add up to.

    A jit of its own, because the power rounds differently outside one, and 1 - 0.999 has
    only four digits of it left.
    """
    return 1 - decay**count


def decayed(mean: jax.Array, new: jax.Array, decay: Scalar) -> jax.Array:
    """``decay * mean + (1 - decay) * new``."""
    return (1 - decay) * new + decay * mean


def scaled(size: Any, update: jax.Array) -> jax.Array:
    """``size * update`` in the dtype of ``update``."""
    if isinstance(size, jax.Array):
        size = size.astype(update.dtype)
    return size * update


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


#: As FBGEMM's users say: ``DECOUPLE`` and ``DECOUPLE_GLOBAL``.
DECAY_MODES = ("touched", "all")


def decays(weight_decay: Scalar | Schedule) -> bool:
    """Whether there is any: not if it is known to be zero."""
    return not isinstance(weight_decay, int | float) or weight_decay != 0


def with_decay(
    direction: jax.Array, p: jax.Array, weight_decay: Scalar | Schedule, count: jax.Array
) -> jax.Array:
    """``direction + weight_decay * p``, before the learning rate."""
    if not decays(weight_decay):
        return direction
    rate: Any = value_at(weight_decay, count)
    return direction + rate * p


def decays_missed_steps(name: str, mode: str | None, exact: bool) -> bool:
    """Whether rows decay in the steps that they miss; by default those of ``exact`` do."""
    if mode is None:
        return exact
    if mode not in DECAY_MODES:
        raise ValueError(
            f'{name}(weight_decay_mode={mode!r}): wanted "touched" (a row decays in the '
            'steps that touch it) or "all" (every row decays in every step, as it does in '
            "a dense optimizer, once it catches up)"
        )
    return mode == "all"


def check_decay(name: str, learning_rate: Any, weight_decay: Any) -> None:
    """Refuses a decay of missed steps that would take all of a row, or more."""
    numbers = [x for x in (learning_rate, weight_decay) if isinstance(x, int | float)]
    if len(numbers) == 2 and math.prod(numbers) >= 1:
        raise ValueError(
            f"{name}: learning_rate * weight_decay is {math.prod(numbers):g}, and for rows "
            "that catch up it must be below 1, so that a step leaves something of a row"
        )
