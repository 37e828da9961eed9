"""Row-wise steps: primitives that commute with a lookup.

``f(table)[ids] == f(table[ids])``. :data:`RULES` has a rule for each primitive, and
:func:`register_rowwise` adds to it. Any other primitive, unless it is a read (reads.py) or
control flow (walk.py), needs the whole table: the gradient is then dense (and right).
"""

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.lax import GatherScatterMode as Mode

from jslices import _jax
from jslices._grad.now import now_p
from jslices._grad.views import (
    Keyed,
    Now,
    Repeated,
    Replaced,
    Rowwise,
    Stacked,
    Stopped,
    TableView,
    Transposed,
    Unpacked,
    Unslotted,
    Values,
    View,
    flat,
    folded,
    renumbered,
    window,
    without_slots,
)
from jslices._jax import Atom, Equation
from jslices._lookup.mark import mark_p
from jslices._place.boundary import row_major_p
from jslices._rows.access import INT32_MAX, canonical_indices, clipped_indices, is_below


class NeedsWhole(NamedTuple):
    """A rule's request for the arrays behind views that serve all rows."""

    operands: Sequence[int]


#: A view per output, or which arrays are needed; None from equations that mix rows.
Result = list[Any] | NeedsWhole | None

#: ``rule(eqn, operands, lead)`` gives a view per output, or None where the equation mixes
#: rows. Operands are views, at least one, whose rows ``lead`` axes number, and values (None
#: while reads are planned).
RowRule = Callable[[Equation, Values, int], Result]

RULES: dict[Primitive, RowRule] = {}

#: The most numbers in a row of a packed table: each part reads all of them.
WIDEST_PACKED = 1024
#: The most reads of a table that a read of a view may become. Sums of slices of sums of
#: slices, as parallel prefix sums are made of, would be as many as there are rows.
MOST_READS = 64


def rowwise(
    eqn: Equation, operands: Values, whole: Callable[[Any], Any]
) -> list[Any] | None:
    """The outputs of an equation as views, as a rule gives them; None if it mixes rows.

    ``whole`` gives the array behind a view, or notes that it is needed.
    """
    rule = RULES.get(eqn.primitive)
    if rule is None:
        return None
    views = {i: x for i, x in enumerate(operands) if isinstance(x, View)}
    # Rows are numbered by axis 0, or, in tables that vmap repeated for every example, by
    # the axes of the batch as well: the `lead` ones.
    lead = min(x.lead for x in views.values())
    others = [] if rule in _FOR_ANY_VIEW else _broadcast_operands(rule, views, lead)
    outputs = NeedsWhole(others) if others else rule(eqn, operands, lead)
    if not isinstance(outputs, NeedsWhole):
        made = [x.reads for x in outputs or () if isinstance(x, View)]
        many = any(len(x) > MOST_READS * len({key[1] for key in x}) for x in made)
        return None if many else outputs
    needed = outputs.operands
    operands = [whole(x) if i in needed else x for i, x in enumerate(operands)]
    if not any(isinstance(operand, View) for operand in operands):
        return None
    return rowwise(eqn, operands, whole)


def _broadcast_operands(rule: RowRule, views: dict[int, View], lead: int) -> list[int]:
    """The views that are broadcast, so that a row serves several rows of the others.

    If views differ in the number of axes of their rows, the smaller ones are.
    """
    others = [i for i, x in views.items() if x.lead > lead]
    if others:
        sizes = {i: math.prod(x.shape) for i, x in views.items()}
        smaller = [i for i, size in sizes.items() if size < max(sizes.values())]
        others = smaller or others
    if rule not in (_transpose_rows, _dot_general):
        others += [i for i, x in views.items() if isinstance(x, Transposed)]
    return others


