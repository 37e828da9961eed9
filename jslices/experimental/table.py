"""A table as a type of JAX's, whose tangents are rows, and how it is looked up."""

import dataclasses
import math
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import hijax

from jslices.experimental.rows import RowsPrimitive, RowsType, is_zero, make, read
from jslices.extend import as_ids, index_dtype, rows_at, settle

_ADVICE = (
    "a jslices.experimental.table, of which only rows can be read: type table[ids], "
    "table.at[ids].get(mode=...), jslices.embedding_lookup(table, ids), or table.array for "
    "the whole array, whose gradient is as large"
)


_IN_CHECKPOINT = (
    "a lookup of a jslices.experimental.table inside of jax.checkpoint, which does not "
    "take types of others yet (jax 0.12): look the rows up outside and pass them, as in "
    "jax.checkpoint(f)(table[ids], ...)"
)


@dataclasses.dataclass(frozen=True)
class TableType(hijax.HiType):
    """The type of a table. That of its tangents and its gradient follows from it."""

    is_table = True
    array_type: Any
    room: int | None
    row_axes: int = 1

    shape = property(lambda self: self.array_type.shape)
    dtype = property(lambda self: self.array_type.dtype)
    ndim = property(lambda self: len(self.shape))
    size = property(lambda self: math.prod(self.shape))
    num_rows = property(lambda self: math.prod(self.shape[: self.row_axes]))

    def str_short(self, short_dtypes: bool = False, mesh_axis_types: bool = False) -> str:
        return f"table of {self.array_type.str_short(short_dtypes, mesh_axis_types)}"

    __repr__ = str_short

    def lo_ty(self) -> list[Any]:
        return [self.array_type]

    def lower_val(self, table: "Table") -> list[Any]:
        return [table._array]

    def raise_val(self, array: Any) -> "Table":
        return Table(array, self.room, self.row_axes)

    def to_tangent_aval(self) -> RowsType:
        return RowsType(self.array_type, self.room, self.row_axes)

    def inc_rank(self, size: int | None, spec: Any) -> "TableType":
        return self if spec is None else self._with(core_shape=(size, *self.shape))

    def dec_rank(self, size: int | None, spec: Any) -> "TableType":
        """That of one example: of a table whose rows two axes number, of one table."""
        if spec is None:
            return self
        return self._with(self.shape[1:], max(1, self.row_axes - 1))

    def _with(self, core_shape: Any, row_axes: int | None = None) -> "TableType":
        array = hijax.ShapedArray(core_shape, self.dtype)
        return TableType(array, self.room, row_axes or self.row_axes)

    # What a traced table does; a concrete one has the same methods.
    _getitem = staticmethod(lambda table, key: getitem(table, key))
    _len = staticmethod(lambda table: table.shape[0])
    at = hijax.aval_property(lambda table: _At(table))
    array = hijax.aval_property(lambda table: _apply(ReadWhole, table))
    astype = hijax.aval_method(lambda table, dtype: CastTable(table, dtype))
    rows_at = hijax.aval_method(
        lambda table, *args, **how: rows_of_table(table, *args, **how)
    )

    @staticmethod
    def _refuse(*_: Any) -> NoReturn:
        raise TypeError(f"this is {_ADVICE}")

    _mul = _rmul = _truediv = _rtruediv = _matmul = _rmatmul = _neg = _pow = _iter = _refuse
    _radd = _rsub = _refuse

    @hijax.aval_method
    def __jax_array__(self) -> NoReturn:
        raise TypeError(f"this is {_ADVICE}")


