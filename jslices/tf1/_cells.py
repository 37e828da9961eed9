"""Where a handle reads and writes: a variable of a run, or a copy that JAX made."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jslices import FailedPreconditionError
from jslices.tf1._arrays import canonical_dtype, is_array
from jslices.tf1._run import Entry, Frame, Mode, initial_value, is_running
from jslices.tf1._state import Initial, VariableInfo, is_initialized

DEFAULT_COLLECTIONS = ("variables",)
TRAINABLE = "trainable_variables"


class LiveCell:
    """A variable of a run: readable and writable while that run lasts."""

    def __init__(self, frame: Frame, entry: Entry) -> None:
        self._frame, self.entry = frame, entry
        self.name = entry.info.name
        self.shape, self.dtype = entry.shape, entry.dtype

    @property
    def computes(self) -> bool:
        """False in ``init``, which only finds out which variables there are."""
        return self._frame.mode is Mode.APPLY

    def _check_running(self) -> None:
        if not is_running(self._frame):
            raise RuntimeError(
                f"the Variable {self.name}:0 was used outside of the "
                f"{self._frame.mode.value} that made it: a handle leaked out of the "
                "transformed function, or into another thread. Return what is needed from "
                f"the function, or read variables['{self.name}'] from what apply returns"
            )

    def read(self) -> Any:
        self._check_running()
        if not is_initialized(self.entry.value):
            raise FailedPreconditionError(
                f"Attempting to use uninitialized value {self.name}; these variables are "
                "only declared: make them with model.init(key, *args)"
            )
        return self.entry.value

    def read_or_initial(self) -> Any:
        if is_initialized(self.entry.value):
            return self.read()
        self._check_running()
        return initial_value(self.entry.make_initial, self._frame.key, self.name)

    def write(self, value: jax.Array, what: str) -> None:
        self._check_running()
        if not self._frame.in_own_trace():
            raise RuntimeError(
                f"{what} inside of a scan, cond, while_loop, vmap, jit, grad or checkpoint "
                "that began within the transformed function: the value would leak out of "
                "it. Return the new value from the inner function, and assign it outside"
            )
        self.entry.value = value


class CopyCell:
    """The value that a JAX transformation put in the place of a handle."""

    computes = True

    def __init__(self, name: str, value: Any) -> None:
        self.name, self._value = name, value

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(np.shape(self._value))

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self._value.dtype)

    def read(self) -> Any:
        return self._value

    read_or_initial = read

    def write(self, value: jax.Array, what: str) -> None:
        del value
        raise RuntimeError(
            f"{what} on a copy: the handle went through jit, vmap, grad or another "
            "transformation as an argument. Return the new value from the inner function, "
            "and assign it outside"
        )


# --- creating a variable ----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Request:
    """A variable to create.

    Attributes:
      make: makes its initial value from a key.
      shape, dtype: None where only ``make`` can tell.
      initial: makes the initial value again outside of the run; None if nothing can.
    """

    name: str
    make: Callable[[Any], jax.Array]
    shape: tuple[int, ...] | None = None
    dtype: np.dtype | None = None
    trainable: bool = True
    collections: Any = None
    initial: Initial | None = None
    regularizer: Callable[[jax.Array], Any] | None = None


def create(frame: Frame, request: Request) -> LiveCell:
    """A new variable of ``frame``: made in ``init``, looked up in ``apply``.

    Nothing is added to the frame if this raises.

    Raises:
      TypeError, ValueError: for collections, a shape or a dtype that are not right.
      RuntimeError: within an inner ``scan``, ``jit``, ... of the transformed function.
    """
    if not frame.in_own_trace():
        raise RuntimeError(
            f"the Variable {request.name} would be created inside of a scan, cond, vmap, "
            "jit, grad or checkpoint that began within the transformed function; create it "
            "before that, and use it inside"
        )
    if request.name in frame.entries:
        raise ValueError(
            f"there is a Variable {request.name} already; without a slash at its end the "
            "name would be made unique"
        )
    collections = _collections(request)
    make = _made if frame.mode is Mode.INIT else _given
    value = make(frame, request)
    if is_array(value):
        shape, dtype = tuple(value.shape), np.dtype(value.dtype)
    else:  # None was given for it: all that is known is what the function asked for
        shape, dtype = request.shape or (), request.dtype or np.dtype(np.float32)
    info = VariableInfo(
        request.name,
        bool(request.trainable),
        collections,
        position=len(frame.entries),
        initial=request.initial,
    )
    declared = request.dtype or dtype
    entry = Entry(info, value, shape, dtype, declared, request.make, request.regularizer)
    return LiveCell(frame, entry)


def _collections(request: Request) -> tuple[str, ...]:
    keys = DEFAULT_COLLECTIONS if request.collections is None else request.collections
    if not isinstance(keys, list | tuple | set | frozenset):
        raise ValueError(
            f"collections of {request.name} must be a list, tuple or set of keys, got "
            f"{keys!r}"
        )
    keys = tuple(sorted(keys)) if isinstance(keys, set | frozenset) else tuple(keys)
    return (*keys, TRAINABLE) if request.trainable and TRAINABLE not in keys else keys


def _made(frame: Frame, request: Request) -> jax.Array:
    value = _strong(initial_value(request.make, frame.key, request.name))
    if request.shape is not None and tuple(value.shape) != request.shape:
        raise ValueError(
            f"the initializer of {request.name} gave shape {tuple(value.shape)}, wanted "
            f"{request.shape}"
        )
    if request.dtype is not None and canonical_dtype(value.dtype) != request.dtype:
        raise ValueError(
            f"the initializer of {request.name} gave {value.dtype}, wanted {request.dtype}"
        )
    return value


def _strong(value: Any) -> jax.Array:
    """An array that is not weakly typed: a weak dtype would change with use."""
    dtype = value.dtype if is_array(value) else np.asarray(value).dtype
    return jnp.asarray(value, canonical_dtype(dtype))


def _given(frame: Frame, request: Request) -> Any:
    if request.name not in frame.given:
        raise ValueError(
            f"Variable {request.name} is not among those given to apply, which are "
            f"{', '.join(frame.given) or 'none'}; run init with the same function and "
            "the same flags"
        )
    value = frame.given[request.name]
    if is_initialized(value):
        value = _strong(value)
    elif value is None:
        return None
    if request.shape is not None and tuple(value.shape) != request.shape:
        raise ValueError(
            f"Variable {request.name} has shape {request.shape}, apply got one of shape "
            f"{tuple(value.shape)}"
        )
    # Another float dtype is a choice of precision; a float for an int is a mistake.
    kinds = (jnp.integer, jnp.inexact, jnp.bool_)
    if request.dtype is not None and not any(
        jnp.issubdtype(value.dtype, kind) and jnp.issubdtype(request.dtype, kind)
        for kind in kinds
    ):
        raise ValueError(
            f"Variable {request.name} has dtype {request.dtype}, apply got one of "
            f"{value.dtype}"
        )
    return value
