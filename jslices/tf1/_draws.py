"""Random numbers that ``init`` draws, and ``apply`` never does.

``tf.Variable(tf.random_normal([5, 5]))`` draws when ``init`` makes the variable, with the
key given to ``init``. ``apply``, which has the variable and no key, never draws: there
``tf.random_normal`` is a lazy value that has a shape and a dtype, and nothing more.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.typing import DTypeLike

from jslices import is_slices
from jslices._jax import called_by_any_jax_operator
from jslices.tf1 import _run
from jslices.tf1._arrays import ArrayOperators, MaybeLazy, TensorLike, plain
from jslices.tf1._run import DrawId, Initialization


@dataclasses.dataclass(eq=False)
class Draw:
    """One draw of random numbers: the same numbers throughout a run.

    The first variable that begins with it decides which numbers.
    """

    what: str
    sample: Callable[[jax.Array], jax.Array]
    seed: int | None
    #: After ``set_random_seed``: the seed and a number, if no variable begins with it.
    of_program: tuple[int, int] | None = None
    id: DrawId | None = None

    def bind(self, variable: Initialization) -> DrawId:
        """Bind the draw to a variable, unless it is bound."""
        if self.id is None:
            self.id = variable.next_draw(":")
        return self.id

    def __call__(self) -> jax.Array:
        key: jax.Array | None
        variable = _run.current_initialization()
        if self.seed is not None:
            key = jax.random.key(self.seed)
        elif variable is not None:
            key = variable.key_of(self.bind(variable))
            if key is None:
                raise ValueError(
                    f"{self.what} draws random numbers and got no key; pass "
                    "jax.random.key(0) to init instead of None, or seed= to the call"
                )
        elif self.of_program is not None:
            seed, number = self.of_program
            key = jax.random.fold_in(jax.random.key(seed), number)
        else:  # in init as in apply, which has no key
            raise RuntimeError(
                f"{self.what} draws only the initial value of a variable, to which "
                "operators may be applied. Here its value was needed for something else, "
                "and apply has no key to draw with. To initialize a variable with another "
                "function of it, write tf.Variable(lambda: ...) with the call of "
                f"{self.what} inside. For new numbers in every call, take a key as an "
                f"argument and write {of_jax(self.what)}(key, ...); for the same numbers "
                "always, pass seed="
            )
        return self.sample(key)


def of_jax(what: str) -> str:
    """The name of JAX's function, which takes a key."""
    name = what.removeprefix("random_").removesuffix("_initializer")
    return f"jax.random.{name}" if hasattr(jax.random, name) else "jax.random.normal"


class LazyValue(ArrayOperators):
    """An array that will be made later, of this shape and dtype.

    Operators, indexing, ``astype`` and ``reshape`` give another lazy value; everything
    else, the functions of ``jax.numpy`` included, needs the array itself. It is
    ``repeatable`` if it was computed from numbers only.
    """

    is_lazy = True

    def __init__(
        self,
        make: Callable[[], jax.Array],
        draws: Sequence[Draw],
        shape: tuple[int, ...],
        dtype: np.dtype,
        repeatable: bool = True,
    ) -> None:
        self._make, self._draws = make, tuple(dict.fromkeys(draws))
        self.shape, self.dtype, self.repeatable = shape, dtype, repeatable

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    def value(self) -> jax.Array:
        """The array; a RuntimeError if no variable begins with it and it has no seed."""
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

        def combined(arrays: Sequence[jax.Array]) -> jax.Array:
            rest = iter(arrays)
            values = [next(rest) if isinstance(x, LazyValue) else x for x in operands]
            return function(*values)

        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in lazy]
        out = jax.eval_shape(combined, shapes)
        others = jax.tree.leaves([x for x in operands if not isinstance(x, LazyValue)])
        of_numbers = not any(isinstance(x, jax.Array | np.ndarray) for x in others)
        repeatable = of_numbers and all(x.repeatable for x in lazy)
        draws = [draw for x in lazy for draw in x._draws]
        make = lambda: combined([x.value() for x in lazy])  # noqa: E731
        return LazyValue(make, draws, tuple(out.shape), np.dtype(out.dtype), repeatable)


# So that jnp.sum(x) and jax.jit(f)(x) accept one: they see the array.
jax.tree_util.register_pytree_node(
    LazyValue, lambda x: ((x.value(),), None), lambda _, children: children[0]
)


def can_draw() -> bool:
    """True in a transformed function, and where the initial value of a variable is made."""
    variable, run = _run.current_initialization(), _run.current_run_or_none()
    return variable is not None or run is not None


def drawn(
    what: str,
    sample: Callable[[jax.Array], jax.Array],
    shape: tuple[int, ...],
    dtype: np.dtype,
    seed: int | None,
    repeatable: bool,
) -> MaybeLazy:
    """The result of ``what``: lazy in a transformed function, elsewhere an array.

    ``repeatable``: the numbers can be drawn again, as ``sample`` holds no arrays.
    """
    variable, run = _run.current_initialization(), _run.current_run_or_none()
    if variable is None and run is not None:
        draw = Draw(what, sample, seed, run.next_seeded_draw())
        return LazyValue(draw, (draw,), shape, dtype, repeatable)
    if seed is None and variable is None:
        raise RuntimeError(
            f"{what} was called outside of a transformed function, where there is no key. "
            "Put the call into the function that you give to jslices.tf1.transform; or "
            f"pass seed=; or draw with {of_jax(what)}(key, ...)"
        )
    now = variable.next_draw() if variable is not None and seed is None else None
    return Draw(what, sample, seed, id=now)()
