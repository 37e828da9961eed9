"""Optimizers of jslices made again: for another learning rate, and from a file of Keras."""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import keras
import numpy as np

from jslices import GradientTransformation, IndexedSlices, optim
from jslices.extend import PyTree
from jslices.optim import MadeBy

#: The key of what describes an optimizer.
MADE_BY = "jslices.optim"


def learning_rates(tx: PyTree) -> list[Any]:
    """Those of an optimizer and of all that it was made from."""
    return list(_rates(tx))


def _rates(x: PyTree) -> Iterator[Any]:
    for made_by in filter(None, map(_made_by, jax.tree.leaves(x, is_leaf=_tells))):
        for name, argument in made_by.arguments.items():
            yield from [argument] if name == "learning_rate" else _rates(argument)


def with_learning_rate(tx: PyTree, rate: Any) -> PyTree:
    """The same optimizer with ``rate`` for every learning rate in it."""

    def again(x: PyTree) -> PyTree:
        made_by = _made_by(x)
        if made_by is None:
            return x
        arguments = {
            name: rate if name == "learning_rate" else with_learning_rate(argument, rate)
            for name, argument in made_by.arguments.items()
        }
        return made_by._replace(arguments=arguments)()

    if not any(map(_made_by, jax.tree.leaves(tx, is_leaf=_tells))):
        return tx  # as it is: not everything here is a pytree that can be made anew
    return jax.tree.map(again, tx, is_leaf=_tells)


def described(x: Any) -> Any:
    """How ``x`` was made, in numbers, strings, lists and dicts.

    ``x`` is an optimizer, or an argument of one; what is neither a number nor an array
    (schedules, functions) is described by Keras, and read again if it is registered with
    ``keras.saving.register_keras_serializable`` or among the ``custom_objects``.
    """
    made_by = _made_by(x)
    if made_by is not None:
        arguments = {key: described(value) for key, value in made_by.arguments.items()}
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
        return [described(each) for each in x]
    if isinstance(x, Mapping):
        return {key: described(value) for key, value in x.items()}
    if isinstance(x, np.dtype | type):
        return np.dtype(x).name
    return keras.saving.serialize_keras_object(x)


def made_from(description: Any) -> Any:
    """What :func:`described` was given."""
    if isinstance(description, list):
        return [made_from(each) for each in description]
    if not isinstance(description, Mapping):
        return description
    if MADE_BY in description:
        arguments = {k: made_from(v) for k, v in description["arguments"].items()}
        return _made(description[MADE_BY], arguments)
    if "class_name" in description:
        return keras.saving.deserialize_keras_object(description)
    return {key: made_from(value) for key, value in description.items()}


def _made(name: str, arguments: dict[str, Any]) -> GradientTransformation:
    function: Any = getattr(optim, name, None)
    if not (inspect.isfunction(function) and hasattr(function, "__wrapped__")):
        raise ValueError(f"the file names an optimizer that jslices.optim lacks: {name!r}")
    return MadeBy(function, arguments)()


def _tells(x: PyTree) -> bool:
    return _made_by(x) is not None


def _made_by(x: PyTree) -> MadeBy | None:
    """The call that made ``x``, if it is an optimizer that tells."""
    return x.made_by if isinstance(x, GradientTransformation) else None
