"""The state of a blocking accumulator: sums of gradients, and the queue of takers."""

import logging
import threading
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeAlias

import numpy as np
from jax.typing import ArrayLike

from jslices import InvalidArgumentError
from jslices._rows.sums import sum_dtype
from jslices.accumulators import _gradients
from jslices.errors import CancelledError, DeadlineExceededError

_log = logging.getLogger("jslices.accumulators")


# --- sums -----------------------------------------------------------------------------


#: The dtype, shape and reduction on which accumulators that share a state must agree.
Terms: TypeAlias = tuple[np.dtype, _gradients.PartialShape, str]


class RowSums:
    """The sum of each row, and the number of gradients that held it.

    A row keeps its first entry, so that adding a gradient of K rows to U of them moves K
    rows and U integers, never U rows. Buffers grow by doubling. Sums in the order of the
    rows, moved for new ones, take 1.2 to 1.8 times as long, the longer the more gradients.
    """

    def __init__(self, dtype: np.dtype) -> None:
        self.dtype = dtype
        self.rows = np.zeros(0, np.int64)  # [U], sorted
        self.entries = np.zeros(0, np.int64)  # [U], the entry of each row in the sums
        self.row_shape: tuple[int, ...] | None = None  # None until the first gradient
        self.sums = np.zeros(0, dtype)  # [room, *D]
        self.counts = np.zeros(0, np.int64)  # [room]

    def add(self, rows: np.ndarray, values: np.ndarray) -> None:
        """Add ``values`` ``[K, *D]`` to ``rows`` ``[K]``, sorted and unique."""
        row_shape = values.shape[1:]
        if self.row_shape is not None and row_shape != self.row_shape:
            shape = (None, *self.row_shape)
            problems = _gradients.shape_problems("values", values.shape, shape, exact=True)
            raise InvalidArgumentError(
                f"{'; '.join(problems)}; the gradients since the last take have rows of "
                f"shape {self.row_shape}, this one has rows of shape {row_shape}"
            )
        at = np.searchsorted(self.rows, rows)
        is_held = at < self.rows.size
        is_held[is_held] = self.rows[at[is_held]] == rows[is_held]
        new, used = ~is_held, self.rows.size
        entries = np.empty(rows.size, np.int64)
        entries[is_held] = self.entries[at[is_held]]
        entries[new] = np.arange(used, used + np.count_nonzero(new))
        all_rows = np.insert(self.rows, at[new], rows[new])
        all_entries = np.insert(self.entries, at[new], entries[new])
        sums, counts = self.sums, self.counts
        if self.row_shape is None or all_rows.size > counts.size:
            room = max(all_rows.size, 2 * counts.size)
            sums = np.zeros((room, *row_shape), self.dtype)
            counts = np.zeros(room, np.int64)
            if used:
                sums[:used], counts[:used] = self.sums[:used], self.counts[:used]
        # Nothing above has changed anything, and nothing below can fail.
        self.row_shape, self.rows, self.entries = row_shape, all_rows, all_entries
        self.sums, self.counts = sums, counts
        with np.errstate(all="ignore"):
            sums[entries] += values
        counts[entries] += 1

    def reduced(self, mean: bool) -> tuple[np.ndarray, np.ndarray]:
        """``(rows [U], values [U, *D])``, ascending; the mean divides row by row."""
        values = self.sums[self.entries]
        if not mean or not self.rows.size:
            return self.rows, values
        counts = self.counts[self.entries].reshape(-1, *[1] * (values.ndim - 1))
        return self.rows, divided(values, counts)


class ArraySum:
    """The sum of arrays; None before the first, which settles the shape."""

    def __init__(self, dtype: np.dtype) -> None:
        self.dtype = dtype
        self.total: np.ndarray | None = None

    def add(self, grad: np.ndarray) -> None:
        """Add an array."""
        if self.total is None:
            self.total = np.array(grad)
            return
        note = "; the gradients since the last take have the first shape"
        _gradients.check_dense(grad, self.total.shape, self.dtype, note)
        with np.errstate(all="ignore"):
            self.total += grad


def divided(values: np.ndarray, counts: np.ndarray | int) -> np.ndarray:
    """``values / counts`` in the dtype of ``values``; 16-bit floats are rounded once."""
    wide = sum_dtype(values.dtype)
    with np.errstate(all="ignore"):
        quotient = values.astype(wide) / np.asarray(counts, wide)
    return np.asarray(quotient, values.dtype)


