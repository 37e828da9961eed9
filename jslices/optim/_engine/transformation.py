"""From a rule to an optimizer of a tree of arrays."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jslices._jax import flatten
from jslices._slices import is_slices
from jslices.optim._engine.arithmetic import next_count, zero_count
from jslices.optim._engine.dense_sums import warn_in_multi_steps
from jslices.optim._engine.leaf import apply_leaf, update_leaf
from jslices.optim._engine.one_step import one_step
from jslices.optim._engine.protocol import GradientTransformation
from jslices.optim._engine.rule import Rule
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
      state_type: makes its state from ``count``, a tree for each of the rule's slots, and
        ``clock`` if the rule has a drift.
      rule: the arithmetic.
      other: the arithmetic for leaves that ``mask`` leaves out (no weight decay, say).
      mask: bools in the structure of params or a prefix of it, or a function from params
        to that; None means every leaf.

    In ``update``, a None gradient has update None and keeps its state. Rows of the state
    that no gradient touches are neither read nor written.
    """
    names = tuple(rule.slots)

    def rules_for(params: Any, count: int) -> list[Rule]:
        chosen = spread(mask, params, count)
        return [rule if yes or other is None else other for yes in chosen]

    def init(params: Any) -> Any:
        warn_in_multi_steps()
        leaves, tree = flatten(params)
        rules = rules_for(params, len(leaves))
        slots = {
            name: tree.unflatten(
                [r.slots[name](p) for r, p in zip(rules, leaves, strict=True)]
            )
            for name in names
        }
        if rule.drift is not None:
            slots["clock"] = exact.new_clock(params, rules)
        return state_type(count=zero_count(), **slots)

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        leaves, tree = flatten(grads, is_leaf=_is_leaf)
        with one_step(len(leaves)):
            return step(update_leaf, leaves, tree, state, params, rule.reads_params)

    def apply(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        leaves, tree = flatten(grads, is_leaf=_is_leaf)
        with one_step(len(leaves)):
            return step(apply_leaf, leaves, tree, state, params, True)

    def step(
        step_leaf: Callable[..., tuple[Any, ...]],
        leaves: Sequence[Any],
        tree: Any,
        state: Any,
        params: Any,
        reads_params: bool,
    ) -> tuple[Any, Any]:
        if params is None and (rule.reads_params or mask is not None):
            raise ValueError(
                "this optimizer needs the parameters as well, for its weight decay or its "
                "norms: tx.update(grads, state, params)"
            )
        rules = rules_for(params, len(leaves))
        arrays = tree.flatten_up_to(params) if reads_params else [None] * len(leaves)
        columns = [tree.flatten_up_to(getattr(state, name)) for name in names]
        kinds = [(r, is_slices(grad)) for r, grad in zip(rules, leaves, strict=True)]
        kernels = {
            (r, by_row): ((by_row and r.row_step) or r.step)(state.count)
            for r, by_row in dict.fromkeys(kinds)
        }
        clock = None
        if rule.drift is not None:
            clock = exact.ticked(state.clock, state.count, rule)
            columns += [tree.flatten_up_to(clock.last), tree.flatten_up_to(clock.told)]
            exact.refuse_stale(leaves, columns[-2], state.count)
            kernels = {
                kind: exact.keeping_time(kernel, kind[0], state.count, clock.run)
                for kind, kernel in kernels.items()
            }
        results = [
            step_leaf(kernels[kind], kind[0], grad, param, slots)
            for kind, grad, param, *slots in zip(
                kinds, leaves, arrays, *columns, strict=True
            )
        ]
        result, *new = [
            tree.unflatten([leaf[i] for leaf in results]) for i in range(1 + len(columns))
        ]
        slots = dict(zip(names, new, strict=False))
        if clock is not None:
            slots["clock"] = clock._replace(last=new[-2], told=new[-1])
        return result, state._replace(count=next_count(state.count), **slots)

    if rule.drift is None:
        return GradientTransformation(init, update, apply=apply)
    return GradientTransformation(
        init,
        update,
        lambda params, state, ids: exact.catch_up(rules_for, params, state, ids),
        lambda params, state: exact.flush(rules_for, params, state),
        apply,
    )


def spread(mask: Any, params: Any, count: int) -> list[bool]:
    """The mask's bool for each of ``count`` leaves of params; None means all of them."""
    if mask is None:
        return [True] * count
    chosen = mask(params) if callable(mask) else mask
    leaves: list[bool] = []
    jax.tree.map(
        lambda bit, part: leaves.extend([bool(bit)] * len(flatten(part, _is_leaf)[0])),
        chosen,
        params,
    )
    return leaves


def _is_leaf(x: Any) -> bool:
    return x is None or is_slices(x)
