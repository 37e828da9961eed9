"""What the update of an optimizer does to rows: each by itself, and without a gradient.

It may run on some rows of a table if each row of its results is made from that row alone,
and from numbers to which rows without gradient add nothing, as the norm of the gradient is.
Both are read from its program for tables of any height: no threshold hides from that.
"""

import functools
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from jslices import _jax
from jslices._grad.custom import row_by_row
from jslices._grad.rules import is_elementwise, rowwise
from jslices._grad.views import TableView, Values, View, flat, folded
from jslices._grad.walk import ProgramWalk, Scope
from jslices._jax import Equation, is_symbolic
from jslices._slices import is_slices
from jslices._typing import Gradients, Params, PyTree, Transformation


def read_update(
    tx: Transformation, grads: Gradients, params: Params, extra_args: dict[str, PyTree]
) -> tuple[str, bool]:
    """What in ``tx.update`` mixes rows, and whether rows without gradient stay as they are.

    Of the arguments only shapes and dtypes matter; slices stand for tables. The first is ""
    if each row is treated by itself. The second is about the state of rows as well; of what
    cannot be read it is True if there is none.
    """
    leaves, tree = _jax.flatten(grads, is_leaf=lambda x: x is None or is_slices(x))
    if not any(map(is_slices, leaves)):
        return "", True
    names = [f"rows{i}" for i in range(sum(x.row_axes for x in filter(is_slices, leaves)))]
    tall = [f"{name} >= 4096" for name in names]  # taller than what is small to Optax
    sizes = iter(jax.export.symbolic_shape(",".join(names), constraints=tall))
    walk = _UpdateWalk()
    try:
        types = [
            _types(sizes, *x) for x in zip(leaves, tree.flatten_up_to(params), strict=True)
        ]
        grads, params = map(tree.unflatten, zip(*types, strict=True))
        arguments = grads, jax.eval_shape(tx.init, params)
        update = functools.partial(tx.update, **extra_args)
        program, results = jax.make_jaxpr(update, return_shape=True)(*arguments, params)
        shapes = [
            jax.tree.map(lambda x: str(x.shape), each) for each in (arguments, results)
        ]
        if shapes[0] != shapes[1]:
            raise ValueError("updates or state come back in another structure")
        inputs: list[Any] = [x if _row_axes(x) else None for x in program.invars]
        for i, x in enumerate(jax.tree.leaves(grads)):
            inputs[i] = np.zeros((), x.dtype)[()] if inputs[i] else None
        odd = [x.aval.shape for x in program.invars if _row_axes(x) < 0]
        walk.mixing += [f"an array of shape {shape}" for shape in odd]
        outputs = walk.program(program, inputs)
    except Exception as error:  # of tracing
        return str(error), not jax.tree.leaves(jax.eval_shape(tx.init, params))
    columns = zip(program.outvars, outputs, inputs, strict=False)
    others_stay = all(_common(x) is not None for atom, *x in columns if _row_axes(atom))
    return "".join(walk.mixing[:1]), others_stay


def _types(sizes: Iterator[Any], grad: Any, param: PyTree) -> tuple[Any, PyTree]:
    """The types of a gradient and its parameter; of slices those of a table so high."""
    if not is_slices(grad):
        return grad, param
    row = (7 if is_symbolic(n) else n for n in grad.values.shape[1:])
    shape = *itertools.islice(sizes, grad.row_axes), *row
    table = jax.ShapeDtypeStruct(shape, grad.dtype)
    return table, table.update(dtype=param.dtype)


