"""What a function changes in a model of Flax NNX that it is differentiated by."""

import warnings
from collections.abc import Sequence
from typing import Any

import jax

from jslices._densify import current_user_line
from jslices._typing import PyTree


def arrays_of_models(names: Sequence[str], args: Sequence[PyTree]) -> dict[str, Any]:
    """The arrays of the NNX models among the differentiated arguments, by name.

    Without parameters, which ``nnx.remat`` hands back as they were, in new arrays.
    """
    arrays = {}
    for name, arg in zip(names, args, strict=True):
        if any(base.__module__.startswith("flax.nnx.") for base in type(arg).__mro__):
            for path, x in jax.tree_util.tree_flatten_with_path(arg, _is_parameter)[0]:
                if not _is_parameter(x):
                    arrays[name + jax.tree_util.keystr(path)] = x
    return arrays


def _is_parameter(x: object) -> bool:
    return any(
        base.__name__ == "Param" and base.__module__.startswith("flax.nnx.")
        for base in type(x).__mro__
    )


def warn_of_lost_changes(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Warns of what a function has changed in the copy of a model that it is called with.

    The model itself stays as it was, as with ``jax.grad``.
    """
    changed = [name for name, x in before.items() if after.get(name) is not x]
    if changed:
        line = current_user_line()
        message = (
            f"the function changes {', '.join(changed[:3])}, and the model that was passed "
            "stays as it was; argnums=nnx.DiffState(0, nnx.Param) keeps changes, and "
            "differentiates the parameters alone"
        )
        warnings.warn_explicit(message, UserWarning, line.file, line.line)
