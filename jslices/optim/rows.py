"""From a rule to an optimizer: whole arrays, or the touched rows of them."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jslices._bounds import canonical_indices, empty_slot
from jslices._coalesce import sum_duplicates
from jslices._grad.reread import slot_gradient
from jslices._memory import is_mapped
from jslices._slices import IndexedSlices, check_slices, is_slices
from jslices._trees import flatten
from jslices.optim import exact
from jslices.optim.apply import apply_updates, check_fits
from jslices.optim.base import next_count, zero_count
from jslices.optim.dense_sums import warn_in_multi_steps
from jslices.optim.in_place import Kernel, row_bytes
from jslices.optim.one_step import one_step
from jslices.optim.protocol import GradientTransformation
from jslices.optim.rule import Rule
from jslices.optim.select_rows import where_rows
from jslices.optim.step import SMALL, covers, step_all_rows, step_slices


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
            return step(_update_leaf, leaves, tree, state, params, rule.reads_params)

    def apply(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        leaves, tree = flatten(grads, is_leaf=_is_leaf)
        with one_step(len(leaves)):
            return step(_apply_leaf, leaves, tree, state, params, True)

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


def _update_leaf(
    kernel: Kernel, rule: Rule, grad: Any, param: Any, state: Sequence[Any]
) -> tuple[Any, ...]:
    read = () if param is None else (param,)
    if grad is None:
        return (None, *state)
    if not isinstance(grad, IndexedSlices):
        return kernel(grad, *read, *state)
    grad = known_rows(grad, (*read, *state))
    if param is not None:
        check_fits(grad, param)
    if read or state:
        return step_slices(kernel, grad, state, read, still=rule.still)
    wide = grad.values.dtype.itemsize >= 4  # 16 bits would be rounded at each addition
    if rule.linear and wide and len(grad.indices) >= SMALL:
        shape = grad.dense_shape
        if shape and covers(len(grad.indices), row_bytes(grad.values), shape[0], True):
            return (step_all_rows(kernel, grad),)
        return (_each_slot(kernel, grad),)
    grad = grad.coalesce()
    (update,) = kernel(grad.values)
    return (IndexedSlices(update, grad.indices, grad.dense_shape),)


def _apply_leaf(
    kernel: Kernel, rule: Rule, grad: Any, param: Any, state: Sequence[Any]
) -> tuple[Any, ...]:
    """``(param, *state)``, both new."""

    def in_two() -> tuple[Any, ...]:
        read = param if rule.reads_params else None
        update, *new = _update_leaf(kernel, rule, grad, read, state)
        return (apply_updates(param, update), *new)

    if param is None or not isinstance(grad, IndexedSlices):
        return in_two()
    param = jnp.asarray(param)
    arrays = (param, *state)
    grad = known_rows(grad, arrays)
    check_fits(grad, param)
    # Without state each slot can be added as it is, unless that takes new memory.
    stateless = not (state or rule.reads_params)
    if stateless and not (slot_gradient(grad) and is_mapped(grad.values.nbytes)):
        return in_two()

    def applied(g: jax.Array, p: jax.Array, *slots: jax.Array) -> tuple[jax.Array, ...]:
        update, *new = kernel(g, *([p] if rule.reads_params else []), *slots)
        nothing = p.reshape(len(p), -1)[:, :0]
        return (nothing, p + update.astype(p.dtype), *new)

    return step_slices(applied, grad, arrays, still=rule.still, applies=True)[1:]


def _each_slot(kernel: Kernel, grad: IndexedSlices) -> IndexedSlices:
    """The update of each slot by itself, which adds up to that of the sum.

    Not on a GPU, where adding many slots to one row is slow (jax-ml/jax#38806).
    """
    num_rows = None if grad.dense_shape is None else grad.dense_shape[0]

    def duplicates(values: jax.Array, indices: jax.Array) -> tuple[jax.Array, jax.Array]:
        indices = canonical_indices(indices, num_rows)
        (update,) = kernel(values)
        empty = indices == empty_slot(num_rows, indices.dtype)
        nothing = jnp.zeros((), update.dtype)
        # XLA gathers rows as [K, 1, *D]. In this shape the update overwrites them; another
        # would keep a second array of the gradient's size.
        tall = update.reshape(len(indices), 1, *update.shape[1:])
        return where_rows(~empty, tall, nothing).reshape(update.shape), indices

    def summed(values: jax.Array, indices: jax.Array) -> tuple[jax.Array, jax.Array]:
        values, indices, _ = sum_duplicates(values, indices, num_rows, len(indices))
        (update,) = kernel(values)
        return update, indices

    update, indices = lax.platform_dependent(
        grad.values, grad.indices, cpu=duplicates, default=summed
    )
    return IndexedSlices(update, indices, grad.dense_shape)


def known_rows(grad: IndexedSlices, arrays: Sequence[jax.Array]) -> IndexedSlices:
    """``grad`` with the shape that belongs to ``arrays`` ``[V, ...]``, if there are any."""
    check_slices(grad)
    if grad.indices.ndim != 1:
        raise ValueError(
            f"an optimizer got {grad}, which carries a batch axis from vmap; sum it "
            "first: IndexedSlices(s.values.reshape(-1, *row_shape), "
            "s.indices.reshape(-1), s.dense_shape)"
        )
    if not arrays:
        return grad
    heights = [x.shape[0] for x in arrays]
    if len(set(heights)) > 1:
        raise ValueError(
            f"the parameter and its optimizer state have {heights} rows, which should be "
            "equal; was the state made with tx.init(params) for these params?"
        )
    shape = (heights[0], *grad.values.shape[1:])
    if grad.dense_shape is not None and grad.dense_shape != shape:
        raise ValueError(
            f"the gradient belongs to an array of shape {grad.dense_shape}, the "
            f"optimizer state to one of shape {shape}; was the state made with "
            "tx.init(params) for these params?"
        )
    known = grad.dense_shape == shape
    return grad if known else IndexedSlices(grad.values, grad.indices, shape)
