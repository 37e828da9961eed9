"""Updating the rows of an array that slices name: what the scatter methods compute.

Every index outside ``[0, V)`` is dropped. No temporary is as large as the table, and the
table is updated in place when it is donated.
"""

import jax
import jax.numpy as jnp

from jslices._bounds import add_rows, canonical_indices, set_rows, take_rows
from jslices._slices import IndexedSlices
from jslices._sort import sort_ids


def scatter_rows(how: str, table: jax.Array, slices: IndexedSlices) -> jax.Array:
    """``table`` ``[V, *D]`` with ``slices`` (K rows of it) worked in.

    ``how``: ``"add"`` and ``"sub"`` accumulate duplicates, ``"mul"`` and ``"div"`` compound
    them, ``"min"`` and ``"max"`` fold them, of ``"update"`` the last wins.
    """
    rows = slices.values
    indices = canonical_indices(slices.indices, table.shape[0])
    if rows.size == 0 or table.shape[0] == 0:
        return table
    if how in ("add", "sub"):
        return add_rows(table, indices, rows if how == "add" else -rows)
    if how == "update":
        return _last_wins(table, indices, rows)
    if how == "div":
        return _divide(table, indices, rows)
    name = {"mul": "multiply"}.get(how, how)
    function = getattr(table.at[indices], name)
    updated: jax.Array = function(rows, mode="drop", wrap_negative_indices=False)
    return updated


def _last_wins(table: jax.Array, indices: jax.Array, rows: jax.Array) -> jax.Array:
    ordered, positions = sort_ids(indices)
    last = jnp.concatenate([ordered[1:] != ordered[:-1], jnp.ones((1,), bool)])
    only_last = jnp.where(last, ordered, table.shape[0])
    return set_rows(table, only_last, rows[positions])


def _divide(table: jax.Array, indices: jax.Array, rows: jax.Array) -> jax.Array:
    """One division by the product of a row's divisors; integers truncate towards zero."""
    ordered, positions = sort_ids(indices)
    first = jnp.concatenate([jnp.ones((1,), bool), ordered[1:] != ordered[:-1]])
    slots = jnp.cumsum(first, dtype=jnp.int32) - 1
    product = jnp.ones_like(rows).at[slots].multiply(rows[positions])
    unique = jnp.full_like(ordered, table.shape[0]).at[slots].set(ordered)
    old = take_rows(table, unique, mode="clip")
    if jnp.issubdtype(table.dtype, jnp.integer):
        return set_rows(table, unique, jax.lax.div(old, product))
    return set_rows(table, unique, old / product)
