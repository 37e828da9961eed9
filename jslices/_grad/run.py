"""The runner of a planned call, with a cotangent slot for each read.

The runner meets the reads of its plan in the plan's order, and each takes the next pair of
a site and its slot. What mirrors the plan (slots, row numbers) has a list inside for every
loop, branch, checkpoint and compiled part. All else is bound as it was traced, so that
values keep their bits.

``slots_for`` makes zeros for the sites, ``run_planned`` gives the outputs and the row
numbers, JAX differentiates it by the slots (api.py), and ``gradients_of`` joins cotangents
and row numbers. Measured: ``MANY_ALIKE``, and the loop that ``bind`` leaves out. Begin with
``run_planned``, then ``Runner._read`` and ``Runner.loop``.
"""

import contextlib
import functools
import itertools
from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad
from jax.lax import GatherScatterMode as Mode
from jax.sharding import NamedSharding, PartitionSpec

from jslices import _jax
from jslices._exchange.rows import rows_from_elsewhere
from jslices._grad.call import LeafSpec
from jslices._grad.memo import weak_equation
from jslices._grad.plan import Planned, Site, SiteTree, output_needs_grad, plan_part
from jslices._grad.reads import RowRead, every_row, parts_of
from jslices._grad.views import RowIds, TableView, Unslotted, Values, View
from jslices._grad.walk import Scope, Turn, ViewWalk
from jslices._jax import Equation
from jslices._lookup.mark import dense_is_intended
from jslices._place import boundary
from jslices._rows.access import canonical_indices, gathered_once, row_loop_p
from jslices._slices import Facts, IndexedSlices, concat_slices, slices_of
from jslices._typing import Aval

#: Both mirror a plan: zeros ``[entries, *D]``, and the row numbers, for every site.
SlotTree = list[Any]
IndexTree = list[Any]

#: From so many equal equations on, linearizing one function for all takes less time (twelve
#: layers: 0.6 of the time to trace them, jax 0.10.2).
MANY_ALIKE = 3


def run_planned(
    planned: Planned,
    primals: Sequence[Any],
    slots: SlotTree,
    every: bool = False,
) -> tuple[Values, IndexTree]:
    """The outputs of the traced call, and the row numbers of its reads.

    They are those of gradients, and None for what gets none; or, of ``every`` read, those
    of the rows that are read: a row that an id out of range reads, too.
    """
    leaves = {i: x for i, x in enumerate(planned.leaves) if planned.kind(i) != "dense"}
    operands = [leaves[i].view(i, x) if i in leaves else x for i, x in enumerate(primals)]
    runner = Runner(planned.plan, slots, leaves, planned.eager, every)
    needs_grad = output_needs_grad(planned.program, planned.outputs.num_results)
    outputs = runner.program(planned.program, operands, needs_grad)
    arrays = (runner.whole(value, None) for value in outputs)
    # Scalars that are constants are literals of the program, which only JAX knows.
    results = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in arrays]
    return results, runner.indices


@contextlib.contextmanager
def without_dense_warning() -> Iterator[None]:
    """A context in which dense gradients of marked tables trigger no warning."""
    token = dense_is_intended.set(True)
    try:
        yield
    finally:
        dense_is_intended.reset(token)


# --- cotangent slots --------------------------------------------------------------------

# JAX insists that the cotangent of an array has the shape of the array, so a table cannot
# get slices. Therefore a *cotangent slot* is added to the rows of a read: zeros of their
# shape. Its cotangent is the row gradient, and the table gets none.


def slots_for(plan: SiteTree, every: bool = False) -> SlotTree:
    """The cotangent slots of all reads.

    None for what gets no gradient, unless ``every`` read has one.
    """

    def slot(site: Site) -> jax.Array | None:
        if not (site.graded or every):
            return None
        shape = (*site.loops, site.entries, *site.table_shape[1:])
        zeros = jnp.zeros(shape, site.dtype, out_sharding=site.split)
        return _jax.as_varying(zeros, site.varying)

    return jax.tree.map(slot, plan)


def gradients_of(
    sites: Sequence[Site], values: Sequence[jax.Array], indices: Sequence[jax.Array]
) -> dict[int, IndexedSlices]:
    """The gradients of leaves ``[V, *D]``, from the values and row numbers of all sites."""
    parts: dict[int, list[IndexedSlices]] = {}
    for site, rows, numbers in zip(sites, values, indices, strict=True):
        parts.setdefault(site.leaf, []).append(_gradient_of(site, rows, numbers))
    return {i: x[0] if len(x) == 1 else concat_slices(x) for i, x in parts.items()}


def _gradient_of(site: Site, values: jax.Array, indices: jax.Array) -> IndexedSlices:
    """The gradient of one read, its executions joined."""
    shape = (site.table_shape[0], *values.shape[indices.ndim :])
    values, indices = boundary.restore_sharding((values, indices), site.split)
    facts = Facts(packed=site.packed, at_now=site.at_now)
    if site.exchange is not None:
        facts = facts._replace(placement=site.exchange.placement)
        return slices_of(values, indices, shape, facts)._flattened()
    values = values.reshape(indices.size, *shape[1:]).astype(site.dtype)  # not weak
    indices = indices.reshape(-1)
    return IndexedSlices.of(*boundary.on_all_devices(values, indices), shape, facts)