def merged(indices: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sort the rows of a gradient and sum its duplicates.

    16-bit floats are summed in float32 and rounded once.
    """
    if np.all(indices[1:] > indices[:-1]):
        return indices, values
    order = np.argsort(indices, kind="stable")
    ordered = indices[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    wide = values.astype(sum_dtype(values.dtype), copy=False)
    with np.errstate(all="ignore"):
        sums = np.add.reduceat(wide[order], starts, axis=0)
    return ordered[starts], sums.astype(values.dtype)


# --- the queue ------------------------------------------------------------------------

#: The call of another process that a thread answers, a ``grpc.ServicerContext``. Once that
#: process is gone the thread must not take a result that nobody will receive.
caller: ContextVar[Any] = ContextVar("caller", default=None)


def _caller_is_gone() -> bool:
    call = caller.get()
    return call is not None and not call.is_active()


class Turns:
    """The count, the step, the sums and the queue of an accumulator; thread-safe.

    Gradients of an old step are dropped. Takers queue, and only the first is served: a
    small request behind a large one waits for it, as in TensorFlow, so that none starves.
    The lock is held only while a gradient is added: it is read, checked and sorted before,
    and the mean is computed afterwards.
    """

    def __init__(self, store_type: Callable[[np.dtype], Any], terms: Terms) -> None:
        self._changed = threading.Condition()
        self.waiting: deque[object] = deque()  # takers
        self._store_type = store_type
        self.terms = terms
        self.store = store_type(terms[0])
        self.count = 0
        self.step = 0
        self.stale = 0
        self.closed = False

    def apply(self, local_step: ArrayLike, prepare: Callable[[], tuple[Any, ...]]) -> None:
        """Add the gradient that ``prepare`` returns; it is not called for a stale one."""
        step = _gradients.whole_number("local_step", local_step)
        with self._changed:
            if self._drops(step):
                return
        gradient = prepare()  # may take long, or raise
        with self._changed:
            if self._drops(step):
                return
            self.store.add(*gradient)
            self.count += 1
            self._changed.notify_all()

    def _check_open(self, operation: str) -> None:
        """Refuse what is closed, and who is gone and may send a gradient again."""
        if self.closed or _caller_is_gone():
            reason = "it has been closed" if self.closed else "its caller is gone"
            raise CancelledError(f"{operation} operation was cancelled: {reason}")

    def _drops(self, local_step: int) -> bool:
        self._check_open("ApplyGrad")
        if local_step >= self.step:
            return False
        self.stale += 1
        return True

    def take(
        self,
        num_required: int,
        timeout: float | None,
        check: Callable[[Any], None] = lambda store: None,
    ) -> tuple[Any, int]:
        """Wait for the turn and for ``num_required`` gradients; ``(store, count)``.

        If ``check`` raises, nothing is taken.
        """
        number = _gradients.positive(num_required)
        if timeout is not None and not timeout >= 0:
            raise InvalidArgumentError(
                f"timeout={timeout!r}: it must be None (wait for ever) or seconds, from 0"
            )
        if timeout is not None and timeout > threading.TIMEOUT_MAX:
            timeout = None
        ticket = object()

        def ready() -> bool:
            enough = self.count >= number and self.waiting[0] is ticket
            return enough or self.closed or _caller_is_gone()

        if (call := caller.get()) is not None:
            call.add_callback(self._wake)  # when it is over
        with self._changed:
            self.waiting.append(ticket)
            try:
                if not self._changed.wait_for(ready, timeout):
                    raise DeadlineExceededError(
                        f"take_grad waited {timeout} s for {number} gradients; "
                        f"{self.count} have come"
                    )
                self._check_open("TakeGrad")
                check(self.store)
                taken = self.store, self.count
                self.store, self.count = self._store_type(self.terms[0]), 0
                self.step += 1
                return taken
            finally:  # the next in the queue may be served now
                self.waiting.remove(ticket)
                self._changed.notify_all()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def set_step(self, new_step: int) -> None:
        """Set the step; a lower one is logged."""
        with self._changed:
            if new_step < self.step:
                _log.warning(
                    "Attempt to set current_global_step_ to smaller value: current value "
                    "= %d >= new value = %d.",
                    self.step,
                    new_step,
                )
            self.step = new_step

    def close(self) -> None:
        """Wake all takers; they and later callers get a CancelledError."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()
