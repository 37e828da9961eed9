"""Updates times a factor of their array, or of their row: learning rates by group."""

from typing import Any

import jax
import jax.numpy as jnp

from jslices._arguments import is_number, shown
from jslices._rows.access import canonical_indices, per_row
from jslices._slices import IndexedSlices, check_slices
from jslices._typing import Gradients, Leaf, PyTree
from jslices.optim.engine.constructors import combinator
from jslices.optim.engine.protocol import GradientTransformation, StateOfRows
from jslices.optim.transforms.base import map_with_prefix, stateless
from jslices.optim.transforms.rows import check_by_row


@combinator
def scale(factors: PyTree) -> GradientTransformation:
    """Multiplies updates by a factor for each array, or for each row of a table.

    After an optimizer in a chain the factors are those of its learning rate, weight decay
    included. In front of one they scale gradients, which Adam and the like undo.

    Untouched rows stay untouched. Duplicates are each multiplied; out-of-range indices are
    dropped. After an optimizer with ``untouched="exact"`` they would not scale the steps
    that rows have missed: ``chain`` refuses it (for a factor for each array use
    ``partition``, for tables in one array one stack of tables for each rate).

    Args:
      factors: mirrors the parameters or is a prefix of them. For an array a number ``[]``;
        for a table ``[V, *D]`` also a function that is given row numbers ``[n]`` and
        returns a number for each, such as :meth:`jslices.tables.StackedTables.per_row`;
        None for what stays as it is.

    Returns:
      A stateless :class:`jslices.GradientTransformation`. Updates keep their dtypes.

    Raises:
      TypeError: for a factor neither number nor function, and updates of integers.
      ValueError: for factors in another structure, and numbers of another shape; for a
        function where rows are packed, or several axes of an array may number them.

    Cost: one pass over the updates: ``U * D`` elements, and U factors.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> rates = {"table": lambda rows: jnp.where(rows < 2, 0.1, 1.0), "w": 0.5}
      >>> tx = js.optim.chain(js.sgd(1.0), js.optim.scale(rates))
      >>> params = {"table": jnp.zeros((4, 1)), "w": jnp.zeros(2)}
      >>> rows = js.IndexedSlices(jnp.ones((2, 1)), jnp.array([1, 3]), (4, 1))
      >>> grads = {"table": rows, "w": jnp.ones(2)}
      >>> params, state = tx.apply(grads, tx.init(params), params)
      >>> params["table"].ravel(), params["w"]
      (Array([ 0. , -0.1,  0. , -1. ], dtype=float32), Array([-0.5, -0.5], dtype=float32))

    Source: ``optax.scale``, which takes one number, and multiplies the indices of slices;
    parameter groups of PyTorch, ``[{"params": ..., "lr": ...}]``.
    """
    for factor in jax.tree.leaves(factors):
        if not callable(factor) and hasattr(factor, "dtype") and jnp.ndim(factor):
            raise ValueError(
                f"scale wants one number for an array, got {jnp.shape(factor)}; for a "
                "number for each row: lambda rows: factors[rows]"
            )
        if not callable(factor) and not is_number(factor):
            raise TypeError(
                "scale wants a number, a function of rows or None for each array, got "
                f"{shown(factor)}"
            )

    def update(grads: Gradients) -> Any:
        return map_with_prefix("scale(factors=...)", factors, _scaled, grads)

    def of_rows(rows: StateOfRows) -> GradientTransformation:
        return scale(jax.tree.map(rows.renumbered, factors))

    any_by_row = any(map(callable, jax.tree.leaves(factors)))
    return stateless(update, of_rows=of_rows if any_by_row else None)


def _scaled(update: Leaf, factor: Any) -> Any:
    check_by_row("scale", factor, update, "keep groups of rows in tables of their own")
    if isinstance(update, IndexedSlices):
        check_slices(update)
    elif callable(factor) and not update.ndim:
        raise ValueError("scale got a function of rows for an array without rows, []")
    if not jnp.issubdtype(update.dtype, jnp.floating):
        raise TypeError(f"scale wants updates of a floating dtype, got {update.dtype}")
    # Products are rounded once: a factor need not be a number of 16 bits.
    wide = update.astype(jnp.promote_types(update.dtype, jnp.float32))
    if not callable(factor):
        scaled = wide * jnp.asarray(factor, wide.dtype)
    elif not isinstance(update, IndexedSlices):
        scaled = wide * per_row(_factors(factor, jnp.arange(len(update)), wide), wide)
    else:
        indices = canonical_indices(update.indices, update.num_rows)
        scaled = wide.scale_rows(_factors(factor, indices, wide))
    return scaled.astype(update.dtype)


def _factors(factor: Any, rows: jax.Array, update: Leaf) -> jax.Array:
    factors = jnp.asarray(factor(rows))
    if factors.shape != rows.shape:
        raise ValueError(
            f"scale wants a function that returns a number for each of {list(rows.shape)} "
            f"rows, got {factors.dtype}{list(factors.shape)}"
        )
    return factors.astype(update.dtype)
