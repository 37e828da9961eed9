"""An optimizer of jslices as the plain data that Keras writes into a file, and back."""

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from jslices import GradientTransformation, optim
from jslices.extend import Recipe, makes_recorded

#: The key of what describes an optimizer.
MADE_BY = "jslices.optim"


def described(x: Any) -> Any:
    """How ``x`` was made, in numbers, strings, lists and dicts.

    ``x`` is an optimizer, or an argument of one; what is neither a number nor an array
    (schedules, functions) is described by Keras, and found again if it is registered with
    ``keras.saving.register_keras_serializable`` or among the ``custom_objects``.
    """
    if isinstance(x, GradientTransformation):
        if x.recipe is None:
            raise ValueError(
                "an optimizer that was put together from functions of its own cannot be "
                "written into a file; type model.save_weights(path), or one of jslices"
            )
        arguments = {key: described(value) for key, value in x.recipe.arguments.items()}
        return {MADE_BY: x.recipe.make.__name__, "arguments": arguments}
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
    make: Any = getattr(optim, name, None)
    if not makes_recorded(make):
        raise ValueError(f"the file names an optimizer that jslices.optim lacks: {name!r}")
    return Recipe(make, arguments)()
