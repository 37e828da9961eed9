"""Which primitives commute with a lookup: ``f(table)[ids] == f(table[ids])``.

What neither has a rule here nor is a lookup (``lookups``) is a dense use: the gradient is
then right, but dense.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jslices import _jax
from jslices._grad.renumber import Copied, Stacked, Window
from jslices._grad.views import (
    Repeated,
    Rowwise,
    Stopped,
    Table,
    View,
    flat,
    leading,
    without_slots,
)
from jslices._lookup.rows import mark_p
from jslices._rows.bounds import INT32_MAX

#: ``rule(eqn, operands, lead) -> outputs``, for views whose rows ``lead`` axes number.
Rule = Callable[[_jax.Equation, Sequence[Any], int], list[Any] | None]

# Primitives that compute each element from the elements at the same place. XLA
# broadcasts scalars and single rows in them.
ELEMENTWISE = frozenset(
    """
    abs acos acosh add and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp
    clz complex conj convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv
    erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac imag integer_pow is_finite
    le lgamma log log1p log2 logistic lt max min mul mulhi name ne neg nextafter not
    one_minus_square or polygamma population_count pow real reduce_precision
    regularized_incomplete_beta rem round rsqrt select_n shift_left shift_right_arithmetic
    shift_right_logical sign sin sinh sqrt square sub tan tanh xor zeta
    """.split()
)


def commuting(eqn: _jax.Equation, operands: Sequence[Any]) -> list[Any] | None:
    """The equation's outputs as views, if it treats all rows alike.

    Args:
      eqn: an equation with at least one view among its operands.
      operands: per operand a view, or its value (None while the program is only read).

    Returns:
      One view (or, for operands that merely pass through, value) per output; None if
      the equation mixes rows.
    """
    name = eqn.primitive.name
    rule = _elementwise if name in ELEMENTWISE else _STEPS.get(name)
    # Rows are numbered by axis 0, or, in tables that vmap repeated for every example, by
    # the axes of the batch as well: the `lead` ones.
    lead = {leading(operand) for operand in operands if isinstance(operand, View)}
    return rule(eqn, operands, *lead) if rule is not None and len(lead) == 1 else None


# --- what the rules are made of ---------------------------------------------------


def _rowwise(
    eqn: _jax.Equation,
    operands: Sequence[Any],
    lead: int,
    params_for: Callable[[tuple[int, ...]], dict[str, Any]] = lambda rows: {},
) -> list[Any]:
    """Views that run the equation on some rows.

    ``params_for(rows)`` gives the parameters that hold the sizes of the leading axes, for
    other such sizes.
    """
    rows = _jax.shape_of(eqn.outvars[0])[:lead]
    inner = [_flat(x, atom, rows) for x, atom in zip(operands, eqn.invars, strict=True)]
    views = [x for x in inner if isinstance(x, View)]
    from_floats = any(jnp.issubdtype(x.dtype, jnp.inexact) for x in views)
    ones = (1,) * (lead - 1)
    outputs: list[View] = []
    for number, out in enumerate(eqn.outvars):
        row = tuple(out.aval.shape[lead:])

        def apply(values: Sequence[Any], count: int, which: tuple[Any, ...]) -> jax.Array:
            number, row = which
            given = [x.reshape(*ones, *x.shape) if jnp.ndim(x) else x for x in values]
            result = _jax.bind(eqn, given, **params_for((*ones, count)))[number]
            return result.reshape(count, *row)

        run = functools.partial(apply, which=(number, row))
        view = Rowwise((math.prod(rows), *row), out.aval.dtype, run, tuple(inner))
        # `table > 0`, and what is made from it alone, passes no gradient on.
        graded = from_floats and jnp.issubdtype(view.dtype, jnp.inexact)
        outputs.append(_folded(view if graded else without_slots(view), rows))
    return outputs


def _flat(operand: Any, atom: Any, rows: tuple[int, ...]) -> Any:
    """An operand of a row-wise step with one axis of rows, or of one row for all."""
    if isinstance(operand, View):
        return flat(operand)
    if len(rows) == 1 or operand is None or jnp.ndim(operand) == 0:
        return operand
    rest = _jax.shape_of(atom)[len(rows) :]
    if math.prod(operand.shape[: len(rows)]) > 1:  # one for each example, or each row
        operand = jnp.broadcast_to(operand, (*rows, *rest))
    return operand.reshape(-1, *rest)


def _folded(view: View, rows: tuple[int, ...]) -> View:
    """A view with one axis for all rows as one that numbers them by the axes ``rows``."""
    if len(rows) == 1:
        return view
    return Repeated((*rows, *view.shape[1:]), view.dtype, view, len(rows))


# --- steps that commute with a lookup ---------------------------------------------


def _elementwise(
    eqn: _jax.Equation, operands: Sequence[Any], lead: int
) -> list[Any] | None:
    shape = _jax.shape_of(eqn.outvars[0])
    for atom, operand in zip(eqn.invars, operands, strict=True):
        given = _jax.shape_of(atom)
        if isinstance(operand, View):
            # A view of one row that is broadcast to many is not read row by row.
            if given[:lead] != shape[:lead] or len(given) != len(shape):
                return None
        elif any(n not in (1, rows) for n, rows in zip(given[:lead], shape, strict=False)):
            return None
    return _rowwise(eqn, operands, lead)


def _along(name: str) -> Rule:
    """A rule for what works along one axis, or several, given by a parameter."""

    def rule(eqn: _jax.Equation, operands: Sequence[Any], lead: int) -> list[Any] | None:
        axes = eqn.params[name]
        axes = axes if isinstance(axes, tuple | list) else (axes,)
        inside = all(axis >= lead for axis in axes)
        return _rowwise(eqn, operands, lead) if inside else None

    return rule


def _untouched(name: str, nothing: Any) -> Rule:
    """A rule for what does something to each axis, and ``nothing`` to those of the rows."""

    def rule(eqn: _jax.Equation, operands: Sequence[Any], lead: int) -> list[Any] | None:
        same = all(entry == nothing for entry in eqn.params[name][:lead])
        return _rowwise(eqn, operands, lead) if same else None

    return rule


def _reshape(eqn: _jax.Equation, operands: Sequence[Any], lead: int) -> list[Any] | None:
    old, new = _jax.shape_of(eqn.invars[0]), tuple(eqn.params["new_sizes"])
    same_rows = new[:lead] == old[:lead] and math.prod(old) > 0
    if not same_rows or eqn.params.get("dimensions") is not None:
        return None
    return _rowwise(eqn, operands, lead, lambda rows: {"new_sizes": (*rows, *new[lead:])})


def _transpose(eqn: _jax.Equation, operands: Sequence[Any], lead: int) -> list[Any] | None:
    stay = tuple(eqn.params["permutation"][:lead]) == tuple(range(lead))
    return _rowwise(eqn, operands, lead) if stay else None


def _broadcast(eqn: _jax.Equation, operands: Sequence[Any], lead: int) -> list[Any] | None:
    """New axes within the rows, or a copy of all rows for every example of a batch."""
    shape, dims = tuple(eqn.params["shape"]), tuple(eqn.params["broadcast_dimensions"])
    given = _jax.shape_of(eqn.invars[0])
    if len(operands) > 1:  # sizes that are known at run time only
        return None
    if dims[:lead] == tuple(range(lead)) and shape[:lead] == given[:lead]:
        return _rowwise(eqn, operands, lead, lambda rows: {"shape": (*rows, *shape[lead:])})
    # The rows come last among the axes that number them, and are as they were.
    more = lead + len(shape) - len(given)
    as_they_were = tuple(shape[d] for d in dims) == given
    last = dims[lead - 1 :] == tuple(range(more - 1, len(shape)))
    if not as_they_were or not last or math.prod(shape[:more]) > INT32_MAX:
        return None
    inner, rows = flat(operands[0]), shape[:more]
    everything = (math.prod(rows), *shape[more:])
    return [_folded(Copied(everything, inner.dtype, inner, rows, dims[:lead]), rows)]


def _slice(eqn: _jax.Equation, operands: Sequence[Any], lead: int) -> list[Any] | None:
    """``table[1:, 2:5]``: some consecutive rows, and some columns of them."""
    (view,) = operands
    start, limit = tuple(eqn.params["start_indices"]), tuple(eqn.params["limit_indices"])
    strides = tuple(eqn.params["strides"] or (1,) * len(start))
    nothing, full = (0,) * len(start), view.shape
    above, height = start[lead - 1], limit[lead - 1] - start[lead - 1]
    one = lead - 1  # the axes of the batch, if any, are before that of the rows
    all_examples = (start[:one], limit[:one]) == (nothing[:one], full[:one])
    if not all_examples or set(strides[:lead]) != {1} or height < 1:
        return None
    if height < full[one]:
        rows = (*full[:one], height)
        shape = (math.prod(rows), *full[lead:])
        window = Window(shape, view.dtype, flat(view), above, height, full[one])
        view = _folded(window, rows)
    whole_rows = (start[lead:], limit[lead:]) == (nothing[lead:], full[lead:])
    if whole_rows and set(strides) == {1}:
        return [view]
    begin = {"start_indices": (*nothing[:lead], *start[lead:])}
    return _rowwise(
        eqn, [view], lead, lambda rows: {**begin, "limit_indices": (*rows, *limit[lead:])}
    )


def _concatenate(
    eqn: _jax.Equation, operands: Sequence[Any], lead: int
) -> list[Any] | None:
    axis, rows = eqn.params["dimension"], _jax.shape_of(eqn.outvars[0])[:lead]
    if axis >= lead:
        return _rowwise(eqn, operands, lead)
    if axis < lead - 1:
        return None
    out = eqn.outvars[0].aval
    heights = tuple(_jax.shape_of(atom)[axis] for atom in eqn.invars)
    parts = [
        _flat(x, atom, (*rows[:-1], height))
        for x, atom, height in zip(operands, eqn.invars, heights, strict=True)
    ]
    shape = (math.prod(rows), *out.shape[lead:])
    return [_folded(Stacked(shape, out.dtype, tuple(parts), heights), rows)]


def _stop_gradient(eqn: _jax.Equation, operands: Sequence[Any], lead: int) -> list[Any]:
    inner = flat(operands[0])
    stopped = Stopped(inner.shape, inner.dtype, inner)
    return [_folded(stopped, operands[0].shape[:lead])]


def _pass_through(eqn: _jax.Equation, operands: Sequence[Any], lead: int) -> list[Any]:
    """``optimization_barrier``: the views step round it, the arrays go through."""
    arrays = [x for x in operands if not isinstance(x, View)]
    if arrays and arrays[0] is not None:
        through = iter(lax.optimization_barrier(arrays))
        return [x if isinstance(x, View) else next(through) for x in operands]
    return list(operands)


def _mark(eqn: _jax.Equation, operands: Sequence[Any], lead: int) -> list[Any]:
    """``embedding_lookup``'s mark on its table, which is the table."""
    return list(operands)


