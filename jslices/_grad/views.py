"""What a variable of the program is, in terms of the tables it was made from.

A *view* stands for an array of V rows that is never computed. It knows how to give some
of its rows by looking up those rows in the tables underneath and doing to them what the
program did to the whole: ``f(table)[ids] == f(table[ids])`` for a row-wise ``f``.

While the program is only read (``walk``), the arrays inside a view are None.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jslices._bounds import take_rows

Mode = lax.GatherScatterMode


class Take(Protocol):
    """Reads rows of one leaf: at ``read``, while ``record`` is what the slices hold."""

    def __call__(
        self,
        leaf: int,
        table: jax.Array,
        read: jax.Array,
        record: jax.Array,
        mode: Any = "clip",
        fill_value: Any = None,
    ) -> jax.Array: ...


@dataclasses.dataclass(frozen=True)
class View:
    """An array ``shape`` = ``[V, *D]`` that is computed row by row, on demand."""

    shape: tuple[int, ...]
    dtype: Any

    def leaves(self) -> Iterator[int]:
        """The leaf of every read that ``rows`` makes, in the order it makes them."""
        raise NotImplementedError

    def rows(self, read: jax.Array, record: jax.Array, take: Take) -> jax.Array:
        """``[n, *D]`` at ``read`` ``[n]``, all in ``[0, V)``; gradient to ``record``."""
        raise NotImplementedError

    def whole(self) -> jax.Array:
        """The array itself, all of it: for uses through which no gradient flows."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Table(View):
    """A differentiated leaf, as it is."""

    leaf: int
    array: Any = None

    def leaves(self) -> Iterator[int]:
        yield self.leaf

    def rows(self, read: jax.Array, record: jax.Array, take: Take) -> jax.Array:
        return take(self.leaf, self.array, read, record)

    def whole(self) -> jax.Array:
        return self.array


@dataclasses.dataclass(frozen=True)
class Rowwise(View):
    """An operation that treats every row alike.

    ``operands`` are views, arrays with V rows (whose rows are then taken as well), or
    arrays that serve all rows (scalars, or one row).
    """

    apply: Callable[[Sequence[Any]], jax.Array]
    apply_whole: Callable[[Sequence[Any]], jax.Array]
    operands: tuple[Any, ...]

    def leaves(self) -> Iterator[int]:
        for operand in self.operands:
            if isinstance(operand, View):
                yield from operand.leaves()

    def rows(self, read: jax.Array, record: jax.Array, take: Take) -> jax.Array:
        def rows_of(operand: Any) -> Any:
            if isinstance(operand, View):
                return operand.rows(read, record, take)
            if jnp.ndim(operand) == 0 or operand.shape[0] != self.shape[0]:
                return operand
            return take_rows(operand, read, mode="clip")

        return self.apply([rows_of(operand) for operand in self.operands])

    def whole(self) -> jax.Array:
        return self.apply_whole([whole(operand) for operand in self.operands])


@dataclasses.dataclass(frozen=True)
class Stacked(View):
    """Several arrays, one below the other: ``concatenate`` on axis 0."""

    parts: tuple[Any, ...]
    heights: tuple[int, ...]

    def leaves(self) -> Iterator[int]:
        for part in self.parts:
            if isinstance(part, View):
                yield from part.leaves()

    def rows(self, read: jax.Array, record: jax.Array, take: Take) -> jax.Array:
        column = (-1,) + (1,) * (len(self.shape) - 1)
        out = jnp.zeros((*read.shape, *self.shape[1:]), self.dtype)
        above = 0
        for part, height in zip(self.parts, self.heights, strict=True):
            here = (read >= above) & (read < above + height)
            local = jnp.clip(read - above, 0, max(height - 1, 0))
            # Rows of the other parts are empty slots in this one.
            mine = record - above
            mine = jnp.where((mine >= 0) & (mine < height), mine, height)
            if height == 0:
                continue
            if isinstance(part, View):
                rows = part.rows(local, mine, take)
            else:
                rows = take_rows(part, local, mode="clip")
            out = jnp.where(here.reshape(column), rows, out)
            above += height
        return out

    def whole(self) -> jax.Array:
        return jnp.concatenate([whole(part) for part in self.parts])