def register_rowwise(
    primitive: Primitive,
    rule: Callable[..., dict[str, Any] | None] | None = None,
    *,
    in_axes: int | Sequence[int | None] | None = 0,
) -> Any:
    """Declares that a JAX primitive acts on each row of a table by itself.

    Then ``f(table)[ids]`` is read as ``f(table[ids])``, which is the same, and the gradient
    of the table is :class:`jslices.IndexedSlices` where it would otherwise be dense. All of
    JAX's own elementwise primitives, and those that work along other axes than the first,
    are known; this is for your own.

    This is a promise that cannot be checked: with a primitive that mixes rows after all,
    results are wrong.

    Args:
      primitive: a ``jax.extend.core.Primitive``.
      rule: None if the parameters do not mention the rows; then ``primitive`` must treat
        the first axis of its operands as a batch. Otherwise
        ``rule(num_rows, params, *operands)``, where ``params`` are the parameters with
        which the primitive was applied to the whole ``operands``
        (``jax.ShapeDtypeStruct``, ``[V, ...]`` each), returns the parameters with which it
        computes any ``num_rows`` of the rows, or None if it mixes rows with these.
      in_axes: as for ``jax.vmap``, one for all operands or a sequence with one for each: 0
        for an operand ``[V, ...]`` with a row for every row of the table, None for one that
        serves all rows, such as weights. Where it says 0, scalars, and arrays ``[1, ...]``
        of the same rank, serve all rows as well, as they do in elementwise primitives.

    Returns:
      ``rule`` if one is given; otherwise a decorator with which to register one.

    Raises:
      TypeError: if ``primitive`` is not a Primitive, the rule cannot be called, or
        ``in_axes`` is neither 0 or None nor a sequence of these.
      ValueError: if the primitive has a rule already; while a program is traced, if an
        output does not have V rows, or ``in_axes`` another length than there are operands.

    Cost: none; the primitive is applied to ``[K, ...]`` instead of ``[V, ...]``.

    Example:
      >>> import jax, jax.numpy as jnp, jslices as js
      >>> from jax.extend.core import Primitive
      >>> from jax.interpreters import ad
      >>> def make(name, f):
      ...     p = Primitive(name)
      ...     p.def_impl(f)
      ...     p.def_abstract_eval(lambda x, **params: x)
      ...     ad.primitive_jvps[p] = lambda xs, ts, **params: jax.jvp(
      ...         lambda x: f(x, **params), xs, ts)
      ...     return p
      >>> double_p = make("double", lambda x: 2 * x)
      >>> shift_p = make("shift", lambda x, axis: jnp.roll(x, 1, axis))

      An elementwise primitive, and one whose parameters decide whether it mixes rows:

      >>> _ = js.register_rowwise(double_p)
      >>> @js.register_rowwise(shift_p)
      ... def shift_rows(num_rows, params, x):
      ...     return None if params["axis"] == 0 else params

      >>> table, ids = jnp.ones((1000, 2)), jnp.array([3, 9])
      >>> js.grad(lambda t: double_p.bind(shift_p.bind(t, axis=1))[ids].sum())(table)
      IndexedSlices(2 rows of float32[1000, 2], indices int32[2] (3, 9): 24 B, dense 8.0 KB, saves 8.0 KB)

    Source: after ``quax.register`` and ``jax.interpreters.batching``.
    """  # noqa: E501
    if not isinstance(primitive, Primitive):
        raise TypeError(
            f"register_rowwise wants a jax.extend.core.Primitive, got {primitive!r}; "
            "for a function of JAX's own primitives there is nothing to register"
        )
    if primitive in RULES:
        raise ValueError(
            f"register_rowwise({primitive}): this primitive has a rule already, "
            "jslices' own or an earlier one of yours; register each primitive once"
        )
    axes = in_axes if isinstance(in_axes, Sequence) else (in_axes,)
    if not all(axis is None or axis == 0 for axis in axes):
        raise TypeError(
            f"register_rowwise({primitive}, in_axes={in_axes!r}): each entry must be 0, an "
            "operand with a row for every row of the table, or None, one that serves all"
        )

    def register(rule: Callable[..., dict[str, Any] | None]) -> Any:
        if not callable(rule):
            raise TypeError(
                f"register_rowwise({primitive}, rule={rule!r}): a rule is a function "
                "rule(num_rows, params, *operands) that returns parameters or None"
            )
        RULES[primitive] = functools.partial(_registered, rule, in_axes)
        return rule

    if rule is not None:
        return register(rule)
    register(lambda num_rows, params, *operands: params)
    return register


