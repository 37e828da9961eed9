"""What a variable of the program is, in terms of the tables it was made from.

A *view* stands for an array of V rows that is never computed. It knows how to give some
of its rows by looking up those rows in the tables underneath and doing to them what the
program did to the whole: ``f(table)[ids] == f(table[ids])`` for a row-wise ``f``.

While the program is only read (``walk``), the arrays inside a view are None.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jslices._rows.bounds import take_rows

Mode = lax.GatherScatterMode


@dataclasses.dataclass(frozen=True)
class Ids:
    """Row numbers ``[n]`` to read from a view.

    Attributes:
      name: tells these row numbers from others in the same lookup; equal names mean equal
        numbers.
      read: the rows to read, all in ``[0, V)``.
      record: what the slices will hold, where out of range means no gradient. Both are
        None while the program is only read.
    """

    name: tuple[Any, ...] = ()
    read: Any = None
    record: Any = None

    def renumbered(self, how: tuple[Any, ...], inside: Callable[..., Any]) -> "Ids":
        """The same rows by their numbers in another array.

        ``inside(read, record)`` gives the new ones; ``how`` tells it from others.
        """
        name = (*self.name, how)
        return (
            Ids(name) if self.read is None else Ids(name, *inside(self.read, self.record))
        )


class Reader:
    """Reads rows of tables during one lookup, every row once however often it is used.

    Args:
      take: ``take(leaf, table, ids) -> rows``.
      bare: reads without asking for a gradient; None for the reader that is itself bare.
      runs: False if nothing is computed, only the reads are counted.
    """

    def __init__(self, take: Callable[..., Any], bare: bool = False, runs: bool = True):
        self.take, self.runs = take, runs
        self.bare = self if bare else Reader(just_read, bare=True, runs=runs)
        self._seen: dict[Any, Any] = {}

    def once(self, what: Any, ids: Ids, compute: Callable[[], Any]) -> Any:
        """``compute()``, or what it gave before for the same thing and row numbers."""
        key = (what if isinstance(what, int) else id(what), isinstance(what, int), ids.name)
        if key not in self._seen:
            # The view is kept as well, so that its id stays its own.
            self._seen[key] = (what, compute())
        return self._seen[key][1]


def just_read(leaf: int, table: jax.Array, ids: Ids) -> Any:
    """Rows of a table, with no slot for their gradient."""
    return None if ids.read is None else take_rows(table, ids.read, mode="clip")


@dataclasses.dataclass(frozen=True, eq=False)
class View:
    """An array ``shape`` = ``[V, *D]`` that is computed row by row, on demand."""

    shape: tuple[int, ...]
    dtype: Any

    def rows(self, ids: Ids, reader: Reader) -> Any:
        """``[n, *D]`` at ``ids.read``, the gradient going to ``ids.record``."""
        return reader.once(self, ids, lambda: self._rows(ids, reader))

    def _rows(self, ids: Ids, reader: Reader) -> Any:
        raise NotImplementedError

    def whole(self) -> jax.Array:
        """The array itself, all of it: for uses through which no gradient flows."""
        raise NotImplementedError

    def leaves(self) -> list[int]:
        """The leaf of every read that ``rows`` makes, in the order it makes them."""
        found: list[int] = []
        self.rows(Ids(), Reader(lambda leaf, *_: found.append(leaf), runs=False))
        return found


@dataclasses.dataclass(frozen=True, eq=False)
class Table(View):
    """A differentiated leaf, as it is."""

    leaf: int
    array: Any = None

    def rows(self, ids: Ids, reader: Reader) -> Any:
        return reader.once(self.leaf, ids, lambda: reader.take(self.leaf, self.array, ids))

    def whole(self) -> jax.Array:
        return self.array


@dataclasses.dataclass(frozen=True, eq=False)
class Rowwise(View):
    """An operation that treats every row alike.

    ``operands`` are views, arrays with V rows (whose rows are then taken as well), or
    arrays that serve all rows (scalars, or one row).
    """

    apply: Callable[[Sequence[Any], int], jax.Array]
    operands: tuple[Any, ...]

    def _rows(self, ids: Ids, reader: Reader) -> Any:
        def rows_of(operand: Any) -> Any:
            if isinstance(operand, View):
                return operand.rows(ids, reader)
            if not reader.runs or jnp.ndim(operand) == 0:
                return operand
            if operand.shape[0] != self.shape[0]:
                return operand
            return take_rows(operand, ids.read, mode="clip")

        rows = [rows_of(operand) for operand in self.operands]
        return self.apply(rows, ids.read.shape[0]) if reader.runs else None

    def whole(self) -> jax.Array:
        return self.apply([whole(operand) for operand in self.operands], self.shape[0])


@dataclasses.dataclass(frozen=True, eq=False)
class Repeated(View):
    """An array ``[*B, V, *D]``, a table for every example of a batch.

    ``vmap`` of a ``cond`` whose branch differs between examples makes one: it repeats what
    the branches read, and selects. ``flat`` is the same as ``[prod(B) * V, *D]``, and
    ``lead`` the number of axes of ``[*B, V]``.
    """

    flat: View
    lead: int

    def _rows(self, ids: Ids, reader: Reader) -> Any:
        return self.flat.rows(ids, reader)

    def whole(self) -> jax.Array:
        return self.flat.whole().reshape(self.shape)


def leading(view: View) -> int:
    """How many leading axes number the rows of a view: 1, but for repeated tables."""
    return view.lead if isinstance(view, Repeated) else 1


def flat(view: View) -> View:
    """The view with one axis of rows."""
    return view.flat if isinstance(view, Repeated) else view


@dataclasses.dataclass(frozen=True, eq=False)
class Unslotted(View):
    """A view through which no gradient is asked for: read row by row, without a slot."""

    inner: View

    def _rows(self, ids: Ids, reader: Reader) -> Any:
        return self.inner.rows(ids, reader.bare)

    def whole(self) -> jax.Array:
        return self.inner.whole()


@dataclasses.dataclass(frozen=True, eq=False)
class Stopped(Unslotted):
    """A view behind ``stop_gradient``: no derivative of any kind goes through."""

    def _rows(self, ids: Ids, reader: Reader) -> Any:
        rows = super()._rows(ids, reader)
        return lax.stop_gradient(rows) if reader.runs else None

    def whole(self) -> jax.Array:
        return lax.stop_gradient(self.inner.whole())


def without_slots(value: Any) -> Any:
    """A view as one through which no gradient is asked for; anything else as it is."""
    if isinstance(value, Repeated):
        return dataclasses.replace(value, flat=without_slots(value.flat))
    if isinstance(value, View) and not isinstance(value, Unslotted):
        return Unslotted(value.shape, value.dtype, value)
    return value


def whole(value: Any) -> Any:
    """The array behind a view; anything else as it is."""
    return value.whole() if isinstance(value, View) else value


def look_up(
    view: View,
    ids: jax.Array,
    mode: Mode,
    fill_value: Any,
    take: Callable[..., Any],
    good: jax.Array | None = None,
) -> jax.Array:
    """``view[ids]`` for ``ids`` ``[n]``, a bad id treated as JAX's ``mode`` does.

    The gradient follows the mode: a clipped id counts for the edge row, any other bad id
    for none. ``take(leaf, table, ids, mode, fill_value)`` reads a table. ``good`` tells
    the good ids where their range does not, all of them being in it.
    """
    view = flat(view)
    height = view.shape[0]
    if good is not None and mode != Mode.CLIP:
        record = jnp.where(good, ids, height)
        rows = view.rows(Ids((), ids, record), Reader(take))
        return _masked(rows, good, mode, fill_value)
    if isinstance(view, Table):
        record = jnp.clip(ids, 0, max(height - 1, 0)) if mode == Mode.CLIP else ids
        return take(view.leaf, view.array, Ids((), ids, record), mode, fill_value)
    read = jnp.clip(ids, 0, max(height - 1, 0))
    record = read if mode == Mode.CLIP else ids
    rows = view.rows(Ids((), read, record), Reader(take))
    if mode == Mode.CLIP:
        return rows
    return _masked(rows, (ids >= 0) & (ids < height), mode, fill_value)


def _masked(rows: Any, good: jax.Array, mode: Mode, fill_value: Any) -> jax.Array:
    good = good.reshape((-1,) + (1,) * (rows.ndim - 1))
    if mode == Mode.FILL_OR_DROP:
        return jnp.where(good, rows, _fill(fill_value, rows.dtype))
    # A bad id reads the edge row, but no gradient comes back, neither to the table nor to
    # whatever else the rows were made from.
    return jnp.where(good, rows, lax.stop_gradient(rows))


def _fill(fill_value: Any, dtype: Any) -> Any:
    """JAX's own default: NaN, the smallest signed, the largest unsigned integer."""
    if fill_value is None:
        if jnp.issubdtype(dtype, jnp.inexact):
            fill_value = np.nan
        elif jnp.issubdtype(dtype, jnp.bool_):
            fill_value = True
        else:
            limits = jnp.iinfo(dtype)
            fill_value = limits.min if limits.min < 0 else limits.max
    # NumPy's, because jax_debug_nans would refuse a NaN made by JAX.
    return np.array(fill_value, dtype)
