"""Initializers whose width follows from the shape: they keep the scale of signals."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jslices.tf1._initializer import Initializer

# TensorFlow's names -> those of jax.nn.initializers.
_DISTRIBUTIONS: dict[str, Any] = {
    "normal": "truncated_normal",
    "truncated_normal": "truncated_normal",
    "untruncated_normal": "normal",
    "uniform": "uniform",
}
_MODES = ("fan_in", "fan_out", "fan_avg")


@dataclasses.dataclass(frozen=True)
class uniform_unit_scaling_initializer(Initializer):
    """Uniform numbers that keep the variance of what they are multiplied with.

    They lie in ``(-b, b)``, ``b = factor * sqrt(3 / n)``, n the product of all axes of the
    shape but the last (TensorFlow's documentation says the first axis; its code does
    this).

    Example:
      >>> import jax, jslices as js
      >>> init = js.uniform_unit_scaling_initializer()
      >>> init(jax.random.key(0), (300, 100)).std().round(3)  # 1 / sqrt(300)
      Array(0.058, dtype=float32)

    Source: ``tf.uniform_unit_scaling_initializer``; Sussillo and Abbott, "Random walk
    initialization for training very deep feedforward networks", 2014.
    """

    factor: float = 1.0
    seed: int | None = None
    dtype: DTypeLike = jnp.float32

    def make(self, key: Any, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
        self.want_floats(dtype)
        bound = self.factor * math.sqrt(3 / max(1, math.prod(shape[:-1])))
        drawn = jax.random.uniform(self.random_key(key), shape, dtype, -1, 1)
        return (bound * drawn).astype(dtype)


@dataclasses.dataclass(frozen=True)
class variance_scaling_initializer(Initializer):
    """Random numbers of variance ``scale / n``, n being a number of inputs or outputs.

    Args:
      scale: positive.
      mode: n is ``"fan_in"``, ``"fan_out"`` or their mean ``"fan_avg"``. Of a kernel
        ``[*window, in, out]`` the fans are in and out times the size of the window; of a
        vector both are its length.
      distribution: ``"truncated_normal"`` (also ``"normal"``), ``"untruncated_normal"`` or
        ``"uniform"``; the variance is that after the truncation.

    Raises:
      ValueError: for other arguments.

    Example:
      >>> import jax, jslices as js
      >>> init = js.variance_scaling_initializer(2.0, distribution="uniform")
      >>> bool(abs(init(jax.random.key(0), (200, 100)).std() - (2 / 200) ** 0.5) < 1e-3)
      True

    Source: ``tf.variance_scaling_initializer``, by way of
    ``jax.nn.initializers.variance_scaling``, which takes no vectors.
    """

    scale: float = 1.0
    mode: str = "fan_in"
    distribution: str = "truncated_normal"
    seed: int | None = None
    dtype: DTypeLike = jnp.float32

    def __post_init__(self) -> None:
        problems = []
        if not self.scale > 0:
            problems.append(f"scale must be positive, got {self.scale}")
        if self.mode not in _MODES:
            problems.append(f"mode must be one of {_MODES}, got {self.mode!r}")
        if self.distribution not in _DISTRIBUTIONS:
            problems.append(
                f"distribution must be one of {tuple(_DISTRIBUTIONS)}, got "
                f"{self.distribution!r}"
            )
        if problems:
            raise ValueError(f"{type(self).__name__}: {'; '.join(problems)}")

    def make(self, key: Any, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
        self.want_floats(dtype)
        if 0 in shape:
            return jnp.zeros(shape, dtype)
        mode: Any = self.mode
        seen = shape
        if len(shape) < 2:  # both fans are the length: that of a matrix of one column
            mode, seen = "fan_in", (math.prod(shape), 1)
        make = jax.nn.initializers.variance_scaling(
            self.scale, mode, _DISTRIBUTIONS[self.distribution]
        )
        return make(self.random_key(key), seen, dtype).reshape(shape)


@dataclasses.dataclass(frozen=True)
class glorot_uniform_initializer(Initializer):
    """Uniform numbers in ``(-b, b)``, ``b = sqrt(6 / (fan_in + fan_out))``.

    What :func:`jslices.get_variable` uses for floats when nothing else is said.

    Example:
      >>> import jax, jslices as js
      >>> drawn = js.glorot_uniform_initializer()(jax.random.key(0), (200, 100))
      >>> drawn.std().round(3)  # sqrt(2 / 300)
      Array(0.082, dtype=float32)

    Source: ``tf.glorot_uniform_initializer``; Glorot and Bengio, "Understanding the
    difficulty of training deep feedforward neural networks", 2010.
    """

    seed: int | None = None
    dtype: DTypeLike = jnp.float32

    def make(self, key: Any, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
        scaled = variance_scaling_initializer(1.0, "fan_avg", "uniform")
        return scaled.make(self.random_key(key), shape, dtype)


@dataclasses.dataclass(frozen=True)
class glorot_normal_initializer(Initializer):
    """Truncated normal numbers of standard deviation ``sqrt(2 / (fan_in + fan_out))``.

    Example:
      >>> import jax, jslices as js
      >>> drawn = js.glorot_normal_initializer()(jax.random.key(0), (200, 100))
      >>> drawn.std().round(3)
      Array(0.082, dtype=float32)

    Source: ``tf.glorot_normal_initializer``.
    """

    seed: int | None = None
    dtype: DTypeLike = jnp.float32

    def make(self, key: Any, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
        scaled = variance_scaling_initializer(1.0, "fan_avg")
        return scaled.make(self.random_key(key), shape, dtype)


@dataclasses.dataclass(frozen=True)
class orthogonal_initializer(Initializer):
    """A random orthogonal matrix times ``gain``; all axes but the last are its rows.

    Raises:
      ValueError: when called for fewer than two axes.

    Example:
      >>> import jax, jslices as js
      >>> q = js.orthogonal_initializer()(jax.random.key(0), (3, 3))
      >>> bool(abs(q.T @ q - jax.numpy.eye(3)).max() < 1e-5)
      True

    Source: ``tf.orthogonal_initializer``, by way of ``jax.nn.initializers.orthogonal``.
    """

    gain: float = 1.0
    seed: int | None = None
    dtype: DTypeLike = jnp.float32

    def make(self, key: Any, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
        self.want_floats(dtype)
        if len(shape) < 2:
            raise ValueError(
                f"orthogonal_initializer needs two axes or more, got shape {shape}"
            )
        return jax.nn.initializers.orthogonal(self.gain)(self.random_key(key), shape, dtype)