@dataclasses.dataclass(frozen=True)
class Window(View):
    """Consecutive rows of a view, from row ``above`` on: ``table[1:]``."""

    inner: View
    above: int

    def leaves(self) -> Iterator[int]:
        return self.inner.leaves()

    def rows(self, read: jax.Array, record: jax.Array, take: Take) -> jax.Array:
        inside = (record >= 0) & (record < self.shape[0])
        record = jnp.where(inside, record + self.above, self.inner.shape[0])
        return self.inner.rows(read + self.above, record, take)

    def whole(self) -> jax.Array:
        return self.inner.whole()[self.above : self.above + self.shape[0]]


@dataclasses.dataclass(frozen=True)
class Unslotted(View):
    """A view through which no gradient is asked for: read row by row, without a slot."""

    inner: View

    def leaves(self) -> Iterator[int]:
        return iter(())

    def rows(self, read: jax.Array, record: jax.Array, take: Take) -> jax.Array:
        return self.inner.rows(read, record, just_read)

    def whole(self) -> jax.Array:
        return self.inner.whole()


@dataclasses.dataclass(frozen=True)
class Stopped(Unslotted):
    """A view behind ``stop_gradient``: no derivative of any kind goes through."""

    def rows(self, read: jax.Array, record: jax.Array, take: Take) -> jax.Array:
        return lax.stop_gradient(super().rows(read, record, take))

    def whole(self) -> jax.Array:
        return lax.stop_gradient(self.inner.whole())


def just_read(
    leaf: int,
    table: jax.Array,
    read: jax.Array,
    record: jax.Array,
    mode: Any = "clip",
    fill_value: Any = None,
) -> jax.Array:
    """A :class:`Take` that takes no slot."""
    return take_rows(table, read, mode=mode, fill_value=fill_value)


def without_slots(value: Any) -> Any:
    """A view as one through which no gradient is asked for; anything else as it is."""
    if isinstance(value, View) and not isinstance(value, Unslotted):
        return Unslotted(value.shape, value.dtype, value)
    return value


def whole(value: Any) -> Any:
    """The array behind a view; anything else as it is."""
    return value.whole() if isinstance(value, View) else value


def look_up(
    view: View, ids: jax.Array, mode: Mode, fill_value: Any, take: Take
) -> jax.Array:
    """``view[ids]`` for ``ids`` ``[n]``, a bad id treated as JAX's ``mode`` does.

    The gradient follows the mode: a clipped id counts for the edge row, any other bad id
    for none.
    """
    height = view.shape[0]
    clipped = jnp.clip(ids, 0, max(height - 1, 0))
    record = clipped if mode == Mode.CLIP else ids
    if isinstance(view, Table):
        return take(view.leaf, view.array, ids, record, mode, fill_value)
    rows = view.rows(clipped, record, take)
    if mode == Mode.CLIP:
        return rows
    good = ((ids >= 0) & (ids < height)).reshape((-1,) + (1,) * (rows.ndim - 1))
    if mode == Mode.FILL_OR_DROP:
        return jnp.where(good, rows, _fill(fill_value, rows.dtype))
    # A bad id reads the edge row, but no gradient comes back, neither to the table nor to
    # whatever else the rows were made from.
    return jnp.where(good, rows, lax.stop_gradient(rows))


def _fill(fill_value: Any, dtype: Any) -> jax.Array:
    """JAX's own default: NaN, the smallest signed, the largest unsigned integer."""
    if fill_value is None:
        if jnp.issubdtype(dtype, jnp.inexact):
            fill_value = jnp.nan
        elif jnp.issubdtype(dtype, jnp.bool_):
            fill_value = True
        else:
            limits = jnp.iinfo(dtype)
            fill_value = limits.min if limits.min < 0 else limits.max
    return jnp.array(fill_value, dtype)
