"""Initial values of variables: ``zeros``, ``random_normal``, ...

``tf.Variable(tf.random_normal([5, 5]))`` draws when ``init`` makes the variable, with the
key given to ``init``. ``apply``, which has the variable and no key, never draws: there
``tf.random_normal`` is a lazy value that has a shape and a dtype, and nothing more.
``zeros``, ``ones`` and ``constant`` give ordinary arrays; how they were made is remembered,
so that ``initialize_all_variables`` can make them again without running the function.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jslices import is_slices
from jslices.extend import called_by_any_jax_operator
from jslices.tf1._arrays import (
    ArrayOperators,
    MaybeLazy,
    TensorLike,
    canonical_dtype,
    dtype_of,
    is_array,
    plain,
    static_shape,
)
from jslices.tf1._run import (
    DrawId,
    Initialization,
    current_initialization,
    current_run_or_none,
)
from jslices.tf1.initializers import (
    Initializer,
    constant_initializer,
    random_normal_initializer,
    random_uniform_initializer,
    truncated_normal_initializer,
)


class Draw:
    """One draw of random numbers: the same numbers throughout a run.

    Which numbers, is decided by the first variable that begins with it.
    """

    def __init__(
        self, what: str, sample: Callable[[jax.Array], jax.Array], seed: int | None
    ) -> None:
        self._what, self._sample, self._seed = what, sample, seed
        self._id: DrawId | None = None

    def bind(self, variable: Initialization) -> DrawId:
        """Bind the draw to a variable, unless it is bound."""
        if self._id is None:
            self._id = variable.next_lazy_draw()
        return self._id

    def __call__(self) -> jax.Array:
        if self._seed is not None:
            return self._sample(jax.random.key(self._seed))
        variable = current_initialization()
        if variable is None:  # in init as in apply, which has no key
            raise RuntimeError(
                f"{self._what} draws only the initial value of a variable, to which "
                "operators may be applied. Here its value was needed for something else, "
                "and apply has no key to draw with. To initialize a variable with another "
                "function of it, write tf.Variable(lambda: ...) with the call of "
                f"{self._what} inside. For new numbers in every call, take a key as an "
                f"argument and write {of_jax(self._what)}(key, ...); for the same numbers "
                "always, pass seed="
            )
        return self._sample(some_key(self._what, variable, self.bind(variable)))


def of_jax(what: str) -> str:
    """The name of JAX's function, which takes a key."""
    return f"jax.random.{what.removeprefix('random_')}"


def some_key(what: str, variable: Initialization, draw: DrawId) -> jax.Array:
    """The key of a draw, or an error if the run has no key."""
    key = variable.key_of(draw)
    if key is None:
        raise ValueError(
            f"{what} draws random numbers and got no key; pass jax.random.key(0) to init "
            "instead of None, or seed= to the call"
        )
    return key


class LazyValue(ArrayOperators):
    """An array that will be made later, of this shape and dtype.

    Operators, indexing, ``astype`` and ``reshape`` give another lazy value; everything
    else, the functions of ``jax.numpy`` included, needs the array itself. ``again``: it was
    computed from numbers only, so that it can be made again.
    """

    is_lazy = True

    def __init__(
        self,
        make: Callable[[], jax.Array],
        draws: Sequence[Draw],
        shape: tuple[int, ...],
        dtype: np.dtype,
        again: bool = True,
    ) -> None:
        self._make, self._draws = make, tuple(dict.fromkeys(draws))
        self.shape, self.dtype, self.again = shape, dtype, again

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    def get_shape(self) -> tuple[int, ...]:
        """The shape, by TensorFlow's older name."""
        return self.shape

    def value(self) -> jax.Array:
        """The array.

        Raises:
          RuntimeError: unless a variable begins with it, or it was made with a seed.
        """
        return self._make()

    def bind(self, name: str) -> None:
        """Make it the initial value of this variable, in ``init`` and in ``apply``."""
        variable = Initialization(None, name)
        for draw in self._draws:
            draw.bind(variable)

    def astype(self, dtype: DTypeLike) -> "LazyValue":
        """The same values in another dtype."""
        return self._operate(lambda x: x.astype(dtype), self)

    def reshape(self, *shape: int | Sequence[int]) -> "LazyValue":
        """The same values in another shape."""
        return self._operate(lambda x: x.reshape(*shape), self)

    def __repr__(self) -> str:
        return f"<js value made by init, shape={self.shape} dtype={self.dtype}>"

    def __jax_array__(self) -> MaybeLazy:
        # `array * lazy` must reach __rmul__.
        return self if called_by_any_jax_operator() else self.value()

    def _operate(
        self, function: Callable[..., MaybeLazy], *operands: TensorLike
    ) -> MaybeLazy:
        if any(map(is_slices, operands)):
            return NotImplemented
        operands = tuple(x if isinstance(x, LazyValue) else plain(x) for x in operands)
        lazy = [x for x in operands if isinstance(x, LazyValue)]

        def run(arrays: Sequence[jax.Array]) -> jax.Array:
            rest = iter(arrays)
            values = [next(rest) if isinstance(x, LazyValue) else x for x in operands]
            return function(*values)

        out = jax.eval_shape(run, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in lazy])
        others = [x for x in operands if not isinstance(x, LazyValue)]
        again = all(x.again for x in lazy) and not any(
            isinstance(x, jax.Array | np.ndarray) for x in jax.tree.leaves(others)
        )
        draws = [draw for x in lazy for draw in x._draws]
        make = lambda: run([x.value() for x in lazy])  # noqa: E731
        return LazyValue(make, draws, tuple(out.shape), np.dtype(out.dtype), again)


