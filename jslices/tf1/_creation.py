"""Variables to create: from the arguments of ``Variable`` and ``get_variable``.

Both ask for a :class:`Request`; in ``init`` the value is made, in ``apply`` looked up.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jslices.tf1 import _arrays
from jslices.tf1._arrays import ArrayOperators, TensorLike, canonical_dtype, dtype_of
from jslices.tf1._draws import LazyValue
from jslices.tf1._run import Run, current_run, initial_value
from jslices.tf1._state import Initial, Value, VariableInfo, is_initialized
from jslices.tf1.initializers import glorot_uniform_initializer, zeros_initializer

#: A function ``init(key, shape, dtype)``, or a constant.
InitializerLike: TypeAlias = Any
#: A shape; for a shared variable None is an axis of any length.
PartialShape: TypeAlias = int | Sequence[int | None]
Regularizer: TypeAlias = Callable[[jax.Array], jax.Array | None]

TRAINABLE = "trainable_variables"


@dataclasses.dataclass(frozen=True)
class Request:
    """A variable to create.

    Attributes:
      make: makes its first value from a key.
      shape, dtype: None if only ``make`` determines them.
      repeatable: whether ``make`` also works after the run, holding none of its arrays.
      collections: as the user passed them.
    """

    name: str
    make: Initial
    shape: tuple[int, ...] | None = None
    dtype: np.dtype | None = None
    repeatable: bool = True
    trainable: bool = True
    collections: Any = None
    regularizer: Regularizer | None = None


def is_function(initial_value: object) -> bool:
    """True for functions that make a value; handles are not."""
    return callable(initial_value) and not isinstance(initial_value, ArrayOperators)


# --- Variable(value) --------------------------------------------------------------------


def request_of(name: str, value: TensorLike, dtype: np.dtype | None) -> Request:
    """The variable that ``Variable(value)`` creates."""
    if not is_function(value):
        return _request_of_value(name, value, dtype or dtype_of(value))
    takes_key = any(
        p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        for p in inspect.signature(value).parameters.values()
    )

    def make(key: jax.Array | None) -> jax.Array:
        made, what = value(key) if takes_key else value(), f"the initial value of {name}"
        return _own(_arrays.as_value(made, dtype or dtype_of(made), what))

    return Request(name, make, None, dtype)


def _request_of_value(name: str, value: TensorLike, dtype: np.dtype) -> Request:
    """A variable that begins with this very value.

    It can be made again if it was computed from numbers and draws: an array may be as large
    as a table, and is not remembered.
    """
    if isinstance(value, LazyValue):
        _arrays.check_dtype(value.dtype, dtype, f"the initial value of {name}")
        value.bind(name)  # each draw has a key of its own
        make = lambda key: value.value()  # noqa: E731
        return Request(name, make, value.shape, dtype, value.repeatable)
    array = _arrays.as_value(value, dtype, f"the initial value of {name}")
    recipe = current_run("Variable").recipe_of(value)
    if recipe is not None:
        return Request(name, lambda key: recipe(), tuple(array.shape), dtype)
    if isinstance(value, bool | int | float | complex):
        return Request(name, lambda key: jnp.asarray(value, dtype), (), dtype)
    return Request(name, lambda key: _own(array), tuple(array.shape), dtype, False)


def _own(array: jax.Array) -> jax.Array:
    """A copy: donating the variables must not delete an array that someone still uses."""
    return jnp.array(array, copy=True)


# --- get_variable(name, shape, dtype, initializer) --------------------------------------


def request_of_initializer(
    name: str,
    unique: str,
    shape: PartialShape | None,
    dtype: DTypeLike | None,
    initializer: InitializerLike,
    default_dtype: DTypeLike,
) -> Request:
    """The variable ``unique`` that ``get_variable`` creates for ``name``."""
    if initializer is not None and not is_function(initializer):
        return _request_of_constant(name, unique, shape, dtype, initializer)
    dims = None if shape is None else _static_shape(shape, name)
    result = canonical_dtype(default_dtype if dtype is None else dtype)
    # The names of its parameters decide how TensorFlow calls a function.
    names = None if initializer is None else list(inspect.signature(initializer).parameters)
    if names == []:
        return dataclasses.replace(request_of(unique, initializer, result), shape=dims)
    if dims is None:
        raise ValueError(
            f"Variable {name} did not get an initializer, so its `shape` argument must be "
            "specified."
            if initializer is None
            else f"Shape of a new variable ({name}) must be fully defined, but instead was "
            "<unknown>."
        )
    if initializer is None:
        floating = jnp.issubdtype(result, jnp.inexact)
        initializer = glorot_uniform_initializer if floating else zeros_initializer
    initialize: Any = initializer() if inspect.isclass(initializer) else initializer

    def make(key: jax.Array | None) -> jax.Array:
        args = (dims, result) if names and names[0] == "shape" else (key, dims, result)
        return initialize(*args)  # type: ignore[no-any-return]

    return Request(unique, make, dims, result)


def _request_of_constant(
    name: str,
    unique: str,
    shape: PartialShape | None,
    dtype: DTypeLike | None,
    constant: TensorLike,
) -> Request:
    if shape is not None:
        raise ValueError(
            f"If initializer is a constant, do not specify shape. Variable {name} got both."
        )
    theirs = dtype_of(constant)
    if dtype is not None and canonical_dtype(dtype) != theirs:
        raise ValueError(
            f"Initializer type '{theirs}' and explicit dtype '{canonical_dtype(dtype)}' of "
            f"Variable {name} don't match."
        )
    return _request_of_value(unique, constant, theirs)


def as_axes(shape: PartialShape) -> tuple[int | None, ...]:
    """A shape as a tuple, with None for an axis of any length."""
    return tuple(shape) if isinstance(shape, list | tuple | np.ndarray) else (shape,)  # type: ignore[return-value]


def _static_shape(shape: PartialShape, name: str) -> tuple[int, ...]:
    axes = as_axes(shape)
    if None in axes:
        raise ValueError(
            f"Shape of a new variable ({name}) must be fully defined, but instead was "
            f"{axes}."
        )
    return _arrays.static_shape(shape, name)


# --- creating ---------------------------------------------------------------------------


def create(run: Run, request: Request) -> tuple[VariableInfo, Value]:
    """The properties and first value of a new variable of ``run``, which is unchanged."""
    name = request.name
    if not run.in_own_trace():
        raise RuntimeError(
            f"the Variable {name} would be created inside of a scan, cond, vmap, "
            "jit, grad or checkpoint that began within the transformed function; create it "
            "before that, and use it inside"
        )
    if name in run.variables:
        raise ValueError(
            f"there is a Variable {name} already; without a slash at its end the "
            "name would be made unique"
        )
    if not isinstance(request.trainable, bool | np.bool_):
        raise TypeError(
            f"trainable of {name} must be a bool, got {request.trainable!r}; give "
            "regularizer= and what follows by keyword, as TensorFlow changed their order"
        )
    info = VariableInfo(
        name,
        bool(request.trainable),
        _collections(request),
        position=len(run.variables),
        initial=request.make if request.repeatable else None,
    )
    passed = run.passed
    value = _made(run.key, request) if passed is None else _passed(passed, request)
    return info, value


def _collections(request: Request) -> tuple[str, ...]:
    keys = ("variables",) if request.collections is None else request.collections
    if not isinstance(keys, list | tuple | set | frozenset):
        raise ValueError(
            f"collections of {request.name} must be a list, tuple or set of keys, got "
            f"{keys!r}"
        )
    keys = tuple(sorted(keys)) if isinstance(keys, set | frozenset) else tuple(keys)
    return (*keys, TRAINABLE) if request.trainable and TRAINABLE not in keys else keys


def _made(key: jax.Array | None, request: Request) -> jax.Array:
    """The initial value, of the shape and dtype requested."""
    value = _strong(initial_value(request.make, key, request.name))
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


def _strong(value: jax.Array) -> jax.Array:
    """An array that is not weakly typed: a weak dtype would change with use."""
    return jnp.asarray(value, dtype_of(value))


def _passed(variables: Mapping[str, Value], request: Request) -> Value:
    """The value passed to ``apply``, if it fits the request."""
    name, value = request.name, variables.get(request.name)
    if value is None:
        raise ValueError(
            f"Variable {name} is not among those given to apply, which are "
            f"{', '.join(variables) or 'none'}; run init with the same function and "
            "the same flags"
        )
    if is_initialized(value):
        value = _strong(value)
    if request.shape is not None and tuple(value.shape) != request.shape:
        raise ValueError(
            f"Variable {name} has shape {request.shape}, apply got one of shape "
            f"{tuple(value.shape)}"
        )
    # Another float dtype is a choice of precision; a float for an int is a mistake.
    kinds = (jnp.integer, jnp.inexact, jnp.bool_)
    if request.dtype is not None and not any(
        jnp.issubdtype(value.dtype, kind) and jnp.issubdtype(request.dtype, kind)
        for kind in kinds
    ):
        raise ValueError(
            f"Variable {name} has dtype {request.dtype}, apply got one of {value.dtype}"
        )
    is_constant = isinstance(value, jax.core.Tracer) and not request.trainable
    return jax.lax.stop_gradient(value) if is_constant else value