class Table:
    """An array ``[V, *D]`` whose gradient is rows: made by :func:`table`.

    A leaf of a pytree. It goes where the array went, into ``jit``, ``grad``, ``scan``,
    optimizers of jslices, and is looked up as the array was.
    """

    is_table = True
    __array_ufunc__ = None

    def __init__(self, array: Any, room: int | None, row_axes: int) -> None:
        self._array, self.room, self.row_axes = array, room, row_axes

    shape = property(lambda self: self._array.shape)
    dtype = property(lambda self: np.dtype(self._array.dtype))
    ndim = property(lambda self: len(self.shape))
    size = property(lambda self: math.prod(self.shape))
    nbytes = property(lambda self: self._array.nbytes)
    sharding = property(lambda self: self._array.sharding)

    @property
    def array(self) -> Any:
        """The whole array ``[V, *D]``, dense by choice."""
        return self._array

    @property
    def at(self) -> "_At":
        """``table.at[ids].get(mode=..., fill_value=...)``, as of an array."""
        return _At(self)

    def __getitem__(self, key: Any) -> Any:
        return getitem(self, key)

    def __len__(self) -> int:
        return int(self.shape[0])

    def astype(self, dtype: Any) -> Any:
        """A table that gives its rows in ``dtype``; it is not copied."""
        return CastTable(self, dtype)

    def rows_at(self, numbers: Any, **how: Any) -> Any:
        return rows_of_table(self, numbers, **how)

    def __iter__(self) -> NoReturn:
        raise TypeError(f"not iterable: this is {_ADVICE}")

    def __jax_array__(self) -> NoReturn:
        raise TypeError(f"this is {_ADVICE}")

    def __add__(self, updates: Any) -> "Table":
        if not hasattr(updates, "dense_shape"):
            return NotImplemented
        return Table(self._array + updates, self.room, self.row_axes)

    def __sub__(self, updates: Any) -> "Table":
        return self + (-updates)

    def block_until_ready(self) -> "Table":
        self._array.block_until_ready()
        return self

    def __repr__(self) -> str:
        room = "" if self.room is None else f", room={self.room}"
        return f"Table({self.dtype}{list(self.shape)}{room})"


def _type_of(table: Table) -> TableType:
    array = jax.typeof(table._array).strip_weak_type()
    return TableType(array, table.room, table.row_axes)


hijax.register_hitype(Table, _type_of)


def table(array: Any, room: int | None = None, *, row_axes: int = 1) -> Any:
    """A table whose gradient under ``jax.grad`` is rows.

    Args:
      array: ``[V, *D]``, floating or complex.
      room: how many entries one gradient has at most: all ids of all lookups, duplicates
        and every turn of a loop counted, as :func:`jslices.explain` does. None: as many as
        were read, which suffices unless lookups are inside of ``jax.lax`` loops or
        branches, or of ``jax.checkpoint``: then an error says so.
      row_axes: how many leading axes number the rows, as of :class:`jslices.IndexedSlices`.
        ``table[l, ids]`` then reads rows.

    Returns:
      A :class:`Table`.

    Raises:
      TypeError: for arrays of integers.
      ValueError: for a scalar, or if ``room`` is no positive int.
    """
    array = array if hasattr(array, "dtype") else jnp.asarray(array)
    array = jnp.asarray(array) if isinstance(array, np.ndarray) else array
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        raise TypeError(
            f"experimental.table wants floats, which have a gradient, got {array.dtype}"
            f"{list(array.shape)}; leave it an array"
        )
    if not 1 <= row_axes <= array.ndim:
        raise ValueError(
            f"experimental.table wants an array [V, *D] and row_axes up to {array.ndim}, "
            f"got {array.dtype}{list(array.shape)} and row_axes={row_axes}"
        )
    if room is not None and (not isinstance(room, int) or room < 1):
        raise ValueError(
            f"experimental.table: room={room!r} must be the number of entries that one "
            "gradient has at most, or None"
        )
    if not isinstance(array, jax.core.Tracer):
        return Table(array, room, row_axes)
    type = TableType(jax.typeof(array).strip_weak_type(), room, row_axes)
    return MakeTable(type, jax.typeof(array))(array)


class MakeTable(RowsPrimitive):
    """From an array to a table: its tangent is all rows."""

    def expand(self, array: Any) -> Table:
        return self.out_aval.raise_val(array)

    def jvp(self, primals: Any, tangents: Any) -> Any:
        type = self.out_aval.to_tangent_aval()
        if is_zero(tangents[0]):
            return self(*primals), hijax.Zero(type)
        values = tangents[0].reshape(type.num_rows, *type.row)
        return self(*primals), make(type, values, _all_rows(type))