class _UpdateWalk(ProgramWalk):
    """A walk with what all rows without gradient hold: a number, an input, or None.

    Arrays without rows are numbers that serve all rows, None if they are not known.
    """

    def __init__(self) -> None:
        self.mixing: list[str] = []  #: the equations that mix rows

    def constant(self, value: Any) -> Any:
        is_number = isinstance(getattr(value, "dtype", np.dtype(float)), np.dtype)
        is_known = (
            is_number and not np.ndim(value) and not isinstance(value, jax.core.Tracer)
        )
        return np.asarray(value)[()] if is_known else None

    def cond(self, eqn: Equation, operands: Values, needs_grad: list[bool]) -> Values:
        each = [self.program(branch, operands[1:]) for branch in eqn.params["branches"]]
        return list(map(_common, zip(*each, strict=True)))

    custom = checkpoint = ProgramWalk.call  # no derivative is asked for

    def step(self, eqn: Equation, operands: Values, scope: Scope) -> Values:
        # Where rows are: on a mesh JAX adds its own.
        if _jax.kind(eqn) in ("device_put", "reshard", "sharding_constraint"):
            return operands
        if _adds_nothing(eqn, operands):
            return [None]
        if self._is_row_by_row(eqn):
            return [_of_untouched(eqn, operands)] * len(eqn.outvars)
        self.mixing.append(_jax.described(eqn, self.source(eqn)))
        return [None] * len(eqn.outvars)

    def _is_row_by_row(self, eqn: Equation) -> bool:
        axes = [_row_axes(x) for x in (*eqn.invars, *eqn.outvars)]
        if min(axes, default=0) < 0:
            return False
        if any(axes[: len(eqn.invars)]):
            tables = [_table(x) if _row_axes(x) else None for x in eqn.invars]
            whole: list[Any] = []  # views that would have to serve all rows
            views = rowwise(eqn, tables, whole.append) or [None]
            return not whole and all(x and row_by_row(flat(x)) for x in views)
        for program in _jax.programs_among(eqn):
            self.program(program, [None] * len(program.invars))
        # Numbers that serve all rows, or rows all alike.
        name = _jax.kind(eqn)
        return name == "broadcast_in_dim" or not (any(axes) or name == "dim_as_value")


def _row_axes(atom: Any) -> int:
    """How many axes number the rows of a table; -1 if they are not the first ones."""
    symbolic = [is_symbolic(n) for n in atom.aval.shape]
    count = sum(symbolic)
    return count if all(symbolic[:count]) else -1


def _table(atom: Any) -> View:
    shape, axes = atom.aval.shape, _row_axes(atom)
    table = TableView((math.prod(shape[:axes]), *shape[axes:]), atom.aval.dtype, 0)
    return folded(table, shape[:axes])


def _adds_nothing(eqn: Equation, operands: Values) -> bool:
    """True for a reduction over all rows to which those without gradient add nothing."""
    name, dtype = _jax.kind(eqn), eqn.outvars[0].aval.dtype
    reduces = name in ("reduce_sum", "reduce_or", "reduce_and") and 0 in eqn.params["axes"]
    if not reduces or _row_axes(eqn.outvars[0]):
        return False
    return _common([*operands, dtype.type(name == "reduce_and")]) is not None


def _of_untouched(eqn: Equation, values: Values) -> Any:
    """What all rows without gradient hold of an output, from what they do of operands."""
    name, dtype = _jax.kind(eqn), eqn.outvars[0].aval.dtype
    zero = [isinstance(x, np.generic) and x == 0 for x in values]
    # Of finite numbers: others spoil more than this.
    if (name in ("mul", "and") and any(zero)) or (name == "div" and zero[0]):
        return dtype.type(0)
    if name == "add" and any(zero):
        return values[1 - zero.index(True)]
    if name == "select_n" and isinstance(values[0], np.generic):
        return values[1 + int(values[0])]
    if name == "select_n":
        return _common([x for x in values[1:] if x is None or x == x] or values)
    if name == "convert_element_type" and eqn.invars[0].aval.dtype == dtype:
        return values[0]
    if not all(isinstance(x, np.generic) for x in values):
        return None
    if name in ("broadcast_in_dim", "reshape") or (name == "reduce_sum" and zero[0]):
        return values[0]
    if not is_elementwise(eqn):
        return None
    with jax.ensure_compile_time_eval(), jax.default_device(None):
        return np.asarray(_jax.bind(eqn, values)[0])[()]


def _common(values: Iterable[Any]) -> Any:
    """The value that all are; None if they differ."""
    first, *others = set(values)
    return None if others else first
