"""Rows of a host table on a device, and computations with them there."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jslices import InvalidArgumentError
from jslices._host_table.layout import Layout
from jslices._host_table.records import Part, Records
from jslices._rows.rounding import key_bits, round_rows
from jslices._slices.held import unheld
from jslices._typing import State
from jslices.dynamic.host import Batch
from jslices.errors import FailedPreconditionError
from jslices.extend import StateOfRows
from jslices.optim.engine.clock import by_row, map_clocks, short_logs, with_columns


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HostRows:
    """Rows of a :class:`jslices.HostTable` on a device, with their rows of the state.

    A pytree of arrays, for a jitted step, which may donate it. Its arrays have room for U
    rows; those that no id of the batch names are empty.

    Attributes:
      words: ``[U, words]``, the records.
      shared: the values that the optimizer keeps for all rows together.
      ticket: int32 ``[]``, the number of the call of ``fetch``.
      numbers: ``[U]`` integers, the numbers of the rows in the table, 0 for empty ones.
      num_rows: V.
      layout: the layout of a record.
      counts: int32 ``[U]``, how many ids named each row; 0 for an empty one.
      columns: ``[U, lines]``, what rows missed, for each log of steps of the optimizer.
    """

    words: Any  # like the other arrays of NumPy until they are put on a device
    shared: tuple[Any, ...]
    ticket: Any
    numbers: Any
    num_rows: int = dataclasses.field(metadata={"static": True})
    layout: Layout = dataclasses.field(metadata={"static": True})
    counts: Any = None
    columns: tuple[Any, ...] = ()

    def unpack(self) -> tuple[jax.Array, State]:
        """The rows and the optimizer's state of them, as arrays; for use under ``jit``.

        Returns:
          ``(table, state)``: an array ``[U, *D]`` whose rows are numbered by the ids that
          ``fetch`` returned, and a state like that of ``tx.init`` for it. Rows of an
          optimizer with ``untouched="exact"`` have caught up. For one that goes by row
          numbers, as with :func:`jslices.optim.freeze_rows`, the state holds them as well.
        """
        table, state = self.layout.unpack(self.words, self.shared)
        state = with_columns(state, self.columns) if self.columns else state
        if self.layout.tx.goes_by_row:
            state = StateOfRows(state, self.numbers, self.num_rows)
        if self.layout.tx.catches_up:
            table, state = self.layout.tx.flush(table, state)
        return table, state

    def pack(
        self, table: jax.Array, state: State, key: jax.Array | None = None
    ) -> "HostRows":
        """The same rows with other contents, for ``store``.

        Args:
          table: ``[U, *D]``, of the dtype that it had.
          state: the optimizer's state of it.
          key: where rows are stored in fewer bits (``HostTable(stored=...)``), a random
            key, another one in each step. Elements are rounded up or down at random, right
            in the mean, by bits that depend only on the key, the row and the place in it.

        Raises:
          InvalidArgumentError: for arrays of other shapes or dtypes; without a key where
            one is needed, or with one where none is.
        """
        narrow = self.layout.fields[0].dtype
        if self.layout.is_narrow == (key is None):
            advice = (
                "needs a random key to round them; type "
                "key=jax.random.fold_in(jax.random.key(0), step)"
            )
            advice = advice if key is None else "rounds nothing: leave the key out"
            raise InvalidArgumentError(
                f"rows.pack(table, state, key) of rows that are stored as {narrow} {advice}"
            )

        def rounded(table: jax.Array) -> jax.Array:
            if key is None:
                return table
            bits = key_bits(key, "rows.pack(table, state, key)")
            return round_rows(table, self.numbers.astype(jnp.uint32), bits, narrow)

        if isinstance(state, StateOfRows):
            state = state.state
        table = unheld(table)
        # A step of all that were fetched is none of the other rows.
        state = map_clocks(lambda *x: by_row(*x)._replace(numbers=None), state)
        words, shared = self.layout.pack(table, state, rounded)
        if words.shape != self.words.shape:
            raise InvalidArgumentError(
                f"rows.pack(table, state) got {words.shape[0]} rows, and these are "
                f"{self.words.shape[0]}"
            )
        return dataclasses.replace(self, words=words, shared=tuple(shared))


class Stored(NamedTuple):
    """Rows that were fetched, then stored; the device may still be computing them."""

    records: Records
    ticket: int  #: of their fetch
    steps: int  #: that were stored before
    rows: np.ndarray  #: int64 ``[n]``, distinct
    batch: Batch  #: of the map of ids
    words: Any = None  #: HostRows, once they are stored

    def part(self) -> Part:
        if int(self.words.ticket) != self.ticket:
            raise FailedPreconditionError(
                "store(rows) got the rows of an earlier fetch, or of another table: store "
                "those of a batch before the next one is fetched, by this thread or by "
                "another. They were not written"
            )
        words = np.asarray(self.words.words)[: len(self.rows)]
        steps, *old = self.records.shared
        shared = [np.asarray(x) for x in self.words.shared]
        if any(x.shape != y.shape for x, y in zip(shared, old, strict=True)):
            # With the log of a state from elsewhere.
            shared, known = self.records.short_logs(shared)
            for columns in known:
                self.records.put_columns(*columns)
        words = self.records.with_entries(self.rows, words, self.batch)
        number = int(self.records.done) + 1
        return Part(
            self.records, number, self.rows, words, [np.asarray(steps + 1), *shared]
        )


@functools.partial(jax.jit, static_argnums=0)
def initial_records(
    layout: Layout, start: jax.Array, shared: Any = None
) -> tuple[jax.Array, list[jax.Array]]:
    """Records of rows ``[n, *D]`` that begin, and the values that all rows share."""
    tx, narrow = layout.tx.of_rows(), lambda table: table.astype(layout.fields[0].dtype)
    records_of = functools.partial(layout.pack, start, narrow=narrow)
    with short_logs():
        packed = records_of(tx.init(start))
    if shared is None:
        return packed  # they begin with the table; the others now, and have missed no step
    _, state = layout.unpack(packed[0], shared)
    _, later = tx.flush(start, state)
    is_clock = lambda path: ".clock" in jax.tree_util.keystr(path)  # noqa: E731
    begin = lambda path, old, new: new if is_clock(path) else old  # noqa: E731
    return records_of(jax.tree.map_with_path(begin, state, later))


@jax.jit
def caught_up(rows: HostRows, steps: jax.Array) -> tuple[jax.Array, HostRows]:
    """Do the steps that rows have missed; returns their parameters and the rows."""
    table, state = rows.unpack()
    key = jax.random.fold_in(jax.random.key(0), steps) if rows.layout.is_narrow else None
    return table, rows.pack(table, state, key)


def with_uncommitted_step(
    rows: HostRows, numbers: np.ndarray, others: np.ndarray, pending: HostRows
) -> HostRows:
    """Update rows by those of a step that is not written yet.

    ``numbers`` ``[n]`` are those of the rows, ``others`` those of the step.
    """
    _, of_step, here = np.intersect1d(others, numbers, True, return_indices=True)
    source = np.full(len(rows.words), len(pending.words), np.int32)
    source[here] = of_step
    words, shared = _patched(rows.words, source, pending.words, pending.shared)
    return dataclasses.replace(rows, words=words, shared=shared)


@jax.jit
def _patched(
    words: jax.Array, source: jax.Array, pending: jax.Array, shared: tuple[jax.Array, ...]
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Replace records that have a source; copies all records, as a step may donate them."""
    changed = (source < pending.shape[0])[:, None]
    new = pending.at[source].get(mode="fill", fill_value=0)
    return jnp.where(changed, new, words), tuple(map(jnp.copy, shared))