class ReadWhole(RowsPrimitive):
    """From a table to its array."""

    def __init__(self, type: TableType) -> None:
        super().__init__(type.array_type, type)

    def expand(self, table: Table) -> Any:
        return table._array

    def jvp(self, primals: Any, tangents: Any) -> Any:
        rows, type = tangents[0], self.in_avals[0]
        if is_zero(rows):
            return self(*primals), hijax.Zero(self.out_aval)
        values = read(rows, _all_rows(rows.aval if hasattr(rows, "aval") else rows.type))
        return self(*primals), values.reshape(type.shape)


def _all_rows(type: RowsType) -> jax.Array:
    return jnp.arange(type.num_rows, dtype=type.index_dtype)


class Lookup(RowsPrimitive):
    """Rows ``[*numbers, *D]`` of a table, of which two and more axes may number them."""

    def __init__(self, type: TableType, numbers: Any, mode: str, zipped: int) -> None:
        row = type.shape[zipped + (1 if zipped else type.row_axes) :]
        out = hijax.ShapedArray((*numbers.shape, *row), type.dtype)
        super().__init__(out, type, numbers, mode=mode, zipped=zipped)

    def expand(self, table: Table, numbers: Any) -> Any:
        axes = self.zipped + 1 if self.zipped else table.row_axes
        return rows_at(table._array, numbers, mode=self.mode, row_axes=axes)

    def jvp(self, primals: Any, tangents: Any) -> Any:
        type, rows = self.in_avals[0], tangents[0]
        if is_zero(rows):
            return self(*primals), hijax.Zero(self.out_aval)
        if self.zipped and type.row_axes != self.zipped + 1:
            raise TypeError(
                f"a lookup under vmap reads rows that {self.zipped + 1} axes of {type} "
                f"number: type experimental.table(array, row_axes={self.zipped + 1})"
            )
        return self(*primals), read(rows, primals[1])

    def staging(self, trace: Any, source_info: Any, *args: Any) -> Any:
        if trace.frame.debug_info.traced_for == "checkpoint / remat":
            raise NotImplementedError(_IN_CHECKPOINT)
        return super().staging(trace, source_info, *args)

    def remat(self, trace: Any, *args: Any) -> NoReturn:
        raise NotImplementedError(_IN_CHECKPOINT)

    def batched(self, axis_data: Any, args: Any, dims: Any) -> Any:
        table, numbers = args
        if dims[0] is None:
            numbers = jnp.moveaxis(numbers, dims[1], 0)
            return _lookup(table, numbers, self.mode, self.zipped)
        numbers = hijax.bdims_at_front(axis_data, (numbers,), (dims[1],))[0]
        height = self.in_avals[0].num_rows
        first = jnp.arange(axis_data.size, dtype=numbers.dtype) * height
        beyond = axis_data.size * height
        first = first.reshape(-1, *(1,) * (numbers.ndim - 1))
        numbers = jnp.where(numbers < height, numbers + first, beyond)
        return _lookup(table, numbers, self.mode, self.zipped + 1)


def _lookup(table: Any, numbers: Any, mode: str, zipped: int = 0) -> Any:
    return Lookup(jax.typeof(table), jax.typeof(numbers), mode, zipped)(table, numbers)


def _apply(primitive: Any, table: Any) -> Any:
    return primitive(jax.typeof(table))(table)


def rows_of_table(
    table: Any, numbers: Any, mode: str = "fill", fill_value: Any = None
) -> Any:
    """Rows at row numbers; those out of range read a value and get no gradient."""
    numbers = settle(numbers, jax.typeof(table).num_rows, mode)
    if mode != "fill":
        return _lookup(table, numbers, "promise_in_bounds")
    rows = _lookup(table, numbers, mode)
    if fill_value is None:
        return rows
    bad = numbers >= jax.typeof(table).num_rows
    bad = bad.reshape(*bad.shape, *(1,) * (rows.ndim - bad.ndim))
    return jnp.where(bad, jnp.asarray(fill_value, rows.dtype), rows)


# --- the forms of an index ----------------------------------------------------------------


