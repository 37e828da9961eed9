"""Functions with custom derivatives as row-wise steps.

JAX traces ``f`` of a ``custom_jvp`` or ``custom_vjp``, and its derivative, for the whole
table. If both treat every row alike, they say what ``f`` and its derivative do to n rows:
a function of n rows is made of them, with that derivative. Then ``f(table)[ids]`` is
``f(table[ids])`` under every kind of differentiation.
"""

import enum
import functools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad

from jslices import _jax
from jslices._grad.reads import Reader
from jslices._grad.rules import rowwise, rule_for
from jslices._grad.views import (
    Keyed,
    RowIds,
    Rowwise,
    TableView,
    Transposed,
    Unslotted,
    Values,
    View,
    flat,
    folded,
)
from jslices._grad.walk import ProgramWalk, Scope, carries_gradient
from jslices._jax import Atom, Equation, Program

#: So many functions deep derivatives are checked. Most that go on make themselves anew.
MOST_WITHIN = 8


class _MixesRowsError(Exception):
    """A program turns out not to treat every row alike."""


class _NotLinearError(Exception):
    """A program may not be linear in some of its inputs."""


@rule_for("custom_jvp_call", "custom_vjp_call")
def _custom(eqn: Equation, operands: Values, lead: int) -> list[View] | None:
    return with_own_derivative(eqn, operands)


def with_own_derivative(
    eqn: Equation, operands: Values, within: frozenset[Any] | None = frozenset()
) -> list[View] | None:
    """The outputs of a ``custom_jvp`` or ``custom_vjp`` as views.

    None if the function or its derivative mixes rows, or if the derivative is not linear:
    its value at a sum of rows is then not the sum of values. ``within`` are the calls whose
    derivatives are being checked, as many call their own function; None if this call was
    checked with one of them.
    """
    views = [x for x in operands if isinstance(x, View)]
    lead = views[0].lead
    rows = views[0].shape[:lead]
    if any(
        isinstance(x, Transposed) or x.lead != lead or x.shape[:lead] != rows for x in views
    ):
        return None
    if not all(map(carries_gradient, eqn.outvars)):
        return None
    kind = _WithJvp if _jax.kind(eqn) == "custom_jvp_call" else _WithVjp
    function = kind(eqn, [not isinstance(x, View) for x in operands], lead)
    try:
        function.check(within)
    except _MixesRowsError:
        return None
    inner = tuple(flat(x) if isinstance(x, View) else x for x in operands)
    count = math.prod(rows)
    outputs: list[View] = []
    for number, out in enumerate(eqn.outvars):
        row = _jax.shape_of(out)[lead:]
        output = functools.partial(function.output, number)
        forward = functools.partial(function.forward, number)
        run = Keyed(output, (function, number), forward)
        shape, shared = (count, *row), tuple(function.shared)
        view = Rowwise(shape, out.aval.dtype, run, inner, shared)
        outputs.append(folded(view, rows))
    return outputs


#: Whether a function that JAX keeps has passed its check.
_program_checks: weakref.WeakKeyDictionary[Any, dict[Any, bool]] = (
    weakref.WeakKeyDictionary()
)


class _Function:
    """A call of a function with a derivative of its own, for n rows.

    ``shared`` operands serve all rows; ``lead`` axes number the rows of the others.
    """

    def __init__(self, eqn: Equation, shared: Sequence[bool], lead: int) -> None:
        self.shared = shared
        self._eqn, self._lead = eqn, lead
        self._avals = [_aval(x) for x in eqn.invars]
        self._inexact = [i for i, x in enumerate(eqn.invars) if carries_gradient(x)]

    def output(self, number: int, values: Values, count: int) -> jax.Array:
        """One output ``[n, *D]`` of n rows."""
        return self.make(count)(*values)[number]

    def forward(self, number: int, values: Values, count: int) -> jax.Array:
        """The same as the derivative computes it."""
        raise NotImplementedError

    def make(self, count: int) -> Callable[..., Any]:
        """The function of this many rows."""
        raise NotImplementedError

    def check(self, within: frozenset[Any] | None) -> None:
        """Raises _MixesRowsError if function and derivative do not treat rows alike."""
        if within is None:
            return
        program = str(self.body.program)  # static arguments are constants in it
        call = _jax.functions_behind(self._eqn), program, *map(str, self._avals)
        if call in within:
            return
        if len(within) == MOST_WITHIN:
            raise _MixesRowsError
        if within:
            return self.check_programs(within | {call})
        checked = _program_checks.setdefault(self.body.program, {})
        key = (tuple(self.shared), self._lead)
        if key not in checked:
            checked[key] = False
            self.check_programs(frozenset({call}))
            checked[key] = True
        if not checked[key]:
            raise _MixesRowsError

    def check_programs(self, within: frozenset[Any]) -> None:
        self.body.check(within)

    @functools.cached_property
    def body(self) -> "_RowProgram":
        return _RowProgram(_jax.body(self._eqn), self.shared, self._lead)

    def _derived(
        self,
        derive: Callable[..., Any],
        more: Sequence[Any] = (),
        shared: Sequence[bool] = (),
    ) -> "_RowProgram":
        """``derive(run, primals, more)``: ``run`` is the call, of its inexact operands."""

        def whole(operands: Values, more: Values) -> Any:
            def of_inexact(*primals: Any) -> tuple[Any, ...]:
                inputs = list(operands)
                for i, primal in zip(self._inexact, primals, strict=True):
                    inputs[i] = primal
                return tuple(_jax.bind(self._eqn, inputs))

            return derive(of_inexact, [operands[i] for i in self._inexact], more)

        program = jax.make_jaxpr(whole)(self._avals, more)
        return _RowProgram(program, [*self.shared, *shared], self._lead)


