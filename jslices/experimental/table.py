"""A table as a type of JAX's, and rows of it as the type of its gradient.

A gradient has as many entries as were read, and a sum has those of both. Where JAX wants to
know a shape beforehand (in a loop, of branches) they fill the table's ``room``.
"""

import dataclasses
import operator
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import hijax

from jslices import IndexedSlices, concat_slices, is_slices
from jslices._rows.access import empty_index, index_dtype
from jslices._typing import PyTree
from jslices.experimental.call import IN_CHECKPOINT, Call, Wrapping, call, type_of


@dataclasses.dataclass(frozen=True, repr=False)
class RowsType(Wrapping):
    """The type of rows of an array; of one example each, under ``vmap``."""

    batch: tuple[int, ...] = ()

    advice = (
        "the gradient of a jslices.experimental.table: type g1 + g2, g * factor, functions "
        "and optimizers of jslices, jslices.tree.map, or g.to_dense() for the whole array"
    )
    shape = property(lambda self: self.batch + self.core.shape)
    dense_shape = property(lambda self: self.core.shape)
    num_rows = property(lambda self: int(np.prod(self.core.shape[: self.row_axes])))
    index_dtype = property(lambda self: index_dtype(self.num_rows, np.dtype(np.int32)))
    values = hijax.aval_property(lambda rows: _in_room(rows).values)
    indices = hijax.aval_property(lambda rows: _in_room(rows).indices)

    def slices(self, make: Any, count: int) -> IndexedSlices:
        """So many entries, of parts that ``make`` makes from a shape and a dtype."""
        row, shape = self.core.shape[self.row_axes :], (*self.batch, count)
        parts = make(shape + row, self.dtype), make(shape, self.index_dtype)
        return IndexedSlices.of(*parts, self.core.shape)

    def lo_ty(self) -> list[Any]:
        # Without room JAX may only ask how many arrays there are.
        entries = self.slices(hijax.ShapedArray, self.room or 0)
        return [entries.values, entries.indices]

    def lower_val(self, rows: "Rows") -> list[Any]:
        return [rows.values, rows.indices]

    def raise_val(self, *parts: Any) -> "Rows":
        return self.wrap(IndexedSlices.of(*parts, self.core.shape))

    def wrap(self, x: Any) -> "Rows":
        if not is_slices(x):  # the whole array
            values = x.reshape(self.num_rows, *x.shape[self.row_axes :])
            numbers = lax.iota(self.index_dtype, self.num_rows)
            x = IndexedSlices.of(values, numbers, x.shape)
        rows = Rows.of(*self.in_room(x), x.dense_shape, x.facts)
        vars(rows).update(aval=self, entries=x)
        return rows

    def in_room(self, slices: IndexedSlices) -> list[Any]:
        """Values and row numbers, with empty entries up to ``room``."""
        values, numbers = slices.values, slices.indices
        held, axis = numbers.shape[-1], numbers.ndim - 1
        if self.room is None or held == self.room:
            return [values, numbers]
        if held > self.room:
            raise ValueError(
                f"a gradient of {held} entries got a table with room={self.room}: pass "
                f"experimental.table(array, room={held})"
            )
        more = [(0, 0, 0)] * values.ndim
        more[axis] = (0, self.room - held, 0)
        empty = np.asarray(empty_index(self.num_rows, numbers.dtype), numbers.dtype)
        values = lax.pad(values, np.zeros((), values.dtype), more)
        return [values, lax.pad(numbers, empty, more[: axis + 1])]

    def unwrap(self, rows: "Rows") -> IndexedSlices:
        return rows.entries

    def described(self) -> IndexedSlices:
        return self.slices(jax.ShapeDtypeStruct, self.room or 1)

    def mirrored(self, x: Any) -> "RowsType | None":
        if not is_slices(x):
            return None
        core = hijax.ShapedArray(x.dense_shape, x.dtype)
        return RowsType(core, self.room, self.row_axes, x.indices.shape[:-1])

    def to_tangent_aval(self) -> "RowsType":
        return self

    def vspace_zero(self) -> Any:
        return Call(lambda: [self.slices(jnp.zeros, 0)], (), [self], True)()[0]

    def vspace_add(self, x: Any, y: Any) -> Any:
        both = Sum(lambda *xs: [_sum(self.room, *xs)], (self, self), [self])
        return both(x, y)[0]

    def inc_rank(self, size: Any, spec: Any) -> "RowsType":
        batch = self.batch if spec is None else (size, *self.batch)
        return RowsType(self.core, self.room, self.row_axes, batch)

    def dec_rank(self, size: Any, spec: Any) -> "RowsType":
        batch = self.batch if spec is None else self.batch[1:]
        return RowsType(self.core, self.room, self.row_axes, batch)


class Rows(IndexedSlices):
    """IndexedSlices that are one leaf of a pytree: what ``jax.grad`` returns."""

    aval: RowsType
    entries: IndexedSlices  #: without the empty ones that fill the room
    __reduce__ = object.__reduce__


