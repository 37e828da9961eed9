"""Creating a variable in a run: made by ``init``, found among those given to ``apply``."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jslices.tf1._cells import LiveCell
from jslices.tf1._keys import initial_value
from jslices.tf1._values import canonical_dtype, is_array
from jslices.tf1.frame import Entry, Frame, Mode
from jslices.tf1.state import Initial, VariableInfo, is_initialized

DEFAULT_COLLECTIONS = ("variables",)


@dataclasses.dataclass(frozen=True)
class Wish:
    """What a call asks for; ``shape`` and ``dtype`` are None where only running tells."""

    name: str
    make: Callable[[Any], jax.Array]
    shape: tuple[int, ...] | None = None
    dtype: np.dtype | None = None
    trainable: bool = True
    collections: Any = None
    initial: Initial | None = None
    regularizer: Callable[[jax.Array], Any] | None = None


def create(frame: Frame, wish: Wish) -> LiveCell:
    """The new variable of ``frame``; nothing is added to it if this raises.

    Raises:
      TypeError, ValueError: for collections, a shape or a dtype that are not right.
      RuntimeError: within an inner ``scan``, ``jit``, ... of the transformed function.
    """
    if not frame.in_own_trace():
        raise RuntimeError(
            f"the Variable {wish.name} would be created inside of a scan, cond, vmap, jit, "
            "grad or checkpoint that began within the transformed function; create it "
            "before that, and use it inside"
        )
    collections = _collections(wish)
    value = _made(frame, wish) if frame.mode is Mode.INIT else _given(frame, wish)
    if is_array(value):
        shape, dtype = tuple(value.shape), np.dtype(value.dtype)
    else:  # a None among the variables given: nothing is known but what is wished for
        shape, dtype = wish.shape or (), wish.dtype or np.dtype(np.float32)
    info = VariableInfo(
        wish.name, bool(wish.trainable), collections, len(frame.entries), wish.initial
    )
    entry = Entry(
        info, value, shape, dtype, wish.dtype or dtype, wish.make, wish.regularizer
    )
    return LiveCell(frame, entry)


def _collections(wish: Wish) -> tuple[str, ...]:
    keys = DEFAULT_COLLECTIONS if wish.collections is None else wish.collections
    if not isinstance(keys, list | tuple | set | frozenset):
        raise ValueError(
            f"collections of {wish.name} must be a list, tuple or set of keys, got {keys!r}"
        )
    keys = tuple(sorted(keys)) if isinstance(keys, set | frozenset) else tuple(keys)
    if wish.trainable and "trainable_variables" not in keys:
        keys = (*keys, "trainable_variables")
    return keys


def _made(frame: Frame, wish: Wish) -> jax.Array:
    value = _strong(initial_value(wish.make, frame.key, wish.name))
    if wish.shape is not None and tuple(value.shape) != wish.shape:
        raise ValueError(
            f"the initializer of {wish.name} gave shape {tuple(value.shape)}, wanted "
            f"{wish.shape}"
        )
    if wish.dtype is not None and canonical_dtype(value.dtype) != wish.dtype:
        raise ValueError(
            f"the initializer of {wish.name} gave {value.dtype}, wanted {wish.dtype}"
        )
    return value


def _strong(value: Any) -> jax.Array:
    """An array whose dtype is its own: a weak one would become another with use."""
    dtype = value.dtype if is_array(value) else np.asarray(value).dtype
    return jnp.asarray(value, canonical_dtype(dtype))


def _given(frame: Frame, wish: Wish) -> Any:
    if wish.name not in frame.given:
        raise ValueError(
            f"Variable {wish.name} is not among those given to apply, which are "
            f"{', '.join(frame.given) or 'none'}; run init with the same function and "
            "the same flags"
        )
    value = frame.given[wish.name]
    if is_initialized(value):
        value = _strong(value)
    elif value is None:
        return None
    if wish.shape is not None and tuple(value.shape) != wish.shape:
        raise ValueError(
            f"Variable {wish.name} has shape {wish.shape}, apply got one of shape "
            f"{tuple(value.shape)}"
        )
    # Another float dtype is a choice of precision; a float for an int is a mistake.
    kinds = (jnp.integer, jnp.inexact, jnp.bool_)
    if wish.dtype is not None and not any(
        jnp.issubdtype(value.dtype, kind) and jnp.issubdtype(wish.dtype, kind)
        for kind in kinds
    ):
        raise ValueError(
            f"Variable {wish.name} has dtype {wish.dtype}, apply got one of {value.dtype}"
        )
    return value