class _WithJvp(_Function):
    def forward(self, number: int, values: Values, count: int) -> jax.Array:
        zeros = (jnp.zeros_like(values[i]) for i in self._inexact)
        return self.rule([*values, *zeros], count)[number]

    def make(self, count: int) -> Callable[..., Any]:
        @jax.custom_jvp
        def function(*values: Any) -> Any:
            return self.body(values, count)

        @function.defjvp
        def derivative(primals: Any, tangents: Any) -> Any:
            outputs = self.rule([*primals, *(tangents[i] for i in self._inexact)], count)
            half = len(outputs) // 2
            return outputs[:half], outputs[half:]

        return cast(Callable[..., Any], function)

    def check_programs(self, within: frozenset[Any]) -> None:
        super().check_programs(within)
        self.rule.check(within)

    @functools.cached_property
    def rule(self) -> "_RowProgram":
        """The JVP rule: from operands and tangents to outputs and their tangents.

        The outputs are computed as the rule does: their derivative is that of the rule.
        """
        tangents = [self._avals[i] for i in self._inexact]
        return self._derived(jax.jvp, tangents, [self.shared[i] for i in self._inexact])


class _WithVjp(_Function):
    def forward(self, number: int, values: Values, count: int) -> jax.Array:
        return self.ahead(values, count)[number]

    def make(self, count: int) -> Callable[..., Any]:
        @jax.custom_vjp
        def function(*values: Any) -> Any:
            return self.body(values, count)

        def forward(*values: Any) -> Any:
            return self.ahead(values, count), values

        def backward(values: Any, cotangents: Any) -> Any:
            left = iter(self.back([*values, *cotangents], count))
            every = range(len(values))
            return tuple(next(left) if i in self._inexact else None for i in every)

        function.defvjp(forward, backward)
        return cast(Callable[..., Any], function)

    def check_programs(self, within: frozenset[Any]) -> None:
        super().check_programs(within)
        self.ahead.check(within)
        self.back.check(within, [self.shared[i] for i in self._inexact])
        operands = [_Dependence.NONE] * len(self._avals)
        cotangents = [_Dependence.LINEAR] * len(self._eqn.outvars)
        try:
            outputs = _Linearity().program(self.back.program, [*operands, *cotangents])
        except _NotLinearError:
            raise _MixesRowsError from None
        if _Dependence.NONE in outputs:  # not zero where the cotangent is
            raise _MixesRowsError

    @functools.cached_property
    def ahead(self) -> "_RowProgram":
        """The forward rule's outputs."""
        return self._derived(lambda run, primals, _: jax.vjp(run, *primals)[0])

    @functools.cached_property
    def back(self) -> "_RowProgram":
        """The backward rule: from operands and output cotangents to operand cotangents."""
        cotangents = [_aval(x) for x in self._eqn.outvars]
        pull_back = lambda run, primals, x: jax.vjp(run, *primals)[1](tuple(x))  # noqa: E731
        return self._derived(pull_back, cotangents, [False] * len(cotangents))


def _aval(atom: Atom) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(_jax.shape_of(atom), atom.aval.dtype)


# --- a program of rows ------------------------------------------------------------------


class _RowProgram:
    """A program of whole arrays, applied to n rows of them, as of a :class:`_Function`."""

    def __init__(self, program: Program, shared: Sequence[bool], lead: int) -> None:
        self.program, self._shared, self._lead = program, shared, lead

    def check(self, within: frozenset[Any], shared: Sequence[bool] | None = None) -> None:
        """Raises _MixesRowsError if the program does not treat every row alike.

        ``shared`` are the outputs that serve all rows; None: there are none.
        """
        outputs = self._outputs([None] * len(self._shared), within)
        for view, one in zip(outputs, shared or [False] * len(outputs), strict=True):
            alike = isinstance(view, View) and row_by_row(flat(view))
            if isinstance(view, View) if one else not alike:
                raise _MixesRowsError

    def __call__(self, values: Values, count: int) -> tuple[jax.Array, ...]:
        """The outputs of n rows."""
        outputs = self._outputs(values, None)
        reader = Reader(lambda table, ids: values[table.leaf])
        ids = RowIds((), jnp.arange(count))
        return tuple(
            reader.rows(flat(x), ids) if isinstance(x, View) else x for x in outputs
        )

    def _outputs(self, values: Values, within: frozenset[Any] | None) -> Values:
        invars, inputs = self.program.invars, list(values)
        rows = _jax.shape_of(invars[self._shared.index(False)])[: self._lead]
        for i, atom in enumerate(invars):
            if not self._shared[i]:
                row = _jax.shape_of(atom)[self._lead :]
                table = TableView((math.prod(rows), *row), atom.aval.dtype, i)
                inputs[i] = folded(table, rows)
        return _RowWalk(rows, within).program(self.program, inputs)


