"""What each primitive means to a table: a step that commutes with a lookup, or a lookup.

Whatever has no rule here is a dense use: the gradient is then right, but dense.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jslices._grad import compat
from jslices._grad.views import (
    Mode,
    Repeated,
    Rowwise,
    Stacked,
    Stopped,
    Table,
    Tiled,
    View,
    Window,
    without_slots,
)
from jslices._lookup.mark import mark_p

# Primitives that compute each element from the elements at the same place. XLA
# broadcasts scalars and single rows in them.
ELEMENTWISE = frozenset(
    """
    abs acos acosh add and asin asinh atan atan2 atanh cbrt ceil clamp complex conj
    convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2
    expm1 floor ge gt imag integer_pow is_finite le lgamma log log1p logistic lt max min
    mul name ne neg nextafter not or pow real reduce_precision rem round rsqrt select_n sign
    sin sinh sqrt square sub tan tanh xor
    """.split()
)


def commuting(eqn: compat.Equation, operands: Sequence[Any]) -> list[Any] | None:
    """The equation's outputs as views, if it treats all rows alike.

    Args:
      eqn: an equation with at least one view among its operands.
      operands: per operand a view, or its value (None while the program is only read).

    Returns:
      One view (or, for operands that merely pass through, value) per output; None if
      the equation mixes rows.
    """
    name = eqn.primitive.name
    if any(isinstance(operand, Repeated) for operand in operands):
        return _repeated(eqn, operands)
    if name in ELEMENTWISE:
        return _elementwise(eqn, operands)
    rule = _STEPS.get(name)
    return None if rule is None else rule(eqn, operands)


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


# --- steps that commute with a lookup ---------------------------------------------


def _rowwise(
    eqn: compat.Equation,
    operands: Sequence[Any],
    params_for: Callable[[int], dict[str, Any]] = lambda rows: {},
) -> list[Any]:
    """Views that run the equation on some rows, with parameters for that many."""
    inputs = [x for x in operands if isinstance(x, View)]
    from_floats = any(jnp.issubdtype(x.dtype, jnp.inexact) for x in inputs)
    views: list[View] = []
    for number, out in enumerate(eqn.outvars):

        def apply(values: Sequence[Any], rows: int, number: int = number) -> jax.Array:
            return compat.bind(eqn, values, **params_for(rows))[number]

        shape, dtype = tuple(out.aval.shape), out.aval.dtype
        view = Rowwise(shape, dtype, apply, tuple(operands))
        # `table > 0`, and what is made from it alone, passes no gradient on.
        graded = from_floats and jnp.issubdtype(dtype, jnp.inexact)
        views.append(view if graded else without_slots(view))
    return views


def _elementwise(eqn: compat.Equation, operands: Sequence[Any]) -> list[Any] | None:
    shape = compat.shape_of(eqn.outvars[0])
    for atom, operand in zip(eqn.invars, operands, strict=True):
        given = compat.shape_of(atom)
        if isinstance(operand, View):
            # A view of one row that is broadcast to many is not read row by row.
            if given[0] != shape[0] or len(given) != len(shape):
                return None
        elif given and given[0] not in (1, shape[0]):
            return None
    return _rowwise(eqn, operands)


def _reshape(eqn: compat.Equation, operands: Sequence[Any]) -> list[Any] | None:
    old, new = compat.shape_of(eqn.invars[0]), tuple(eqn.params["new_sizes"])
    same_rows = bool(new) and new[0] == old[0] and math.prod(old) > 0
    if not same_rows or eqn.params.get("dimensions") is not None:
        return None
    return _rowwise(eqn, operands, lambda rows: {"new_sizes": (rows, *new[1:])})


def _transpose(eqn: compat.Equation, operands: Sequence[Any]) -> list[Any] | None:
    return _rowwise(eqn, operands) if eqn.params["permutation"][0] == 0 else None


def _squeeze(eqn: compat.Equation, operands: Sequence[Any]) -> list[Any] | None:
    return None if 0 in eqn.params["dimensions"] else _rowwise(eqn, operands)


def _broadcast(eqn: compat.Equation, operands: Sequence[Any]) -> list[Any] | None:
    shape, dims = tuple(eqn.params["shape"]), eqn.params["broadcast_dimensions"]
    given = compat.shape_of(eqn.invars[0])
    if (
        tuple(dims) == tuple(range(1, len(shape)))
        and shape[1:] == given
        and len(operands) == 1
    ):
        (view,) = operands
        tiles = Tiled((shape[0] * given[0], *given[1:]), view.dtype, view)
        return [Repeated(shape, view.dtype, tiles, 2)]
    if not dims or dims[0] != 0 or given[0] != shape[0] or len(operands) > 1:
        return None
    return _rowwise(eqn, operands, lambda rows: {"shape": (rows, *shape[1:])})


def _slice(eqn: compat.Equation, operands: Sequence[Any]) -> list[Any] | None:
    """``table[1:, 2:5]``: some consecutive rows, and some columns of them."""
    start, limit = (
        tuple(eqn.params["start_indices"]),
        tuple(eqn.params["limit_indices"]),
    )
    strides = eqn.params["strides"]
    (view,) = operands
    if (strides and strides[0] != 1) or limit[0] <= start[0]:
        return None
    if (start[0], limit[0]) != (0, view.shape[0]):
        shape = (limit[0] - start[0], *view.shape[1:])
        view = Window(shape, view.dtype, view, start[0])
    if (start[1:], limit[1:]) == ((0,) * (len(start) - 1), view.shape[1:]):
        if not strides or set(strides) == {1}:
            return [view]
    columns = {"start_indices": (0, *start[1:])}
    return _rowwise(
        eqn, [view], lambda rows: {**columns, "limit_indices": (rows, *limit[1:])}
    )


def _split(eqn: compat.Equation, operands: Sequence[Any]) -> list[Any] | None:
    return None if eqn.params["axis"] == 0 else _rowwise(eqn, operands)


def _along(name: str) -> Callable[..., list[Any] | None]:
    """Rules for primitives that work along one axis, or several, given by a parameter."""

    def rule(eqn: compat.Equation, operands: Sequence[Any]) -> list[Any] | None:
        axes = eqn.params[name]
        rows = 0 in axes if isinstance(axes, tuple | list) else axes == 0
        same = all(isinstance(x, View) for x in operands)
        return None if rows or not same else _rowwise(eqn, operands)

    return rule


def _pad(eqn: compat.Equation, operands: Sequence[Any]) -> list[Any] | None:
    untouched = tuple(eqn.params["padding_config"][0]) == (0, 0, 0)
    return _rowwise(eqn, operands) if untouched else None


def _reduce(eqn: compat.Equation, operands: Sequence[Any]) -> list[Any] | None:
    return None if 0 in eqn.params["axes"] else _rowwise(eqn, operands)


def _concatenate(eqn: compat.Equation, operands: Sequence[Any]) -> list[Any] | None:
    out = eqn.outvars[0].aval
    if eqn.params["dimension"] != 0:
        return _rowwise(eqn, operands)
    heights = tuple(compat.shape_of(atom)[0] for atom in eqn.invars)
    return [Stacked(tuple(out.shape), out.dtype, tuple(operands), heights)]


def _stop_gradient(eqn: compat.Equation, operands: Sequence[Any]) -> list[Any]:
    (view,) = operands
    return [Stopped(view.shape, view.dtype, view)]


def _pass_through(eqn: compat.Equation, operands: Sequence[Any]) -> list[Any]:
    """``optimization_barrier``: the views step round it, the arrays go through."""
    arrays = [x for x in operands if not isinstance(x, View)]
    if arrays and arrays[0] is not None:
        through = iter(
            lax.optimization_barrier([x for x in operands if not isinstance(x, View)])
        )
        return [x if isinstance(x, View) else next(through) for x in operands]
    return list(operands)


def _mark(eqn: compat.Equation, operands: Sequence[Any]) -> list[Any]:
    """``embedding_lookup``'s mark on its table, which is the table."""
    return list(operands)


