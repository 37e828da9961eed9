"""Checks of arguments: the annotation of a type says, once, what an argument may be.

``Decay = Annotated[float, Number(at_least=0, below=1)]`` is a type for the reader and the
type checker, and :func:`check_arguments` refuses other values.
"""

import dataclasses
import math
import numbers
import reprlib
import types
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Protocol, TypeGuard, Union, get_args, get_origin

import jax
import jax.numpy as jnp
import numpy as np

from jslices.errors import InvalidArgumentError

_HOST = jax.memory.Space.Host


class Domain(Protocol):
    """The values that an argument may have; ``str`` names them."""

    def check(self, call: str, argument: str, value: object) -> None:
        """Raise a TypeError or ValueError that names the argument for any other value."""


def check_arguments(
    call: str, annotations: Mapping[str, object], arguments: Mapping[str, object]
) -> None:
    """Refuse arguments that are not what their annotations say.

    ``call`` is the name of the function, for errors. Only arguments annotated as ``bool``,
    or by ``Annotated`` with a :class:`Domain`, are checked.
    """
    for argument, value in arguments.items():
        domain, optional = _domain(annotations.get(argument))
        if domain is not None and not (optional and value is None):
            domain.check(call, argument, value)


def refused(
    error: type[Exception], call: str, argument: str, value: object, domain: object
) -> Exception:
    """The error for one argument: what came and what was wanted."""
    return error(f"{call}({argument}={shown(value)}): wanted {domain}")


def shown(value: object) -> str:
    """A short text for any value; of large arrays only the shape."""
    if isinstance(value, np.ndarray | jax.Array):
        traced = np.ndim(value) or isinstance(value, jax.core.Tracer)
        traced = traced or jnp.issubdtype(value.dtype, jax.dtypes.prng_key)  # a secret
        return f"{value.dtype}{list(value.shape)}" if traced else f"{value}"
    return getattr(value, "__qualname__", None) or reprlib.repr(value)