#: ``rows + slot``, without an addition.
slotted_p = _jax.identity_primitive("slotted")
ad.primitive_jvps[slotted_p] = lambda primals, tangents: (
    primals[0],
    ad.add_tangents(*tangents),
)


# --- the walk ---------------------------------------------------------------------------


class _Body:
    """The state of a body of a loop, a branch or a checkpoint, while JAX traces it."""

    def __init__(
        self, plan: SiteTree, slots: SlotTree, outer: "_Body | None" = None
    ) -> None:
        self.entries = zip(plan, slots, strict=True)  # not read so far
        self.indices: IndexTree = []  # of the reads so far
        #: Arrays behind views, with cotangent slots (True) and without. A body may use
        #: what was computed outside of it.
        self.arrays: dict[bool, ChainMap[View, jax.Array]] = {
            slotted: outer.arrays[slotted].new_child() if outer else ChainMap()
            for slotted in (True, False)
        }
        #: Views whose rows were read for that, with slots and without, as planned.
        self.rows_read: ChainMap[tuple[View, bool], None] = (
            outer.rows_read.new_child() if outer else ChainMap()
        )


class Runner(ViewWalk):
    """Walks with values, and a cotangent slot in every planned read.

    Everything but the reads is bound as it was traced, so values do not change. Control
    flow is rebuilt from JAX's public functions: a loop gets the slots as additional inputs
    of each iteration and hands the row numbers out; a branch that is not taken reports
    row numbers that are out of range.
    """

    def __init__(
        self,
        plan: SiteTree,
        slots: SlotTree,
        leaves: dict[int, LeafSpec],
        eager: bool = False,
        every: bool = False,
    ) -> None:
        self.eager, self._every = eager, every
        self._leaves = leaves
        self._body = _Body(plan, slots)
        self._rows: jax.Array | None = None  # of the last read

    @property
    def indices(self) -> IndexTree:
        """The row numbers of the reads so far."""
        return self._body.indices

    def constant(self, value: Any) -> Any:
        return value

    def bind(self, eqn: Equation, operands: Values, scope: Scope) -> Values:
        # The loop of `embedding_lookup` is left out, as the read brings its own: two of
        # them make a gather of rows of 64 three times as slow (jax 0.10.2).
        if eqn.primitive is row_loop_p and operands[0] is self._rows:
            return [operands[0]]
        times = scope.times_linearized.get(id(eqn), 0)
        often = times >= (1 if self.eager else MANY_ALIKE)
        return _jax.bind(eqn, operands, as_function=often)

    def whole(self, value: Any, eqn: Equation | None) -> Any:
        any_slotted = False
        for view, slotted, few in parts_of(value):
            any_slotted |= slotted
            if not few or (view, slotted) in self._body.rows_read:
                continue
            self._body.rows_read[view, slotted] = None
            rows = self._read(every_row(view), [], None, slotted)
            arrays = self._body.arrays[slotted]
            arrays[view] = self._array(view, False) if rows is None else rows
        # No other use has a gradient, or the plan would have made the table dense.
        return self._array(value, any_slotted)

    def _array(self, value: Any, slotted: bool) -> Any:
        """The array behind a view, made of rows that have been read if it is slotted."""
        if not isinstance(value, View):
            return value
        slotted = slotted and not isinstance(value, Unslotted)
        arrays = self._body.arrays[slotted]
        if value not in arrays:
            view = value if slotted else value.forward
            arrays[value] = view.whole(lambda part: self._array(part, slotted))
        return arrays[value]

    def read(self, eqn: Equation, read: RowRead, values: Values) -> jax.Array:
        with jax.named_scope(f"read {read.count} rows"):  # in profiles
            self._rows = self._read(read, values, eqn.outvars[0].aval)
        return self._rows

    def _read(
        self, read: RowRead, values: Values, aval: Aval | None, slotted: bool = True
    ) -> Any:
        def take(table: TableView, ids: RowIds, mode: Mode, fill_value: Any) -> jax.Array:
            site, slot = next(self._body.entries)
            assert site.leaf == table.leaf
            record = ids.record
            if record.dtype != site.index_dtype:
                record = canonical_indices(record, table.shape[0]).astype(site.index_dtype)
            split, slot = boundary.shardings_of(slot), boundary.drop_sharding(slot)
            if site.exchange is None:
                rows = gathered_once(table.take(ids.read, mode, fill_value))
                rows = slotted_p.bind(rows, slot)
            else:
                array = boundary.drop_sharding(table.as_it_is_now())
                rows, record = rows_from_elsewhere(
                    site.exchange, array, ids.read, record, slot, mode, fill_value
                )
            self._body.indices.append(boundary.restore_sharding(record, split))
            return rows

        tables = [self._leaves[x.leaf].aval for x in read.view.reads.values()]
        mesh = boundary.explicit_mesh([aval, *tables])
        with boundary.with_auto_axes(mesh):
            if slotted:
                values = boundary.drop_sharding(values)
                rows = read.rows(values, take, self._plainly, self._every)
                rows = read.arrange(rows, values)
            elif (rows := self._without_slots(read, values)) is None:
                return None
        split = boundary.shardings_of(tables[0] if aval is None else aval)
        if mesh is not None and aval is not None and aval.sharding.mesh.empty:
            split = NamedSharding(mesh, PartitionSpec())  # a sparse matrix has no mesh
        return boundary.restore_sharding(rows, split)

    def _plainly(self, table: TableView, ids: RowIds) -> Any:
        """Rows without a cotangent slot."""
        site, slot = next(self._body.entries)
        noted = None
        if self._every:
            noted = ids.read.astype(site.index_dtype)
            noted = boundary.restore_sharding(noted, boundary.shardings_of(slot))
        self._body.indices.append(noted)
        return table.take(ids.read, "clip")

    def _without_slots(self, read: RowRead, values: Values) -> Any:
        """Fixed rows; None if they are those of arrays and nobody asks which."""
        plan, slots = next(self._body.entries)
        rows, noted = None, jax.tree.map(lambda _: None, plan)
        if self._every or any(table.now for table in read.view.reads.values()):
            plainly = lambda table, ids, *_: self._plainly(table, ids)  # noqa: E731
            of_rows = functools.partial(read.rows, values, plainly, plainly)
            rows, noted = self._inside(plan, slots, of_rows)
        self._body.indices.append(noted)
        return rows

    def part(self, eqn: Equation, operands: Values, needs_grad: list[bool]) -> Values:
        part = plan_part(eqn, operands, needs_grad, self._leaves)
        leaves, every = self._leaves, self._every
        if every not in part.runs:
            plan, equation = part.plan, weak_equation(eqn)

            def of_part(operands: Values, slots: SlotTree) -> tuple[Values, IndexTree]:
                runner = Runner(plan, slots, leaves, every=every)
                return runner.inside(equation(), operands, needs_grad), runner.indices

            of_part.__name__ = eqn.params.get("name", eqn.primitive.name)  # in profiles
            part.runs[every] = jax.jit(of_part)
        _, slots = next(self._body.entries)
        outputs, indices = part.runs[every](operands, slots)
        self._body.indices.append(indices)
        return outputs

    def loop(
        self, eqn: Equation, turn: Turn, carry: Values, xs: Values
    ) -> tuple[Values, Values]:
        plan, slots = next(self._body.entries)

        def body(carry: Values, per_turn: tuple[Values, SlotTree]) -> tuple[Any, Any]:
            xs, slots = per_turn
            (carry, ys), indices = self._inside(plan, slots, turn, carry, xs)
            return carry, (ys, indices)

        options = _jax.scan_options(eqn.params)
        final, (ys, indices) = lax.scan(body, carry, (xs, slots), **options)
        self._body.indices.append(indices)
        return final, ys

    def switch(self, index: Any, branches: Sequence[Callable[[], Values]]) -> Values:
        plans, slots = next(self._body.entries)

        def nowhere(site: Site, slot: Any) -> jax.Array | None:
            """Row numbers out of range, for a read in a branch that is not taken."""
            if slot is None:
                return None
            rows = slot.shape[: slot.ndim - len(site.table_shape) + 1]
            indices = jnp.full(rows, site.table_shape[0], site.index_dtype)
            indices = boundary.restore_sharding(indices, boundary.shardings_of(slot))
            return _jax.as_varying(indices, site.varying)

        def make(taken: int, branch: Callable[[], Any]) -> Callable[[SlotTree], Any]:
            def taken_branch(slots: SlotTree) -> tuple[Any, IndexTree]:
                outputs, own = self._inside(plans[taken], slots[taken], branch)
                indices = [
                    own if i == taken else jax.tree.map(nowhere, plans[i], slots[i])
                    for i in range(len(plans))
                ]
                return outputs, indices

            return taken_branch

        runs = [make(number, branch) for number, branch in enumerate(branches)]
        outputs, indices = lax.switch(index, runs, slots)
        self._body.indices.append(indices)
        return outputs

    def rematerialise(
        self, eqn: Equation, function: Callable[[Values], Values], operands: Values
    ) -> Values:
        plan, slots = next(self._body.entries)
        are_values = [not isinstance(x, View) for x in operands]

        def again(slots: SlotTree, *values: Any) -> tuple[Values, IndexTree]:
            return self._inside(plan, slots, function, values)

        options = _jax.remat_options(_jax.parameters(eqn), are_values)
        values = itertools.compress(operands, are_values)
        outputs, indices = jax.checkpoint(again, **options)(slots, *values)
        self._body.indices.append(indices)
        return outputs

    def _inside(
        self, plan: SiteTree, slots: SlotTree, run: Callable[..., Any], *args: Any
    ) -> tuple[Any, IndexTree]:
        """``run(*args)`` and the row numbers of its reads, with a state of its own."""
        outer = self._body
        self._body = inner = _Body(plan, slots, outer)
        try:
            return run(*args), inner.indices
        finally:
            self._body = outer
