"""How a gather or a slice reads whole rows of a table, for every form that JAX writes."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jslices import _jax
from jslices._grad.views import Mode, View, leading


@dataclasses.dataclass(frozen=True)
class Lookup:
    """A read of ``count`` whole rows."""

    count: int
    mode: Mode
    fill_value: Any
    #: From the operands' values to the row numbers ``[count]``.
    ids: Callable[[Sequence[Any]], jax.Array]
    #: From the rows ``[count, *D]`` to the equation's output.
    arrange: Callable[[jax.Array], jax.Array]
    #: From the operands' values to which ids are good; None: those in range.
    good: Callable[[Sequence[Any]], jax.Array] | None = None


def lookup(eqn: _jax.Equation, view: View) -> Lookup | None:
    """How the equation reads whole rows of its first operand; None if it does not."""
    lead = leading(view)
    if eqn.primitive.name == "gather":
        return _gather(eqn) if lead == 1 else _gather_repeated(eqn, lead)
    # Of tables repeated for each example, vmap makes a gather.
    if eqn.primitive.name == "dynamic_slice" and lead == 1:
        return _dynamic_slice(eqn)
    return None


def _gather(eqn: _jax.Equation) -> Lookup | None:
    numbers, sizes = eqn.params["dimension_numbers"], tuple(eqn.params["slice_sizes"])
    mode, shape = eqn.params["mode"], _jax.shape_of(eqn.invars[0])
    axes = tuple(numbers.start_index_map)
    whole_rows = sizes[:1] == (1,) and sizes[1:] == shape[1:] and 0 in axes
    batched = numbers.operand_batching_dims or numbers.start_indices_batching_dims
    known_mode = mode in (Mode.CLIP, Mode.FILL_OR_DROP, Mode.PROMISE_IN_BOUNDS)
    # Starts other than 0 on the other axes are clamped; a promise that they are 0 may be
    # broken, and JAX then drops the gradient of a row that it reads.
    trusting = mode == Mode.PROMISE_IN_BOUNDS and len(axes) > 1
    if not whole_rows or batched or not known_mode or trusting:
        return None
    batch = _jax.shape_of(eqn.invars[1])[:-1]
    column = axes.index(0)
    count, height = math.prod(batch), shape[0]

    def ids(values: Sequence[Any]) -> jax.Array:
        starts = _wide(values[1]).reshape(count, len(axes))
        rows = starts[:, column]
        if mode == Mode.FILL_OR_DROP and len(axes) > 1:
            # The other axes are read whole, so any start but 0 is out of range.
            others = jnp.delete(starts, column, axis=1, assume_unique_indices=True)
            rows = jnp.where(jnp.all(others == 0, axis=1), rows, height)
        return rows

    return Lookup(count, mode, eqn.params["fill_value"], ids, _arrangement(eqn))


def _arrangement(eqn: _jax.Equation) -> Callable[[jax.Array], jax.Array]:
    """From rows ``[count, *D]`` to where a gather puts them."""
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    batch = _jax.shape_of(eqn.invars[1])[:-1]
    left_out = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    window = [n for d, n in enumerate(sizes) if d not in left_out]

    def arrange(rows: jax.Array) -> jax.Array:
        out = rows.reshape(*batch, *window)
        if out.ndim == len(numbers.offset_dims):
            return out
        kept = [d for d in range(out.ndim) if d not in numbers.offset_dims]
        places = [*kept, *numbers.offset_dims]
        return jnp.moveaxis(out, range(out.ndim), places)

    return arrange


def _gather_repeated(eqn: _jax.Equation, lead: int) -> Lookup | None:
    """A gather from tables repeated for each example.

    Along every axis of the batch, either each example has ids of its own, or the same ids
    are read from all of them.
    """
    numbers, sizes = eqn.params["dimension_numbers"], tuple(eqn.params["slice_sizes"])
    mode, shape = eqn.params["mode"], _jax.shape_of(eqn.invars[0])
    axes, batch = tuple(numbers.start_index_map), _jax.shape_of(eqn.invars[1])[:-1]
    own = dict(
        zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    )
    shared = tuple(d for d in range(lead - 1) if d not in own)
    rows = tuple(1 if d in own or d == lead - 1 else n for d, n in enumerate(shape[:lead]))
    known_mode = mode in (Mode.CLIP, Mode.FILL_OR_DROP, Mode.PROMISE_IN_BOUNDS)
    if sizes != (*rows, *shape[lead:]) or lead - 1 not in axes or not known_mode:
        return None
    # The rows come out in this order: by the ids, then by the examples that share them.
    order = (*batch, *(shape[d] for d in shared))
    place = own | {d: len(batch) + i for i, d in enumerate(shared)}
    column, height, count = axes.index(lead - 1), shape[lead - 1], math.prod(order)

    def spread(x: jax.Array) -> jax.Array:
        x = x.reshape(*batch, *(1 for _ in shared))
        return jnp.broadcast_to(x, order).reshape(count)

    def starts(values: Sequence[Any]) -> jax.Array:
        return _wide(values[1])

    def ids(values: Sequence[Any]) -> jax.Array:
        row = jnp.clip(starts(values)[..., column], 0, max(height - 1, 0))
        row = spread(row).reshape(order)
        example = jnp.zeros((), row.dtype)
        for d in range(lead - 1):
            position = lax.broadcasted_iota(row.dtype, order, place[d])
            example = example * shape[d] + position
        return (example * height + row).reshape(count)

    def good(values: Sequence[Any]) -> jax.Array:
        given = starts(values)
        row = given[..., column]
        others = jnp.delete(given, column, axis=-1, assume_unique_indices=True)
        return spread((row >= 0) & (row < height) & jnp.all(others == 0, axis=-1))

    fill_value = eqn.params["fill_value"]
    return Lookup(count, mode, fill_value, ids, _arrangement(eqn), good)


def _wide(ids: Any) -> jax.Array:
    """Row numbers in a dtype that can count the rows: V need not fit into an int8."""
    ids = jnp.asarray(ids)
    return ids.astype(jnp.int32) if ids.dtype.itemsize < 4 else ids


def _dynamic_slice(eqn: _jax.Equation) -> Lookup | None:
    sizes, shape = tuple(eqn.params["slice_sizes"]), _jax.shape_of(eqn.invars[0])
    count, height = sizes[0] if sizes else 0, shape[0] if shape else 0
    if not sizes or sizes[1:] != shape[1:] or count > max(1, height - 1):
        return None

    def ids(values: Sequence[Any]) -> jax.Array:
        start = jnp.clip(_wide(values[1]), 0, height - count)
        return start + jnp.arange(count, dtype=start.dtype)

    return Lookup(count, Mode.CLIP, None, ids, lambda rows: rows)
