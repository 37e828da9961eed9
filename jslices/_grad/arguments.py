"""``argnums=`` and ``has_aux=``, as JAX has them, and Flax NNX."""

from collections.abc import Sequence
from typing import Any

import numpy as np

#: ``argnums=``: numbers of arguments, or ``nnx.DiffState``, which has one and a filter.
Argnums = int | Sequence[int] | Any


def chosen_arguments(argnums: int | Sequence[int], args: Sequence[Any]) -> tuple[int, ...]:
    """The positions of the differentiated arguments, counted from the front."""
    numbers = np.atleast_1d(np.asarray(argnums)).tolist()
    if not all(isinstance(number, int) for number in numbers):
        advice = ""
        if any(hasattr(x, "filter") for x in numbers):  # a nnx.DiffState
            advice = (
                ", which jslices.grad and value_and_grad take; here split the model, "
                "graph, params, rest = nnx.split(model, nnx.Param, ...), and pass a "
                "function of params"
            )
        raise TypeError(f"argnums must be an integer or several, got {argnums!r}{advice}")
    for number in numbers:
        if not -len(args) <= number < len(args):
            error = TypeError if number >= 0 else ValueError  # as JAX's
            raise error(
                f"argnums={argnums} needs at least "
                f"{max(n + 1 if n >= 0 else -n for n in numbers)} positional "
                f"arguments, got {len(args)}; differentiated arguments cannot be "
                "passed by keyword"
            )
    positions = tuple(number % len(args) for number in numbers)
    if len(set(positions)) < len(positions):
        raise ValueError(f"argnums={argnums} names an argument twice")
    return positions


def names_states(argnums: Any) -> bool:
    """True if one of ``argnums`` is a ``nnx.DiffState``."""
    return any(map(is_state, argnums if isinstance(argnums, Sequence) else [argnums]))


def is_state(argnum: Any) -> bool:
    return hasattr(argnum, "argnum") and hasattr(argnum, "filter")


def split_aux(out: Any, has_aux: bool) -> tuple[Any, Any]:
    """The result and aux of what the user's function returns."""
    if not has_aux:
        return out, ()
    if not isinstance(out, tuple | list) or len(out) != 2:
        raise TypeError(
            "with has_aux=True the function must return a pair (result, aux), got "
            f"{type(out).__name__}"
            + (f" of {len(out)}" if isinstance(out, tuple | list) else "")
        )
    return out[0], out[1]
