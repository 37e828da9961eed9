"""Where functions of arrays take tables that are a type of JAX's: jslices.experimental."""

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import jax

F = TypeVar("F", bound=Callable[..., Any])


def is_table(x: object) -> bool:
    """Whether it is such a table, traced or not."""
    return getattr(x.aval if isinstance(x, jax.core.Tracer) else x, "is_table", False)


def takes_tables(like: str | int = "", part: int | None = None) -> Callable[[F], F]:
    """Lets a function of arrays and slices take tables and their gradients.

    Its result, or this part of it, is like the argument of that name, or at that place: it
    has tables, and gradients of tables, where this has. Without ``like`` it has neither.
    """

    def decorated(fun: F) -> F:
        names = list(inspect.signature(fun).parameters)
        name = like if isinstance(like, str) else (*names, *[""] * 3)[like]
        place = names.index(name) if name else len(names)

        @functools.wraps(fun)
        def run(*args: Any, **kwargs: Any) -> Any:
            loaded = sys.modules.get("jslices.experimental.call")
            if loaded is None:
                return fun(*args, **kwargs)
            mirrored = args[place] if len(args) > place else kwargs.get(name)
            return loaded.call(fun, args, kwargs, mirrored, part)

        return run  # type: ignore[return-value]

    return decorated
