"""Initializers by TensorFlow's names, called as ``init(key, shape, dtype)``, JAX's way.

So they serve :func:`jslices.get_variable`, and Flax, Haiku or anything else that takes one
of ``jax.nn.initializers``. Instances are immutable, and equal if their arguments are.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jslices.tf1._initializer import Initializer, refuse_order_of_tensorflow
from jslices.tf1._values import dtype_of, kind_of


@dataclasses.dataclass(frozen=True)
class zeros_initializer(Initializer):
    """Zeros of any dtype.

    ``zeros_initializer()`` is the initializer, as in TensorFlow 1;
    ``zeros_initializer(key, shape, dtype)`` calls it at once, as TensorFlow's first
    releases and ``jax.nn.initializers.zeros`` have it.

    Example:
      >>> import jslices as js
      >>> js.zeros_initializer()(None, (2,))
      Array([0., 0.], dtype=float32)
    """

    dtype: DTypeLike = jnp.float32

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return _new_or_called(cls, args, kwargs)

    def make(self, key: Any, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
        return jnp.zeros(shape, dtype)


@dataclasses.dataclass(frozen=True)
class ones_initializer(Initializer):
    """Ones of any dtype; see :class:`zeros_initializer` for the two ways to call it.

    Example:
      >>> import jslices as js
      >>> js.ones_initializer()(None, (2,), "int32")
      Array([1, 1], dtype=int32)
    """

    dtype: DTypeLike = jnp.float32

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return _new_or_called(cls, args, kwargs)

    def make(self, key: Any, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
        return jnp.ones(shape, dtype)


def _new_or_called(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    new = object.__new__(cls)
    if len(args) < 2 and "shape" not in kwargs:
        refuse_order_of_tensorflow(cls.__name__, args[0] if args else None, None)
        return new
    return new(*args, **kwargs)


@dataclasses.dataclass(frozen=True, eq=False)
class constant_initializer(Initializer):
    """One value everywhere, or a list of values row by row.

    A list that is too short is continued with its last element, as in TensorFlow;
    ``verify_shape=True`` makes another shape a TypeError.

    Args:
      value: a number, or a list or array of any shape.

    Raises:
      ValueError: when called, for more values than the shape takes.
      TypeError: when called, for values the dtype cannot hold, such as 3.7 and int32.

    Example:
      >>> import jslices as js
      >>> js.constant_initializer([1, 2])(None, (2, 2))
      Array([[1., 2.],
             [2., 2.]], dtype=float32)

    Source: ``tf.constant_initializer``.
    """

    value: Any = 0
    dtype: DTypeLike = jnp.float32
    verify_shape: bool = False

    def make(self, key: Any, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
        theirs = dtype_of(self.value)
        value = jnp.asarray(self.value)
        if kind_of(theirs) > kind_of(dtype):
            raise TypeError(
                f"constant_initializer({self.value!r}) cannot make {dtype}: that would "
                "round; give whole numbers"
            )
        if self.verify_shape and value.shape != shape:
            raise TypeError(
                f"constant_initializer: expected shape {shape}, got a value of shape "
                f"{value.shape}"
            )
        flat, size = value.astype(dtype).reshape(-1), math.prod(shape)
        if flat.size > size and value.ndim:
            raise ValueError(
                f"Too many elements provided. Takes at most {size}, but got {flat.size}."
            )
        if flat.size == 0 < size:
            raise ValueError(f"constant_initializer got no values for shape {shape}")
        if flat.size == 1 or size == 0:
            return jnp.full(shape, flat[0] if flat.size else 0, dtype)
        return jnp.pad(flat, (0, size - flat.size), mode="edge").reshape(shape)


@dataclasses.dataclass(frozen=True)
class random_normal_initializer(Initializer):
    """Normal numbers of the given mean and standard deviation.

    Example:
      >>> import jax, jslices as js
      >>> init = js.random_normal_initializer(stddev=0.1)
      >>> bool(abs(init(jax.random.key(0), (1000,)).std() - 0.1) < 0.01)
      True

    Source: ``tf.random_normal_initializer``.
    """

    mean: float = 0.0
    stddev: float = 1.0
    seed: int | None = None
    dtype: DTypeLike = jnp.float32

    def make(self, key: Any, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
        self.want_floats(dtype)
        drawn = jax.random.normal(self.random_key(key), shape, dtype)
        return (self.mean + self.stddev * drawn).astype(dtype)


@dataclasses.dataclass(frozen=True)
class truncated_normal_initializer(Initializer):
    """Normal numbers no further than two standard deviations from the mean.

    Those beyond are drawn again, not clipped. ``stddev`` is that of the normal
    distribution before this; that of the result is 0.8796 of it.

    Example:
      >>> import jax, jslices as js
      >>> drawn = js.truncated_normal_initializer()(jax.random.key(0), (100_000,))
      >>> drawn.std().round(2), bool(abs(drawn).max() <= 2)
      (Array(0.88, dtype=float32), True)

    Source: ``tf.truncated_normal_initializer``.
    """

    mean: float = 0.0
    stddev: float = 1.0
    seed: int | None = None
    dtype: DTypeLike = jnp.float32

    def make(self, key: Any, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
        self.want_floats(dtype)
        drawn = jax.random.truncated_normal(self.random_key(key), -2, 2, shape, dtype)
        return (self.mean + self.stddev * drawn).astype(dtype)


@dataclasses.dataclass(frozen=True)
class random_uniform_initializer(Initializer):
    """Uniform numbers of ``[minval, maxval)``; whole ones for an integer dtype.

    Args:
      minval: the smallest, included.
      maxval: the largest, never reached. None means 1, and must not be for integers.

    Raises:
      ValueError: when called with an integer dtype, without ``maxval`` or with an empty
        range.

    Example:
      >>> import jax, jslices as js
      >>> init = js.random_uniform_initializer(-3, 4)
      >>> drawn = init(jax.random.key(0), (1000,), "int32")
      >>> int(drawn.min()), int(drawn.max())
      (-3, 3)

    Source: ``tf.random_uniform_initializer``.
    """

    minval: float = 0.0
    maxval: float | None = None
    seed: int | None = None
    dtype: DTypeLike = jnp.float32

    def make(self, key: Any, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
        key = self.random_key(key)
        if jnp.issubdtype(dtype, jnp.integer):
            if self.maxval is None or self.minval >= self.maxval:
                raise ValueError(
                    f"random_uniform_initializer of {dtype} needs minval < maxval, got "
                    f"{self.minval} and {self.maxval}; pass maxval"
                )
            return jax.random.randint(key, shape, int(self.minval), int(self.maxval), dtype)
        self.want_floats(dtype)
        low = jnp.asarray(self.minval, dtype)
        high = jnp.asarray(1 if self.maxval is None else self.maxval, dtype)
        drawn = low + jax.random.uniform(key, shape, dtype) * (high - low)
        # Rounding may reach maxval, which the range does not hold.
        return jnp.where(drawn == high, jnp.nextafter(high, low), drawn)