@dataclasses.dataclass(frozen=True)
class Number:
    """A real number, or an array ``[]`` of one; traced ones pass with any value."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    integer: bool = False  #: whether it must be an int.
    infinite: bool = False  #: whether infinity is a value.
    schedule: bool = False  #: whether it may also be a function of the step.
    if_negative: str = ""  #: what to type instead of a negative value.

    def check(self, call: str, argument: str, value: object) -> None:
        if self.schedule and callable(value) and not isinstance(value, type):
            return
        if not is_number(value, self.integer):
            advice = ""
            if callable(value) and not self.integer and not isinstance(value, type):
                advice = f"; for one that changes: optax.inject_hyperparams({call})"
            raise refused(TypeError, call, argument, value, f"{self}{advice}")
        if isinstance(value, jax.core.Tracer):
            return
        if isinstance(value, jax.Array) and not value.is_fully_addressable:
            return
        number = float(value)  # type: ignore[arg-type]
        if not self._holds(number):
            advice = f"; {self.if_negative}" if self.if_negative and number < 0 else ""
            raise refused(InvalidArgumentError, call, argument, value, f"{self}{advice}")

    def _holds(self, number: float) -> bool:
        if math.isnan(number) or (math.isinf(number) and not self.infinite):
            return False
        return (
            (self.at_least is None or number >= self.at_least)
            and (self.above is None or number > self.above)
            and (self.at_most is None or number <= self.at_most)
            and (self.below is None or number < self.below)
        )

    def __str__(self) -> str:
        words = "of at least", "above", "of at most", "below"
        limits = self.at_least, self.above, self.at_most, self.below
        pairs = zip(words, limits, strict=True)
        bounds = [f"{word} {limit:g}" for word, limit in pairs if limit is not None]
        bounded = self.infinite or (self.at_most, self.below) != (None, None)
        noun = "an int" if self.integer else "a number" if bounded else "a finite number"
        schedule = ", or a schedule (a function of the step)" if self.schedule else ""
        return f"{noun} {' and '.join(bounds)}".rstrip() + schedule

    __repr__ = __str__  # as `help` shows it in a signature


@dataclasses.dataclass(frozen=True)
class Flag:
    """True or False."""

    means: str = ""  #: what they choose between.

    def check(self, call: str, argument: str, value: object) -> None:
        if not isinstance(value, bool | np.bool_):
            raise refused(TypeError, call, argument, value, self)

    def __str__(self) -> str:
        return f"True or False{self.means and ', '}{self.means}"

    __repr__ = __str__


class OneOf:
    """One of some strings.

    Args:
      names: strings that explain themselves.
      explained: others, and what each means.
    """

    def __init__(self, *names: str, **explained: str) -> None:
        self.names, self.explained = (*names, *explained), explained

    def check(self, call: str, argument: str, value: object) -> None:
        if not isinstance(value, str):
            raise refused(TypeError, call, argument, value, self)
        if value not in self.names:
            raise refused(InvalidArgumentError, call, argument, value, self)

    def __str__(self) -> str:
        means = {name: f" ({text})" for name, text in self.explained.items()}
        *first, last = (f'"{name}"{means.get(name, "")}' for name in self.names)
        return f"{', '.join(first)} or {last}"

    def __repr__(self) -> str:
        return str(OneOf(*self.names))


def check_array(name: str, value: object, wanted: str = "an array") -> None:
    """Refuse values that JAX cannot make an array of: strings, None, objects."""
    kind = getattr(getattr(value, "dtype", None), "kind", "")
    # Of a HostTable the first raises, and says what to type.
    likely = isinstance(value, numbers.Number | list | tuple) or any(
        hasattr(value, name) for name in ("__jax_array__", "__array__", "dtype")
    )
    if not likely or kind in tuple("OSUMm"):
        tree = "; for each array of a tree: jslices.tree.map(function, tree)"
        kind = jax.tree.structure(value)
        is_tree = kind.num_leaves and kind.num_nodes > 1
        raise TypeError(
            f"{name}: wanted {wanted}, got {shown(value)}{tree if is_tree else ''}"
        )


def is_on_host(value: Any) -> bool:
    """Whether an array is in memory of the host, which devices read by transfers alone."""
    return isinstance(value, jax.Array) and jax.typeof(value).memory_space is _HOST


def refuse_host_memory(name: str, value: Any) -> None:
    """Refuse a table in memory of the host, with which JAX computes there alone."""
    if is_on_host(value):
        raise ValueError(
            f"{name}: got {shown(value)} in memory of the host, where JAX reads no rows "
            "and makes no state for it: keep it in a jslices.HostTable(shape, tx), or pass "
            "jax.device_put(table, jax.memory.Space.Device)"
        )


def is_number(value: object, integer: bool = False) -> bool:
    """Whether it is one real number, or an array ``[]`` of one; an int, if ``integer``."""
    if isinstance(value, bool):
        return False
    if isinstance(value, np.generic | np.ndarray | jax.Array):
        fits = jnp.issubdtype(value.dtype, jnp.integer) or not integer
        return fits and is_real(value.dtype) and np.ndim(value) == 0
    return isinstance(value, int if integer else int | float)


def is_function(x: object) -> TypeGuard[Callable[..., Any]]:
    """True for a function; not for a module, of bools for example, that can be called."""
    return callable(x) and all(map(callable, jax.tree.leaves(x)))


def is_real(dtype: Any) -> bool:
    """Whether it is a dtype of real numbers, which bools are not."""
    return jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.floating)


@dataclasses.dataclass(frozen=True)
class StateDtype:
    """A dtype for numbers that are added up: floating, of 16 bits or more."""

    complex: bool = True  #: whether it may be complex as well.

    def check(self, call: str, argument: str, value: Any) -> None:
        kind = jnp.inexact if self.complex else jnp.floating
        try:
            # NumPy would take that of an array.
            array = isinstance(value, np.ndarray | jax.Array)
            dtype = None if array else jnp.dtype(value)
        except TypeError:
            dtype = None
        wide = dtype is not None and jnp.issubdtype(dtype, kind) and dtype.itemsize >= 2
        if value is None or not wide:
            raise refused(TypeError, call, argument, value, self)

    def __str__(self) -> str:
        return 'a floating dtype of 16 bits or more, such as "float32"'

    __repr__ = __str__


def _domain(annotation: object) -> tuple[Domain | None, bool]:
    """The values that an annotation allows, and whether None is one as well."""
    if annotation is bool:
        return Flag(), False
    if get_origin(annotation) in (Union, types.UnionType):
        parts = get_args(annotation)
        each = [_domain(part)[0] for part in parts]
        return next((x for x in each if x is not None), None), type(None) in parts
    if get_origin(annotation) is Annotated:
        _, *notes = get_args(annotation)
        return next((x for x in notes if hasattr(x, "check")), None), False
    return None, False
