"""Initial values of variables: ``zeros``, ``random_normal``, ...

``random_normal`` and the like are drawn by ``init`` (see ``_draws``). ``zeros``, ``ones``
and ``constant`` give ordinary arrays; how they were made is remembered, so that
``initialize_all_variables`` can make them again without running the function.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jslices.tf1 import _arrays, initializers
from jslices.tf1._arrays import MaybeLazy, ShapeLike, TensorLike, static_shape
from jslices.tf1._run import current_run, current_run_or_none

# --- constants --------------------------------------------------------------------------


def zeros(
    shape: ShapeLike, dtype: DTypeLike = jnp.float32, name: str | None = None
) -> jax.Array:
    """An array of zeros. A variable that begins with it can be initialized again.

    See :func:`jslices.tf1.initialize_all_variables`.

    Example:
      >>> import jslices.tf1 as tf
      >>> model = tf.transform(lambda: tf.Variable(tf.zeros([3]), name="biases") + 1)
      >>> model.apply(model.init(None))
      (Array([1., 1., 1.], dtype=float32), Variables(biases: float32[3]))
    """
    return _filled("zeros", 0, shape, dtype)


def ones(
    shape: ShapeLike, dtype: DTypeLike = jnp.float32, name: str | None = None
) -> jax.Array:
    """An array of ones; as :func:`jslices.tf1.zeros`."""
    return _filled("ones", 1, shape, dtype)


def constant(
    value: TensorLike,
    dtype: DTypeLike | None = None,
    shape: ShapeLike | None = None,
    name: str | None = None,
    verify_shape: bool = False,
) -> jax.Array:
    """An array of these values, as by :class:`jslices.tf1.constant_initializer`."""
    result = _arrays.dtype_of(value) if dtype is None else _arrays.canonical_dtype(dtype)
    dims = jnp.asarray(value).shape if shape is None else static_shape(shape, "constant")
    filled = initializers.constant(value, result, verify_shape)
    make = lambda: filled.make(None, dims, result)  # noqa: E731
    # An array may be as large as a table: what it was made from is not remembered.
    of_arrays = any(map(_arrays.is_array, jax.tree.leaves(value)))
    return make() if of_arrays else _remembered(make)


def _filled(what: str, value: int, shape: ShapeLike, dtype: DTypeLike) -> jax.Array:
    dims, result = static_shape(shape, what), _arrays.canonical_dtype(dtype)
    return _remembered(lambda: jnp.full(dims, value, result))


def _remembered(make: Callable[[], jax.Array]) -> jax.Array:
    array, run = make(), current_run_or_none()
    if run is not None:
        run.remember(array, make)
    return array


def zeros_like(
    tensor: TensorLike, dtype: DTypeLike | None = None, name: str | None = None
) -> jax.Array:
    """Zeros of the shape, and unless ``dtype`` is given the dtype, of something else.

    The result is dense for IndexedSlices, too; see :func:`jslices.tf1.zeros`.
    """
    dims = tensor.shape if _arrays.is_array(tensor) else np.shape(tensor)
    return zeros(dims, _arrays.dtype_of(tensor) if dtype is None else dtype)


# --- random numbers ---------------------------------------------------------------------


def random_normal(
    shape: ShapeLike,
    mean: ArrayLike = 0.0,
    stddev: ArrayLike = 1.0,
    dtype: DTypeLike = jnp.float32,
    seed: int | None = None,
    name: str | None = None,
) -> MaybeLazy:
    """Normal numbers, as the initial value of a variable.

    Inside a transformed function the result is lazy: it has a shape and a dtype, and
    operators, indexing, ``astype`` and ``reshape`` give another lazy value. ``init`` draws
    it for the first variable that begins with it, with the key folded with that variable's
    name; ``apply`` draws nothing. Two calls draw different numbers; two variables that
    begin with the result of one call begin with the same numbers. In
    ``tf.Variable(lambda: ...)`` it is an array.

    With a ``seed`` the same numbers are drawn always, also in ``apply``, and outside, where
    the result is an array. ``name`` is ignored: that of the variable decides.

    Raises:
      RuntimeError: without a seed, outside a transformed function; or inside, if
        something like ``jnp.abs`` needs the value itself, which ``apply`` could not draw.

    Example:
      >>> import jax, jslices.tf1 as tf
      >>> def model(x):
      ...     w = tf.Variable(tf.random_normal([3, 2]) * 0.1, name="weights")
      ...     return x @ w
      >>> model = tf.transform(model)
      >>> variables = model.init(jax.random.key(0), jax.numpy.ones((1, 3)))
      >>> variables, model.apply(variables, jax.numpy.ones((1, 3)))[0].shape
      (Variables(weights: float32[3, 2]), (1, 2))
    """
    initializer = initializers.random_normal(mean, stddev, seed)  # type: ignore[arg-type]
    return initializer.draw("random_normal", shape, dtype)


def truncated_normal(
    shape: ShapeLike,
    mean: ArrayLike = 0.0,
    stddev: ArrayLike = 1.0,
    dtype: DTypeLike = jnp.float32,
    seed: int | None = None,
    name: str | None = None,
) -> MaybeLazy:
    """Numbers of :class:`jslices.tf1.truncated_normal_initializer`.

    They are drawn as by :func:`jslices.tf1.random_normal`.
    """
    initializer = initializers.truncated_normal(mean, stddev, seed)  # type: ignore[arg-type]
    return initializer.draw("truncated_normal", shape, dtype)


def random_uniform(
    shape: ShapeLike,
    minval: ArrayLike = 0,
    maxval: ArrayLike | None = None,
    dtype: DTypeLike = jnp.float32,
    seed: int | None = None,
    name: str | None = None,
) -> MaybeLazy:
    """Numbers of :class:`jslices.tf1.random_uniform_initializer`.

    They are drawn as by :func:`jslices.tf1.random_normal`.
    """
    initializer = initializers.random_uniform(minval, maxval, seed)  # type: ignore[arg-type]
    return initializer.draw("random_uniform", shape, dtype)


def set_random_seed(seed: int) -> None:
    """Draw the numbers of this transformed function with ``seed`` from here on.

    ``init`` then draws initial values with ``jax.random.key(seed)`` instead of the key that
    it is given, which may be None. Draws that no variable begins with are the same in every
    call, each differing from the others; without a seed they are refused.

    Example:
      >>> import jslices.tf1 as tf
      >>> def model():
      ...     tf.set_random_seed(1234)
      ...     return tf.Variable(tf.random_normal([2])) + tf.random_uniform([2])
      >>> model = tf.transform(model)
      >>> model.apply(model.init(None))[0].shape
      (2,)
    """
    current_run("set_random_seed").set_seed(seed)
