"""HostTable: a table in host memory or in a file, trained on a device batch by batch.

:class:`HostTables` are several, fetched and stored as one.
"""

import contextlib
import dataclasses
import functools
import itertools
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jslices import InvalidArgumentError
from jslices._densify import warn_at_line
from jslices._host_table import arguments
from jslices._host_table import records as storage
from jslices._host_table import rows as on_device
from jslices._host_table.journal import Journal, Journaled, one_at_a_time
from jslices._host_table.layout import layout_of
from jslices._host_table.opening import open_file
from jslices._host_table.rows import HostRows, Stored
from jslices._slices.held import unheld
from jslices._typing import PyTree, State
from jslices.checkpoint.boxes import row_blocks
from jslices.dynamic import IdMap, wide_ids
from jslices.dynamic.host import Batch, HostIdMap
from jslices.errors import FailedPreconditionError
from jslices.extend import as_transformation

#: Numbers of all tables' fetches, so that none takes the rows of another for its own.
_TICKETS = itertools.count(1)
_UNSTORED = (
    "the rows that were fetched before were not stored, and what a step made of them is "
    "lost: type table.store(rows) after each step, or table.read(ids) to evaluate"
)


class HostTable(Journaled):
    """A table that is larger than a device's memory, with the state of its optimizer.

    The table ``[V, *D]`` is in the memory of the host, or in a file that may be larger than
    that. For each batch :meth:`fetch` brings the distinct rows that its ids name to the
    device, with their optimizer state. A jitted step trains them as an array ``[U, *D]``,
    with the optimizer's own arithmetic, and :meth:`store` writes them back. A row and its
    state are one record, so that a row costs one access.

    Rows begin when they are first fetched: until then a file takes no room on the disk.
    Only one process at a time can have a file open. After a kill, Ctrl-C or the end of the
    process it holds all steps that were stored, whole; :attr:`steps` says how many, so that
    training can go on with the next batch. After a failure of the machine only the rows of
    the last :meth:`flush` are certain, and only if nothing was stored since; otherwise
    opening raises DataLossError: keep a copy (:meth:`save`).

    Args:
      shape: ``(V, *D)``.
      tx: the optimizer, of jslices or of Optax; a later step may use one that differs only
        in its numbers. It must step each row by itself: not a factored ``adafactor``, nor
        ``multi_steps``.
      path: of the file, made if there is none; None for a table in memory.
      init: the initial value of rows: a number, or ``init(ids) -> [n, *D]``, which gets row
        numbers int64 ``[n]``, and should give a row the same values at every opening.
      dtype: of the table, in a step.
      stored: None, or a dtype of fewer bits for the rows in memory or in the file, so that
        they take less room and less time to move: bfloat16, float16, float8_e4m3fn (numbers
        from 2**-9 to 448) or float8_e5m2 (2**-16 to 57344). A step has them as ``dtype``,
        which must be float32, and ``rows.pack(table, state, key)`` rounds them
        stochastically. The state is stored as the optimizer has it.
      size: U, room for the distinct rows of a batch. None makes room for those of the first
        batch and some more; for a batch that needs more the step is compiled anew.
      device: a ``jax.Device``, or a sharding to copy rows to all devices of a mesh; None
        for the default device.
      overlap: whether rows are written back while the next step runs, and those of the next
        batch read while this one does. None: where the device is not the host itself.
      keyed: an empty :class:`jslices.dynamic.IdMap`, whose options hold; V is its
        ``num_rows``. Then ids are of any size, or strings, and get rows as they come. The
        table keeps the map, in steps that have the map and the rows or neither.

    Attributes:
      shape: ``(V, *D)``.
      dtype: of the table.
      steps: how many steps were stored.

    Raises:
      InvalidArgumentError: for an optimizer that steps rows together; a file of another
        table, or of another optimizer; a shape without rows; a ``size`` that is not
        positive; a ``stored`` that rows cannot be rounded to.
      FailedPreconditionError: for a file that is open already.
      DataLossError: for a file that was cut off, one that a failure of the machine has left
        with rows of several steps, or a journal beside it that is another's.
      OSError: for a file that cannot be made.

    Untouched rows: as the optimizer has it. With ``untouched="exact"`` rows catch up on the
    device whenever they are fetched or read. Duplicate ids share a row, and their gradients
    add. What an id out of range reads is up to the lookup, as in an array: see ``fetch``.

    Cost: a step sorts K ids, and reads, copies to the device and back, and writes ``U``
    records of ``*D`` elements and their state. Host memory: ``V`` records, or what the
    operating system spares for the file.

    Example:
      >>> import functools, jax, jax.numpy as jnp, numpy as np, jslices as js
      >>> tx = js.adam(0.1)
      >>> table = js.HostTable((1_000_000, 8), tx)
      >>> @functools.partial(jax.jit, donate_argnums=0)
      ... def step(rows, w, ids, labels):
      ...     def loss(table):
      ...         return ((js.embedding_lookup(table, ids) @ w - labels) ** 2).mean()
      ...     table, state = rows.unpack()
      ...     value, grads = js.value_and_grad(loss)(table)
      ...     table, state = tx.apply(grads, state, table)
      ...     return rows.pack(table, state), value
      >>> for ids in ([5, 900_000, 5], [900_000, 7, 8]):
      ...     rows, places = table.fetch(np.array(ids))  # places: [0, 1, 0], then [2, 0, 1]
      ...     rows, value = step(rows, jnp.ones(8), places, jnp.ones(3))
      ...     table.store(rows)
      >>> table.steps, bool((table.read([900_000]) != 0).all())
      (2, True)

    Source: the parameter servers of recommender systems, and FBGEMM's tables in unified
    memory, which page by row behind a cache on the device; here there is none.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        tx: Any,
        path: str | os.PathLike[str] | None = None,
        *,
        init: float | Callable[[np.ndarray], ArrayLike] = 0.0,
        dtype: DTypeLike = jnp.float32,
        stored: DTypeLike | None = None,
        size: int | None = None,
        device: jax.Device | jax.sharding.Sharding | None = None,
        overlap: bool | None = None,
        keyed: IdMap | None = None,
    ) -> None:
        rows, *self._row = arguments.checked_shape(shape)
        self.dtype = jnp.dtype(dtype)
        if not jnp.issubdtype(self.dtype, jnp.floating):
            raise InvalidArgumentError(
                f"HostTable(dtype={self.dtype}): rows are of floating-point numbers; keep "
                "real and imaginary parts in one row of 2 D"
            )
        arguments.check_options(init, size, device, overlap)
        self._init, self._size, self._room = init, size, 1
        # With None a step moves rows where it needs them, and is compiled once.
        self._device = device
        if overlap is None:
            target = jax.devices()[0] if device is None else device
            overlap = arguments.has_own_memory(target)
        self._overlap = overlap
        tx = as_transformation("HostTable", tx)
        arguments.check_stored(stored, self.dtype)
        self._layout = layout_of((rows, *self._row), self.dtype, tx, stored)
        self._ids = None
        if keyed is not None:
            arguments.check_keyed(keyed, rows)
            self._ids = HostIdMap(keyed)
            self._layout = dataclasses.replace(
                self._layout, keyed=self._ids.made_by, width=self._ids.width
            )
        start = jnp.zeros((1, *self._row), self.dtype)
        _, shared = on_device.initial_records(self._layout, start)
        #: The values that all rows share at the beginning, the number of steps first.
        self._shared = [np.zeros((), np.int64), *map(np.asarray, shared)]
        self._path = None if path is None else arguments.real(path)
        records = (
            storage.Records(self._layout, rows, self._shared)
            if self._path is None
            else open_file(self._path, self._form(rows), make=True)
        )
        records.has_init |= callable(init) or init != 0
        self._journal_slot = Journal([records]), 0
        #: Of the last fetch, until its rows are stored.
        self._fetched: Stored | None = None

    @property
    def _records(self) -> storage.Records:
        journal, index = self._journal_slot
        return journal.members[index]

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self._records.array), *self._row

    @property
    def __array__(self) -> NoReturn:
        raise TypeError(
            f"{self} is no array: rows, places = table.fetch(ids) brings rows to a device, "
            "rows.unpack() gives them and their state; table.read(ids) gives NumPy's"
        )

    __jax_array__ = __getitem__ = __array__  # what others look for says the same

    @property
    @one_at_a_time
    def steps(self) -> int:
        self._journal.finish()
        return int(self._records.shared[0])

    @property
    @one_at_a_time
    def ids(self) -> IdMap | None:
        """With ``keyed`` a copy of the map, on the host: ``table.ids.export()``.

        Cost: reads 12 or 16 bytes a row.
        """
        self._journal.finish()
        if self._ids is None:
            return None
        entries = self._records.entries[: self._ids.size]
        return self._ids.to_map(entries, self._ids.sightings, self._steps)

    # --- a step -----------------------------------------------------------------------

    @one_at_a_time
    def fetch(self, ids: PyTree) -> tuple[HostRows, PyTree]:
        """Brings the rows that some ids name to the device.

        Args:
          ids: a pytree of integers of any shape (NumPy's, lists' or JAX's), in all K. With
            ``keyed`` of what :func:`jslices.dynamic.wide_ids` takes: new ones get rows,
            which begin anew, once the batch is stored; those without one share the last.

        Returns:
          ``(rows, places)``: ``rows`` replaces the table in a step; ``rows.unpack()`` gives
          an array ``[U, *D]`` and the optimizer's state, ``rows.pack(table, state)`` the
          rows to store; ``rows.counts`` says how many ids named each. ``places``, a pytree
          like ``ids`` of int32, says where in this array the row of each id is: U for an id
          of V or more, so that :func:`jslices.embedding_lookup` gives NaN; and a negative
          id stays what it is, padding. Do not read them by ``array[places]``, where JAX
          reads other rows for both, nor with ``mode="clip"``.

        Raises:
          TypeError: for ids that are not integers, or traced.
          InvalidArgumentError: for more distinct rows than ``size``.
          FailedPreconditionError: after ``close``.

        Warns of rows of the fetch before that were never stored: what a step made of them
        is lost. To evaluate, :meth:`read` rows instead.
        """
        leaves, tree = jax.tree.flatten(ids, is_leaf=arguments.is_leaf)
        if not leaves:
            raise TypeError(f"a HostTable wants ids that are integers, got {ids!r}")
        arrays = [arguments.checked_ids(x, self._ids) for x in leaves]
        if self._fetched is not None and self._fetched.steps == self._steps:
            warn_at_line(_UNSTORED, category=UserWarning)
        flat = np.concatenate([x.reshape(-1) for x in arrays])
        batch = self._look_up("admit", flat)
        numbers, places, counts = arguments.numbered(batch.rows, self.shape[0])
        fresh = np.isin(numbers, batch.changed)
        if self._layout.tx.catches_up and fresh.any():
            self._journal.finish()  # they begin after the step that is pending
        room = self._room_for(len(numbers), flat.size)
        words = np.empty((room, self._layout.words), self._layout.word)
        words[len(numbers) :] = 0
        self._read_into(words[: len(numbers)], numbers, fresh)
        ticket, counts = next(_TICKETS) % 2**31, np.pad(counts, (0, room - len(counts)))
        rows = dataclasses.replace(self._rows_of(words, numbers, ticket), counts=counts)
        rows = jax.device_put(rows, self._device)
        for step in self._pending:
            old = np.where(fresh, ~numbers, numbers)  # without those of former owners
            rows = on_device.with_uncommitted_step(rows, old, step.rows, step.words)
        self._fetched = Stored(self._records, ticket, self._steps, numbers, batch)
        places[places == len(numbers)] = room
        parts = np.split(places, np.cumsum([x.size for x in arrays])[:-1])
        shaped = [part.reshape(x.shape) for part, x in zip(parts, arrays, strict=True)]
        return rows, jax.tree.unflatten(tree, shaped)

    @one_at_a_time
    def store(self, rows: HostRows) -> None:
        """Writes back the rows that were fetched last.

        Args:
          rows: the result of ``rows.pack`` in the step. If writing overlaps with the next
            step they are still needed, so do not donate them to another.

        Raises:
          TypeError: for anything else.
          FailedPreconditionError: for rows that are not those of the last ``fetch``.
            Nothing is written. If writing overlaps, the next call raises it.
        """
        self._journal.finish()
        self._journal.store([self._take(rows)], at_once=not self._overlap)

    def _take(self, rows: HostRows) -> Stored:
        if not isinstance(rows, HostRows) or rows.layout != self._layout:
            raise TypeError(
                f"store wants the rows that fetch gave and a step packed, got {rows!r:.80}"
            )
        if self._fetched is None:
            raise FailedPreconditionError(
                "store(rows) writes the rows of the last fetch, once; nothing was fetched "
                "since the last store, write, reset or restore"
            )
        fetched, self._fetched = self._fetched, None
        if fetched.steps != self._steps:
            raise FailedPreconditionError(
                "store(rows) got rows that went on from a step which could not be stored: "
                "fetch them again"
            )
        if self._ids is not None:
            self._ids.keep(fetched.batch, fetched.steps + 1)
        if self._overlap:
            for x in jax.tree.leaves((rows.words, rows.shared)):
                x.copy_to_host_async()
        return fetched._replace(records=self._records, words=rows)

    @property
    def _pending(self) -> list[Stored]:
        return [x for x in self._journal.pending if x.records is self._records]

    @property
    def _steps(self) -> int:
        """How many steps were stored, with one that is pending."""
        return int(self._records.shared[0]) + len(self._pending)

    def _look_up(self, call: str, ids: np.ndarray) -> Batch:
        """The rows of ids ``[K]``."""
        if self._ids is None:
            return Batch(ids)
        now = self._records.entries, self._steps, self._pending
        return self._ids.run(call, wide_ids(ids.view(np.uint64)), *now)

    def _room_for(self, rows: int, ids: int) -> int:
        """U: the room for some distinct rows of some ids."""
        if self._size is not None:
            if rows > self._size:
                raise InvalidArgumentError(
                    f"this batch names {rows} distinct rows, and HostTable(size="
                    f"{self._size}) has room for fewer; leave size out, or give at least "
                    f"{rows}"
                )
            return self._size
        if rows > self._room:  # a sixteenth more, in steps of an eighth at most
            grain = max(8, 1 << max(0, rows.bit_length() - 4))
            self._room = min(ids, -(-(rows + rows // 16) // grain) * grain)
        return self._room

    def _read_into(self, words: np.ndarray, numbers: np.ndarray, fresh: Any = 0) -> None:
        """Read the records of some rows, initializing those that are new or fresh."""
        np.take(self._records.array, numbers, axis=0, out=words, mode="clip")
        waiting, shared = self._records.waiting(self._layout, words)
        if len(waiting):
            room = arguments.power_of_two(len(waiting)), words.shape[1]
            rows = self._rows_of(np.resize(words[waiting], room), numbers[waiting])
            rows = dataclasses.replace(rows, shared=tuple(shared), columns=())
            words[waiting] = self._caught_up(rows)[: len(waiting)]
        new = np.flatnonzero((words[:, -1] == 0) | fresh)
        if len(new):  # if they begin with the same number, the first is enough
            if self._records.has_init and not callable(self._init) and not self._init:
                text = f"new rows of {self} begin at 0, and others did not"
                warnings.warn(f"{text}: give init= whenever it is opened", stacklevel=4)
            some = new if callable(self._init) else new[:1]
            words[new] = self._initial_records(numbers[some])
        if self._layout.tx.catches_up and np.any(fresh):  # and have missed no step
            words[fresh] = self._initial_records(numbers[fresh], self._records.shared[1:])

    def _initial_records(self, numbers: np.ndarray, shared: Any = None) -> np.ndarray:
        """Records of rows that begin with the table, or when it has these shared values."""
        padded = np.resize(numbers, arguments.power_of_two(len(numbers)))
        shape, init = (len(padded), *self._row), self._init
        values: Any = init(padded) if callable(init) else jnp.full(shape, init)
        start = jnp.asarray(values, self.dtype)
        if start.shape != shape:
            raise InvalidArgumentError(
                f"HostTable(init=...) got row numbers {list(padded.shape)} and returned "
                f"{list(start.shape)}; wanted {list(shape)}"
            )
        words, _ = on_device.initial_records(self._layout, start, shared)
        return np.asarray(words)[: len(numbers)]

    # --- the whole table --------------------------------------------------------------

    @one_at_a_time
    def read(self, ids: ArrayLike) -> np.ndarray:
        """The parameters of some rows as they are now, those of exact optimizers caught up.

        Args:
          ids: integers ``[...]``; with ``keyed`` what ``fetch`` takes, and no row is given.

        Returns:
          ``[..., *D]``; NaN for an id that is out of range, or padding.

        Raises:
          TypeError: for ids that are not integers.
        """
        self._journal.finish()
        ids = arguments.checked_ids(ids, self._ids)
        found = self._look_up("find", ids.reshape(-1)).rows
        numbers, places, _ = arguments.numbered(found, self.shape[0])
        room = arguments.power_of_two(len(numbers))
        words = np.zeros((room, self._layout.words), self._layout.word)
        self._read_into(words[: len(numbers)], numbers)
        rows_now = self._rows_of(words, numbers)
        table = np.asarray(on_device.caught_up(rows_now, 0)[0])[: len(numbers)]
        rows = np.full((len(places), *self._row), np.nan, self.dtype)
        inside = (places >= 0) & (places < len(numbers))
        rows[inside] = table[places[inside]]
        return rows.reshape(*ids.shape, *self._row)

    @one_at_a_time
    def catch_up(self) -> None:
        """Does the steps that rows of an exact optimizer have missed, in all rows.

        Not needed for ``fetch``, ``read`` and ``save``; needed before another optimizer
        opens the file. Cost: reads and writes all records that were ever written.
        """
        if not self._layout.tx.catches_up:
            return
        rows, array = self.written_rows(), self._records.array
        blocks = list(row_blocks((len(rows), array.shape[1]), array.itemsize))
        for part in blocks:  # all of them of the size of the first: one is compiled
            words = np.zeros((blocks[0].stop, array.shape[1]), array.dtype)
            here = slice(part.stop - part.start)
            self._read_into(words[here], rows[part])
            words = self._caught_up(self._rows_of(words, rows[part]))[here]
            self._write(rows[part], words, self._records.shared)

    def _caught_up(self, rows: HostRows) -> np.ndarray:
        """The records of rows after their missed steps."""
        steps = np.int32(self._records.shared[0] % 2**31)
        return np.asarray(on_device.caught_up(rows, steps)[1].words)

    @one_at_a_time
    def written_rows(self) -> np.ndarray:
        """The numbers of all rows that were ever stored: int64 ``[n]``, ascending.

        Not those that :meth:`reset` has let begin anew. Cost: reads a number a record,
        of a file without those that are a hole in it.
        """
        self._journal.finish()
        array, blocks = self._records.array, self._records.blocks(self._records.array)
        rows = [x.start + np.flatnonzero(array[x, -1]) for x in blocks]
        return np.concatenate([np.zeros(0, np.int64), *rows])

    @one_at_a_time
    def write(
        self, ids: ArrayLike, params: ArrayLike, state: State, key: jax.Array | None = None
    ) -> None:
        """Writes some rows with the state of their optimizer, which was trained elsewhere.

        All of them or, whatever kills the process, none; :attr:`steps` stays.

        Args:
          ids: n row numbers, each once.
          params: ``[n, *D]``.
          state: that of ``tx``, like ``tx.init(params)``, or what
            :func:`jslices.checkpoint.import_state` returned. What it has for all rows
            together, such as a count, becomes the table's, or has to be the same.
          key: as in ``rows.pack``.

        Raises:
          InvalidArgumentError: for rows that are not there or named twice, arrays of other
            shapes or dtypes, or the state of another number of steps.
        """
        self._journal.finish()
        call, (steps, *old) = "write(ids, params, state)", self._records.shared
        self._refuse(True, call, "table.fetch(ids), and table.store(rows.pack(...))")
        rows = arguments.checked_rows(call, ids, self.shape[0])
        distinct, order = np.unique(rows, return_index=True)
        if len(distinct) < len(rows):
            raise InvalidArgumentError(f"{call} got a row twice: name each of them once")
        params = unheld(params)
        array: Any = params if isinstance(params, jax.Array) else np.asarray(params)
        words = np.empty((len(rows), self._layout.words), self._layout.word)
        packed = self._rows_of(words, rows).pack(array, state, key)
        shared, known = self._records.short_logs(packed.shared)
        for field, x, y in zip(self._layout.shared, shared, old, strict=True):
            if self._records.done and (x != y).any():
                raise InvalidArgumentError(
                    f"{call} got a state with {field.name} {x}, and the table has {y} for "
                    "all of its rows: write these to a new HostTable"
                )
        self._fetched = None
        for columns in known:
            self._records.put_columns(*columns)
        self._write(distinct, np.asarray(packed.words)[order], [steps, *shared])

    @one_at_a_time
    def reset(self, ids: ArrayLike) -> None:
        """Lets some rows begin anew: their first values, and no state of the optimizer.

        All of them or, whatever kills the process, none. With ``untouched="exact"`` they
        have missed no step. Rows of the last ``fetch`` can no longer be stored.

        Raises:
          InvalidArgumentError: for rows that are not there.
        """
        self._refuse(True, "reset(ids)", "table.evict(ids)")
        self._journal.finish()
        self._begin(np.unique(arguments.checked_rows("reset(ids)", ids, self.shape[0])))

    @one_at_a_time
    def evict(self, ids: Any) -> None:
        """Takes their rows from some ids of a keyed table, if they have any.

        From all of them or, whatever kills the process, from none. Rows of the last
        ``fetch`` can no longer be stored. ``ids`` are those that ``fetch`` takes.

        Raises:
          FailedPreconditionError: for a table without ``keyed``.
        """
        self._refuse(False, "evict(ids)", "table.reset(ids)")
        self._journal.finish()
        keys = arguments.checked_ids(ids, self._ids).reshape(-1)
        batch = self._look_up("evict", keys)
        self._begin(batch.changed, batch)

    def _begin(self, rows: np.ndarray, batch: Batch | None = None) -> None:
        """Let some rows begin anew; a batch says who owns them."""
        self._fetched, (_, *shared) = None, self._records.shared
        if self._layout.tx.catches_up:
            words = self._initial_records(rows, shared)
        else:  # as if they had never begun
            rows = rows[self._records.array[rows, -1] != 0]
            words = np.zeros((len(rows), self._layout.words), self._layout.word)
        self._write(rows, words, self._records.shared, batch)

    def _refuse(self, keyed: bool, call: str, instead: str) -> None:
        if keyed == (self._ids is not None):
            kind = "that is keyed by ids" if keyed else "without keyed="
            raise FailedPreconditionError(f"{call} of a table {kind}: type {instead}")

    def _write(
        self, rows: np.ndarray, words: np.ndarray, shared: Any, batch: Batch | None = None
    ) -> None:
        records, number = self._records, int(self._records.done) + 1
        words = records.with_entries(rows, words, batch)
        self._journal.write([storage.Part(records, number, rows, words, shared)])

    @one_at_a_time
    def save(self, path: str | os.PathLike[str], *, rows: ArrayLike | None = None) -> None:
        """Writes a copy to a file: :meth:`restore` reads it, and HostTable opens it.

        It is on the disk, whole, when this returns, or not there at all. With ``rows``,
        numbers ``[n]``, it is of these rows in this order: row i there is ``rows[i]``
        here. One that never began does so by the ``init`` with which the copy is opened.

        Raises:
          InvalidArgumentError: for the table's own file; for ``rows`` that are not there.
          FailedPreconditionError: for a file that is open as another table.
          OSError: if it cannot be written.
        """
        self._journal.finish()
        path = arguments.real(path)
        if path == self._path:
            raise InvalidArgumentError(f"{path} is the file of this table; give another")
        num_rows = self.shape[0]
        if rows is not None:
            self._refuse(True, "save(path, rows)", "table.save(path)")
            rows = arguments.checked_rows("save(path, rows)", rows, num_rows)
            num_rows = arguments.checked_shape(rows.shape)[0]
        with storage.locked(path) or contextlib.nullcontext():
            copy = self._copied_to(path, self._records, num_rows, rows)
            with contextlib.closing(copy):
                copy.publish(path)
        # Left by an earlier table of this path.
        storage.remove_journal(storage.journal_of(path))

    @one_at_a_time
    def restore(self, path: str | os.PathLike[str]) -> None:
        """Takes over all rows, and the number of stored steps, from a file: only reads it.

        For a table in a file all rows are copied to another file, for which the disk needs
        room; it replaces the old one when complete.

        Raises:
          NotFoundError: if there is none.
          InvalidArgumentError: if it is of another table or optimizer.
          FailedPreconditionError: if it is open, or has a step in the journal beside it.
          DataLossError: if it was cut off.
        """
        self._journal.finish()
        path = arguments.real(path)
        records = self._records
        saved = open_file(path, self._form(self.shape[0]), make=False)
        with contextlib.closing(saved):
            self._fetched = None
            if self._path is None:
                take = functools.partial(storage.copy_records, saved, records)
            else:
                new = self._copied_to(self._path, saved, self.shape[0])
                take = functools.partial(self._journal.replace, records, new)
            self._journal.do(take)

    @one_at_a_time
    def grow(self, num_rows: int) -> None:
        """Gives the table more rows, which begin anew; existing rows keep their state.

        With ``untouched="exact"`` they have missed no step, and are all written, as
        :meth:`reset` does it and :func:`jslices.checkpoint.resize_rows`. A file is copied
        to a new one, which replaces it when complete: the disk needs room for both.

        Args:
          num_rows: V from now on.

        Raises:
          InvalidArgumentError: for fewer rows than there are.
          OSError: if there is no room for the file; the table is as it was.
        """
        records, larger = self._records, "HostTable(..., keyed=dynamic.id_map(rows))"
        self._refuse(True, "grow(num_rows)", f"{larger}, and store there what this holds")
        if num_rows < len(records.array):
            raise InvalidArgumentError(
                f"grow({num_rows}) of a table with {len(records.array)} rows: wanted more"
            )
        self._journal.finish()
        if self._path is None:
            new = storage.Records(self._layout, num_rows, self._shared)
            self._copy(records, new)
        else:
            new = self._copied_to(self._path, records, num_rows)
        self._journal.do(functools.partial(self._journal.replace, records, new))

    def _copied_to(
        self, path: str, source: storage.Records, num_rows: int, rows: Any = None
    ) -> storage.FileRecords:
        """A new file, on the disk, for a path."""
        copy = storage.make(path, self._form(num_rows))
        with storage.closed_on_error(copy):
            self._copy(source, copy, rows)
            copy.flush()
        return copy

    def _copy(
        self, source: storage.Records, copy: storage.Records, rows: Any = None
    ) -> None:
        """Copy records, or those of some rows; rows that are new begin when it is made."""
        storage.copy_records(source, copy, rows)
        if rows is None and self._layout.tx.catches_up and source.shared[0]:
            before, now = len(source.array), len(copy.array)
            for first in range(before, now, block := 1 << 14):
                numbers = np.arange(first, min(first + block, now))
                words = self._initial_records(numbers, source.shared[1:])
                copy.put(copy.array, first, words)

    def _form(self, num_rows: int) -> storage.FileForm:
        return storage.FileForm(self._layout, num_rows, self._shared)

    def _rows_of(self, words: np.ndarray, numbers: np.ndarray, ticket: int = 0) -> HostRows:
        """Records of some rows, and empty ones, with the values that all rows share."""
        shared = tuple(np.array(x) for x in self._records.shared[1:])
        height = self.shape[0]
        of_records = np.zeros(len(words), np.uint32 if height <= 2**32 else np.uint64)
        of_records[: len(numbers)] = numbers
        held = words, shared, np.int32(ticket), of_records
        columns = self._records.columns_of(self._layout, words)
        return HostRows(*held, height, self._layout, columns=columns)

    # --- the file ---------------------------------------------------------------------

    @staticmethod
    def together(tables: Mapping[str, "HostTable"]) -> "HostTables":
        """Tables that are fetched and stored as one, in steps that all files have or none.

        Args:
          tables: names and tables. They stay usable one by one, but are closed together.

        Returns:
          An object with ``fetch(ids)`` and ``store(rows)``, which take and give dicts of
          these names, ``steps``, ``flush()`` and ``close()``.

        Raises:
          InvalidArgumentError: for a table that occurs twice, or is together with others.
          TypeError: for anything but tables.

        Example:
          >>> import jax, numpy as np, jslices as js
          >>> tx = js.sgd(0.1)
          >>> tables = js.HostTable.together(
          ...     {"user": js.HostTable((1000, 2), tx), "item": js.HostTable((50, 2), tx)}
          ... )
          >>> @jax.jit
          ... def step(rows, places):
          ...     def loss(user, item):
          ...         user = js.embedding_lookup(user, places["user"])
          ...         return (user * js.embedding_lookup(item, places["item"]) + 1).sum()
          ...     user, user_state = rows["user"].unpack()
          ...     item, item_state = rows["item"].unpack()
          ...     grads = js.grad(loss, (0, 1))(user, item)
          ...     user, user_state = tx.apply(grads[0], user_state, user)
          ...     item, item_state = tx.apply(grads[1], item_state, item)
          ...     return {
          ...         "user": rows["user"].pack(user, user_state),
          ...         "item": rows["item"].pack(item, item_state),
          ...     }
          >>> ids = {"user": np.array([7, 7]), "item": np.array([3, 4])}
          >>> rows, places = tables.fetch(ids)
          >>> tables.store(step(rows, places))
          >>> tables.steps
          1
        """
        return HostTables(tables)

    def __repr__(self) -> str:
        where = "in memory" if self._path is None else f"path={self._path!r}"
        return f"HostTable({self.shape}, {self.dtype}, {where})"


class HostTables(Journaled):
    """Host tables by name, made by :meth:`jslices.HostTable.together`.

    A step is in the files of all of them or in none, whatever kills the process.
    """

    def __init__(self, tables: Mapping[str, HostTable]) -> None:
        members = list(tables.values())
        for table in members:
            if not isinstance(table, HostTable):
                raise TypeError(f"HostTable.together wants HostTables, got {table!r:.80}")
            table._journal.check_usable(table)
            if len(table._journal.members) > 1 or members.count(table) > 1:
                raise InvalidArgumentError(
                    f"{table!r} is together with other tables already, or twice in these"
                )
        before = [table._journal_slot for table in members]
        for journal, _ in before:
            journal.end()
        self._tables = dict(tables)
        self._journal_slot = Journal([table._records for table in members]), 0
        try:
            for index, table in enumerate(members):
                before[index][0].closed = True
                table._journal_slot = self._journal_slot[0], index
        except BaseException:
            self._journal_slot[0].closed = True
            for table, slot in zip(members, before, strict=True):
                table._journal_slot, slot[0].closed = slot, False
            raise

    def __getitem__(self, name: str) -> HostTable:
        return self._tables[name]

    @property
    def steps(self) -> int:
        """How many steps were stored.

        Raises:
          FailedPreconditionError: if the tables differ in that.
        """
        steps = {name: table.steps for name, table in self._tables.items()}
        if len({*steps.values()}) != 1:
            raise FailedPreconditionError(
                f"these tables have different numbers of steps, {steps}: restore copies of "
                "one step, or ask each table"
            )
        return next(iter(steps.values()))

    @one_at_a_time
    def fetch(
        self, ids: Mapping[str, PyTree]
    ) -> tuple[dict[str, HostRows], dict[str, PyTree]]:
        """Brings rows of all tables to the device: takes and gives dicts by their names.

        Raises:
          InvalidArgumentError: for other names, and as :meth:`HostTable.fetch`.
        """
        self._check("fetch", ids)
        both = {name: table.fetch(ids[name]) for name, table in self._tables.items()}
        rows = {name: rows for name, (rows, _) in both.items()}
        return rows, {name: places for name, (_, places) in both.items()}

    @one_at_a_time
    def store(self, rows: Mapping[str, HostRows]) -> None:
        """Writes back the rows that were fetched last, to all tables or to none.

        Raises:
          InvalidArgumentError: for other names, and as :meth:`HostTable.store`.
        """
        self._check("store", rows)
        self._journal.finish()
        pending = [table._take(rows[name]) for name, table in self._tables.items()]
        overlaps = all(table._overlap for table in self._tables.values())
        self._journal.store(pending, at_once=not overlaps)

    def __repr__(self) -> str:
        return f"HostTables({self._tables})"

    def _check(self, call: str, values: Mapping[str, object]) -> None:
        if {*values} != {*self._tables}:
            raise InvalidArgumentError(
                f"HostTables.{call} got {sorted(values)}, and the tables are "
                f"{sorted(self._tables)}: give a dict with an entry for each"
            )
