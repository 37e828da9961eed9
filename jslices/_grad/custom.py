"""Functions with derivatives of their own, as steps that treat every row alike.

JAX traces ``f`` of a ``custom_jvp`` or ``custom_vjp``, and its derivative, for the whole
table. If both treat every row alike, they say what ``f`` and its derivative do to n rows:
a function of n rows is made of them, with that derivative. Then ``f(table)[ids]`` is
``f(table[ids])`` under every kind of differentiation.
"""

import functools
import itertools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from jslices import _jax
from jslices._grad.rules import rowwise
from jslices._grad.views import (
    Ids,
    Reader,
    Rowwise,
    Table,
    Transposed,
    Unslotted,
    View,
    flat,
    folded,
    leading,
)

_CALLS = ("jit", "pjit", "closed_call", "core_call", "call", "eval_jaxpr")
_CUSTOM = ("custom_jvp_call", "custom_vjp_call")


class _MixesRowsError(Exception):
    """A program turns out not to treat every row alike."""


def with_own_derivative(
    eqn: _jax.Equation, operands: Sequence[Any], within: frozenset[Any] | None = frozenset()
) -> list[View] | None:
    """The outputs of a ``custom_jvp`` or ``custom_vjp`` as views.

    Args:
      eqn: the call, with at least one view among its operands.
      operands: for each operand a view, or its value (None while lookups are planned).
      within: the functions whose derivatives are being checked: many a derivative calls its
        own function. None if this call was checked with one of them.

    Returns:
      One view per output; None if the function or its derivative mixes rows, or if the
      derivative is not linear: what it does to a sum of rows is then not the sum of what it
      does to each.
    """
    views = [x for x in operands if isinstance(x, View)]
    lead = leading(views[0])
    rows = views[0].shape[:lead]
    if any(
        isinstance(x, Transposed) or leading(x) != lead or x.shape[:lead] != rows
        for x in views
    ):
        return None
    if not all(map(_jax.carries_gradient, eqn.outvars)):
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
        apply = functools.partial(function.output, number)
        shared, key = tuple(function.shared), (function, number)
        view = Rowwise((count, *row), out.aval.dtype, apply, inner, shared, key)
        outputs.append(folded(view, rows))
    return outputs


#: Of the functions that JAX keeps: which were checked, and whether they passed.
_checked: weakref.WeakKeyDictionary[Any, dict[Any, bool]] = weakref.WeakKeyDictionary()


class _Function:
    """A call of a function with a derivative of its own, for n rows.

    Args:
      eqn: the call.
      shared: which operands serve all rows.
      lead: how many axes number the rows of the others.
    """

    def __init__(self, eqn: _jax.Equation, shared: Sequence[bool], lead: int) -> None:
        self.shared = shared
        self._eqn, self._lead = eqn, lead
        self._avals = [_aval(x) for x in eqn.invars]
        self._inexact = [i for i, x in enumerate(eqn.invars) if _jax.carries_gradient(x)]

    def output(self, number: int, values: Sequence[Any], count: int) -> jax.Array:
        """One output ``[n, *D]`` of n rows."""
        outputs: Sequence[jax.Array] = self.make(count)(*values)
        return outputs[number]

    def make(self, count: int) -> Callable[..., Any]:
        """The function of this many rows."""
        raise NotImplementedError

    def check(self, within: frozenset[Any] | None) -> None:
        """Raises _MixesRowsError if function and derivative do not treat rows alike."""
        source = _jax.source(self._eqn), *map(str, self._avals)
        if within is None or source in within:
            return
        if within:
            return self.check_programs(within | {source})
        known = _checked.setdefault(self.body.program, {})
        key = (tuple(self.shared), self._lead)
        if key not in known:
            known[key] = False
            self.check_programs(frozenset({source}))
            known[key] = True
        if not known[key]:
            raise _MixesRowsError

    def check_programs(self, within: frozenset[Any]) -> None:
        self.body.check(within)

    @functools.cached_property
    def body(self) -> "_RowProgram":
        return _RowProgram(_jax.body(self._eqn), self.shared, self._lead)

    def _of_inexact(self, operands: Sequence[Any]) -> tuple[Callable[..., Any], list[Any]]:
        """The call as a function of the operands that have derivatives, and these."""

        def run(*primals: Any) -> tuple[Any, ...]:
            given = list(operands)
            for i, primal in zip(self._inexact, primals, strict=True):
                given[i] = primal
            return tuple(_jax.bind(self._eqn, given))

        return run, [operands[i] for i in self._inexact]


