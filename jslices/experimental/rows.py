"""The gradient of a table as a type of JAX's: rows, their numbers, and how they add up.

Inside one traced program rows are as many as were read, and a sum of them has the entries
of both. Where JAX wants shapes that are known beforehand (what a loop carries, branches,
what a compiled program is lowered for) they fill the table's ``room``, in order: entries
and how many there are.
"""

import dataclasses
import functools
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import hijax

from jslices import IndexedSlices, concat_slices
from jslices.extend import empty_index, index_dtype, trace_of


class _Unknown:
    """The type of an array of which JAX must not ask more than that there is one."""

    def __init__(self, rows: "RowsType") -> None:
        self._rows = rows

    def __getattr__(self, name: str) -> NoReturn:
        raise TypeError(
            f"JAX wants to know here how many entries {self._rows} have: a loop adds them "
            "up, branches give different numbers of them, or they enter a program that is "
            "lowered alone. Give the table room for all entries of one gradient: "
            "experimental.table(array, room=...), of which jslices.explain(loss)(arrays, "
            "...) tells the number"
        )


@dataclasses.dataclass(frozen=True)
class RowsType(hijax.HiType):
    """The type of rows of a table; of one example each, under ``vmap``."""

    table: Any  #: the type of the table's array
    room: int | None
    row_axes: int = 1
    batch: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return self.batch + self.table.shape

    @property
    def dtype(self) -> np.dtype:
        return self.table.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def row(self) -> tuple[int, ...]:
        return self.table.shape[self.row_axes :]

    @property
    def num_rows(self) -> int:
        return int(np.prod(self.table.shape[: self.row_axes]))

    def str_short(self, short_dtypes: bool = False, mesh_axis_types: bool = False) -> str:
        array = self.table.str_short(short_dtypes, mesh_axis_types)
        return f"rows[{'any' if self.room is None else self.room}]of {array}"

    __repr__ = str_short

    # --- as arrays ------------------------------------------------------------------

    def lo_ty(self) -> list[Any]:
        if self.room is None:  # JAX may only want to know how many arrays there are
            return [_Unknown(self)] * 2
        values = hijax.ShapedArray((*self.batch, self.room, *self.row), self.dtype)
        numbers = hijax.ShapedArray((*self.batch, self.room), self.index_dtype)
        return [values, numbers, hijax.ShapedArray((), np.dtype(np.int32))]

    dense_shape = property(lambda self: self.table.shape)
    mat = property(lambda self: self.table.mat)  # which jax.lax.cond asks for

    @property
    def index_dtype(self) -> np.dtype:
        return index_dtype(self.num_rows, np.dtype(np.int32))

    def lower_val(self, rows: "Rows") -> list[Any]:
        """The entries; with room: exactly so many of them, and how many there are."""
        values, numbers, filled = rows.held_values, rows.indices, rows.filled
        if self.room is None:
            return [values, numbers]
        with trace_of(values, numbers, filled):
            return self._in_room(rows)

    def _in_room(self, rows: "Rows") -> list[Any]:
        values, numbers, filled = rows.held_values, rows.indices, rows.filled
        axis, room = len(self.batch), self.room
        new = numbers.shape[axis] - (0 if filled is None else room)
        if new > room:
            raise ValueError(
                f"a gradient of {new} entries got a table with room={room}: pass "
                f"experimental.table(array, room={new})"
            )
        if filled is None:
            padding = [(0, 0, 0)] * axis + [(0, room - new, 0)]
            zero, empty = np.zeros((), self.dtype), self.empty
            rest = [(0, 0, 0)] * len(self.row)
            values = lax.pad(values, zero, padding + rest)
            return [values, lax.pad(numbers, empty, padding), np.int32(new)]
        first, last = _new_and_filled(rows)
        if new == 0:
            return [*last, filled]
        # If they do not fit any more, `Rows.values` will be NaN.
        values, numbers = map(_put(filled, axis), last, first)
        return [values, numbers, filled + new]

    def raise_val(self, values: Any, numbers: Any, filled: Any = None) -> "Rows":
        return rows_of(self, values, numbers, filled)

    @property
    def empty(self) -> Any:
        return np.asarray(empty_index(self.num_rows, self.index_dtype), self.index_dtype)

    @hijax.aval_method
    def __jax_array__(self) -> NoReturn:
        raise TypeError(
            "this is the gradient of a jslices.experimental.table, of which only rows are "
            "held: type g1 + g2 or g * factor, jslices.tree.map, functions and optimizers "
            "of jslices, or g.to_dense() for the whole array"
        )

    # --- derivatives, and batches ------------------------------------------------------

    def to_tangent_aval(self) -> "RowsType":
        return self

    def vspace_zero(self) -> Any:
        nothing = jnp.zeros((*self.batch, 0, *self.row), self.dtype)
        return make(self, nothing, jnp.zeros((*self.batch, 0), self.index_dtype))

    def vspace_add(self, x: Any, y: Any) -> Any:
        return AddRows(jax.typeof(x), jax.typeof(y))(x, y)

    def inc_rank(self, size: int | None, spec: Any) -> "RowsType":
        if spec is None:
            return self
        assert spec == 0, spec
        return dataclasses.replace(self, batch=(int(size or 0), *self.batch))

    def dec_rank(self, size: int | None, spec: Any) -> "RowsType":
        return self if spec is None else dataclasses.replace(self, batch=self.batch[1:])

    def leading_axis_spec(self) -> Any:
        raise TypeError(
            f"{self} cannot be stacked, or taken apart, by jax.lax.scan: return values and "
            "indices, as in (grads['table'].values, grads['table'].indices)"
        )


