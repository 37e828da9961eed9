"""Rules: state arrays and the arithmetic of a step."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jslices._place.boundary import filled_like
from jslices._rows.access import per_row as per_row
from jslices._typing import Change, Record
from jslices._typing import Scalar as Scalar
from jslices._typing import Schedule as Schedule
from jslices.optim.engine.missed import MissedSteps
from jslices.optim.engine.numbers import next_count as next_count
from jslices.optim.engine.numbers import value_at as value_at
from jslices.optim.engine.numbers import weight_seen

# --- A step -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """One step of an optimizer: its number, and numbers that all arrays share.

    They share it to be rounded as Optax rounds them: XLA divides by a number that many
    arrays share, multiplies by the reciprocal of one that is used once, and Optax computes
    a bias correction once for all arrays.
    """

    #: int32 ``[]``, the steps taken before; or those of each row, ``[n, 1, ...]``.
    count: jax.Array
    _weights: list[tuple[Any, bool, jax.Array]] = dataclasses.field(default_factory=list)

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
            return jnp.asarray(-1 * value_at(learning_rate, self.count))
        return -1 * learning_rate

    def correction(
        self, decay: Scalar, ahead: bool = False, root: bool = False
    ) -> Callable[[jax.Array], jax.Array]:
        """Divides a decaying mean that started from zero by the weight it has seen.

        To be called outside of the kernel. ``ahead``: by the weight seen in the next step.
        ``root``: by the root of it, for the root of such a mean.

        The weight is broadcast by a step of its own, or XLA makes a product with the
        reciprocal, which rounds otherwise than Optax's division.
        """
        same = (w for of, later, w in self._weights if of is decay and later == ahead)
        if (whole := next(same, None)) is None:
            number = next_count(self.number) if ahead else self.number
            whole = _weight_seen(decay, number)
            self._weights.append((decay, ahead, whole))

        def corrected(mean: jax.Array) -> jax.Array:
            weight = (jnp.sqrt(whole) if root else whole).astype(mean.dtype)
            return mean / jnp.broadcast_to(weight, mean.shape)

        return corrected


# A jit of its own, because the power rounds differently outside one, and 1 - 0.999 has only
# four digits of it left.
_weight_seen = jax.jit(weight_seen, inline=True)


def squared(x: jax.Array) -> jax.Array:
    """The square of the size of each element, in its dtype; of a complex one it is real."""
    return x * x.conj() if jnp.iscomplexobj(x) else x**2


def check_real(name: str, x: jax.Array) -> None:
    """Refuse complex numbers, which an optimizer that orders numbers does not step."""
    if jnp.iscomplexobj(x):
        raise TypeError(
            f"{name} orders numbers, and cannot step {x.dtype} parameters; jslices.adam "
            "and jslices.adagrad can"
        )


def decayed(mean: jax.Array, new: jax.Array, decay: Scalar) -> jax.Array:
    """``decay * mean + (1 - decay) * new``."""
    return (1 - decay) * new + decay * mean


def in_dtypes_of(state: Record, new: Record) -> Record:
    """What is new of the state, in the dtypes of the old."""
    return {name: x.astype(state[name].dtype) for name, x in new.items()}


def scaled(size: Any, update: jax.Array) -> jax.Array:
    """``size * update`` in the dtype of ``update``."""
    if isinstance(size, jax.Array):
        size = size.astype(update.dtype)
    return size * update


def row_mean(x: jax.Array) -> jax.Array:
    """``[n]``, the mean of each row of ``[n, D]``; of more axes, along the last."""
    return jnp.mean(x, axis=-1) if x.ndim > 1 else x


def decays(weight_decay: Scalar | Schedule) -> bool:
    """Whether there is weight decay: False for a constant zero."""
    return not isinstance(weight_decay, int | float) or weight_decay != 0


def with_decay(
    direction: jax.Array, p: jax.Array, weight_decay: Scalar | Schedule, count: jax.Array
) -> jax.Array:
    """``direction + weight_decay * p``, before the learning rate."""
    if not decays(weight_decay):
        return direction
    rate: Any = value_at(weight_decay, count)
    return direction + rate * p


# --- A rule -----------------------------------------------------------------------------

#: ``kernel(gradient, p, state) -> (update, new_state)``, the same for an array and for some
#: rows of it: everything in it must be elementwise or within a row. What it does not return
#: of the state stays. ``p`` is None if the rule does not read it and there is none.
Kernel: TypeAlias = Callable[..., Change]


@dataclasses.dataclass(frozen=True, eq=False)
class Rule:
    """The arithmetic of an optimizer, the same for an array and for some rows of it."""

    #: The names of its state arrays, and from a parameter ``[V, *D]`` what each starts as:
    #: ``[V, ...]``.
    state: Mapping[str, Callable[[jax.Array], jax.Array]]
    update: Callable[[Step], Kernel]  #: from a step to its arithmetic.
    #: Overrides ``update`` for rows.
    update_rows: Callable[[Step], Kernel] | None = None
    #: For rows that share state (means over columns, say), the whole step from
    #: IndexedSlices, ``(grad, p, state) -> (update, new_state)``.
    update_slices: Callable[[Step], Kernel] | None = None
    #: Whether, for a parameter, ``update_slices`` wants no row named twice.
    sums_first: Callable[[Any], bool] | None = None
    reads_params: bool = False  #: whether the kernel needs the parameter.
    linear: bool = False  #: whether the update of a sum is the sum of the updates.
    missed: MissedSteps | None = None  #: what missed steps do to rows that catch up.


def zeros(dtype: DTypeLike | None = None) -> Callable[[jax.Array], jax.Array]:
    """A state array of zeros, as the parameter; ``dtype=None`` means its dtype."""
    return lambda p: filled_like(p, 0, dtype)


def full(value: Any) -> Callable[[jax.Array], jax.Array]:
    """A state array that starts from ``value``, as the parameter."""
    return lambda p: filled_like(p, value)


def row_of(value: Any, dtype: DTypeLike | None = None) -> Callable[[jax.Array], jax.Array]:
    """A state array of one number for each row: :func:`row_like`."""
    return lambda p: row_like(p, value, dtype)


def row_like(p: jax.Array, value: Any, dtype: DTypeLike | None = None) -> jax.Array:
    """``[V]`` of ``value`` for rows of ``p`` ``[V, D]``, on the devices where they are.

    ``[L, V]`` for ``[L, V, D]``: one number for each vector along the last axis, whichever
    of the other axes number rows. One for each number of a vector, and for a scalar.
    """
    axes = jnp.ndim(p)
    return filled_like(p, value, dtype, range(axes - 1 if axes > 1 else axes))


def check_lazy(name: str, untouched: str, why: str) -> None:
    """Refuses ``"exact"`` for an optimizer that has no such form."""
    if untouched == "exact":
        raise ValueError(
            f'{name}(untouched="exact"): there is no exact form, {why}; leave '
            'untouched="lazy", and rows without gradient wait where they are'
        )


def check_known(name: str, **numbers: Any) -> None:
    """Refuses numbers of an exact optimizer that are not known while tracing."""
    if traced := tuple(k for k, x in numbers.items() if isinstance(x, jax.core.Tracer)):
        raise TypeError(
            f'{name}(untouched="exact") needs {" and ".join(traced)} as known numbers, and '
            "they are traced; make the optimizer outside of jit, and with "
            f"optax.inject_hyperparams pass static_args={traced}"
        )


def check_fading(name: str, **decays: Any) -> None:
    """Refuses decays that missed steps have no closed form for."""
    check_known(name, **decays)
    for key, value in decays.items():
        if value is not None and not 0 <= float(value) < 1:
            raise ValueError(
                f'{name}(untouched="exact") needs {key} at least 0 and below 1, got {value}'
            )
