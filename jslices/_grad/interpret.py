"""One walk over a traced program that plans its lookups, or runs them.

What a program computes from tables is a *view* of them (views.py) for as long as possible.
An equation that gets a view is one of four things, tried in this order:

    a call, a loop, a branch ...    the walk goes inside       (``_INSIDE``, below)
    a row-wise step                 gives views                (rules.py)
    a lookup                        gives rows                 (lookups.py)
    anything else                   needs the whole array: a dense use

The walk is taken twice. :class:`Planner` has no values: it notes every lookup (a
:class:`Site`) and every dense use. :class:`Runner` has them: it gives each planned lookup a
cotangent slot, and collects the row numbers. As it is the same walk, they meet the same
lookups in the same order.
"""

import abc
import contextlib
import dataclasses
import itertools
import math
from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jslices import _jax
from jslices._devices.exchange import Exchange, Route, home_of
from jslices._devices.explicit import (
    drop_sharding,
    explicit_mesh,
    explicit_part,
    restore_sharding,
    shardings_of,
    with_auto_axes,
)
from jslices._grad.custom import with_own_derivative
from jslices._grad.lookups import Lookup, lookup, only_row
from jslices._grad.memo import Memo, first_program, weakly
from jslices._grad.rules import rowwise
from jslices._grad.unread import unread_lookups
from jslices._grad.views import (
    Ids,
    Table,
    View,
    is_one_row,
    tables_read,
    whole,
    without_slots,
)
from jslices._lookup.exchange import rows_from_elsewhere
from jslices._lookup.rows import lookup_rows
from jslices._rows.bounds import canonical_indices, index_dtype

#: Per lookup its sites, one after the other; per loop, checkpoint or branch a list of what
#: is inside; in the order of the program.
Plan = list[Any]
#: Both mirror a plan: an IndexedSlices of zeros, and the row numbers, for every site.
Slots = list[Any]
Indices = list[Any]


@dataclasses.dataclass(frozen=True)
class Site:
    """One place that looks up rows of one leaf.

    Attributes:
      leaf: the number of the differentiated array.
      table_shape: its shape ``[V, *D]``.
      dtype: its dtype.
      count: rows at each execution.
      loops: the lengths of the loops around it, outermost first.
      index_dtype: of the row numbers.
      varying: mesh axes along which the rows differ, inside a ``shard_map``.
      route: how rows get from device to device; None if that is left to XLA.
      sharding: of the gradient's values, on a mesh of Explicit axes; else None.
      source: of the equation, or of the call of a library function that contains it.
      by_ids: False for a row whose number stands in the program, ``table[0]``.
    """

    leaf: int
    table_shape: tuple[int, ...]
    dtype: Any
    count: int
    loops: tuple[int, ...]
    index_dtype: np.dtype
    varying: frozenset[str]
    route: Route | None
    sharding: NamedSharding | None
    source: _jax.Source
    by_ids: bool = True

    @property
    def entries(self) -> int:
        """Entries of the gradient for each execution."""
        return self.count if self.route is None else self.route.all_entries

    @property
    def split(self) -> NamedSharding | None:
        """How the values of all executions are split, ``[*loops, entries, *D]``."""
        if self.sharding is None:
            return None
        spec = PartitionSpec(*(None,) * len(self.loops), *self.sharding.spec)
        return NamedSharding(self.sharding.mesh, spec)

    @property
    def total(self) -> int:
        """Rows read in one run of the whole program."""
        return math.prod(self.loops) * self.count


class Candidate(NamedTuple):
    """A differentiated array that may turn out sparse.

    Attributes:
      aval: its abstract value.
      name: what the user calls it.
      exchange: how its rows get from device to device, where the user says so.
    """

    aval: Any
    name: str = ""
    exchange: Exchange | None = None

    def route(self, count: int) -> Route | None:
        """That of a lookup of so many rows; None where it is left to XLA."""
        home = home_of(self.aval, self.exchange, self.name)
        return home and home.route(self.aval.shape[0], count)

    def sharding(self, route: Route | None) -> NamedSharding | None:
        """Of the gradient's values, where types tell; else None."""
        if explicit_mesh(self.aval) is None:
            return None
        rows = None if route is None else route.placement.rows or None
        mesh, spec = self.aval.sharding.mesh, self.aval.sharding.spec
        return explicit_part(mesh, PartitionSpec(rows, *spec[1:]))


