"""One run of a transformed function: what it has created so far, and in which mode.

TensorFlow's graph and session in one, for as long as the run lasts. Frames stand on a
stack that is a context variable, so every thread (and every task) has its own.
"""

import contextlib
import contextvars
import dataclasses
import enum
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.extend.core
import numpy as np

from jslices.tf1._keys import making
from jslices.tf1._names import Names
from jslices.tf1.state import VariableInfo, Variables

if TYPE_CHECKING:
    from jslices.tf1.scope import VariableScope
    from jslices.tf1.variable import Variable

_trace_state: Callable[[], Any] = jax.extend.core.get_opaque_trace_state


class Mode(enum.Enum):
    """Why the function runs: to find its variables, or to use them."""

    INIT = "init"
    APPLY = "apply"


@dataclasses.dataclass
class Entry:
    """A variable of this run: what is static about it, and its value by now.

    ``dtype`` is that of the value; ``declared_dtype`` what the function asked for, which
    differs where the caller has cast the variables to another precision.
    """

    info: VariableInfo
    value: Any
    shape: tuple[int, ...]
    dtype: np.dtype
    declared_dtype: np.dtype
    make_initial: Callable[[Any], jax.Array]
    regularizer: Callable[[jax.Array], Any] | None = None


class Frame:
    """Everything that one ``init`` or ``apply`` knows."""

    def __init__(self, mode: Mode, key: Any = None, given: Mapping[str, Any] | None = None):
        self.mode = mode
        self.key = key
        self.given = given or {}
        self.entries: dict[str, Entry] = {}
        self.handles: dict[str, Variable] = {}  # in the order of creation
        self.store: dict[str, Variable] = {}  # what get_variable shares, by its own name
        self.names = Names()
        self.scope_counts: dict[str, int] = {}
        self.scopes: list[VariableScope] = []
        self.initial: dict[str, Any] = {}
        self._recipes: dict[int, tuple[weakref.ref[Any], Callable[[], Any]]] = {}
        self.trace = _trace_state()

    def remember(self, array: jax.Array, make: Callable[[], jax.Array]) -> None:
        """Keeps how an array was made, for as long as the array is there."""
        self._recipes[id(array)] = weakref.ref(array), make

    def recipe_of(self, array: Any) -> Callable[[], jax.Array] | None:
        """How to make this very array again; None if that was not remembered."""
        known, make = self._recipes.get(id(array), (None, None))
        return make if known is not None and known() is array else None

    def in_own_trace(self) -> bool:
        """False inside a ``scan``, ``cond``, ``jit``, ... that began within this run."""
        return bool(_trace_state() == self.trace)

    def add(self, entry: Entry, handle: "Variable") -> None:
        name = entry.info.name
        self.entries[name] = entry
        self.handles[name] = handle
        self.initial[name] = entry.value

    def initial_state(self) -> Variables:
        """What ``init`` returns: initial values, whatever was assigned meanwhile."""
        return Variables(self.initial, [e.info for e in self.entries.values()])

    def final_state(self) -> Variables:
        """What ``apply`` returns: all that was given, with the values of now."""
        values = {name: entry.value for name, entry in self.entries.items()}
        if isinstance(self.given, Variables):
            return self.given.replace(values)
        infos = [entry.info for entry in self.entries.values()]
        return Variables({**self.given, **values}, infos)


_frames: contextvars.ContextVar[tuple[Frame, ...]] = contextvars.ContextVar(
    "jslices_frames", default=()
)


@contextlib.contextmanager
def running(frame: Frame) -> Iterator[Frame]:
    """Makes ``frame`` the one that get_variable and the others speak of."""
    token = _frames.set((*_frames.get(), frame))
    try:
        with making(None):
            yield frame
    finally:
        _frames.reset(token)


def is_running(frame: Frame) -> bool:
    """Whether ``frame`` is being run, in this thread."""
    return frame in _frames.get()


def current_frame_or_none() -> Frame | None:
    """The innermost run, if there is one."""
    return next(reversed(_frames.get()), None)


def current_frame(what: str) -> Frame:
    """The innermost run; outside of all an error that says how to get into one."""
    frame = current_frame_or_none()
    if frame is None:
        raise RuntimeError(
            f"{what} was called outside of a transformed function. Put the code into a "
            "function fn, then: model = jslices.transform(fn); variables = model.init(key, "
            "*args); out, variables = model.apply(variables, *args). A new thread is "
            "outside, too"
        )
    return frame
