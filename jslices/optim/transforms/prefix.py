"""Prefix pytrees, with a value for some of the parameters."""

from collections.abc import Callable
from typing import Any

from jslices._jax import broadcast_prefix, flatten
from jslices._typing import Leaf, PyTree
from jslices.optim.engine.protocol import is_leaf
from jslices.optim.transforms.norms import as_leaf


def map_with_prefix(
    argument: str, f: Callable[[Leaf, Any], Leaf], prefix: PyTree, tree: PyTree
) -> PyTree:
    """``tree``, which mirrors the parameters, with ``f(leaf, its value in prefix)``.

    Where the value is None the leaf stays; so do None and the nodes of ``partition``.
    """
    leaves, structure = flatten(tree, is_leaf=is_leaf_or_masked)
    values = values_of_prefix(argument, prefix, tree)
    return structure.unflatten(
        [
            x if value is None or x is None or _is_masked(x) else f(as_leaf(x), value)
            for x, value in zip(leaves, values, strict=True)
        ]
    )


def values_of_prefix(argument: str, prefix: PyTree, tree: PyTree) -> list[Any]:
    """The value of ``prefix`` for each leaf of ``tree``, None for nothing."""
    text = (
        f"{argument} must have the structure of the parameters or a prefix of it, with "
        "None for what it does not concern"
    )
    return broadcast_prefix(prefix, tree, text, is_leaf_or_masked)


def is_leaf_or_masked(x: Leaf) -> bool:
    """True for a leaf of a tree of gradients, and for the empty nodes of ``partition``."""
    return is_leaf(x) or _is_masked(x)


def _is_masked(x: Leaf) -> bool:
    return isinstance(x, tuple) and not x
