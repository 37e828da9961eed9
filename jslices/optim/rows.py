"""Running an optimizer's arithmetic on whole arrays, or on the touched rows of them."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jslices._bounds import set_rows
from jslices._coalesce import capacity_for, sum_duplicates
from jslices._slices import IndexedSlices, check_slices, is_slices
from jslices._trees import flatten

# A multiple of the threads that share a gather, which are two to sixteen; with fewer rows
# than MANY there is nothing to share. Measured in benchmarks/step.py.
LANES, MANY = 16, 1024

#: ``kernel(gradient, *slots) -> (update, *new_slots)``, the same for an array and for
#: some rows of it: everything in it must be elementwise or within a row.
Kernel = Callable[..., tuple[jax.Array, ...]]


def update_leaves(
    kernel: Kernel, grads: Any, slots: Sequence[Any]
) -> tuple[Any, tuple[Any, ...]]:
    """One step for every leaf.

    Args:
      kernel: the arithmetic of the step.
      grads: a pytree of arrays ``[V, *D]``, IndexedSlices of such arrays, and None.
      slots: optimizer state; pytrees of arrays that mirror ``grads``.

    Returns:
      ``(updates, new_slots)``. An update is an array, or IndexedSlices with unique
      ``indices`` ``[U]``, U being ``min(K, V)`` or a little more. A None gradient has
      update None and keeps its state. Rows of the state that no gradient touches are
      neither read nor written.
    """
    leaves, tree = flatten(grads, is_leaf=_is_leaf)
    per_slot = [tree.flatten_up_to(slot) for slot in slots]
    results = [
        _update_leaf(kernel, grad, state)
        for grad, *state in zip(leaves, *per_slot, strict=True)
    ]
    columns = list(zip(*results, strict=True)) or [()] * (1 + len(slots))
    updates, *new_slots = (tree.unflatten(column) for column in columns)
    return updates, tuple(new_slots)


def _is_leaf(x: Any) -> bool:
    return x is None or is_slices(x)


def _update_leaf(kernel: Kernel, grad: Any, state: Sequence[Any]) -> tuple[Any, ...]:
    if grad is None:
        return (None, *state)
    if isinstance(grad, IndexedSlices):
        return _update_rows(kernel, grad, state)
    return kernel(grad, *state)


def _update_rows(
    kernel: Kernel, grad: IndexedSlices, state: Sequence[jax.Array]
) -> tuple[Any, ...]:
    check_slices(grad)
    if grad.indices.ndim != 1:
        raise ValueError(
            f"an optimizer got {grad}, which carries a batch axis from vmap; sum it "
            "first: IndexedSlices(s.values.reshape(-1, *row_shape), "
            "s.indices.reshape(-1), s.dense_shape)"
        )
    grad = _coalesced(_with_known_shape(grad, state))
    if not state:
        (update,) = kernel(grad.values)
        return (IndexedSlices(update, grad.indices, grad.dense_shape),)
    height = state[0].shape[0]
    # Empty slots read the last row; nothing is written back there.
    read = jnp.minimum(grad.indices, max(height - 1, 0))
    rows = [slot.at[read].get(mode="promise_in_bounds") for slot in state]
    update, *new_rows = kernel(grad.values, *rows)
    present = (grad.indices < height).reshape(-1, *(1,) * (update.ndim - 1))
    update = jnp.where(present, update, jnp.zeros((), update.dtype))
    new_state = [
        set_rows(slot, grad.indices, new.astype(slot.dtype))
        for slot, new in zip(state, new_rows, strict=True)
    ]
    return (IndexedSlices(update, grad.indices, grad.dense_shape), *new_state)


def _coalesced(grad: IndexedSlices) -> IndexedSlices:
    """Unique rows, dealt out evenly over the slots where there are many."""
    num_rows = None if grad.dense_shape is None else grad.dense_shape[0]
    capacity = capacity_for(grad.indices.shape[0], num_rows)
    lanes = LANES if capacity >= MANY else 1
    size = -(-capacity // lanes) * lanes
    values, indices = sum_duplicates(grad.values, grad.indices, num_rows, size, lanes)
    return IndexedSlices(values, indices, grad.dense_shape)


def _with_known_shape(grad: IndexedSlices, state: Sequence[jax.Array]) -> IndexedSlices:
    if not state:
        return grad
    shape = (state[0].shape[0], *grad.values.shape[1:])
    if grad.dense_shape is not None and grad.dense_shape != shape:
        raise ValueError(
            f"the gradient belongs to an array of shape {grad.dense_shape}, the "
            f"optimizer state to one of shape {shape}; was the state made with "
            "tx.init(params) for these params?"
        )
    return IndexedSlices(grad.values, grad.indices, shape)
