"""The plan of one call: its leaves, what is read of them, and which of them are sparse.

:class:`Planner` walks the program without values, and notes every read of rows (a
:class:`Site`) and what else the leaves are used for. The runner (run.py) then meets the
same reads in the same order.
"""

import contextlib
import dataclasses
import functools
import math
from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jslices import _jax
from jslices._densify import UserLine
from jslices._exchange.plan import ExchangePlan
from jslices._grad import custom  # noqa: F401  (it registers rules)
from jslices._grad.call import (
    ExchangeSpec,
    LeafSpec,
    Outputs,
    SparseSpec,
    UserCall,
    describe_leaves,
)
from jslices._grad.memo import kept
from jslices._grad.products import picks_rows
from jslices._grad.reads import RowRead, every_row, parts_of, tables_read
from jslices._grad.unread import unread_lookups
from jslices._grad.views import Values, View
from jslices._grad.walk import Scope, Turn, ViewWalk
from jslices._jax import Equation, Program, Source
from jslices._place.boundary import explicit_mesh
from jslices._rows.access import index_dtype, is_below

#: The name of a product with a one-hot array that is not read as rows.
ONE_HOT = "one_hot"
#: Reads of elements and windows instead of whole rows, ``table[i, j]``, weighted or not,
#: and of sums over the rows before each.
_PICKS_ELEMENTS = frozenset(
    {"cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum", "dynamic_slice", "gather"}
    | {ONE_HOT, "reshape", "sort", "squeeze"}
)
#: Rows with so many times the bytes of a dense gradient take up to 4 times as long (13 to
#: 250 times the bytes: experts, transition matrices and adapters of 64 x 64).
MANY_BYTES = 8

#: Per read its sites, one after the other; per loop, checkpoint or branch, and per view of
#: fixed rows without slots, a list of what is inside; in the order of the program.
SiteTree = list[Any]


# --- what is read of leaves, and what becomes of them -----------------------------------


@dataclasses.dataclass(frozen=True)
class Site:
    """One place that looks up rows of one leaf."""

    leaf: int
    table_shape: tuple[int, ...]  # with one axis of rows, ``[V, *D]``
    dtype: Any
    count: int  # rows at each execution
    loops: tuple[int, ...]  # the lengths of the loops around it, outermost first
    index_dtype: np.dtype
    varying: frozenset[str]  # mesh axes along which rows differ, inside a ``shard_map``
    exchange: ExchangePlan | None  # None if XLA decides how rows get to devices
    sharding: NamedSharding | None  # of the gradient's values, on Explicit axes
    #: Of the equation, or of the library call that contains it; None for a leaf that the
    #: function returns as it is.
    source: Source | None
    by_ids: bool  # False for rows whose numbers are constants, ``table[5:8]``
    packed: int  # how many of the rows that are read a row of the leaf holds
    at_now: bool  # whether they are read as they are now, after missed steps
    #: Whether a gradient may come into them. Others have no cotangent slot, and are in the
    #: plan for those who want to know what is read.
    graded: bool

    @property
    def entries(self) -> int:
        """Entries of the gradient for each execution, on all devices."""
        plan = self.exchange
        return self.count if plan is None else plan.entries * plan.devices

    @property
    def split(self) -> NamedSharding | None:
        """The sharding of the values of all executions, ``[*loops, entries, *D]``."""
        if self.sharding is None:
            return None
        spec = PartitionSpec(*(None,) * len(self.loops), *self.sharding.spec)
        return NamedSharding(self.sharding.mesh, spec)

    @property
    def total(self) -> int:
        """Rows read in one run of the whole program."""
        return math.prod(self.loops) * self.count


@dataclasses.dataclass(frozen=True)
class DenseUse:
    """The first place that needs a whole leaf."""

    what: str  # the name of the primitive, or :data:`ONE_HOT`
    source: Source | None  # None for the function's result
    to_scalar: bool = False  # whether the equation reduces it to one number
    of_product: bool = False  # whether it is a product with the leaf that is then used