class Sum(Call):
    """The sum of two, which is linear in them."""

    def jvp(self, primals: Any, tangents: Any) -> Any:
        return self(*primals), self(*map(hijax.instantiate_zeros, tangents))


def _sum(room: int | None, *both: IndexedSlices) -> IndexedSlices:
    """The entries of both; with room, those of one where the other has left it."""
    new, held = sorted(both, key=lambda x: x.indices.size)
    count = new.indices.size
    if count == 0 or held.indices.size != room:
        return concat_slices(both)
    if count == room:
        return concat_slices(both).coalesce(room)
    numbers, put = held.indices, lax.dynamic_update_slice_in_dim
    used = jnp.where(numbers < held.num_rows, jnp.arange(1, room + 1), 0).max()
    fits = used + count <= room  # or else NaN, at any rows
    values = jnp.where(fits, new.values, jnp.nan)
    some = jnp.arange(count, dtype=numbers.dtype) % held.num_rows
    values = put(held.values, values, used, 0)
    numbers = put(numbers, jnp.where(fits, new.indices, some), used, 0)
    return IndexedSlices.of(values, numbers, held.dense_shape)


def _in_room(rows: Any) -> IndexedSlices:
    """As plain slices, of as many entries as there is room for."""
    type = rows.aval
    if type.room is None:
        raise TypeError(
            "how many entries a gradient has is known here if its table has room: type "
            "experimental.table(array, room=...), as jslices.explain(loss)(arrays) tells"
        )
    parts = Call(type.in_room, (type,), type.lo_ty())(rows)
    return IndexedSlices.of(*parts, type.dense_shape)


def _called(fun: Any, like: int = 0) -> Any:
    """The function called with rows; after another operand, if those are not the first."""
    return lambda *args, **kwargs: call(fun, args[:: -1 if like else 1], kwargs, like)


for _key in ("add", "sub", "mul", "truediv", "neg"):
    setattr(RowsType, f"_{_key}", staticmethod(_called(getattr(operator, _key))))
    setattr(RowsType, f"_r{_key}", staticmethod(_called(getattr(operator, _key), 1)))
for _key in ("to_dense", "coalesce", "astype", "conj", "sum", "mean", "square_sum"):
    setattr(Rows, _key, _called(getattr(IndexedSlices, _key)))
    setattr(RowsType, _key, hijax.aval_method(getattr(Rows, _key)))


def _getitem(table: Any, key: Any) -> Any:
    if key is Ellipsis:
        return table
    return call(operator.getitem, (table, key), {}, sparse=True)


class _Cast:
    """A table that gives its rows in another dtype."""

    def __init__(self, table: Any, dtype: Any) -> None:
        self._table, self.dtype = table, np.dtype(dtype)

    def __getitem__(self, key: Any) -> Any:
        return self._table[key].astype(self.dtype)


def _astype(table: Any, dtype: Any) -> Any:
    return table if dtype == table.dtype else _Cast(table, dtype)


class _At:
    """``table.at``, and ``table.at[key]``."""

    def __init__(self, table: Any, *key: Any) -> None:
        self._operands = table, *key

    def __getitem__(self, key: Any) -> "_At":
        return _At(self._operands[0], key)

    def get(self, **how: Any) -> Any:
        """The rows; ``mode`` and ``fill_value`` as of an array."""
        fun = lambda array, key, **how: array.at[key].get(**how)  # noqa: E731
        return call(fun, self._operands, how, sparse=True)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"table.at[ids].{name}: a table is changed by optimizers, by "
            "jslices.apply_updates(table, rows), or as an array: table.array"
        )


@dataclasses.dataclass(frozen=True, repr=False)
class TableType(Wrapping):
    """The type of a table. That of its tangents and its gradient follows from it."""

    advice = (
        "a jslices.experimental.table: type table[ids], table.at[ids].get(mode=...), "
        "jslices.embedding_lookup(table, ids), or table.array, whose gradient is as large"
    )
    # What a traced table does; a concrete one has the same.
    _getitem, _add, _sub = map(
        staticmethod, (_getitem, _called(operator.add), _called(operator.sub))
    )
    _len = staticmethod(lambda table: table.shape[0])
    at = hijax.aval_property(_At)
    array = hijax.aval_property(lambda t: call(lambda x: x, (t,), {}, sparse=False))
    astype = hijax.aval_method(_astype)

    def lo_ty(self) -> list[Any]:
        return [self.core]

    def lower_val(self, table: "Table") -> list[Any]:
        return [table.array]

    def raise_val(self, array: Any) -> "Table":
        return Table(array, self.room, self.row_axes)

    wrap = raise_val

    def unwrap(self, table: "Table") -> Any:
        return table.array

    def described(self) -> Any:
        return self.core

    def mirrored(self, x: Any) -> Wrapping | None:
        if is_slices(x):
            return self.to_tangent_aval().mirrored(x)
        return _type_of(x, self.room, self.row_axes)

    def to_tangent_aval(self) -> RowsType:
        return RowsType(self.core, self.room, self.row_axes)

    def inc_rank(self, size: Any, spec: Any) -> "TableType":
        core = hijax.ShapedArray((size, *self.shape), self.dtype)
        return self if spec is None else TableType(core, self.room, self.row_axes)

    def dec_rank(self, size: Any, spec: Any) -> "TableType":
        core, row_axes = hijax.ShapedArray(self.shape[1:], self.dtype), self.row_axes
        return self if spec is None else TableType(core, self.room, max(1, row_axes - 1))


