"""Parameters as they are now: what ``tx.now`` makes of ``catch_up``.

A catch-up of all rows gives what rows are now. While somebody is reading, optimizers return
views in its place (``_grad/now.py``), and write nothing. So whatever passes a catch-up on,
as wrappers do, passes views on, and is read by rows.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any

from jslices._jax import trace_state


class Reading:
    """A catch-up that is only read."""

    def __init__(self, caught_up: bool) -> None:
        #: Whether the caller lets arrays that are used as a whole catch up himself.
        self.caught_up = caught_up
        self.views: list[Any] = []  # of the parameters that are read by rows
        self.trace = trace_state()


_READING: contextvars.ContextVar[Reading | None] = contextvars.ContextVar(
    "reading", default=None
)


def current_reading() -> Reading | None:
    """The one in which a catch-up is called; None where it is to be done.

    As in a program within, which JAX keeps for calls in which nobody reads.
    """
    reading = _READING.get()
    return reading if reading and reading.trace == trace_state() else None


@contextlib.contextmanager
def reading(caught_up: bool) -> Iterator[Reading]:
    """A context in which catch-ups are only read."""
    new = Reading(caught_up)
    token = _READING.set(new)
    try:
        yield new
    finally:
        _READING.reset(token)


def not_read(catch_up: Callable[..., Any]) -> Callable[..., Any]:
    """A catch-up that is always done."""

    @functools.wraps(catch_up)
    def done(*args: Any) -> Any:
        token = _READING.set(None)
        try:
            return catch_up(*args)
        finally:
            _READING.reset(token)

    return done