def _registered(
    rule: Callable[..., dict[str, Any] | None],
    in_axes: Any,
    eqn: Equation,
    operands: Values,
    lead: int,
) -> Result:
    """A rule of the user's as one of ours."""
    primitive, count = eqn.primitive, len(operands)
    axes = tuple(in_axes) if isinstance(in_axes, Sequence) else (in_axes,) * count
    if len(axes) != count:
        raise ValueError(
            f"{primitive} was registered with in_axes={in_axes!r}, for {len(axes)} "
            f"operand(s), and is applied to {count}"
        )
    views = {i for i, operand in enumerate(operands) if isinstance(operand, View)}
    weights = [i for i in views if axes[i] is None]
    if weights:
        return NeedsWhole(weights)
    shapes = [_jax.shape_of(atom) for atom in eqn.invars]
    height, rank = max((shapes[i][0], len(shapes[i])) for i in views)
    by_row = {i for i, axis in enumerate(axes) if axis == 0 and shapes[i][:1] == (height,)}
    single = [not x or (x[0] == 1 and len(x) == rank) for x in shapes]
    if not all(i in by_row or single[i] or axes[i] is None for i in range(count)):
        return None
    if not views <= by_row:
        return NeedsWhole(list(views - by_row))
    whole = [jax.ShapeDtypeStruct(_jax.shape_of(x), x.aval.dtype) for x in eqn.invars]
    # For tables that vmap repeated: what vmap does to the parameters is known only for our
    # own rules.
    if lead > 1 or rule(height, dict(eqn.params), *whole) is None:
        return None
    for out in eqn.outvars:
        if _jax.shape_of(out)[:1] != (height,):
            raise ValueError(
                f"{primitive} is registered as row-wise, but of {height} rows it makes "
                f"an array {out.aval.str_short()}; an output must have as many rows as the "
                "table, or the rule return None"
            )
    params_for = lambda rows: rule(rows[0], dict(eqn.params), *whole)  # noqa: E731
    return _views(eqn, operands, lead, params_for, [i not in by_row for i in range(count)])


# --- what the rules are made of ---------------------------------------------------------


def _views(
    eqn: Equation,
    operands: Values,
    lead: int,
    params_for: Callable[[tuple[int, ...]], Any] = lambda rows: {},
    shared: Sequence[bool] | None = None,
) -> list[Any]:
    """Views that run the equation on some of the rows, which ``lead`` axes number.

    ``params_for`` gives the parameters that mention the sizes of these axes, for others.
    ``shared`` operands serve all rows as they are; if it is None, those that have not as
    many rows do.
    """
    rows = _jax.shape_of(eqn.outvars[0])[:lead]
    as_they_are = shared or [False] * len(operands)
    inner, serves_all = [], []
    for operand, atom, as_it_is in zip(operands, eqn.invars, as_they_are, strict=True):
        own = _jax.shape_of(atom)[:lead]
        # One row for each example of a batch is repeated for the rows of that example.
        one = shared is None and own != rows and (lead == 1 or math.prod(own) == 1)
        inner.append(operand if as_it_is else _flat(operand, atom, rows))
        serves_all.append(as_it_is or one)
    floating = [jnp.issubdtype(x.dtype, jnp.inexact) for x in inner if isinstance(x, View)]
    ones = (1,) * (lead - 1)
    shapes = tuple(map(_jax.shape_of, eqn.invars))
    step = eqn.primitive, lead, shapes, *eqn.params.items()

    def apply(number: int, row: tuple[int, ...], values: Values, count: int) -> jax.Array:
        inputs = [
            x if as_it_is or not jnp.ndim(x) else x.reshape(*ones, *x.shape)
            for x, as_it_is in zip(values, as_they_are, strict=True)
        ]
        result = _jax.bind(eqn, inputs, **params_for((*ones, count)))[number]
        if result.size != count * math.prod(row):
            raise ValueError(
                f"of {count} rows {eqn.primitive} made an array {result.shape}; "
                "if its parameters mention the rows, it needs a rule: "
                f"jslices.register_rowwise({eqn.primitive}, rule)"
            )
        return result.reshape(count, *row)

    outputs: list[View] = []
    for number, out in enumerate(eqn.outvars):
        row = tuple(out.aval.shape[lead:])
        run = Keyed(functools.partial(apply, number, row), (*step, number, row))
        shape = (math.prod(rows), *row)
        view = Rowwise(shape, out.aval.dtype, run, tuple(inner), tuple(serves_all))
        # `table > 0`, and values computed from it alone, pass no gradient on.
        graded = any(floating) and jnp.issubdtype(view.dtype, jnp.inexact)
        outputs.append(folded(view if graded else without_slots(view), rows))
    return outputs


