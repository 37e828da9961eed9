"""Decoupled weight decay of rows: which rows decay, and when."""

import math
from typing import Any

import jax

from jslices.optim._engine.arithmetic import Scalar, Schedule, value_at

#: As FBGEMM's users say: ``DECOUPLE`` and ``DECOUPLE_GLOBAL``.
MODES = ("touched", "all")


def decaying_all(name: str, mode: str | None, exact: bool) -> bool:
    """Whether rows decay in the steps that they miss; by default those of ``exact`` do."""
    if mode is None:
        return exact
    if mode not in MODES:
        raise ValueError(
            f'{name}(weight_decay_mode={mode!r}): wanted "touched" (a row decays in the '
            'steps that touch it) or "all" (every row decays in every step, as it does in '
            "a dense optimizer, once it catches up)"
        )
    return mode == "all"


def check_decay(name: str, rate: Any, weight_decay: Any) -> None:
    """Refuses a decay of missed steps that would take all of a row, or more."""
    numbers = [x for x in (rate, weight_decay) if isinstance(x, int | float)]
    if len(numbers) == 2 and math.prod(numbers) >= 1:
        raise ValueError(
            f"{name}: learning_rate * weight_decay is {math.prod(numbers):g}, and for rows "
            "that catch up it must be below 1, so that a step leaves something of a row"
        )


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
