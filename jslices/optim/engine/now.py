"""Parameters as they are now: what ``tx.now`` makes of ``catch_up``.

A catch-up of all rows gives what rows are now. While somebody is reading, optimizers give
views in its place (``_grad/now.py``), and write nothing. So whatever passes a catch-up on,
as wrappers do, passes views on, and is read by rows.
"""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any


class Reading:
    """A catch-up that is only read."""

    def __init__(self, caught_up: bool) -> None:
        #: Whether the caller lets arrays that are used as a whole catch up himself.
        self.caught_up = caught_up
        self.views: list[Any] = []  # of the parameters that are read by rows


_READING: contextvars.ContextVar[Reading | None] = contextvars.ContextVar(
    "reading", default=None
)


def current_reading() -> Reading | None:
    """The one in which a catch-up is called; None where it writes."""
    return _READING.get()


@contextlib.contextmanager
def reading(caught_up: bool) -> Iterator[Reading]:
    """A context in which catch-ups are only read."""
    token = _READING.set(Reading(caught_up))
    try:
        yield _READING.get()  # type: ignore[misc]
    finally:
        _READING.reset(token)