def _flat(operand: Any, atom: Atom, rows: tuple[int, ...]) -> Any:
    """An operand of a row-wise step with one axis of rows, or of one row for all."""
    if isinstance(operand, View):
        return flat(operand)
    if len(rows) == 1 or operand is None or jnp.ndim(operand) == 0:
        return operand
    rest = _jax.shape_of(atom)[len(rows) :]
    if math.prod(operand.shape[: len(rows)]) > 1:  # one for each example, or each row
        operand = jnp.broadcast_to(operand, (*rows, *rest))
    return operand.reshape(-1, *rest)


def rule_for(*names: str) -> Callable[[RowRule], RowRule]:
    """Registers a rule of ours for the primitives of these names that this JAX has."""

    def register(rule: RowRule) -> RowRule:
        RULES.update((p, rule) for name in names if (p := _jax.PRIMITIVES.get(name)))
        return rule

    return register


# --- each element by itself -------------------------------------------------------------


@rule_for(
    *"""
    abs acos acosh add and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp
    clz complex conj convert_element_type copy cos cosh digamma div eq erf erf_inv erfc exp
    exp2 expm1 floor ge gt igamma igamma_grad_a igammac imag integer_pow is_finite le lgamma
    log log1p log2 logistic lt max min mul mulhi name ne neg nextafter not one_minus_square
    or polygamma population_count pow real reduce_precision regularized_incomplete_beta rem
    round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh
    sqrt square sub tan tanh xor zeta
    """.split()
)
def _elementwise(eqn: Equation, operands: Values, lead: int) -> Result:
    """XLA broadcasts scalars and axes of size 1 in these."""
    shape, serve_all = _jax.shape_of(eqn.outvars[0]), []
    for i, (atom, operand) in enumerate(zip(eqn.invars, operands, strict=True)):
        own = _jax.shape_of(atom)
        if isinstance(operand, View):
            if own[:lead] != shape[:lead] or len(own) != len(shape):
                serve_all.append(i)
        elif any(n not in (1, rows) for n, rows in zip(own[:lead], shape, strict=False)):
            return None
    return NeedsWhole(serve_all) if serve_all else _views(eqn, operands, lead)


def is_elementwise(eqn: Equation) -> bool:
    return RULES.get(eqn.primitive) is _elementwise


# --- along other axes -------------------------------------------------------------------


def _along(parameter: str) -> RowRule:
    """The rule for primitives that work along the axes that a parameter names."""

    def rule(eqn: Equation, operands: Values, lead: int) -> Result:
        axes = eqn.params[parameter]
        axes = axes if isinstance(axes, tuple | list) else (axes,)
        inside = all(axis >= lead for axis in axes)
        return _views(eqn, operands, lead) if inside else None

    return rule


rule_for("cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum", "top_k")(_along("axis"))
rule_for("reduce_max", "reduce_min", "reduce_prod", "reduce_sum")(_along("axes"))
rule_for("reduce_and", "reduce_or", "reduce_xor", "argmax", "argmin")(_along("axes"))
rule_for("sort")(_along("dimension"))


@rule_for("scan")
def _map(eqn: Equation, operands: Values, lead: int) -> Result:
    """``jax.lax.map(f, table)``: a loop that carries nothing from row to row."""
    first, carried = _jax.scan_counts(eqn.params)
    if carried or lead > 1 or eqn.effects:
        return None
    weights = [i for i, x in enumerate(operands[:first]) if isinstance(x, View)]
    if weights:
        return NeedsWhole(weights)
    shared = [i < first for i in range(len(operands))]
    return _views(eqn, operands, lead, lambda rows: {"length": rows[0]}, shared)


@rule_for("fft")
def _fft(eqn: Equation, operands: Values, lead: int) -> Result:
    inside = lead + len(eqn.params["fft_lengths"]) <= len(_jax.shape_of(eqn.invars[0]))
    return _views(eqn, operands, lead) if inside else None


