"""Lookups: how a gather or a slice reads whole rows, in every form that JAX writes."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jslices import _jax
from jslices._grad.views import Ids, Reader, Table, View, flat, leading

Mode = lax.GatherScatterMode

#: ``take(table, ids, mode, fill_value)`` reads rows of a table.
Take = Callable[..., jax.Array]


@dataclasses.dataclass(frozen=True)
class Lookup:
    """An equation that reads ``count`` whole rows of ``view``.

    Attributes:
      view: what is read, with one axis of rows.
      count: how many rows.
      mode: what becomes of ids out of range.
      fill_value: what they read in the mode that fills.
      ids: from the operands' values to the row numbers ``[count]``.
      arrange: from the rows ``[count, *D]`` to the equation's output.
      good: from the operands' values to which ids are good; None: those in range.
    """

    view: View
    count: int
    mode: Mode
    fill_value: Any
    ids: Callable[[Sequence[Any]], jax.Array]
    arrange: Callable[[jax.Array], jax.Array]
    good: Callable[[Sequence[Any]], jax.Array] | None = None

    def read(self, operands: Sequence[Any], take: Take) -> jax.Array:
        """The equation's output.

        The gradient follows the mode: a clipped id counts for the edge row, any other bad
        id for none.
        """
        view, ids, mode = self.view, self.ids(operands), self.mode
        height = view.shape[0]
        reader = Reader(lambda table, ids: take(table, ids, "clip", None))
        if self.good is not None and mode != Mode.CLIP:
            good = self.good(operands)  # and then all ids are in range
            rows = reader.rows(view, Ids((), ids, jnp.where(good, ids, height)))
            return self.arrange(self._masked(rows, good))
        near = functools.partial(jnp.clip, ids, 0, max(height - 1, 0))
        record = near() if mode == Mode.CLIP else ids
        if isinstance(view, Table):
            return self.arrange(take(view, Ids((), ids, record), mode, self.fill_value))
        if mode == Mode.CLIP:
            return self.arrange(reader.rows(view, Ids((), record, record)))
        rows = reader.rows(view, Ids((), near(), record))
        return self.arrange(self._masked(rows, (ids >= 0) & (ids < height)))

    def _masked(self, rows: jax.Array, good: jax.Array) -> jax.Array:
        good = good.reshape((-1,) + (1,) * (rows.ndim - 1))
        if self.mode == Mode.FILL_OR_DROP:
            return jnp.where(good, rows, _fill(self.fill_value, rows.dtype))
        # A bad id reads the edge row, but no gradient comes back, neither to the table nor
        # to whatever else the rows were made from.
        return jnp.where(good, rows, lax.stop_gradient(rows))


def _fill(fill_value: Any, dtype: Any) -> Any:
    """JAX's own default: NaN, the smallest signed, the largest unsigned integer."""
    if fill_value is None:
        if jnp.issubdtype(dtype, jnp.inexact):
            fill_value = np.nan
        elif jnp.issubdtype(dtype, jnp.bool_):
            fill_value = True
        else:
            limits = jnp.iinfo(dtype)
            fill_value = limits.min if limits.min < 0 else limits.max
    # NumPy's, because jax_debug_nans would refuse a NaN made by JAX.
    return np.array(fill_value, dtype)


# --- the forms --------------------------------------------------------------------------


def lookup(eqn: _jax.Equation, view: Any) -> Lookup | None:
    """How the equation reads whole rows of its first operand; None if it does not."""
    if not isinstance(view, View):
        return None
    name, lead = eqn.primitive.name, leading(view)
    if name == "gather":
        return _gather(eqn, view) if lead == 1 else _gather_repeated(eqn, view, lead)
    # Of tables repeated for each example, vmap makes a gather.
    if name == "dynamic_slice" and lead == 1:
        return _dynamic_slice(eqn, view)
    return None


def _known(mode: Any) -> bool:
    return mode in (Mode.CLIP, Mode.FILL_OR_DROP, Mode.PROMISE_IN_BOUNDS)


