"""Reads of rows: which equations look up whole rows of a view, in every form of JAX's.

The table :data:`READS` has the forms by the names of primitives. A form describes, as a
:class:`RowRead`, which view an equation reads, the numbers of its rows, and how its output
is made of these rows. Gathers and slices are here, products with one-hot arrays and sparse
matrices in products.py. A :class:`Reader` goes from the rows of a view to those of tables.

A read gives what JAX's equation gives, in each mode, and a gradient to the rows that JAX
gives one to. In doubt a form returns None, and the use is dense, which is right. Begin with
:class:`RowRead`, then ``_gather_rows``, the form of ``table[ids]``.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import GatherScatterMode as Mode

from jslices import _jax
from jslices._grad.origins import Origins
from jslices._grad.views import (
    Renumbered,
    Repeated,
    RowIds,
    Rowwise,
    Stacked,
    TableView,
    Transposed,
    Unslotted,
    Values,
    View,
    flat,
    window,
)
from jslices._jax import Atom, Equation
from jslices._place.boundary import drop_sharding
from jslices._rows.access import (
    INT32_MAX,
    clipped_indices,
    index_dtype,
    is_below,
    missing_value,
    per_row,
    take_rows,
    wide,
)
from jslices._typing import Aval

#: ``take(table, ids, mode, fill_value)`` reads rows of a table, with a cotangent slot.
Take = Callable[..., jax.Array]
#: ``plainly(table, ids)`` does without one.
Plainly = Callable[[TableView, RowIds], Any]


# --- what reads are made of -------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class RowRead:
    """An equation that reads ``count`` whole rows of ``view``."""

    view: View  # with one axis of rows
    count: int
    mode: Mode  # of ids out of range
    fill_value: Any
    numbers: Aval  # of the operand that holds the row numbers
    #: From the operands' values to the row numbers ``[count]``.
    ids: Callable[[Sequence[Any]], jax.Array]
    #: From the rows ``[count, *D]`` and the operands' values to the output.
    arrange: Callable[[jax.Array, Sequence[Any]], jax.Array]
    #: From the operands' values to which ids are good; None: those in range.
    good: Callable[[Sequence[Any]], jax.Array] | None = None
    #: From the operands' values to which ids get a gradient; None: those that are good.
    graded: Callable[[Sequence[Any]], jax.Array] | None = None
    #: Which operand of the equation the view is; it is None in the values above.
    operand: int = 0
    beside: Atom | None = None  # a variable whose value comes after the operands'

    @property
    def packed(self) -> int:
        """How many rows of the view a row of its tables holds, at most."""
        steps = (step for _, _, name in self.view.reads for step in name)
        return max((step[1] for step in steps if step[0] == "holding"), default=1)

    @property
    def is_direct(self) -> bool:
        """True if it reads rows of a table as it is, and an id in range is good."""
        return is_plain(self.view) and self.good is None

    def rows(
        self, operands: Values, take: Take, plainly: Plainly, near_counts: bool = False
    ) -> jax.Array:
        """The rows ``[count, *D]``, from the operands' values.

        The gradient follows the mode: a clipped id counts for the edge row, any other bad
        id for none. If ``near_counts``, it does, with zeros, for the row that it reads.
        """
        view, ids, mode = self.view, wide(self.ids(operands)), self.mode
        height = view.shape[0]
        reader = Reader(lambda table, ids: take(table, ids, "clip", None), plainly)
        near = clipped_indices(ids, height)
        if mode == Mode.CLIP:
            if self.is_direct:
                return take(view, RowIds((), ids, near), mode, None)
            return reader.rows(view, RowIds((), near, near))
        promised = mode == Mode.PROMISE_IN_BOUNDS
        # Of several axes that number rows, take_rows clips what is promised.
        clips = promised and isinstance(view, TableView) and view.row_axes > 1
        if self.is_direct and self.graded is None and not (clips or near_counts):
            return take(view, RowIds((), ids, ids), mode, self.fill_value)
        good = _in_range(ids, height) if self.good is None else self.good(operands)
        graded = good if self.graded is None else self.graded(operands)
        read_anyway = promised or self.graded is not None
        record = near if near_counts and read_anyway else jnp.where(graded, near, height)
        if self.is_direct:
            rows = take(view, RowIds((), ids, record), mode, self.fill_value)
        else:
            rows = reader.rows(view, RowIds((), near, record))
        if read_anyway:
            # These read a row, but send no gradient back, neither to the table nor to
            # anything else that the rows were made from.
            rows = jnp.where(per_row(graded, rows), rows, lax.stop_gradient(rows))
        if mode == Mode.FILL_OR_DROP and (near_counts or not self.is_direct):
            fill = missing_value(rows.dtype) if self.fill_value is None else self.fill_value
            # NumPy's, because jax_debug_nans would refuse a NaN made by JAX.
            rows = jnp.where(per_row(good, rows), rows, np.array(fill, rows.dtype))
        return rows


def _in_range(ids: jax.Array, height: int) -> jax.Array:
    ids = ids.astype(index_dtype(height, np.dtype(ids.dtype)))
    return (ids >= 0) & (ids < height)


class Reader:
    """Compute rows of views during one read, each once however often it is used.

    Args:
      take: ``take(table, ids)`` reads the rows of a :class:`TableView`, or notes the read
        while reads are planned.
      plainly: the same without cotangent slots; None if ``take`` is.
      forward: whether functions run as in a gradient that does not need theirs.
    """

    def __init__(
        self,
        take: Callable[[TableView, RowIds], Any],
        plainly: Callable[[TableView, RowIds], Any] | None = None,
        forward: bool = False,
    ) -> None:
        self._take, self._forward = take, forward
        self._without_slots = self if plainly is None else Reader(plainly, forward=True)
        self._rows: dict[tuple[Any, ...], Any] = {}

    def rows(self, value: Any, ids: RowIds | None) -> Any:
        """The rows of a view or an array, or all of an array where ``ids`` is None."""
        if ids is None:
            return drop_sharding(value)
        if not isinstance(value, View):
            if value is None or ids.read is None:
                return None
            return take_rows(drop_sharding(value), ids.read, mode="clip")
        # Whatever array a table is by now, its rows are those of the leaf.
        key = (value.leaf if is_plain(value) else value, ids.name)
        if key not in self._rows:
            self._rows[key] = self._compute(value, ids)
        return self._rows[key]

    def _compute(self, view: View, ids: RowIds) -> Any:
        if isinstance(view, TableView):
            return self._take(view, ids)
        reader = self._without_slots if isinstance(view, Unslotted) else self
        parts = [reader.rows(part, at) for part, at in view.parts(ids)]
        view = view.forward if self._forward else view
        return None if ids.read is None else view.combine(parts, ids)


def is_plain(view: View) -> TypeGuard[TableView]:
    """Whether it is a table as it is."""
    return isinstance(view, TableView) and view.now is None


def tables_read(view: View, slotted: bool = True) -> list[TableView]:
    """The tables whose rows a read of ``view`` takes with, or without, cotangent slots."""
    return [table for (has_slot, *_), table in view.reads.items() if has_slot == slotted]


def parts_of(value: Any) -> list[tuple[View, bool, bool]]:
    """The views that a value is made of where it is used as a whole.

    For each whether it has a cotangent slot, and whether it has fewer rows than its tables,
    as ``table[5:8]`` does: then these are read, not the tables.
    """
    parts: list[tuple[View, bool, bool]] = []
    left, visited = [(value, True)], set()
    while left:
        view, slotted = left.pop()
        if not isinstance(view, View) or (view, slotted) in visited:
            continue
        visited.add((view, slotted))
        if isinstance(view, Unslotted):
            left.append((view.inner, False))
        elif isinstance(view, Repeated | Rowwise | Stacked | Transposed):
            left.extend((part, slotted) for part, _ in view.parts(RowIds()))
        else:
            own = tables_read(view) if slotted else []
            tables = own or tables_read(view, slotted=False) + tables_read(view)
            few = all(is_below(view.shape[0], table.shape[0]) for table in tables)
            parts += [(view, bool(own), few)] * bool(tables)
    return parts


def every_row(view: View) -> RowRead:
    """The read of all rows of a view."""
    count = view.shape[0]
    numbers = jax.ShapeDtypeStruct((count,), jnp.int32)
    ids = lambda values: jnp.arange(count, dtype=jnp.int32)  # noqa: E731
    return RowRead(view, count, Mode.CLIP, None, numbers, ids, lambda rows, values: rows)


# --- the forms --------------------------------------------------------------------------


#: ``form(eqn, operands, origins)`` gives the read that an equation is, or None. Operands
#: are views, at least one, and values (None while reads are planned).
Form = Callable[[Equation, Sequence[Any], Origins], RowRead | None]

#: By name, as ``jax.experimental.sparse`` takes long to import.
READS: dict[str, Form] = {}


def form_for(*names: str) -> Callable[[Form], Form]:
    """Registers the form of a read for the primitives of these names."""

    def register(form: Form) -> Form:
        READS.update(dict.fromkeys(names, form))
        return form

    return register


@form_for("gather")
def _gather_form(eqn: Equation, operands: Values, origins: Origins) -> RowRead | None:
    view = operands[0]
    defined = (Mode.CLIP, Mode.FILL_OR_DROP, Mode.PROMISE_IN_BOUNDS)
    if not isinstance(view, View) or eqn.params["mode"] not in defined:
        return None
    if isinstance(view, Transposed):
        read = _gather_transposed(eqn, view)
    elif isinstance(view, Repeated):
        read = _gather_repeated(eqn, view)
    else:
        read = _gather_rows(eqn, view, origins)
    return read and _as_cut(read, _jax.shape_of(eqn.invars[0]))


def _as_cut(read: RowRead, shape: tuple[int, ...]) -> RowRead:
    """The read of a gather in mode fill, for which JAX cuts ids of 64 bits to 32.

    Where that makes an id good, its row is read; but it gets no gradient.
    """
    tall = any(is_below(INT32_MAX, size) for size in shape)
    if read.mode != Mode.FILL_OR_DROP or read.numbers.dtype.itemsize < 8 or tall:
        return read
    cut = lambda values: [values[0], values[1].astype(jnp.int32)]  # noqa: E731
    good, height = read.good, read.view.shape[0]
    return dataclasses.replace(
        read,
        ids=lambda values: read.ids(cut(values)),
        good=good and (lambda values: good(cut(values))),
        graded=good or (lambda values: _in_range(read.ids(values), height)),
    )


@form_for("dynamic_slice")
def _slice_form(eqn: Equation, operands: Values, origins: Origins) -> RowRead | None:
    view = operands[0]
    if isinstance(view, Transposed):
        return _slice_transposed(eqn, view)
    return _slice_rows(eqn, view) if isinstance(view, View) else None


def _gather_rows(eqn: Equation, view: View, origins: Origins) -> RowRead | None:
    numbers, sizes = eqn.params["dimension_numbers"], tuple(eqn.params["slice_sizes"])
    mode, fill_value, shape = eqn.params["mode"], eqn.params["fill_value"], view.shape
    axes, aval = tuple(numbers.start_index_map), eqn.invars[1].aval
    batched = numbers.operand_batching_dims or numbers.start_indices_batching_dims
    if not sizes or 0 not in axes or batched:
        return None
    column, height = axes.index(0), shape[0]
    if sizes[0] != 1:
        return _gather_windows(eqn, view, column)
    # JAX clamps starts other than 0 on axes that are read whole. A program may promise that
    # they are 0 and break it: JAX then drops the gradient of a row that it reads.
    trusting = mode == Mode.PROMISE_IN_BOUNDS and len(axes) > 1
    if sizes[1:] != shape[1:] or trusting:
        return _gather_columns(eqn, view, column, origins)
    batch = tuple(aval.shape[:-1])
    count = math.prod(batch)

    def ids(values: Values) -> jax.Array:
        if len(axes) == 1:
            return lax.reshape(values[1], (count,))
        starts = wide(values[1]).reshape(count, len(axes))
        rows = starts[:, column]
        if mode == Mode.FILL_OR_DROP:
            # The other axes are read whole, so any start but 0 is out of range.
            others = jnp.delete(starts, column, axis=1, assume_unique_indices=True)
            rows = jnp.where(jnp.all(others == 0, axis=1), rows, height)
        return rows

    return RowRead(view, count, mode, fill_value, aval, ids, _arrangement(eqn))


def _gather_windows(eqn: Equation, view: View, column: int) -> RowRead | None:
    """Consecutive whole rows for each start, from ``vmap`` of ``dynamic_slice``."""
    sizes, aval = tuple(eqn.params["slice_sizes"]), eqn.invars[1].aval
    height = view.shape[0]
    some = sizes[1:] == view.shape[1:] and is_below(sizes[0], height)
    if not some or eqn.params["mode"] != Mode.CLIP:
        return None
    count = math.prod(aval.shape[:-1]) * sizes[0]

    def ids(values: Values) -> jax.Array:
        starts = clipped_indices(values[1][..., column], height - sizes[0] + 1)
        within = jnp.arange(sizes[0], dtype=starts.dtype)[None]
        return (starts.reshape(-1, 1) + within).reshape(count)

    return RowRead(view, count, Mode.CLIP, None, aval, ids, _arrangement(eqn))


def _gather_columns(
    eqn: Equation, view: View, column: int, origins: Origins
) -> RowRead | None:
    """Rows, and the same columns of each: ``table[ids, 1:]``, ``table[ids, ::-1]``.

    With column numbers that vary with the row numbers, ``table[rows, columns]``, each
    element would read a whole row.
    """
    numbers, sizes = eqn.params["dimension_numbers"], tuple(eqn.params["slice_sizes"])
    mode, fill_value = eqn.params["mode"], eqn.params["fill_value"]
    aval = eqn.invars[1].aval
    axes, batch = tuple(numbers.start_index_map), tuple(aval.shape[:-1])
    columns = origins.columns(eqn.invars[1])
    # With constant numbers, as in tables[jnp.arange(3), ids], the reads are not of rows.
    if columns is None or origins.is_fixed(columns[column]) or not math.prod(batch):
        return None
    along = [origins.axes(x) - {len(batch)} for x in columns]
    own = tuple(sorted(along.pop(column)))  # the axes along which the row numbers differ
    if not set(own).isdisjoint(set().union(*along)):
        return None
    rows, first = tuple(batch[axis] for axis in own), len(own)

    def ids(values: Values) -> jax.Array:
        starts = values[1][..., column]
        once = tuple(slice(None) if axis in own else 0 for axis in range(len(batch)))
        return starts[once].reshape(math.prod(rows))

    # The same gather, from a table of one row for each of the rows.
    each = lax.GatherDimensionNumbers(
        offset_dims=numbers.offset_dims,
        collapsed_slice_dims=tuple(first + d for d in numbers.collapsed_slice_dims),
        start_index_map=tuple(first + d for d in axes if d),
        operand_batching_dims=tuple(range(first)),
        start_indices_batching_dims=own,
    )

    def arrange(taken: jax.Array, values: Values) -> jax.Array:
        starts = jnp.delete(values[1], column, axis=-1, assume_unique_indices=True)
        tables = taken.reshape(*rows, 1, *view.shape[1:])
        how = {"mode": mode, "fill_value": fill_value}
        return lax.gather(tables, starts, each, (1,) * first + sizes, **how)

    return RowRead(view, math.prod(rows), mode, fill_value, aval, ids, arrange)


def _gather_transposed(eqn: Equation, view: Transposed) -> RowRead | None:
    """``table.T[:, ids]``: whole rows, which then are columns."""
    numbers, sizes = eqn.params["dimension_numbers"], tuple(eqn.params["slice_sizes"])
    aval, mode, axis = eqn.invars[1].aval, eqn.params["mode"], view.order.index(0)
    one_row = tuple(1 if d == axis else n for d, n in enumerate(view.shape))
    axes = tuple(numbers.start_index_map)
    # Along an axis that is read whole, only clipping makes 0 of any start.
    one_id = axes == (axis,) or (axis in axes and mode == Mode.CLIP)
    if not one_id or sizes != one_row or numbers.operand_batching_dims:
        return None
    count, inner, column = math.prod(aval.shape[:-1]), view.inner, axes.index(axis)
    ids = lambda values: values[1][..., column].reshape(count)  # noqa: E731
    put = _arrangement(eqn)

    def arrange(rows: jax.Array, values: Values) -> jax.Array:
        order = (0, *(1 + d for d in view.order))
        rows = rows.reshape(count, 1, *inner.shape[1:])
        return put(jnp.transpose(rows, order), values)

    return RowRead(inner, count, mode, eqn.params["fill_value"], aval, ids, arrange)


def _arrangement(eqn: Equation) -> Callable[[jax.Array, Sequence[Any]], jax.Array]:
    """The function from rows ``[count, *D]`` to the output of a gather."""
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    batch = _jax.shape_of(eqn.invars[1])[:-1]
    left_out = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    window = [n for d, n in enumerate(sizes) if d not in left_out]

    def arrange(rows: jax.Array, values: Values) -> jax.Array:
        out = lax.reshape(rows, (*batch, *window))
        others = [d for d in range(out.ndim) if d not in numbers.offset_dims]
        if others == list(range(len(batch))):
            return out
        return jnp.moveaxis(out, range(out.ndim), [*others, *numbers.offset_dims])

    return arrange


def _slice_transposed(eqn: Equation, view: Transposed) -> RowRead | None:
    axis, sizes = view.order.index(0), tuple(eqn.params["slice_sizes"])
    if sizes != tuple(1 if d == axis else n for d, n in enumerate(view.shape)):
        return None
    ids = lambda values: jnp.reshape(values[1 + axis], 1)  # noqa: E731
    arrange = lambda rows, values: jnp.transpose(rows, view.order)  # noqa: E731
    aval = eqn.invars[1 + axis].aval
    return RowRead(view.inner, 1, Mode.CLIP, None, aval, ids, arrange)


def _gather_repeated(eqn: Equation, view: Repeated) -> RowRead | None:
    """A gather of rows that several axes number, such as tables repeated for each example.

    Along each of these axes either there are ids, or each example has a row of its own, or
    the same ids are read from all rows.
    """
    numbers, sizes = eqn.params["dimension_numbers"], tuple(eqn.params["slice_sizes"])
    mode, shape, lead = eqn.params["mode"], view.shape, view.lead
    aval = eqn.invars[1].aval
    axes, batch = tuple(numbers.start_index_map), tuple(aval.shape[:-1])
    own = dict(
        zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    )
    by_id = {d for d in axes if d < lead and sizes[d] == 1}
    shared = tuple(d for d in range(lead) if d not in own and d not in by_id)
    rows = tuple(n if d in shared else 1 for d, n in enumerate(shape[:lead]))
    if sizes != (*rows, *shape[lead:]) or not by_id:
        return None
    # Rows come in this order: by id, then by the axes that share the ids.
    order = (*batch, *(shape[d] for d in shared))
    position = own | {d: len(batch) + i for i, d in enumerate(shared)}
    count = math.prod(order)

    def spread(x: jax.Array) -> jax.Array:
        x = x.reshape(*batch, *(1 for _ in shared))
        return jnp.broadcast_to(x, order).reshape(count)

    def ids(values: Values) -> jax.Array:
        starts = wide(values[1], view.inner.shape[0])
        number = jnp.zeros((), index_dtype(view.inner.shape[0], starts.dtype))
        for d, height in enumerate(shape[:lead]):
            if d in by_id:
                start = clipped_indices(starts[..., axes.index(d)], height)
                along = spread(start).reshape(order)
            else:
                along = lax.broadcasted_iota(number.dtype, order, position[d])
            number = number * height + along.astype(number.dtype)
        return number.reshape(count)

    def good(values: Values) -> jax.Array:
        starts = wide(values[1])
        limits = [shape[d] if d in by_id else 1 for d in axes]
        beyond = jnp.broadcast_to(jnp.array(limits, starts.dtype), starts.shape)
        return spread(jnp.all((starts >= 0) & (starts < beyond), axis=-1))

    arrange, fill_value = _arrangement(eqn), eqn.params["fill_value"]
    return RowRead(view.inner, count, mode, fill_value, aval, ids, arrange, good)


def _slice_rows(eqn: Equation, view: View) -> RowRead | None:
    """Few rows, at each place of the other axes that number them, or columns of one."""
    lead, sizes, shape = view.lead, tuple(eqn.params["slice_sizes"]), view.shape
    count, whole_rows = math.prod(sizes[:lead]), sizes[lead:] == shape[lead:]
    if lead > 1:
        are_few = whole_rows and count
    else:
        are_few = is_below(count, 2) or (whole_rows and is_below(count, shape[0]))
    if not are_few:
        return None

    def ids(values: Values) -> jax.Array:
        part = flat(window(view, values[1 : 1 + lead], sizes[:lead]))
        assert isinstance(part, Renumbered)
        return part.number(jnp.arange(count, dtype=jnp.int32))

    def arrange(rows: jax.Array, values: Values) -> jax.Array:
        if whole_rows:
            return rows.reshape(sizes)
        limits = (n - size + 1 for n, size in zip(shape[1:], sizes[1:], strict=True))
        # XLA takes large constants for negative ones, if they are unsigned.
        starts = list(map(clipped_indices, values[2:], limits))
        return _jax.bind(eqn, [rows, jnp.zeros_like(starts[0]), *starts])[0]

    numbers = eqn.invars[1].aval
    return RowRead(flat(view), count, Mode.CLIP, None, numbers, ids, arrange)