@rule_for("dot_general")
def _dot_general(eqn: Equation, operands: Values, lead: int) -> Result:
    """``table @ w``: each row times an array that serves all rows.

    ``w @ x``, one number for each row of ``w``, is what layers do to their input.
    """
    (contracted, inside), batch = eqn.params["dimension_numbers"]
    left, right = operands
    rows_stay = isinstance(left, View) and min(contracted, default=lead) >= lead
    rows_stay = rows_stay and not isinstance(left, Transposed)
    scores = len(_jax.shape_of(eqn.invars[1])) == len(inside)
    if not rows_stay or any(batch) or scores:
        return None
    if isinstance(right, View):
        return NeedsWhole([1])
    return _views(eqn, operands, lead, shared=[False, True])


# --- other numbers for the rows ---------------------------------------------------------


@rule_for("slice")
def _slice(eqn: Equation, operands: Values, lead: int) -> Result:
    """``table[1:, 2:5]``: some rows at equal distances, and some columns of them."""
    (view,) = operands
    start, limit = tuple(eqn.params["start_indices"]), tuple(eqn.params["limit_indices"])
    strides = tuple(eqn.params["strides"] or (1,) * len(start))
    full, shape = view.shape, _jax.shape_of(eqn.outvars[0])
    if not math.prod(shape[:lead]):
        return None
    if shape[:lead] != full[:lead]:
        numbering = [(axis, start[axis], strides[axis]) for axis in range(lead)]
        view = renumbered(view, shape[:lead], numbering)
    if shape[lead:] == full[lead:]:
        return [view]

    def params_for(rows: tuple[int, ...]) -> dict[str, Any]:
        return {
            "start_indices": (0,) * lead + start[lead:],
            "limit_indices": rows + limit[lead:],
            "strides": (1,) * lead + strides[lead:],
        }

    return _views(eqn, [view], lead, params_for, [False])


@rule_for("split")
def _split_rows(eqn: Equation, operands: Values, lead: int) -> Result:
    axis, (view,) = eqn.params["axis"], operands
    if axis >= lead:
        return _views(eqn, operands, lead)
    parts, above = [], 0
    for out in eqn.outvars:
        rows = _jax.shape_of(out)[:lead]
        numbering = [(d, above if d == axis else 0, 1) for d in range(lead)]
        parts.append(renumbered(view, rows, numbering))
        above += rows[axis]
    return parts


@rule_for("dynamic_slice")
def _dynamic_slice(eqn: Equation, operands: Values, lead: int) -> Result:
    """``tables[layer]``: some of the tables in an array. Single rows are read."""
    view, sizes = operands[0], tuple(eqn.params["slice_sizes"])
    if lead == 1 or not isinstance(view, View):
        return None
    if sizes[lead - 1 :] != view.shape[lead - 1 :]:
        return None
    return [window(view, operands[1 : 1 + lead], sizes[:lead])]


@rule_for("rev")
def _rev(eqn: Equation, operands: Values, lead: int) -> Result:
    dimensions, (view,) = eqn.params["dimensions"], operands
    among = tuple(d for d in dimensions if d < lead)
    inside = tuple(d for d in dimensions if d >= lead)
    rows = view.shape[:lead]
    if among:
        numbering = [
            (d, n - 1, -1) if d in among else (d, 0, 1) for d, n in enumerate(rows)
        ]
        view = renumbered(view, rows, numbering)
    if not inside:
        return [view]
    return _views(eqn, [view], lead, lambda rows: {"dimensions": inside})


@rule_for("reshape", "squeeze")
def _reshape(eqn: Equation, operands: Values, lead: int) -> Result:
    in_order = eqn.primitive.name == "squeeze" or eqn.params.get("dimensions") is None
    return _reshaped(eqn, operands) if in_order and len(operands) == 1 else None


