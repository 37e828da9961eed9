"""One run of a transformed function: its names, its random keys and its variables.

A :class:`Run` is TensorFlow's graph and session in one, for as long as it lasts. The stack
of runs is a context variable, so every thread (and every task) has its own.
"""

import contextlib
import dataclasses
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import jax
import jax.extend.core

from jslices.tf1._arrays import T
from jslices.tf1._names import Names
from jslices.tf1._state import Initial, Value, Variables

# --- random numbers of initial values ---------------------------------------------------

#: Identifies one draw of random numbers: the name of a variable, and a count within it.
DrawId = tuple[str, int]


def key_for(key: jax.Array | None, name: str) -> jax.Array | None:
    """``key`` folded with the name of a variable; None stays None."""
    return None if key is None else jax.random.fold_in(key, zlib.crc32(name.encode()))


@dataclasses.dataclass
class Initialization:
    """The making of one initial value: the key of the run, and the variable's name."""

    key: jax.Array | None
    name: str
    _draws: Counter[str] = dataclasses.field(default_factory=Counter)

    def next_draw(self, prefix: str = "") -> DrawId:
        """The next of the draws that are counted together under this prefix.

        ``""``: a draw that happens now, every time the value is made. ``":"``: that of a
        lazy value, for whichever variable needs it first.
        """
        name = prefix + self.name
        self._draws[name] += 1
        return name, self._draws[name] - 1

    def key_of(self, draw: DrawId) -> jax.Array | None:
        """The key of a draw, even another variable's; None if the run has no key."""
        key = key_for(self.key, draw[0])
        return None if key is None else jax.random.fold_in(key, draw[1])


_initialization: ContextVar[Initialization | None] = ContextVar(
    "jslices_initialization", default=None
)


@contextlib.contextmanager
def _set(variable: ContextVar[T], value: T) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def initial_value(make: Initial, key: jax.Array | None, name: str) -> jax.Array:
    """Call ``make`` with the variable's own key; ``key`` is that of the run.

    ``tf.random_normal`` and the like learn from it which variable they draw for.
    """
    with _set(_initialization, Initialization(key, name)):
        return make(key_for(key, name))


def current_initialization() -> Initialization | None:
    """The initial value that is being made, if any."""
    return _initialization.get()


# --- the run ----------------------------------------------------------------------------

_trace_state: Callable[[], object] = jax.extend.core.get_opaque_trace_state


class Run:
    """The state of one ``init`` or ``apply``.

    Attributes:
      key: the key passed to ``init``.
      passed: the variables passed to ``apply``; None in ``init``.
      variables: name -> ``Variable``, in the order of creation.
      shared: name -> ``Variable`` for ``get_variable``, by the name it was called with.
      scopes: the open ``VariableScope`` objects, the innermost last.
      scope_counts: how often a scope was opened, for ``default_name``.
    """

    def __init__(
        self, key: jax.Array | None = None, passed: Mapping[str, Value] | None = None
    ) -> None:
        self.key, self.passed = key, passed
        self.variables: dict[str, Any] = {}
        self.shared: dict[str, Any] = {}
        self.scopes: list[Any] = []
        self.scope_counts: dict[str, int] = {}
        self.names = Names()
        self._seed: int | None = None
        self._seeded_draws = 0
        self._recipes: dict[int, tuple[weakref.ref[Any], Callable[[], jax.Array]]] = {}
        self._trace = _trace_state()

    @property
    def phase(self) -> str:
        """``"init"``, which only finds the variables, or ``"apply"``."""
        return "init" if self.passed is None else "apply"

    def set_seed(self, seed: int) -> None:
        """Draw with this seed from here on, whatever key ``init`` was given."""
        self.key, self._seed = jax.random.key(seed), seed

    def next_seeded_draw(self) -> tuple[int, int] | None:
        """Seed and number of a draw that no variable begins with; None without a seed."""
        self._seeded_draws += 1
        return None if self._seed is None else (self._seed, self._seeded_draws)

    def remember(self, array: jax.Array, make: Callable[[], jax.Array]) -> None:
        """Remember how an array was made, for as long as the array is alive."""
        self._recipes[id(array)] = weakref.ref(array), make

    def recipe_of(self, array: object) -> Callable[[], jax.Array] | None:
        """How to make this very array again, if that was remembered."""
        reference, make = self._recipes.get(id(array), (None, None))
        return make if reference is not None and reference() is array else None

    def in_own_trace(self) -> bool:
        """False inside a ``scan``, ``cond``, ``jit``, ... that began within this run."""
        return bool(_trace_state() == self._trace)

    def is_open(self) -> bool:
        """False after the run, and in another thread."""
        return self in _runs.get()

    def initial_state(self) -> Variables:
        """The result of ``init``: initial values, whatever the function assigned."""
        variables = self.variables.values()
        infos = [v.info for v in variables]
        return Variables({v.info.name: v._first for v in variables}, infos)

    def final_state(self) -> Variables:
        """The result of ``apply``: all variables passed to it, with their new values."""
        values = {name: v._value for name, v in self.variables.items()}
        if isinstance(self.passed, Variables):
            return self.passed.replace(values)
        infos = [v.info for v in self.variables.values()]
        return Variables({**(self.passed or {}), **values}, infos)


_runs: ContextVar[tuple[Run, ...]] = ContextVar("jslices_runs", default=())


@contextlib.contextmanager
def running(run: Run) -> Iterator[Run]:
    """Make ``run`` the current run, outside all initial values."""
    with _set(_runs, (*_runs.get(), run)), _set(_initialization, None):
        yield run


def current_run_or_none() -> Run | None:
    """The innermost run, if there is one."""
    return next(reversed(_runs.get()), None)


def current_run(caller: str) -> Run:
    """The innermost run; without one, an error that says how to get into one."""
    run = current_run_or_none()
    if run is None:
        raise RuntimeError(
            f"{caller} was called outside of a transformed function. Put the code into a "
            "function fn, then: model = jslices.tf1.transform(fn); variables = "
            "model.init(key, *args); out, variables = model.apply(variables, *args). A new "
            "thread is outside, too"
        )
    return run
