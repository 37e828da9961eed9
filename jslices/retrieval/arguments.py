"""What search and loss take, and how results are split over a mesh."""

from typing import Any

import jax
import jax.numpy as jnp

import jslices as js
from jslices import extend


def floats(x: Any, caller: str, name: str) -> jax.Array:
    """``x`` as an array of floats of 32 bits or more; other things are refused."""
    x = as_floats(x, caller, name)
    return x.astype(extend.sum_dtype(x.dtype))


def as_floats(x: Any, caller: str, name: str) -> jax.Array:
    """``x`` as an array of floats, as wide as it came."""
    x = extend.unboxed(x)
    if not js.is_slices(x) and hasattr(x, "dtype"):
        array = jnp.asarray(x)  # a HostTable says what to type
        if jnp.issubdtype(array.dtype, jnp.floating):
            return array
    got = f"{x.dtype}{list(x.shape)}" if isinstance(x, jax.Array) else type(x).__name__
    raise TypeError(
        f"{caller} wants {name} as an array of floats, got {got}; type "
        f"jnp.asarray({name}, jnp.float32) of numbers, and of slices pass the table"
    )


def by_query(queries: jax.Array, *rest: Any) -> jax.NamedSharding | None:
    """The type of results of which each query has one, or a row."""
    mesh = extend.explicit_mesh(queries)
    spec = () if mesh is None else jax.typeof(queries).sharding.spec[:-1]
    return None if mesh is None else jax.NamedSharding(mesh, jax.P(*spec))