class Rows(IndexedSlices):
    """Rows of a table as one leaf of a pytree: what ``jax.grad`` returns.

    Where ``filled`` is known, the last ``room`` entries were filled one after another, and
    there are ``filled`` of them.
    """

    type: RowsType
    filled: Any

    @property  # type: ignore[misc]
    def values(self) -> Any:
        """``[K, *D]``; NaN if more entries came than there is room for."""
        if self.filled is None or not jnp.issubdtype(self.held_values.dtype, jnp.inexact):
            return self.held_values
        too_many = self.filled > self.type.room
        return jnp.where(too_many, jnp.nan, self.held_values)

    @property
    def held_values(self) -> Any:
        return vars(self)["values"]

    def __reduce__(self) -> Any:
        parts = self.type, self.held_values, self.indices, self.filled
        return rows_of, parts

    @property
    def plain(self) -> IndexedSlices:
        """The same as a pytree of arrays."""
        return IndexedSlices.of(self.values, self.indices, self.dense_shape, self.facts)


def _of_plain(name: str) -> Any:
    """A method that runs a program of its own, which takes arrays."""
    method = getattr(IndexedSlices, name)
    run = lambda rows, *args, **kwargs: method(rows.plain, *args, **kwargs)  # noqa: E731
    return functools.wraps(method)(run)


for _key in ("to_dense", "coalesce", "sum", "mean", "square_sum"):
    setattr(Rows, _key, _of_plain(_key))


def rows_of(type: RowsType, values: Any, numbers: Any, filled: Any = None) -> Rows:
    rows = Rows.of(values, numbers, type.table.shape)
    vars(rows).update(type=type, filled=filled)
    return rows


def _type_of(rows: Rows) -> RowsType:
    table = rows.type.table
    return dataclasses.replace(rows.type, table=table.update(dtype=rows.dtype))


hijax.register_hitype(Rows, _type_of)


def is_zero(x: Any) -> bool:
    return isinstance(x, hijax.Zero)


