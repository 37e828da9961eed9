"""Numbers of steps: their count, and hyperparameters as functions of it."""

from typing import Any

import jax
import jax.numpy as jnp

from jslices._arguments import is_number, shown
from jslices._jax import is_staged
from jslices._typing import Scalar, Schedule


def next_count(count: jax.Array) -> jax.Array:
    """``count + 1``; it stays at the largest integer instead of turning negative."""
    largest = jnp.iinfo(count.dtype).max
    return jnp.where(count < largest, count + 1, largest)


def zero_count() -> jax.Array:
    """The number of steps taken so far: int32, ``[]``."""
    axes = jax.sharding.get_abstract_mesh().axis_types
    explicit = is_staged() and jax.sharding.AxisType.Explicit in axes
    # Else it is on no mesh, and would leave a step on the one that is used inside.
    return jnp.zeros([], jnp.int32, out_sharding=jax.P() if explicit else None)


def value_at(value: Scalar | Schedule, count: jax.Array) -> Any:
    """A hyperparameter at step ``count``: a number, or what its schedule returns."""
    if not callable(value):
        return value
    number = value(count)
    if not is_number(number):
        raise TypeError(
            f"the schedule {shown(value)} returned {shown(number)}: wanted one number, [], "
            "for each step"
        )
    return number


def weight_seen(decay: Scalar, steps: Any) -> Any:
    """The sum of the weights of so many terms of a decaying mean."""
    return 1 - decay**steps
