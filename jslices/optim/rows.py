"""Running an optimizer's arithmetic on whole arrays, or on the touched rows of them."""

from collections.abc import Sequence
from typing import Any

import jax

from jslices._slices import IndexedSlices, check_slices, is_slices
from jslices._trees import flatten
from jslices.optim.in_place import Kernel, step_rows


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
      sorted ``indices`` ``[min(K, V)]``. A None gradient has update None and keeps its
      state. Rows of the state that no gradient touches are neither read nor written.
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
    grad = _with_known_shape(grad, state).coalesce()
    if not state:
        (update,) = kernel(grad.values)
        return (IndexedSlices(update, grad.indices, grad.dense_shape),)
    update, *new_state = step_rows(kernel, grad.indices, grad.values, state)
    return (IndexedSlices(update, grad.indices, grad.dense_shape), *new_state)


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
