"""One step of an optimizer for the gradients of k calls.

The gradients are gathered in *buffers*: for a dense leaf its sum, for slices the rows of k
gradients side by side, ``[k, K, *D]``. Nothing has the size of a table.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jslices._devices.layouts import row_major_tables
from jslices._devices.placement import filled_like, split_as_told
from jslices._jax import flatten
from jslices._rows.bounds import canonical_indices, empty_index, index_dtype
from jslices._slices import Facts, check_slices, is_slices, slices_of
from jslices.optim._engine.arithmetic import next_count, zero_count
from jslices.optim._engine.checks import check_fields, places
from jslices.optim._engine.protocol import GradientTransformation, is_leaf
from jslices.optim.transforms.accumulate import merge_leaf
from jslices.optim.transforms.chain import as_transformation
from jslices.optim.transforms.norms import widened


class MultiStepsState(NamedTuple):
    """State of :func:`multi_steps`, with the names of Optax."""

    mini_step: jax.Array  #: int32 ``[]``, gradients gathered for the next step.
    gradient_step: jax.Array  #: int32 ``[]``, steps taken.
    inner_opt_state: Any  #: the state of the optimizer.
    acc_grads: Any  #: sums of dense gradients; rows side by side, values ``[k, K, *D]``.


def multi_steps(
    opt: Any, every_k_schedule: int, grads: Any, use_grad_mean: bool = True
) -> GradientTransformation:
    """Takes a step of ``opt`` at every k-th call, on the mean of the last k gradients.

    For micro-batches that arrive one at a time; if all of them are at hand,
    :func:`jslices.accumulate_gradients` needs no state. The rows of k gradients are kept
    side by side and summed when the step is due: there is no array of the table's size.

    Untouched rows: as ``opt`` treats them. Rows that none of the k gradients names are
    neither read nor written; with ``untouched="exact"`` they catch up (call ``catch_up``
    before every micro-batch, ``flush`` at any time). Duplicates add, out-of-range indices
    are dropped.

    Args:
      opt: an optimizer of jslices, or one lifted by :func:`jslices.from_optax`.
      every_k_schedule: k, the number of gradients to a step; an int, because the buffer
        for the rows has a static size.
      grads: a gradient, or its shapes: ``jax.eval_shape(js.grad(loss), params, batch)``. It
        tells which leaves are IndexedSlices, and K, the rows of each.
      use_grad_mean: False for the sum instead of the mean.

    Returns:
      A :class:`GradientTransformation`. Its updates have the same shapes in each call;
      between the steps arrays are zero and the entries of slices empty, so that nothing
      moves. ``apply`` leaves the parameters alone between the steps.
      ``state.mini_step == 0`` after a step.

    Raises:
      TypeError: for a schedule instead of k, or if ``opt`` is not a transformation.
      ValueError: for k below 1; from ``update``, for a gradient of other shapes.

    Cost: memory for ``k * K * D`` elements a table and one array for each dense leaf;
    a call between the steps writes ``K * D``, the k-th one is a step of ``opt`` on
    ``k * K`` rows.

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

    Source: ``optax.MultiSteps``, whose sums are dense arrays, so that JAX refuses slices
    there. Its schedules of k and its skipping of steps are not offered.
    """
    opt = as_transformation("multi_steps", opt)
    k = every_k_schedule
    if not isinstance(k, int) or isinstance(k, bool):
        raise TypeError(
            f"multi_steps wants an int for every_k_schedule, got {k!r}: the buffer for the "
            "rows of k gradients has a static size"
        )
    if k < 1:
        raise ValueError(f"multi_steps wants every_k_schedule to be at least 1, got {k}")
    examples, structure = flatten(grads, is_leaf=is_leaf)

    def init(params: Any) -> MultiStepsState:
        arrays = structure.flatten_up_to(params)
        buffers = [_buffer(x, p, k) for x, p in zip(examples, arrays, strict=True)]
        acc = structure.unflatten(buffers)
        return MultiStepsState(zero_count(), zero_count(), opt.init(params), acc)

    def gather(grads: Any, state: MultiStepsState) -> tuple[Any, jax.Array, Any]:
        """The buffers with ``grads``, whether a step is due, and its gradient if so."""
        check_fields("multi_steps", state, MultiStepsState)
        leaves, given = flatten(grads, is_leaf=is_leaf)
        for x in filter(is_slices, leaves):
            check_slices(x)
        if given != structure:
            raise ValueError(
                f"multi_steps was made for gradients {_shapes(examples)} in {structure}, "
                f"got {_shapes(leaves)} in {given}; make it with a gradient like these"
            )
        for place, x, example in zip(places(given), leaves, examples, strict=True):
            if not _alike(x, example):
                raise ValueError(
                    f"multi_steps was made for a gradient {_shapes([example])}{place}, got "
                    f"{_shapes([x])}; make it with a gradient like this"
                )
        n = state.mini_step
        buffers = structure.flatten_up_to(state.acc_grads)
        buffers = [_put(x, buffer, n) for x, buffer in zip(leaves, buffers, strict=True)]

        def total() -> Any:
            divisor = k if use_grad_mean else None
            pairs = zip(buffers, examples, strict=True)
            return structure.unflatten([_total(b, x, divisor) for b, x in pairs])

        return structure.unflatten(buffers), n == k - 1, total

    def counted(state: MultiStepsState, due: Any, inner: Any, acc: Any) -> MultiStepsState:
        n = jnp.where(due, 0, state.mini_step + 1)
        steps = jnp.where(due, next_count(state.gradient_step), state.gradient_step)
        return MultiStepsState(n, steps, inner, acc)

    def update(
        grads: Any, state: MultiStepsState, params: Any = None, **extra_args: Any
    ) -> tuple[Any, MultiStepsState]:
        acc, due, total = gather(grads, state)

        def step(inner: Any) -> tuple[Any, Any]:
            return opt.update(total(), inner, params, **extra_args)

        def wait(inner: Any) -> tuple[Any, Any]:
            shapes, _ = jax.eval_shape(step, inner)
            return jax.tree.map(_nothing, shapes, is_leaf=is_leaf), inner

        updates, inner = _cond(due, step, wait, state.inner_opt_state)
        return updates, counted(state, due, inner, acc)

    def apply(
        grads: Any, state: MultiStepsState, params: Any, key: Any = None
    ) -> tuple[Any, MultiStepsState]:
        acc, due, total = gather(grads, state)

        def step(params: Any, inner: Any) -> tuple[Any, Any]:
            return opt.apply(total(), inner, params, key)

        def wait(params: Any, inner: Any) -> tuple[Any, Any]:
            return params, inner

        params, inner = _cond(due, step, wait, params, state.inner_opt_state)
        return params, counted(state, due, inner, acc)

    def catch_up(params: Any, state: Any, ids: Any) -> tuple[Any, Any]:
        check_fields("multi_steps", state, MultiStepsState)
        params, inner = opt.catch_up(params, state.inner_opt_state, ids)
        return params, state._replace(inner_opt_state=inner)

    def flush(params: Any, state: Any) -> tuple[Any, Any]:
        check_fields("multi_steps", state, MultiStepsState)
        params, inner = opt.flush(params, state.inner_opt_state)
        return params, state._replace(inner_opt_state=inner)

    if not opt.catches_up:
        return GradientTransformation(init, update, apply=apply)
    return GradientTransformation(init, update, catch_up, flush, apply)


def _cond(
    due: jax.Array, step: Callable[..., Any], wait: Callable[..., Any], *args: Any
) -> Any:
    """``lax.cond``; without a trace one branch is run as it is, and raises what it does."""
    if isinstance(due, jax.core.Tracer):
        return row_major_tables(lax.cond(due, step, wait, *args))
    return step(*args) if due else wait(*args)


def _nothing(shape: Any) -> Any:
    """An update of this shape that moves nothing."""
    if shape is None:
        return None
    if not is_slices(shape):
        return jnp.zeros(shape.shape, shape.dtype)
    values, indices = shape.values, shape.indices
    num_rows = None if shape.dense_shape is None else shape.dense_shape[0]
    empty = empty_index(num_rows, indices.dtype)
    # Both branches of a cond return the same type, with the same placement.
    values = jnp.zeros(values.shape, values.dtype)
    indices = jnp.full(indices.shape, empty, indices.dtype)
    return jax.tree.unflatten(jax.tree.structure(shape), (values, indices))


def _buffer(example: Any, param: Any, k: int) -> Any:
    """An empty buffer for k gradients like ``example``."""
    if example is None:
        return None
    if not is_slices(example):
        return filled_like(param, 0, widened(jnp.zeros((), example.dtype)).dtype)
    values, indices = example.values, example.indices
    if indices.ndim != 1:
        raise ValueError(f"multi_steps got {example}, which carries a batch axis from vmap")
    shape = jnp.shape(param)
    if example.dense_shape not in (None, shape) or values.shape[1:] != shape[1:]:
        raise ValueError(
            f"multi_steps was made for slices with values {list(values.shape)} of an array "
            f"of shape {example.dense_shape}, and tx.init got one of shape {shape}"
        )
    rows = jnp.zeros((k, *values.shape), values.dtype)
    dtype = index_dtype(shape[0], np.dtype(indices.dtype))
    entries = jnp.full((k, *indices.shape), shape[0], dtype)
    placement = example.facts.placement
    if placement is not None:
        split = PartitionSpec(None, *placement.by_rows)
        rows, entries = split_as_told(param, (rows, entries), split)
    return slices_of(rows, entries, shape, Facts(placement=placement))


def _put(grad: Any, buffer: Any, n: jax.Array) -> Any:
    """The buffer with ``grad`` as its n-th gradient; the first one clears it."""
    if grad is None:
        return None
    if not is_slices(buffer):
        return jnp.where(n == 0, 0, buffer) + grad.astype(buffer.dtype)
    if grad.dense_shape not in (None, buffer.dense_shape):
        raise ValueError(
            f"multi_steps got slices of an array of shape {grad.dense_shape} where the "
            f"parameter has shape {buffer.dense_shape}"
        )
    indices = canonical_indices(grad.indices, buffer.dense_shape[0])
    put = lambda old, new: lax.dynamic_update_index_in_dim(old, new, n, 0)  # noqa: E731
    parts = put(buffer.values, grad.values), put(buffer.indices, indices)
    return jax.tree.unflatten(jax.tree.structure(buffer), parts)


def _total(buffer: Any, example: Any, divisor: int | None) -> Any:
    """The sum of what a buffer holds, or its mean, in the dtype of the gradient."""
    if buffer is None or is_slices(buffer):
        return buffer if buffer is None else merge_leaf(buffer, divisor)
    total = buffer if divisor is None else buffer / divisor
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