def _sharding_constraint(
    eqn: _jax.Equation, operands: Sequence[Any], lead: int
) -> list[Any] | None:
    """A constraint speaks of the whole table, so it stays on the table."""
    (view,) = operands
    if not isinstance(view, Table):
        return None
    if view.array is None:
        return [view]
    return [dataclasses.replace(view, array=_jax.bind(eqn, [view.array])[0])]


_STEPS: dict[str, Rule] = {
    "broadcast_in_dim": _broadcast,
    "concatenate": _concatenate,
    "cumlogsumexp": _along("axis"),
    "cummax": _along("axis"),
    "cummin": _along("axis"),
    "cumprod": _along("axis"),
    "cumsum": _along("axis"),
    mark_p.name: _mark,
    "optimization_barrier": _pass_through,
    "pad": _untouched("padding_config", (0, 0, 0)),
    "reduce_max": _along("axes"),
    "reduce_min": _along("axes"),
    "reduce_prod": _along("axes"),
    "reduce_sum": _along("axes"),
    "reshape": _reshape,
    "rev": _along("dimensions"),
    "sharding_constraint": _sharding_constraint,
    "slice": _slice,
    "sort": _along("dimension"),
    "split": _along("axis"),
    "stack": _along("axis"),
    "squeeze": _along("dimensions"),
    "stop_gradient": _stop_gradient,
    "tile": _untouched("reps", 1),
    "transpose": _transpose,
}
