"""``jax.tree`` for trees in which IndexedSlices are leaves.

``jax.tree.map(f, grads)`` maps over ``values`` and ``indices``, and so changes row numbers;
``js.tree.map(f, grads)`` passes whole slices to ``f``. The functions have the signatures of
``jax.tree``; ``is_leaf`` makes further nodes leaves.

Example:
  >>> import jax.numpy as jnp, jslices as js
  >>> s = js.IndexedSlices(jnp.ones((1, 2)), jnp.array([3]), (4, 2))
  >>> halves = js.tree.map(lambda g: g / 2, {"table": s, "bias": jnp.ones(2)})
  >>> halves["table"].indices, halves["table"].values
  (Array([3], dtype=int32), Array([[0.5, 0.5]], dtype=float32))
  >>> len(js.tree.leaves(halves))
  2
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax.tree_util import PyTreeDef

from jslices._names import no_such_name, public
from jslices._slices import is_slices
from jslices._typing import PyTree

IsLeaf = Callable[[Any], bool] | None


def _or_slices(is_leaf: IsLeaf) -> Callable[[Any], bool]:
    return is_slices if is_leaf is None else lambda x: is_slices(x) or is_leaf(x)


def map(f: Callable[..., Any], tree: PyTree, *rest: PyTree, is_leaf: IsLeaf = None) -> Any:
    """``jax.tree.map`` that passes whole slices to ``f``."""
    return jax.tree.map(f, tree, *rest, is_leaf=_or_slices(is_leaf))


def map_with_path(
    f: Callable[..., Any], tree: PyTree, *rest: PyTree, is_leaf: IsLeaf = None
) -> Any:
    """``jax.tree.map_with_path`` that passes whole slices to ``f``."""
    return jax.tree_util.tree_map_with_path(f, tree, *rest, is_leaf=_or_slices(is_leaf))


def leaves(tree: PyTree, is_leaf: IsLeaf = None) -> list[Any]:
    """``jax.tree.leaves`` with slices as leaves."""
    return jax.tree.leaves(tree, is_leaf=_or_slices(is_leaf))


def leaves_with_path(tree: PyTree, is_leaf: IsLeaf = None) -> list[Any]:
    """``jax.tree.leaves_with_path`` with slices as leaves."""
    return jax.tree_util.tree_leaves_with_path(tree, is_leaf=_or_slices(is_leaf))


def flatten(tree: PyTree, is_leaf: IsLeaf = None) -> tuple[list[Any], Any]:
    """``jax.tree.flatten`` with slices as leaves; ``structure.unflatten`` undoes it."""
    return jax.tree.flatten(tree, is_leaf=_or_slices(is_leaf))


def structure(tree: PyTree, is_leaf: IsLeaf = None) -> Any:
    """``jax.tree.structure`` with slices as leaves, equal to that of the dense tree."""
    return jax.tree.structure(tree, is_leaf=_or_slices(is_leaf))


_NOTHING = object()


def reduce(
    function: Callable[[Any, Any], Any],
    tree: PyTree,
    initializer: PyTree = _NOTHING,
    is_leaf: IsLeaf = None,
) -> Any:
    """``jax.tree.reduce`` with slices as leaves."""
    start = () if initializer is _NOTHING else (initializer,)
    return functools.reduce(function, leaves(tree, is_leaf), *start)


def all(tree: PyTree, *, is_leaf: IsLeaf = None) -> bool:
    """``jax.tree.all`` with slices as leaves."""
    return jax.tree.all(tree, is_leaf=_or_slices(is_leaf))


def unflatten(treedef: PyTreeDef, leaves: Iterable[PyTree]) -> Any:
    """``jax.tree.unflatten``; the leaves may be slices."""
    return jax.tree.unflatten(treedef, leaves)


def flatten_with_path(tree: PyTree, is_leaf: IsLeaf = None) -> tuple[list[Any], Any]:
    """``jax.tree.flatten_with_path`` with slices as leaves."""
    return jax.tree_util.tree_flatten_with_path(tree, is_leaf=_or_slices(is_leaf))


def to_dense(tree: PyTree) -> Any:
    """The tree with every IndexedSlices replaced by its dense array."""
    return map(lambda x: x.to_dense() if is_slices(x) else x, tree)


__all__, __dir__ = public(__name__)


def __getattr__(name: str) -> Any:
    no_such_name(__name__, name)
