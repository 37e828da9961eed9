"""Steps of Flax NNX: a model keeps its parameters, and an ``nnx.Optimizer`` their state."""

import functools
import sys
from collections.abc import Callable
from typing import Any

from jslices._grad.arguments import split_aux
from jslices._jax import is_traced
from jslices.optim.transforms.compiled import hint_if_made_anew


def is_nnx_optimizer(tx: object) -> bool:
    """Whether it is an ``nnx.Optimizer``."""
    kind = getattr(sys.modules.get("flax.nnx"), "Optimizer", None)
    return kind is not None and isinstance(tx, kind)


def train_step_of_model(
    step_of: Callable[..., Any], fun: Callable[..., Any], has_aux: bool, holds: bool
) -> Callable[..., Any]:
    """``step(model, optimizer, *args)``, which changes both; ``step_of`` is a train step.

    A step that ``holds`` leaves tables whose rows may be behind in boxes.
    """
    from flax import nnx

    def step(model: Any, optimizer: Any, /, *args: Any, **kwargs: Any) -> Any:
        graph, params, *others = nnx.split(model, optimizer.wrt, ...)

        @functools.wraps(fun)
        def of_params(params: Any, others: Any, *args: Any, **kwargs: Any) -> Any:
            # A copy, as variables that are changed have to be of this trace.
            model = nnx.merge(graph, params, *others, copy=True)
            value, aux = split_aux(fun(model, *args, **kwargs), has_aux)
            return value, (aux, nnx.state(model, nnx.Not(optimizer.wrt)))

        one, state = step_of(of_params, optimizer.tx), nnx.as_pure(optimizer.opt_state)
        call = one.boxed if holds else one
        params, state, value, (aux, rest) = call(params, state, others, *args, **kwargs)
        nnx.update(model, params, rest)
        nnx.update(optimizer.opt_state, nnx.state(state))
        optimizer.step[...] += 1
        return (value, aux) if has_aux else value

    return step


def eval_step_of_model(
    step_of: Callable[..., Any], fun: Callable[..., Any]
) -> Callable[..., Any]:
    """``evaluate(model, optimizer, *args)``, which keeps no change of the model."""
    from flax import nnx

    def evaluate(model: Any, optimizer: Any, /, *args: Any, **kwargs: Any) -> Any:
        graph, params, *others = nnx.split(model, optimizer.wrt, ...)

        @functools.wraps(fun)
        def of_params(params: Any, *args: Any, **kwargs: Any) -> Any:
            return fun(nnx.merge(graph, params, *others, copy=True), *args, **kwargs)

        state = nnx.as_pure(optimizer.opt_state)
        return step_of(of_params, optimizer.tx)(params, state, *args, **kwargs)

    return evaluate


def compiled_for(
    optimizer: Any,
    name: str,
    fun: Callable[..., Any],
    pure: Callable[..., Any],
    boxed: Callable[..., Any] | None,
    **options: Any,
) -> Callable[..., Any]:
    """``js.name(fun, optimizer)``: ``boxed``, by ``nnx.jit``, where nothing is traced."""
    from flax import nnx

    compiled = nnx.jit(boxed, **options) if boxed else pure
    is_new = boxed is not None

    def of_model(model: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal is_new
        if is_traced():
            return pure(model, optimizer, *args, **kwargs)
        results = compiled(model, optimizer, *args, **kwargs)
        if is_new:
            is_new = False
            hint_if_made_anew(name, fun, optimizer, optimizer)
        return results

    return of_model
