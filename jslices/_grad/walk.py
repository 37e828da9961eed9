"""The one walk over traced programs, and its form for views of tables.

A :class:`ProgramWalk` goes through the equations of a program in order, and into the
programs of calls, with one value for each variable. Its visitors decide what a value is,
and what an equation makes of its operands:

    Planner, Runner   views of tables, without and with arrays (plan.py, run.py)
    _RowWalk          views of rows of one function            (custom.py)
    _Linearity        how a variable depends on cotangents     (custom.py)
    _UnreadSearch     the tables whose elements an array holds (unread.py)
    _UpdateWalk       rows of an optimizer, touched or not   (untouched.py)

Planner and runner are both a :class:`ViewWalk`: what a program computes from tables stays a
*view* of them (views.py) for as long as possible. An equation that gets a view is one of
four things, tried in this order:

    a call, a loop, a branch ...    the walk goes inside
    a row-wise step                 gives views                (rules.py, custom.py)
    a read                          gives rows                 (reads.py, products.py)
    anything else                   needs the whole array: a dense use

As it is the same walk, planner and runner meet the same reads in the same order.
"""

import abc
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jslices import _jax
from jslices._grad.memo import first_program
from jslices._grad.origins import Origins
from jslices._grad.reads import READS, RowRead
from jslices._grad.rules import rowwise
from jslices._grad.views import Repeated, Values, View, layer, without_slots
from jslices._jax import Atom, Equation, Literal, Program, Source

# By name, as JAX exports few of these primitives and renames them.
_CALLS = ("jit", "closed_call", "core_call", "call", "eval_jaxpr")
CUSTOM = ("custom_jvp_call", "custom_vjp_call")
#: The equations with programs inside, and the method of a walk that goes into them. A walk
#: without this method treats the equation as a step.
_INSIDE = {
    **dict.fromkeys(_CALLS, "call"),
    **dict.fromkeys(("remat2", "checkpoint"), "checkpoint"),
    **dict.fromkeys(CUSTOM, "custom"),
    "cond": "cond",
    "scan": "scan",
}


# --- one program ------------------------------------------------------------------------


