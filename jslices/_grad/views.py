"""Views: variables of a program in terms of the tables that they were computed from.

A *view* represents an array ``[V, *D]`` that is never computed. It knows which rows of
which arrays its own rows are made from, and how: ``f(table)[ids] == f(table[ids])`` for a
row-wise ``f``. Reading rows of a view therefore ends in reading rows of tables.

A program is walked twice (walk.py). While its reads are planned there are no values:
arrays and row numbers are None, and a read of a view only lists the tables that it reads.

A kind of view says which parts its rows are made of, how, and what it is as a whole. Begin
with :class:`View` and :class:`Rowwise`; rules.py makes views, and reads.py reads them.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jslices._grad.now import now_p
from jslices._place.boundary import drop_sharding
from jslices._rows.access import clipped_indices, per_row, places, take_rows, wide

#: For each operand, or output, a view or an array (None while reads are planned).
Values: TypeAlias = Sequence[Any]
Kind = TypeVar("Kind")

#: Tables by whether they are read with a cotangent slot, the leaf, the name of row numbers.
Reads: TypeAlias = "dict[tuple[bool, int, tuple[Any, ...]], TableView]"


@dataclasses.dataclass(frozen=True)
class RowIds:
    """Row numbers ``[n]`` to read from a view; None while reads are planned."""

    name: tuple[Any, ...] = ()  # in one lookup equal names mean equal numbers
    read: Any = None  # the rows to read, all in ``[0, V)``
    record: Any = None  # the indices of the gradient: none for those out of range

    def renumbered(self, key: tuple[Any, ...], number: Callable[..., Any]) -> "RowIds":
        """The same rows by their numbers in another array.

        ``number(read, record)`` gives those; equal keys mean equal functions.
        """
        name = (*self.name, key)
        if self.read is None:
            return RowIds(name)
        return RowIds(name, *number(self.read, self.record))


@dataclasses.dataclass(frozen=True, eq=False)
class View:
    """An array ``shape`` = ``[V, *D]`` whose rows are computed on demand."""

    shape: tuple[int, ...]
    dtype: Any
    #: How many leading axes number the rows: 1, except for repeated tables.
    lead: int = dataclasses.field(default=1, init=False)

    def parts(self, ids: RowIds) -> Sequence[tuple[Any, RowIds | None]]:
        """The parts that the rows at ``ids`` are made from.

        Views and arrays, each with the numbers of its rows, or with None for an array that
        serves all rows.
        """
        raise NotImplementedError

    def combine(self, parts: Sequence[Any], ids: RowIds) -> jax.Array:
        """The rows ``[n, *D]`` at ``ids``, from those of ``parts(ids)``."""
        raise NotImplementedError

    def whole(self, of: Callable[[Any], Any]) -> jax.Array:
        """The array itself; ``of(part)`` gives that of a part."""
        raise NotImplementedError

    @property
    def forward(self) -> "View":
        """The view where no gradient is needed."""
        return self

    @functools.cached_property
    def reads(self) -> Reads:
        """The tables whose rows a read takes, in the order of the reads."""
        found: Reads = {}
        for part, ids in self.parts(RowIds()):
            if isinstance(part, View) and ids is not None:
                for (slotted, leaf, name), table in part.reads.items():
                    found.setdefault((slotted, leaf, (*ids.name, *name)), table)
        return found


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def _view(*parts: str) -> Callable[[type[Kind]], type[Kind]]:
    """A decorator for views: pytrees of these parts, so that they may cross ``jax.jit``."""

    def register(kind: type[Kind]) -> type[Kind]:
        kind = dataclasses.dataclass(frozen=True, eq=False)(kind)
        fields = (f.name for f in dataclasses.fields(kind) if f.init)  # type: ignore[arg-type]
        others = [name for name in fields if name not in parts]
        return jax.tree_util.register_dataclass(kind, parts, others)

    return register


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Now:
    """How a table becomes what it is now: see now.py."""

    params: tuple[tuple[str, Any], ...] = dataclasses.field(metadata={"static": True})
    rows: tuple[Any, ...]  # arrays with rows for those of the table
    shared: tuple[Any, ...]  # arrays that serve all rows

    def of(self, p: jax.Array, rows: Iterable[jax.Array], whole: bool) -> jax.Array:
        """The whole table, or some rows of it; ``rows`` are those beside them."""
        shared = map(drop_sharding, self.shared)
        params = dict(self.params) | {"whole": whole}
        return now_p.bind(p, *rows, *shared, **params)  # type: ignore[no-any-return]


@_view("array", "now")
class TableView(View):
    """A differentiated array as it is, or as it is ``now``: the leaf with this number.

    Several axes of ``array`` may number the rows; it keeps its shape (:func:`places` says
    why).
    """

    leaf: int
    array: Any = None
    now: Now | None = None
    caught_up: bool = False  # whether it is now what it is

    @property
    def reads(self) -> Reads:  # type: ignore[override]
        return {(True, self.leaf, () if self.now is None else (("now", self),)): self}

    @property
    def row_axes(self) -> int:
        """How many axes of the array number the rows."""
        return 1 + self.array.ndim - len(self.shape)

    def take(self, ids: jax.Array, mode: Any, fill_value: Any = None) -> jax.Array:
        """The rows ``[n, *D]``, without a gradient."""
        how = {"mode": mode, "fill_value": fill_value, "row_axes": self.row_axes}
        take = lambda x: take_rows(drop_sharding(x), ids, **how)  # noqa: E731
        if self.now is None:
            return take(self.array)
        return self.now.of(take(self.array), map(take, self.now.rows), whole=False)

    def as_it_is_now(self) -> jax.Array:
        """The whole array, in its own shape."""
        now, array = self.now, self.array
        return array if now is None else now.of(array, now.rows, whole=True)  # type: ignore[no-any-return]

    def whole(self, of: Callable[[Any], Any]) -> jax.Array:
        array = self.as_it_is_now()
        if array.shape == self.shape:
            return array
        # On Explicit axes JAX does not merge axes if the second is split.
        return drop_sharding(array).reshape(self.shape)


@dataclasses.dataclass(frozen=True)
class Keyed:
    """A function that counts as the same as others with an equal key."""

    function: Callable[[Values, int], jax.Array] = dataclasses.field(compare=False)
    key: tuple[Any, ...]
    #: Of a function with a derivative of its own, as that computes it: JAX runs this in
    #: a gradient, whether it comes in there or not.
    forward: Any = dataclasses.field(compare=False, default=None)


@_view("operands")
class Rowwise(View):
    """The result of an operation that treats every row alike.

    ``apply.function(operands, n)`` computes n rows from n rows of the operands, except that
    the ``shared`` ones serve all rows.
    """

    apply: Keyed
    operands: tuple[Any, ...]
    shared: tuple[bool, ...]

    def parts(self, ids: RowIds) -> Sequence[tuple[Any, RowIds | None]]:
        pairs = zip(self.operands, self.shared, strict=True)
        return [(operand, None if shared else ids) for operand, shared in pairs]

    def combine(self, parts: Sequence[Any], ids: RowIds) -> jax.Array:
        return self.apply.function(parts, ids.read.shape[0])

    def whole(self, of: Callable[[Any], Any]) -> jax.Array:
        return self.apply.function(list(map(of, self.operands)), self.shape[0])

    @property
    def forward(self) -> View:
        rule = self.apply.forward
        return self if rule is None else dataclasses.replace(self, apply=Keyed(rule, ()))


@dataclasses.dataclass(frozen=True, eq=False)
class Derived(View):
    """The rows of another view, ``inner``: here the same ones."""

    inner: View

    def parts(self, ids: RowIds) -> Sequence[tuple[Any, RowIds | None]]:
        return [(self.inner, ids)]

    def combine(self, parts: Sequence[Any], ids: RowIds) -> jax.Array:
        return parts[0]

    def whole(self, of: Callable[[Any], Any]) -> jax.Array:
        return of(self.inner)


@_view("inner", "starts")
class Renumbered(Derived):
    """Rows of another view under other numbers, such as consecutive ones: ``table[1:]``.

    For each of the axes ``heights`` that number the rows of ``inner`` there is one of
    ``numbering``, ``(axis, start, step)``: row number i along ``axis`` of ``rows`` is row
    number ``start + step * i``. A *window* begins at ``starts`` instead, all in range: the
    table of one layer among those of all layers, in a loop over these.
    """

    heights: tuple[int, ...]
    rows: tuple[int, ...]
    numbering: tuple[tuple[int, int, int], ...]
    starts: tuple[Any, ...] = ()  # ``[]`` for each of the axes

    def number(self, x: jax.Array) -> jax.Array:
        """The number of a row in ``inner``."""
        x = wide(x, self.inner.shape[0])
        # While rows are read, all axes of a mesh are Auto.
        starts = [drop_sharding(start).astype(x.dtype) for start in self.starts]
        starts = starts or [start for _, start, _ in self.numbering]
        columns = zip(self.heights, self.numbering, starts, strict=True)
        along, result = places(x, self.rows, len(self.rows)), None
        for height, (axis, _, step), start in columns:
            # XLA would compile a product with 1, too, of each of many reads.
            own = along[axis] if step == 1 else step * along[axis]
            own = own if isinstance(start, int) and start == 0 else own + start
            result = own if result is None else result * height + own
        return x if result is None else result

    def parts(self, ids: RowIds) -> Sequence[tuple[Any, RowIds | None]]:
        def inside(read: jax.Array, record: jax.Array) -> tuple[jax.Array, jax.Array]:
            good = (record >= 0) & (record < self.shape[0])
            record = jnp.where(good, self.number(record), self.inner.shape[0])
            return self.number(read), record

        which = self if self.starts else None
        key = ("rows", self.heights, self.rows, self.numbering, which)
        return [(self.inner, ids.renumbered(key, inside))]

    def whole(self, of: Callable[[Any], Any]) -> jax.Array:
        row, axes = self.shape[1:], [axis for axis, _, _ in self.numbering]
        array = of(self.inner).reshape(*self.heights, *row)
        if self.starts:
            starts = [*self.starts, *(jnp.zeros_like(self.starts[0]) for _ in row)]
            array = lax.dynamic_slice(array, starts, (*self.rows, *row))
        for i, (axis, start, step) in enumerate(self.numbering):
            last = start + step * (self.rows[axis] - 1)
            first, end = (start, last + 1) if step > 0 else (last, start + 1)
            array = lax.slice_in_dim(array, first, end, abs(step), axis=i)
            array = array if step > 0 else lax.rev(array, [i])
        array = lax.transpose(array, (*np.argsort(axes), *range(len(axes), array.ndim)))
        array = lax.expand_dims(array, sorted({*range(len(self.rows))} - {*axes}))
        return jnp.broadcast_to(array, (*self.rows, *row)).reshape(self.shape)


@_view("inner", "at", "rows")
class Replaced(Derived):
    """Another view with an array in place of one row.

    With a table for every example of a batch (see :class:`Repeated`) it replaces one row of
    each: in table b row ``rows[b]`` replaces number ``at[b]``.
    """

    at: Any
    rows: Any
    height: int

    def parts(self, ids: RowIds) -> Sequence[tuple[Any, RowIds | None]]:
        def others(read: jax.Array, record: jax.Array) -> tuple[jax.Array, jax.Array]:
            return read, jnp.where(self._here(read), self.shape[0], record)

        return [(self.inner, ids.renumbered(("but", self), others)), (self.rows, None)]

    def combine(self, parts: Sequence[Any], ids: RowIds) -> jax.Array:
        others, rows = parts
        here = per_row(self._here(ids.read), rows)
        return jnp.where(here, self._for_each(rows, ids.read), others)

    def whole(self, of: Callable[[Any], Any]) -> jax.Array:
        every = RowIds((), jnp.arange(self.shape[0]))
        return self.combine([of(self.inner), self.rows], every)

    def _here(self, numbers: jax.Array) -> jax.Array:
        """True for the numbers of the rows that others replace."""
        return self._for_each(self.at, numbers) == numbers % self.height

    def _for_each(self, x: jax.Array, numbers: jax.Array) -> Any:
        """The element of ``x``, one for each table, for the table of each row number."""
        x = x.astype(numbers.dtype) if x is self.at else x
        return x if self.height == self.shape[0] else x[numbers // self.height]


@_view("arrays")
class Stacked(View):
    """Several arrays below one another: ``concatenate`` along the axis of rows.

    Each may hold a table for every example of a batch (see :class:`Repeated`), below one
    another as well. ``heights`` are the rows of each array for one example.
    """

    arrays: tuple[Any, ...]
    heights: tuple[int, ...]

    def parts(self, ids: RowIds) -> Sequence[tuple[Any, RowIds | None]]:
        return [(array, self._below(ids, *place)) for array, *place in self._filled()]

    def combine(self, parts: Sequence[Any], ids: RowIds) -> jax.Array:
        row, out = ids.read % sum(self.heights), parts[0]
        for rows, (_, above, height) in zip(parts[1:], self._filled()[1:], strict=True):
            here = (row >= above) & (row < above + height)
            out = jnp.where(per_row(here, rows), rows, out)
        return out

    def whole(self, of: Callable[[Any], Any]) -> jax.Array:
        rest = self.shape[1:]
        examples = self.shape[0] // sum(self.heights)
        arrays = [
            of(array).reshape(examples, height, *rest)
            for array, height in zip(self.arrays, self.heights, strict=True)
        ]
        return jnp.concatenate(arrays, axis=1).reshape(self.shape)

    def _filled(self) -> list[tuple[Any, int, int]]:
        """The arrays that have rows: each with the number of rows above it, and its own."""
        above = itertools.accumulate(self.heights, initial=0)
        columns = zip(self.arrays, above, self.heights, strict=False)
        return [(array, first, height) for array, first, height in columns if height]

    def _below(self, ids: RowIds, above: int, height: int) -> RowIds:
        """The row numbers in the array that begins at ``above``, others out of range."""
        total = sum(self.heights)
        beyond = self.shape[0] // total * height

        def inside(read: jax.Array, record: jax.Array) -> tuple[jax.Array, jax.Array]:
            row = record % total - above
            good = (record >= 0) & (record < self.shape[0]) & (row >= 0) & (row < height)
            record = jnp.where(good, record // total * height + row, beyond)
            near = jnp.clip(read % total - above, 0, height - 1)
            return read // total * height + near, record

        return ids.renumbered(("below", above, height, total), inside)


@_view("inner")
class Unpacked(Derived):
    """The rows of another view cut into equal parts: ``packed.reshape(V, D)``.

    Reading a part reads the row that holds it, so the rest of that row gets a gradient of
    zeros.
    """

    @property
    def per(self) -> int:
        """How many parts a row of ``inner`` has."""
        return self.shape[0] // self.inner.shape[0]

    def parts(self, ids: RowIds) -> Sequence[tuple[Any, RowIds | None]]:
        def holding(read: jax.Array, record: jax.Array) -> tuple[jax.Array, jax.Array]:
            return read // self.per, record // self.per  # out of range remains so

        return [(self.inner, ids.renumbered(("holding", self.per), holding))]

    def combine(self, parts: Sequence[Any], ids: RowIds) -> jax.Array:
        # With a mask: gathering the parts would access three times as many bytes on a TPU.
        here = jax.nn.one_hot(ids.read % self.per, self.per, dtype=bool)
        rows = parts[0].reshape(*here.shape, *self.shape[1:])
        return jnp.where(per_row(here, rows), rows, 0).sum(axis=1, dtype=self.dtype)

    def whole(self, of: Callable[[Any], Any]) -> jax.Array:
        return of(self.inner).reshape(self.shape)


@_view("inner")
class Repeated(Derived):
    """An array ``[*B, V, *D]``, a table for every example of a batch.

    ``vmap`` of a ``cond`` whose predicate differs between examples makes one: it repeats
    what the branches read, and selects. So does ``table.reshape(F, V, D)``, of F tables
    below one another. ``inner`` is the same as ``[prod(B) * V, *D]``, and ``lead`` the
    number of axes of ``[*B, V]``.
    """

    lead: int = dataclasses.field()

    def whole(self, of: Callable[[Any], Any]) -> jax.Array:
        inner, stops = self.inner, False
        while isinstance(inner, Unslotted):
            inner, stops = inner.inner, stops or isinstance(inner, Stopped)
        if isinstance(inner, TableView) and inner.array.shape == self.shape:
            array = inner.as_it_is_now()  # which is never of the shape of `inner`
            return lax.stop_gradient(array) if stops else array
        return of(self.inner).reshape(self.shape)


@_view("inner")
class Transposed(Derived):
    """Another view with its axes in another order, so that the first numbers no rows.

    Axis ``i`` is axis ``order[i]`` of ``inner``. Only reads know what to do with it.
    """

    order: tuple[int, ...]

    def whole(self, of: Callable[[Any], Any]) -> jax.Array:
        return lax.transpose(of(self.inner), self.order)


@_view("inner")
class Unslotted(Derived):
    """A view without cotangent slots: no gradient is needed."""

    @property
    def reads(self) -> Reads:  # type: ignore[override]
        inner = self.inner.reads.items()
        return {(False, leaf, name): table for (_, leaf, name), table in inner}


@_view("inner")
class Stopped(Unslotted):
    """A view behind ``stop_gradient``: no derivative of any kind passes."""

    def combine(self, parts: Sequence[Any], ids: RowIds) -> jax.Array:
        return lax.stop_gradient(parts[0])

    def whole(self, of: Callable[[Any], Any]) -> jax.Array:
        return lax.stop_gradient(of(self.inner))


# --- views from views -------------------------------------------------------------------


def flat(view: View) -> View:
    """The view with one axis of rows."""
    return view.inner if isinstance(view, Repeated) else view


def folded(view: View, rows: tuple[int, ...]) -> View:
    """A view whose axes ``rows`` number its rows, from one with a single such axis."""
    if len(rows) == 1:
        return view
    return Repeated((*rows, *view.shape[1:]), view.dtype, lead=len(rows), inner=view)


def renumbered(
    view: View,
    rows: Sequence[int],
    numbering: Sequence[tuple[int, int, int]],
    starts: Sequence[Any] = (),
) -> View:
    """A view of some rows of another, as :class:`Renumbered`."""
    inner, rows = flat(view), tuple(rows)
    shape, heights = (math.prod(rows), *inner.shape[1:]), view.shape[: view.lead]
    numbers = heights, rows, tuple(numbering), tuple(starts)
    return folded(Renumbered(shape, view.dtype, inner, *numbers), rows)


def window(view: View, starts: Sequence[Any], sizes: Sequence[int]) -> View:
    """The view of some rows: ``sizes`` of them along each of its axes of rows.

    ``starts`` are as for ``dynamic_slice``, clipped to what fits; None while planning.
    """
    rows = view.shape[: view.lead]
    if not any(start is None for start in starts):
        limits = zip(starts, rows, sizes, strict=True)
        starts = [clipped_indices(start, n - size + 1) for start, n, size in limits]
    return renumbered(view, sizes, [(axis, 0, 1) for axis in range(view.lead)], starts)


def layer(view: Repeated, number: Any) -> View:
    """The view of the part ``[V, *D]`` of ``[L, V, *D]`` with this number."""
    rest = view.shape[1 : view.lead]
    starts = [number, *(None if number is None else jnp.zeros_like(number) for _ in rest)]
    return folded(flat(window(view, starts, (1, *rest))), rest)


def without_slots(value: Any) -> Any:
    """A view without cotangent slots; anything else as it is."""
    if isinstance(value, Repeated | Transposed):
        return dataclasses.replace(value, inner=without_slots(value.inner))
    if isinstance(value, View) and not isinstance(value, Unslotted):
        return Unslotted(value.shape, value.dtype, value)
    return value
