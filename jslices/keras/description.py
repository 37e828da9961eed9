"""Optimizers of jslices made again: for another learning rate, and from a file of Keras."""

import inspect
from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import keras
import numpy as np

from jslices import GradientTransformation, IndexedSlices, optim
from jslices.extend import PyTree
from jslices.optim import MadeBy

#: The key under which the function that made an optimizer is named.
MADE_BY = "jslices.optim"
#: Numbers, strings, lists and dicts.
PlainData: TypeAlias = Any


def learning_rates(tx: PyTree) -> list[Any]:
    """The learning rates of an optimizer and of all that it was made from."""
    rates: list[Any] = []
    for made_by in filter(None, map(_made_by, jax.tree.leaves(tx, is_leaf=_tells))):
        for name, argument in _arguments(made_by).items():
            rates += [argument] if name == "learning_rate" else learning_rates(argument)
    return rates


def with_learning_rate(tx: PyTree, rate: jax.typing.ArrayLike) -> PyTree:
    """The same optimizer with ``rate`` for every learning rate in it."""

    def again(x: PyTree) -> PyTree:
        made_by = _made_by(x)
        if made_by is None:
            return x
        arguments = {
            name: rate if name == "learning_rate" else with_learning_rate(argument, rate)
            for name, argument in _arguments(made_by).items()
        }
        return made_by._replace(arguments=arguments)()

    if not any(map(_made_by, jax.tree.leaves(tx, is_leaf=_tells))):
        return tx  # as it is: not everything here is a pytree that can be made anew
    return jax.tree.map(again, tx, is_leaf=_tells)


def serialize(x: PyTree) -> PlainData:
    """How ``x``, an optimizer or an argument of one, was made.

    Schedules and functions are described by Keras, which finds them again if they are
    registered with ``keras.saving.register_keras_serializable`` or among the
    ``custom_objects``.
    """
    made_by = _made_by(x)
    if made_by is not None:
        arguments = {key: serialize(value) for key, value in made_by.arguments.items()}
        return {MADE_BY: made_by.function.__name__, "arguments": arguments}
    if hasattr(x, "update") and hasattr(x, "init"):
        raise ValueError(
            "an optimizer of Optax, or one that was put together from functions, cannot be "
            "written into a file; type model.save_weights(path), or use one of jslices"
        )
    if isinstance(x, jax.ShapeDtypeStruct | IndexedSlices):
        raise ValueError(
            "gradients, which multi_steps is made with, cannot be written into a file; "
            "type model.save_weights(path)"
        )
    if isinstance(x, list | tuple):
        return [serialize(each) for each in x]
    if isinstance(x, Mapping):
        return {key: serialize(value) for key, value in x.items()}
    if isinstance(x, np.dtype | type):
        return np.dtype(x).name
    return keras.saving.serialize_keras_object(x)


def deserialize(description: PlainData) -> Any:
    """The inverse of :func:`serialize`."""
    if isinstance(description, list):
        return [deserialize(each) for each in description]
    if not isinstance(description, Mapping):
        return description
    if MADE_BY in description:
        name = description[MADE_BY]
        function: Any = getattr(optim, name, None)
        if not (inspect.isfunction(function) and hasattr(function, "__wrapped__")):
            raise ValueError(
                f"the file names an optimizer that jslices.optim lacks: {name!r}"
            )
        return MadeBy(function, deserialize(description["arguments"]))()
    if "class_name" in description:
        return keras.saving.deserialize_keras_object(description)
    return {key: deserialize(value) for key, value in description.items()}


def _arguments(made_by: MadeBy) -> dict[str, Any]:
    """What an optimizer was made with, and a learning rate that is the default."""
    rate = inspect.signature(made_by.function).parameters.get("learning_rate")
    if rate is None or rate.default is rate.empty:
        return made_by.arguments
    return {rate.name: rate.default, **made_by.arguments}


def _tells(x: PyTree) -> bool:
    return _made_by(x) is not None


def _made_by(x: PyTree) -> MadeBy | None:
    """The call that made ``x``, if it is an optimizer that tells."""
    return x.made_by if isinstance(x, GradientTransformation) else None
