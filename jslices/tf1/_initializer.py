"""What all initializers share."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jslices.tf1._values import canonical_dtype


def refuse_order_of_tensorflow(who: str, key: Any, shape: Any) -> None:
    """Says so if the first argument is a shape."""
    no_shape = not isinstance(shape, list | tuple | int | np.integer)
    if isinstance(key, list | tuple) or (no_shape and isinstance(key, int | np.integer)):
        raise TypeError(
            f"{who} was called with the shape {key!r} first, as in TensorFlow; here, as in "
            f"JAX, it is init(key, shape, dtype): init(jax.random.key(0), {key!r})"
        )


class Initializer:
    """What all initializers share; ``dtype`` is used where a call names none.

    A ``seed`` replaces the key: the same values in every call, as in TensorFlow (the bits
    are JAX's). Without one the key decides, and must be given.
    """

    seed: int | None = None
    dtype: DTypeLike = jnp.float32

    def __call__(
        self,
        key: Any = None,
        shape: int | Sequence[int] | None = None,
        dtype: DTypeLike | None = None,
    ) -> jax.Array:
        """An array of this shape; ``dtype=None`` means that of the initializer."""
        refuse_order_of_tensorflow(type(self).__name__, key, shape)
        if shape is None:
            raise ValueError(f"{type(self).__name__} needs a shape, got None")
        wanted = canonical_dtype(self.dtype if dtype is None else dtype)
        dims = (shape,) if isinstance(shape, int | np.integer) else tuple(shape)
        return self.make(key, dims, wanted)

    def make(self, key: Any, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
        raise NotImplementedError

    def get_config(self) -> dict[str, Any]:
        """The arguments: ``type(init)(**init.get_config())`` makes an equal one."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)  # type: ignore[arg-type]
        }

    def random_key(self, key: Any) -> Any:
        if self.seed is not None:
            return jax.random.key(self.seed)
        if key is None:
            raise ValueError(
                f"{type(self).__name__} draws random numbers and got no key; pass "
                "jax.random.key(0), or make it with seed="
            )
        return key

    def want_floats(self, dtype: np.dtype) -> None:
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(f"{type(self).__name__} makes floats, got dtype {dtype}")
