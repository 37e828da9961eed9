"""Decorators of the functions that make optimizers and combinators."""

import functools
import inspect
from collections.abc import Callable, Hashable
from typing import Any, ParamSpec

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import PyTreeDef

from jslices._arguments import check_arguments, shown
from jslices._jax import flatten
from jslices._place.boundary import (
    drop_sharding,
    explicit_mesh,
    on_any_mesh,
    one_program,
    with_auto_axes,
)
from jslices._typing import Gradients, Key, Params, PyTree, Scalar, State
from jslices.optim.engine.numbers import value_at
from jslices.optim.engine.protocol import (
    GradientTransformation,
    left_to_xla,
    shardings_of_step,
)

P = ParamSpec("P")

#: So many optimizers of each kind are remembered by their arguments, and compiled.
REMEMBERED = 64

#: Types of arguments that they are remembered by.
HASHED = (bool, int, float, str, type, np.dtype)

#: Arguments that may be schedules.
SCHEDULED = ("learning_rate", "weight_decay", "weight_decay_rate")


def combinator(
    make: Callable[P, GradientTransformation],
) -> Callable[P, GradientTransformation]:
    """Check arguments by their annotations (:mod:`jslices._arguments`)."""
    signature, annotations = inspect.signature(make), inspect.get_annotations(make)

    @functools.wraps(make)
    def made(*args: P.args, **kwargs: P.kwargs) -> GradientTransformation:
        try:
            arguments = dict(signature.bind(*args, **kwargs).arguments)
        except TypeError as error:
            names = ", ".join(signature.parameters)
            raise TypeError(f"{make.__name__}: {error}; it takes {names}") from None
        check_arguments(make.__name__, annotations, arguments)
        tx, usual = make(*args, **kwargs), signature.parameters
        if getattr(tx, "call", "") is None:
            text = lambda x: shown(x) if hasattr(x, "shape") else repr(x)  # noqa: E731
            own = {k: text(x) for k, x in arguments.items()}
            own = {k: x for k, x in own.items() if x != text(usual[k].default)}
            tx.call = f"{make.__name__}({', '.join(map('='.join, own.items()))})"
        return tx

    return made


def optimizer(
    make: Callable[P, GradientTransformation],
) -> Callable[P, GradientTransformation]:
    """The same, and compile optimizers as a whole outside of ``jax.jit``.

    Equal arguments give the same optimizer, which is compiled once. A schedule is
    asked in each step, and its number an argument of the program, as arrays are; that of
    an exact optimizer asks itself, for missed steps too. Some run operation by operation:
    those with a mask that is a function, and what comes after many others: building a new
    optimizer in each step would compile each time (0.2 s, instead of 5 ms).
    """
    signature = inspect.signature(make)

    def by_name(**arguments: Any) -> GradientTransformation:
        tx: GradientTransformation = make(**arguments)  # type: ignore[call-arg]
        return tx.replace(exact=True) if arguments.get("untouched") == "exact" else tx

    @functools.lru_cache(REMEMBERED, typed=True)
    def remembered(tree: PyTreeDef, *leaves: Hashable) -> GradientTransformation:
        tx, number = by_name(**tree.unflatten(leaves)), remembered.cache_info().misses
        return tx if number > REMEMBERED else tx.as_programs()

    @functools.lru_cache(2 * REMEMBERED, typed=True)
    def program(name: str, tree: PyTreeDef, *leaves: Hashable) -> Callable[..., Any]:
        """A step of which some arguments of the optimizer are numbers of the step."""
        adds = name == "apply"

        @on_any_mesh(lambda _, *operands: shardings_of_step(*operands, adds=adds))
        def with_numbers(numbers: dict[str, Scalar], *operands: PyTree) -> Any:
            tx = by_name(**tree.unflatten(leaves), **numbers)
            return getattr(tx, name)(*operands)

        def step(numbers: dict[str, Scalar], grads: Gradients, *rest: PyTree) -> Any:
            return with_numbers(numbers, left_to_xla(grads, rest[0]), *rest)

        step.__name__ = name
        several = program.cache_info().misses > 2 * REMEMBERED
        return step if several else one_program(step)

    def evaluating_schedules(
        tx: GradientTransformation, numbers: dict[str, Any], *rest: Any
    ) -> GradientTransformation:
        def step(name: str) -> Callable[..., Any]:
            def with_values(
                grads: Gradients, state: State, params: Params = None, *key: Key
            ) -> tuple[PyTree, State]:
                if not hasattr(state, "count"):  # of another optimizer, which is refused
                    return getattr(tx, name)(grads, state, params, *key)  # type: ignore[no-any-return]
                now = {name: value_at(x, state.count) for name, x in numbers.items()}
                return program(name, *rest)(now, grads, state, params, *key)  # type: ignore[no-any-return]

            return with_values

        own = tx.averaged  # which asks in its steps itself
        return tx.replace(update=step("update"), apply=step("apply"), averaged=own)

    @functools.wraps(make)
    def made(*args: P.args, **kwargs: P.kwargs) -> GradientTransformation:
        arguments = signature.bind(*args, **kwargs).arguments
        numbers = {name: x for name, x in arguments.items() if _differs_by_step(name, x)}
        leaves, tree = flatten({k: x for k, x in arguments.items() if k not in numbers})
        hashed = all(isinstance(x, HASHED) for x in leaves)  # a mask may be a tree of them
        if hashed and not numbers:
            return remembered(tree, *leaves)
        arrays = {name: x for name, x in numbers.items() if not callable(x)}
        with with_auto_axes(explicit_mesh(arrays)):  # as in a step
            tx = by_name(**(arguments | drop_sharding(arrays)))
        if hashed and not tx.catches_up:
            tx = evaluating_schedules(tx, numbers, tree, *leaves)
        elif not arrays and not any(map(_is_function, leaves)):
            tx = tx.as_programs()
        return tx

    return combinator(made)


def _differs_by_step(name: str, argument: object) -> bool:
    """Whether it is a schedule, or an array, as optax.inject_hyperparams passes."""
    if isinstance(argument, jax.Array | np.ndarray):
        return name in SCHEDULED or jnp.issubdtype(argument.dtype, jnp.inexact)  # no sizes
    return name in SCHEDULED and _is_function(argument)


def _is_function(argument: object) -> bool:
    return callable(argument) and not isinstance(argument, type)
