"""What to type where a function of another package takes IndexedSlices for two arrays.

To such a function slices are a node with two children. It calls nothing of ours but
``tree_flatten``, so it is there that slices can say what to type instead: where JAX
composes the error that another tree has an array in their place, and in Optax's norms,
which count row numbers without any error. The names are those of JAX 0.10 and 0.12 and of
Optax 0.2; should they change, JAX's own error comes back, and tests fail.
"""

import os
import sys
from types import FrameType
from typing import Any

import jax

_NORMS = frozenset({"tree_norm", "tree_l2_norm", "global_norm"})
_OPTAX = f"{os.sep}optax{os.sep}"


def refuse_misuse(slices: Any) -> None:
    """To be called by ``tree_flatten``: raises where that leads nowhere.

    Raises:
      ValueError: where JAX is about to say that two trees differ.
      TypeError: in a norm of Optax.
    """
    frame: FrameType | None = sys._getframe(1)
    for distance in range(5):  # JAX's tree_flatten is the first, then who called it
        frame = frame.f_back if frame is not None else None
        if frame is None:
            return
        name = frame.f_code.co_name
        if name == "_prefix_error" and distance == 1:
            _refuse_other_tree(slices, frame.f_locals)
        elif name in _NORMS:
            _refuse_norm(frame)


def _refuse_other_tree(slices: Any, known: dict[str, Any]) -> None:
    """Says what to type instead, if it is the slices where two trees differ."""
    other = known.get("full_tree")
    if known.get("prefix_tree") is not slices or hasattr(other, "dense_shape"):
        return
    place = jax.tree_util.keystr(known.get("key_path", ()))
    instead = "an array" if hasattr(other, "shape") else f"a {type(other).__name__}"
    raise ValueError(
        f"different types at key path {place or '[]'}: IndexedSlices, where another tree "
        f"has {instead}. Functions that map over gradients take slices for two arrays; "
        "type jslices.apply_updates for eqx.apply_updates, "
        "jslices.optim.partition and masked for those of Optax with a function, "
        "jslices.optim.multi_steps for optax.MultiSteps, jslices.tree.map for "
        "jax.tree.map, and jslices.from_optax(tx) for any other transformation"
    )


def _refuse_norm(frame: FrameType) -> None:
    if _OPTAX in frame.f_code.co_filename:
        raise TypeError(
            "Optax's norms count the row numbers of IndexedSlices; type "
            "jslices.global_norm(grads) for optax.tree.norm, "
            "jslices.optim.clip_global_norm for optax.clip_by_global_norm, and "
            "jslices.from_optax(tx) for any other transformation"
        )
