"""Rows that were not touched, brought to where a dense optimizer would have them.

Every row remembers the last step it did. Before it is read it does the missed ones in
closed form (``catch_up``), and before parameters are saved or evaluated all rows do
(``flush``).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jslices._jax import flatten
from jslices._rows.bounds import canonical_indices, take_rows
from jslices._rows.select import where_rows
from jslices._rows.sums import sum_duplicates
from jslices._slices import IndexedSlices
from jslices.optim._engine.arithmetic import next_count, per_row
from jslices.optim._engine.in_place import Kernel, step_at_once, step_rows
from jslices.optim._engine.rule import Rule, row_like
from jslices.optim._exact.drift import Missed

#: Elements of a table that ``flush`` brings up to date at a time.
CHUNK_ELEMENTS = 1 << 18

#: The last step of a row that shall never move: it has missed nothing, ever.
FROZEN = np.iinfo(np.int32).max

RulesFor = Callable[[Any, int], list[Rule]]


class Clock(NamedTuple):
    """How far the rows are."""

    last: Any  #: like params, int32 ``[V]``: the last step that each row did.
    told: Any  #: like params, float32 ``[V, width]``: see :class:`drift.Drift`.
    run: jax.Array  #: float32 ``[2]``: how far a schedule has run.


def new_clock(params: Any, rules: Sequence[Rule]) -> Clock:
    """The clock before the first step."""
    leaves, tree = flatten(params)
    start, run = jnp.zeros((), jnp.int32), jnp.zeros((2,), jnp.float32)
    last = [row_like(p, jnp.int32) for p in leaves]
    told = [
        jnp.broadcast_to(_drift(rule).told(start, run), (*rows.shape, _drift(rule).width))
        + rows[..., None].astype(jnp.float32)  # to be where the rows are
        for rule, rows in zip(rules, last, strict=True)
    ]
    return Clock(tree.unflatten(last), tree.unflatten(told), run)


def ticked(clock: Clock, count: jax.Array, rule: Rule) -> Clock:
    """The clock with the run of the step that follows ``count`` steps."""
    return clock._replace(run=_drift(rule).advanced(clock.run, next_count(count)))


def keeping_time(kernel: Kernel, rule: Rule, count: jax.Array, run: jax.Array) -> Kernel:
    """The kernel with two more slots, for when each row was stepped.

    A row that has not caught up gets NaN: under jit nothing can be raised, and a step from
    a stale row must not pass for a right one.
    """
    step = next_count(count)
    told = _drift(rule).told(step, run)

    def timed(g: jax.Array, *rest: jax.Array) -> tuple[jax.Array, ...]:
        *slots, last, old = rest
        update, *new = kernel(g, *slots)
        wrong = jnp.where(per_row(last == FROZEN, update), 0.0, jnp.nan)
        update = where_rows(last == count, update, wrong.astype(update.dtype))
        return update, *new, *_now(step, told, last, old)

    return timed


def refuse_stale(grads: Sequence[Any], last: Sequence[Any], count: jax.Array) -> None:
    """Raises for rows that have not caught up, where all is known."""
    for grad, steps in zip(grads, last, strict=True):
        if grad is None or any(
            isinstance(x, jax.core.Tracer) for x in (*jax.tree.leaves(grad), steps, count)
        ):
            continue
        known = jnp.atleast_1d(steps)
        rows = jnp.arange(known.shape[0])
        if isinstance(grad, IndexedSlices):
            rows = canonical_indices(grad.indices, known.shape[0])
        last_step = take_rows(known, rows, fill_value=int(count))
        late = (last_step != count) & (last_step != FROZEN)
        if isinstance(late, jax.core.Tracer):  # all is known, but something is traced
            continue
        behind = np.asarray(late)
        if behind.any():
            row = int(rows[int(np.argmax(behind))])
            raise ValueError(
                f"row {row} did its last step at {int(known[row])}, the optimizer has done "
                f'{int(count)}: with untouched="exact" rows catch up before they are read: '
                "params, state = tx.catch_up(params, state, ids), or all of them by "
                "tx.flush(params, state)"
            )


def catch_up(rules_for: RulesFor, params: Any, state: Any, ids: Any) -> tuple[Any, Any]:
    """Brings the rows that ``ids`` name up to date, in place.

    Cost: a sort of K integers, and ``U * D`` elements of each parameter and slot.
    """
    leaves, tree = flatten(params)
    try:
        given = tree.flatten_up_to(ids)
    except ValueError as error:
        raise ValueError(
            "catch_up(params, state, ids): ids must mirror params, with an array of row "
            f"numbers for each table about to be read and None elsewhere; {error}"
        ) from error
    return _each(
        rules_for,
        params,
        state,
        [_unique(i, p) for i, p in zip(given, leaves, strict=True)],
    )


def flush(rules_for: RulesFor, params: Any, state: Any) -> tuple[Any, Any]:
    """Brings every row up to date, in place and some rows at a time.

    Cost: reads and writes ``V * D`` elements of each parameter and slot, once.
    """
    count = len(flatten(params)[0])
    return _each(rules_for, params, state, [slice(None)] * count)


def _unique(ids: Any, param: Any) -> jax.Array | slice | None:
    """``[min(K, V)]``: the distinct rows, then empty slots; or all, or none of them."""
    if ids is None or ids is True:
        return slice(None) if ids else None
    if isinstance(ids, IndexedSlices):
        raise TypeError(
            f"catch_up wants row numbers, got {ids}; rows catch up before their gradient "
            "is taken, so pass the ids that the lookup is about to read (slices.indices "
            "are those of a gradient)"
        )
    ids = jnp.asarray(ids)
    if not jnp.issubdtype(ids.dtype, jnp.integer) or not jnp.ndim(param):
        raise TypeError(
            f"catch_up wants integer row numbers of a table, got {ids.dtype}"
            f"{list(ids.shape)} for a parameter of shape {jnp.shape(param)}; pass None for "
            "what is not looked up, True for all of it"
        )
    ids = ids.reshape(-1)
    nothing = jnp.zeros((ids.shape[0], 0))
    return sum_duplicates(nothing, ids, param.shape[0], None)[1]


def _each(
    rules_for: RulesFor, params: Any, state: Any, which: Sequence[Any]
) -> tuple[Any, Any]:
    leaves, tree = flatten(params)
    rules = rules_for(params, len(leaves))
    names = tuple(rules[0].slots) if rules else ()
    count, run = state.count, state.clock.run
    columns = [
        tree.flatten_up_to(slot)
        for slot in (
            *(getattr(state, name) for name in names),
            state.clock.last,
            state.clock.told,
        )
    ]
    made: dict[int, Kernel] = {}
    results = []
    for rule, rows, *arrays in zip(rules, which, leaves, *columns, strict=True):
        if rows is None:
            results.append(arrays)
            continue
        if id(rule) not in made:
            made[id(rule)] = _coasting(rule, count, run)
        arrays = [jnp.asarray(x) for x in arrays]
        if isinstance(rows, slice):
            results.append(_all_rows(made[id(rule)], arrays))
        else:
            dummy = jnp.zeros(rows.shape, bool)
            new = step_rows(made[id(rule)], rows, dummy, arrays, quarters=True)
            results.append(list(new)[1:])
    if not results:
        return params, state
    params, *slots, last, told = [
        tree.unflatten(column) for column in zip(*results, strict=True)
    ]
    clock = state.clock._replace(last=last, told=told)
    return params, state._replace(clock=clock, **dict(zip(names, slots, strict=True)))


def _coasting(rule: Rule, count: jax.Array, run: jax.Array) -> Kernel:
    """``kernel(nothing, p, *slots, last, told)``: the missed steps of some rows."""
    drift, coast = _drift(rule), rule.coast
    assert coast is not None
    tables, now = drift.tables(count), drift.told(count, run)

    def kernel(nothing: jax.Array, p: jax.Array, *rest: jax.Array) -> tuple[Any, ...]:
        *slots, last, told = rest
        missed = drift.missed(count, run, tables, last, told)
        missed = jax.tree.map(lambda x: per_row(x, p), missed)
        new = coast(Missed(*missed), p, *slots)
        # A row that missed nothing stays as it is, to the bit.
        late = last < count
        kept = [
            where_rows(late, x, old).astype(old.dtype)
            for x, old in zip(new, (p, *slots), strict=True)
        ]
        return nothing, *kept, *_now(count, now, last, told)

    return kernel


def _now(
    step: jax.Array, told: jax.Array, last: jax.Array, old: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """What is kept with rows that have done ``step``.

    It is made to depend on what was there: XLA may otherwise write it before it has read
    the rows, and copies the whole arrays for that.
    """
    behind = (last <= step)[..., None]
    return jnp.maximum(last, step), jnp.where(behind, told, old)


def _all_rows(kernel: Kernel, arrays: list[jax.Array]) -> list[jax.Array]:
    """The kernel on all rows, as many at a time as stay in the cache."""
    if arrays[0].ndim == 0 or arrays[0].size <= CHUNK_ELEMENTS:
        return list(kernel(jnp.zeros(arrays[0].shape[:1], bool), *arrays))[1:]
    height = arrays[0].shape[0]
    chunk = max(1, CHUNK_ELEMENTS * height // arrays[0].size)

    def body(i: jax.Array, arrays: list[jax.Array]) -> list[jax.Array]:
        # Gathered and scattered: of slices that are read and written XLA copies the whole
        # arrays in every turn. Rows beyond the table, in the last chunk, are empty slots.
        rows = jnp.minimum(i * chunk + jnp.arange(chunk, dtype=jnp.int32), height)
        nothing = jnp.zeros((chunk,), bool)
        return list(step_at_once(kernel, rows, nothing, arrays, 0))[1:]

    return lax.fori_loop(0, -(-height // chunk), body, arrays)


def _drift(rule: Rule) -> Any:
    assert rule.drift is not None
    return rule.drift
