"""How a gather or a slice reads whole rows of a table, for every form that JAX writes."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jslices._grad import compat
from jslices._grad.views import Mode, Repeated, View


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


def lookup(eqn: compat.Equation, view: View) -> Lookup | None:
    """How the equation reads whole rows of its first operand; None if it does not."""
    if isinstance(view, Repeated):
        return _gather_repeated(eqn, view.lead) if eqn.primitive.name == "gather" else None
    if eqn.primitive.name == "gather":
        return _gather(eqn)
    if eqn.primitive.name == "dynamic_slice":
        return _dynamic_slice(eqn)
    return None


def _gather(eqn: compat.Equation) -> Lookup | None:
    numbers, sizes = eqn.params["dimension_numbers"], tuple(eqn.params["slice_sizes"])
    mode, shape = eqn.params["mode"], compat.shape_of(eqn.invars[0])
    axes = tuple(numbers.start_index_map)
    whole_rows = sizes[:1] == (1,) and sizes[1:] == shape[1:] and 0 in axes
    batched = numbers.operand_batching_dims or numbers.start_indices_batching_dims
    known_mode = mode in (Mode.CLIP, Mode.FILL_OR_DROP, Mode.PROMISE_IN_BOUNDS)
    # Starts other than 0 on the other axes are clamped; a promise that they are 0 may be
    # broken, and JAX then drops the gradient of a row that it reads.
    trusting = mode == Mode.PROMISE_IN_BOUNDS and len(axes) > 1
    if not whole_rows or batched or not known_mode or trusting:
        return None
    batch = compat.shape_of(eqn.invars[1])[:-1]
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


def _arrangement(eqn: compat.Equation) -> Callable[[jax.Array], jax.Array]:
    """From rows ``[count, *D]`` to where a gather puts them."""
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    batch = compat.shape_of(eqn.invars[1])[:-1]
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


def _gather_repeated(eqn: compat.Equation, lead: int) -> Lookup | None:
    """A gather from a table repeated for each example, every example at ids of its own."""
    numbers, sizes = eqn.params["dimension_numbers"], tuple(eqn.params["slice_sizes"])
    mode, shape = eqn.params["mode"], compat.shape_of(eqn.invars[0])
    axes, batch = tuple(numbers.start_index_map), compat.shape_of(eqn.invars[1])[:-1]
    examples = tuple(range(lead - 1))
    by_example = tuple(numbers.operand_batching_dims) == examples
    by_example &= tuple(numbers.start_indices_batching_dims) == examples
    whole_rows = sizes == (*(1,) * lead, *shape[lead:]) and lead - 1 in axes
    known_mode = mode in (Mode.CLIP, Mode.FILL_OR_DROP, Mode.PROMISE_IN_BOUNDS)
    if not (by_example and whole_rows and known_mode):
        return None
    column, height, count = axes.index(lead - 1), shape[lead - 1], math.prod(batch)
    each = count // max(math.prod(batch[: lead - 1]), 1)

    def starts(values: Sequence[Any]) -> jax.Array:
        return _wide(values[1]).reshape(count, len(axes))

    def ids(values: Sequence[Any]) -> jax.Array:
        rows = jnp.clip(starts(values)[:, column], 0, max(height - 1, 0))
        example = jnp.arange(count, dtype=rows.dtype) // max(each, 1)
        return example * height + rows

    def good(values: Sequence[Any]) -> jax.Array:
        given = starts(values)
        rows = given[:, column]
        others = jnp.delete(given, column, axis=1, assume_unique_indices=True)
        return (rows >= 0) & (rows < height) & jnp.all(others == 0, axis=1)

    fill_value = eqn.params["fill_value"]
    return Lookup(count, mode, fill_value, ids, _arrangement(eqn), good)


def _wide(ids: Any) -> jax.Array:
    """Row numbers in a dtype that can count the rows: V need not fit into an int8."""
    ids = jnp.asarray(ids)
    return ids.astype(jnp.int32) if ids.dtype.itemsize < 4 else ids


def _dynamic_slice(eqn: compat.Equation) -> Lookup | None:
    sizes, shape = tuple(eqn.params["slice_sizes"]), compat.shape_of(eqn.invars[0])
    count, height = sizes[0] if sizes else 0, shape[0] if shape else 0
    if not sizes or sizes[1:] != shape[1:] or count > max(1, height - 1):
        return None

    def ids(values: Sequence[Any]) -> jax.Array:
        start = jnp.clip(_wide(values[1]), 0, height - count)
        return start + jnp.arange(count, dtype=start.dtype)

    return Lookup(count, Mode.CLIP, None, ids, lambda rows: rows)
