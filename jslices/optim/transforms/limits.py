"""The limits one clips to: checked, and brought to the right shape."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jslices._slices import IndexedSlices
from jslices.optim.transforms.leaves import numbers
from jslices.optim.transforms.norms import widened


def check_limit(name: str, what: str, limit: Any, single: bool = False) -> jax.Array:
    """``limit`` as an array; refuses what is no number, or known to be negative."""
    if not isinstance(limit, int | float | np.generic | np.ndarray | jax.Array):
        raise TypeError(f"{name}({what}=...) wants a number, got {limit!r}")
    array = jnp.asarray(limit)
    if jnp.issubdtype(array.dtype, jnp.integer):
        array = array.astype(jnp.float32)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"{name}({what}=...) wants a real number, got {array.dtype}")
    if single and array.ndim:
        raise ValueError(f"{name}({what}=...) wants one number, got shape {array.shape}")
    if not isinstance(array, jax.core.Tracer) and bool(jnp.any(array < 0)):
        raise ValueError(f"{name}({what}={limit}): it must not be negative")
    return widened(array)


def fitting(name: str, what: str, limit: jax.Array, t: Any, dtype: DTypeLike) -> jax.Array:
    """``limit`` with as many axes as the values of ``t`` have, none of them longer."""
    x = numbers(t)
    shape = (1,) * (x.ndim - limit.ndim) + limit.shape
    fits = len(shape) == x.ndim and all(
        n in (1, m) for n, m in zip(shape, x.shape, strict=True)
    )
    if not fits:
        raise ValueError(
            f"{name} got {what} of shape {limit.shape}, which does not broadcast to the "
            f"shape {t.shape} of what is clipped"
        )
    if isinstance(t, IndexedSlices) and any(n > 1 for n in shape[: t.indices.ndim]):
        raise ValueError(
            f"{name} got {what} of shape {limit.shape} for {t}: rows cannot have limits of "
            "their own, because slices are sorted by row first"
        )
    return limit.reshape(shape).astype(dtype)
