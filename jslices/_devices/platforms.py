"""Which platform a program is traced for."""

import contextlib
import contextvars
from collections.abc import Iterator

import jax

_compiling_for: contextvars.ContextVar[str | None] = contextvars.ContextVar(
    "jslices_compiling_for", default=None
)


def platform_at_hand() -> str:
    """``cpu``, ``gpu`` or ``tpu``: of the default device, or of one that is not here."""
    return _compiling_for.get() or jax.default_backend()


@contextlib.contextmanager
def compiling_for(platform: str) -> Iterator[None]:
    """Within this context programs are traced for devices that are not here."""
    token = _compiling_for.set(platform)
    try:
        yield
    finally:
        _compiling_for.reset(token)