class _WithJvp(_Function):
    def make(self, count: int) -> Callable[..., Any]:
        @jax.custom_jvp
        def function(*values: Any) -> Any:
            return self.body(values, count)

        @function.defjvp
        def derivative(primals: Any, tangents: Any) -> Any:
            found = self.rule([*primals, *(tangents[i] for i in self._inexact)], count)
            half = len(found) // 2
            return found[:half], found[half:]

        made: Callable[..., Any] = function
        return made

    def check_programs(self, within: frozenset[Any]) -> None:
        super().check_programs(within)
        self.rule.check(within)

    @functools.cached_property
    def rule(self) -> "_RowProgram":
        """From the operands and their tangents to the outputs and theirs.

        The outputs are computed as the rule does: their derivative is that of the rule.
        """

        def forward(operands: Sequence[Any], tangents: Sequence[Any]) -> Any:
            run, primals = self._of_inexact(operands)
            return jax.jvp(run, primals, list(tangents))

        tangents = [self._avals[i] for i in self._inexact]
        shared = [*self.shared, *(self.shared[i] for i in self._inexact)]
        program = jax.make_jaxpr(forward)(self._avals, tangents)
        return _RowProgram(program, shared, self._lead)


class _WithVjp(_Function):
    def make(self, count: int) -> Callable[..., Any]:
        @jax.custom_vjp
        def function(*values: Any) -> Any:
            return self.body(values, count)

        def forward(*values: Any) -> Any:
            return self.ahead(values, count), values

        def backward(values: Any, cotangents: Any) -> Any:
            found = iter(self.back([*values, *cotangents], count))
            every = range(len(values))
            return tuple(next(found) if i in self._inexact else None for i in every)

        function.defvjp(forward, backward)
        made: Callable[..., Any] = function
        return made

    def check_programs(self, within: frozenset[Any]) -> None:
        super().check_programs(within)
        self.ahead.check(within)
        self.back.check(within, [self.shared[i] for i in self._inexact])
        operands = [False] * len(self._avals)
        if not is_linear(
            self.back.program, [*operands, *(True for _ in self._eqn.outvars)]
        ):
            raise _MixesRowsError

    @functools.cached_property
    def ahead(self) -> "_RowProgram":
        """The outputs as the forward rule gives them."""

        def forward(operands: Sequence[Any]) -> Any:
            run, primals = self._of_inexact(operands)
            return jax.vjp(run, *primals)[0]

        program = jax.make_jaxpr(forward)(self._avals)
        return _RowProgram(program, self.shared, self._lead)

    @functools.cached_property
    def back(self) -> "_RowProgram":
        """From the operands and the cotangents of the outputs to those of the operands."""

        def pull_back(operands: Sequence[Any], cotangents: Sequence[Any]) -> Any:
            run, primals = self._of_inexact(operands)
            return jax.vjp(run, *primals)[1](tuple(cotangents))

        cotangents = [_aval(x) for x in self._eqn.outvars]
        shared = [*self.shared, *(False for _ in cotangents)]
        program = jax.make_jaxpr(pull_back)(self._avals, cotangents)
        return _RowProgram(program, shared, self._lead)


