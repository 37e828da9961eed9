"""Waiting one's turn: the count, the step and the queue of a blocking accumulator."""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from jslices._errors import CancelledError, DeadlineExceededError, InvalidArgumentError

_log = logging.getLogger("jslices.accumulators")

#: ``peer.gone``, set in a thread that works for another process, tells whether that
#: process is gone; such a thread must not take what nobody will receive.
peer = threading.local()
_LOOK_EVERY = 0.5  # seconds between two looks whether the process is still there


class Store(Protocol):
    """What has been accumulated since the last take."""

    def add(self, *gradient: Any) -> None:
        """Adds a gradient, or raises and changes nothing."""


class Turns:
    """The state that accumulators of one shared name have in common; thread-safe.

    Gradients of an old step are dropped. Takers stand in a queue, and only the first is
    served: a small request behind a large one waits for it, as in TensorFlow, so that
    none starves. Under the lock a gradient is added, and nothing else is computed: it is
    read, checked and sorted before, and the mean is taken after.
    """

    def __init__(self, new_store: Callable[[], Store], terms: Any = None) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()
        self._new_store = new_store
        self.terms = terms  # what all who share it must agree on
        self.store = new_store()
        self.count = 0
        self.step = 0
        self.stale = 0
        self.closed = False

    def apply(self, local_step: int, prepare: Callable[[], tuple[Any, ...]]) -> None:
        """Adds what ``prepare`` returns, unless it is stale: then it is not even called."""
        with self._changed:
            if self._drops(local_step):
                return
        gradient = prepare()  # may take long, or raise
        with self._changed:
            if self._drops(local_step):
                return
            self.store.add(*gradient)
            self.count += 1
            self._changed.notify_all()

    def _drops(self, local_step: int) -> bool:
        if self.closed:
            raise CancelledError("ApplyGrad operation was cancelled: it has been closed")
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
        """Waits for its turn and ``num_required`` gradients; ``(store, count)``.

        ``check`` may refuse what would be taken; it then stays.
        """
        if timeout is not None and not timeout >= 0:
            raise InvalidArgumentError(
                f"timeout={timeout!r}: it must be None (wait for ever) or seconds, from 0"
            )
        if timeout is not None and timeout > threading.TIMEOUT_MAX:
            timeout = None
        ticket = object()

        def my_turn() -> bool:
            enough = self.count >= num_required
            return self.closed or (enough and self._waiting[0] is ticket)

        with self._changed:
            self._waiting.append(ticket)
            try:
                if not self._wait_for(my_turn, timeout):
                    raise DeadlineExceededError(
                        f"take_grad waited {timeout} s for {num_required} gradients; "
                        f"{self.count} have come"
                    )
                if self.closed:
                    raise CancelledError("TakeGrad operation was cancelled: closed")
                check(self.store)
                taken = self.store, self.count
                self.store, self.count = self._new_store(), 0
                self.step += 1
                return taken
            finally:  # whoever was behind this one may be served now
                self._waiting.remove(ticket)
                self._changed.notify_all()

    def _wait_for(self, ready: Callable[[], bool], timeout: float | None) -> bool:
        """False when the timeout is over; the lock is held by the caller."""
        gone: Callable[[], bool] | None = getattr(peer, "gone", None)
        if gone is None:
            return self._changed.wait_for(ready, timeout)
        end = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            left = max(0.0, end - time.monotonic())
            done = self._changed.wait_for(ready, min(left, _LOOK_EVERY))
            if gone():
                raise CancelledError("TakeGrad operation was cancelled: its taker is gone")
            if done or not left:
                return done

    def set_step(self, new_step: int) -> None:
        """Sets the step, also to a lower one, which is logged."""
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
        """Wakes all who wait; they and all who come later get a CancelledError."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()
