"""Steps that compile themselves: called with arrays, and pure where a program is traced."""

import collections
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax

from jslices._jax import is_traced
from jslices._place.hints import hint_once
from jslices._slices.held import held_where, is_held, unheld
from jslices._typing import Params, State

F = TypeVar("F", bound=Callable[..., Any])

#: So many steps of one function's code, each called once, are hinted at.
_TOO_MANY = 3
#: The code of functions whose steps were called once, and how many of these there are.
_called_once: collections.Counter[object] = collections.Counter()


class Step:
    """``step(params, state, *args)``: compiled and in place, or pure within a program.

    ``lower`` and ``trace`` are those of ``jax.jit`` for the pure function, of which boxes
    and structures come out as they go in.
    """

    # No public attribute: jax.jit copies those of a function over its own.
    __slots__ = ("__weakref__", "_boxed", "_call", "_calls", "_fun", "_jitted", "_pure")

    def __init__(
        self,
        call: str,
        fun: Callable[..., Any],
        pure: Callable[..., Any],
        boxed: Callable[..., Any],
        jit: bool,
        **options: Any,
    ) -> None:
        self._call, self._fun, self._pure, self._calls = call, fun, pure, 0
        options = {"static_argnames": (), **options}
        self._jitted, compiled = (
            jax.jit(_with_signature_of(fun, x, call), **options) for x in (pure, boxed)
        )
        self._boxed = compiled if jit else None

    def __repr__(self) -> str:
        return f"<{self._call} of {self._fun}>"

    def __call__(self, params: Params, state: State, *args: Any, **kwargs: Any) -> Any:
        if self._boxed is None or is_traced():
            return self._pure(params, state, *args, **kwargs)
        if self._calls < 2:
            self._look_for_others()
        plain = unheld(params)
        try:
            results = self._boxed(plain, state, *args, **kwargs)
        except TypeError as error:
            _explain(error, self._call, args, kwargs)
            raise
        if plain is params or self._call != "train_step":
            return results
        return _held_in_either(params, results[0]), *results[1:]

    def lower(self, params: Params, state: State, *args: Any, **kwargs: Any) -> Any:
        """As ``jax.jit(step).lower``."""
        return self._jitted.lower(params, state, *args, **kwargs)

    def trace(self, params: Params, state: State, *args: Any, **kwargs: Any) -> Any:
        """As ``jax.jit(step).trace``."""
        return self._jitted.trace(params, state, *args, **kwargs)

    def _look_for_others(self) -> None:
        """Hint at a function that is made anew for each call, and so compiled."""
        self._calls += 1
        code = getattr(getattr(self._fun, "func", self._fun), "__code__", None)
        if self._calls == 2:
            _called_once.pop(code, None)
        elif code is not None:
            _called_once[code] += 1
            if _called_once[code] == _TOO_MANY:
                hint_once(
                    ("anew", code),
                    f"js.{self._call} got a function or an optimizer that is made anew for "
                    f"each call, and compiled it {_TOO_MANY} times. Make both once, and "
                    f"step = js.{self._call}(fun, tx), before the loop",
                )


def kept(make: F) -> F:
    """``make``, which returns what it has made last of the same arguments, if they hash."""
    again = functools.lru_cache(16)(make)  # as many functions and what they close over

    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        try:
            hash((args, *kwargs.values()))
        except TypeError:
            return make(*args, **kwargs)
        return again(*args, **kwargs)

    return made  # type: ignore[return-value]


def _with_signature_of(
    fun: Callable[..., Any], step: Callable[..., Any], name: str
) -> Callable[..., Any]:
    """The step, whose arguments ``jax.jit`` knows by the names that ``fun`` gives them."""

    @functools.wraps(step)
    def named(*args: Any, **kwargs: Any) -> Any:
        return step(*args, **kwargs)

    of_step = list(inspect.signature(step).parameters.values())[:2]
    try:
        of_fun = list(inspect.signature(fun).parameters.values())[1:]
        named.__signature__ = inspect.Signature([*of_step, *of_fun])  # type: ignore[attr-defined]
    except (TypeError, ValueError):  # of none, or of a name that the step has
        pass
    named.__name__ = name
    return named


def _held_in_either(old: Params, new: Params) -> Params:
    """``new``, with what is in a box in ``old`` in one as well."""
    boxes = jax.tree.leaves(old, is_leaf=is_held)
    return held_where(new, [is_held(x) for x in boxes])


def _explain(error: TypeError, call: str, args: Sequence[Any], kwargs: Any) -> None:
    """Raise what to type where an argument should have been static."""
    leaves = jax.tree.leaves((args, kwargs))
    odd = [x for x in leaves if not (hasattr(x, "dtype") or isinstance(x, float | complex))]
    is_shape = isinstance(error, jax.errors.ConcretizationTypeError)
    odd = [x for x in odd if is_shape or not isinstance(x, int)]
    if odd:
        raise TypeError(
            f"js.{call} compiles the step, and got {odd[0]!r}, which is no array; name the "
            f'argument, js.{call}(fun, tx, static_argnames=("name",)), or compile it '
            "yourself: jit=False"
        ) from error
