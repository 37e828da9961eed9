"""Functions of arrays and slices, called with tables and their gradients.

Inside a traced program a call is one equation, which runs the function once the program is
lowered: then the gradient of a table has entries, as many as were read.
"""

import dataclasses
import operator
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import numpy as np
from jax.experimental import hijax

from jslices import IndexedSlices, is_slices
from jslices.experimental.rows import Entries, Rows, RowsType, rows_of
from jslices.experimental.table import Table, TableType
from jslices.extend import PyTree, is_staged

_TYPES = TableType, RowsType


def _type_of(x: Any) -> Any:
    """The type of a table or a gradient of one; None for other things."""
    if isinstance(x, jax.core.Tracer):
        return x.aval if isinstance(x.aval, _TYPES) else None
    return jax.typeof(x) if isinstance(x, Table | Rows) else None


def call(
    fun: Callable[..., Any], args: Any, kwargs: Any, like: PyTree = None, part: Any = None
) -> Any:
    """``fun(*args, **kwargs)``; its result, or a part of it, is like the tree ``like``."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    if not any(map(_type_of, leaves)):
        return fun(*args, **kwargs)
    places = [i for i, x in enumerate(leaves) if _is_value(x)]
    types, structure = jax.tree.flatten(like, is_leaf=_is_leaf)
    types = [_type_of(x) for x in types]

    def run(*values: Any) -> Any:
        filled = dict(enumerate(leaves)) | dict(zip(places, values, strict=True))
        args, kwargs = tree.unflatten(filled.values())
        return fun(*args, **kwargs)

    def typed(result: Any) -> Any:
        if structure.num_leaves == 0:
            return result
        parts = [result] if part is None else list(result)
        k = part or 0
        mirrored = zip(types, structure.flatten_up_to(parts[k]), strict=True)
        parts[k] = structure.unflatten([_as_type(t, x) for t, x in mirrored])
        return parts[0] if part is None else tuple(parts)

    values = [leaves[i] for i in places]
    if not is_staged():
        return typed(run(*map(_opened, values)))
    return Call(run, typed, tuple(map(jax.typeof, values)), _name(fun))(*values)


class Call(hijax.HiPrim):
    """One call of a function; it has no derivative."""

    def __init__(self, run: Any, typed: Any, types: Any, name: str) -> None:
        self.in_avals = types
        result = typed(jax.eval_shape(run, *map(_described, types)))
        self.out_aval = jax.tree.map(_type_of_result, result)
        self.params = {"_run": run, "_typed": typed, "name": name}
        super().__init__()

    def expand(self, *values: Any) -> Any:
        return self._typed(self._run(*map(_opened, values)))

    def _refuse(self, *_: Any) -> NoReturn:
        raise NotImplementedError(
            f"{self.name} of tables of jslices.experimental is neither differentiated nor "
            "batched; pass arrays and IndexedSlices: experimental.arrays(tree)"
        )

    vjp_fwd = jvp = lin = batch = _refuse


def _name(fun: Any) -> str:
    return getattr(fun, "__qualname__", repr(fun))


def _is_leaf(x: Any) -> bool:
    return x is None or is_slices(x)


def _is_value(x: Any) -> bool:
    arrays = jax.Array | np.ndarray | np.generic | jax.core.Tracer
    return isinstance(x, arrays | Table | Rows)


def _opened(x: Any) -> Any:
    if isinstance(x, Table):
        return x.array
    return x.plain if isinstance(x, Rows) else x


def _as_type(type: Any, x: Any) -> Any:
    """A result as a table, or as the gradient of one, if ``type`` is."""
    if type is None or x is None:
        return x
    if is_slices(x):
        shape = hijax.ShapedArray(x.dense_shape, x.dtype)
        held = dataclasses.replace(_tangent(type), table=shape)
        return rows_of(held, x.values, x.indices)
    return Table(x, type.room, type.row_axes) if isinstance(type, TableType) else x


def _tangent(type: Any) -> RowsType:
    tangent: RowsType = type.to_tangent_aval()
    return tangent


def _described(type: Any) -> Any:
    """Arrays of a type, as ``jax.eval_shape`` takes them; of rows so many, or some."""
    if isinstance(type, TableType):
        return _described(type.array_type)
    if isinstance(type, RowsType):
        sized = type if type.room else dataclasses.replace(type, room=1)
        values, numbers, _ = map(_described, sized.lo_ty())
        return IndexedSlices.of(values, numbers, type.table.shape)
    mesh = getattr(type, "sharding", None)
    split = None if mesh is None or mesh.mesh.empty else mesh
    weak = type.weak_type
    return jax.ShapeDtypeStruct(type.shape, type.dtype, sharding=split, weak_type=weak)


def _type_of_result(x: Any) -> Any:
    """The type of a result of ``jax.eval_shape``."""
    if isinstance(x, Rows):
        return x.type
    if isinstance(x, Table):
        return TableType(_type_of_result(x.array), x.room, x.row_axes)
    weak = getattr(x, "weak_type", False)
    return hijax.ShapedArray(x.shape, x.dtype, weak_type=weak, sharding=x.sharding)


def arrays(tree: PyTree) -> Any:
    """The tree with arrays for tables, and IndexedSlices for their gradients.

    For what takes arrays: checkpoints, other libraries' optimizers, exchange between
    programs. In a traced program a gradient needs the table's ``room`` for it.
    """

    def array(x: Any) -> Any:
        type = _type_of(x)
        if type is None:
            return x
        if isinstance(type, TableType):
            return x.array
        return IndexedSlices.of(x.values, x.indices, type.table.shape)

    return jax.tree.map(array, tree)


def like(tree: PyTree, tables: PyTree) -> Any:
    """Arrays as tables, and IndexedSlices as their gradients, where ``tables`` has tables.

    What undoes :func:`arrays`; and what makes tangents for ``jax.jvp``.
    """
    leaves, structure = jax.tree.flatten(tables, is_leaf=_is_leaf)
    parts = zip(leaves, structure.flatten_up_to(tree), strict=True)
    return structure.unflatten([_as_type(_type_of(x), part) for x, part in parts])


# --- what gradients do while they are traced ---------------------------------------------


def _operator(name: str) -> Any:
    fun = getattr(operator, name)
    return staticmethod(lambda *operands: call(fun, operands, {}, operands[0]))


def _reflected(name: str) -> Any:
    fun = getattr(operator, name)
    return staticmethod(lambda rows, other: call(fun, (other, rows), {}, rows))


def _method(name: str) -> Any:
    fun = getattr(IndexedSlices, name)
    return hijax.aval_method(
        lambda rows, *args, **kwargs: call(fun, (rows, *args), kwargs, rows)
    )


def _entries(rows: Any) -> Any:
    if rows.aval.room is None:
        rows.aval.lo_ty()[0].shape  # noqa: B018  # which says what to type
    return Entries(rows.aval)(rows)


for _key in ("add", "sub", "mul", "truediv", "neg"):
    setattr(RowsType, f"_{_key}", _operator(_key))
for _key in ("add", "sub", "mul"):
    setattr(RowsType, f"_r{_key}", _reflected(_key))
for _key in ("to_dense", "coalesce", "astype", "conj", "sum", "mean", "square_sum"):
    setattr(RowsType, _key, _method(_key))
RowsType.values = hijax.aval_property(lambda rows: _entries(rows)[0])
RowsType.indices = hijax.aval_property(lambda rows: _entries(rows)[1])
for _key in ("add", "sub"):  # rows, to or from a table
    setattr(TableType, f"_{_key}", _operator(_key))