def _sharding_constraint(eqn: compat.Equation, operands: Sequence[Any]) -> list[Any] | None:
    """A constraint speaks of the whole table, so it stays on the table."""
    (view,) = operands
    if not isinstance(view, Table):
        return None
    if view.array is None:
        return [view]
    return [dataclasses.replace(view, array=compat.bind(eqn, [view.array])[0])]


_STEPS: dict[str, Callable[..., list[Any] | None]] = {
    "broadcast_in_dim": _broadcast,
    "concatenate": _concatenate,
    mark_p.name: _mark,
    "optimization_barrier": _pass_through,
    "cumlogsumexp": _along("axis"),
    "cummax": _along("axis"),
    "cummin": _along("axis"),
    "cumprod": _along("axis"),
    "cumsum": _along("axis"),
    "pad": _pad,
    "reduce_max": _reduce,
    "reduce_min": _reduce,
    "reduce_prod": _reduce,
    "reduce_sum": _reduce,
    "reshape": _reshape,
    "rev": _along("dimensions"),
    "sharding_constraint": _sharding_constraint,
    "slice": _slice,
    "sort": _along("dimension"),
    "split": _split,
    "squeeze": _squeeze,
    "stack": _split,
    "stop_gradient": _stop_gradient,
    "transpose": _transpose,
}


# --- lookups ----------------------------------------------------------------------


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


def _repeated(eqn: compat.Equation, operands: Sequence[Any]) -> list[Any] | None:
    """An elementwise step on tables that are repeated for each example."""
    name, out = eqn.primitive.name, eqn.outvars[0].aval
    if name == mark_p.name:
        return list(operands)
    first = next(x for x in operands if isinstance(x, Repeated))
    if name == "broadcast_in_dim" and len(operands) == 1:  # repeated once more
        dims, times = eqn.params["broadcast_dimensions"], out.shape[0]
        if tuple(dims) != tuple(range(1, out.ndim)) or out.shape[1:] != first.shape:
            return None
        shape = (times * first.flat.shape[0], *first.flat.shape[1:])
        tiles = Tiled(shape, first.dtype, first.flat)
        return [Repeated(tuple(out.shape), first.dtype, tiles, first.lead + 1)]
    lead = tuple(out.shape[: first.lead])
    flat: list[Any] = []
    for atom, operand in zip(eqn.invars, operands, strict=True):
        given = compat.shape_of(atom)
        if isinstance(operand, Repeated) and given[: len(lead)] == lead:
            flat.append(operand.flat)
        elif isinstance(operand, View):
            return None
        elif any(n not in (1, wanted) for n, wanted in zip(given, lead, strict=False)):
            return None
        elif given and operand is not None:  # something for each example, or each row
            rest = given[len(lead) :]
            flat.append(jnp.broadcast_to(operand, (*lead, *rest)).reshape(-1, *rest))
        else:
            flat.append(operand)
    if name == "stop_gradient":
        views: list[Any] = [Stopped(flat[0].shape, flat[0].dtype, flat[0])]
    elif name in ELEMENTWISE:
        views = _rowwise(eqn, flat)
    else:
        return None
    shape = (math.prod(lead), *out.shape[len(lead) :])
    view = dataclasses.replace(views[0], shape=shape)
    return [Repeated(tuple(out.shape), out.dtype, view, len(lead))]


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
