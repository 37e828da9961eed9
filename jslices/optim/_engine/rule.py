"""What an optimizer is: state for each element or row, and the arithmetic of a step."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jslices.optim._engine.in_place import Kernel
from jslices.optim._exact.drift import Drift


@dataclasses.dataclass(frozen=True, eq=False)
class Rule:
    """The arithmetic of an optimizer, the same for an array and for some rows of it.

    Attributes:
      slots: the names of its state arrays, and from a parameter ``[V, *D]`` what each
        starts as: ``[V, ...]``.
      step: from the number of steps taken before (int32, ``[]``) to the arithmetic of this
        one, ``kernel(g, *slots) -> (update, *new_slots)``, or ``kernel(g, p, *slots)``.
        Everything in it must be elementwise or within a row.
      row_step: the same for rows, where a step must treat them otherwise than whole arrays.
      reads_params: whether the kernel gets the rows of the parameter as well.
      drift: for an optimizer that catches rows up, the numbers it needs of missed steps.
      coast: ``coast(missed, p, *slots) -> (p, *slots)``, what missed steps did to rows.
      linear: whether the update of a sum of gradients is the sum of their updates.
      still: whether a row whose gradient is zero keeps all it has.
      quarters: whether few rows are stepped in four quarters; for a kernel that would else
        hold six arrays of the gradient's size or more.
      held: how many arrays ``[V, *D]`` a step of all rows needs besides those it is given:
        more than the sums where XLA cannot write the new state, or the update, over the
        old. Arrays ``[V]`` are a fraction of one.
    """

    slots: Mapping[str, Callable[[jax.Array], jax.Array]]
    step: Callable[[jax.Array], Kernel]
    reads_params: bool = False
    drift: Drift | None = None
    coast: Callable[..., tuple[jax.Array, ...]] | None = None
    row_step: Callable[[jax.Array], Kernel] | None = None
    linear: bool = False
    still: bool = False
    quarters: bool = False
    held: float = 1


def zeros(dtype: DTypeLike | None = None) -> Callable[[jax.Array], jax.Array]:
    """A slot of zeros, as the parameter; ``dtype=None`` means its dtype."""
    return lambda p: jnp.zeros_like(p, dtype=dtype)


def full(value: Any) -> Callable[[jax.Array], jax.Array]:
    """A slot that starts from ``value``, as the parameter."""
    return lambda p: jnp.full_like(p, value)


def row_of(value: Any) -> Callable[[jax.Array], jax.Array]:
    """A slot of one number for each row, ``[V]``."""
    return lambda p: jnp.full_like(row_like(p, jnp.asarray(p).dtype), value)


def row_like(p: Any, dtype: DTypeLike) -> jax.Array:
    """``[V]`` zeros for the rows of ``p`` ``[V, *D]``, on the devices where these are."""
    p = jnp.asarray(p)
    if p.size == 0:
        return jnp.zeros(p.shape[:1], dtype)
    return jnp.zeros_like(p[(slice(None), *(0,) * (p.ndim - 1))[: p.ndim]], dtype=dtype)


def check_untouched(name: str, untouched: str) -> bool:
    """Whether rows without gradient are caught up later."""
    if untouched not in ("lazy", "exact"):
        raise ValueError(
            f'{name}(untouched={untouched!r}): wanted "lazy" (rows without gradient wait) '
            'or "exact" (they are caught up later, as a dense optimizer moves them)'
        )
    return untouched == "exact"


def check_lazy(name: str, untouched: str, why: str) -> None:
    """Refuses ``"exact"`` for an optimizer that has no such form."""
    if check_untouched(name, untouched):
        raise ValueError(
            f'{name}(untouched="exact"): there is no exact form, {why}; leave '
            'untouched="lazy", and rows without gradient wait where they are'
        )


def check_fading(name: str, **decays: Any) -> None:
    """Refuses decays that missed steps have no closed form for."""
    known(name, **decays)
    for key, value in decays.items():
        if value is not None and not 0 <= float(value) < 1:
            raise ValueError(
                f'{name}(untouched="exact") needs {key} at least 0 and below 1, got {value}'
            )


def known(name: str, **numbers: Any) -> None:
    """Refuses hyperparameters that are not known while tracing."""
    for key, value in numbers.items():
        if isinstance(value, jax.core.Tracer):
            raise TypeError(
                f'{name}(untouched="exact") needs {key} as a number that is known while '
                f"tracing, got {value}; make the optimizer outside of jit, and with "
                f"optax.inject_hyperparams pass static_args=({key!r},)"
            )
