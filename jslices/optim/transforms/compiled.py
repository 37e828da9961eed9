"""Steps that compile themselves: called with arrays, and pure where a program is traced."""

import contextlib
import contextvars
import functools
import inspect
import itertools
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax

from jslices._jax import is_traced
from jslices._place.hints import hint_once
from jslices._typing import Params, PyTree, State

F = TypeVar("F", bound=Callable[..., Any])

#: So many steps that are made anew, one after another, are hinted at.
_TOO_MANY = 3
#: What XLA says of donated arrays, and what to type.
_OF_DONATED = {
    "been deleted": "an array of params or state was consumed by an earlier step. Go "
    "on with what that returned, params, state, value = step(params, state, *batch), copy "
    "what is read again, jax.tree.map(jnp.copy, params), or type donate=False",
} | dict.fromkeys(
    ("same buffer twice", "donate(a), a"),
    "two arrays are one, and a step consumes those of params and state: copy one of them, "
    "jnp.copy(x), or type donate=False",
)
#: Errors of traced integers and bools that a program wants the values of.
_SHAPES = jax.errors.ConcretizationTypeError, jax.errors.TracerIntegerConversionError
_NUMBERS = int, float, complex  # bools are integers
#: So many steps an optimizer keeps, and what their functions close over.
_MOST = 16
#: The arrays that a step was called with: those of its parameters, and the others.
ARGUMENTS: contextvars.ContextVar[Any] = contextvars.ContextVar("arguments", default=None)
#: For the code of a function how many of its steps have followed one another, each called
#: for the first time with what the last one left: an array of a state, or an optimizer.
_turns: dict[object, tuple[weakref.ref[Any], int]] = {}


class Step:
    """``step(params, state, *args)``: compiled and in place, or pure within a program.

    ``lower`` and ``trace`` are those of ``jax.jit`` for the pure function, of which boxes
    and structures come out as they go in.
    """

    # No public attribute: jax.jit copies those of a function over its own.
    __slots__ = tuple(
        "__weakref__ _call _compiled _fun _is_new _jitted _plain _pure _static "
        "boxed".split()
    )

    def __init__(
        self,
        call: str,
        fun: Callable[..., Any],
        pure: Callable[..., Any],
        boxed: Callable[..., Any],
        plain: Callable[[Params], Params],
        jit: bool,
        **options: Any,
    ) -> None:
        self._call, self._fun, self._pure, self._is_new = call, fun, pure, True
        self._plain = plain
        options = {"static_argnames": (), **options}
        names = options["static_argnames"]
        self._static = {names} if isinstance(names, str) else {*names}
        self._jitted, compiled = (
            jax.jit(_with_signature_of(fun, x, call), **options) for x in (pure, boxed)
        )
        self._compiled = compiled if jit else None
        #: The pure function with tables whose rows may be behind in boxes.
        self.boxed = boxed

    def __repr__(self) -> str:
        return f"<{self._call} of {self._fun}>"

    def __call__(self, params: Params, state: State, *args: Any, **kwargs: Any) -> Any:
        if self._compiled is None or is_traced():
            return self._pure(params, state, *args, **kwargs)
        token = ARGUMENTS.set((params, (args, kwargs)))
        try:
            results = self._compiled(self._plain(params), state, *args, **kwargs)
        except (TypeError, ValueError, IndexError, RuntimeError) as error:
            self._explain(error, args, kwargs)
            raise
        finally:
            ARGUMENTS.reset(token)
        if self._is_new:
            self._is_new = False
            states = state, results[1] if self._call == "train_step" else state
            arrays = (next(iter(jax.tree.leaves(x)), None) for x in states)
            hint_if_made_anew(self._call, self._fun, *arrays)
        return results

    def lower(self, params: Params, state: State, *args: Any, **kwargs: Any) -> Any:
        """As ``jax.jit(step).lower``."""
        return self._jitted.lower(params, state, *args, **kwargs)

    def trace(self, params: Params, state: State, *args: Any, **kwargs: Any) -> Any:
        """As ``jax.jit(step).trace``."""
        return self._jitted.trace(params, state, *args, **kwargs)

    def _explain(self, error: Exception, args: Sequence[Any], kwargs: Any) -> None:
        """Raise what to type for arrays that are gone, or arguments that must be static."""
        for said, advice in _OF_DONATED.items():
            if said in str(error):
                raise ValueError(f"js.{self._call}: {advice}") from error
        is_shape = isinstance(error, _SHAPES) or "must be static" in str(error)
        if not is_shape and "as an abstract array" not in str(error):
            return
        names = [*_signature_of(self._fun)][1 : len(args) + 1]
        pairs = itertools.zip_longest(names, args, fillvalue="name")
        for name, x in [*pairs, *kwargs.items()]:
            is_meant = not isinstance(error, _SHAPES) or re.search(
                rf"\b{name}\b", str(error)
            )
            if name in self._static or not is_meant or not _may_be_static(x, is_shape):
                continue
            raise TypeError(
                f"js.{self._call} compiles the step, and got {x!r}, which is no array; "
                f'name the argument, js.{self._call}(fun, tx, static_argnames=("{name}",)'
                "), or compile it yourself: jit=False"
            ) from error


