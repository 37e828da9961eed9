"""Flax NNX: parts of models differentiated, by ``nnx.DiffState``, and changes kept."""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from jslices._densify import warn_at_line
from jslices._grad.arguments import chosen_arguments, is_state, split_aux
from jslices._typing import PyTree


def value_and_grad_of_states(
    differentiate: Callable[..., Callable[..., Any]],
    fun: Callable[..., Any],
    argnums: Any,
    has_aux: bool,
) -> Callable[..., tuple[Any, Any]]:
    """``nnx.value_and_grad`` of a function of models, by the states that ``argnums`` name.

    ``differentiate`` is ``value_and_grad`` of a function, ``argnums`` and ``has_aux``. What
    ``fun`` changes in the rest of the models remains changed.
    """
    from flax import nnx

    several = isinstance(argnums, Sequence)
    chosen = argnums if several else [argnums]

    @functools.wraps(fun)
    def value_and_grad_fun(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        numbers = chosen_arguments([getattr(x, "argnum", x) for x in chosen], args)
        pairs = zip(numbers, chosen, strict=True)
        filters = {i: x.filter for i, x in pairs if is_state(x)}
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


# --- changes that are lost ---


def _arrays_of_models(names: Sequence[str], args: Sequence[PyTree]) -> dict[str, Any]:
    """The arrays of NNX models among the differentiated arguments, by name.

    Without parameters, which ``nnx.remat`` returns unchanged in new arrays.
    """
    if "flax.nnx" not in sys.modules:
        return {}
    from flax import nnx

    is_parameter = lambda x: isinstance(x, nnx.Param)  # noqa: E731
    arrays = {}
    for name, arg in zip(names, args, strict=True):
        if any(base.__module__.startswith("flax.nnx.") for base in type(arg).__mro__):
            for path, x in jax.tree_util.tree_leaves_with_path(arg, is_parameter):
                if not is_parameter(x):
                    arrays[name + jax.tree_util.keystr(path)] = x
    return arrays


@contextlib.contextmanager
def lost_changes(names: Sequence[str], args: Sequence[PyTree]) -> Iterator[None]:
    """A context that warns of changes to models, which are lost, as with ``jax.grad``."""
    before = _arrays_of_models(names, args)
    yield
    after = _arrays_of_models(names, args) if before else {}
    changed = [name for name, x in before.items() if after.get(name) is not x]
    if changed:
        warn_at_line(
            f"the function changes {', '.join(changed[:3])}, and the model that was passed "
            "stays as it was; argnums=nnx.DiffState(0, nnx.Param) keeps changes, and "
            "differentiates the parameters alone",
            category=UserWarning,
        )
