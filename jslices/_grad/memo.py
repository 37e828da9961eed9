"""A memo of equations that lasts as long as the programs inside them.

Outside ``jax.jit`` a function is traced at every call, but the programs inside its
equations (a jitted function, the body of a loop) are JAX's own, and the same objects each
time: what was planned and compiled for them can be used again. Every reference to them is
weak, so objects that a user drops are forgotten here as well.
"""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

from jslices import _jax
from jslices._jax import Equation, Program

Made = TypeVar("Made")

#: Entries for one program: some structures of tables, some shapes of the rest.
MOST = 16


class Memo(Generic[Made]):
    """A cache keyed by equations with programs inside, and by another key."""

    def __init__(self) -> None:
        self._made: weakref.WeakKeyDictionary[Any, OrderedDict[Hashable, Made]]
        self._made = weakref.WeakKeyDictionary()

    def find(self, eqn: Equation, key: Hashable, make: Callable[[], Made]) -> Made:
        """The value for such an equation and such a key, from ``make()`` if it is new.

        Equations are the same if their parameters are equal, and the programs among these
        the same objects. Without a hash the value is made anew.
        """
        params = _with_programs(eqn.params, weakref.ref)
        key = (eqn.primitive, *params.items(), key)
        made = self._made.setdefault(first_program(eqn), OrderedDict())
        try:
            if key in made:
                made.move_to_end(key)
                return made[key]
        except TypeError:  # not hashable
            return make()
        made[key] = new = make()
        if len(made) > MOST:
            made.popitem(last=False)
        return new


def weak_equation(eqn: Equation) -> Callable[[], Equation]:
    """Thunk for the equation that references its sub-programs weakly."""
    hollow = eqn.replace(params=_with_programs(eqn.params, weakref.ref))

    def filled() -> Equation:
        params = _with_programs(hollow.params, lambda ref: ref(), weakref.ref)
        return hollow.replace(params=params)

    return filled


def first_program(eqn: Equation) -> Program | None:
    """One of the programs inside an equation, if there is any."""
    programs: list[Any] = []
    _with_programs(eqn.params, programs.append)
    return programs[0] if programs else None


def _with_programs(
    params: dict[str, Any], replace: Callable[[Any], Any], kind: Any = _jax.PROGRAMS
) -> dict[str, Any]:
    """Parameters with each program, also in a tuple of them, replaced."""

    def one(x: Any) -> Any:
        return replace(x) if isinstance(x, kind) else x

    return {
        name: tuple(map(one, x)) if type(x) is tuple else one(x)
        for name, x in params.items()
    }