def carries_gradient(atom: Atom) -> bool:
    """True if a gradient can flow through this variable: its dtype is inexact."""
    dtype = getattr(atom.aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


class Scope:
    """One program on a walk: which equations are live, and where gradients pass.

    ``output_needs_grad`` says for each output whether it receives a gradient. An auxiliary
    output, say, receives none, so equations that only lead to it do not matter. It is empty
    for walks that do not use it.
    """

    def __init__(self, program: Program, output_needs_grad: Sequence[bool] = ()) -> None:
        self.program = program
        #: From a variable of the program to its value on the walk, so far.
        self.read: Callable[[Atom], Any]
        #: The equations that an output or a side effect depends on, in order.
        self.live: list[Equation] = []
        #: The variables through which a gradient reaches the inputs.
        self.grad_vars: set[Any] = {
            v
            for v, needs_grad in zip(program.outvars, output_needs_grad, strict=False)
            if needs_grad and not isinstance(v, Literal) and carries_gradient(v)
        }
        #: The variables that a live equation or an output reads.
        self.used: set[Any] = {v for v in program.outvars if not isinstance(v, Literal)}
        for eqn in reversed(program.eqns):
            if not eqn.effects and self.used.isdisjoint(eqn.outvars):
                continue
            self.live.append(eqn)
            variables = [v for v in eqn.invars if not isinstance(v, Literal)]
            self.used.update(variables)
            if self.passes_gradient(eqn):
                self.grad_vars.update(filter(carries_gradient, variables))
        self.live.reverse()

    def passes_gradient(self, eqn: Equation) -> bool:
        """True if a gradient may reach this equation, through its outputs or a ref."""
        if eqn.primitive.name == "stop_gradient":
            return False
        if not self.grad_vars.isdisjoint(eqn.outvars):
            return True
        # A mutable array (`jax.new_ref`) may pass a gradient to later readers.
        kinds = {type(atom.aval).__name__ for atom in (*eqn.invars, *eqn.outvars)}
        return "AbstractRef" in kinds

    def outputs_need_grad(self, eqn: Equation) -> list[bool]:
        """For each output of an equation whether it receives a gradient."""
        return [v in self.grad_vars for v in eqn.outvars]

    @functools.cached_property
    def times_linearized(self) -> dict[int, int]:
        """How many equations alike a gradient passes, by the ``id`` of each.

        Without those that it does not pass, and those without an operation to compare.
        """
        passing = (eqn for eqn in self.live if self.passes_gradient(eqn))
        operations = {id(eqn): _jax.operation(eqn) for eqn in passing}
        times = Counter(operations.values())
        return {x: times[operation] for x, operation in operations.items() if operation}

    @functools.cached_property
    def origins(self) -> Origins:
        return Origins(self.program)


# --- the walk ---------------------------------------------------------------------------


class ProgramWalk(abc.ABC):
    """A walk over a program with a value for every variable.

    A visitor defines the values of constants (:meth:`constant`) and of an equation's
    outputs (:meth:`step`). To go into loops, branches and programs other than those of
    calls it has methods with the names in ``_INSIDE``, which take the equation, the
    operands and for each output whether it receives a gradient.
    """

    #: The source of the enclosing call of a JAX library function, if any: JAX keeps the
    #: trace of such a function with the lines of its first caller.
    caller: Source | None = None

    def program(
        self, program: Program, operands: Values, output_needs_grad: Sequence[bool] = ()
    ) -> Values:
        """The values of the outputs; ``output_needs_grad`` as in :class:`Scope`."""
        scope = Scope(program, output_needs_grad)
        values = dict(zip(program.invars, operands, strict=True))
        constants = map(self.constant, _jax.constants(program))
        values.update(zip(program.constvars, constants, strict=True))

        def read(atom: Atom) -> Any:
            return self.constant(atom.val) if isinstance(atom, Literal) else values[atom]

        scope.read = read
        for eqn in scope.live:
            outputs = self.equation(eqn, [read(atom) for atom in eqn.invars], scope)
            values.update(zip(eqn.outvars, outputs, strict=True))
        return [read(atom) for atom in program.outvars]

    def equation(self, eqn: Equation, operands: Values, scope: Scope) -> Values:
        """The values of an equation's outputs."""
        if not hasattr(self, _INSIDE.get(_jax.kind(eqn), "")):
            return self.step(eqn, operands, scope)
        return self.inside(eqn, operands, scope.outputs_need_grad(eqn))

    def inside(self, eqn: Equation, operands: Values, needs_grad: list[bool]) -> Values:
        """The outputs of an equation with programs inside that the walk goes into."""
        go_inside = getattr(self, _INSIDE[_jax.kind(eqn)])
        return go_inside(eqn, operands, needs_grad)

    @abc.abstractmethod
    def constant(self, value: Any) -> Any:
        """The value of a literal, or of a constant of the program."""

    @abc.abstractmethod
    def step(self, eqn: Equation, operands: Values, scope: Scope) -> Values:
        """The outputs of an equation that the walk does not go into."""

    def call(self, eqn: Equation, operands: Values, needs_grad: list[bool]) -> Values:
        """The outputs of a call: those of the program inside it."""
        outer = self.caller
        if outer is None and _jax.is_library_call(eqn):
            self.caller = eqn.source_info
        outputs = self.program(_jax.body(eqn), operands, needs_grad)
        self.caller = outer
        return outputs

    def source(self, eqn: Equation) -> Source:
        """Where an equation comes from, in the user's program."""
        return self.caller or eqn.source_info


# --- with views of tables ---------------------------------------------------------------


#: The body of a loop: from what it carries and scans over to what it carries and stacks.
Turn = Callable[[Values, Values], tuple[Values, Values]]


class ViewWalk(ProgramWalk):
    """A walk with views of tables, and with arrays or None in their place.

    Subclasses receive control flow as calls of JAX's public functions.
    """

    #: True if plans and compiled programs of the programs inside equations are kept, as no
    #: ``jax.jit`` around them does.
    eager: bool

    def program(
        self, program: Program, operands: Values, output_needs_grad: Sequence[bool] = ()
    ) -> Values:
        """The program's outputs: views if they were computed from rows of tables alone."""
        outputs = super().program(program, operands, output_needs_grad)
        return [
            value if needs_grad else without_slots(value)
            for value, needs_grad in zip(outputs, output_needs_grad, strict=True)
        ]

    def equation(self, eqn: Equation, operands: Values, scope: Scope) -> Values:
        if not any(isinstance(value, View) for value in operands):
            return self.bind(eqn, operands, scope)
        if not scope.passes_gradient(eqn):
            operands = [without_slots(value) for value in operands]
        if eqn.primitive.name == "while":
            operands = _with_gradient(eqn, operands)
        if self.eager and is_kept(eqn):
            return self.part(eqn, operands, scope.outputs_need_grad(eqn))
        return super().equation(eqn, operands, scope)

    def step(self, eqn: Equation, operands: Values, scope: Scope) -> Values:
        whole = functools.partial(self.whole, eqn=eqn)
        views = rowwise(eqn, operands, whole)
        if views is not None:
            return views
        form = READS.get(eqn.primitive.name)
        read = None if form is None else form(eqn, operands, scope.origins)
        if read is not None:
            values = [
                None if i == read.operand else whole(x) for i, x in enumerate(operands)
            ]
            if read.beside is not None:
                values.append(whole(scope.read(read.beside)))
            with eqn.ctx.manager:
                return [self.read(eqn, read, values)]
        return self.bind(eqn, [whole(value) for value in operands], scope)

    def checkpoint(self, eqn: Equation, operands: Values, needs_grad: list[bool]) -> Values:
        def function(values: Values) -> Values:
            left = iter(values)
            inputs = [x if isinstance(x, View) else next(left) for x in operands]
            outputs = self.program(_jax.body(eqn), inputs, needs_grad)
            return [self.whole(value, eqn) for value in outputs]

        return self.rematerialise(eqn, function, operands)

    def cond(self, eqn: Equation, operands: Values, needs_grad: list[bool]) -> Values:
        index, *inputs = operands

        def branch(program: Program) -> Values:
            outputs = self.program(program, inputs, needs_grad)
            return [self.whole(value, eqn) for value in outputs]

        branches = [functools.partial(branch, x) for x in eqn.params["branches"]]
        return self.switch(self.whole(index, eqn), branches)

    def scan(self, eqn: Equation, operands: Values, needs_grad: list[bool]) -> Values:
        """Views enter a loop as constants or as carries that the body returns unchanged.

        If several axes number the rows of an array, such as a table for each layer, each
        turn gets the view of its own part.
        """
        body, (num_consts, num_carried) = _jax.body(eqn), _jax.scan_counts(eqn.params)
        scanned = operands[num_consts + num_carried :]
        if any(isinstance(x, View) and x.lead == 1 for x in scanned):
            views = rowwise(eqn, operands, functools.partial(self.whole, eqn=eqn))
            if views is not None:
                return views
        consts = operands[:num_consts]
        carried = operands[num_consts : num_consts + num_carried]
        unchanged = {
            i: value
            for i, value in enumerate(carried)
            if isinstance(value, View) and body.outvars[i] is body.invars[num_consts + i]
        }
        changing = [self.whole(x, eqn) for i, x in enumerate(carried) if i not in unchanged]
        xs = list(scanned)
        layers = {i: x for i, x in enumerate(xs) if isinstance(x, Repeated)}
        length = eqn.params["length"]
        count = jnp.arange if _jax.is_symbolic(length) else np.arange
        number = self.constant(count(length, dtype=np.int32)) if layers else None
        xs = [number if i in layers else self.whole(x, eqn) for i, x in enumerate(xs)]
        # Carried values may feed anything in the next turn: if there is a gradient at all,
        # every carry is assumed to receive one.
        inside_need_grad = [any(needs_grad)] * num_carried + needs_grad[num_carried:]

        def with_unchanged(changing: Sequence[Any]) -> Values:
            left = iter(changing)
            every = range(num_carried)
            return [unchanged[i] if i in unchanged else next(left) for i in every]

        def turn(changing: Values, xs: Values) -> tuple[Values, Values]:
            per_turn = [layer(layers[i], x) if i in layers else x for i, x in enumerate(xs)]
            inputs = [*consts, *with_unchanged(changing), *per_turn]
            outputs = self.program(body, inputs, inside_need_grad)
            new = [x for i, x in enumerate(outputs[:num_carried]) if i not in unchanged]
            return (
                [self.whole(x, eqn) for x in new],
                [self.whole(x, eqn) for x in outputs[num_carried:]],
            )

        final, ys = self.loop(eqn, turn, changing, xs)
        return [*with_unchanged(final), *ys]

    def bind(self, eqn: Equation, operands: Values, scope: Scope) -> Values:
        """The outputs of an equation that no view goes into: without values, None."""
        return [None] * len(eqn.outvars)

    @abc.abstractmethod
    def whole(self, value: Any, eqn: Equation | None) -> Any:
        """The array behind a view, which ``eqn`` needs; anything else as it is."""

    @abc.abstractmethod
    def read(self, eqn: Equation, read: RowRead, values: Values) -> Any:
        """The output of a read; ``values`` are the operands, None for the view."""

    @abc.abstractmethod
    def part(self, eqn: Equation, operands: Values, needs_grad: list[bool]) -> Values:
        """The outputs of an equation for which :func:`is_kept` is True."""

    @abc.abstractmethod
    def loop(
        self, eqn: Equation, turn: Turn, carry: Values, xs: Values
    ) -> tuple[Values, Values]:
        """``lax.scan(turn, carry, xs)``."""

    @abc.abstractmethod
    def switch(self, index: Any, branches: Sequence[Callable[[], Values]]) -> Values:
        """``lax.switch(index, branches)``."""

    @abc.abstractmethod
    def rematerialise(
        self, eqn: Equation, function: Callable[[Values], Values], operands: Values
    ) -> Values:
        """``jax.checkpoint(function)(values)`` for the operands that are not views."""


def _with_gradient(eqn: Equation, operands: Values) -> Values:
    """The operands of a while loop, without slots where no gradient leaves its body."""
    first, body = eqn.params["cond_nconsts"], eqn.params["body_jaxpr"]
    grad_vars = Scope(body, [True] * len(body.outvars)).grad_vars
    inside = [None] * first + list(body.invars)
    return [
        x if v in grad_vars else without_slots(x)
        for x, v in zip(operands, inside, strict=True)
    ]


def is_kept(eqn: Equation) -> bool:
    """True if plans of an equation can be kept for later calls.

    JAX traces a function with a derivative of its own anew at every call. Reads in a
    function of JAX's have the lines of its caller.
    """
    visit = _INSIDE.get(_jax.kind(eqn), "custom")
    if visit == "custom" or first_program(eqn) is None:
        return False
    return visit != "call" or not _jax.is_library_call(eqn)
