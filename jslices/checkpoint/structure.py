"""The shape of a tree as JSON, so that a checkpoint can be restored without a template."""

from collections.abc import Mapping
from typing import Any

import jax

from jslices._errors import InvalidArgumentError
from jslices._slices import IndexedSlices, is_slices
from jslices.checkpoint.names import ROOT, key_text


def describe(tree: Any, prefix: str = "") -> Any:
    """A tree with the names of its leaves in their places.

    Dicts, lists, tuples, None and IndexedSlices are told apart. Any other node, an
    optimizer's state for example, becomes a dict of its parts.
    """
    if tree is None:
        return None
    if is_slices(tree):
        values, indices = _joined(prefix, "values"), _joined(prefix, "indices")
        return {"slices": [values, indices], "dense_shape": tree.dense_shape}
    children, _ = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda node: node is not tree
    )
    if len(children) == 1 and not children[0][0]:
        return prefix or ROOT
    parts = [_described(path, child, prefix) for path, child in children]
    if type(tree) in (list, tuple):
        return {type(tree).__name__: [part for _, part in parts]}
    return {"dict": parts}


def rebuild(description: Any, leaves: Mapping[str, Any]) -> Any:
    """The tree that was described, with ``leaves`` in their places."""
    if description is None:
        return None
    if isinstance(description, str):
        return leaves[description]
    kind, parts = next(iter(description.items()))
    if kind == "slices":
        shape = description["dense_shape"]
        children = tuple(leaves[name] for name in parts)
        counts = [len(child) for child in children]
        if counts[0] != counts[1]:
            raise InvalidArgumentError(
                f"rows would leave {counts[0]} values and {counts[1]} indices of "
                f"IndexedSlices; ask for the same rows of {parts[0]!r} and {parts[1]!r}"
            )
        return IndexedSlices.tree_unflatten(
            None if shape is None else tuple(shape), children
        )
    if kind == "dict":
        return {key: rebuild(part, leaves) for key, part in parts}
    return {"list": list, "tuple": tuple}[kind](rebuild(part, leaves) for part in parts)


def _described(path: Any, child: Any, prefix: str) -> tuple[Any, Any]:
    key = getattr(path[0], "key", None)
    text = "/".join(map(key_text, path))
    whole = len(path) == 1 and isinstance(key, int) and not isinstance(key, bool)
    return (key if whole else text), describe(child, _joined(prefix, text))


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}/{name}" if prefix else name
