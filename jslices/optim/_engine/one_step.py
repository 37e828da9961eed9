"""What the arrays of one step share, so that they are rounded as Optax rounds them.

XLA divides by a number that many arrays share, and multiplies by the reciprocal of one that
is used once. Optax computes a bias correction once for all arrays.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")

_current: contextvars.ContextVar[tuple[int, dict[Any, Any]] | None]
_current = contextvars.ContextVar("step", default=None)


@contextlib.contextmanager
def one_step(num_arrays: int) -> Iterator[None]:
    """Around the arithmetic of one step on so many arrays."""
    token = _current.set((num_arrays, {}))
    try:
        yield
    finally:
        _current.reset(token)


def once_a_step(function: Callable[[Any], T]) -> Callable[[Any], T]:
    """``function(count)`` computed once in a step, however many rules ask for it."""

    @functools.wraps(function)
    def shared(count: Any) -> T:
        step = _current.get()
        if step is None:
            return function(count)
        key = (function, id(count))
        if key not in step[1]:
            step[1][key] = function(count)
        found: T = step[1][key]
        return found

    return shared


def single_array() -> bool:
    """Whether the step is one of a single array."""
    step = _current.get()
    return step is not None and step[0] == 1
