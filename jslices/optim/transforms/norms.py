"""Norms of gradients that are rows: what the dense gradient has, from the rows alone."""

from typing import Any

import jax
import jax.numpy as jnp

from jslices._slices import is_slices
from jslices.optim.transforms.leaves import as_leaf, is_leaf, numbers


def global_norm(tree: Any) -> jax.Array:
    """The square root of the sum of the squares of everything in ``tree``.

    Duplicate rows are summed first, so this is the norm of the dense gradient. Untouched
    rows are zero, and empty slots (out-of-range indices) count for nothing whatever they
    hold.

    Args:
      tree: a pytree of arrays ``[...]``, IndexedSlices with values ``[K, *D]``, and None,
        of floating or complex dtypes.

    Returns:
      ``[]``, in the widest dtype of the tree and at least float32: 16-bit floats are
      squared and added in float32. 0 for a tree without arrays. NaN and infinities in
      ``tree`` come out as NaN or infinity. The gradient where everything is zero is 0.

    Raises:
      TypeError: for integers, and for slices whose indices a foreign ``tree.map`` has
        changed.

    Cost: a sort of K integers and one pass over ``K * D`` elements per IndexedSlices.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> values = jnp.array([[3., 4.], [6., 8.]])
      >>> rows = js.IndexedSlices(values, jnp.array([1, 1]), (9, 2))
      >>> js.global_norm({"table": rows, "bias": None})
      Array(15., dtype=float32)

    Source: ``tf.linalg.global_norm`` and ``optax.global_norm``. TensorFlow's takes the
    values as they are: 11.18 in the example, where the dense gradient has 15.
    """
    return norm_of_leaves(coalesced_leaves("global_norm", tree))


def coalesced_leaves(name: str, tree: Any) -> list[Any]:
    """The leaves of ``tree``, in its order: arrays, unique rows, and None."""
    pairs, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    pairs = [(path, as_leaf(x)) for path, x in pairs]
    wrong = [
        f"{x.dtype}{list(x.shape)}" + (f" at {jax.tree_util.keystr(path)}" if path else "")
        for path, x in pairs
        if x is not None and not jnp.issubdtype(x.dtype, jnp.inexact)
    ]
    if wrong:
        raise TypeError(
            f"{name} wants floating arrays, got {', '.join(wrong)}; cast with "
            "x.astype('float32'), or put None where there is no gradient"
        )
    return [x.coalesce() if is_slices(x) else x for _, x in pairs]


def norm_of_leaves(leaves: list[Any]) -> jax.Array:
    """``[]``, the norm of all leaves together; rows must be unique."""
    squares = [sum_of_squares(numbers(x)) for x in leaves if x is not None]
    return safe_sqrt(sum(squares, start=jnp.zeros((), jnp.float32)))


def sum_of_squares(
    x: jax.Array, axes: tuple[int, ...] | None = None, keepdims: bool = False
) -> jax.Array:
    """The squares of the absolute values, added up in float32 or wider."""
    wide = widened(x)
    squares = jnp.real(wide * wide.conj()) if jnp.iscomplexobj(x) else wide * wide
    return jnp.sum(squares, axis=axes, keepdims=keepdims)


def widened(x: jax.Array) -> jax.Array:
    """16-bit floats as float32, the rest as it is."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def safe_sqrt(x: jax.Array) -> jax.Array:
    """The root, with gradient 0 at 0 instead of an infinite one; NaN stays."""
    zero = x == 0
    return jnp.where(zero, x, jnp.sqrt(jnp.where(zero, jnp.ones_like(x), x)))