# So that jnp.sum(x) and jax.jit(f)(x) accept one: they see the array.
jax.tree_util.register_pytree_node(
    LazyValue, lambda x: ((x.value(),), None), lambda _, children: children[0]
)


# --- constants --------------------------------------------------------------------------


def zeros(
    shape: int | Sequence[int], dtype: DTypeLike = jnp.float32, name: str | None = None
) -> jax.Array:
    """An array of zeros, such as ``jnp.zeros`` gives; ``name`` is ignored.

    A variable that begins with it can be initialized again by
    :func:`jslices.tf1.initialize_all_variables`.

    Raises:
      TypeError, ValueError: if ``shape`` is not a shape of ints, known before tracing.

    Cost: that of ``jnp.zeros``, also in ``apply``, where ``jit`` removes it.

    Example:
      >>> import jax, jslices.tf1 as tf
      >>> model = tf.transform(lambda: tf.Variable(tf.zeros([3]), name="biases") + 1)
      >>> model.apply(model.init(jax.random.key(0)))
      (Array([1., 1., 1.], dtype=float32), Variables(biases: float32[3]))

    Source: ``tf.zeros``.
    """
    return _filled("zeros", 0, shape, dtype)


def ones(
    shape: int | Sequence[int], dtype: DTypeLike = jnp.float32, name: str | None = None
) -> jax.Array:
    """An array of ones; see :func:`jslices.tf1.zeros`.

    Example:
      >>> import jslices.tf1 as tf
      >>> tf.ones([2], "int32")
      Array([1, 1], dtype=int32)

    Source: ``tf.ones``.
    """
    return _filled("ones", 1, shape, dtype)


