"""What users give for some of the parameters, in their structure or a prefix of it."""

from collections.abc import Callable
from typing import Any

import jax

from jslices._jax import flatten
from jslices._typing import Leaf, PyTree
from jslices.optim.engine.protocol import is_leaf
from jslices.optim.transforms.norms import as_leaf


def map_given(
    argument: str, f: Callable[[Any, Any], Any], given: PyTree, tree: PyTree
) -> Any:
    """``tree``, which mirrors the parameters, with ``f(leaf, what is given for it)``.

    Where nothing is given the leaf stays; so do None and the nodes of ``partition``.
    """
    leaves, structure = flatten(tree, is_leaf=is_leaf_or_masked)
    return structure.unflatten(
        [
            x if mine is None or x is None or _is_masked(x) else f(as_leaf(x), mine)
            for x, mine in zip(leaves, spread_over(argument, given, tree), strict=True)
        ]
    )


def spread_over(argument: str, given: PyTree, tree: PyTree) -> list[Any]:
    """What is given for each leaf of ``tree``, None for nothing."""
    found: list[Any] = []

    def add(mine: PyTree, part: PyTree) -> None:
        found.extend([mine] * len(flatten(part, is_leaf=is_leaf_or_masked)[0]))

    try:
        jax.tree.map(add, given, tree, is_leaf=lambda x: x is None)
    except ValueError as error:
        raise ValueError(
            f"{argument} must have the structure of the parameters or a prefix of it, with "
            f"None for what it does not concern; {error}"
        ) from error
    return found


def is_leaf_or_masked(x: Leaf) -> bool:
    return is_leaf(x) or _is_masked(x)


def _is_masked(x: Leaf) -> bool:
    """True for the empty node that stands for a parameter of another optimizer."""
    return isinstance(x, tuple) and not x
