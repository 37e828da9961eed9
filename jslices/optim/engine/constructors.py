"""Decorators of the functions that make optimizers and combinators."""

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec

import jax

from jslices.optim.engine.protocol import GradientTransformation, MadeBy

P = ParamSpec("P")

#: So many optimizers are remembered by their arguments.
REMEMBERED = 128


def combinator(
    make: Callable[P, GradientTransformation],
) -> Callable[P, GradientTransformation]:
    """Note in transformations how ``make`` was called: their :class:`MadeBy`."""
    signature = inspect.signature(make)

    @functools.wraps(make)
    def made(*args: P.args, **kwargs: P.kwargs) -> GradientTransformation:
        tx = make(*args, **kwargs)
        if not isinstance(tx, GradientTransformation):  # the state of one: freeze_rows
            return tx
        arguments = dict(signature.bind(*args, **kwargs).arguments)
        return tx.replace(made_by=MadeBy(made, arguments))

    return made


def optimizer(
    make: Callable[P, GradientTransformation],
) -> Callable[P, GradientTransformation]:
    """The same, and compile optimizers as a whole outside of ``jax.jit``.

    Equal arguments give the same functions, so that they are compiled once.
    """

    def compiled(*args: P.args, **kwargs: P.kwargs) -> GradientTransformation:
        return make(*args, **kwargs).as_programs()

    remembered = functools.lru_cache(REMEMBERED, typed=True)(compiled)

    @functools.wraps(make)
    def made(*args: P.args, **kwargs: P.kwargs) -> GradientTransformation:
        arguments = (*args, *kwargs.values())
        if any(isinstance(x, jax.Array) for x in arguments):
            # optax.inject_hyperparams makes an optimizer in every step, of other arrays:
            # each would be a program of its own.
            return make(*args, **kwargs).checked()
        if not all(x is None or isinstance(x, bool | int | float | str) for x in arguments):
            return compiled(*args, **kwargs).checked()
        return remembered(*args, **kwargs).checked()  # type: ignore[arg-type]

    return combinator(made)
