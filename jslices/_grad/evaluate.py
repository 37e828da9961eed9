"""Running a traced program again, with a slot in every planned lookup.

Everything but the lookups is bound as it was traced, so values stay what they were. Each
control-flow primitive is rebuilt from JAX's public function: a loop gets the slots as
additional inputs per iteration and hands the row numbers out per iteration; a branch that
is not taken reports empty slots.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jslices import _jax
from jslices._grad import lookups, rules
from jslices._grad.views import Ids, View, look_up, whole, without_slots
from jslices._grad.walk import (
    CALLS,
    REMAT,
    Plan,
    Site,
    body_outlets,
    invariant_carries,
    map_sites,
)
from jslices._lookup.rows import lookup_rows
from jslices._rows.bounds import canonical_indices

# Both mirror a plan: an IndexedSlices of zeros, and the row numbers, for every site.
Slots = list[Any]
Indices = list[Any]


def evaluate(
    program: _jax.Program,
    operands: Sequence[Any],
    through: Sequence[bool],
    plan: Plan,
    slots: Slots,
) -> tuple[list[Any], Indices]:
    """The program's outputs (views among them), and the row numbers of every lookup.

    ``through`` tells for each output whether a gradient comes in there, as in ``walk``.
    """
    reached = _jax.gradient_variables(program, through)
    env: dict[Any, Any] = dict(zip(program.constvars, _jax.constants(program), strict=True))
    env.update(zip(program.invars, operands, strict=True))

    entries = zip(plan, slots, strict=True)
    indices: Indices = []
    for eqn in _jax.live_equations(program):
        given = [_jax.read(atom, env) for atom in eqn.invars]
        if any(isinstance(value, View) for value in given):
            outlets = [var in reached for var in eqn.outvars]
            if not _jax.is_reached(eqn, reached):
                given = [without_slots(value) for value in given]
            outputs, found = _equation(eqn, given, outlets, entries)
            if found is not None:
                indices.append(found)
        else:
            outputs = _jax.bind(eqn, given)
        env.update(zip(eqn.outvars, outputs, strict=True))
    return [_jax.read(atom, env) for atom in program.outvars], indices


def _equation(
    eqn: _jax.Equation,
    operands: list[Any],
    through: list[bool],
    entries: Iterator[tuple[Any, Any]],
) -> tuple[Sequence[Any], Indices | None]:
    """One equation that some view goes into; mirrors ``Walk._equation``."""
    name = eqn.primitive.name
    if name in CALLS:
        plan, slots = next(entries)
        return evaluate(_jax.body(eqn), operands, through, plan, slots)
    if name in REMAT:
        return _remat(eqn, operands, through, *next(entries))
    if name == "cond":
        return _cond(eqn, operands, through, *next(entries))
    if name == "scan":
        return _scan(eqn, operands, through, *next(entries))
    outputs = rules.commuting(eqn, operands)
    if outputs is not None:
        return outputs, None
    view = operands[0]
    lookup = lookups.lookup(eqn, view) if isinstance(view, View) else None
    if lookup is not None:
        return _lookup(view, lookup, [whole(x) for x in operands[1:]], *next(entries))
    # No gradient flows here, or the view would not be one: the array itself will do.
    return _jax.bind(eqn, [whole(value) for value in operands]), None


def _lookup(
    view: View, lookup: lookups.Lookup, others: list[Any], plan: Plan, slots: Slots
) -> tuple[list[Any], Indices]:
    entries = zip(plan, slots, strict=True)
    indices: Indices = []

    def take(
        leaf: int, table: jax.Array, ids: Ids, mode: Any = "clip", fill_value: Any = None
    ) -> jax.Array:
        site, slot = next(entries)
        assert site.leaf == leaf
        record = ids.record
        if record.dtype != site.index_dtype:
            record = canonical_indices(record, table.shape[0]).astype(site.index_dtype)
        indices.append(record)
        return lookup_rows(table, ids.read, slot, mode, fill_value)

    values = [None, *others]
    good = None if lookup.good is None else lookup.good(values)
    rows = look_up(view, lookup.ids(values), lookup.mode, lookup.fill_value, take, good)
    return [lookup.arrange(rows)], indices


def _remat(
    eqn: _jax.Equation,
    operands: list[Any],
    through: list[bool],
    plan: Plan,
    slots: Slots,
) -> tuple[list[Any], Indices]:
    is_view = [isinstance(value, View) for value in operands]

    def again(arrays: list[Any], slots: Slots) -> tuple[list[Any], Indices]:
        arrays_left = iter(arrays)
        values = [
            value if view else next(arrays_left)
            for value, view in zip(operands, is_view, strict=True)
        ]
        outputs, indices = evaluate(_jax.body(eqn), values, through, plan, slots)
        return [whole(value) for value in outputs], indices

    arrays = [x for x, view in zip(operands, is_view, strict=True) if not view]
    return jax.checkpoint(again, **_jax.remat_options(eqn.params))(arrays, slots)


def _cond(
    eqn: _jax.Equation,
    operands: list[Any],
    through: list[bool],
    plans: Plan,
    slots: Slots,
) -> tuple[list[Any], Indices]:
    index, *given = operands

    def make(taken: int, branch: _jax.Program) -> Any:
        def run(slots: Slots) -> tuple[list[Any], Indices]:
            outputs, found = evaluate(branch, given, through, plans[taken], slots[taken])
            indices = [
                found if number == taken else _empty(plan)
                for number, plan in enumerate(plans)
            ]
            return [whole(value) for value in outputs], indices

        return run

    branches = [make(i, branch) for i, branch in enumerate(eqn.params["branches"])]
    return lax.switch(whole(index), branches, slots)


def _scan(
    eqn: _jax.Equation,
    operands: list[Any],
    through: list[bool],
    plan: Plan,
    slots: Slots,
) -> tuple[list[Any], Indices]:
    body, (num_consts, num_carried) = _jax.body(eqn), _jax.scan_counts(eqn.params)
    kept = invariant_carries(eqn)
    consts = operands[:num_consts]
    carried = operands[num_consts : num_consts + num_carried]
    still = {i: carried[i] for i in kept if isinstance(carried[i], View)}
    moving = [whole(x) for i, x in enumerate(carried) if i not in still]
    inputs = [whole(x) for x in operands[num_consts + num_carried :]]

    def step(moving: list[Any], per_step: tuple[list[Any], Slots]) -> tuple[Any, Any]:
        xs, slots = per_step
        left = iter(moving)
        carry = [still[i] if i in still else next(left) for i in range(num_carried)]
        outputs, indices = evaluate(body, [*consts, *carry, *xs], through, plan, slots)
        new = [whole(outputs[i]) for i in range(num_carried) if i not in still]
        return new, ([whole(x) for x in outputs[num_carried:]], indices)

    # Inside the loop a site is executed once per iteration.
    plan = map_sites(Site.inside_loop, plan)
    through = body_outlets(eqn, through)
    final, (ys, indices) = lax.scan(
        step, moving, (inputs, slots), **_jax.scan_options(eqn.params)
    )
    left = iter(final)
    carry = [still[i] if i in still else next(left) for i in range(num_carried)]
    return [*carry, *ys], indices


def _empty(plan: Plan) -> Indices:
    """Empty slots for every site of a branch that is not taken."""

    def empty(site: Site) -> jax.Array:
        shape = (*site.times, site.count)
        none = jnp.full(shape, site.table_shape[0], site.index_dtype)
        return _jax.as_varying(none, site.varying)

    return map_sites(empty, plan)
