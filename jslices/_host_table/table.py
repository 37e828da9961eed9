"""Tables in host memory or in a file, of which a batch's rows are trained on a device."""

import contextlib
import functools
import itertools
import os
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jslices import FailedPreconditionError, InvalidArgumentError, NotFoundError
from jslices._host_table.layout import HostRows, Layout, layout_of
from jslices._host_table.records import Changes, FileRecords, Records
from jslices.checkpoint import files
from jslices.extend import PyTree, as_transformation

#: Bytes of records that are copied, or caught up, at a time.
_CHUNK = 1 << 26
#: Numbers of all tables' fetches, so that none takes the rows of another for its own.
_TICKETS = itertools.count(1)


class HostTable:
    """A table that is larger than a device's memory, with the state of its optimizer.

    The table ``[V, *D]`` is in the memory of the host, or in a file that may be larger than
    that. For each batch :meth:`fetch` brings the distinct rows that its ids name to the
    device, with what the optimizer keeps for them. A jitted step trains them as an array
    ``[U, *D]``, with the optimizer's own arithmetic, and :meth:`store` writes them back. A
    row and its state are one record, so that a row costs one access.

    Rows begin when they are first fetched: until then a file takes no room on the disk.
    Only one process at a time can have a file open. When it is killed the file holds all
    steps that were stored; :attr:`steps` says how many, so that training can go on with the
    next batch. After a failure of the machine that is certain only of what was there at the
    last :meth:`flush`, and only if nothing was stored since: keep a copy
    (:meth:`save`).

    Args:
      shape: ``(V, *D)``.
      tx: the optimizer, of jslices or of Optax; a new step may use one that differs in its
        numbers alone. Each row must be stepped by itself: not a factored ``adafactor``, nor
        ``multi_steps``.
      path: of the file, made if there is none; None for a table in memory.
      init: what rows begin with: a number, or ``init(ids) -> [n, *D]``, which gets row
        numbers int64 ``[n]``, and should give a row the same values at any time.
      dtype: of the table.
      size: U, room for the distinct rows of a batch. None makes room for those of the first
        batch and some more, and more still when a batch needs it; the step is then compiled
        anew.
      device: a ``jax.Device``, or a sharding to copy rows to all devices of a mesh; None
        for the default device.
      overlap: whether rows are written back while the next step runs, and those of the next
        batch read while this one does. None: where the device is not the host itself.

    Attributes:
      shape: ``(V, *D)``.
      dtype: of the table.
      steps: how many steps were stored.

    Raises:
      InvalidArgumentError: for an optimizer that steps rows together; a file of another
        table, or of another optimizer; a shape without rows; a ``size`` that is not
        positive.
      FailedPreconditionError: for a file that is open already.
      OSError: for a file that cannot be made, or for which the disk has no room.

    Untouched rows: as the optimizer has it. With ``untouched="exact"`` rows catch up on the
    device whenever they are fetched or read. Duplicate ids share a row, and their gradients
    add. An id that is out of range gets U for a number, which is out of range of the rows
    on the device.

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
      ...         return ((table[ids] @ w - labels) ** 2).mean()
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
        size: int | None = None,
        device: jax.Device | jax.sharding.Sharding | None = None,
        overlap: bool | None = None,
    ) -> None:
        self.shape, self.dtype = tuple(shape), jnp.dtype(dtype)
        if not self.shape or min(self.shape) < 1:
            raise InvalidArgumentError(
                f"HostTable(shape={shape}): wanted (V, *D), so many rows of such a shape"
            )
        if not jnp.issubdtype(self.dtype, jnp.floating):
            raise InvalidArgumentError(
                f"HostTable(dtype={self.dtype}): an optimizer trains floating-point numbers"
            )
        if size is not None and size < 1:
            raise InvalidArgumentError(
                f"HostTable(size={size}): wanted room for the distinct rows of a batch"
            )
        self._init, self._size, self._room = init, size, 1
        self._device = jax.devices()[0] if device is None else device
        self._overlap = _has_own_memory(self._device) if overlap is None else overlap
        tx = as_transformation("HostTable", tx)
        self._layout = layout_of(self.shape, self.dtype, tx)
        self._path = None if path is None else os.fspath(path)
        self._records, self._closed = self._new_records(self._path), False
        #: The ticket and the rows of the last fetch, until these are stored.
        self._fetched: tuple[int, np.ndarray] | None = None
        #: The same, and the stored rows, until they are written.
        self._pending: tuple[int, np.ndarray, HostRows] | None = None

    def _new_records(self, path: str | None) -> Records:
        one = jnp.zeros((1, *self.shape[1:]), self.dtype)
        shared = [np.int64(0), *_begun(self._layout, one)[1]]
        arguments = self._layout, self.shape[0], [np.asarray(x) for x in shared]
        return Records(*arguments) if path is None else FileRecords(path, *arguments)

    @property
    def steps(self) -> int:
        self._write_pending()
        return int(self._open().shared[0])

    # --- a step -----------------------------------------------------------------------

    def fetch(self, ids: PyTree) -> tuple[HostRows, PyTree]:
        """Brings the rows that some ids name to the device.

        Args:
          ids: a pytree of integers of any shape (NumPy's, lists' or JAX's), in all K.

        Returns:
          ``(rows, places)``: what a step takes instead of a table, whose
          ``rows.unpack()`` gives an array ``[U, *D]`` and the optimizer's state, and
          ``rows.pack(table, state)`` the rows to store; and a pytree like ``ids`` of int32,
          where in this array the row of each id is, U for an id that is out of range.

        Raises:
          TypeError: for ids that are no integers, or traced.
          InvalidArgumentError: for more distinct rows than ``size``.
          FailedPreconditionError: after ``close``.
        """
        records = self._open()
        leaves, tree = jax.tree.flatten(ids, is_leaf=_is_list)
        arrays = [_checked_ids(x) for x in leaves]
        flat = np.concatenate([x.reshape(-1) for x in arrays] or [np.zeros(0, np.int64)])
        numbers, places = _numbered(flat, self.shape[0])
        room = self._room_for(len(numbers), flat.size)
        words = np.empty((room, self._layout.words), self._layout.word)
        words[len(numbers) :] = 0
        self._read_into(words[: len(numbers)], numbers)
        ticket = next(_TICKETS) % 2**31
        shared = tuple(np.array(x) for x in records.shared[1:])
        rows = HostRows(words, shared, np.int32(ticket), self._layout)
        rows = jax.device_put(rows, self._device)
        if self._pending is not None:
            rows = _with_pending(rows, numbers, *self._pending[1:])
        self._fetched = ticket, numbers
        places[places < 0] = room
        parts = np.split(places, np.cumsum([x.size for x in arrays])[:-1])
        shaped = [part.reshape(x.shape) for part, x in zip(parts, arrays, strict=True)]
        return rows, jax.tree.unflatten(tree, shaped)

    def store(self, rows: HostRows) -> None:
        """Writes back the rows that were fetched last.

        Args:
          rows: what ``rows.pack`` returned in the step. They are still needed afterwards
            where writing overlaps with the next step, so do not donate them to another.

        Raises:
          TypeError: for anything else.
          FailedPreconditionError: for rows that are not those of the last ``fetch``.
            Nothing is written. Where writing overlaps, the next call says so.
        """
        self._open()
        if not isinstance(rows, HostRows) or rows.layout != self._layout:
            raise TypeError(
                f"store wants the rows that fetch gave and a step packed, got {rows!r:.80}"
            )
        if self._fetched is None:
            raise FailedPreconditionError(
                "store(rows) writes the rows of the last fetch, once; nothing was fetched "
                "since the last store"
            )
        self._write_pending()
        self._pending, self._fetched = (*self._fetched, rows), None
        if self._overlap:
            for x in jax.tree.leaves(rows):
                x.copy_to_host_async()
        else:
            self._write_pending()

    def _write_pending(self) -> None:
        if self._pending is None:
            return
        (ticket, numbers, rows), self._pending = self._pending, None
        if int(rows.ticket) != ticket:
            raise FailedPreconditionError(
                "store(rows) got the rows of an earlier fetch, or of another table: store "
                "those of a batch before the next one is fetched. They were not written"
            )
        records = self._open()
        words = np.asarray(rows.words)[: len(numbers)]
        shared = [records.shared[0] + 1, *(np.asarray(x) for x in rows.shared)]
        records.store(Changes(numbers, words, shared))

    def _room_for(self, rows: int, ids: int) -> int:
        """U: room for some rows, of as many ids."""
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

    def _read_into(self, words: np.ndarray, numbers: np.ndarray) -> None:
        """Read the records of some rows, initializing those that are new."""
        np.take(self._open().array, numbers, axis=0, out=words, mode="clip")
        new = np.flatnonzero(words[:, -1] == 0)
        if len(new):
            words[new] = self._initial_records(numbers[new])

    def _initial_records(self, numbers: np.ndarray) -> np.ndarray:
        if not callable(self._init):
            return self._constant_record
        padded = np.resize(numbers, _power_of_two(len(numbers)))
        start = jnp.asarray(self._init(padded), self.dtype)
        if start.shape != (len(padded), *self.shape[1:]):
            raise InvalidArgumentError(
                f"HostTable(init=...) got row numbers {list(padded.shape)} and returned "
                f"{list(start.shape)}; wanted {[len(padded), *self.shape[1:]]}"
            )
        return np.asarray(_begun(self._layout, start)[0])[: len(numbers)]

    @functools.cached_property
    def _constant_record(self) -> np.ndarray:
        number: Any = self._init
        start = jnp.full((1, *self.shape[1:]), number, self.dtype)
        return np.asarray(_begun(self._layout, start)[0])

    # --- the whole table --------------------------------------------------------------

    def read(self, ids: ArrayLike) -> np.ndarray:
        """The parameters of some rows as they are now, those of exact optimizers caught up.

        Args:
          ids: integers ``[...]``.

        Returns:
          ``[..., *D]``; NaN for an id that is out of range.

        Raises:
          TypeError: for ids that are no integers.
        """
        self._write_pending()
        ids = _checked_ids(ids)
        numbers, places = _numbered(ids.reshape(-1), self.shape[0])
        room = _power_of_two(len(numbers))
        words = np.zeros((room, self._layout.words), self._layout.word)
        self._read_into(words[: len(numbers)], numbers)
        table = np.asarray(_caught_up(self._rows_of(words))[0])[: len(numbers)]
        rows = np.full((len(places), *self.shape[1:]), np.nan, self.dtype)
        rows[places >= 0] = table[places[places >= 0]]
        return rows.reshape(*ids.shape, *self.shape[1:])

    def catch_up(self) -> None:
        """Makes up the steps that rows of an exact optimizer have missed, in all rows.

        Not needed for ``fetch``, ``read`` and ``save``; needed before the optimizer is
        replaced by one with another learning rate. Cost: reads and writes all records that
        have begun.
        """
        self._write_pending()
        records = self._open()
        if not self._layout.tx.catches_up:
            return
        for part in self._parts():
            words = records.array[part]
            written = np.flatnonzero(words[:, -1])
            if len(written):
                padded = np.zeros((self._part_rows, words.shape[1]), words.dtype)
                padded[: len(words)] = words
                _, rows = _caught_up(self._rows_of(padded))
                new = np.asarray(rows.words)[written]
                numbers = written + part.start
                records.store(Changes(numbers, new, records.shared))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a copy to a file: :meth:`restore` reads it, and HostTable opens it.

        It is on the disk, whole, when this returns, or not there at all.

        Raises:
          InvalidArgumentError: for the file of this table itself.
          OSError: if it cannot be written.
        """
        self._write_pending()
        path = os.fspath(path)
        records = self._open()
        own = None if self._path is None else os.path.realpath(self._path)
        if os.path.realpath(path) == own:
            raise InvalidArgumentError(f"{path} is the file of this table; give another")
        temporary = files.temporary_path(path, files.new_id())
        try:
            with contextlib.closing(self._new_records(temporary)) as copy:
                self._copy(records, copy)
                copy.flush()
                os.replace(temporary, path)  # while it is open, and so locked
        finally:
            files.remove(temporary)
        files.sync_directory(os.path.dirname(path))

    def restore(self, path: str | os.PathLike[str]) -> None:
        """Takes over all rows, and how many steps were stored, from a file.

        Raises:
          NotFoundError: if there is none.
          InvalidArgumentError: if it is of another table or optimizer.
          FailedPreconditionError: if it is open.
        """
        path = os.fspath(path)
        records = self._open()
        if not os.path.exists(path):
            raise NotFoundError(f"{path} is not there; give what save(path) wrote")
        with contextlib.closing(self._new_records(path)) as saved:
            self._fetched = self._pending = None
            self._copy(saved, records)

    def _copy(self, source: Records, target: Records) -> None:
        for part in self._parts():
            words = source.array[part]
            if words.any() or target.array[part].any():
                target.array[part] = words
        for old, new in zip(target.shared, source.shared, strict=True):
            old[...] = new

    def _rows_of(self, words: np.ndarray) -> HostRows:
        shared = tuple(np.array(x) for x in self._open().shared[1:])
        return HostRows(words, shared, np.int32(0), self._layout)

    @functools.cached_property
    def _part_rows(self) -> int:
        record = self._layout.words * self._layout.word.itemsize
        return min(self.shape[0], max(1, _CHUNK // record))

    def _parts(self) -> Iterator[slice]:
        """Ranges of rows that together are all of them."""
        for start in range(0, self.shape[0], self._part_rows):
            yield slice(start, min(start + self._part_rows, self.shape[0]))

    # --- the file ---------------------------------------------------------------------

    def flush(self) -> None:
        """Returns once all that was stored is written, and in a file on the disk."""
        self._write_pending()
        self._open().flush()

    def close(self) -> None:
        """Writes what was stored, and lets others open the file. Does nothing twice."""
        if self._closed:
            return
        self._write_pending()
        self._records.close()
        self._closed = True

    def __enter__(self) -> "HostTable":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _open(self) -> Records:
        if self._closed:
            raise FailedPreconditionError(f"{self!r} is closed; make another HostTable")
        return self._records

    def __repr__(self) -> str:
        where = "in memory" if self._path is None else f"path={self._path!r}"
        return f"HostTable({self.shape}, {self.dtype}, {where})"


# --- on the device --------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=0)
def _begun(layout: Layout, start: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
    """Records of rows ``[n, *D]`` that were never stepped, and the shared values."""
    return layout.pack(start, layout.tx.init(start))


@jax.jit
def _caught_up(rows: HostRows) -> tuple[jax.Array, HostRows]:
    """Make up the steps that rows have missed; returns their parameters and the rows."""
    table, state = rows.unpack()
    return table, rows.pack(table, state)


def _with_pending(
    rows: HostRows, numbers: np.ndarray, others: np.ndarray, pending: HostRows
) -> HostRows:
    """Update rows by those of a step that is not written yet.

    ``numbers`` ``[n]`` are those of the rows, ``others`` those of the step.
    """
    _, of_step, here = np.intersect1d(others, numbers, True, return_indices=True)
    source = np.full(len(rows.words), len(pending.words), np.int32)
    source[here] = of_step
    words, shared = _patched(rows.words, source, pending.words, pending.shared)
    return HostRows(words, shared, rows.ticket, rows.layout)


@jax.jit
def _patched(
    words: jax.Array, source: jax.Array, pending: jax.Array, shared: tuple[jax.Array, ...]
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Replace records that have a source; copies all, as a step may donate them."""
    changed = (source < pending.shape[0])[:, None]
    new = pending.at[source].get(mode="fill", fill_value=0)
    return jnp.where(changed, new, words), tuple(map(jnp.copy, shared))


# --- on the host ----------------------------------------------------------------------


def _numbered(ids: np.ndarray, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Number distinct rows: their ids int64 ``[n]``, sorted, and each id's number or -1.

    The numbers are int32 ``[K]``.
    """
    inside = (ids >= 0) & (ids < num_rows)
    distinct, inverse = np.unique(ids[inside], return_inverse=True)
    numbers = np.full(ids.shape, -1, np.int32)
    numbers[inside] = inverse
    return distinct.astype(np.int64), numbers


def _checked_ids(ids: ArrayLike) -> np.ndarray:
    if isinstance(ids, jax.core.Tracer):
        raise TypeError(
            "a HostTable is read outside of jit: fetch the rows of a batch first, and pass "
            "them to the jitted step"
        )
    array = np.asarray(ids)
    if not array.size and not isinstance(ids, np.ndarray | jax.Array):
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(
            f"a HostTable wants ids that are integers, got {array.dtype}{list(array.shape)}"
        )
    return array


def _is_list(x: object) -> bool:
    """True for nested lists of numbers, which are one array."""
    return isinstance(x, list) and all(isinstance(y, int | list) for y in x)


def _power_of_two(count: int) -> int:
    """The next power of two, as each size is compiled."""
    return 1 << max(0, count - 1).bit_length()


def _has_own_memory(device: jax.Device | jax.sharding.Sharding) -> bool:
    """True if a device, or one of a sharding, has memory of its own."""
    is_sharding = isinstance(device, jax.sharding.Sharding)
    devices: set[jax.Device] = device.device_set if is_sharding else {device}
    return any(x.platform != "cpu" for x in devices)