class RowsPrimitive(hijax.HiPrim):
    """A function that is linear in its rows or values; its rules follow from ``jvp``."""

    def __init__(self, out: Any, *operands: Any, **params: Any) -> None:
        self.in_avals, self.out_aval = operands, out
        self.params = params
        super().__init__()

    lin, linearized = hijax.linearize_from_jvp
    vjp_fwd, vjp_bwd_retval = hijax.vjp_from_jvp

    def batch(self, axis_data: Any, args: Any, dims: Any) -> Any:
        if all(d is None for d in dims):
            return self(*args), None
        return self.batched(axis_data, args, dims), 0

    def batched(self, axis_data: Any, args: Any, dims: Any) -> Any:
        """The results of a batch, along their first axis."""
        raise NotImplementedError(f"{type(self).__name__} under jax.vmap")


class MakeRows(RowsPrimitive):
    """From values and row numbers to rows."""

    def expand(self, values: Any, numbers: Any) -> Rows:
        return rows_of(self.out_aval, values, numbers)

    def jvp(self, primals: Any, tangents: Any) -> Any:
        values, numbers = tangents[0], primals[1]
        zero = is_zero(values)
        tangent = hijax.Zero(self.out_aval) if zero else self(values, numbers)
        return self(*primals), tangent

    def transpose(self, cotangent: Any, values: Any, numbers: Any) -> None:
        values.accum(read(cotangent, numbers, len(self.out_aval.batch)))

    def batched(self, axis_data: Any, args: Any, dims: Any) -> Any:
        type = self.out_aval.inc_rank(axis_data.size, 0)
        return make(type, *hijax.bdims_at_front(axis_data, args, dims))


class AddRows(RowsPrimitive):
    """The sum of two: the entries of both."""

    def __init__(self, a: RowsType, b: RowsType) -> None:
        super().__init__(max(a, b, key=lambda x: len(x.batch)), a, b)

    def expand(self, a: Rows, b: Rows) -> Rows:
        type = self.out_aval
        a, b = _with_batch(a, type.batch), _with_batch(b, type.batch)
        if b.filled is None:
            a, b = b, a
        if a.filled is not None:
            return _joined(type, a, b)
        if b.filled is None and 0 in (a.indices.shape[-1], b.indices.shape[-1]):
            return a if a.indices.shape[-1] else b
        both = concat_slices([plain_parts(a), plain_parts(b)])
        return rows_of(type, both.values, both.indices, b.filled)

    def jvp(self, primals: Any, tangents: Any) -> Any:
        return self(*primals), self(*map(hijax.instantiate_zeros, tangents))

    def transpose(self, cotangent: Any, *parts: Any) -> None:
        for part in parts:
            if isinstance(part, hijax.GradAccum):
                part.accum(cotangent)

    def batched(self, axis_data: Any, args: Any, dims: Any) -> Any:
        return AddRows(*map(jax.typeof, args))(*args)


def plain_parts(rows: Rows) -> IndexedSlices:
    return IndexedSlices.of(rows.held_values, rows.indices, rows.dense_shape)


def _with_batch(rows: Rows, batch: tuple[int, ...]) -> Rows:
    """Rows with these leading axes, of which they may lack the first."""
    values, numbers = rows.held_values, rows.indices
    if numbers.shape[:-1] == batch:
        return rows
    values = jnp.broadcast_to(values, batch + values.shape[numbers.ndim - 1 :])
    numbers = jnp.broadcast_to(numbers, batch + numbers.shape[-1:])
    type = dataclasses.replace(rows.type, batch=batch)
    return rows_of(type, values, numbers, rows.filled)


def _put(at: Any, axis: int) -> Any:
    """Writes an array into a larger one."""
    return lambda x, y: lax.dynamic_update_slice_in_dim(x, y, at, axis)


def _new_and_filled(rows: Rows) -> Any:
    """Values and numbers of the entries that came last, and of those in the room."""
    axis, room = len(rows.type.batch), rows.type.room
    new = rows.indices.shape[axis] - room
    return [
        [lax.slice_in_dim(x, *ends, axis=axis) for x in (rows.held_values, rows.indices)]
        for ends in ((0, new), (new, new + room))
    ]


