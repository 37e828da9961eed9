"""``jax.tree.flatten`` for a type checker, which JAX tells nothing of tree definitions."""

from typing import Any

import jax


def flatten(tree: Any, is_leaf: Any = None) -> tuple[list[Any], Any]:
    """The leaves of a pytree, and its structure."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_leaf)
    return leaves, structure
