"""One step of an optimizer for the gradients of several micro-batches, call by call."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jslices._jax import flatten
from jslices._rows.bounds import canonical_indices, empty_slot, index_dtype
from jslices._slices import IndexedSlices, check_slices, is_slices
from jslices.optim._engine.arithmetic import next_count, zero_count
from jslices.optim._engine.protocol import GradientTransformation
from jslices.optim.transforms.accumulate import merge_leaf
from jslices.optim.transforms.leaves import is_leaf
from jslices.optim.transforms.norms import widened


class MultiStepsState(NamedTuple):
    """State of :func:`multi_steps`, with the names of Optax."""

    mini_step: jax.Array  #: int32 ``[]``, the gradients that wait for the next step.
    gradient_step: jax.Array  #: int32 ``[]``, the steps taken.
    inner_opt_state: Any  #: the state of the optimizer.
    acc_grads: Any  #: sums of arrays; rows side by side, values ``[k, K, *D]``.


def multi_steps(
    opt: Any, every_k_schedule: int, grads: Any, use_grad_mean: bool = True
) -> GradientTransformation:
    """Makes a step of ``opt`` at every k-th call, with the mean of the last k gradients.

    For micro-batches that come one by one; where they are there together,
    :func:`jslices.accumulate_gradients` needs no state. The rows of k gradients are kept
    side by side, and summed when the step is due: there is no array of the table's size.

    Untouched rows: as ``opt`` has them. Rows that none of the k gradients names are neither
    read nor written (or, with ``untouched="exact"``, catch up: ``catch_up`` before every
    micro-batch, ``flush`` at any time). Duplicates add, out-of-range indices are dropped.

    Args:
      opt: an optimizer of jslices, or one lifted by :func:`jslices.from_optax`.
      every_k_schedule: k, the number of gradients to a step; an int, for the rows need a
        place of static size.
      grads: a gradient, or its shapes: ``jax.eval_shape(js.grad(loss), params, batch)``. It
        tells which leaves are IndexedSlices, and K, the rows of each.
      use_grad_mean: False for the sum instead.

    Returns:
      A :class:`GradientTransformation`. Its updates have the same shapes in each call; in
      those between the steps the arrays are zero and the slots of slices empty, so that
      nothing moves. ``state.mini_step == 0`` after a step.

    Raises:
      TypeError: for a schedule instead of k, or if ``opt`` is no transformation.
      ValueError: for k below 1; from ``update``, for a gradient of other shapes.

    Cost: memory for ``k * K * D`` elements a table and one array for each dense leaf;
    micro-steps write ``K * D``, the k-th one is a step of ``opt`` on ``k * K`` rows.

    Example:
      >>> import jax, jax.numpy as jnp, jslices as js
      >>> table, loss = jnp.zeros((5, 1)), lambda table, ids: table[ids].sum()
      >>> shapes = jax.eval_shape(js.grad(loss), table, jnp.array([0, 1]))
      >>> tx = js.optim.multi_steps(js.sgd(1.0), 2, shapes)
      >>> state = tx.init(table)
      >>> for ids in jnp.array([[0, 1], [1, 4]]):
      ...     updates, state = tx.update(js.grad(loss)(table, ids), state, table)
      ...     table = js.apply_updates(table, updates)
      >>> table.ravel()
      Array([-0.5, -1. ,  0. ,  0. , -0.5], dtype=float32)

    Source: ``optax.MultiSteps``, whose sums are dense arrays, so that JAX refuses slices in
    it; the schedules of k and the skipping of steps are not here.
    """
    if not (hasattr(opt, "init") and hasattr(opt, "update")):
        raise TypeError(f"multi_steps wants an optimizer (init and update), got {opt!r}")
    k = every_k_schedule
    if not isinstance(k, int) or isinstance(k, bool):
        raise TypeError(
            f"multi_steps wants an int for every_k_schedule, got {k!r}: the rows of k "
            "gradients need a place of static size"
        )
    if k < 1:
        raise ValueError(f"multi_steps wants every_k_schedule to be at least 1, got {k}")
    examples, structure = flatten(grads, is_leaf=is_leaf)

    def init(params: Any) -> MultiStepsState:
        arrays = structure.flatten_up_to(params)
        places = [_place(x, p, k) for x, p in zip(examples, arrays, strict=True)]
        acc = structure.unflatten(places)
        return MultiStepsState(zero_count(), zero_count(), opt.init(params), acc)

    def update(
        grads: Any, state: MultiStepsState, params: Any = None, **extra_args: Any
    ) -> tuple[Any, MultiStepsState]:
        leaves, given = flatten(grads, is_leaf=is_leaf)
        for x in filter(is_slices, leaves):
            check_slices(x)
        if given != structure or not all(map(_alike, leaves, examples)):
            raise ValueError(
                f"multi_steps was made for gradients {_shapes(examples)} in {structure}, "
                f"got {_shapes(leaves)} in {given}; make it with a gradient like these"
            )
        n = state.mini_step
        places = structure.flatten_up_to(state.acc_grads)
        places = [_gather(x, acc, n) for x, acc in zip(leaves, places, strict=True)]

        def step(inner: Any) -> tuple[Any, Any]:
            totals = [
                _total(acc, x, k if use_grad_mean else None)
                for acc, x in zip(places, examples, strict=True)
            ]
            return opt.update(structure.unflatten(totals), inner, params, **extra_args)

        updates, inner = _once(step, n == k - 1, state.inner_opt_state)
        due = (n == k - 1).astype(n.dtype)
        taken = jnp.where(due, next_count(state.gradient_step), state.gradient_step)
        acc = structure.unflatten(places)
        return updates, MultiStepsState((n + 1) * (1 - due), taken, inner, acc)

    if not getattr(opt, "catches_up", False):
        return GradientTransformation(init, update)

    def inside(name: str, params: Any, state: Any, *ids: Any) -> tuple[Any, Any]:
        params, inner = getattr(opt, name)(params, state.inner_opt_state, *ids)
        return params, state._replace(inner_opt_state=inner)

    return GradientTransformation(
        init,
        update,
        lambda params, state, ids: inside("catch_up", params, state, ids),
        lambda params, state: inside("flush", params, state),
    )


def _once(step: Callable[[Any], Any], due: jax.Array, inner: Any) -> tuple[Any, Any]:
    """``step(inner)`` if it is due, or else updates that move nothing."""
    if not isinstance(due, jax.core.Tracer) and due:
        return step(inner)  # here and now, so that what it raises is raised
    shapes, _ = jax.eval_shape(step, inner)
    nothing = jax.tree.map(_nothing, shapes, is_leaf=is_leaf)
    if not isinstance(due, jax.core.Tracer):
        return nothing, inner
    return lax.cond(due, step, lambda inner: (nothing, inner), inner)


def _nothing(shape: Any) -> Any:
    if shape is None:
        return None
    if not is_slices(shape):
        return jnp.zeros(shape.shape, shape.dtype)
    values, indices = shape.values, shape.indices
    num_rows = None if shape.dense_shape is None else shape.dense_shape[0]
    empty = empty_slot(num_rows, indices.dtype)
    return IndexedSlices.tree_unflatten(
        shape.dense_shape,
        (
            jnp.zeros(values.shape, values.dtype),
            jnp.full(indices.shape, empty, indices.dtype),
        ),
    )


def _place(example: Any, param: Any, k: int) -> Any:
    """What the gradients of a leaf are gathered in; nothing is in it yet."""
    if example is None:
        return None
    if not is_slices(example):
        return jnp.zeros(example.shape, widened(jnp.zeros((), example.dtype)).dtype)
    values, indices = example.values, example.indices
    if indices.ndim != 1:
        raise ValueError(f"multi_steps got {example}, which carries a batch axis from vmap")
    rows = jnp.zeros((k, *values.shape), values.dtype)
    shape = jnp.shape(param)
    if example.dense_shape not in (None, shape) or values.shape[1:] != shape[1:]:
        raise ValueError(
            f"multi_steps was made for slices with values {list(values.shape)} of an array "
            f"of shape {example.dense_shape}, and tx.init got one of shape {shape}"
        )
    dtype = index_dtype(shape[0], np.dtype(indices.dtype))
    slots = jnp.full((k, *indices.shape), shape[0], dtype)
    return IndexedSlices.tree_unflatten(shape, (rows, slots))


def _gather(grad: Any, place: Any, n: jax.Array) -> Any:
    """The place with one gradient more; the first of the next step begins anew."""
    if grad is None:
        return None
    if not is_slices(place):
        return jnp.where(n == 0, 0, place) + grad.astype(place.dtype)
    if grad.dense_shape not in (None, place.dense_shape):
        raise ValueError(
            f"multi_steps got slices of an array of shape {grad.dense_shape} where the "
            f"parameter has shape {place.dense_shape}"
        )
    indices = canonical_indices(grad.indices, place.dense_shape[0])
    put = lambda old, new: lax.dynamic_update_index_in_dim(old, new, n, 0)  # noqa: E731
    return IndexedSlices.tree_unflatten(
        place.dense_shape,
        (put(place.values, grad.values), put(place.indices, indices)),
    )


def _total(place: Any, example: Any, divisor: int | None) -> Any:
    if place is None or is_slices(place):
        return place if place is None else merge_leaf(place, divisor)
    total = place if divisor is None else place / divisor
    return total.astype(example.dtype)


def _alike(grad: Any, example: Any) -> bool:
    if grad is None or example is None or is_slices(grad) != is_slices(example):
        return grad is example
    pairs = zip(jax.tree.leaves(grad), jax.tree.leaves(example), strict=True)
    return all((x.shape, x.dtype) == (y.shape, y.dtype) for x, y in pairs)


def _shapes(leaves: Any) -> str:
    """The shapes of a gradient's leaves, for a message."""

    def one(x: Any) -> str:
        if not is_slices(x):
            return "None" if x is None else f"{x.dtype}{list(x.shape)}"
        return f"slices of {x.values.dtype}{list(x.values.shape)}"

    return ", ".join(map(one, leaves))
