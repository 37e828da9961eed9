"""Gradient transformations that remember nothing."""

from collections.abc import Callable
from typing import Any

import jax

from jslices.optim._engine.protocol import GradientTransformation
from jslices.optim.transforms.leaves import is_leaf


def stateless(f: Callable[[Any], Any]) -> GradientTransformation:
    """The transformation that applies ``f`` to the gradients and remembers nothing."""

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        return f(grads), state

    return GradientTransformation(lambda params: (), update)


def each_leaf(f: Callable[[Any], Any]) -> GradientTransformation:
    """``f`` on every array and IndexedSlices; None stays None."""

    def mapped(grads: Any) -> Any:
        return jax.tree.map(lambda g: g if g is None else f(g), grads, is_leaf=is_leaf)

    return stateless(mapped)