def _reshaped(eqn: Equation, operands: Values) -> list[Any] | None:
    """The same rows, numbered by other axes, or with their elements in another shape."""
    inner, shape = flat(operands[0]), _jax.shape_of(eqn.outvars[0])
    count, size = inner.shape[0], math.prod(shape)
    heights = itertools.accumulate(shape, operator.mul)
    lead = next((i for i, height in enumerate(heights, 1) if height == count), 0)
    if not size:
        return None
    if not lead:
        return _unpacked(inner, shape)
    row = shape[lead:]
    if row != inner.shape[1:]:
        run = Keyed(lambda values, n: values[0].reshape(n, *row), ("reshape", *row))
        inner = Rowwise((count, *row), inner.dtype, run, (inner,), (False,))
    return [folded(inner, shape[:lead])]


def _unpacked(packed: View, shape: tuple[int, ...]) -> list[Any] | None:
    """``packed.reshape(V, D)``: its rows, if they are short, cut into equal parts."""
    count, size = packed.shape[0], math.prod(packed.shape[1:])
    heights = itertools.accumulate(shape[:-1], operator.mul)
    lead = next((i for i, height in enumerate(heights, 1) if height % count == 0), 0)
    if not lead or count == 1 or size > WIDEST_PACKED:
        return None
    cut = (math.prod(shape[:lead]), *shape[lead:])
    return [folded(Unpacked(cut, packed.dtype, packed), shape[:lead])]


@rule_for("broadcast_in_dim")
def _broadcast(eqn: Equation, operands: Values, lead: int) -> Result:
    """New axes within the rows, or a copy of all rows for every example of a batch."""
    shape, dims = tuple(eqn.params["shape"]), tuple(eqn.params["broadcast_dimensions"])
    old = _jax.shape_of(eqn.invars[0])
    if len(operands) > 1:  # sizes that are known at run time only
        return None
    if math.prod(shape) == math.prod(old):
        return _reshaped(eqn, operands)
    if dims[:lead] == tuple(range(lead)) and shape[:lead] == old[:lead]:
        return _views(eqn, operands, lead, lambda rows: {"shape": (*rows, *shape[lead:])})
    # The rows come last among the axes that number them, and are as they were.
    more = lead + len(shape) - len(old)
    as_they_were = tuple(shape[d] for d in dims) == old
    last = dims[lead - 1 :] == tuple(range(more - 1, len(shape)))
    countable = is_below(math.prod(shape[:more]), INT32_MAX + 1)
    if not (as_they_were and last and countable):
        return None
    return [renumbered(operands[0], shape[:more], [(axis, 0, 1) for axis in dims[:lead]])]


@rule_for("tile")
def _tile(eqn: Equation, operands: Values, lead: int) -> Result:
    """The rows over and over, along each axis that numbers them, and their columns."""
    (view,), reps = operands, tuple(eqn.params["reps"])
    once, rows = (1,) * lead, view.shape[:lead]
    if reps[:lead] != once:
        # As axes of their own the repetitions come before the rows that they repeat.
        apart = tuple(itertools.chain.from_iterable(zip(reps, rows, strict=False)))
        if not is_below(math.prod(apart), INT32_MAX + 1) or not math.prod(apart):
            return None
        numbering = [(2 * axis + 1, 0, 1) for axis in range(lead)]
        tiled = flat(renumbered(view, apart, numbering))
        view = folded(tiled, tuple(map(operator.mul, reps, rows)))
    if set(reps[lead:]) <= {1}:
        return [view]
    columns = {"reps": (*once, *reps[lead:])}
    return _views(eqn, [view], lead, lambda rows: columns, [False])


@rule_for("transpose")
def _transpose_rows(eqn: Equation, operands: Values, lead: int) -> Result:
    order, view = tuple(eqn.params["permutation"]), operands[0]
    if isinstance(view, Transposed):
        order, view = tuple(view.order[i] for i in order), view.inner
    if order == tuple(range(len(order))):
        return [view]
    if order[:lead] == tuple(range(lead)) and view is operands[0]:
        return _views(eqn, operands, lead)
    rows_stay_rows = order[lead:] == tuple(range(lead, len(order)))
    if set(order[:lead]) == set(range(lead)) and rows_stay_rows:
        rows = tuple(view.shape[d] for d in order[:lead])
        numbering = [(order.index(d), 0, 1) for d in range(lead)]
        return [renumbered(view, rows, numbering)]
    if lead > 1:
        return None
    shape = _jax.shape_of(eqn.outvars[0])
    return [Transposed(shape, view.dtype, view, order)]


