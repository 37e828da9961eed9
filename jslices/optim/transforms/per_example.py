"""Norms of the gradients of single examples, and clipping them, for DP-SGD."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jslices._jax import flatten
from jslices._typing import Gradients, PyTree
from jslices.optim.engine.protocol import is_leaf
from jslices.optim.transforms import norms
from jslices.optim.transforms.accumulate import leading_axis, merge_leaf
from jslices.optim.transforms.clip import check_limit, shrunk


def per_example_norms(tree: PyTree) -> jax.Array:
    """The global norm of each example's gradient.

    Duplicates within an example are summed first: an example that looks up a row twice has
    the norm of its dense gradient.

    Args:
      tree: gradients with a leading axis for the examples, as
        ``jax.vmap(js.grad(loss), in_axes=(None, 0))(params, batch)`` gives them: a pytree
        of arrays ``[B, ...]``, IndexedSlices with values ``[B, K, *D]`` and indices
        ``[B, K]``, and None.

    Returns:
      ``[B]``, in the widest dtype of the tree and at least float32.

    Raises:
      TypeError: for integers, and for indices that a foreign ``tree.map`` has changed.
      ValueError: without a leading axis, or if it differs from leaf to leaf.

    Cost: B sorts of K integers and one pass over ``B * K * D`` elements per IndexedSlices.

    Example:
      >>> import jax, jax.numpy as jnp, jslices as js
      >>> loss = lambda table, ids: table[ids].sum()
      >>> ids = jnp.array([[0, 3], [3, 3]])
      >>> grads = jax.vmap(js.grad(loss), in_axes=(None, 0))(jnp.ones((9, 1)), ids)
      >>> js.per_example_norms(grads)
      Array([1.4142135, 2.       ], dtype=float32)

    Source: Abadi et al., 2016; ``jax.vmap(optax.global_norm)`` of dense gradients
    ``[B, V, *D]``, which this equals.
    """
    leaves = norms.coalesced_leaves("per_example_norms", tree)
    leading_axis("per_example_norms", leaves)
    return jax.vmap(norms.norm_of_leaves)(leaves)


def per_example_global_norm_clip(
    grads: Gradients, l2_norm_clip: ArrayLike
) -> tuple[Any, jax.Array]:
    """The sum of the examples' gradients, each scaled down to a norm of at most a limit.

    For DP-SGD, which then adds noise to the sum (in all rows, or nothing is private) and
    divides it by the batch size.

    Args:
      grads: as for :func:`per_example_norms`.
      l2_norm_clip: the limit, ``[]``.

    Returns:
      ``(sum, num_clipped)``: the tree without the axis of examples, in its dtypes, slices
      with values ``[U, *D]`` and unique indices ``[U]``, U = min(B K, V); and how many
      examples were scaled down, int32 ``[]``. An example whose norm is NaN or infinite
      makes all that it touches NaN. Untouched rows stay untouched; out-of-range indices are
      dropped.

    Raises:
      TypeError, ValueError: as :func:`per_example_norms`; for a limit that is negative or
        not a single number.

    Cost: that of :func:`per_example_norms`, a sort of ``B * K`` integers and a pass over
    ``B * K * D`` elements per IndexedSlices.

    Example:
      >>> import jax, jax.numpy as jnp, jslices as js
      >>> loss = lambda table, ids: table[ids].sum()
      >>> ids = jnp.array([[0, 4], [3, 3]])
      >>> grads = jax.vmap(js.grad(loss), in_axes=(None, 0))(jnp.ones((9, 1)), ids)
      >>> total, num_clipped = js.per_example_global_norm_clip(grads, 1.5)
      >>> total.to_dense().ravel(), num_clipped
      (Array([1. , 0. , 0. , 1.5, 1. , 0. , 0. , 0. , 0. ], dtype=float32), Array(1, ...))

    Source: ``optax.per_example_global_norm_clip``, with its name and results for finite
    norms; it scales by 0 where a norm is infinite, and not at all where it is NaN.
    """
    name = "per_example_global_norm_clip"
    limit = check_limit(name, "l2_norm_clip", l2_norm_clip, single=True)
    norms_of_examples = per_example_norms(grads)
    leaves, tree = flatten(grads, is_leaf=is_leaf)
    shrink = jax.vmap(shrunk, in_axes=(0, 0, None))
    summed = [
        x if x is None else merge_leaf(shrink(x, norms_of_examples, limit), None)
        for x in map(norms.as_leaf, leaves)
    ]
    return tree.unflatten(summed), jnp.sum(norms_of_examples > limit, dtype=jnp.int32)
