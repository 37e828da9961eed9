"""One array of many tables, and whose rows are whose."""

import dataclasses
import math
import operator
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

import jslices as js
from jslices._lookup.bags import as_bags
from jslices._lookup.embedding import is_padding
from jslices._place.boundary import explicit_mesh
from jslices._rows.access import index_dtype
from jslices._rows.ids import as_ids, check_mode, refuse_bad_ids, settle
from jslices._slices import rows_at

Initializer = Callable[..., jax.Array]


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class StackedTables:
    """Where the rows of each table are in one array of all of them.

    A description, without arrays: hashable, equal if all of it is equal, static under jit.
    Below, the array of all tables is ``[V, *D]``; table t has ``V_t`` of its rows.

    Args:
      shapes: from the name of each table to its shape ``(V_t, *D)``, or to anything with a
        ``shape``, such as an array. Tables are in this order.
      devices: zero rows are added at the end until this number divides V, as by
        :func:`jslices.padded_rows`, so that the array can be split over devices.

    Raises:
      InvalidArgumentError: for no tables, a table without rows, rows of different shapes,
        or fewer than one device.

    Example:
      >>> import jax, jax.numpy as jnp, jslices as js
      >>> from jslices.tables import StackedTables
      >>> tables = StackedTables({"user": (3, 2), "item": (2, 2)})
      >>> tables
      StackedTables(user: rows 0 to 3, item: rows 3 to 5, of shape (2,))
      >>> table = jnp.arange(10.0).reshape(tables.shape)
      >>> ids = {"user": jnp.array([0, 2]), "item": jnp.array([1, 2])}  # no row 2
      >>> tables.lookup(table, ids)["item"]
      Array([[ 8.,  9.],
             [nan, nan]], dtype=float32)
      >>> js.grad(lambda t: tables.lookup(t, ids)["item"].sum())(table).indices
      Array([0, 2, 4, 5], dtype=int32)
      >>> {name: part.shape for name, part in tables.split(table).items()}
      {'user': (3, 2), 'item': (2, 2)}

    Source: ours. FBGEMM's ``SplitTableBatchedEmbeddingBags`` and jax-tpu-embedding stack
    tables for the same reasons.
    """

    names: tuple[str, ...]  #: of the tables, in the order of their rows.
    sizes: tuple[int, ...]  #: ``V_t``, the rows of each.
    row_shape: tuple[int, ...]  #: ``*D``, that of them all.
    num_rows: int  #: V, with the rows added for devices.

    def __init__(self, shapes: Mapping[str, Any], devices: int = 1) -> None:
        try:
            shape_of = {
                name: tuple(operator.index(n) for n in getattr(shape, "shape", shape))
                for name, shape in shapes.items()
            }
        except (AttributeError, TypeError):
            shape_of = {}
        if not shape_of or not all(
            isinstance(name, str) and shape and shape[0] > 0 and min(shape) >= 0
            for name, shape in shape_of.items()
        ):
            raise js.InvalidArgumentError(
                "StackedTables wants tables of at least one row by their names, "
                f'{{"user": (1000, 16)}}, got {shapes}'
            )
        row_shapes = {shape[1:] for shape in shape_of.values()}
        if len(row_shapes) > 1:
            raise js.InvalidArgumentError(
                f"StackedTables wants tables whose rows have one shape, got {shape_of}; "
                "make one StackedTables for each shape of rows"
            )
        sizes = tuple(shape[0] for shape in shape_of.values())
        vars(self).update(names=tuple(shape_of), sizes=sizes, row_shape=row_shapes.pop())
        vars(self).update(num_rows=js.padded_rows(sum(sizes), devices))

    def __repr__(self) -> str:
        spans = self._spans.items()
        parts = (f"{name}: rows {first} to {first + n}" for name, (first, n) in spans)
        return f"StackedTables({', '.join(parts)}, of shape {self.row_shape})"

    @property
    def shape(self) -> tuple[int, ...]:
        """``(V, *D)``, of the array of all tables."""
        return (self.num_rows, *self.row_shape)

    @property
    def offsets(self) -> tuple[int, ...]:
        """The first row of each table."""
        return tuple((np.cumsum(self.sizes) - self.sizes).tolist())

    @property
    def _spans(self) -> dict[str, tuple[int, int]]:
        """The first row of each table and its height, by name."""
        spans = zip(self.offsets, self.sizes, strict=True)
        return dict(zip(self.names, spans, strict=True))

    def init(
        self,
        key: jax.Array,
        initializer: Initializer | Mapping[str, Initializer],
        dtype: DTypeLike = jnp.float32,
    ) -> jax.Array:
        """The array ``[V, *D]`` of new tables.

        Args:
          key: of ``jax.random``. Each table draws from it by its name, so that its rows do
            not depend on the other tables.
          initializer: ``initializer(key, (V_t, *D), dtype)``, as those of
            ``jax.nn.initializers``; or one for each table, by name.
          dtype: of the array.

        Cost: twice the array while it is made.
        """
        if not isinstance(initializer, Mapping):
            initializer = dict.fromkeys(self.names, initializer)
        self._check_names(initializer, "init", all_of_them=True)
        arrays = {}
        for name, (_, size) in self._spans.items():
            own_key = jax.random.fold_in(key, zlib.crc32(name.encode()))
            arrays[name] = initializer[name](own_key, (size, *self.row_shape), dtype)
        return self.stack(arrays)

    def stack(self, arrays: Mapping[str, Any]) -> Any:
        """One array ``[V, ...]`` of an array ``[V_t, ...]`` for each table, by name.

        The arrays are tables, or an optimizer's state for their rows. Rows added for
        devices are zero. Or all are IndexedSlices, and so is the result: their entries one
        after another. Raises InvalidArgumentError for other names or heights.
        """
        self._check_names(arrays, "stack", all_of_them=True)
        if all(isinstance(x, js.IndexedSlices) for x in arrays.values()):
            return self._stack_slices(arrays)
        parts = [jnp.asarray(arrays[name]) for name in self.names]
        heights = tuple(part.shape[0] if part.ndim else 0 for part in parts)
        if heights != self.sizes or len({part.shape[1:] for part in parts}) > 1:
            shapes = {name: jnp.shape(arrays[name]) for name in self.names}
            raise js.InvalidArgumentError(f"stack wants arrays for {self}, got {shapes}")
        rest = (self.num_rows - sum(self.sizes), *parts[0].shape[1:])
        return jnp.concatenate([*parts, jnp.zeros(rest, parts[0].dtype)])

    def split(self, stacked: Any) -> dict[str, Any]:
        """The inverse of :meth:`stack`: an array ``[V_t, ...]`` for each table, by name.

        For checkpoints and export: a file then depends on names, not on offsets. Or, of
        IndexedSlices ``[V, ...]``, IndexedSlices for each table, all with the same values:
        entries of other tables are out of range.
        """
        self._check_stacked(stacked, "split")
        spans = self._spans.items()
        if not isinstance(stacked, js.IndexedSlices):
            kind = jax.typeof(stacked)
            if explicit_mesh(kind) is not None and kind.sharding.spec[0] is not None:
                raise js.InvalidArgumentError(
                    "split wants an array whose rows are not split over the Explicit axis "
                    f"{kind.sharding.spec[0]!r}: look up tables.rows(ids, name), or make "
                    "the mesh with axis_types=(jax.sharding.AxisType.Auto,)"
                )
            return {name: stacked[first : first + size] for name, (first, size) in spans}
        rows, parts = stacked.indices, {}
        for name, (first, size) in spans:
            inside = (rows >= first) & (rows < first + size)
            own = jnp.where(inside, rows - first, size)
            parts[name] = js.IndexedSlices(stacked.values, own, (size, *self.row_shape))
        return parts

    def _stack_slices(self, parts: Mapping[str, js.IndexedSlices]) -> js.IndexedSlices:
        spans = {name: (span, parts[name]) for name, span in self._spans.items()}
        if any(x.shape != (size, *self.row_shape) for (_, size), x in spans.values()):
            shapes = {name: x.shape for name, x in parts.items()}
            raise js.InvalidArgumentError(f"stack wants slices for {self}, got {shapes}")
        rows = [
            self._settled_rows(x.indices, size, first, "drop")
            for (first, size), x in spans.values()
        ]
        values = jnp.concatenate([x.values for _, x in spans.values()])
        return js.IndexedSlices(values, jnp.concatenate(rows), self.shape)

    def rows_of(self, old: "StackedTables") -> np.ndarray:
        """For each row here its number in ``old``, -1 for new ones: ``[V]``.

        Tables are the same by name, and keep their first rows; for
        :func:`jslices.checkpoint.resize_rows`.
        """
        rows = np.full(self.num_rows, -1)
        before = old._spans
        for name, (first, size) in self._spans.items():
            start, height = before.get(name, (0, 0))
            count = min(size, height)
            rows[first : first + count] = np.arange(start, start + count)
        return rows

    def rows(
        self,
        ids: ArrayLike,
        which: str | ArrayLike | None = None,
        *,
        padding_id: int | None = None,
        mode: str = "fill",
    ) -> jax.Array:
        """Row numbers in the array of all tables, of ids of single tables.

        For :func:`jslices.embedding_lookup` and its relatives, in any form.

        Args:
          ids: ``[...]`` integers, rows of their tables (under ``jax.jit`` of 32 bits).
          which: the table of each id: a name, for all of them; numbers of tables, of a
            shape that broadcasts to that of ``ids``; or None for ids ``[..., T]``, those of
            table t at place t of the last axis. For padded bags ``[B, T, L]``:
            ``np.arange(T)[:, None]``.
          padding_id: ids that are it, of any table, become -1 in every mode, for
            ``padding_id=-1`` of the lookup.
          mode: what an id does that is not a row of *its* table, as in
            :func:`jslices.embedding_lookup`; it never means a row of another table. By
            default it is out of range of the array: V, or a negative number where the id is
            negative.

        Returns:
          ``[...]`` int32, int64 where ``ids`` are or V needs it.

        Raises:
          InvalidArgumentError: for an unknown table, or another last axis.
          IndexError: in mode ``"check"``, naming table, position and range; under jit
            through ``jax.experimental.checkify``.
        """
        check_mode(mode, "rows")
        numbers = as_ids(ids, "rows")
        if padding_id is not None:
            padding = is_padding(ids, numbers, padding_id)
            rows = self.rows(jnp.where(padding, 0, numbers), which, mode=mode)
            return jnp.where(padding, jnp.asarray(-1, rows.dtype), rows)
        if isinstance(which, str):
            self._check_names([which], "rows")
            return self._rows_of(which, ids, numbers, mode, "rows")
        count = len(self.names)
        if which is None and numbers.shape[-1:] != (count,):
            raise js.InvalidArgumentError(
                f"rows wants ids [..., {count}], of each table along the last axis, got "
                f"{list(numbers.shape)}; for ids of one table: rows(ids, {self.names[0]!r})"
            )
        which = np.arange(count) if which is None else which
        tables = as_ids(which, "rows", "which")
        try:
            fits = np.broadcast_shapes(tables.shape, numbers.shape) == numbers.shape
        except ValueError:
            fits = False
        if not fits:
            raise js.InvalidArgumentError(
                f"rows wants which of a shape that broadcasts to that of ids, "
                f"{list(numbers.shape)}, got {list(tables.shape)}"
            )
        tables = tables.reshape((1,) * (numbers.ndim - tables.ndim) + tables.shape)
        if mode == "check":
            refuse_bad_ids(tables, count, "rows", "which")
            for number, (name, (_, size)) in enumerate(self._spans.items()):
                others = jnp.broadcast_to(tables != number, numbers.shape)
                refuse_bad_ids(ids, size, "rows", f"ids of {name!r}", others)
        dtype = index_dtype(self.num_rows, np.dtype(numbers.dtype))
        # An id of no table gets a table without rows.
        arrays = jnp.asarray(self.sizes, dtype), jnp.asarray(self.offsets, dtype)
        sizes, firsts = (rows_at(x, tables, fill_value=0) for x in arrays)
        return self._settled_rows(numbers, sizes, firsts, mode)

    def lookup(
        self, stacked: jax.Array, ids: Mapping[str, ArrayLike], *, mode: str = "fill"
    ) -> dict[str, jax.Array]:
        """The rows of all tables in one lookup.

        Args:
          stacked: ``[V, *D]``, the array of all tables.
          ids: ``[*B]`` integers for each table, or for some, by name; of any shapes.
          mode: as in :meth:`rows`.

        Returns:
          ``[*B, *D]`` for each name. The gradient of ``stacked`` is one IndexedSlices.
          For ids ``[..., T]``, one of each table:
          ``js.embedding_lookup(stacked, tables.rows(ids))``, with a smaller program.
        """
        self._check_stacked(stacked, "lookup")
        self._check_by_name(ids, "lookup", "ids")
        check_mode(mode, "lookup")
        parts = {
            name: self._rows_of(name, x, as_ids(x, "lookup"), mode, "lookup")
            for name, x in ids.items()
        }
        rows = jnp.concatenate([x.reshape(-1) for x in parts.values()])
        values = js.embedding_lookup(stacked, rows, mode=_settled(mode))
        return _by_name(values, {name: x.shape for name, x in parts.items()})

    def lookup_sparse(
        self,
        stacked: jax.Array,
        sp_ids: Mapping[str, Any],
        sp_weights: Mapping[str, Any] | None = None,
        combiner: str | Mapping[str, str] | None = "mean",
        *,
        mode: str = "fill",
    ) -> dict[str, jax.Array]:
        """The bags of all tables in one lookup.

        Args:
          stacked: ``[V, *D]``, the array of all tables.
          sp_ids: bags of ids for each table, or for some, by name, in any of the forms of
            :func:`jslices.embedding_lookup_sparse`. Padded bags of one length are the
            fastest; for these also see :meth:`rows`.
          sp_weights: weights in the shapes of the ids, by name; 1 for names without.
          combiner: as there; or one for each table, by name: one lookup for each of them.
          mode: as in :meth:`rows`; ids of padding are ignored.

        Returns:
          ``[*B, *D]`` for each name, a row for each of its bags.
        """
        caller = "lookup_sparse"
        self._check_stacked(stacked, caller)
        check_mode(mode, caller)
        self._check_by_name(sp_ids, caller, "sp_ids")
        weights = {} if sp_weights is None else sp_weights
        if not isinstance(weights, Mapping) or weights:
            self._check_by_name(weights, caller, "sp_weights")
        if not weights.keys() <= sp_ids.keys():
            raise js.InvalidArgumentError(
                f"{caller} got weights for {list(weights)}, and bags for {list(sp_ids)}"
            )
        if isinstance(combiner, Mapping):
            return self._lookup_by_combiner(stacked, sp_ids, weights, combiner, mode)
        spans = self._spans
        bags = {
            n: as_bags(x, weights.get(n), None, caller, spans[n][1])
            for n, x in sp_ids.items()
        }
        ends = np.cumsum([bag.num_bags for bag in bags.values()]).tolist()
        rows, segments, parts = [], [], []
        for (name, bag), end in zip(bags.items(), ends, strict=True):
            inside = bag.segments < bag.num_bags
            rows.append(self._rows_of(name, bag.original, bag.ids, mode, caller, ~inside))
            own = bag.segments + (end - bag.num_bags)
            segments.append(jnp.where(inside, own, ends[-1]))
            one = jnp.ones_like(bag.ids, jnp.float32)  # placed as they are
            parts.append(one if bag.weights is None else bag.weights)
        ids: Any = jnp.concatenate(rows), jnp.concatenate(segments), ends[-1]
        w = jnp.concatenate(parts) if weights else None
        lengths = {len(bag.ids) // bag.num_bags for bag in bags.values() if bag.num_bags}
        if all(bag.padded for bag in bags.values()) and len(lengths) == 1 and min(lengths):
            # Summed along an axis, without a scatter.
            (length,) = lengths
            ids = ids[0].reshape(-1, length), (ids[1] < ends[-1]).reshape(-1, length)
            w = None if w is None else w.reshape(-1, length)
        combined = js.embedding_lookup_sparse(
            stacked, ids, w, combiner, mode=_settled(mode)
        )
        return _by_name(combined, {name: bag.shape for name, bag in bags.items()})

    def _lookup_by_combiner(
        self,
        stacked: jax.Array,
        sp_ids: Mapping[str, Any],
        weights: Mapping[str, Any],
        combiners: Mapping[str, str],
        mode: str,
    ) -> dict[str, jax.Array]:
        self._check_names(combiners, "lookup_sparse(combiner=...)")
        if not sp_ids.keys() <= combiners.keys():
            raise js.InvalidArgumentError(
                f"lookup_sparse got combiners for {list(combiners)}, and bags for "
                f"{list(sp_ids)}; give one for each, or one string for all"
            )
        rows: dict[str, jax.Array] = {}
        for combiner in dict.fromkeys(combiners[name] for name in sp_ids):
            names = [name for name in sp_ids if combiners[name] == combiner]
            ids = {name: sp_ids[name] for name in names}
            own = {name: weights[name] for name in names if name in weights}
            rows |= self.lookup_sparse(stacked, ids, own, combiner, mode=mode)
        return {name: rows[name] for name in sp_ids}

    def per_row(
        self, values: Mapping[str, float], default: float | None = None
    ) -> Callable[[jax.Array], jax.Array]:
        """A function from rows ``[n]`` of the array of all tables to a value for each.

        For functions that take functions of row numbers: rates by table in
        :func:`jslices.optim.scale`, bools for whole tables in
        :func:`jslices.optim.freeze_rows`.

        Args:
          values: a number or bool for each table, by name.
          default: for tables that are not named; without it all must be.
        """
        self._check_names(values, "per_row", all_of_them=default is None)
        each = np.array([values.get(name, default) for name in self.names])
        if each.dtype.kind not in "biuf":
            raise js.InvalidArgumentError(
                f"per_row wants a number or a bool for each table, got {dict(values)}"
            )
        any_bool = any(isinstance(x, bool) for x in values.values())
        if any_bool and np.isin(each, (0, 1)).all():
            each = each.astype(bool)  # {"user": True} with a default of 0
        dtype = index_dtype(self.num_rows, np.dtype("int32"))
        firsts = np.array(self.offsets[1:], dtype)

        def of_rows(rows: jax.Array) -> jax.Array:
            starts = firsts.reshape((1,) * rows.ndim + (-1,))
            tables = jnp.sum(rows[..., None] >= starts, axis=-1, dtype=jnp.int32)
            return rows_at(jnp.asarray(each), tables)

        return of_rows

    def _rows_of(
        self,
        name: str,
        original: ArrayLike,
        ids: jax.Array,
        mode: str,
        caller: str,
        exempt: jax.Array | None = None,
    ) -> jax.Array:
        """:meth:`rows` of one table; ``ids`` are the ``original`` ones, perhaps flat."""
        first, size = self._spans[name]
        if mode == "check":
            if exempt is not None:
                exempt = exempt.reshape(as_ids(original, caller).shape)
            refuse_bad_ids(original, size, caller, f"ids of {name!r}", exempt)
        return self._settled_rows(ids, size, first, mode)

    def _settled_rows(
        self, ids: jax.Array, size: jax.Array | int, first: jax.Array | int, mode: str
    ) -> jax.Array:
        """Rows of ids ``[...]``; ``size`` and ``first`` row of the table of each."""
        how = "drop" if mode in ("fill", "check") else mode
        row = settle(ids, self.num_rows, how)
        size, first = jnp.asarray(size, row.dtype), jnp.asarray(first, row.dtype)
        if mode == "promise_in_bounds":
            return row + first
        if mode == "clip":
            row = jnp.minimum(row, size - 1)
        missing = jnp.where(ids < 0, jnp.iinfo(row.dtype).min, self.num_rows)
        inside = (row >= 0) & (row < size)
        return jnp.where(inside, row + first, missing.astype(row.dtype))

    def _check_stacked(self, stacked: jax.Array, caller: str) -> None:
        shape = getattr(stacked, "shape", None)
        if shape is None or shape[:1] != (self.num_rows,):
            raise js.InvalidArgumentError(
                f"{caller} wants the array of all tables, of {self.num_rows} rows, got "
                f"{type(stacked).__name__ if shape is None else shape}; "
                "tables.stack(arrays) makes it"
            )

    def _check_by_name(self, values: object, caller: str, what: str) -> None:
        if not isinstance(values, Mapping):
            raise js.InvalidArgumentError(
                f"{caller} wants {what} in a dict, by the names of tables, got "
                f"{type(values).__name__}; for ids [..., T], one of each table: "
                "js.embedding_lookup(stacked, tables.rows(ids))"
            )
        self._check_names(values, caller)

    def _check_names(
        self, names: Iterable[str], caller: str, all_of_them: bool = False
    ) -> None:
        names = list(names)
        unknown = [name for name in names if name not in self.names]
        if unknown or not names or (all_of_them and set(names) != set(self.names)):
            raise js.InvalidArgumentError(
                f"{caller} wants {'each' if all_of_them else 'some'} of the tables "
                f"{list(self.names)} by name, got {names}"
            )


def _settled(mode: str) -> str:
    """The mode for rows that :meth:`StackedTables.rows` has settled."""
    return mode if mode == "promise_in_bounds" else "fill"


def _by_name(
    rows: jax.Array, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, jax.Array]:
    """``rows`` ``[n, *D]`` as ``[*shape, *D]`` for each name, in order."""
    ends = np.cumsum([math.prod(shape) for shape in shapes.values()])
    parts = jnp.split(rows, ends[:-1])
    return {
        name: part.reshape(*shape, *rows.shape[1:])
        for (name, shape), part in zip(shapes.items(), parts, strict=True)
    }
