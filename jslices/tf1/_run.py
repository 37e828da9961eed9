"""One run of a transformed function: its names, its random keys and its variables.

A :class:`Run` is TensorFlow's graph and session in one, for as long as it lasts. Runs
stand on a stack that is a context variable, so every thread (and every task) has its own.
"""

import contextlib
import contextvars
import dataclasses
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np

from jslices import FailedPreconditionError
from jslices.tf1._arrays import canonical_dtype, dtype_of, is_array
from jslices.tf1._names import Names
from jslices.tf1._state import (
    Initial,
    Value,
    VariableInfo,
    Variables,
    is_initialized,
)

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
    draws: int = 0
    lazy_draws: int = 0

    def next_draw(self) -> DrawId:
        """A draw that happens now, every time the value is made."""
        self.draws += 1
        return self.name, self.draws - 1

    def next_lazy_draw(self) -> DrawId:
        """A draw of a lazy value, for whichever variable needs it first."""
        self.lazy_draws += 1
        return f":{self.name}", self.lazy_draws - 1

    def key_of(self, draw: DrawId) -> jax.Array | None:
        """The key of a draw, even another variable's; None if the run has no key."""
        key = key_for(self.key, draw[0])
        return None if key is None else jax.random.fold_in(key, draw[1])


_initialization: contextvars.ContextVar[Initialization | None] = contextvars.ContextVar(
    "jslices_initialization", default=None
)


@contextlib.contextmanager
def _initializing(what: Initialization | None) -> Iterator[None]:
    token = _initialization.set(what)
    try:
        yield
    finally:
        _initialization.reset(token)


