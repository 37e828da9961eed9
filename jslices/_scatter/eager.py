"""Compiling a function as a whole when it is called outside of jit."""

import functools
from collections.abc import Callable
from typing import Any

import jax


def compiled(*static: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """``jax.jit`` for concrete arguments; while JAX traces, the plain function.

    A call of a jitted function would hide from :func:`jslices.explain`, and from warnings,
    which line of the user's program it came from.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        jitted = jax.jit(function, static_argnums=static)

        @functools.wraps(function)
        def call(*args: Any) -> Any:
            tracing = any(isinstance(x, jax.core.Tracer) for x in args)
            return (function if tracing else jitted)(*args)

        return call

    return decorate