class Planned(NamedTuple):
    """A traced call and what was decided about its leaves."""

    program: Program  # its first inputs are the leaves
    outputs: Outputs
    leaves: list[LeafSpec]
    plan: SiteTree  # the lookups of the sparse leaves
    dense: dict[int, DenseUse]  # why a leaf that could have been sparse is not
    looked_up: dict[int, list[Site]]  # for every leaf, sparse or not
    unread: dict[int, list[Source]]  # lookups by other than rows, of leaves without any
    no_grad: dict[int, DenseUse]  # uses of the whole that no gradient reaches
    eager: bool  # True if no ``jax.jit`` is around the call

    def kind(self, leaf: int) -> str:
        """``"sparse"``, ``"dense"``, or ``"unused"``: no gradient reaches it."""
        if leaf in self.dense or not self.leaves[leaf].may_be_sparse:
            return "dense"
        return "sparse" if self.looked_up.get(leaf) else "unused"

    @property
    def sites(self) -> list[Site]:
        """All reads of rows, with a gradient and without, in the order of the program."""
        return jax.tree.leaves(self.plan)

    def sites_of(self, leaf: int) -> list[Site]:
        return [site for site in self.sites if site.leaf == leaf]

    @property
    def read_whole(self) -> set[int]:
        """The leaves that are used otherwise than by rows."""
        used, leaves = Scope(self.program).used, self.program.invars[: len(self.leaves)]
        dense = {i for i, v in enumerate(leaves) if v in used and self.kind(i) == "dense"}
        return self.no_grad.keys() | dense

    @property
    def whole_lines(self) -> dict[int, UserLine]:
        """Where leaves are used as a whole though no gradient comes in there."""
        return {i: _jax.user_line(x.source) for i, x in self.no_grad.items()}

    def with_caught_up(self, leaves: set[int]) -> "Planned":
        """The same, where these leaves have caught up, and are now what they are."""
        specs = [
            dataclasses.replace(leaf, caught_up=i in leaves)
            for i, leaf in enumerate(self.leaves)
        ]

        def of_site(site: Site) -> Site:
            return dataclasses.replace(site, at_now=site.at_now and site.leaf not in leaves)

        return self._replace(leaves=specs, plan=jax.tree.map(of_site, self.plan))

    def triggers_warning(self, leaf: int) -> bool:
        """True if a leaf is looked up, or forced to rows, and its gradient is dense.

        An ordinary weight should have a dense gradient.
        """
        forced = self.leaves[leaf].mode is True
        if leaf not in self.dense:
            return forced and not self.leaves[leaf].may_be_sparse
        lookups = self.looked_up.get(leaf) or self.unread.get(leaf)
        if self.dense[leaf].what in _PICKS_ELEMENTS and self.leaves[leaf].is_small:
            lookups = self.looked_up.get(leaf)
        return forced or bool(lookups)

    def triggers_hint(self, leaf: int) -> bool:
        """True if rows cost several times what a dense gradient does."""
        of = self.leaves[leaf]
        if of.mode is not None or of.is_small or self.kind(leaf) != "sparse":
            return False
        if any(site.exchange for site in self.looked_up[leaf]):
            return False
        return self.rows_are_larger(leaf, MANY_BYTES)

    def rows_are_larger(self, leaf: int, times: int = 1) -> bool:
        """True if rows take ``times`` the bytes of a dense gradient, or more."""
        dense = times * self.leaves[leaf].num_bytes
        return is_below(dense - 1, self.bytes_of_rows(leaf))

    def bytes_of_rows(self, leaf: int) -> int:
        """The size of the sparse gradient: rows and row numbers."""
        row, sites = self.leaves[leaf].row_bytes, self.looked_up.get(leaf, [])
        return sum(site.total * (row + site.index_dtype.itemsize) for site in sites)


def plan_call(call: UserCall, spec: SparseSpec, exchange: ExchangeSpec = None) -> Planned:
    """Traces a call and decides, by ``sparse=``, which of its leaves are sparse."""
    leaves = describe_leaves(call, spec, exchange)
    program, outputs = call.trace()
    eager = not _jax.is_staged()
    planned = functools.partial(_planned, program, outputs, eager)
    best = _with_row_axes(planned(leaves), planned)
    leaves = list(best.leaves)
    for i, leaf in enumerate(leaves):
        optional = leaf.mode == "if_smaller" and best.kind(i) == "sparse"
        if optional and best.rows_are_larger(i):
            leaves[i] = dataclasses.replace(leaf, mode=False)
    if leaves == best.leaves:
        return best
    return planned(leaves)._replace(looked_up=best.looked_up)


def _with_row_axes(first: Planned, planned: Callable[[list[LeafSpec]], Planned]) -> Planned:
    """The plan in which each leaf has the rows of the fewest bytes.

    The reads of an array ``[L, V, D]`` may be of rows ``[V, D]``, of rows ``[D]``, or of
    both, and then the finer ones serve all. If none do, the leaf is dense.
    """
    plans = [first]
    while deeper := {
        i: dataclasses.replace(leaf, row_axes=leaf.row_axes + 1)
        for i, leaf in enumerate(plans[-1].leaves)
        if leaf.row_axes == len(plans) and _may_have_finer_rows(plans[-1], i)
    }:
        leaves = [deeper.get(i, leaf) for i, leaf in enumerate(plans[-1].leaves)]
        plans.append(planned(leaves))
    if len(plans) == 1:
        return first
    best = [_best_plan(plans, i).leaves[i] for i in range(len(first.leaves))]
    same = (plan for plan in plans if plan.leaves == best)
    return next(same, None) or planned(best)