def _aval(atom: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(_jax.shape_of(atom), atom.aval.dtype)


# --- a program of rows ------------------------------------------------------------------


class _RowProgram:
    """A program of whole arrays as one of n rows of them.

    Args:
      program: the program.
      shared: which of its inputs serve all rows.
      lead: how many axes number the rows of the others.
    """

    def __init__(self, program: _jax.Program, shared: Sequence[bool], lead: int) -> None:
        self.program, self._shared, self._lead = program, shared, lead

    def check(self, within: frozenset[Any], shared: Sequence[bool] | None = None) -> None:
        """Raises _MixesRowsError if the program does not treat every row alike.

        ``shared`` are the outputs that serve all rows; None: there are none.
        """
        outputs = self._walk([None] * len(self._shared), within)
        for view, one in zip(outputs, shared or [False] * len(outputs), strict=True):
            alike = isinstance(view, View) and _row_by_row(flat(view), set())
            if isinstance(view, View) if one else not alike:
                raise _MixesRowsError

    def __call__(self, values: Sequence[Any], count: int) -> tuple[jax.Array, ...]:
        """The outputs of n rows."""
        outputs = self._walk(values, None)
        reader = Reader(lambda table, ids: values[table.leaf], slotted=False)
        ids = Ids((), jnp.arange(count))
        return tuple(
            reader.rows(flat(x), ids) if isinstance(x, View) else x for x in outputs
        )

    def _walk(self, values: Sequence[Any], within: frozenset[Any] | None) -> list[Any]:
        invars, inputs = self.program.invars, list(values)
        rows, _ = _split(_jax.shape_of(invars[self._shared.index(False)]), self._lead)
        for i, atom in enumerate(invars):
            if not self._shared[i]:
                _, row = _split(_jax.shape_of(atom), self._lead)
                table = Table((math.prod(rows), *row), atom.aval.dtype, i)
                inputs[i] = folded(table, rows)
        return _walk(self.program, inputs, rows, within)


def _split(shape: tuple[int, ...], lead: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return shape[:lead], shape[lead:]


def _walk(
    program: _jax.Program,
    inputs: Sequence[Any],
    rows: tuple[int, ...],
    within: frozenset[Any] | None,
) -> list[Any]:
    """The outputs of a program, views where they have rows.

    ``rows`` are the sizes of the axes that number the rows of the views that go in.
    Without values while it is checked (see :func:`with_own_derivative`).
    """
    env = dict(zip(program.invars, inputs, strict=True))
    env.update(zip(program.constvars, _jax.constants(program), strict=True))
    for eqn in _jax.live_equations(program):
        given = [_jax.read(atom, env) for atom in eqn.invars]
        outputs: Sequence[Any] | None
        if not any(isinstance(x, View) for x in given):
            outputs = [None] * len(eqn.outvars)
            outputs = outputs if within is not None else _jax.bind(eqn, given)
            if (view := _repeated(eqn, given, rows)) is not None:
                outputs = [view]
        elif eqn.primitive.name in _CALLS:
            outputs = _walk(_jax.body(eqn), given, rows, within)
        elif _jax.kind(eqn) in _CUSTOM:
            outputs = with_own_derivative(eqn, given, within)
        else:
            outputs = rowwise(eqn, given, _refuse)
        if outputs is None:
            raise _MixesRowsError
        env.update(zip(eqn.outvars, outputs, strict=True))
    return [_jax.read(atom, env) for atom in program.outvars]


def _repeated(
    eqn: _jax.Equation, operands: Sequence[Any], rows: tuple[int, ...]
) -> View | None:
    """One row for all, such as zeros, as a view: ``jnp.zeros_like(table)``."""
    if eqn.primitive.name != "broadcast_in_dim" or len(operands) > 1:
        return None
    dims = tuple(eqn.params["broadcast_dimensions"])
    sizes, row = _split(_jax.shape_of(eqn.outvars[0]), len(rows))
    if sizes != rows or any(d < len(rows) for d in dims):
        return None
    inside = [1 + d - len(rows) for d in dims]

    def apply(values: Sequence[Any], count: int) -> jax.Array:
        return jax.lax.broadcast_in_dim(values[0], (count, *row), inside)

    shape, dtype = (math.prod(rows), *row), eqn.outvars[0].aval.dtype
    key = ("one row", *dims)
    return folded(Rowwise(shape, dtype, apply, tuple(operands), (True,), key), rows)


def _refuse(whole: Any) -> Any:
    raise _MixesRowsError


def _row_by_row(view: View, known: set[View]) -> bool:
    """True if row i is made from the rows i of the inputs, and from nothing else's rows."""
    if view in known:
        return True
    known.add(view)
    if isinstance(view, Table):
        return True
    if not isinstance(view, Rowwise | Unslotted):
        return False
    return all(
        at is None or (isinstance(part, View) and _row_by_row(part, known))
        for part, at in view.parts(Ids())
    )


# --- linear in the cotangents -----------------------------------------------------------


def is_linear(program: _jax.Program, given: Sequence[bool]) -> bool:
    """True if a program is surely linear in these of its inputs, taken together."""
    return _linear_outputs(program, given, [False] * len(given)) is not None


def _linear_outputs(
    program: _jax.Program, given: Sequence[bool], zero: Sequence[bool]
) -> list[bool] | None:
    """Which outputs depend on the inputs ``given``; None if some may not do so linearly.

    ``zero`` are inputs that are nothing but zeros.
    """
    linear = set(itertools.compress(program.invars, given))
    zeros = set(itertools.compress(program.invars, zero))

    def is_zero(atom: Any) -> bool:
        return not atom.val if isinstance(atom, _jax.Literal) else atom in zeros

    def depends_on(atom: Any) -> bool:
        return not isinstance(atom, _jax.Literal) and atom in linear

    for eqn in program.eqns:
        name, atoms = eqn.primitive.name, eqn.invars
        which = [i for i, x in enumerate(atoms) if depends_on(x)]
        if not which:
            if name in ("broadcast_in_dim", "convert_element_type") and is_zero(atoms[0]):
                zeros.update(eqn.outvars)
            continue
        depends: list[bool] | None = [True] * len(eqn.outvars)
        if not all(map(_jax.carries_gradient, eqn.outvars)):  # such as a cast to integers
            depends = None
        elif name in _CALLS:
            depends = _linear_outputs(
                _jax.body(eqn), list(map(depends_on, atoms)), list(map(is_zero, atoms))
            )
        elif name in ("add", "add_any", "sub", "concatenate", "select_n"):
            terms = range(1 if name == "select_n" else 0, len(atoms))
            if not set(which) <= set(terms) or not all(
                i in which or is_zero(atoms[i]) for i in terms
            ):
                depends = None
        elif name in ("mul", "dot_general"):
            depends = depends if len(which) == 1 else None
        elif name == "div":
            depends = depends if which == [0] else None
        elif len(atoms) > 1 or eqn.primitive not in ad.primitive_transposes:
            depends = None
        if depends is None:
            return None
        linear.update(x for x, yes in zip(eqn.outvars, depends, strict=True) if yes)
    return [depends_on(x) for x in program.outvars]