def _joined(type: RowsType, a: Rows, b: Rows) -> Rows:
    """The sum of two that were filled: what was filled of one follows that of the other."""
    axis, parts = len(type.batch), []
    pairs = zip(_new_and_filled(a), _new_and_filled(b), strict=True)
    (new_a, new_b), (held_a, held_b) = pairs
    for k in range(2):
        twice = lax.concatenate([held_a[k], held_b[k]], axis)  # which leaves no gaps
        held = lax.slice_in_dim(
            _put(a.filled, axis)(twice, held_b[k]), 0, type.room, axis=axis
        )
        parts.append(lax.concatenate([new_a[k], new_b[k], held], axis))
    return rows_of(type, *parts, a.filled + b.filled)


class Entries(RowsPrimitive):
    """Values and row numbers, of which there are as many as there is room for."""

    def __init__(self, type: RowsType) -> None:
        super().__init__(tuple(type.lo_ty()[:2]), type)

    def expand(self, rows: Rows) -> Any:
        type = rows.type
        rows = type.raise_val(*type.lower_val(rows))
        return rows.values, rows.indices


class ReadRows(RowsPrimitive):
    """What rows hold at row numbers: the sum of their entries there; else zero."""

    def expand(self, rows: Rows, numbers: Any) -> Any:
        return _sums_at(rows.plain, numbers)

    def jvp(self, primals: Any, tangents: Any) -> Any:
        rows, numbers = tangents[0], primals[1]
        tangent = hijax.Zero(self.out_aval) if is_zero(rows) else self(rows, numbers)
        return self(*primals), tangent

    def transpose(self, cotangent: Any, rows: Any, numbers: Any) -> None:
        type = self.in_avals[0]
        axes = len(type.batch)
        flat = numbers.reshape(*numbers.shape[:axes], -1)
        values = cotangent.reshape(*flat.shape, *type.row)
        rows.accum(make(type, values, flat))

    def batched(self, axis_data: Any, args: Any, dims: Any) -> Any:
        rows, numbers = args
        type, axes = jax.typeof(rows), len(self.in_avals[0].batch)
        numbers = hijax.bdims_at_front(axis_data, (numbers,), (dims[1],))[0]
        if dims[0] is None:
            wide = type.inc_rank(axis_data.size, 0)
            rows = AddRows(type, wide)(rows, wide.vspace_zero())
        return read(rows, numbers, axes + 1)


def _sums_at(rows: IndexedSlices, numbers: jax.Array) -> jax.Array:
    if rows.indices.ndim > 1:
        return jax.vmap(_sums_at)(rows, numbers)
    if rows.indices.size == 0:
        return jnp.zeros((*numbers.shape, *rows.values.shape[1:]), rows.dtype)
    distinct = rows.coalesce()
    place = jnp.searchsorted(distinct.indices, numbers)
    held = distinct.indices.at[place].get(mode="fill", fill_value=-1) == numbers
    at_once = distinct.values.at[place].get(mode="fill", fill_value=0)
    return jnp.where(
        held.reshape(*held.shape, *(1,) * (at_once.ndim - held.ndim)), at_once, 0
    )


def make(type: RowsType, values: Any, numbers: Any) -> Any:
    """Rows of values ``[*batch, K, *D]`` and row numbers ``[*batch, K]``."""
    return MakeRows(type, jax.typeof(values), jax.typeof(numbers))(values, numbers)


def read(rows: Any, numbers: Any, axes: int = 0) -> Any:
    """``[*numbers, *D]``; ``axes``: how many axes of a batch both begin with."""
    type = jax.typeof(rows)
    out = hijax.ShapedArray((*numbers.shape, *type.row), type.dtype)
    return ReadRows(out, type, jax.typeof(numbers))(rows, numbers)