@rule_for("pad")
def _pad(eqn: Equation, operands: Values, lead: int) -> Result:
    """More columns, or more rows above and below the others."""
    config, (view, value) = tuple(map(tuple, eqn.params["padding_config"])), operands
    nothing, one = (0, 0, 0), lead - 1
    if set(config[:lead]) == {nothing}:
        return _views(eqn, operands, lead)
    above, below, between = config[one]
    if set((*config[:one], *config[lead:])) - {nothing} or min(above, below) < 0 or between:
        return None
    examples, row = math.prod(view.shape[:one]), view.shape[lead:]
    heights = (above, view.shape[one], below)
    padding = [
        None if value is None else jnp.broadcast_to(value, (examples * height, *row))
        for height in (above, below)
    ]
    arrays = (padding[0], flat(view), padding[1])
    shape = (examples * sum(heights), *row)
    rows = (*view.shape[:one], sum(heights))
    return [folded(Stacked(shape, view.dtype, arrays, heights), rows)]


@rule_for("scatter")
def _replace_row(eqn: Equation, operands: Values, lead: int) -> Result:
    """``table.at[0].set(row)``: another row in the place of one.

    With a table for each example it replaces a row of each: the same, or one named by each.
    """
    view, at, rows = operands
    if not isinstance(view, View):
        return None
    others = [i for i, x in enumerate(operands) if i and isinstance(x, View)]
    if others:
        return NeedsWhole(others)
    numbers, mode, last = eqn.params["dimension_numbers"], eqn.params["mode"], lead - 1
    height, row, examples = view.shape[last], view.shape[lead:], view.shape[:last]
    at_shape, rows_shape = map(_jax.shape_of, eqn.invars[1:])
    named = numbers.operand_batching_dims  # the axes whose examples name a row each
    one_row = (
        tuple(numbers.scatter_dims_to_operand_dims) == (last,)
        and all(axis < last for axis in named)
        and math.prod(at_shape) == math.prod(examples[axis] for axis in named)
        and math.prod(rows_shape) == math.prod((*examples, *row))
    )
    if not one_row or mode not in (Mode.CLIP, Mode.FILL_OR_DROP, Mode.PROMISE_IN_BOUNDS):
        return None
    if at is not None:
        at, rows = _by_example(numbers, at, rows, examples)
        at, rows = at.reshape(-1), rows.reshape(-1, *row)
        settle = clipped_indices if mode == Mode.CLIP else canonical_indices
        at = settle(at, height)
    inner = flat(view)
    replaced = Replaced(inner.shape, view.dtype, inner, at, rows, height)
    return [folded(replaced, view.shape[:lead])]


def _by_example(
    numbers: jax.lax.ScatterDimensionNumbers,
    at: jax.Array,
    rows: jax.Array,
    examples: tuple[int, ...],
) -> tuple[jax.Array, jax.Array]:
    """The indices and updates of a scatter, the axes of ``examples`` first in both."""
    named = numbers.operand_batching_dims, numbers.scatter_indices_batching_dims
    axis_of_at = dict(zip(*named, strict=True))
    windows = numbers.update_window_dims
    scattered = [axis for axis in range(rows.ndim) if axis not in windows]
    axis_of_rows = {axis: scattered[its] for axis, its in axis_of_at.items()}
    left_out = {*numbers.inserted_window_dims, *axis_of_at}
    rest = (axis for axis in itertools.count() if axis not in left_out)
    axis_of_rows |= dict(zip(rest, windows, strict=False))
    each = range(len(examples))
    at = jnp.moveaxis(at, [axis_of_at[i] for i in axis_of_at], range(len(axis_of_at)))
    at = at.reshape([n if i in axis_of_at else 1 for i, n in enumerate(examples)])
    rows = jnp.moveaxis(rows, [axis_of_rows[i] for i in each], each)
    return jnp.broadcast_to(at, examples), rows


