"""One parameter's part of a step: without a gradient, with a dense one, or with rows."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jslices._rows.bounds import canonical_indices, empty_slot
from jslices._rows.select import where_rows
from jslices._rows.sums import sum_duplicates
from jslices._slices import IndexedSlices, check_slices
from jslices.optim._engine.apply import apply_updates, check_fits
from jslices.optim._engine.in_place import Kernel, row_bytes
from jslices.optim._engine.rule import Rule
from jslices.optim._engine.step import (
    SMALL,
    apply_large,
    covers_by_slot,
    step_all_rows,
    step_slices,
    steps_large,
)


def update_leaf(
    kernel: Kernel, rule: Rule, grad: Any, param: Any, state: Sequence[Any]
) -> tuple[Any, ...]:
    """``(update, *state)``; ``param`` is None where the rule does not read it."""
    read = () if param is None else (param,)
    if grad is None:
        return (None, *state)
    if not isinstance(grad, IndexedSlices):
        return kernel(grad, *read, *state)
    grad = known_rows(grad, (*read, *state))
    if param is not None:
        check_fits(grad, param)
    if read or state:
        return step_slices(kernel, grad, state, read, rule)
    wide = grad.values.dtype.itemsize >= 4  # 16 bits would be rounded at each addition
    if rule.linear and wide and len(grad.indices) >= SMALL:
        shape = grad.dense_shape
        if shape and covers_by_slot(len(grad.indices), row_bytes(grad.values), shape[0]):
            return (step_all_rows(kernel, grad),)
        return (_each_slot(kernel, grad),)
    grad = grad.coalesce()
    (update,) = kernel(grad.values)
    return (IndexedSlices(update, grad.indices, grad.dense_shape),)


def apply_leaf(
    kernel: Kernel, rule: Rule, grad: Any, param: Any, state: Sequence[Any]
) -> tuple[Any, ...]:
    """``(param, *state)``, all new."""
    if param is not None and isinstance(grad, IndexedSlices):
        param = jnp.asarray(param)
        grad = known_rows(grad, (param, *state))
        check_fits(grad, param)
        if _holds_no_update(rule, grad, len(state)):
            return apply_large(_stepping(kernel, rule), grad, (param, *state))
    read = param if rule.reads_params else None
    update, *new = update_leaf(kernel, rule, grad, read, state)
    return (apply_updates(param, update), *new)


def _holds_no_update(rule: Rule, grad: IndexedSlices, num_slots: int) -> bool:
    """Whether ``tx.apply`` had better step the parameter where it steps the state."""
    assert grad.dense_shape is not None
    if not steps_large(grad, grad.dense_shape[0], rule):
        return False
    # Without state each slot can be added as it is, unless that takes new memory.
    return num_slots > 0 or rule.reads_params


def _stepping(kernel: Kernel, rule: Rule) -> Kernel:
    """The kernel, with the parameter first of what it reads and changes."""

    def applied(g: jax.Array, p: jax.Array, *slots: jax.Array) -> tuple[jax.Array, ...]:
        update, *new = kernel(g, *([p] if rule.reads_params else []), *slots)
        nothing = p.reshape(len(p), -1)[:, :0]
        return (nothing, p + update.astype(p.dtype), *new)

    return applied


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
