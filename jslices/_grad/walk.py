"""Reading a traced program: where tables are looked up, and where they are used whole."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jslices import _jax
from jslices._grad import lookups, rules
from jslices._grad.views import Table, View, without_slots
from jslices._rows.bounds import index_dtype

# A plan is a list with an entry for every equation that looks rows up or holds a
# program that might, in the order of the program: sites, or plans. `evaluate` meets the
# same equations in the same order.
Plan = list[Any]

#: Calls of a sub-program that mean the sub-program itself.
CALLS = frozenset({"jit", "pjit", "closed_call", "core_call", "call", "custom_lin"})
REMAT = frozenset({"remat2", "checkpoint", "remat"})


@dataclasses.dataclass(frozen=True)
class Site:
    """One place that looks up rows of one leaf."""

    leaf: int
    table_shape: tuple[int, ...]
    dtype: Any
    #: Rows at each execution, and the lengths of the loops around it, outermost first.
    count: int
    times: tuple[int, ...]
    index_dtype: np.dtype
    #: Mesh axes along which the rows differ, inside a shard_map.
    varying: frozenset[str]
    eqn: _jax.Equation

    @property
    def total(self) -> int:
        """Rows read in one run of the whole program."""
        return math.prod(self.times) * self.count

    def in_loop(self, length: int) -> "Site":
        """This site, seen from outside a loop around it."""
        return dataclasses.replace(self, times=(length, *self.times))

    def inside_loop(self) -> "Site":
        """This site, seen from inside the outermost loop around it."""
        return dataclasses.replace(self, times=self.times[1:])


@dataclasses.dataclass(frozen=True)
class DenseUse:
    """The first place that needs a whole leaf."""

    what: str
    eqn: _jax.Equation | None


class Walk:
    """Follows views through a program.

    Attributes:
      dense: for every leaf that some equation needs whole, that equation.
    """

    def __init__(self, leaves: dict[int, Any]) -> None:
        self.leaves = leaves
        self.dense: dict[int, DenseUse] = {}
        # The call of a library function that is being looked into: its line counts.
        self._call: _jax.Equation | None = None

    def program(
        self,
        program: _jax.Program,
        operands: Sequence[View | None],
        through: Sequence[bool],
    ) -> tuple[list[View | None], Plan]:
        """The views among the outputs, and the plan of the lookups inside.

        ``through`` tells for each output whether a gradient comes in there.
        """
        reached = _jax.gradient_variables(program, through)
        env: dict[Any, View] = {
            var: view
            for var, view in zip(program.invars, operands, strict=True)
            if view is not None
        }

        def read(atom: Any) -> View | None:
            return None if isinstance(atom, _jax.Literal) else env.get(atom)

        plan: Plan = []
        for eqn in _jax.live_equations(program):
            given = [read(atom) for atom in eqn.invars]
            if not any(given):
                continue
            outlets = [var in reached for var in eqn.outvars]
            if not _jax.is_reached(eqn, reached):
                given = [without_slots(view) for view in given]
            outputs, entry = self._equation(eqn, given, outlets)
            if entry is not None:
                plan.append(entry)
            env.update(
                (var, view)
                for var, view in zip(eqn.outvars, outputs, strict=True)
                if isinstance(view, View)
            )
        return [read(atom) for atom in program.outvars], plan

    def need_whole(self, view: View | None, what: str, eqn: Any) -> None:
        """Records that ``eqn`` needs the array behind ``view``, and its gradient."""
        if view is None or not jnp.issubdtype(view.dtype, jnp.inexact):
            return
        for leaf in view.leaves():
            self.dense.setdefault(leaf, DenseUse(what, self._call or eqn))

    def _equation(
        self, eqn: _jax.Equation, operands: list[View | None], through: list[bool]
    ) -> tuple[Sequence[View | None], Plan | None]:
        none: list[View | None] = [None] * len(eqn.outvars)
        name = eqn.primitive.name
        if name in CALLS:
            outer = self._call
            if outer is None and _jax.is_library_call(eqn):
                self._call = eqn
            result = self.program(_jax.body(eqn), operands, through)
            self._call = outer
            return result
        if name in REMAT:
            return none, self._branches(eqn, [_jax.body(eqn)], operands, through)[0]
        if name == "cond":
            return none, self._branches(eqn, eqn.params["branches"], operands[1:], through)
        if name == "scan":
            return self._scan(eqn, operands, through)
        outputs = rules.commuting(eqn, operands)
        if outputs is not None:
            return outputs, None
        view = operands[0]
        lookup = lookups.lookup(eqn, view) if view is not None else None
        if view is not None and lookup is not None:
            return none, self._sites(eqn, view, lookup)
        floats = any(_jax.carries_gradient(out) for out in eqn.outvars)
        if floats or _jax.touches_ref(eqn):
            for operand in operands:
                self.need_whole(operand, name, eqn)
        return none, None

    def _sites(self, eqn: _jax.Equation, view: View, lookup: lookups.Lookup) -> Plan:
        ids = eqn.invars[1].aval
        sites = []
        for leaf in view.leaves():
            aval = self.leaves[leaf]
            dtype = index_dtype(aval.shape[0], np.dtype(ids.dtype))
            varying = _jax.varying_axes(aval, ids)
            sites.append(
                Site(
                    leaf,
                    aval.shape,
                    aval.dtype,
                    lookup.count,
                    (),
                    dtype,
                    varying,
                    self._call or eqn,
                )
            )
        return sites

    def _branches(
        self,
        eqn: _jax.Equation,
        branches: Sequence[_jax.Program],
        operands: Sequence[View | None],
        through: Sequence[bool],
    ) -> Plan:
        plans = []
        for branch in branches:
            outputs, plan = self.program(branch, operands, through)
            for view, wanted in zip(outputs, through, strict=True):
                if wanted:
                    self.need_whole(view, eqn.primitive.name, eqn)
            plans.append(plan)
        return plans

    def _scan(
        self, eqn: _jax.Equation, operands: list[View | None], through: list[bool]
    ) -> tuple[list[View | None], Plan]:
        body, (consts, _) = _jax.body(eqn), _jax.scan_counts(eqn.params)
        kept = invariant_carries(eqn)
        into = [
            view if i < consts or i - consts in kept else None
            for i, view in enumerate(operands)
        ]
        for view, passed in zip(operands, into, strict=True):
            if passed is None:
                self.need_whole(view, "scan", eqn)
        through = body_outlets(eqn, through)
        outputs, plan = self.program(body, into, through)
        for i, view in enumerate(outputs):
            if i not in kept and through[i]:
                self.need_whole(view, "scan", eqn)
        results: list[View | None] = [None] * len(outputs)
        for i in kept:
            results[i] = operands[consts + i]
        length = eqn.params["length"]
        return results, map_sites(lambda site: site.in_loop(length), plan)


def invariant_carries(eqn: _jax.Equation) -> frozenset[int]:
    """The carried values of a scan that its body hands on untouched."""
    body, (consts, carried) = _jax.body(eqn), _jax.scan_counts(eqn.params)
    return frozenset(
        i for i in range(carried) if body.outvars[i] is body.invars[consts + i]
    )


def body_outlets(eqn: _jax.Equation, through: Sequence[bool]) -> list[bool]:
    """Through which outputs of a scan's body gradients may come, given those outside.

    What is carried may feed anything in the next turn; if any gradient comes in at all, it
    is taken to come through every carried value.
    """
    _, carried = _jax.scan_counts(eqn.params)
    return [any(through)] * carried + list(through[carried:])


def outlets(program: _jax.Program, num_outputs: int) -> list[bool]:
    """Gradients come in through the first ``num_outputs`` outputs of a whole call."""
    return [i < num_outputs for i in range(len(program.outvars))]


def is_site(x: Any) -> bool:
    return isinstance(x, Site)


def sites(plan: Plan) -> list[Site]:
    """All sites of a plan, in order."""
    return jax.tree.leaves(plan, is_leaf=is_site)


def map_sites(f: Callable[[Site], Any], plan: Plan) -> list[Any]:
    """What mirrors the plan, with ``f(site)`` for every site."""
    result: list[Any] = jax.tree.map(f, plan, is_leaf=is_site)
    return result


def walk(
    program: _jax.Program, candidates: dict[int, Any], num_outputs: int
) -> tuple[Plan, dict[int, DenseUse], dict[int, list[Site]]]:
    """Plans the lookups of the leaves among ``candidates`` that are only looked up.

    Args:
      program: the traced function; its first inputs are the leaves.
      candidates: leaf number -> its abstract value.
      num_outputs: how many of the program's outputs are differentiated; through the
        others (auxiliary ones) no gradient flows.

    Returns:
      ``(plan, dense, looked_up)``: the plan for the leaves that stay sparse; why each of
      the others does not; and for every candidate the places that look it up, sparse or
      not.
    """
    dense: dict[int, DenseUse] = {}
    looked_up: dict[int, list[Site]] = {}
    through = outlets(program, num_outputs)
    while True:
        # A leaf that turns out dense is an ordinary array in the next round.
        remaining = {i: aval for i, aval in candidates.items() if i not in dense}
        reader = Walk(remaining)
        inputs = [
            Table(tuple(remaining[i].shape), remaining[i].dtype, i)
            if i in remaining
            else None
            for i in range(len(program.invars))
        ]
        outputs, plan = reader.program(program, inputs, through)
        for view in outputs[:num_outputs]:
            reader.need_whole(view, "the function's own result", None)
        if not dense:
            for site in sites(plan):
                looked_up.setdefault(site.leaf, []).append(site)
        if not reader.dense:
            return plan, dense, looked_up
        dense |= reader.dense
