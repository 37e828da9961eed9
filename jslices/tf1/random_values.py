"""``random_normal`` and the like by TensorFlow's names: random values without a key.

``js.Variable(js.random_normal([5, 5]))`` draws when ``init`` makes the variable, with the
key given to ``init``; ``apply`` has the variable and draws nothing.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from jslices.tf1._initializer import Initializer
from jslices.tf1._keys import current_making
from jslices.tf1._lazy import Draw, LazyValue, of_jax, some_key
from jslices.tf1._values import canonical_dtype, is_array, static_shape
from jslices.tf1.frame import current_frame_or_none
from jslices.tf1.initializers import (
    random_normal_initializer,
    random_uniform_initializer,
    truncated_normal_initializer,
)


def random_normal(
    shape: int | Sequence[int],
    mean: ArrayLike = 0.0,
    stddev: ArrayLike = 1.0,
    dtype: DTypeLike = jnp.float32,
    seed: int | None = None,
    name: str | None = None,
) -> Any:
    """Normal numbers for a variable to begin with.

    Inside of a transformed function the result is lazy: it has a shape and a dtype, and
    operators, indexing, ``astype`` and ``reshape`` give another such. ``init`` draws it
    for the first variable that begins with it, by the key folded with that variable's
    name; ``apply`` draws nothing. Two calls draw different numbers. Two variables that
    begin with the same result of one call begin with the same numbers, as in TensorFlow
    when one session initializes both.

    Args:
      shape: any, known before tracing.
      mean: a number.
      stddev: a number; a negative one mirrors.
      dtype: of floats.
      seed: draws these numbers always, in ``apply`` and outside of functions too (the bits
        are JAX's); None: by the key of ``init``.
      name: not used; the name of the variable counts.

    Returns:
      ``shape`` of ``dtype``: something lazy in a transformed function, an array in
      ``js.Variable(lambda: ...)`` and, given a seed, outside.

    Raises:
      TypeError, ValueError: for another dtype, or a shape that is none.
      RuntimeError: without a seed, outside of a transformed function; or if the value is
        asked for in it, as ``jnp.abs`` does, since ``apply`` could not draw it.

    Example:
      >>> import jax, jslices as js
      >>> def model(x):
      ...     w = js.Variable(js.random_normal([3, 2]) * 0.1, name="weights")
      ...     return x @ w
      >>> model = js.transform(model)
      >>> variables = model.init(jax.random.key(0), jax.numpy.ones((1, 3)))
      >>> variables, model.apply(variables, jax.numpy.ones((1, 3)))[0].shape
      (Variables(weights: float32[3, 2]), (1, 2))

    Source: ``tf.random_normal``, which draws anew whenever it is run.
    """
    del name
    draws = random_normal_initializer(mean, stddev)  # type: ignore[arg-type]
    return _drawn("random_normal", draws, shape, dtype, seed)


def truncated_normal(
    shape: int | Sequence[int],
    mean: ArrayLike = 0.0,
    stddev: ArrayLike = 1.0,
    dtype: DTypeLike = jnp.float32,
    seed: int | None = None,
    name: str | None = None,
) -> Any:
    """Normal numbers no further than two standard deviations from the mean.

    Those beyond are drawn again. Everything else is as in :func:`jslices.random_normal`.

    Args:
      shape: any, known before tracing.
      mean: a number.
      stddev: that of the normal distribution before the truncation, 0.8796 of it after.
      dtype: of floats.
      seed: draws these numbers always; None: by the key of ``init``.
      name: not used; the name of the variable counts.

    Returns:
      ``shape`` of ``dtype``, lazy in a transformed function.

    Raises:
      TypeError, ValueError, RuntimeError: as :func:`jslices.random_normal`.

    Example:
      >>> import jax, jslices as js
      >>> drawn = js.truncated_normal([1000], stddev=0.1, seed=1)
      >>> bool(abs(drawn).max() <= 0.2)
      True

    Source: ``tf.truncated_normal``.
    """
    del name
    draws = truncated_normal_initializer(mean, stddev)  # type: ignore[arg-type]
    return _drawn("truncated_normal", draws, shape, dtype, seed)


def random_uniform(
    shape: int | Sequence[int],
    minval: ArrayLike = 0,
    maxval: ArrayLike | None = None,
    dtype: DTypeLike = jnp.float32,
    seed: int | None = None,
    name: str | None = None,
) -> Any:
    """Uniform numbers of ``[minval, maxval)``; whole ones for an integer dtype.

    Everything else is as in :func:`jslices.random_normal`.

    Args:
      shape: any, known before tracing.
      minval: the smallest, included.
      maxval: the largest, never reached. None means 1, and must not be for integers.
      dtype: of floats or integers.
      seed: draws these numbers always; None: by the key of ``init``.
      name: not used; the name of the variable counts.

    Returns:
      ``shape`` of ``dtype``, lazy in a transformed function.

    Raises:
      ValueError: for integers, without ``maxval`` or with an empty range.
      TypeError, ValueError, RuntimeError: as :func:`jslices.random_normal`.

    Example:
      >>> import jax, jslices as js
      >>> drawn = js.random_uniform([1000], -3, 4, "int32", seed=1)
      >>> int(drawn.min()), int(drawn.max())
      (-3, 3)

    Source: ``tf.random_uniform``.
    """
    del name
    draws = random_uniform_initializer(minval, maxval)  # type: ignore[arg-type]
    return _drawn("random_uniform", draws, shape, dtype, seed)


def _drawn(what: str, draws: Initializer, shape: Any, dtype: Any, seed: int | None) -> Any:
    dims, wanted = static_shape(shape, what), canonical_dtype(dtype)

    def sample(key: Any) -> jax.Array:
        return draws.make(key, dims, wanted)

    try:  # now and not when drawing: apply, which never draws, refuses the same
        jax.eval_shape(lambda: sample(jax.random.key(0)))
    except (TypeError, ValueError) as error:
        words = str(error).replace(type(draws).__name__, what)
        raise (TypeError if isinstance(error, TypeError) else ValueError)(words) from None
    making = current_making()
    if making is None and current_frame_or_none() is not None:
        draw = Draw(what, sample, seed)
        of_numbers = not any(map(is_array, draws.get_config().values()))
        return LazyValue(draw, (draw,), dims, wanted, of_numbers)
    if seed is not None:
        return sample(jax.random.key(seed))
    if making is not None:
        return sample(some_key(what, making.key_at(making.next_place())))
    raise RuntimeError(
        f"{what} was called outside of a transformed function, where there is no key. Put "
        "the call into the function that jslices.transform is given; or pass seed=; or "
        f"draw with {of_jax(what)}(key, ...)"
    )
