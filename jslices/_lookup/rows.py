"""The lookup whose cotangent is IndexedSlices.

JAX insists that the cotangent of an array has the array's own shape, so a table cannot
get slices. The lookup therefore takes one argument more, a *slot*: an IndexedSlices of
zeros that is never read. The cotangent of the slot is the row gradient; the table itself
gets none.
"""

import functools
from typing import Any

import jax

from jslices._rows.bounds import take_rows
from jslices._slices import IndexedSlices


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def lookup_rows(
    table: jax.Array, ids: jax.Array, slot: IndexedSlices, mode: Any, fill_value: Any
) -> jax.Array:
    """Rows ``[n, *D]`` of ``table`` ``[V, *D]`` at ``ids`` ``[n]``.

    The gradient goes to ``slot``: IndexedSlices with ``values`` ``[n, *D]`` (its
    ``indices`` are None; integers have no cotangent, so the ids travel beside it).
    """
    del slot
    return take_rows(table, ids, mode=mode, fill_value=fill_value)


def _forward(
    table: jax.Array, ids: jax.Array, slot: IndexedSlices, mode: Any, fill_value: Any
) -> tuple[jax.Array, IndexedSlices]:
    rows = take_rows(table, ids, mode=mode, fill_value=fill_value)
    shape_only = IndexedSlices.tree_unflatten(slot.dense_shape, (None, None))
    return rows, shape_only


def _backward(
    mode: Any, fill_value: Any, shape_only: IndexedSlices, rows: jax.Array
) -> tuple[None, None, IndexedSlices]:
    del mode, fill_value
    slices = IndexedSlices.tree_unflatten(shape_only.dense_shape, (rows, None))
    return None, None, slices


lookup_rows.defvjp(_forward, _backward)
