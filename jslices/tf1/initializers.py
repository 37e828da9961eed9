"""Initializers by TensorFlow's names: ``init(shape, dtype)`` or JAX's ``init(key, ...)``.

``tf.initializers.zeros()`` is ``tf.zeros_initializer()``, and so on. They have TensorFlow's
statistics, and serve wherever an initializer of ``jax.nn.initializers`` does. Instances are
immutable, and equal if their arguments are.

The arguments of all of them and of their calls:

* ``shape``: an int or ints, known before tracing. ``dtype``: that of the result; None in a
  call means that of the initializer, by default float32.
* ``key``: a PRNG key. A ``seed`` takes its place: the same values in every call, as in
  TensorFlow (the bits are JAX's). Without either the numbers are drawn as those of
  :func:`jslices.tf1.random_normal`: lazily, and in a transformed function only.
* ``partition_info``: ignored.

All but ``zeros``, ``ones``, ``constant`` and ``random_uniform`` make floats only, and raise
a TypeError for another dtype when called.

Example:
  >>> import jax, jslices.tf1 as tf
  >>> init, key = tf.random_normal_initializer(mean=2.0), jax.random.key(0)
  >>> init(key, (300, 100)).mean().round(1)
  Array(2., dtype=float32)
  >>> tf.glorot_uniform_initializer()(key, (200, 100)).std().round(3)  # sqrt(2 / 300)
  Array(0.082, dtype=float32)
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jslices._names import public
from jslices.tf1 import _arrays
from jslices.tf1._arrays import MaybeLazy, ShapeLike, canonical_dtype, static_shape
from jslices.tf1._draws import can_draw, drawn

#: A PRNG key; None where nothing is random, or a seed takes its place.
Key: TypeAlias = jax.Array | None


def _is_shape(x: object) -> bool:
    """True for a shape, which TensorFlow passes first; False for a key or a dtype."""
    is_int = isinstance(x, np.ndarray | np.generic) and x.dtype.kind == "i"
    return is_int or isinstance(x, list | tuple | int)


class Initializer:
    """The base of all initializers."""

    needs_key = True  #: as it draws random numbers
    seed: int | None = None
    dtype: DTypeLike = jnp.float32

    def __call__(
        self,
        key: Key | ShapeLike = None,
        shape: ShapeLike | DTypeLike | None = None,
        dtype: DTypeLike | None = None,
        partition_info: None = None,
    ) -> MaybeLazy:
        """An array: ``init(key, shape, dtype)`` as in JAX, or ``init(shape, dtype)``."""
        name = type(self).__name__
        if _is_shape(key):
            dtype = shape if dtype is None else dtype  # type: ignore[assignment]
            key, shape = None, key  # type: ignore[assignment]
        if shape is None:
            raise ValueError(f"{name} needs a shape, got None")
        if self.needs_key and key is None and self.seed is None and can_draw():
            return self.draw(name, shape, dtype)  # type: ignore[arg-type]
        dims = static_shape(shape, name)
        return self.make(key, dims, canonical_dtype(dtype or self.dtype))  # type: ignore[arg-type]

    def draw(
        self, what: str, shape: ShapeLike, dtype: DTypeLike | None = None
    ) -> MaybeLazy:
        """The values as those of the function ``what``, such as ``tf.random_normal``."""
        dims, result = static_shape(shape, what), canonical_dtype(dtype or self.dtype)

        def sample(key: jax.Array) -> jax.Array:
            return self.make(key, dims, result)

        try:  # here: apply, which never draws, must refuse the same arguments
            jax.eval_shape(lambda: sample(jax.random.key(0)))
        except (TypeError, ValueError) as error:
            words = str(error).replace(type(self).__name__, what)
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(words) from None
        of_numbers = not any(map(_arrays.is_array, self.get_config().values()))
        return drawn(what, sample, dims, result, self.seed, of_numbers)

    def make(self, key: Key, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
        raise NotImplementedError

    def get_config(self) -> dict[str, Any]:
        """The arguments: ``type(init)(**init.get_config())`` makes an equal one."""
        names = [field.name for field in dataclasses.fields(self)]  # type: ignore[arg-type]
        return {name: getattr(self, name) for name in names}

    def random_key(self, key: Key) -> jax.Array:
        if self.seed is not None:
            return jax.random.key(self.seed)
        if key is None:
            raise ValueError(
                f"{type(self).__name__} draws random numbers and got no key; call "
                "init(jax.random.key(0), shape), or make it with seed="
            )
        return key

    def drawn_in(self, dtype: np.dtype) -> np.dtype:
        """The dtype to draw in; in bfloat16 JAX draws 128 different numbers."""
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(f"{type(self).__name__} makes floats, got dtype {dtype}")
        return dtype if dtype.itemsize > 2 else np.dtype(np.float32)


@dataclasses.dataclass(frozen=True)
class _Filled(Initializer):
    """One number everywhere; called with a shape, the class fills at once."""

    dtype: DTypeLike = jnp.float32

    needs_key = False
    number: ClassVar[int]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        new = object.__new__(cls)
        at_once = len(args) >= 2 or "shape" in kwargs or any(map(_is_shape, args))
        return new(*args, **kwargs) if at_once else new

    def make(self, key: Key, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
        return jnp.full(shape, self.number, dtype)


class zeros_initializer(_Filled):
    """Zeros of any dtype.

    ``zeros_initializer()`` makes the initializer, as in TensorFlow 1;
    ``zeros_initializer(shape, dtype)`` calls it at once, as in TensorFlow's first releases,
    and so does ``zeros_initializer(key, shape, dtype)``, as ``jax.nn.initializers.zeros``.

    Example:
      >>> import jslices.tf1 as tf
      >>> tf.zeros_initializer()(None, (2,)), tf.zeros_initializer([2], "int32")
      (Array([0., 0.], dtype=float32), Array([0, 0], dtype=int32))
    """

    number = 0


class ones_initializer(_Filled):
    """Ones of any dtype; see :class:`zeros_initializer` for the two ways to call it."""

    number = 1


@dataclasses.dataclass(frozen=True, eq=False)
class constant_initializer(Initializer):
    """One value everywhere, or a list or array of values row by row.

    A list that is too short is continued with its last element, as in TensorFlow; a call
    raises a ValueError for one that is too long, and a TypeError for values that the dtype
    cannot hold, such as 3.7 and int32, or with ``verify_shape=True`` for another shape.

    Example:
      >>> import jslices.tf1 as tf
      >>> tf.constant_initializer([1, 2])(None, (2, 2))
      Array([[1., 2.],
             [2., 2.]], dtype=float32)
    """

    needs_key = False
    value: _arrays.TensorLike = 0
    dtype: DTypeLike = jnp.float32
    verify_shape: bool = False

    def make(self, key: Key, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
        theirs = _arrays.dtype_of(self.value)
        value = _arrays.as_value(self.value, theirs, "constant_initializer")
        if _arrays.kind_of(theirs) > _arrays.kind_of(dtype):
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
class _Normal(Initializer):
    """Numbers of a standard distribution, times ``stddev`` plus ``mean``."""

    mean: float = 0.0
    stddev: float = 1.0
    seed: int | None = None
    dtype: DTypeLike = jnp.float32

    standard: ClassVar[Callable[..., jax.Array]]

    def make(self, key: Key, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
        how = {"shape": shape, "dtype": self.drawn_in(dtype)}
        standard = self.standard(self.random_key(key), **how)
        return (self.mean + self.stddev * standard).astype(dtype)


class random_normal_initializer(_Normal):
    """Normal numbers."""

    standard = staticmethod(jax.random.normal)


class truncated_normal_initializer(_Normal):
    """Normal numbers no further than two standard deviations from the mean.

    Those beyond are drawn again, not clipped. ``stddev`` is that of the normal
    distribution before this; that of the result is 0.8796 of it.
    """

    standard = staticmethod(
        functools.partial(jax.random.truncated_normal, lower=-2, upper=2)
    )


@dataclasses.dataclass(frozen=True)
class random_uniform_initializer(Initializer):
    """Uniform numbers of ``[minval, maxval)``; whole numbers for an integer dtype.

    A ``maxval`` of None means 1; integers need a number, and a range that is not empty.

    Example:
      >>> import jax, jslices.tf1 as tf
      >>> drawn = tf.random_uniform_initializer(-3, 4)(jax.random.key(0), (1000,), "int32")
      >>> int(drawn.min()), int(drawn.max())
      (-3, 3)
    """

    minval: float = 0.0
    maxval: float | None = None
    seed: int | None = None
    dtype: DTypeLike = jnp.float32

    def make(self, key: Key, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
        key = self.random_key(key)
        if jnp.issubdtype(dtype, jnp.integer):
            if self.maxval is None or self.minval >= self.maxval:
                raise ValueError(
                    f"random_uniform_initializer of {dtype} needs minval < maxval, got "
                    f"{self.minval} and {self.maxval}; pass maxval"
                )
            return jax.random.randint(key, shape, int(self.minval), int(self.maxval), dtype)
        wide = self.drawn_in(dtype)
        low = jnp.asarray(self.minval, dtype)
        high = jnp.asarray(1 if self.maxval is None else self.maxval, dtype)
        drawn = low + jax.random.uniform(key, shape, wide) * (high - low)
        drawn = drawn.astype(dtype)
        # Rounding may reach maxval, which is not in the range.
        return jnp.where(drawn == high, jnp.nextafter(high, low), drawn)


# --- scaled by the shape ----------------------------------------------------------------

# TensorFlow's names -> those of jax.nn.initializers.
_DISTRIBUTIONS: dict[str, Literal["normal", "truncated_normal", "uniform"]] = {
    "normal": "truncated_normal",
    "truncated_normal": "truncated_normal",
    "untruncated_normal": "normal",
    "uniform": "uniform",
}
_MODES = ("fan_in", "fan_out", "fan_avg")


@dataclasses.dataclass(frozen=True)
class uniform_unit_scaling_initializer(Initializer):
    """Uniform numbers that keep the variance of their inputs.

    They lie in ``(-b, b)``, ``b = factor * sqrt(3 / n)``; n is the product of all axes but
    the last, as in TensorFlow's code (its documentation says the first).

    Source: Sussillo and Abbott, "Random walk
    initialization for training very deep feedforward networks", 2014.
    """

    factor: float = 1.0
    seed: int | None = None
    dtype: DTypeLike = jnp.float32

    def make(self, key: Key, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
        wide = self.drawn_in(dtype)
        bound = self.factor * math.sqrt(3 / max(1, math.prod(shape[:-1])))
        drawn = jax.random.uniform(self.random_key(key), shape, wide, -1, 1)
        return (bound * drawn).astype(dtype)


@dataclasses.dataclass(frozen=True)
class variance_scaling_initializer(Initializer):
    """Random numbers of variance ``scale / n``, where n counts inputs or outputs.

    They are those of ``jax.nn.initializers.variance_scaling``, which refuses vectors.

    Args:
      scale: positive.
      mode: n is ``"fan_in"``, ``"fan_out"`` or their mean ``"fan_avg"``. Of a kernel
        ``[*window, in, out]`` the fans are in and out times the size of the window; of a
        vector both are its length.
      distribution: ``"truncated_normal"`` (also ``"normal"``), ``"untruncated_normal"`` or
        ``"uniform"``; the variance is that after the truncation.

    Example:
      >>> import jax, jslices.tf1 as tf
      >>> init = tf.variance_scaling_initializer(2.0, distribution="uniform")
      >>> init(jax.random.key(0), (200, 100)).std().round(3)  # sqrt(2 / 200)
      Array(0.1, dtype=float32)
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

    def make(self, key: Key, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
        wide = self.drawn_in(dtype)
        if 0 in shape:
            return jnp.zeros(shape, dtype)
        mode: Any = self.mode
        matrix = shape
        if len(shape) < 2:  # both fans are the length: that of a matrix of one column
            mode, matrix = "fan_in", (math.prod(shape), 1)
        distribution = _DISTRIBUTIONS[self.distribution]
        draw = jax.nn.initializers.variance_scaling(self.scale, mode, distribution)
        return draw(self.random_key(key), matrix, wide).reshape(shape).astype(dtype)


@dataclasses.dataclass(frozen=True)
class _Glorot(Initializer):
    """Numbers of variance ``2 / (fan_in + fan_out)``, of a distribution of TensorFlow's."""

    seed: int | None = None
    dtype: DTypeLike = jnp.float32

    distribution = "uniform"

    def make(self, key: Key, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
        scaled = variance_scaling_initializer(1.0, "fan_avg", self.distribution)
        return scaled.make(self.random_key(key), shape, dtype)


class glorot_uniform_initializer(_Glorot):
    """Uniform numbers in ``(-b, b)``, ``b = sqrt(6 / (fan_in + fan_out))``.

    The default of :func:`jslices.tf1.get_variable` for floats.

    Source: Glorot and Bengio, "Understanding the
    difficulty of training deep feedforward neural networks", 2010.
    """


class glorot_normal_initializer(_Glorot):
    """Truncated normal numbers of standard deviation ``sqrt(2 / (fan_in + fan_out))``.

    See :class:`glorot_uniform_initializer`.
    """

    distribution = "truncated_normal"


@dataclasses.dataclass(frozen=True)
class orthogonal_initializer(Initializer):
    """A random orthogonal matrix times ``gain``, by ``jax.nn.initializers.orthogonal``.

    Its rows are all axes but the last, of two axes or more.
    """

    gain: float = 1.0
    seed: int | None = None
    dtype: DTypeLike = jnp.float32

    def make(self, key: Key, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
        wide = self.drawn_in(dtype)
        if len(shape) < 2:
            raise ValueError(
                f"orthogonal_initializer needs two axes or more, got shape {shape}"
            )
        draw = jax.nn.initializers.orthogonal(self.gain)
        return draw(self.random_key(key), shape, wide).astype(dtype)


# --- the short names --------------------------------------------------------------------

constant = constant_initializer
glorot_normal = glorot_normal_initializer
glorot_uniform = glorot_uniform_initializer
ones = ones_initializer
orthogonal = orthogonal_initializer
random_normal = random_normal_initializer
random_uniform = random_uniform_initializer
truncated_normal = truncated_normal_initializer
uniform_unit_scaling = uniform_unit_scaling_initializer
variance_scaling = variance_scaling_initializer
zeros = zeros_initializer

__all__, __dir__ = public(__name__)
