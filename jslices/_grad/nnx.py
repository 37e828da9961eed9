"""Flax NNX: parts of models differentiated, by ``nnx.DiffState``, and changes kept."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from jslices._grad.call import chosen_arguments, split_aux

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
        numbers = chosen_arguments([getattr(x, "argnum", x) for x in chosen], args)
        pairs = zip(numbers, chosen, strict=True)
        filters = {i: x.filter for i, x in pairs if _is_state(x)}
        for i, x in enumerate(args):
            if i not in numbers and isinstance(x, nnx.Module | nnx.Rngs):
                filters[i] = nnx.Nothing()
        parts: dict[int, Any]
        parts = {i: nnx.split(args[i], of, ...) for i, of in filters.items()}
        states = [parts[i][1] if i in parts else x for i, x in enumerate(args)]

        @functools.wraps(fun)
        def of_states(*states: Any, **kwargs: Any) -> Any:
            args = list(states)
            for i, (graph, _, rest) in parts.items():
                args[i] = nnx.merge(graph, args[i], rest, copy=True)
            result, aux = split_aux(fun(*args, **kwargs), has_aux)
            changed = {i: nnx.state(args[i], nnx.Not(of)) for i, of in filters.items()}
            return result, (aux, changed)

        by_states = differentiate(of_states, numbers if several else numbers[0], True)
        (value, (aux, changed)), grads = by_states(*states, **kwargs)
        for i, state in changed.items():
            nnx.update(args[i], state)
        return (value, aux) if has_aux else value, grads

    return value_and_grad_fun