def constant(
    value: TensorLike,
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
      name: ignored; operations have no names here.

    Raises:
      ValueError: for more values than the shape takes.
      TypeError: for values that the dtype cannot hold, such as 3.7 and int32.

    Example:
      >>> import jslices.tf1 as tf
      >>> tf.constant([1, 2], shape=[2, 2])
      Array([[1, 2],
             [2, 2]], dtype=int32)

    Source: ``tf.constant`` of TensorFlow 1.
    """
    result = dtype_of(value) if dtype is None else canonical_dtype(dtype)
    dims = jnp.asarray(value).shape if shape is None else static_shape(shape, "constant")
    make = lambda: constant_initializer(value).make(None, dims, result)  # noqa: E731
    # An array may be as large as a table: what it was made from is not remembered.
    of_arrays = any(map(is_array, jax.tree.leaves(value)))
    return make() if of_arrays else _remembered(make)


def _filled(
    what: str, value: int, shape: int | Sequence[int], dtype: DTypeLike
) -> jax.Array:
    dims, result = static_shape(shape, what), canonical_dtype(dtype)
    return _remembered(lambda: jnp.full(dims, value, result))


def _remembered(make: Callable[[], jax.Array]) -> jax.Array:
    array, run = make(), current_run_or_none()
    if run is not None:
        run.remember(array, make)
    return array


# --- random numbers ---------------------------------------------------------------------


def random_normal(
    shape: int | Sequence[int],
    mean: ArrayLike = 0.0,
    stddev: ArrayLike = 1.0,
    dtype: DTypeLike = jnp.float32,
    seed: int | None = None,
    name: str | None = None,
) -> MaybeLazy:
    """Normal numbers, as the initial value of a variable.

    Inside of a transformed function the result is lazy: it has a shape and a dtype, and
    operators, indexing, ``astype`` and ``reshape`` give another lazy value. ``init`` draws
    it for the first variable that begins with it, with the key folded with that variable's
    name; ``apply`` draws nothing. Two calls draw different numbers. Two variables that
    begin with the result of one call begin with the same numbers, as in TensorFlow when
    one session initializes both.

    Args:
      shape: any, known before tracing.
      mean, stddev: numbers; a negative deviation mirrors.
      dtype: of floats.
      seed: draws the same numbers always, also in ``apply`` and outside of functions (the
        bits are JAX's); None: with the key of ``init``.
      name: ignored; the name of the variable decides.

    Returns:
      ``shape`` of ``dtype``: a lazy value in a transformed function, an array in
      ``tf.Variable(lambda: ...)`` and, given a seed, outside.

    Raises:
      TypeError, ValueError: for another dtype, or if ``shape`` is not a shape.
      RuntimeError: without a seed, outside of a transformed function; or inside, if
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

    Source: ``tf.random_normal``, which draws new numbers whenever it is run.
    """
    draws = random_normal_initializer(mean, stddev)  # type: ignore[arg-type]
    return _drawn("random_normal", draws, shape, dtype, seed)


def truncated_normal(
    shape: int | Sequence[int],
    mean: ArrayLike = 0.0,
    stddev: ArrayLike = 1.0,
    dtype: DTypeLike = jnp.float32,
    seed: int | None = None,
    name: str | None = None,
) -> MaybeLazy:
    """Normal numbers no further than two standard deviations from the mean.

    Numbers beyond that are drawn again; ``stddev`` is that before the truncation, 0.8796 of
    it after. Everything else is as in :func:`jslices.tf1.random_normal`.

    Example:
      >>> import jax, jslices.tf1 as tf
      >>> drawn = tf.truncated_normal([1000], stddev=0.1, seed=1)
      >>> bool(abs(drawn).max() <= 0.2)
      True

    Source: ``tf.truncated_normal``.
    """
    draws = truncated_normal_initializer(mean, stddev)  # type: ignore[arg-type]
    return _drawn("truncated_normal", draws, shape, dtype, seed)


def random_uniform(
    shape: int | Sequence[int],
    minval: ArrayLike = 0,
    maxval: ArrayLike | None = None,
    dtype: DTypeLike = jnp.float32,
    seed: int | None = None,
    name: str | None = None,
) -> MaybeLazy:
    """Uniform numbers of ``[minval, maxval)``; whole numbers for an integer dtype.

    Everything else is as in :func:`jslices.tf1.random_normal`.

    Args:
      minval: the lower bound, included.
      maxval: the upper bound, never reached. None means 1; integers need a number.

    Raises:
      ValueError: for integers, without ``maxval`` or with an empty range.

    Example:
      >>> import jax, jslices.tf1 as tf
      >>> drawn = tf.random_uniform([1000], -3, 4, "int32", seed=1)
      >>> int(drawn.min()), int(drawn.max())
      (-3, 3)

    Source: ``tf.random_uniform``.
    """
    draws = random_uniform_initializer(minval, maxval)  # type: ignore[arg-type]
    return _drawn("random_uniform", draws, shape, dtype, seed)


def _drawn(
    what: str,
    draws: Initializer,
    shape: int | Sequence[int],
    dtype: DTypeLike,
    seed: int | None,
) -> MaybeLazy:
    dims, result = static_shape(shape, what), canonical_dtype(dtype)

    def sample(key: jax.Array) -> jax.Array:
        return draws.make(key, dims, result)

    try:  # here, not when drawing: apply, which never draws, must refuse the same arguments
        jax.eval_shape(lambda: sample(jax.random.key(0)))
    except (TypeError, ValueError) as error:
        words = str(error).replace(type(draws).__name__, what)
        raise (TypeError if isinstance(error, TypeError) else ValueError)(words) from None
    variable = current_initialization()
    if variable is None and current_run_or_none() is not None:
        draw = Draw(what, sample, seed)
        of_numbers = not any(map(is_array, draws.get_config().values()))
        return LazyValue(draw, (draw,), dims, result, of_numbers)
    if seed is not None:
        return sample(jax.random.key(seed))
    if variable is not None:
        return sample(some_key(what, variable, variable.next_draw()))
    raise RuntimeError(
        f"{what} was called outside of a transformed function, where there is no key. Put "
        "the call into the function that you give to jslices.tf1.transform; or pass seed=; "
        f"or draw with {of_jax(what)}(key, ...)"
    )