def _best_plan(plans: Sequence[Planned], number: int) -> Planned:
    """The plan, of several with ever finer rows, in which a leaf has the fewest bytes."""
    by_rows = [plan for plan in plans if plan.kind(number) != "dense"]
    if not by_rows:
        return plans[0]
    if plans[0].kind(number) == "unused":
        return next((x for x in plans if number not in x.no_grad), plans[0])
    best, leaf = by_rows[0], plans[0].leaves[number]
    for plan in by_rows[1:]:
        if is_below(plan.bytes_of_rows(number), best.bytes_of_rows(number)):
            best = plan
    # If rows are as large as the array, and numbers of finer ones do not fit, it is dense;
    # or it is looked up by finer ones and used as a whole: the user is told.
    told = lambda x: x.looked_up.get(number) or not x.leaves[number].may_be_sparse  # noqa: E731
    mixed = [x for x in plans if x.kind(number) == "dense" and told(x)]
    if mixed and leaf.mode is None and best.rows_are_larger(number):
        return mixed[0]
    return best


def _may_have_finer_rows(planned: Planned, number: int) -> bool:
    """True for an array with more axes that is looked up, or picked apart."""
    leaf, use = planned.leaves[number], planned.dense.get(number)
    unread = planned.kind(number) == "unused" and number not in planned.no_grad
    if leaf.aval.ndim < leaf.row_axes + 2 or unread:
        return False
    is_layer = use is not None and use.what in _PRODUCTS and not use.of_product
    return leaf.may_be_sparse and not is_layer


# --- planning ---------------------------------------------------------------------------


class Uses(NamedTuple):
    """Uses of leaves besides reads by ids, the first of each kind for each leaf."""

    whole: dict[int, DenseUse]  # by an equation that needs the whole array
    fixed: dict[int, DenseUse]  # of rows whose numbers are constants, ``table[5:8]``
    products: dict[int, DenseUse]  # in a product that is a view, ``table @ w``
    #: By an equation that may move or pick its elements: the leaf may still be looked up,
    #: but not by whole rows.
    moves: dict[int, DenseUse]
    no_grad: dict[int, DenseUse]  # of the whole, that no gradient reaches

    def add(self, later: "Uses") -> None:
        for uses, more in zip(self, later, strict=True):
            uses |= more | uses


#: Their outputs do not contain elements of their operands.
_PRODUCTS = ("dot_general", "conv_general_dilated")
_REDUCTIONS = ("argmax", "argmin", "reduce_max", "reduce_min", "reduce_prod", "reduce_sum")