def initial_value(make: Initial, key: jax.Array | None, name: str) -> jax.Array:
    """Call ``make`` with the variable's own key; ``key`` is that of the run.

    ``tf.random_normal`` and the like learn from it which variable they draw for.
    """
    with _initializing(Initialization(key, name)):
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
      cells: name -> :class:`LiveCell`, in the order of creation.
      handles: name -> ``Variable``, likewise.
      shared: name -> ``Variable`` for ``get_variable``, by the name it was called with.
      scopes: the open ``VariableScope`` objects, the innermost last.
      scope_counts: how often a scope was opened, for ``default_name``.
    """

    def __init__(
        self, key: jax.Array | None = None, passed: Mapping[str, Value] | None = None
    ) -> None:
        self.key, self.passed = key, passed
        self.cells: dict[str, LiveCell] = {}
        self.handles: dict[str, Any] = {}
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
        """``"init"``, which only finds out what variables there are, or ``"apply"``."""
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

    def initial_state(self) -> Variables:
        """What ``init`` returns: initial values, whatever the function assigned."""
        cells = self.cells.values()
        return Variables({c.name: c.initial for c in cells}, [c.info for c in cells])

    def final_state(self) -> Variables:
        """What ``apply`` returns: all variables passed to it, with their new values."""
        values = {name: cell.value for name, cell in self.cells.items()}
        if isinstance(self.passed, Variables):
            return self.passed.replace(values)
        infos = [cell.info for cell in self.cells.values()]
        return Variables({**(self.passed or {}), **values}, infos)


_runs: contextvars.ContextVar[tuple[Run, ...]] = contextvars.ContextVar(
    "jslices_runs", default=()
)


@contextlib.contextmanager
def running(run: Run) -> Iterator[Run]:
    """Make ``run`` the current run, outside of all initial values."""
    token = _runs.set((*_runs.get(), run))
    try:
        with _initializing(None):
            yield run
    finally:
        _runs.reset(token)


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


# --- variables of the run ---------------------------------------------------------------

DEFAULT_COLLECTIONS = ("variables",)
TRAINABLE = "trainable_variables"


@dataclasses.dataclass(frozen=True)
class Request:
    """A variable to create.

    Attributes:
      make: makes its initial value from a key.
      shape, dtype: None where only ``make`` can tell.
      collections: as the user passed them.
      initial: makes the initial value again outside of the run; None if nothing can.
    """

    name: str
    make: Initial
    shape: tuple[int, ...] | None = None
    dtype: np.dtype | None = None
    trainable: bool = True
    collections: Any = None
    initial: Initial | None = None
    regularizer: Callable[[jax.Array], Any] | None = None


class LiveCell:
    """A variable of a run, which a handle reads and writes while that run lasts.

    Attributes:
      dtype: that of the value. What the function asked for is ``declared_dtype``; they
        differ where the caller has cast the variables to another precision.
      initial: the first value.
    """

    def __init__(self, run: Run, request: Request, info: VariableInfo, value: Value):
        self.run, self.request, self.info = run, request, info
        self.value = self.initial = value
        self.name = request.name
        if is_array(value):
            self.shape, self.dtype = tuple(value.shape), np.dtype(value.dtype)
        else:  # None was passed for it: all there is is what the function asked for
            self.shape = request.shape or ()
            self.dtype = request.dtype or np.dtype(np.float32)
        self.declared_dtype = request.dtype or self.dtype

    @property
    def is_computed(self) -> bool:
        """False in ``init``, where values say nothing about a step."""
        return self.run.passed is not None

    def _check_running(self) -> None:
        if self.run not in _runs.get():
            raise RuntimeError(
                f"the Variable {self.name}:0 was used outside of the {self.run.phase} that "
                "made it: a handle leaked out of the transformed function, or into another "
                "thread. Return what is needed from the function, or read variables["
                f"'{self.name}'] from what apply returns"
            )

    def read(self) -> jax.Array:
        self._check_running()
        if not is_initialized(self.value):
            raise FailedPreconditionError(
                f"Attempting to use uninitialized value {self.name}; these variables are "
                "only declared: make them with model.init(key, *args)"
            )
        return self.value

    def read_or_initial(self) -> jax.Array:
        if is_initialized(self.value):
            return self.read()
        self._check_running()
        return initial_value(self.request.make, self.run.key, self.name)

    def write(self, value: jax.Array, what: str) -> None:
        self._check_running()
        if not self.run.in_own_trace():
            raise RuntimeError(
                f"{what} inside of a scan, cond, while_loop, vmap, jit, grad or checkpoint "
                "that began within the transformed function: the value would leak out of "
                "it. Return the new value from the inner function, and assign it outside"
            )
        self.value = value


class CopyCell:
    """The value that a JAX transformation put in the place of a handle; read-only."""

    is_computed = True

    def __init__(self, name: str, value: jax.Array) -> None:
        self.name, self._value = name, value

    @property
    def info(self) -> VariableInfo:
        return VariableInfo(self.name)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(np.shape(self._value))

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self._value.dtype)

    def read(self) -> jax.Array:
        return self._value

    read_or_initial = read

    def write(self, value: jax.Array, what: str) -> None:
        del value
        raise RuntimeError(
            f"{what} on a copy: the handle went through jit, vmap, grad or another "
            "transformation as an argument. Return the new value from the inner function, "
            "and assign it outside"
        )


def create(run: Run, request: Request, handle: object) -> LiveCell:
    """A new variable of ``run``: made in ``init``, looked up in ``apply``.

    Nothing is added to the run if this raises.

    Raises:
      TypeError, ValueError: for collections, a shape or a dtype that are not right.
      RuntimeError: within an inner ``scan``, ``jit``, ... of the transformed function.
    """
    name = request.name
    if not run.in_own_trace():
        raise RuntimeError(
            f"the Variable {name} would be created inside of a scan, cond, vmap, "
            "jit, grad or checkpoint that began within the transformed function; create it "
            "before that, and use it inside"
        )
    if name in run.cells:
        raise ValueError(
            f"there is a Variable {name} already; without a slash at its end the "
            "name would be made unique"
        )
    info = VariableInfo(
        name,
        bool(request.trainable),
        _collections(request),
        position=len(run.cells),
        initial=request.initial,
    )
    passed = run.passed
    value = _made(run.key, request) if passed is None else _passed(passed, request)
    cell = LiveCell(run, request, info, value)
    run.cells[name], run.handles[name] = cell, handle
    return cell


def _collections(request: Request) -> tuple[str, ...]:
    keys = DEFAULT_COLLECTIONS if request.collections is None else request.collections
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
    name = request.name
    if name not in variables:
        raise ValueError(
            f"Variable {name} is not among those given to apply, which are "
            f"{', '.join(variables) or 'none'}; run init with the same function and "
            "the same flags"
        )
    value = variables[name]
    if value is None:
        return None
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
    return value
