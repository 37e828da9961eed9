"""The few functions of ``tf.nn`` that examples of TensorFlow's variables need.

They are here so that such examples run with only the module's name changed, and because
the functions of ``jax.lax`` take arrays and no handles. ``conv2d`` and ``relu`` hand their
arguments on to JAX; the rest is what this package has under TensorFlow's names.

Source: ``tf.nn`` of TensorFlow 1.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jslices._lookup import embedding_lookup as embedding_lookup
from jslices._lookup import embedding_lookup_sparse as embedding_lookup_sparse
from jslices._lookup import log_uniform_candidate_sampler as log_uniform_candidate_sampler
from jslices._lookup import nce_loss as nce_loss
from jslices._lookup import safe_embedding_lookup_sparse as safe_embedding_lookup_sparse
from jslices._lookup import sampled_softmax_loss as sampled_softmax_loss

_FORMATS = ("NHWC", "NCHW")


def conv2d(
    input: Any,
    filter: Any,
    strides: Sequence[int],
    padding: str,
    data_format: str = "NHWC",
    name: str | None = None,
) -> jax.Array:
    """A convolution with TensorFlow's arguments, by ``jax.lax.conv_general_dilated``.

    Args:
      input: images ``[batch, height, width, channels]``.
      filter: ``[height, width, channels, out channels]``, of the same dtype; it may be a
        ``Variable``, and so may ``input``.
      strides: four integers, those of batch and channels being 1.
      padding: ``"SAME"`` or ``"VALID"``.
      data_format: ``"NCHW"`` for images ``[batch, channels, height, width]``; the strides
        are in that order too.
      name: a name scope for the profile.

    Returns:
      ``[batch, ceil(height / stride), ceil(width / stride), out channels]`` for ``"SAME"``.

    Raises:
      ValueError: for other strides, paddings or formats, or shapes that do not fit.
      TypeError: if the dtypes differ.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> images, filter = jnp.ones((1, 4, 4, 1)), jnp.ones((3, 3, 1, 2))
      >>> js.nn.conv2d(images, filter, strides=[1, 2, 2, 1], padding="VALID").ravel()
      Array([9., 9.], dtype=float32)

    Source: ``tf.nn.conv2d`` of TensorFlow 1.
    """
    if data_format not in _FORMATS:
        raise ValueError(
            f"conv2d: data_format must be one of {_FORMATS}, not {data_format!r}"
        )
    if padding not in ("SAME", "VALID"):
        raise ValueError(f"conv2d: padding must be 'SAME' or 'VALID', not {padding!r}")
    steps = dict(zip(data_format, strides, strict=False))
    if len(strides) != 4 or steps["N"] != 1 or steps["C"] != 1:
        raise ValueError(
            f"conv2d: strides must be four integers in the order {data_format}, those of N "
            f"and C being 1, not {strides!r}"
        )
    with jax.named_scope(name or "Conv2D"):
        return jax.lax.conv_general_dilated(
            jnp.asarray(input),
            jnp.asarray(filter),
            (steps["H"], steps["W"]),
            padding,
            dimension_numbers=(data_format, "HWIO", data_format),
        )


def relu(features: Any, name: str | None = None) -> jax.Array:
    """``max(features, 0)`` by ``jax.nn.relu``, in the shape and dtype of ``features``.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> js.nn.relu(jnp.array([-1.0, 2.0]))
      Array([0., 2.], dtype=float32)

    Source: ``tf.nn.relu``.
    """
    with jax.named_scope(name or "Relu"):
        return jax.nn.relu(features)
