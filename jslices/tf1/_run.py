"""One run of a transformed function: the names it has taken, its keys and its variables.

A :class:`Frame` is TensorFlow's graph and session in one, for as long as the run lasts.
Frames stand on a stack that is a context variable, so every thread (and every task) has a
stack of its own.
"""

import contextlib
import contextvars
import dataclasses
import enum
import re
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.extend.core
import numpy as np

from jslices.tf1._state import VariableInfo, Variables

# --- names ------------------------------------------------------------------------------

_WITHIN_A_SCOPE = re.compile(r"[A-Za-z0-9_.\\/>-]+")
_OUTERMOST = re.compile(r"[A-Za-z0-9.][A-Za-z0-9_.\\/>-]*")


def check_name(name: object, caller: str, within: str = "") -> str:
    """``name`` if it is a string that TensorFlow accepts in the scope ``within``, too."""
    if not isinstance(name, str):
        raise TypeError(f"{caller}: the name must be a string, got {name!r}")
    if not (_WITHIN_A_SCOPE if within else _OUTERMOST).fullmatch(name):
        begin = "" if within else ", beginning with a letter, a digit or a dot"
        raise ValueError(
            f"{caller}: {name!r} is not a valid name; use letters, digits and any of "
            rf"_ . - / \ >{begin}"
        )
    return name


def join(outer: str, inner: str) -> str:
    """``outer/inner``, or ``inner`` where nothing is outside."""
    return f"{outer}/{inner}" if outer else inner


class Names:
    """The names in use, made unique the way TensorFlow does within one graph.

    A name that is taken, in capitals or not, gets ``_1``, ``_2``, ... Scopes take names,
    too, which is why a scope that is opened twice is ``foo`` and ``foo_1``.
    """

    def __init__(self) -> None:
        self.prefix = ""
        self._times: dict[str, int] = {}

    def unique(self, name: str, caller: str) -> str:
        """The path of ``name`` in the current scope, made unique, and taken from now on.

        ``"foo/bar/"``, with a slash at its end, is the path ``"foo/bar"`` as it stands.
        """
        check_name(name, caller, self.prefix)
        if name.endswith("/"):
            return name[:-1]
        path = new = join(self.prefix, name)
        times = self._times.get(path.lower(), 0)
        self._times[path.lower()] = times + 1
        while times and new.lower() in self._times:
            new = f"{path}_{times}"
            times += 1
        self._times.setdefault(new.lower(), 1)
        return new

    @contextlib.contextmanager
    def released_on_error(self) -> Iterator[None]:
        """Frees the names taken within this block if the block raises."""
        before = dict(self._times)
        try:
            yield
        except BaseException:
            self._times = before
            raise

    @contextlib.contextmanager
    def scope(self, name: str, caller: str = "name_scope") -> Iterator[str]:
        """Opens a name scope; ``"foo/"`` enters that very one again, ``""`` leaves all."""
        outside = self.prefix
        self.prefix = self.unique(name, caller) if name else ""
        try:
            yield self.opened
        finally:
            self.prefix = outside

    @property
    def opened(self) -> str:
        """The current name scope with a slash; ``""`` outside of all."""
        return f"{self.prefix}/" if self.prefix else ""


# --- keys -------------------------------------------------------------------------------

#: Identifies one draw of random numbers: the name of a variable, and a count within it.
Place = tuple[str, int]


def key_for(key: Any, name: str) -> Any:
    """``key`` folded with the name of a variable; None stays None."""
    return None if key is None else jax.random.fold_in(key, zlib.crc32(name.encode()))


@dataclasses.dataclass
class Making:
    """The initial value that is being made: the key of the run, and the variable's name."""

    key: Any
    name: str
    drawn: int = 0
    bound: int = 0

    def next_place(self) -> Place:
        """The place of a draw that happens now, every time the value is made."""
        self.drawn += 1
        return self.name, self.drawn - 1

    def place_to_keep(self) -> Place:
        """The place of a draw that was written down earlier and is bound once."""
        self.bound += 1
        return f":{self.name}", self.bound - 1

    def key_at(self, place: Place) -> Any:
        """The key of a place, even another variable's; None if the run has no key."""
        key = key_for(self.key, place[0])
        return None if key is None else jax.random.fold_in(key, place[1])