class Planner(ViewWalk):
    """Walks without values, and notes what the tables are used for."""

    def __init__(self, leaves: dict[int, LeafSpec], eager: bool = False) -> None:
        self.eager = eager
        self.plan: SiteTree = []  # the reads, in order
        self.uses = Uses({}, {}, {}, {}, {})  # all other uses
        self._leaves = leaves
        self._loops: tuple[int, ...] = ()
        #: True while the step is a product with a one-hot array, which may have weights.
        self._is_one_hot = False
        #: Views of fixed rows that were read already, and whether with slots. A body may
        #: use those read outside.
        self._rows_read: ChainMap[tuple[View, bool], None] = ChainMap()

    def constant(self, value: Any) -> None:
        return None

    def step(self, eqn: Equation, operands: Values, scope: Scope) -> Values:
        if eqn.primitive.name != "dot_general":
            return super().step(eqn, operands, scope)
        held = [isinstance(x, View) for x in operands]
        self._is_one_hot = picks_rows(eqn, held, scope.origins)
        outputs = super().step(eqn, operands, scope)
        self._is_one_hot = False
        if isinstance(outputs[0], View):
            use = DenseUse(eqn.primitive.name, self.source(eqn), of_product=True)
            _note(self.uses.products, outputs[0], use)
        return outputs

    def whole(self, value: Any, eqn: Equation | None) -> Any:
        if not isinstance(value, View):
            return None
        use = DenseUse("the function's own result", self.caller)
        if eqn is not None:
            to_scalar = not any(map(_jax.shape_of, eqn.outvars))
            what = ONE_HOT if self._is_one_hot else _jax.kind(eqn)
            use = DenseUse(what, self.source(eqn), to_scalar)
        if eqn is not None and use.what not in (*_PRODUCTS, *_REDUCTIONS):
            _note(self.uses.moves, value, use)
        parts = parts_of(value)
        fixed = all(few for _, slotted, few in parts if slotted)
        fixed = fixed and self._may_be_read(value)
        _note(self.uses.fixed if fixed else self.uses.whole, value, use)
        for view, slotted, few in parts:
            if not (slotted or (few and self._may_be_read(view))):
                for table in view.reads.values():
                    self.uses.no_grad.setdefault(table.leaf, use)
            elif (fixed or not slotted) and (view, slotted) not in self._rows_read:
                self._rows_read[view, slotted] = None
                with contextlib.nullcontext() if slotted else self._inside():
                    self._plan(use.source, every_row(view), False, slotted)
        return None

    def _may_be_read(self, value: View) -> bool:
        """True if the runner knows the type of what it reads.

        On a mesh of Explicit axes it does if the tables are not split.
        """
        avals = [self._leaves[table.leaf].aval for table in tables_read(value)]
        return all(explicit_mesh(x) is None or not any(x.sharding.spec) for x in avals)

    def read(self, eqn: Equation, read: RowRead, values: Values) -> None:
        use = DenseUse(_jax.kind(eqn), self.source(eqn))
        is_product = use.what.endswith("dot_general")
        leaves = [table.leaf for table in tables_read(read.view) if is_product]
        many = [x for x in leaves if self._multiplies_many(self._leaves[x], read.count)]
        self.uses.whole.update((x, use) for x in many if x not in self.uses.whole)
        if not many:
            self._plan(use.source, read, by_ids=True)

    def _multiplies_many(self, leaf: LeafSpec, count: int) -> bool:
        """True if a product with so many rows of a leaf remains one with all of it.

        Products for tokens of few kinds, or all nodes of a graph, are meant as products.
        """
        rows, most = math.prod(self._loops) * count, MANY_BYTES * leaf.table_shape[0]
        return leaf.mode is None and is_below(most - 1, rows)

    def _plan(
        self, source: Source | None, read: RowRead, by_ids: bool, slotted: bool = True
    ) -> None:
        for (has_slot, *_), table in read.view.reads.items():
            leaf, graded = self._leaves[table.leaf], slotted and has_slot
            aval = leaf.aval
            exchange = leaf.exchange_of(read.count) if graded else None
            site = Site(
                leaf=table.leaf,
                table_shape=leaf.table_shape,
                dtype=aval.dtype,
                count=read.count,
                loops=self._loops,
                index_dtype=index_dtype(leaf.table_shape[0], np.dtype(read.numbers.dtype)),
                varying=_jax.varying_axes(aval, read.numbers),
                exchange=exchange,
                sharding=leaf.sharding(exchange),
                source=source,
                by_ids=by_ids,
                packed=read.packed,
                at_now=table.now is not None,
                graded=graded,
            )
            self.plan.append(site)

    def part(self, eqn: Equation, operands: Values, needs_grad: list[bool]) -> Values:
        part = plan_part(eqn, operands, needs_grad, self._leaves)
        self.plan.append(part.plan)
        self.uses.add(part.uses)
        # Each gets a view of its own, as if a jitted function had returned it.
        return jax.tree.map(lambda x: x, part.outputs)

    def loop(
        self, eqn: Equation, turn: Turn, carry: Values, xs: Values
    ) -> tuple[Values, Values]:
        outer, self._loops = self._loops, (*self._loops, eqn.params["length"])
        with self._inside():
            result = turn(carry, xs)
        self._loops = outer
        return result

    def scan(self, eqn: Equation, operands: Values, needs_grad: list[bool]) -> Values:
        for value in operands:  # whose elements the body may pick
            if isinstance(value, View):
                _note(self.uses.moves, value, DenseUse("scan", self.source(eqn)))
        return super().scan(eqn, operands, needs_grad)

    def switch(self, index: Any, branches: Sequence[Callable[[], Values]]) -> Values:
        with self._inside():
            for branch in branches:
                with self._inside():
                    outputs = branch()
        return outputs

    def rematerialise(
        self, eqn: Equation, function: Callable[[Values], Values], operands: Values
    ) -> Values:
        with self._inside():
            return function([x for x in operands if not isinstance(x, View)])

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        """A context whose reads become one entry of the plan."""
        outer, self.plan = self.plan, []
        self._rows_read = self._rows_read.new_child()
        yield
        outer.append(self.plan)
        self.plan, self._rows_read = outer, self._rows_read.parents