def hint_if_made_anew(call: str, fun: Any, came: Any, left: Any) -> None:
    """Hint at a function or an optimizer that is made anew for each call.

    Of a step that is called for the first time, by what of the state ``came`` and ``left``.
    """
    code = getattr(getattr(fun, "func", fun), "__code__", None)
    if code is None or came is None or left is None:
        return
    last, count = _turns.get(code, (lambda: None, 0))
    count = count + 1 if last() is came else 1
    _turns[code] = weakref.ref(left), count
    if count == _TOO_MANY:
        hint_once(
            ("anew", code),
            f"js.{call} got a function or an optimizer that is made anew for each call, "
            f"and compiled it {count} times. Make both once, and step = js.{call}(fun, "
            "tx), before the loop",
        )


def made_once(make: F) -> F:
    """``make(fun, tx, ...)``, which ``tx`` keeps the results of for the same arguments."""

    @functools.wraps(make)
    def made(fun: Any, tx: Any, *args: Any, **options: Any) -> Any:
        key = make, fun, tx, args, *options.items()
        try:
            compiles = options.get("jit", True) and not is_traced()
            if hash(key) and not compiles:  # and tracers are not kept
                return make(fun, tx, *args, **options)
            steps = vars(getattr(tx, "tx", tx)).setdefault("_steps", {})
        except TypeError:  # it does not hash, or there is no optimizer
            return make(fun, tx, *args, **options)
        if key not in steps:
            new = make(fun, tx, *args, **options)
            for old in [*steps][: 1 - _MOST]:
                del steps[old]
            steps[key] = new
        return steps[key]

    return made  # type: ignore[return-value]


def _with_signature_of(
    fun: Callable[..., Any], step: Callable[..., Any], name: str
) -> Callable[..., Any]:
    """The step, whose arguments ``jax.jit`` knows by the names that ``fun`` gives them."""

    @functools.wraps(step)
    def named(*args: Any, **kwargs: Any) -> Any:
        return step(*args, **kwargs)

    of_step = [*_signature_of(step).values()][:2]
    of_fun = [*_signature_of(fun).values()][1:]
    with contextlib.suppress(ValueError):  # of a name that the step has
        named.__signature__ = inspect.Signature([*of_step, *of_fun])  # type: ignore[attr-defined]
    named.__name__ = name
    return named


def _signature_of(fun: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The parameters of a function; none where they are not known."""
    try:
        return inspect.signature(fun).parameters
    except (TypeError, ValueError):
        return {}


def _may_be_static(x: PyTree, is_shape: bool) -> bool:
    """Whether it holds what ``jax.jit`` takes for no array, or integers for a shape."""
    leaves = [x for x in jax.tree.leaves(x) if not hasattr(x, "dtype")]
    return any(
        isinstance(x, int) if is_shape else not isinstance(x, _NUMBERS) for x in leaves
    )
