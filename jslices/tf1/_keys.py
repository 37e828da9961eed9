"""Which key random numbers are drawn with: one for each variable, by its name."""

import contextlib
import contextvars
import dataclasses
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax

#: A place in the order of drawing: the name of a variable, and a number within it.
Place = tuple[str, int]


def key_for(key: Any, name: str) -> Any:
    """``key`` folded with the name of a variable; None stays None."""
    return None if key is None else jax.random.fold_in(key, zlib.crc32(name.encode()))


@dataclasses.dataclass
class Making:
    """The making of one initial value: the key of the run, and the variable's name."""

    key: Any
    name: str
    drawn: int = 0
    bound: int = 0

    def next_place(self) -> Place:
        """A place for what is drawn now, which will be drawn again if all is made again."""
        self.drawn += 1
        return self.name, self.drawn - 1

    def place_to_keep(self) -> Place:
        """A place for what stays bound to it, and is not counted again."""
        self.bound += 1
        return f":{self.name}", self.bound - 1

    def key_at(self, place: Place) -> Any:
        """The key of a place, which may be another variable's; None if there is none."""
        key = key_for(self.key, place[0])
        return None if key is None else jax.random.fold_in(key, place[1])


_making: contextvars.ContextVar[Making | None] = contextvars.ContextVar(
    "jslices_making", default=None
)


@contextlib.contextmanager
def making(what: Making | None) -> Iterator[None]:
    """While this lasts, ``what`` is being made. A run within begins with None."""
    token = _making.set(what)
    try:
        yield
    finally:
        _making.reset(token)


def initial_value(make: Callable[[Any], jax.Array], key: Any, name: str) -> jax.Array:
    """What ``make`` makes of the variable's key; ``key`` is that of the run.

    ``js.random_normal`` and the like know where they are by it.
    """
    with making(Making(key, name)):
        return make(key_for(key, name))


def current_making() -> Making | None:
    """What is being made; None outside of all initial values."""
    return _making.get()