def _note(uses: dict[int, DenseUse], view: View, use: DenseUse) -> None:
    for table in tables_read(view):
        uses.setdefault(table.leaf, use)


def _planned(
    program: Program, outputs: Outputs, eager: bool, leaves: list[LeafSpec]
) -> Planned:
    """The plan in which the leaves that are only looked up are sparse."""
    candidates = {i: leaf for i, leaf in enumerate(leaves) if leaf.may_be_sparse}
    dense: dict[int, DenseUse] = {}
    moves: dict[int, DenseUse] = {}
    looked_up: dict[int, list[Site]] = {}
    needs_grad = output_needs_grad(program, outputs.num_results)
    while True:
        # A leaf that turns out dense is an ordinary array in the next round.
        tables = {i: leaf for i, leaf in candidates.items() if i not in dense}
        planner = Planner(tables, eager)
        uses = planner.uses
        inputs = [
            tables[i].view(i) if i in tables else None for i in range(len(program.invars))
        ]
        values = planner.program(program, inputs, needs_grad)
        for value in values:
            planner.whole(value, None)
        sites: dict[int, list[Site]] = {}
        for site in jax.tree.leaves(planner.plan):
            if site.graded:
                sites.setdefault(site.leaf, []).append(site)
        by_ids = {leaf for leaf in sites if any(site.by_ids for site in sites[leaf])}
        alone = list(uses.fixed.keys() & uses.moves.keys() - by_ids)
        picked = unread_lookups(program, alone, needs_grad) if alone else {}
        for leaf, use in uses.fixed.items():  # `tables[1][ids]` picks elements of a row
            if picked.get(leaf) or not _are_few(sites[leaf], tables[leaf]):
                uses.whole.setdefault(leaf, use)
        for leaf in uses.whole.keys() & uses.products.keys() - by_ids:
            uses.whole[leaf] = uses.products[leaf]  # not what follows the layer
        if not dense:
            looked_up = {leaf: sites[leaf] for leaf in by_ids}
        moves |= uses.moves
        if not uses.whole:
            break
        dense |= uses.whole
    looked_up = sites | looked_up
    never = [leaf for leaf in dense if leaf in moves and leaf not in looked_up]
    unread = unread_lookups(program, never, needs_grad) if never else {}
    dense |= {x: moves[x] for x in unread if unread[x] and moves[x].what == "scan"}
    reads = planner.plan, dense, looked_up, unread, uses.no_grad
    return Planned(program, outputs, leaves, *reads, eager)


def _are_few(sites: Sequence[Site], leaf: LeafSpec) -> bool:
    """True if reads of rows by constant numbers have a gradient of rows.

    If they are at most half of the rows, or at most as many as those looked up by ids:
    weights that are cut into parts, or layers in one array, have a dense gradient.
    """
    if leaf.mode in (True, "if_smaller"):
        return True
    fixed = sum(site.total for site in sites if not site.by_ids)
    by_ids = sum(site.total for site in sites if site.by_ids)
    fewer = is_below(0, fixed) and is_below(fixed, by_ids + 1)
    return fewer or is_below(2 * fixed, leaf.table_shape[0] + 1)


def output_needs_grad(program: Program, num_results: int) -> list[bool]:
    """For each output of a call whether it is part of the differentiated result."""
    return [i < num_results for i in range(len(program.outvars))]


# --- without jax.jit --------------------------------------------------------------------


@dataclasses.dataclass
class PartPlan:
    """The plan of an equation with a program inside, where no ``jax.jit`` is around it.

    It is kept from call to call, with the program that run.py compiles for it: JAX would
    compile the runner's program anew each time. (A warm call that plans anew takes 1.4 to
    1.7 times as long, jax 0.10.2.)
    """

    plan: SiteTree
    uses: Uses
    outputs: Sequence[Any]  # views, and None for values
    #: From operands and cotangent slots; by ``every`` of :func:`run_planned`.
    runs: dict[Any, Callable[[Values, Any], Any]] = dataclasses.field(default_factory=dict)


def plan_part(
    eqn: Equation, operands: Values, needs_grad: list[bool], leaves: dict[int, LeafSpec]
) -> PartPlan:
    """The kept plan of an equation with these operands."""
    bare: list[Any] = jax.tree.map(lambda _: None, operands)  # in views, too, no arrays

    def make() -> PartPlan:
        planner = Planner(leaves)
        outputs = planner.inside(eqn, bare, needs_grad)
        return PartPlan(planner.plan, planner.uses, outputs)

    key = jax.tree.structure(bare), tuple(needs_grad), tuple(leaves.items())
    return kept(eqn, key, make)
