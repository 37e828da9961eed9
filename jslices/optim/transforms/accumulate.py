"""Sums of the gradients of micro-batches, without a dense buffer."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jslices._arguments import OneOf, check_array
from jslices._jax import flatten
from jslices._rows.sums import widened
from jslices._slices import IndexedSlices, as_array, check_slices, is_slices
from jslices._typing import Leaf, PyTree
from jslices.optim.engine.protocol import is_leaf
from jslices.optim.transforms.norms import as_leaf

REDUCTION = OneOf("mean", "sum")


def accumulate_gradients(
    f: Callable[[Any], Any], batches: PyTree, reduction: str = "mean"
) -> Any:
    """The mean of ``f`` over micro-batches, in which IndexedSlices stay IndexedSlices.

    ``lax.scan`` runs ``f`` on one micro-batch after the other. Arrays (losses, dense
    gradients) are added up in the loop; rows of IndexedSlices are summed at the end.

    Args:
      f: a function of one micro-batch that returns a pytree of arrays, IndexedSlices
        (values ``[K, *D]``) and None: ``lambda batch: js.value_and_grad(loss)(params,
        batch)``.
      batches: a pytree of arrays ``[T, ...]``, T micro-batches.
      reduction: ``"mean"`` or ``"sum"``. The mean is that of one large batch if the loss
        is a mean over equally large micro-batches.

    Returns:
      A tree as ``f`` returns it, in its dtypes (the mean of integers is float32); slices
      with values ``[U, *D]`` and unique indices ``[U]``, U = min(T K, V). 16-bit floats are
      added up in float32 and rounded once. Untouched rows stay untouched; out-of-range
      indices are dropped.

    Raises:
      ValueError: for another ``reduction``, or without a leading axis T.

    Cost: memory for ``T * K * D`` elements, a sort of ``T * K`` integers; nothing of the
    table's size.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> params = {"table": jnp.ones((9, 1)), "w": jnp.ones(1)}
      >>> loss = lambda p, ids: (p["table"][ids] @ p["w"]).mean()
      >>> batches = jnp.array([[0, 3], [3, 5]])  # two micro-batches of two
      >>> value, grads = js.accumulate_gradients(
      ...     lambda ids: js.value_and_grad(loss)(params, ids), batches)
      >>> grads["table"].indices, grads["table"].values.ravel()
      (Array([0, 3, 5, 9], dtype=int32), Array([0.25, 0.5 , 0.25, 0.  ], dtype=float32))

    Source: ours; ``optax.MultiSteps`` keeps a dense accumulator ``[V, *D]``. For
    micro-batches that come one by one: :func:`jslices.optim.multi_steps`.
    """
    REDUCTION.check("accumulate_gradients", "reduction", reduction)
    for path, x in jax.tree_util.tree_leaves_with_path(batches):
        check_array(f"accumulate_gradients: batches{jax.tree_util.keystr(path)}", x)
    batches = jax.tree.map(as_array, batches)
    shapes = [x.shape for x in jax.tree.leaves(batches)]
    lengths = {shape[:1] for shape in shapes}
    if len(lengths) != 1 or lengths & {(), (0,)}:
        raise ValueError(
            "accumulate_gradients wants batches with one leading axis of micro-batches, "
            f"got shapes {shapes}; split one large batch: "
            "batch.reshape(num_micro_batches, -1, *batch.shape[1:])"
        )
    ((count,),) = lengths
    first = lambda batches: f(jax.tree.map(lambda x: x[0], batches))  # noqa: E731
    shapes, tree = flatten(jax.eval_shape(first, batches), is_leaf=is_leaf)
    zeros = [None if is_leaf(x) else _wide(jnp.zeros(x.shape, x.dtype)) for x in shapes]

    def body(sums: PyTree, batch: PyTree) -> tuple[Any, Any]:
        out = [as_leaf(x) for x in flatten(f(batch), is_leaf=is_leaf)[0]]
        sums = [s if s is None else s + _wide(x) for s, x in zip(sums, out, strict=True)]
        return sums, [x if is_slices(x) else None for x in out]

    sums, rows = lax.scan(body, zeros, batches)
    divisor = count if reduction == "mean" else None

    def total(x: Leaf, s: Leaf, r: Leaf) -> Any:
        if is_slices(x):
            return merge_leaf(r, divisor)
        return x if x is None else _divided(s, x.dtype, divisor)

    return tree.unflatten(map(total, shapes, sums, rows))


def sum_stacked(tree: PyTree, reduction: str = "mean") -> Any:
    """The mean of gradients that are stacked along a leading axis.

    For results of ``lax.scan`` and ``jax.vmap``: the rows of all T gradients become one
    IndexedSlices, duplicates summed.

    Args:
      tree: a pytree of arrays ``[T, ...]``, IndexedSlices with values ``[T, K, *D]`` and
        indices ``[T, K]``, and None.
      reduction: ``"mean"`` or ``"sum"``.

    Returns:
      The tree without that axis, in the dtypes and with slices ``[U, *D]`` as
      :func:`accumulate_gradients` returns them.

    Raises:
      TypeError: for slices whose indices a foreign ``tree.map`` has changed.
      ValueError: for another ``reduction``, and without one leading axis of all leaves.

    Cost: a sort of ``T * K`` integers and one pass over ``T * K * D`` elements per
    IndexedSlices; nothing of the table's size.

    Example:
      >>> import jax, jax.numpy as jnp, jslices as js
      >>> table, batches = jnp.ones((9, 1)), jnp.array([[0, 3], [3, 5]])
      >>> loss = lambda table, ids: table[ids].mean()
      >>> step = lambda carry, ids: (carry, js.grad(loss)(table, ids))
      >>> _, stacked = jax.lax.scan(step, None, batches)
      >>> stacked.values.shape, js.sum_stacked(stacked).indices
      ((2, 2, 1), Array([0, 3, 5, 9], dtype=int32))

    Source: ours. TensorFlow's accumulators do this between steps.
    """
    REDUCTION.check("sum_stacked", "reduction", reduction)
    leaves, structure = flatten(tree, is_leaf=is_leaf)
    leaves = [as_leaf(x) for x in leaves]
    count = leading_axis("sum_stacked", leaves)
    divisor = count if reduction == "mean" else None
    return structure.unflatten([x if x is None else merge_leaf(x, divisor) for x in leaves])


def leading_axis(caller: str, leaves: Sequence[Any]) -> int:
    """The length of the leading axis that all of the stacked gradients have."""
    for x in filter(is_slices, leaves):
        check_slices(x)
    stacked = [x for x in leaves if x is not None]
    heads = {(x.indices.shape[:-1] if is_slices(x) else x.shape)[:1] for x in stacked}
    if len(heads) != 1 or () in heads:
        raise ValueError(
            f"{caller} wants gradients with one leading axis in common, as jax.vmap and "
            f"lax.scan give them (slices: values [B, K, *D], indices [B, K]), got "
            f"{shapes_of(stacked) or 'no array'}"
        )
    ((count,),) = heads
    return count


def merge_leaf(x: Leaf, divisor: int | None) -> Any:
    """An array ``[T, ...]`` or slices ``[T, K, *D]``, summed over T and then divided."""
    if not isinstance(x, IndexedSlices):
        return _divided(jnp.sum(_wide(x), axis=0), x.dtype, divisor)
    if x.indices.ndim > 2:
        return jax.vmap(lambda part: merge_leaf(part, divisor), in_axes=1)(x)
    # A sum must not be rounded before it is divided.
    wide = x if divisor is None else x.with_values(_wide(x.values))
    unique = wide._flattened().coalesce()
    values = _divided(unique.values, x.dtype, divisor)
    return unique.with_values(values)


def _wide(x: jax.Array) -> jax.Array:
    """Cast to the dtype of sums: float32 for 16-bit floats, int32 for bools."""
    return x.astype(jnp.int32) if x.dtype == bool else widened(x)


def _divided(total: jax.Array, dtype: DTypeLike, divisor: int | None) -> jax.Array:
    """The quotient, in ``dtype`` if that is a floating one."""
    result = total if divisor is None else total / divisor
    return result.astype(dtype) if jnp.issubdtype(dtype, jnp.inexact) else result


def shapes_of(leaves: Sequence[Leaf]) -> str:
    """The shapes of a gradient's leaves, for a message."""

    def one(x: Leaf) -> str:
        if not is_slices(x):
            return "None" if x is None else f"{x.dtype}{list(x.shape)}"
        return f"slices of {x.values.dtype}{list(x.values.shape)}"

    return ", ".join(map(one, leaves))