def _gather(eqn: _jax.Equation, view: View) -> Lookup | None:
    numbers, sizes = eqn.params["dimension_numbers"], tuple(eqn.params["slice_sizes"])
    mode, shape = eqn.params["mode"], view.shape
    axes = tuple(numbers.start_index_map)
    whole_rows = sizes[:1] == (1,) and sizes[1:] == shape[1:] and 0 in axes
    batched = numbers.operand_batching_dims or numbers.start_indices_batching_dims
    # Starts other than 0 on the other axes are clamped; a promise that they are 0 may be
    # broken, and JAX then drops the gradient of a row that it reads.
    trusting = mode == Mode.PROMISE_IN_BOUNDS and len(axes) > 1
    if not whole_rows or batched or not _known(mode) or trusting:
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

    return Lookup(view, count, mode, eqn.params["fill_value"], ids, _arrangement(eqn))


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


def _gather_repeated(eqn: _jax.Equation, view: View, lead: int) -> Lookup | None:
    """A gather from tables repeated for each example.

    Along every axis of the batch, either each example has ids of its own, or the same ids
    are read from all of them.
    """
    numbers, sizes = eqn.params["dimension_numbers"], tuple(eqn.params["slice_sizes"])
    mode, shape = eqn.params["mode"], view.shape
    axes, batch = tuple(numbers.start_index_map), _jax.shape_of(eqn.invars[1])[:-1]
    own = dict(
        zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    )
    shared = tuple(d for d in range(lead - 1) if d not in own)
    rows = tuple(1 if d in own or d == lead - 1 else n for d, n in enumerate(shape[:lead]))
    if sizes != (*rows, *shape[lead:]) or lead - 1 not in axes or not _known(mode):
        return None
    # The rows come out in this order: by the ids, then by the examples that share them.
    order = (*batch, *(shape[d] for d in shared))
    place = own | {d: len(batch) + i for i, d in enumerate(shared)}
    column, height, count = axes.index(lead - 1), shape[lead - 1], math.prod(order)

    def spread(x: jax.Array) -> jax.Array:
        x = x.reshape(*batch, *(1 for _ in shared))
        return jnp.broadcast_to(x, order).reshape(count)

    def ids(values: Sequence[Any]) -> jax.Array:
        row = jnp.clip(_wide(values[1])[..., column], 0, max(height - 1, 0))
        row = spread(row).reshape(order)
        example = jnp.zeros((), row.dtype)
        for d in range(lead - 1):
            position = lax.broadcasted_iota(row.dtype, order, place[d])
            example = example * shape[d] + position
        return (example * height + row).reshape(count)

    def good(values: Sequence[Any]) -> jax.Array:
        starts = _wide(values[1])
        row = starts[..., column]
        others = jnp.delete(starts, column, axis=-1, assume_unique_indices=True)
        return spread((row >= 0) & (row < height) & jnp.all(others == 0, axis=-1))

    fill_value = eqn.params["fill_value"]
    return Lookup(flat(view), count, mode, fill_value, ids, _arrangement(eqn), good)


def _dynamic_slice(eqn: _jax.Equation, view: View) -> Lookup | None:
    sizes, shape = tuple(eqn.params["slice_sizes"]), view.shape
    count, height = sizes[0] if sizes else 0, shape[0] if shape else 0
    if not sizes or sizes[1:] != shape[1:]:
        return None
    if count != 1 and not _jax.holds(lambda: count < height):
        return None

    def ids(values: Sequence[Any]) -> jax.Array:
        start = jnp.clip(_wide(values[1]), 0, height - count)
        return start + jnp.arange(count, dtype=start.dtype)

    return Lookup(view, count, Mode.CLIP, None, ids, lambda rows: rows)


def _wide(ids: Any) -> jax.Array:
    """Row numbers in a dtype that can count the rows: V need not fit into an int8."""
    ids = jnp.asarray(ids)
    return ids.astype(jnp.int32) if ids.dtype.itemsize < 4 else ids
