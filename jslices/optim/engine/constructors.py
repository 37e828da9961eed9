"""Decorators of the functions that make optimizers and combinators."""

import functools
import inspect
from collections.abc import Callable, Hashable
from typing import ParamSpec

import jax
import numpy as np
from jax.tree_util import PyTreeDef

from jslices._arguments import check_arguments
from jslices._jax import flatten
from jslices.optim.engine.protocol import GradientTransformation, MadeBy

P = ParamSpec("P")

#: So many optimizers of each kind are remembered by their arguments, and compiled.
REMEMBERED = 64

#: Types of arguments that they are remembered by.
HASHED = (bool, int, float, str, type, np.dtype)


def combinator(
    make: Callable[P, GradientTransformation],
) -> Callable[P, GradientTransformation]:
    """Check arguments, and note in transformations how they were made: ``made_by``.

    What an argument may be stands in its annotation (:mod:`jslices._arguments`).
    """
    signature, annotations = inspect.signature(make), inspect.get_annotations(make)

    @functools.wraps(make)
    def made(*args: P.args, **kwargs: P.kwargs) -> GradientTransformation:
        try:
            arguments = dict(signature.bind(*args, **kwargs).arguments)
        except TypeError:  # of which Python says more
            return make(*args, **kwargs)
        check_arguments(make.__name__, annotations, arguments)
        tx = make(*args, **kwargs)
        if not isinstance(tx, GradientTransformation):  # the state of one: freeze_rows
            return tx
        return tx.replace(made_by=MadeBy(made, arguments))

    return made


def optimizer(
    make: Callable[P, GradientTransformation],
) -> Callable[P, GradientTransformation]:
    """The same, and compile optimizers as a whole outside of ``jax.jit``.

    Equal arguments give the same functions, so that they are compiled once. Some run
    operation by operation: a program would ask a schedule or a mask that is a function
    only once; and who makes an optimizer in every step, of other numbers, would wait for a
    program each time (0.2 s, instead of 5 ms for the operations).
    """

    def compiled(*args: P.args, **kwargs: P.kwargs) -> GradientTransformation:
        tx, number = make(*args, **kwargs), remembered.cache_info().misses
        return tx if number > REMEMBERED else tx.as_programs()

    @functools.lru_cache(REMEMBERED, typed=True)
    def remembered(tree: PyTreeDef, *leaves: Hashable) -> GradientTransformation:
        args, kwargs = tree.unflatten(leaves)
        return compiled(*args, **kwargs)

    @functools.wraps(make)
    def made(*args: P.args, **kwargs: P.kwargs) -> GradientTransformation:
        leaves, tree = flatten((args, kwargs))  # a mask is a tree
        if any(map(_differs_by_step, leaves)):
            return make(*args, **kwargs).checked()
        if not all(isinstance(x, HASHED) for x in leaves):
            return compiled(*args, **kwargs).checked()
        return remembered(tree, *leaves).checked()

    return combinator(made)


def _differs_by_step(argument: object) -> bool:
    """Whether it is a function, or an array, as optax.inject_hyperparams passes."""
    function = callable(argument) and not isinstance(argument, type)
    return function or isinstance(argument, jax.Array | np.ndarray)
