"""Norms of gradients, and whether they are finite.

A tree of gradients holds arrays, IndexedSlices and None. Everything here first sums the
entries of slices that name the same row, so that it sees what the dense gradient holds.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jslices._arguments import check_array
from jslices._jax import flatten, takes_tables
from jslices._place.boundary import one_program
from jslices._rows.sums import widened
from jslices._slices import as_array, deduplicated, is_slices, slices_of
from jslices._slices.held import refuse_held
from jslices._typing import Leaf, PyTree
from jslices.optim.engine.protocol import is_leaf, paths_of


@takes_tables()
@one_program
def global_norm(tree: PyTree) -> jax.Array:
    """The square root of the sum of the squares of everything in ``tree``.

    Duplicate rows are summed first, so this is the norm of the dense gradient. Untouched
    rows are zero. Empty entries (out-of-range indices) do not count, whatever they hold.

    Args:
      tree: a pytree of arrays ``[...]``, IndexedSlices with values ``[K, *D]``, and None,
        of floating or complex dtypes.

    Returns:
      ``[]``, in the widest dtype of the tree and at least float32: 16-bit floats are
      squared and added in float32. 0 for a tree without arrays. NaN and infinities in
      ``tree`` come out as NaN or infinity. The gradient where everything is zero is 0.

    Raises:
      TypeError: for integers, for indices that a foreign ``tree.map`` has changed, and for
        parameters in boxes, whose rows may be behind.

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
    refuse_held(tree)
    return norm_of_leaves(coalesced_leaves("global_norm", tree))


@takes_tables()
@one_program
def all_finite(tree: PyTree) -> jax.Array:
    """Whether the gradients in ``tree`` are free of NaN and infinities.

    Duplicate rows are summed first, in float32, and rounded once: two finite float16 rows
    whose sum overflows are found. Empty entries (out-of-range indices) do not count,
    whatever they hold. Untouched rows are zero, hence finite.

    Args:
      tree: a pytree of arrays ``[...]``, IndexedSlices with values ``[K, *D]``, and None.
        Integers are always finite.

    Returns:
      bool ``[]``, for ``jnp.where`` or ``lax.cond``.

    Raises:
      TypeError: for slices whose indices a foreign ``tree.map`` has changed.

    Cost: a sort of K integers and one pass over ``K * D`` elements per IndexedSlices.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> rows = jnp.full((2, 1), 60_000, jnp.float16)
      >>> js.all_finite(js.IndexedSlices(rows, jnp.array([3, 3]), (9, 1)))
      Array(False, dtype=bool)

    Source: PyTorch's ``GradScaler``, which coalesces float16 gradients for the same
    reason; TensorFlow's ``LossScaleOptimizer`` looks at the values as they are.
    """
    finite = jnp.array(True)
    for x in map(as_leaf, jax.tree.leaves(tree, is_leaf=is_leaf)):
        if x is not None:
            unique = deduplicated(x) if is_slices(x) else x
            finite &= jnp.all(jnp.isfinite(values_of(unique)))
    return finite


# --- The leaves of a tree of gradients ------------------------------------------------


def as_leaf(x: Leaf) -> Any:
    """The leaf in JAX arrays, also where ``jax.vmap`` returned NumPy arrays."""
    if x is None:
        return x
    if not is_slices(x):
        check_array("a tree of gradients", x, "arrays, IndexedSlices or None")
        return as_array(x)
    values, indices = jnp.asarray(x.values), jnp.asarray(x.indices)
    return slices_of(values, indices, x.dense_shape, x.facts)


def one_leaf(x: Leaf, call: str) -> Any:
    """The argument ``t``, one array or one IndexedSlices, in JAX arrays."""
    if not is_slices(x):
        check_array(f"{call}(t=...)", x, "an array or IndexedSlices")
    return as_leaf(x)


def values_of(x: Leaf) -> jax.Array:
    """The array, or the rows that slices store."""
    return x.values if is_slices(x) else x


def coalesced_leaves(caller: str, tree: PyTree) -> list[Any]:
    """The leaves of ``tree`` in order, floating: arrays, slices of unique rows, None."""
    leaves, structure = flatten(tree, is_leaf=is_leaf)
    leaves = [as_leaf(x) for x in leaves]
    wrong = [
        f"{x.dtype}{list(x.shape)}{path}"
        for x, path in zip(leaves, paths_of(structure), strict=True)
        if x is not None and not jnp.issubdtype(x.dtype, jnp.inexact)
    ]
    if wrong:
        raise TypeError(
            f"{caller} wants floating arrays, got {', '.join(wrong)}; cast with "
            "x.astype('float32'), or put None where there is no gradient"
        )
    return [deduplicated(x) if is_slices(x) else x for x in leaves]


# --- Arithmetic -----------------------------------------------------------------------


def norm_of_leaves(leaves: list[Any]) -> jax.Array:
    """``[]``, the norm of all leaves together, as :func:`coalesced_leaves` returns them."""
    squares = [sum_of_squares(values_of(x)) for x in leaves if x is not None]
    return safe_sqrt(sum(squares, start=jnp.zeros((), jnp.float32)))


def sum_of_squares(
    x: jax.Array, axes: tuple[int, ...] | None = None, keepdims: bool = False
) -> jax.Array:
    """The squares of the absolute values, added up in float32 or wider."""
    wide = widened(x)
    squares = jnp.real(wide * wide.conj()) if jnp.iscomplexobj(x) else wide * wide
    return jnp.sum(squares, axis=axes, keepdims=keepdims)


def safe_sqrt(x: jax.Array) -> jax.Array:
    """The square root, whose gradient at 0 is 0 instead of infinite. NaN stays NaN."""
    zero = x == 0
    return jnp.where(zero, x, jnp.sqrt(jnp.where(zero, jnp.ones_like(x), x)))