_making: contextvars.ContextVar[Making | None] = contextvars.ContextVar(
    "jslices_making", default=None
)


@contextlib.contextmanager
def making(what: Making | None) -> Iterator[None]:
    """While this lasts, ``what`` is being made. A nested run begins with None."""
    token = _making.set(what)
    try:
        yield
    finally:
        _making.reset(token)


def initial_value(make: Callable[[Any], jax.Array], key: Any, name: str) -> jax.Array:
    """Calls ``make`` with the variable's own key; ``key`` is that of the run.

    ``tf.random_normal`` and the like learn from it which variable they draw for.
    """
    with making(Making(key, name)):
        return make(key_for(key, name))


def current_making() -> Making | None:
    """The initial value that is being made; None outside of all initial values."""
    return _making.get()


# --- the run ----------------------------------------------------------------------------

_trace_state: Callable[[], Any] = jax.extend.core.get_opaque_trace_state


class Mode(enum.Enum):
    """Why the function runs: to find its variables, or to use them."""

    INIT = "init"
    APPLY = "apply"


@dataclasses.dataclass
class Entry:
    """A variable of this run: what is static about it, and its current value.

    ``dtype`` is that of the value; ``declared_dtype`` is what the function asked for. They
    differ where the caller has cast the variables to another precision.
    """

    info: VariableInfo
    value: Any
    shape: tuple[int, ...]
    dtype: np.dtype
    declared_dtype: np.dtype
    make_initial: Callable[[Any], jax.Array]
    regularizer: Callable[[jax.Array], Any] | None = None


class Frame:
    """Everything that one ``init`` or ``apply`` knows.

    Attributes:
      entries: name -> entry, in the order of creation.
      handles: name -> ``Variable``, in the order of creation.
      shared: name -> ``Variable`` for what ``get_variable`` made, by the name it was given.
      scopes: the open ``VariableScope`` objects, the innermost last.
      scope_counts: how often a scope was opened, for ``default_name``.
    """

    def __init__(self, mode: Mode, key: Any = None, given: Mapping[str, Any] | None = None):
        self.mode = mode
        self.key = key
        self.given = given or {}
        self.entries: dict[str, Entry] = {}
        self.handles: dict[str, Any] = {}
        self.shared: dict[str, Any] = {}
        self.scopes: list[Any] = []
        self.scope_counts: dict[str, int] = {}
        self.names = Names()
        self._initial: dict[str, Any] = {}
        self._recipes: dict[int, tuple[weakref.ref[Any], Callable[[], Any]]] = {}
        self._trace = _trace_state()

    def remember(self, array: jax.Array, make: Callable[[], jax.Array]) -> None:
        """Keeps how an array was made, for as long as the array is alive."""
        self._recipes[id(array)] = weakref.ref(array), make

    def recipe_of(self, array: Any) -> Callable[[], jax.Array] | None:
        """How to make this very array again; None if that is not known."""
        known, make = self._recipes.get(id(array), (None, None))
        return make if known is not None and known() is array else None

    def in_own_trace(self) -> bool:
        """False inside a ``scan``, ``cond``, ``jit``, ... that began within this run."""
        return bool(_trace_state() == self._trace)

    def add(self, entry: Entry, handle: Any) -> None:
        """Adds a new variable."""
        name = entry.info.name
        self.entries[name] = entry
        self.handles[name] = handle
        self._initial[name] = entry.value

    def initial_state(self) -> Variables:
        """What ``init`` returns: initial values, whatever the function assigned."""
        return Variables(self._initial, [e.info for e in self.entries.values()])

    def final_state(self) -> Variables:
        """What ``apply`` returns: everything it was given, with the current values."""
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
    """Makes ``frame`` the current run."""
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


def current_frame(caller: str) -> Frame:
    """The innermost run; without one, an error that says how to get into one."""
    frame = current_frame_or_none()
    if frame is None:
        raise RuntimeError(
            f"{caller} was called outside of a transformed function. Put the code into a "
            "function fn, then: model = jslices.tf1.transform(fn); variables = "
            "model.init(key, *args); out, variables = model.apply(variables, *args). A new "
            "thread is outside, too"
        )
    return frame
