"""Collections: named lists of variables, and the losses of their regularizers."""

import re
from collections.abc import Sequence
from typing import Any

from jslices.tf1.frame import Frame, current_frame
from jslices.tf1.variable import Variable


class GraphKeys:
    """The names of TensorFlow's own collections.

    Source: ``tf.GraphKeys``.
    """

    VARIABLES = "variables"
    GLOBAL_VARIABLES = "variables"
    TRAINABLE_VARIABLES = "trainable_variables"
    REGULARIZATION_LOSSES = "regularization_losses"


def get_collection(key: str, scope: str | None = None) -> list[Any]:
    """What a collection holds by now, in the order of creation.

    Args:
      key: a key that variables were created with, ``"variables"``,
        ``"trainable_variables"``; or ``"regularization_losses"``, which gives for every
        variable with a regularizer what that makes of the value of now, None left out.
      scope: a regular expression that the beginning of the name must match.

    Returns:
      A list of :class:`jslices.Variable`, or of losses.

    Raises:
      RuntimeError: outside of a transformed function.

    Example:
      >>> import jax, jax.numpy as jnp, jslices as js
      >>> def loss():
      ...     js.get_variable("w", [3], initializer=js.ones_initializer(),
      ...                     regularizer=lambda w: 0.5 * jnp.sum(w * w))
      ...     return sum(js.get_collection("regularization_losses"))
      >>> model = js.transform(loss)
      >>> model.apply(model.init(jax.random.key(0)))[0]
      Array(1.5, dtype=float32)

    Source: ``tf.get_collection``. TensorFlow calls a regularizer when the variable is
    created, this when the losses are asked for: what nobody asks for is not computed, and
    a table that is only looked up keeps its row gradients.
    """
    frame = current_frame("get_collection")
    if key != GraphKeys.REGULARIZATION_LOSSES:
        return list(handles_in(frame, key, scope))
    entries = ((handle, frame.entries[name]) for name, handle in frame.handles.items())
    losses = (
        entry.regularizer(handle.value())
        for handle, entry in entries
        if entry.regularizer is not None and matches(entry.info.name, scope)
    )
    return [loss for loss in losses if loss is not None]


def handles_in(frame: Frame, key: str, scope: str | None) -> Sequence[Variable]:
    """The handles of a collection, in the order of creation."""
    return [
        handle
        for name, handle in frame.handles.items()
        if key in frame.entries[name].info.collections and matches(name, scope)
    ]


def matches(name: str, scope: str | None) -> bool:
    """Whether a name is in a scope as TensorFlow filters: ``re.match``."""
    return scope is None or re.match(scope, f"{name}:0") is not None
