"""What an optimizer is: state arrays, and the arithmetic of a step on arrays or on rows."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jslices._place.boundary import filled_like
from jslices.optim._engine.arithmetic import Step
from jslices.optim._exact.missed import MissedSteps

#: ``kernel(gradient, *read, *state) -> (update, *new_state)``, the same for an array and
#: for some rows of it: everything in it must be elementwise or within a row.
Kernel = Callable[..., tuple[jax.Array, ...]]


@dataclasses.dataclass(frozen=True, eq=False)
class Rule:
    """The arithmetic of an optimizer, the same for an array and for some rows of it.

    Attributes:
      state: the names of its state arrays, and from a parameter ``[V, *D]`` what each
        starts as: ``[V, ...]``.
      update: from a step to its arithmetic, ``kernel(g, *state) -> (update, *new_state)``,
        or ``kernel(g, p, *state)``. Everything in it must be elementwise or within a row.
      update_rows: the same for rows, where these are treated otherwise than whole arrays.
      update_slices: for rows that share state (means over columns, say), the whole step
        from IndexedSlices, ``(grad, p, *state) -> (update, *state)``.
      sums_first: whether, for a parameter, ``update_slices`` wants no row named twice.
      reads_params: whether the kernel gets the rows of the parameter as well.
      linear: whether the update of a sum of gradients is the sum of their updates.
      missed: for an optimizer that catches rows up, what missed steps do to them.
    """

    state: Mapping[str, Callable[[jax.Array], jax.Array]]
    update: Callable[[Step], Kernel]
    update_rows: Callable[[Step], Kernel] | None = None
    update_slices: Callable[[Step], Kernel] | None = None
    sums_first: Callable[[Any], bool] | None = None
    reads_params: bool = False
    linear: bool = False
    missed: MissedSteps | None = None


def zeros(dtype: DTypeLike | None = None) -> Callable[[jax.Array], jax.Array]:
    """A state array of zeros, as the parameter; ``dtype=None`` means its dtype."""
    return lambda p: filled_like(p, 0, dtype)


def full(value: Any) -> Callable[[jax.Array], jax.Array]:
    """A state array that starts from ``value``, as the parameter."""
    return lambda p: filled_like(p, value)


def row_of(value: Any) -> Callable[[jax.Array], jax.Array]:
    """A state array of one number for each row, ``[V]``."""
    return lambda p: row_like(p, value)


def row_like(p: Any, value: Any, dtype: DTypeLike | None = None) -> jax.Array:
    """``[V]`` of ``value`` for rows of ``p`` ``[V, *D]``, on the devices where they are.

    One number for a scalar.
    """
    return filled_like(p, value, dtype, range(min(jnp.ndim(p), 1)))


def is_exact(name: str, untouched: str) -> bool:
    """Whether rows without gradient are caught up later; refuses what is neither."""
    if untouched not in ("lazy", "exact"):
        raise ValueError(
            f'{name}(untouched={untouched!r}): wanted "lazy" (rows without gradient wait) '
            'or "exact" (they are caught up later, as a dense optimizer moves them)'
        )
    return untouched == "exact"


def check_lazy(name: str, untouched: str, why: str) -> None:
    """Refuses ``"exact"`` for an optimizer that has no such form."""
    if is_exact(name, untouched):
        raise ValueError(
            f'{name}(untouched="exact"): there is no exact form, {why}; leave '
            'untouched="lazy", and rows without gradient wait where they are'
        )


def check_fading(name: str, **decays: Any) -> None:
    """Refuses decays that missed steps have no closed form for."""
    for key, value in decays.items():
        if isinstance(value, jax.core.Tracer):
            raise TypeError(
                f'{name}(untouched="exact") needs {key} as a number that is known while '
                f"tracing, got {value}; make the optimizer outside of jit, and with "
                f"optax.inject_hyperparams pass static_args=({key!r},)"
            )
        if value is not None and not 0 <= float(value) < 1:
            raise ValueError(
                f'{name}(untouched="exact") needs {key} at least 0 and below 1, got {value}'
            )
