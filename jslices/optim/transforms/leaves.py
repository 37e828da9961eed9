"""What a tree of gradients holds: arrays, IndexedSlices, and None."""

from typing import Any

import jax
import jax.numpy as jnp

from jslices._slices import IndexedSlices, as_array, is_slices


def is_leaf(x: Any) -> bool:
    """True for what a gradient tree holds in place of an array."""
    return x is None or is_slices(x)


def as_leaf(x: Any) -> Any:
    """A leaf made of JAX arrays, also where NumPy arrays came out of ``jax.vmap``."""
    if x is None:
        return x
    return jax.tree.map(jnp.asarray, x) if is_slices(x) else as_array(x)


def numbers(x: Any) -> jax.Array:
    """The numbers of a leaf: those of the array, or of the stored rows."""
    return x.values if isinstance(x, IndexedSlices) else x