@dataclasses.dataclass(frozen=True)
class DenseUse:
    """The first place that needs a whole leaf: an equation's, or None for the result."""

    what: str
    source: _jax.Source | None


class Interpreter(abc.ABC):
    """The walk; how values are computed, if they are, is left to the two kinds of it."""

    #: Whether there are values. If not, None stands for each.
    runs: bool
    #: Whether what is planned and compiled for the programs inside equations is kept, as
    #: there is no ``jax.jit`` around them that would do so.
    eager: bool
    #: Of the call of a library function that the walk is inside of: its line is the user's.
    caller: _jax.Source | None = None
    #: Those of the program that the walk is in.
    _origins: _jax.Origins

    def program(
        self, program: _jax.Program, operands: Sequence[Any], through: Sequence[bool]
    ) -> list[Any]:
        """The program's outputs: views where rows of tables are all that went into them.

        ``through`` tells for each output whether a gradient comes in there.
        """
        reached = _jax.gradient_variables(program, through)
        env = dict(zip(program.invars, operands, strict=True))
        if self.runs:
            env.update(zip(program.constvars, _jax.constants(program), strict=True))

        def read(atom: Any) -> Any:
            if self.runs:
                return _jax.read(atom, env)
            return None if isinstance(atom, _jax.Literal) else env.get(atom)

        origins = _jax.Origins(program)
        for eqn in _jax.live_equations(program):
            self._origins = origins
            given = [read(atom) for atom in eqn.invars]
            if any(isinstance(value, View) for value in given):
                if not _jax.is_reached(eqn, reached):
                    given = [without_slots(value) for value in given]
                outputs = self._equation(eqn, given, [v in reached for v in eqn.outvars])
            else:
                outputs = self.bind(eqn, given)
            env.update(zip(eqn.outvars, outputs, strict=True))
        outputs = [read(atom) for atom in program.outvars]
        return [
            value if wanted else without_slots(value)
            for value, wanted in zip(outputs, through, strict=True)
        ]

    def _equation(
        self, eqn: _jax.Equation, operands: list[Any], through: list[bool]
    ) -> Sequence[Any]:
        """One equation that some view goes into."""
        go_inside = _INSIDE.get(_jax.kind(eqn))
        if go_inside is not None:
            if self.eager and _is_kept(eqn):
                return self.kept(eqn, operands, through)
            return go_inside(self, eqn, operands, through)
        views = rowwise(eqn, operands, lambda value: self.whole(value, eqn))
        if views is not None:
            return views
        found = lookup(eqn, operands[0], self._origins)
        if found is not None:
            others = [self.whole(value, eqn) for value in operands[1:]]
            with eqn.ctx.manager:
                return [self.look_up(eqn, found, others)]
        return self.bind(eqn, [self.whole(value, eqn) for value in operands])

    @abc.abstractmethod
    def bind(self, eqn: _jax.Equation, operands: Sequence[Any]) -> list[Any]:
        """The outputs of an equation that no view goes into."""

    @abc.abstractmethod
    def whole(self, value: Any, eqn: _jax.Equation | None) -> Any:
        """The array behind a view, which ``eqn`` needs; anything else as it is."""

    @abc.abstractmethod
    def look_up(self, eqn: _jax.Equation, found: Lookup, others: list[Any]) -> Any:
        """The output of a lookup; ``others`` are the operands but the first."""

    @abc.abstractmethod
    def kept(
        self, eqn: _jax.Equation, operands: list[Any], through: list[bool]
    ) -> Sequence[Any]:
        """The outputs of an equation with a program inside, by its :class:`_Part`."""

    @abc.abstractmethod
    def loop(
        self, eqn: _jax.Equation, step: Callable[..., Any], carry: list[Any], xs: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        """``lax.scan(step, carry, xs)``."""

    @abc.abstractmethod
    def switch(self, index: Any, branches: Sequence[Callable[[], Any]]) -> Any:
        """``lax.switch(index, branches)``."""

    @abc.abstractmethod
    def checkpoint(
        self, eqn: _jax.Equation, run: Callable[..., Any], operands: list[Any]
    ) -> list[Any]:
        """``jax.checkpoint(run)(values)`` for those of the operands that are no views."""


# --- control flow -----------------------------------------------------------------------


def _call(
    walk: Interpreter, eqn: _jax.Equation, operands: list[Any], through: list[bool]
) -> list[Any]:
    """A call of a sub-program that means the sub-program itself."""
    outer = walk.caller
    if outer is None and _jax.is_library_call(eqn):
        walk.caller = eqn.source_info
    outputs = walk.program(_jax.body(eqn), operands, through)
    walk.caller = outer
    return outputs


def _checkpoint(
    walk: Interpreter, eqn: _jax.Equation, operands: list[Any], through: list[bool]
) -> list[Any]:
    def run(values: Sequence[Any]) -> list[Any]:
        left = iter(values)
        given = [x if isinstance(x, View) else next(left) for x in operands]
        outputs = walk.program(_jax.body(eqn), given, through)
        return [walk.whole(value, eqn) for value in outputs]

    return walk.checkpoint(eqn, run, operands)


def _cond(
    walk: Interpreter, eqn: _jax.Equation, operands: list[Any], through: list[bool]
) -> list[Any]:
    index, *given = operands

    def make(branch: _jax.Program) -> Callable[[], list[Any]]:
        def run() -> list[Any]:
            outputs = walk.program(branch, given, through)
            return [walk.whole(value, eqn) for value in outputs]

        return run

    return walk.switch(walk.whole(index, eqn), [make(b) for b in eqn.params["branches"]])


def _scan(
    walk: Interpreter, eqn: _jax.Equation, operands: list[Any], through: list[bool]
) -> list[Any]:
    """Views go into a loop as constants, and as what it carries on unchanged."""
    body, (num_consts, num_carried) = _jax.body(eqn), _jax.scan_counts(eqn.params)
    consts = operands[:num_consts]
    carried = operands[num_consts : num_consts + num_carried]
    fixed = {
        i: value
        for i, value in enumerate(carried)
        if isinstance(value, View) and body.outvars[i] is body.invars[num_consts + i]
    }
    moving = [walk.whole(x, eqn) for i, x in enumerate(carried) if i not in fixed]
    xs = [walk.whole(x, eqn) for x in operands[num_consts + num_carried :]]
    # What is carried may feed anything in the next turn: if a gradient comes in at all, it
    # is taken to come through everything that is carried.
    inside = [any(through)] * num_carried + through[num_carried:]

    def with_fixed(moving: Sequence[Any]) -> list[Any]:
        left = iter(moving)
        return [fixed[i] if i in fixed else next(left) for i in range(num_carried)]

    def step(moving: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        outputs = walk.program(body, [*consts, *with_fixed(moving), *xs], inside)
        new = [x for i, x in enumerate(outputs[:num_carried]) if i not in fixed]
        return (
            [walk.whole(x, eqn) for x in new],
            [walk.whole(x, eqn) for x in outputs[num_carried:]],
        )

    final, ys = walk.loop(eqn, step, moving, xs)
    return [*with_fixed(final), *ys]


def _barrier(
    walk: Interpreter, eqn: _jax.Equation, operands: list[Any], through: list[bool]
) -> list[Any]:
    """``optimization_barrier``: views go round it, values through it."""
    values = [x for x in operands if not isinstance(x, View)]
    passed = iter(lax.optimization_barrier(values) if walk.runs and values else values)
    return [x if isinstance(x, View) else next(passed) for x in operands]


def _sharding_constraint(
    walk: Interpreter, eqn: _jax.Equation, operands: list[Any], through: list[bool]
) -> list[Any]:
    """A constraint speaks of the whole table, so it stays on the table."""
    (view,) = operands
    if isinstance(view, Table):
        return [dataclasses.replace(view, array=walk.bind(eqn, [view.array])[0])]
    return walk.bind(eqn, [walk.whole(view, eqn)])


def _reshard(
    walk: Interpreter, eqn: _jax.Equation, operands: list[Any], through: list[bool]
) -> list[Any]:
    """Views may go to where all axes are Auto, as that is where lookups are taken."""
    (view,) = operands
    if _jax.has_auto_axes(eqn):
        return [view]
    return walk.bind(eqn, [walk.whole(view, eqn)])


def _pass(
    walk: Interpreter, eqn: _jax.Equation, operands: list[Any], through: list[bool]
) -> list[Any]:
    """What says something of an array that is there anyway: its name for
    ``checkpoint_name``, its layout."""
    return operands


def _custom(
    walk: Interpreter, eqn: _jax.Equation, operands: list[Any], through: list[bool]
) -> Sequence[Any]:
    """A function with a derivative of its own (custom.py)."""
    views = with_own_derivative(eqn, operands)
    return views or walk.bind(eqn, [walk.whole(x, eqn) for x in operands])


# By name, as JAX exports few of these primitives and renames them.
_CALLS = ["jit", "pjit", "closed_call", "core_call", "call", "custom_lin", "eval_jaxpr"]
_INSIDE: dict[str, Callable[..., Sequence[Any]]] = {
    **dict.fromkeys(_CALLS, _call),
    **dict.fromkeys(["remat2", "checkpoint", "remat"], _checkpoint),
    **dict.fromkeys(["custom_jvp_call", "custom_vjp_call"], _custom),
    "cond": _cond,
    "scan": _scan,
    "optimization_barrier": _barrier,
    "sharding_constraint": _sharding_constraint,
    "reshard": _reshard,
    "CheckpointName": _pass,
    "layout_constraint": _pass,
}


# --- planning ---------------------------------------------------------------------------


class Planner(Interpreter):
    """Walks without values, and notes what the tables are used for.

    Attributes:
      plan: the lookups, in order.
      dense: for every leaf that some equation needs whole, the first one.
      single: for every leaf the first equation that needs one row of it, whose number
        stands in the program.
      products: for every leaf the first product of it that is a view, ``table @ w``.
    """

    runs = False

    def __init__(self, leaves: dict[int, Candidate], eager: bool = False) -> None:
        self.eager = eager
        self.plan: Plan = []
        self.dense: dict[int, DenseUse] = {}
        self.single: dict[int, DenseUse] = {}
        self.products: dict[int, DenseUse] = {}
        self._leaves = leaves
        self._loops: tuple[int, ...] = ()

    @property
    def noted(self) -> Sequence[dict[int, DenseUse]]:
        return self.dense, self.single, self.products

    def bind(self, eqn: _jax.Equation, operands: Sequence[Any]) -> list[Any]:
        return [None] * len(eqn.outvars)

    def _equation(
        self, eqn: _jax.Equation, operands: list[Any], through: list[bool]
    ) -> Sequence[Any]:
        outputs = super()._equation(eqn, operands, through)
        if eqn.primitive.name == "dot_general" and isinstance(outputs[0], View):
            use = DenseUse(eqn.primitive.name, self.caller or eqn.source_info)
            for leaf in tables_read(outputs[0]):
                self.products.setdefault(leaf, use)
        return outputs

    def whole(self, value: Any, eqn: _jax.Equation | None) -> Any:
        if not isinstance(value, View):
            return None
        uses = self.dense
        if eqn is None:
            use = DenseUse("the function's own result", self.caller)
        else:
            use = DenseUse(_jax.kind(eqn), self.caller or eqn.source_info)
            if is_one_row(value):
                uses = self.single
                self._note(eqn, only_row(value), by_ids=False)
        for leaf in tables_read(value):
            uses.setdefault(leaf, use)
        return None

    def look_up(self, eqn: _jax.Equation, found: Lookup, others: list[Any]) -> Any:
        self._note(eqn, found, by_ids=True)

    def _note(self, eqn: _jax.Equation, found: Lookup, by_ids: bool) -> None:
        ids = found.numbers
        for leaf in tables_read(found.view):
            aval, route = self._leaves[leaf].aval, self._leaves[leaf].route(found.count)
            site = Site(
                leaf,
                aval.shape,
                aval.dtype,
                found.count,
                self._loops,
                index_dtype(aval.shape[0], np.dtype(ids.dtype)),
                _jax.varying_axes(aval, ids),
                route,
                self._leaves[leaf].sharding(route),
                self.caller or eqn.source_info,
                by_ids,
            )
            self.plan.append(site)

    def kept(
        self, eqn: _jax.Equation, operands: list[Any], through: list[bool]
    ) -> Sequence[Any]:
        part = _part(eqn, operands, through, self._leaves)
        self.plan.append(part.plan)
        for noted, within in zip(self.noted, part.noted, strict=True):
            noted |= within | noted
        return part.outputs

    def loop(
        self, eqn: _jax.Equation, step: Callable[..., Any], carry: list[Any], xs: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        outer, self._loops = self._loops, (*self._loops, eqn.params["length"])
        with self._inside():
            result: tuple[list[Any], list[Any]] = step(carry, xs)
        self._loops = outer
        return result

    def switch(self, index: Any, branches: Sequence[Callable[[], Any]]) -> Any:
        with self._inside():
            for branch in branches:
                with self._inside():
                    outputs = branch()
        return outputs

    def checkpoint(
        self, eqn: _jax.Equation, run: Callable[..., Any], operands: list[Any]
    ) -> list[Any]:
        with self._inside():
            return run([x for x in operands if not isinstance(x, View)])

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        """What is planned in this context becomes one entry of the plan."""
        outer, self.plan = self.plan, []
        yield
        outer.append(self.plan)
        self.plan = outer


def plan_lookups(
    program: _jax.Program,
    candidates: dict[int, Candidate],
    num_results: int,
    eager: bool = False,
) -> tuple[Plan, dict[int, DenseUse], dict[int, list[Site]], dict[int, list[_jax.Source]]]:
    """Plans the lookups of those leaves among ``candidates`` that are only looked up.

    Args:
      program: the traced function; its first inputs are the leaves.
      candidates: from the number of a leaf to what is known of it.
      num_results: how many of the program's outputs are differentiated; no gradient comes
        in through the others.
      eager: whether no ``jax.jit`` is around the call; see :class:`_Part`.

    Returns:
      ``(plan, dense, looked_up, unread)``: the plan for the leaves that stay sparse; why
      each of the others does not; for every candidate the places that look up rows of it,
      sparse or not; and for those without any the places that look it up otherwise.
    """
    dense: dict[int, DenseUse] = {}
    looked_up: dict[int, list[Site]] = {}
    while True:
        # A leaf that turns out dense is an ordinary array in the next round.
        leaves = {i: known for i, known in candidates.items() if i not in dense}
        planner = Planner(leaves, eager)
        inputs = [
            Table(leaves[i].aval.shape, leaves[i].aval.dtype, i) if i in leaves else None
            for i in range(len(program.invars))
        ]
        outputs = planner.program(program, inputs, _outlets(program, num_results))
        for value in outputs[:num_results]:
            planner.whole(value, None)
        sites = jax.tree.leaves(planner.plan)
        by_ids = {site.leaf for site in sites if site.by_ids}
        for leaf, use in planner.single.items():
            if leaf not in by_ids:  # `w[0]` alone does not make a table of a weight
                planner.dense.setdefault(leaf, use)
        for leaf in planner.dense.keys() & planner.products.keys() - by_ids:
            planner.dense[leaf] = planner.products[leaf]  # not what follows the layer
        if not dense:
            for site in sites:
                if site.leaf in by_ids:
                    looked_up.setdefault(site.leaf, []).append(site)
        if not planner.dense:
            break
        dense |= planner.dense
    never = [leaf for leaf in dense if leaf not in looked_up]
    unread = unread_lookups(program, never, _outlets(program, num_results))
    return planner.plan, dense, looked_up, unread


def _outlets(program: _jax.Program, num_results: int) -> list[bool]:
    """Gradients come in through the first outputs of a whole call."""
    return [i < num_results for i in range(len(program.outvars))]


# --- running ----------------------------------------------------------------------------


class _Scope:
    """What belongs to one body of a loop, a branch or a checkpoint, while JAX traces it."""

    def __init__(self, plan: Plan, slots: Slots, wholes: ChainMap[View, Any]) -> None:
        self.entries = zip(plan, slots, strict=True)
        self.indices: Indices = []
        # Arrays behind views. A body may use what was computed outside of it.
        self.wholes = wholes


class Runner(Interpreter):
    """Walks with values, and a cotangent slot in every planned lookup.

    All but the lookups is bound as it was traced, so values stay what they were. Control
    flow is rebuilt from JAX's public functions: a loop gets the slots as additional inputs
    of each iteration and hands the row numbers out; a branch that is not taken reports
    row numbers that are out of range.
    """

    runs = True

    def __init__(
        self, plan: Plan, slots: Slots, leaves: dict[int, Candidate], eager: bool = False
    ) -> None:
        self.eager = eager
        self._leaves = leaves
        self._scope = _Scope(plan, slots, ChainMap())

    @property
    def indices(self) -> Indices:
        """The row numbers of the lookups so far."""
        return self._scope.indices

    def bind(self, eqn: _jax.Equation, operands: Sequence[Any]) -> list[Any]:
        return _jax.bind(eqn, operands)

    def whole(self, value: Any, eqn: _jax.Equation | None) -> Any:
        if eqn is not None and is_one_row(value):
            return self.look_up(eqn, only_row(value), [])
        # No gradient comes this way, or the plan would have made the table dense.
        return whole(value, self._scope.wholes)

    def look_up(self, eqn: _jax.Equation, found: Lookup, others: list[Any]) -> Any:
        def take(table: Table, ids: Ids, mode: Any, fill_value: Any) -> jax.Array:
            site, slot = next(self._scope.entries)
            assert site.leaf == table.leaf
            record = ids.record
            if record.dtype != site.index_dtype:
                record = canonical_indices(record, table.shape[0]).astype(site.index_dtype)
            split = shardings_of(slot.values)
            array, slot = drop_sharding((table.array, slot))
            if site.route is None:
                rows = lookup_rows(array, ids.read, slot, mode, fill_value)
            else:
                rows, record = rows_from_elsewhere(
                    site.route, array, ids.read, record, slot, mode, fill_value
                )
            self._scope.indices.append(restore_sharding(record, split))
            return rows

        aval = eqn.outvars[0].aval
        with with_auto_axes(explicit_mesh([aval, *self._tables(found.view)])):
            rows = found.read([None, *drop_sharding(others)], take)
        return restore_sharding(rows, shardings_of(aval))

    def _tables(self, view: View) -> list[Any]:
        return [self._leaves[leaf].aval for leaf in tables_read(view)]

    def kept(
        self, eqn: _jax.Equation, operands: list[Any], through: list[bool]
    ) -> Sequence[Any]:
        part = _part(eqn, operands, through, self._leaves)
        _, slots = next(self._scope.entries)
        outputs, indices = part.run(operands, slots)
        self._scope.indices.append(indices)
        return outputs

    def loop(
        self, eqn: _jax.Equation, step: Callable[..., Any], carry: list[Any], xs: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        plan, slots = next(self._scope.entries)

        def body(carry: list[Any], per_turn: tuple[list[Any], Slots]) -> tuple[Any, Any]:
            xs, slots = per_turn
            (carry, ys), indices = self._inside(plan, slots, step, carry, xs)
            return carry, (ys, indices)

        options = _jax.scan_options(eqn.params)
        final, (ys, indices) = lax.scan(body, carry, (xs, slots), **options)
        self._scope.indices.append(indices)
        return final, ys

    def switch(self, index: Any, branches: Sequence[Callable[[], Any]]) -> Any:
        plans, slots = next(self._scope.entries)

        def make(taken: int, branch: Callable[[], Any]) -> Callable[[Slots], Any]:
            def run(slots: Slots) -> tuple[Any, Indices]:
                outputs, found = self._inside(plans[taken], slots[taken], branch)
                indices = [
                    found if i == taken else jax.tree.map(_nowhere, plans[i], slots[i])
                    for i in range(len(plans))
                ]
                return outputs, indices

            return run

        runs = [make(number, branch) for number, branch in enumerate(branches)]
        outputs, indices = lax.switch(index, runs, slots)
        self._scope.indices.append(indices)
        return outputs

    def checkpoint(
        self, eqn: _jax.Equation, run: Callable[..., Any], operands: list[Any]
    ) -> list[Any]:
        plan, slots = next(self._scope.entries)
        are_values = [not isinstance(x, View) for x in operands]

        def again(slots: Slots, *values: Any) -> tuple[list[Any], Indices]:
            return self._inside(plan, slots, run, values)

        options = _jax.remat_options(_jax.parameters(eqn), are_values)
        values = itertools.compress(operands, are_values)
        outputs, indices = jax.checkpoint(again, **options)(slots, *values)
        self._scope.indices.append(indices)
        return outputs

    def _inside(
        self, plan: Plan, slots: Slots, run: Callable[..., Any], *args: Any
    ) -> tuple[Any, Indices]:
        """``run(*args)`` and the row numbers of its lookups, in a scope of its own."""
        outer = self._scope
        self._scope = inner = _Scope(plan, slots, outer.wholes.new_child())
        try:
            return run(*args), inner.indices
        finally:
            self._scope = outer


def _nowhere(site: Site, slot: Any) -> jax.Array:
    """Row numbers out of range, for a lookup in a branch that is not taken."""
    rows = slot.values.shape[: slot.values.ndim - len(site.table_shape) + 1]
    indices = jnp.full(rows, site.table_shape[0], site.index_dtype)
    indices = restore_sharding(indices, shardings_of(slot.values))
    return _jax.as_varying(indices, site.varying)


def run_lookups(
    program: _jax.Program,
    operands: Sequence[Any],
    num_results: int,
    leaves: dict[int, Candidate],
    plan: Plan,
    slots: Slots,
    eager: bool = False,
) -> tuple[list[Any], Indices]:
    """The program's outputs, and the row numbers of every planned lookup.

    ``operands`` are :class:`Table` for the ``leaves`` that the plan is of, and arrays.
    """
    runner = Runner(plan, slots, leaves, eager)
    outputs = runner.program(program, operands, _outlets(program, num_results))
    return [runner.whole(value, None) for value in outputs], runner.indices


# --- without jax.jit --------------------------------------------------------------------


class _Part:
    """A call, loop, checkpoint or branch of a program around which there is no ``jax.jit``.

    It is planned once, and compiled once for each kind of operands: JAX would compile what
    the runner makes of it anew at every call.

    Attributes:
      plan: its lookups.
      noted: what the planner noted besides.
      outputs: its outputs: views, and None for values.
      run: from its operands and its cotangent slots to its outputs and row numbers.
    """

    def __init__(
        self,
        eqn: _jax.Equation,
        operands: list[Any],
        through: list[bool],
        leaves: dict[int, Candidate],
    ) -> None:
        planner = Planner(leaves)
        self.outputs = _inside(planner, eqn, operands, through)
        self.noted, self.plan = planner.noted, planner.plan
        plan = planner.plan
        program = weakly(eqn)

        def run(operands: list[Any], slots: Slots) -> tuple[Sequence[Any], Indices]:
            runner = Runner(plan, slots, leaves)
            outputs = _inside(runner, program(), operands, through)
            return outputs, runner.indices

        run.__name__ = eqn.params.get("name", eqn.primitive.name)  # in profiles
        self.run = jax.jit(run)


_parts: Memo[_Part] = Memo()


def _part(
    eqn: _jax.Equation,
    operands: list[Any],
    through: list[bool],
    leaves: dict[int, Candidate],
) -> _Part:
    """The part that is kept for such an equation with such operands."""
    bare = jax.tree.map(lambda _: None, operands)
    key = (jax.tree.structure(bare), tuple(through), tuple(leaves.items()))
    return _parts.find(eqn, key, lambda: _Part(eqn, bare, through, leaves))


def _inside(
    walk: Interpreter, eqn: _jax.Equation, operands: list[Any], through: list[bool]
) -> Sequence[Any]:
    return _INSIDE[_jax.kind(eqn)](walk, eqn, operands, through)


def _is_kept(eqn: _jax.Equation) -> bool:
    # JAX traces a function with a derivative of its own anew at every call.
    if first_program(eqn) is None or _INSIDE[_jax.kind(eqn)] is _custom:
        return False
    # The lines of its lookups are those of whoever calls a function of JAX's.
    return not (_jax.kind(eqn) in _CALLS and _jax.is_library_call(eqn))
