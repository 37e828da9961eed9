"""Flax NNX: parts of models differentiated, by ``nnx.DiffState``, and changes kept."""

import functools
import operator
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jslices._densify import current_user_line
from jslices._typing import PyTree

#: ``argnums=``: numbers of arguments, or ``nnx.DiffState``, which has one and a filter.
Argnums = int | Sequence[int] | Any


def names_states(argnums: Any) -> bool:
    """Whether one of ``argnums`` is a ``nnx.DiffState``."""
    return any(map(_is_state, argnums if isinstance(argnums, Sequence) else [argnums]))


def _is_state(argnum: Any) -> bool:
    return hasattr(argnum, "argnum") and hasattr(argnum, "filter")


def value_and_grad_of_states(
    differentiate: Callable[..., Callable[..., Any]],
    fun: Callable[..., Any],
    argnums: Any,
    has_aux: bool,
) -> Callable[..., tuple[Any, Any]]:
    """``nnx.value_and_grad``: by the states that ``argnums`` name.

    Args:
      differentiate: ``value_and_grad`` of a function, ``argnums`` and ``has_aux``.
      fun: a function of models.
      argnums: a ``nnx.DiffState``, or a sequence of these and numbers.
      has_aux: whether ``fun`` returns ``(result, aux)``.

    Returns:
      A function like ``fun``, whose gradients are ``nnx.State``. What ``fun`` changes in
      the models, besides what is differentiated, is changed when it returns.
    """
    from flax import nnx

    several = isinstance(argnums, Sequence)
    chosen = argnums if several else [argnums]

    @functools.wraps(fun)
    def value_and_grad_fun(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        numbers = [operator.index(getattr(x, "argnum", x)) % len(args) for x in chosen]
        pairs = zip(numbers, chosen, strict=True)
        filters = {i: x.filter for i, x in pairs if _is_state(x)}
        for i, x in enumerate(args):
            if i not in numbers and isinstance(x, nnx.Module | nnx.Rngs):
                filters[i] = nnx.Nothing()
        parts: dict[int, Any]
        parts = {i: nnx.split(args[i], of, ...) for i, of in filters.items()}
        states = [parts[i][1] if i in parts else x for i, x in enumerate(args)]

        def of_states(*states: Any, **kwargs: Any) -> Any:
            args = list(states)
            for i, (graph, _, rest) in parts.items():
                args[i] = nnx.merge(graph, args[i], rest, copy=True)
            out = fun(*args, **kwargs)
            result, aux = out if has_aux else (out, None)
            changed = {i: nnx.state(args[i], nnx.Not(of)) for i, of in filters.items()}
            return result, (aux, changed)

        how = tuple(numbers) if several else numbers[0]
        by_states = differentiate(of_states, how, True)
        (value, (aux, changed)), grads = by_states(*states, **kwargs)
        for i, state in changed.items():
            nnx.update(args[i], state)
        return (value, aux) if has_aux else value, grads

    return value_and_grad_fun


def arrays_of_models(names: Sequence[str], args: Sequence[PyTree]) -> dict[str, Any]:
    """The arrays of the NNX models among the differentiated arguments, by name."""
    arrays = {}
    for name, arg in zip(names, args, strict=True):
        if any(base.__module__.startswith("flax.nnx.") for base in type(arg).__mro__):
            for path, x in jax.tree_util.tree_flatten_with_path(arg)[0]:
                arrays[name + jax.tree_util.keystr(path)] = x
    return arrays


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
