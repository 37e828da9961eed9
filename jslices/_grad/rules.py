"""Which primitives commute with a lookup: ``f(table)[ids] == f(table[ids])``.

What neither has a rule here nor is a lookup (``lookups``) is a dense use: the gradient is
then right, but dense.
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