@rule_for("concatenate", "stack")
def _concatenate(eqn: Equation, operands: Values, lead: int) -> Result:
    """``jnp.stack([a, b])``: the rows of one table below those of the other.

    If other axes come before, this is done for every example.
    """
    stacks = _jax.kind(eqn) == "stack"
    axis = eqn.params["axis" if stacks else "dimension"]
    if axis >= lead:
        return _views(eqn, operands, lead)
    out, each = eqn.outvars[0].aval, [_jax.shape_of(x)[:lead] for x in eqn.invars]
    rows, row = out.shape[: lead + stacks], out.shape[lead + stacks :]
    if not math.prod(rows):
        return None
    arrays = tuple(
        _flat(x, atom, own) for x, atom, own in zip(operands, eqn.invars, each, strict=True)
    )
    heights = tuple(math.prod(own[axis:]) for own in each)
    shape = (math.prod(rows), *row)
    return [folded(Stacked(shape, out.dtype, arrays, heights), rows)]


# --- the same rows ----------------------------------------------------------------------


@rule_for("layout_constraint")
def _same_rows(eqn: Equation, operands: Values, lead: int) -> Result:
    """A layout constraint, or ``embedding_lookup``'s mark: the rows stay the same."""
    return list(operands)


RULES[mark_p] = RULES[row_major_p] = _same_rows


def _as_now(eqn: Equation, operands: Values, lead: int) -> Result:
    """A table after the steps that its rows missed, or another view of one."""
    view, *others = operands
    views = [1 + i for i, x in enumerate(others) if isinstance(x, View)]
    if views or not isinstance(view, View):
        return NeedsWhole(views)
    count = eqn.params["count"]
    params = tuple(sorted(eqn.params.items()))
    now = Now(params, tuple(others[:count]), tuple(others[count:]))

    def through(view: View) -> View | None:
        if isinstance(view, TableView) and view.caught_up:
            return view
        if isinstance(view, TableView) and view.now is None:
            return dataclasses.replace(view, now=now)
        if not isinstance(view, Repeated | Unslotted):
            return None
        inner = through(view.inner)
        return inner and dataclasses.replace(view, inner=inner)

    table = through(view)
    return None if table is None else [table]


RULES[now_p] = _as_now


@rule_for("call_hi_primitive")
def _hi_primitive(eqn: Equation, operands: Values, lead: int) -> Result:
    """Stand-ins of jax 0.12 for other primitives, and ``checkpoint_name``."""
    called = _jax.kind(eqn)
    if called == "CheckpointName":
        return list(operands)
    primitive = _jax.PRIMITIVES.get(called)
    rule = None if primitive is None else RULES.get(primitive)
    return None if rule is None else rule(eqn, operands, lead)


@rule_for("optimization_barrier")
def _barrier(eqn: Equation, operands: Values, lead: int) -> Result:
    """Views go round it, values through it."""
    values = [x for x in operands if not isinstance(x, View)]
    planning = any(x is None for x in values)
    passed = iter(values if planning else jax.lax.optimization_barrier(values))
    return [x if isinstance(x, View) else next(passed) for x in operands]


@rule_for("sharding_constraint", "device_put", "xla_metadata_value")
def _placed(eqn: Equation, operands: Values, lead: int) -> Result:
    """Where a table is, and what is noted on it, is about all of it."""
    views = [flat(x) for x in operands if isinstance(x, View)]
    tables = [x for x in views if isinstance(x, TableView)]
    if len(tables) < len(operands):
        return None
    arrays = [table.array for table in tables]
    if not any(array is None for array in arrays):
        arrays = _jax.bind(eqn, arrays)
    return [
        folded(dataclasses.replace(table, array=array), x.shape[: x.lead])
        for table, array, x in zip(tables, arrays, operands, strict=True)
    ]


@rule_for("reshard")
def _reshard(eqn: Equation, operands: Values, lead: int) -> Result:
    """Views may move to Auto axes, as rows are read on those; tables to any place."""
    return list(operands) if _jax.has_auto_axes(eqn) else _placed(eqn, operands, lead)


@rule_for("stop_gradient")
def _stop_gradient(eqn: Equation, operands: Values, lead: int) -> Result:
    inner = flat(operands[0])
    stopped = Stopped(inner.shape, inner.dtype, inner)
    return [folded(stopped, operands[0].shape[:lead])]


#: They take views of any kind.
_FOR_ANY_VIEW = (_same_rows, _hi_primitive, _barrier, _reshard, _placed)
