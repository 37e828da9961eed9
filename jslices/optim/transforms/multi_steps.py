"""One step of an optimizer for the gradients of k calls.

The gradients are gathered in *buffers*: for a dense leaf its sum, for slices the rows of k
gradients side by side, ``[k, K, *D]``. Nothing has the size of a table.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jslices._jax import flatten
from jslices._place.boundary import filled_like, is_tall, row_major_array, split_by
from jslices._rows import access
from jslices._rows.sums import widened
from jslices._slices import check_slices, is_slices, slices_of
from jslices._typing import Gradients, Key, Leaf, Params, PyTree, State, Transformation
from jslices.optim.engine import protocol
from jslices.optim.engine.arguments import PositiveCount
from jslices.optim.engine.boxes import unboxed
from jslices.optim.engine.checks import check_fields
from jslices.optim.engine.clock import IN_BRANCH
from jslices.optim.engine.constructors import combinator
from jslices.optim.engine.numbers import next_count, zero_count
from jslices.optim.engine.protocol import GradientTransformation, is_leaf
from jslices.optim.transforms import base
from jslices.optim.transforms.accumulate import merge_leaf, shapes_of


class MultiStepsState(NamedTuple):
    """State of :func:`multi_steps`, with the names of Optax."""

    mini_step: jax.Array  #: int32 ``[]``, gradients gathered for the next step.
    gradient_step: jax.Array  #: int32 ``[]``, steps taken.
    inner_opt_state: Any  #: the state of the optimizer.
    acc_grads: Any  #: sums of dense gradients; rows side by side, values ``[k, K, *D]``,
    #: None for an array into which no gradient comes.


@combinator
def multi_steps(
    opt: Transformation,
    every_k_schedule: PositiveCount,
    grads: Gradients,
    use_grad_mean: bool = True,
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
        tells which leaves are IndexedSlices, and K, the rows of each. That of all
        parameters also inside of ``partition`` or ``masked``, which say whose turn it is.
      use_grad_mean: False for the sum instead of the mean.

    Returns:
      A :class:`GradientTransformation`. Its updates have the same shapes in each call;
      between the steps arrays are zero and the entries of slices empty, so that nothing
      moves. ``apply`` leaves the parameters alone between the steps.
      ``state.mini_step == 0`` after a step.

    Raises:
      TypeError: for a schedule instead of k, or if ``opt`` is not a transformation.
      ValueError: for k below 1; from ``update``, for a gradient of other shapes, unless it
        is one without rows (no gradient comes in), which fits everywhere.

    Cost: memory for ``k * K * D`` elements a table and one array for each dense leaf;
    a call between steps writes ``K * D``, the k-th is a step of ``opt`` on ``k * K`` rows.

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
    opt = base.as_transformation("multi_steps", opt)
    buffers = _Buffers(grads, int(every_k_schedule), use_grad_mean)

    def init(params: Params) -> MultiStepsState:
        inner = opt.init(params)
        return MultiStepsState(zero_count(), zero_count(), inner, buffers.empty(params))

    def if_due(
        name: str,
        wait: Callable[..., tuple[PyTree, State]],
        grads: Gradients,
        state: MultiStepsState,
        params: Params = None,
        *key: Key,
        **extra: PyTree,
    ) -> tuple[PyTree, MultiStepsState]:
        """``update`` or ``apply`` of ``opt`` if a step is due, else ``wait``."""
        acc, due = buffers.gather(grads, state)
        if extra.get("at_now") is not None:  # so may have been rows of earlier gradients
            extra["at_now"] = True

        def step(params: Params, inner: State) -> tuple[PyTree, State]:
            return getattr(opt, name)(buffers.total(acc), inner, params, *key, **extra)  # type: ignore[no-any-return]

        wait = functools.partial(wait, step)
        result, inner = _cond(due, step, wait, params, state.inner_opt_state)
        n = jnp.where(due, 0, state.mini_step + 1)
        steps = jnp.where(due, next_count(state.gradient_step), state.gradient_step)
        return result, MultiStepsState(n, steps, inner, acc)

    def part(state: State) -> State:
        check_fields("multi_steps", state, MultiStepsState)
        return state.inner_opt_state

    def plan(grads: Gradients, params: Params, platform: str | None = None) -> PyTree:
        """That of the k-th call."""
        total = jax.eval_shape(lambda p: buffers.total(buffers.empty(p)), params)
        return opt.plan(total, params, platform)

    whole = lambda state, part: state._replace(inner_opt_state=part)  # noqa: E731
    late = base.catching_up(opt, part, whole)
    anew = lambda opt: multi_steps(opt, every_k_schedule, grads, use_grad_mean)  # noqa: E731
    late["of_rows"] = base.renumbering(anew, opt)
    update = functools.partial(if_due, "update", _no_updates)
    apply = functools.partial(if_due, "apply", lambda step, *unchanged: unchanged)
    return GradientTransformation(init, update, apply=apply, plan=plan, **late)


def _no_updates(
    step: Callable[..., tuple[Gradients, State]], params: Params, inner: State
) -> tuple[Gradients, State]:
    shapes, _ = jax.eval_shape(step, params, inner)
    return jax.tree.map(_nothing, shapes, is_leaf=is_leaf), inner


class _Buffers:
    """Buffers for k gradients: sums of arrays, rows of slices side by side."""

    def __init__(self, example: Gradients, k: int, mean: bool) -> None:
        self.k, self.divisor = k, k if mean else None
        self.examples, self.structure = flatten(example, is_leaf=base.is_leaf_or_masked)

    def empty(self, params: Params) -> PyTree:
        """The buffers before the first gradient."""
        if not jax.tree.leaves(params):  # as in optax.tree_map_params
            return params
        arrays = self.structure.flatten_up_to(params)
        pairs = zip(self.examples, arrays, strict=True)
        return self.structure.unflatten([_buffer(x, p, self.k) for x, p in pairs])

    def gather(self, grads: Gradients, state: MultiStepsState) -> tuple[PyTree, jax.Array]:
        """The buffers with ``grads`` as well, and whether a step is due."""
        check_fields("multi_steps", state, MultiStepsState)
        leaves, structure = flatten(grads, is_leaf=base.is_leaf_or_masked)
        if structure != self.structure:
            bare = flatten(unboxed(grads), is_leaf=base.is_leaf_or_masked)[1]
            help = "make it with a gradient like these"
            if bare == self.structure:
                help = "pass it gradients of nnx.as_pure(params)"
            raise ValueError(
                f"multi_steps was made for gradients {shapes_of(self.examples)} in "
                f"{self.structure}, got {shapes_of(leaves)} in {structure}; {help}"
            )
        n, old, new = state.mini_step, structure.flatten_up_to(state.acc_grads), []
        columns = protocol.paths_of(structure), leaves, self.examples, old
        for path, x, example, buffer in zip(*columns, strict=True):
            if protocol.has_no_rows(x) and example is not None:
                x = _nothing(example)
            if is_slices(x):
                check_slices(x)
            if not base.is_masked(x) and not _alike(x, example):
                raise ValueError(
                    f"multi_steps was made for a gradient {shapes_of([example])}{path}, "
                    f"got {shapes_of([x])}; make it with a gradient like this"
                )
            new.append(_put(x, buffer, n))
        return structure.unflatten(new), n == self.k - 1

    def total(self, buffers: PyTree) -> Gradients:
        """The gradient of a step."""
        pairs = zip(self.structure.flatten_up_to(buffers), self.examples, strict=True)
        return self.structure.unflatten([_total(b, x, self.divisor) for b, x in pairs])


def _cond(
    due: jax.Array, step: Callable[..., Any], wait: Callable[..., Any], *args: PyTree
) -> Any:
    """``lax.cond``; without a trace one branch is run as it is, and raises what it does."""
    if isinstance(due, jax.core.Tracer):
        tables = lambda x: row_major_array(x) if is_tall(x) else x  # noqa: E731
        token = IN_BRANCH.set(True)
        try:
            return jax.tree.map(tables, lax.cond(due, step, wait, *args))
        finally:
            IN_BRANCH.reset(token)
    return step(*args) if due else wait(*args)


def _nothing(shape: Leaf) -> Leaf:
    """An update of this shape that moves nothing."""
    if shape is None:
        return None
    if not is_slices(shape):
        return jnp.zeros(shape.shape, shape.dtype)
    values, indices = shape.values, shape.indices
    empty = access.empty_index(shape.num_rows, indices.dtype)
    # Both branches of a cond return the same type, with the same placement.
    values = jnp.zeros(values.shape, values.dtype)
    indices = jnp.full(indices.shape, empty, indices.dtype)
    return jax.tree.unflatten(jax.tree.structure(shape), (values, indices))


def _buffer(example: Leaf, param: jax.Array, k: int) -> Leaf:
    """An empty buffer for k gradients like ``example``."""
    if base.is_masked(param) and example is not None:  # of another part of a partition
        return param
    if example is None or protocol.has_no_rows(example):
        return None
    if not is_slices(example):
        return filled_like(param, 0, widened(jnp.zeros((), example.dtype)).dtype)
    values, indices = example.values, example.indices
    if indices.ndim != 1:
        raise ValueError(f"multi_steps got {example}, which carries a batch axis from vmap")
    shape, axes = jnp.shape(param), example.row_axes
    # Of any height, as reset_rows begins some rows; the step compares heights.
    if values.shape[1:] != shape[axes:] or axes > len(shape):
        raise ValueError(
            f"multi_steps was made for slices with values {list(values.shape)} of an array "
            f"of shape {example.dense_shape}, and tx.init got one of shape {shape}"
        )
    rows = jnp.zeros((k, *values.shape), values.dtype)
    num_rows = access.rows_numbered(shape, axes)
    dtype = access.index_dtype(num_rows, np.dtype(indices.dtype))
    entries = jnp.full((k, *indices.shape), num_rows, dtype)
    placement = example.facts.placement
    if placement is not None:
        spec = PartitionSpec(None, placement.rows, *placement.columns)
        rows = split_by(param, rows, spec)
        entries = split_by(param, entries, PartitionSpec(None, *placement.by_rows))
    return slices_of(rows, entries, shape, example.facts.lasting)


def _put(grad: Leaf, buffer: Leaf, n: jax.Array) -> Leaf:
    """The buffer with ``grad`` as its n-th gradient; the first one clears it."""
    if buffer is None or base.is_masked(grad):
        return None if buffer is None else grad
    if not is_slices(buffer):
        return jnp.where(n == 0, 0, buffer) + grad.astype(buffer.dtype)
    alike = grad.row_axes == buffer.row_axes
    if grad.dense_shape not in (None, buffer.dense_shape) or not alike:
        raise ValueError(
            f"multi_steps got slices of an array of shape {grad.dense_shape} where the "
            f"parameter has shape {buffer.dense_shape}, and row_axes are {grad.row_axes} "
            f"and {buffer.row_axes}"
        )
    indices = access.canonical_indices(grad.indices, buffer.num_rows)
    put = lambda old, new: lax.dynamic_update_index_in_dim(old, new, n, 0)  # noqa: E731
    parts = put(buffer.values, grad.values), put(buffer.indices, indices)
    return jax.tree.unflatten(jax.tree.structure(buffer), parts)


def _total(buffer: Leaf, example: Leaf, divisor: int | None) -> Leaf:
    """The sum of what a buffer holds, or its mean, in the dtype of the gradient."""
    if buffer is None:
        return _nothing(example)
    if is_slices(buffer) or base.is_masked(buffer):
        return merge_leaf(buffer, divisor) if is_slices(buffer) else buffer
    total = buffer if divisor is None else buffer / divisor
    return total.astype(example.dtype)


def _alike(grad: Leaf, example: Leaf) -> bool:
    if grad is None or example is None or is_slices(grad) != is_slices(example):
        return grad is example
    pairs = zip(jax.tree.leaves(grad), jax.tree.leaves(example), strict=True)
    return all((x.shape, x.dtype) == (y.shape, y.dtype) for x, y in pairs)
