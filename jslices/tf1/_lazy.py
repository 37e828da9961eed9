"""Values that are known by shape and dtype, and made when somebody needs them.

``js.random_normal`` inside of a transformed function is one: ``init`` draws it for the
variable that begins with it, ``apply``, which has no key and needs none, never does.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jslices._jax import called_by_any_jax_operator
from jslices._slices import is_slices
from jslices.tf1._keys import Making, Place, current_making
from jslices.tf1._operators import ArrayOperators, plain


class Draw:
    """One drawing of random numbers: the same ones in a run, however often it is asked.

    They are those of its place, which is in the first variable that begins with them.
    """

    def __init__(
        self, what: str, sample: Callable[[Any], jax.Array], seed: int | None
    ) -> None:
        self._what, self._sample, self._seed = what, sample, seed
        self._place: Place | None = None

    def bind(self, making: Making) -> Place:
        """Gives it its place, if it has none yet."""
        if self._place is None:
            self._place = making.place_to_keep()
        return self._place

    def __call__(self) -> jax.Array:
        if self._seed is not None:
            return self._sample(jax.random.key(self._seed))
        making = current_making()
        if making is None:  # in init as in apply, which has no key
            raise RuntimeError(
                f"{self._what} draws only what a variable begins with, and operators may "
                "change that: its value was asked for in another way, and apply has no key "
                "to draw with. To let a variable begin with any other function of it write "
                f"js.Variable(lambda: ...) with the call of {self._what} inside. For new "
                f"numbers in every call take a key as an argument, and write "
                f"{of_jax(self._what)}(key, ...); for the same ones always pass seed="
            )
        return self._sample(some_key(self._what, making.key_at(self.bind(making))))


def of_jax(what: str) -> str:
    """The name of JAX's function that takes a key."""
    return f"jax.random.{what.removeprefix('random_')}"


def some_key(what: str, key: Any) -> Any:
    """``key``, or an error if there is none."""
    if key is None:
        raise ValueError(
            f"{what} draws random numbers and got no key; pass jax.random.key(0) to init "
            "instead of None, or seed= to the call"
        )
    return key


class LazyValue(ArrayOperators):
    """What stands for an array that is made later, and for what operators make of it.

    Operators, indexing, ``astype`` and ``reshape`` give another one; everything else, the
    functions of ``jax.numpy`` included, asks for the value.

    Attributes:
      shape: of the array.
      dtype: of the array.
      again: whether nothing but numbers went into it, so that a state may remember it.
    """

    is_lazy = True

    def __init__(
        self,
        make: Callable[[], Any],
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

    def value(self) -> Any:
        """The array.

        Raises:
          RuntimeError: unless a variable begins with it, or it was made with a seed.
        """
        return self._make()

    def begins(self, name: str) -> None:
        """Says that a variable of this name begins with it, in ``init`` and ``apply``."""
        making = Making(None, name)
        for draw in self._draws:
            draw.bind(making)

    def astype(self, dtype: Any) -> "LazyValue":
        """The same in another dtype."""
        new: LazyValue = self._operate(lambda x: x.astype(dtype), self)
        return new

    def reshape(self, *shape: Any) -> "LazyValue":
        """The same in another shape."""
        new: LazyValue = self._operate(lambda x: x.reshape(*shape), self)
        return new

    def __repr__(self) -> str:
        return f"<js value made by init, shape={self.shape} dtype={self.dtype}>"

    def __jax_array__(self) -> Any:
        # `array * lazy` must come to __rmul__.
        return self if called_by_any_jax_operator() else self.value()

    def _operate(self, function: Callable[..., Any], *operands: Any) -> Any:
        if any(map(is_slices, operands)):
            return NotImplemented
        operands = tuple(x if isinstance(x, LazyValue) else plain(x) for x in operands)
        lazy = [x for x in operands if isinstance(x, LazyValue)]

        def run(arrays: Sequence[Any]) -> Any:
            rest = iter(arrays)
            return function(
                *(next(rest) if isinstance(x, LazyValue) else x for x in operands)
            )

        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in lazy]
        out = jax.eval_shape(run, shapes)
        others = [x for x in operands if not isinstance(x, LazyValue)]
        again = all(x.again for x in lazy) and not any(
            isinstance(x, jax.Array | np.ndarray) for x in jax.tree.leaves(others)
        )
        draws = [draw for x in lazy for draw in x._draws]
        make = lambda: run([x.value() for x in lazy])  # noqa: E731
        return LazyValue(make, draws, tuple(out.shape), np.dtype(out.dtype), again)


# So that jnp.sum(x) and jax.jit(f)(x) take one: what they see is the array.
jax.tree_util.register_pytree_node(
    LazyValue, lambda x: ((x.value(),), None), lambda _, children: children[0]
)
