"""``zeros``, ``ones`` and ``constant`` by TensorFlow's names, for initial values.

They give ordinary arrays. What a variable begins with is remembered as well, so that
``initialize_all_variables`` can make it again without running the function.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jslices.tf1._values import canonical_dtype, dtype_of, is_array, static_shape
from jslices.tf1.frame import current_frame_or_none
from jslices.tf1.initializers import constant_initializer


def zeros(
    shape: int | Sequence[int], dtype: DTypeLike = jnp.float32, name: str | None = None
) -> jax.Array:
    """An array of zeros; ``jnp.zeros``, that variables may begin with again.

    Args:
      shape: any, known before tracing.
      dtype: any.
      name: not used; operations have no names here.

    Returns:
      ``shape`` of ``dtype``.

    Raises:
      TypeError, ValueError: for a shape that is none.

    Cost: that of ``jnp.zeros``, in ``apply`` too; under ``jit`` nothing there.

    Example:
      >>> import jax, jslices as js
      >>> model = js.transform(lambda: js.Variable(js.zeros([3]), name="biases") + 1)
      >>> model.apply(model.init(jax.random.key(0)))
      (Array([1., 1., 1.], dtype=float32), Variables(biases: float32[3]))

    Source: ``tf.zeros``.
    """
    del name
    return _filled("zeros", 0, shape, dtype)


def ones(
    shape: int | Sequence[int], dtype: DTypeLike = jnp.float32, name: str | None = None
) -> jax.Array:
    """An array of ones; see :func:`jslices.zeros`.

    Args:
      shape: any, known before tracing.
      dtype: any.
      name: not used; operations have no names here.

    Returns:
      ``shape`` of ``dtype``.

    Raises:
      TypeError, ValueError: for a shape that is none.

    Example:
      >>> import jslices as js
      >>> js.ones([2], "int32")
      Array([1, 1], dtype=int32)

    Source: ``tf.ones``.
    """
    del name
    return _filled("ones", 1, shape, dtype)


def constant(
    value: Any,
    dtype: DTypeLike | None = None,
    shape: int | Sequence[int] | None = None,
    name: str | None = None,
) -> jax.Array:
    """An array of these values, row by row.

    Args:
      value: a number, or a list or array of any shape.
      dtype: None means that of the value (float32 and int32 for Python's numbers).
      shape: None means that of the value; a list that is too short for it is continued
        with its last element.
      name: not used; operations have no names here.

    Returns:
      ``shape`` of ``dtype``.

    Raises:
      ValueError: for more values than the shape takes.
      TypeError: for values that the dtype cannot hold, such as 3.7 and int32.

    Example:
      >>> import jslices as js
      >>> js.constant([1, 2], shape=[2, 2])
      Array([[1, 2],
             [2, 2]], dtype=int32)

    Source: ``tf.constant`` of TensorFlow 1.
    """
    del name
    wanted = dtype_of(value) if dtype is None else canonical_dtype(dtype)
    dims = jnp.asarray(value).shape if shape is None else static_shape(shape, "constant")
    make = lambda: constant_initializer(value).make(None, dims, wanted)  # noqa: E731
    # An array may be as large as a table; that is not kept.
    held = any(map(is_array, jax.tree.leaves(value)))
    return make() if held else _remembered(make)


def _filled(what: str, value: int, shape: Any, dtype: Any) -> jax.Array:
    dims, wanted = static_shape(shape, what), canonical_dtype(dtype)
    return _remembered(lambda: jnp.full(dims, value, wanted))


def _remembered(make: Callable[[], jax.Array]) -> jax.Array:
    array, frame = make(), current_frame_or_none()
    if frame is not None:
        frame.remember(array, make)
    return array
