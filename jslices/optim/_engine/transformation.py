"""From a rule to an optimizer of a tree of arrays: every leaf of it, one step."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jslices._jax import flatten
from jslices._place.boundary import (
    laid_out_as,
    on_any_mesh,
    shardings_of,
)
from jslices._place.hints import warn_of_columns
from jslices._rows.access import room_for_distinct
from jslices._slices import IndexedSlices, is_slices
from jslices.optim._engine.arithmetic import Step, next_count, zero_count
from jslices.optim._engine.checks import (
    Shapes,
    arrays_of,
    check_shapes,
    check_state,
    checked_gradient,
    places,
)
from jslices.optim._engine.execute import step_slices
from jslices.optim._engine.plan import Plan, choose_plan
from jslices.optim._engine.protocol import (
    GradientTransformation,
    is_leaf,
    shardings_of_update,
)
from jslices.optim._engine.rule import Kernel, Rule
from jslices.optim._exact import catch_up as exact


def transformation(
    state_type: Callable[..., Any],
    rule: Rule,
    *,
    other: Rule | None = None,
    mask: Any = None,
) -> GradientTransformation:
    """The optimizer of a rule.

    Args:
      state_type: makes its state from ``count``, a tree for each of the rule's state
        arrays, and ``clock`` if its rows catch up.
      rule: the arithmetic.
      other: the arithmetic for leaves that ``mask`` leaves out (no weight decay, say).
      mask: bools in the structure of params or a prefix of it, or a function from params
        to that; None means every leaf.

    In ``update``, a None gradient has update None and keeps its state. Rows of the state
    that no gradient touches are neither read nor written.
    """
    names = tuple(rule.state)
    names_in_state = (*names, "clock") if rule.missed is not None else names

    @functools.cache
    def state_shapes(rule: Rule, shape: tuple[int, ...]) -> Shapes:
        p = jax.ShapeDtypeStruct(shape, jnp.float32)
        return {k: jax.eval_shape(start, p).shape for k, start in rule.state.items()}

    def rules_for(params: Any, tree: Any) -> list[Rule]:
        """The rule of each leaf of ``tree``, the structure of params or of gradients."""
        if mask is None or other is None:
            return [rule] * tree.num_leaves
        rules = tree.flatten_up_to(spread(mask, params, rule, other))
        # A None gradient stands for None or any part of the parameters: none is stepped.
        return [r if isinstance(r, Rule) else rule for r in rules]

    def init(params: Any) -> Any:
        leaves, tree = flatten(params)
        rules = rules_for(params, tree)
        for place, p in zip(places(tree), leaves, strict=True):
            warn_of_columns(place, p)
        state = {
            name: tree.unflatten(
                [
                    laid_out_as(p, r.state[name](p))
                    for r, p in zip(rules, leaves, strict=True)
                ]
            )
            for name in names
        }
        if rule.missed is not None:
            state["clock"] = exact.new_clock(params, rules)
        return state_type(count=zero_count(), **state)

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if params is None and (rule.reads_params or mask is not None):
            raise ValueError(
                "this optimizer needs the parameters as well, for its weight decay or its "
                "norms: tx.update(grads, state, params)"
            )
        check_state(state, state_type, names_in_state)
        leaves, tree = flatten(grads, is_leaf=is_leaf)
        rules = rules_for(params, tree)
        arrays = _parameters(tree, params, rule.reads_params, len(leaves))
        columns = [arrays_of(state, name, tree) for name in names]
        rows = zip(places(tree), leaves, arrays, rules, *columns, strict=True)
        leaves = [
            checked_gradient(place, grad, param, old, functools.partial(state_shapes, r))
            for place, grad, param, r, *old in rows
        ]
        now = Step(state.count, single=len(leaves) == 1)
        kinds = [(r, is_slices(grad)) for r, grad in zip(rules, leaves, strict=True)]
        kernels = {
            (r, by_row): ((by_row and (r.update_slices or r.update_rows)) or r.update)(now)
            for r, by_row in dict.fromkeys(kinds)
        }
        clock, snapshots = None, [()] * len(leaves)
        if rule.missed is not None:
            clock = exact.ticked(state.clock, state.count, rule)
            columns.append(tree.flatten_up_to(clock.last))
            snapshots = tree.flatten_up_to(clock.snapshot)
            kernels = {
                kind: exact.keeping_time(kernel, kind[0], state.count, clock.run)
                for kind, kernel in kernels.items()
            }
        rows = zip(kinds, leaves, arrays, snapshots, *columns, strict=True)
        results = [
            update_leaf(kind[0], kernels[kind], grad, param, old, snapshot)
            for kind, grad, param, snapshot, *old in rows
        ]
        result, *new = [
            tree.unflatten([leaf[i] for leaf in results]) for i in range(1 + len(columns))
        ]
        changed = dict(zip(names, new, strict=False))
        if clock is not None:
            snapshot = tree.unflatten(
                [
                    old if grad is None else tuple(leaf[1 + len(columns) :])
                    for grad, old, leaf in zip(leaves, snapshots, results, strict=True)
                ]
            )
            changed["clock"] = clock._replace(last=new[-1], snapshot=snapshot)
        return result, state._replace(count=next_count(state.count), **changed)

    def plan(grads: Any, params: Any, platform: str | None = None) -> Any:
        leaves, tree = flatten(grads, is_leaf=is_leaf)
        rules = rules_for(params, tree)
        shapes = tree.flatten_up_to(params)
        return tree.unflatten(
            [
                _plan_of(r, grad, param, platform or jax.default_backend())
                for r, grad, param in zip(rules, leaves, shapes, strict=True)
            ]
        )

    update = on_any_mesh(shardings_of_update)(update)
    if rule.missed is None:
        return GradientTransformation(init, update, plan=plan)

    advance = on_any_mesh(_types_of_params)(functools.partial(exact.advance, rules_for))

    def catch_up(params: Any, state: Any, ids: Any) -> tuple[Any, Any]:
        check_caught_up(params, state)
        result: tuple[Any, Any] = advance(params, state, exact.rows_behind(params, ids))
        return result

    def flush(params: Any, state: Any) -> tuple[Any, Any]:
        check_caught_up(params, state)
        every = [True] * len(flatten(params)[0])
        result: tuple[Any, Any] = advance(params, state, every)
        return result

    def check(grads: Any, state: Any) -> None:
        check_state(state, state_type, names_in_state)
        leaves, tree = flatten(grads, is_leaf=is_leaf)
        exact.refuse_stale(leaves, tree.flatten_up_to(state.clock.last), state.count)

    def check_caught_up(params: Any, state: Any) -> None:
        check_state(state, state_type, names_in_state)
        leaves, tree = flatten(params)
        rules = rules_for(params, tree)
        columns = [arrays_of(state, name, tree) for name in names]
        for place, p, r, *old in zip(places(tree), leaves, rules, *columns, strict=True):
            check_shapes(place, jnp.shape(p), old, state_shapes(r, jnp.shape(p)))

    return GradientTransformation(init, update, catch_up, flush, plan=plan, check=check)


def _types_of_params(params: Any, state: Any, which: Any) -> tuple[Any, Any]:
    """The same of ``catch_up`` and ``flush``."""
    del which
    return shardings_of(params), shardings_of(state)


def _plan_of(rule: Rule, grad: Any, param: Any, platform: str) -> Plan | None:
    """How the rows of one gradient are stepped; None if it is not IndexedSlices."""
    if not isinstance(grad, IndexedSlices):
        return None
    state = jax.eval_shape(lambda p: [start(p) for start in rule.state.values()], param)
    by_row = [x for x in state if x.shape[:1] == param.shape[:1]]
    arrays = [*[param] * rule.reads_params, *by_row]
    values: Any = grad.values
    num_rows = param.shape[0]
    unique = rule.sums_first is not None and rule.sums_first(param)
    if unique:
        distinct = (room_for_distinct(values.shape[0], num_rows), *values.shape[1:])
        values = jax.ShapeDtypeStruct(distinct, values.dtype)
    return choose_plan(
        values, arrays, num_rows, platform, linear=rule.linear, unique=unique
    )


def _parameters(tree: Any, params: Any, needed: bool, count: int) -> list[Any]:
    """The parameter of each gradient; None where it is neither given nor needed.

    As in Optax, parameters that are not needed may have any structure.
    """
    if params is None:
        return [None] * count
    try:
        return list(tree.flatten_up_to(params))
    except ValueError:
        if needed:
            raise
        return [None] * count


def update_leaf(
    rule: Rule,
    kernel: Kernel,
    grad: Any,
    param: Any,
    state: Sequence[Any],
    snapshot: Sequence[jax.Array],
) -> tuple[Any, ...]:
    """``(update, *state, *snapshot)``; without gradient ``(None, *state)``.

    ``param`` may be None where the rule does not read it.
    """
    if grad is None:
        return (None, *state)
    read, state = (param,) if rule.reads_params else (), [*state, *snapshot]
    if not isinstance(grad, IndexedSlices):
        return kernel(grad, *read, *state)
    if rule.sums_first is not None and rule.sums_first(param):
        grad = grad.coalesce()
    if rule.update_slices is not None:
        return kernel(grad, *read, *state)
    return step_slices(kernel, grad, read, state, linear=rule.linear)


def spread(mask: Any, params: Any, chosen: Rule, other: Rule) -> Any:
    """The rule of each parameter, by the mask's bool for it; None where that is None."""

    def rules_of(bit: Any, part: Any) -> Any:
        return jax.tree.map(lambda _: chosen if bit else other, part)

    return jax.tree.map(rules_of, mask(params) if callable(mask) else mask, params)