def _type_of(array: Any, room: int | None, row_axes: int) -> TableType:
    return TableType(jax.typeof(array).strip_weak_type(), room, row_axes)


class Table(jax.Array):
    """An array ``[V, *D]`` whose gradient is rows: made by :func:`table`.

    A leaf of a pytree that goes where the array went, and is looked up as it was:
    ``table[ids]``, ``table.at[ids].get(mode=...)``, ``table.astype(dtype)[ids]``.
    ``table.array`` is the whole array, dense by choice. All else is an error.
    """

    __array_ufunc__ = __copy__ = __deepcopy__ = None
    __eq__, __ne__, __hash__ = object.__eq__, object.__ne__, object.__hash__
    __getitem__, __add__, __sub__ = _getitem, TableType._add, TableType._sub
    __len__, at, astype = TableType._len, property(_At), _astype

    def __init__(self, array: Any, room: int | None, row_axes: int) -> None:
        self.array, self.room, self.row_axes = array, room, row_axes

    @property
    def aval(self) -> TableType:
        return _type_of(self.array, self.room, self.row_axes)

    @property
    def val(self) -> NoReturn:  # JAX asks for it at the barrier of a jax.checkpoint
        raise NotImplementedError(IN_CHECKPOINT)

    def __repr__(self) -> str:
        return f"Table({self.dtype}{list(self.shape)}, room={self.room})"


def _refuse(*_: Any) -> NoReturn:
    raise TypeError(f"this is {TableType.advice}")


for _key in "shape dtype ndim size nbytes sharding committed block_until_ready".split():
    setattr(Table, _key, property(operator.attrgetter(f"array.{_key}")))
for _key, _member in (*vars(jax.Array).items(), ("__iter__", _refuse)):
    if _key not in vars(Table) and (callable(_member) or hasattr(_member, "fget")):
        setattr(Table, _key, _refuse if callable(_member) else property(_refuse))
for _class in (Table, Rows):
    hijax.register_hitype(_class, operator.attrgetter("aval"))


def table(array: Any, room: int | None = None, *, row_axes: int = 1) -> Any:
    """A :class:`Table`, whose gradient under ``jax.grad`` is rows.

    Args:
      array: ``[V, *D]``, floating or complex.
      room: how many entries one gradient has at most: all ids of all lookups, in every
        turn of a loop, as :func:`jslices.explain` counts. None: as many as were read,
        which suffices outside of ``jax.lax`` loops and branches; inside it is an error.
      row_axes: how many leading axes number the rows, as of :class:`jslices.IndexedSlices`.
        ``table[l, ids]`` then reads rows.

    Raises:
      TypeError: for arrays of integers.
      ValueError: for a scalar, or if ``room`` or ``row_axes`` is out of range.

    Cost: none; the array is not copied.
    """
    array = array if isinstance(array, jax.Array) else jnp.asarray(array)
    came = f"{array.dtype}{list(array.shape)}"
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        raise TypeError(f"experimental.table wants floats, got {came}; leave it an array")
    if not 1 <= row_axes <= array.ndim or not (room is None or room > 0):
        raise ValueError(
            f"experimental.table wants an array [V, *D], row_axes up to {array.ndim} and "
            f"room for 1 entry or more (or None), got {came}, {row_axes=} and {room=}"
        )
    type = _type_of(array, room, row_axes)
    return Call(lambda x: [x], [jax.typeof(array)], [type], False)(array)[0]


def arrays(tree: PyTree) -> Any:
    """The tree with arrays for tables, and IndexedSlices for their gradients.

    For checkpoints, and other libraries. Traced gradients need the table's ``room``.
    """

    def one(x: Any) -> Any:
        if isinstance(type_of(x), RowsType):
            return IndexedSlices.of(x.values, x.indices, x.dense_shape)
        return x.array if type_of(x) else x

    return jax.tree.map(one, tree)


def like(tree: PyTree, tables: PyTree) -> Any:
    """Arrays as tables, and IndexedSlices as their gradients, where ``tables`` has tables.

    It undoes :func:`arrays`, and makes tangents for ``jax.jvp``.
    """
    return call(lambda tree, tables: tree, (tree, tables), {}, 1, sparse=False)