def getitem(table: Any, key: Any, mode: str | None = None, fill_value: Any = None) -> Any:
    """``table[key]``, with JAX's meaning of negative numbers and of those out of range."""
    axes = jax.typeof(table).row_axes
    keys = key if isinstance(key, tuple) else (key,)
    if key is Ellipsis:
        return table
    first, rest = keys[:axes], keys[axes:]
    if len(first) < axes or any(x is None or x is Ellipsis for x in first):
        raise TypeError(f"[{key!r}] reads more than rows: this is {_ADVICE}")
    if any(not isinstance(x, slice | int) and x is not Ellipsis for x in rest):
        raise TypeError(
            f"[{key!r}] mixes row numbers with arrays for other axes; type "
            "table[ids][..., columns]"
        )
    if mode is None:  # JAX reads one row by a slice of it
        one = not any(isinstance(x, slice) or np.ndim(x) for x in first)
        mode = "clip" if one else "promise_in_bounds"
    numbers, good = _numbers(first, jax.typeof(table).shape[:axes], mode)
    if mode == "fill":
        rows = rows_of_table(table, numbers, mode, fill_value)
    else:
        rows = _lookup(table, numbers, "promise_in_bounds")
    if axes > 1 and mode == "promise_in_bounds":
        good = good.reshape(*good.shape, *(1,) * (rows.ndim - good.ndim))
        rows = jnp.where(good, rows, jax.lax.stop_gradient(rows))
    return rows[(*(slice(None),) * numbers.ndim, *rest)] if rest else rows


def _numbers(keys: tuple[Any, ...], shape: tuple[int, ...], mode: str) -> Any:
    """Row numbers of keys for the axes that number rows, V for none; which are in range."""
    dtype = index_dtype(math.prod(shape), np.dtype(np.int32))
    if len(keys) > 1 and any(isinstance(x, slice) for x in keys):
        raise TypeError(f"{keys}: with row_axes={len(keys)}, type numbers for each of them")
    number: Any = 0
    good: Any = True
    keys = tuple(
        np.arange(*x.indices(shape[0]), dtype=dtype) if isinstance(x, slice) else x
        for x in keys
    )
    numbers = jnp.broadcast_arrays(*(as_ids(x, "table[ids]") for x in keys))
    for ids, size in zip(numbers, shape, strict=True):
        if jnp.issubdtype(ids.dtype, jnp.signedinteger):
            ids = jnp.where(ids < 0, ids + jnp.asarray(size, ids.dtype), ids)
        if len(keys) == 1 and mode == "promise_in_bounds":
            # What is out of range reads the nearest row, which then gets no gradient.
            return ids.astype(dtype), None
        good = good & (ids >= 0) & (ids < size)
        settled = settle(ids, size, "fill" if mode == "fill" else "clip")
        number = number * size + settled.astype(dtype)
    if mode != "fill":
        return number, good
    return jnp.where(good, number, jnp.asarray(math.prod(shape), dtype)), good


class _At:
    """``table.at``."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def __getitem__(self, key: Any) -> "_Read":
        return _Read(self._table, key)


class _Read:
    """``table.at[key]``."""

    def __init__(self, table: Any, key: Any) -> None:
        self._table, self._key = table, key

    def get(self, *, mode: str | None = None, fill_value: Any = None, **hints: Any) -> Any:
        """The rows; ``mode`` and ``fill_value`` as of an array."""
        del hints  # that indices are sorted or unique changes no result
        if mode == "drop":
            mode = "fill"
        if mode not in ("fill", "clip", "promise_in_bounds", None):
            raise ValueError(f"table.at[ids].get: no mode {mode!r}; type 'fill' or 'clip'")
        return getitem(self._table, self._key, mode, fill_value)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"table.at[ids].{name}: a table is changed by an optimizer, "
            "jslices.apply_updates(table, rows), or as an array: table.array"
        )


class CastTable:
    """A table that gives its rows in another dtype: ``table.astype(dtype)``."""

    def __init__(self, table: Any, dtype: Any) -> None:
        self._table, self.dtype = table, np.dtype(dtype)
        self.shape, self.ndim = table.shape, table.ndim

    def __getitem__(self, key: Any) -> Any:
        rows = self._table[key]
        return self if key is Ellipsis else rows.astype(self.dtype)

    def astype(self, dtype: Any) -> "CastTable":
        return CastTable(self._table, dtype)

    @property
    def array(self) -> Any:
        return self._table.array.astype(self.dtype)

    def __jax_array__(self) -> NoReturn:
        raise TypeError(f"this is {_ADVICE}")
