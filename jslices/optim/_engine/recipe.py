"""How an optimizer was made, so that it can be made again with another learning rate."""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, ParamSpec

import jax

from jslices.optim._engine.protocol import GradientTransformation

#: The attribute of functions whose results know their recipe.
RECORDED = "_recorded"

P = ParamSpec("P")
Make = Callable[P, GradientTransformation]


class Recipe(NamedTuple):
    """A call that makes an optimizer.

    Attributes:
      make: the function, such as :func:`jslices.adam`.
      arguments: what it was called with, by the names of its parameters.
    """

    make: Make[...]
    arguments: dict[str, Any]

    def __call__(self) -> GradientTransformation:
        """Makes the optimizer."""
        bound = inspect.signature(self.make).bind_partial()
        bound.arguments.update(self.arguments)
        return self.make(*bound.args, **bound.kwargs)


def recorded(
    make: Callable[P, GradientTransformation],
) -> Callable[P, GradientTransformation]:
    """``make``, whose results know their :class:`Recipe`."""
    signature = inspect.signature(make)

    @functools.wraps(make)
    def made(*args: P.args, **kwargs: P.kwargs) -> GradientTransformation:
        arguments = dict(signature.bind(*args, **kwargs).arguments)
        return make(*args, **kwargs).replace(recipe=Recipe(made, arguments))

    made.__dict__[RECORDED] = True
    return made


#: So many optimizers are remembered by their arguments.
REMEMBERED = 128


def optimizer(
    make: Callable[P, GradientTransformation],
) -> Callable[P, GradientTransformation]:
    """``make``, recorded, whose results are compiled as a whole outside of ``jax.jit``.

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

    return recorded(made)


def makes_recorded(make: Any) -> bool:
    """Whether ``make`` is a function whose results know their recipe."""
    return getattr(make, RECORDED, False) is True


def learning_rates(tx: Any) -> list[Any]:
    """Those of an optimizer and of all that it was made from."""
    return list(_rates(tx))


def _rates(x: Any) -> Iterator[Any]:
    for part in jax.tree.leaves(x, is_leaf=_is_recorded):
        if _is_recorded(part):
            for name, argument in part.recipe.arguments.items():
                yield from [argument] if name == "learning_rate" else _rates(argument)


def with_learning_rate(tx: Any, rate: Any) -> Any:
    """The same optimizer with ``rate`` for every learning rate in it."""

    def remade(x: Any) -> Any:
        if not _is_recorded(x):
            return x
        arguments = {
            name: rate if name == "learning_rate" else with_learning_rate(argument, rate)
            for name, argument in x.recipe.arguments.items()
        }
        return x.recipe._replace(arguments=arguments)()

    parts = jax.tree.leaves(tx, is_leaf=_is_recorded)
    if not any(map(_is_recorded, parts)):
        return tx  # as it is: not everything here is a pytree that can be made anew
    return jax.tree.map(remade, tx, is_leaf=_is_recorded)


def _is_recorded(x: Any) -> bool:
    return isinstance(x, GradientTransformation) and x.recipe is not None