class _RowWalk(ProgramWalk):
    """A walk with views where a program has rows, and values where it has none.

    ``rows`` are the sizes of the axes that number the rows of the views that go in. There
    are values where ``within``, as in :func:`with_own_derivative`, is None; elsewhere each
    value is None.
    """

    def __init__(self, rows: tuple[int, ...], within: frozenset[Any] | None) -> None:
        self._rows, self._within = rows, within

    def constant(self, value: Any) -> Any:
        return value

    def equation(self, eqn: Equation, operands: Values, scope: Scope) -> Values:
        if any(isinstance(x, View) for x in operands):
            return super().equation(eqn, operands, scope)
        view = _repeated(eqn, operands, self._rows)
        if view is not None:
            return [view]
        if self._within is None:
            return _jax.bind(eqn, operands)
        return [None] * len(eqn.outvars)

    def custom(self, eqn: Equation, operands: Values, needs_grad: list[bool]) -> Values:
        return _or_mixed(with_own_derivative(eqn, operands, self._within))

    def step(self, eqn: Equation, operands: Values, scope: Scope) -> Values:
        return _or_mixed(rowwise(eqn, operands, _refuse_whole))


def _or_mixed(views: list[View] | None) -> list[View]:
    if views is None:
        raise _MixesRowsError
    return views


def _repeated(eqn: Equation, operands: Values, rows: tuple[int, ...]) -> View | None:
    """A view of one row repeated, such as ``jnp.zeros_like(table)``."""
    if eqn.primitive.name != "broadcast_in_dim" or len(operands) > 1:
        return None
    dims = tuple(eqn.params["broadcast_dimensions"])
    shape = _jax.shape_of(eqn.outvars[0])
    row = shape[len(rows) :]
    if shape[: len(rows)] != rows or any(d < len(rows) for d in dims):
        return None
    inside = [1 + d - len(rows) for d in dims]

    def apply(values: Values, count: int) -> jax.Array:
        return jax.lax.broadcast_in_dim(values[0], (count, *row), inside)

    flat_shape, dtype = (math.prod(rows), *row), eqn.outvars[0].aval.dtype
    run = Keyed(apply, ("one row", *dims))
    return folded(Rowwise(flat_shape, dtype, run, tuple(operands), (True,)), rows)


def _refuse_whole(whole: Any) -> Any:
    raise _MixesRowsError


def row_by_row(view: View) -> bool:
    """True if row i depends on row i of the inputs and on no other row."""
    left, visited = [view], set[View]()
    while left:
        view = left.pop()
        if isinstance(view, TableView) or view in visited:
            continue
        if not isinstance(view, Rowwise | Unslotted):
            return False
        visited.add(view)
        left += [part for part, at in view.parts(RowIds()) if at is not None]
    return True


# --- linear in the cotangents -----------------------------------------------------------


class _Dependence(enum.Enum):
    """How a variable depends on cotangents."""

    NONE = enum.auto()
    #: Not at all, and it is nothing but zeros.
    ZERO = enum.auto()
    LINEAR = enum.auto()


class _Linearity(ProgramWalk):
    """Raises _NotLinearError unless all dependence on the cotangents is linear."""

    def constant(self, value: Any) -> _Dependence:
        is_zero = not isinstance(value, jax.Array) and not np.any(value)
        return _Dependence.ZERO if is_zero else _Dependence.NONE

    def equation(self, eqn: Equation, operands: Values, scope: Scope) -> Values:
        if _Dependence.LINEAR in operands:
            if not all(map(carries_gradient, eqn.outvars)):  # a cast to integers
                raise _NotLinearError
            return super().equation(eqn, operands, scope)
        alike = eqn.primitive.name in ("broadcast_in_dim", "convert_element_type")
        return [operands[0] if alike else _Dependence.NONE] * len(eqn.outvars)

    def step(self, eqn: Equation, operands: Values, scope: Scope) -> Values:
        if not _is_linear(eqn, operands):
            raise _NotLinearError
        return [_Dependence.LINEAR] * len(eqn.outvars)


def _is_linear(eqn: Equation, operands: Sequence[_Dependence]) -> bool:
    """True if an equation is jointly linear in its linear operands."""
    name = eqn.primitive.name
    linear = [x is _Dependence.LINEAR for x in operands]
    if name == "select_n":
        return not linear[0] and _Dependence.NONE not in operands[1:]
    if name in ("add", "add_any", "sub", "concatenate"):
        return _Dependence.NONE not in operands
    if name in ("mul", "dot_general"):
        return sum(linear) == 1
    if name == "div":
        return linear == [True, False]
    return len(operands) == 1 and eqn.primitive in ad.primitive_transposes
