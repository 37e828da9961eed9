"""Checking what IndexedSlices are made from; every message says what to type instead."""

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jslices._rows.bounds import in_32_bits


def as_array(x: Any) -> Any:
    """Lists, numbers and NumPy arrays as JAX arrays; anything that has a dtype as it is."""
    if isinstance(x, np.ndarray | np.generic) or not hasattr(x, "dtype"):
        return jnp.asarray(x)
    return x


def as_indices(x: Any) -> Any:
    """:func:`as_array` for row numbers, of which none becomes another one."""
    if isinstance(x, list | tuple) and all(type(n) is int for n in x):
        x = np.asarray(x, np.int64)
    return as_array(in_32_bits(x) if isinstance(x, np.ndarray) and x.size else x)


def static_shape(shape: Any) -> tuple[int, ...] | None:
    """``dense_shape`` as a tuple of ints, which it must be able to become."""
    if shape is None:
        return None
    try:
        return tuple(int(n) for n in shape)
    except (jax.errors.ConcretizationTypeError, TypeError, ValueError) as error:
        raise TypeError(
            f"dense_shape must be a tuple of ints known before tracing, got {shape!r}; "
            "pass the shape of the table: dense_shape=table.shape"
        ) from error


def check_parts(values: Any, indices: Any, shape: tuple[int, ...] | None) -> None:
    """Refuses parts that do not fit together, naming every misfit at once."""
    got = (
        f"values {values.dtype}[{', '.join(map(str, values.shape))}], indices "
        f"{indices.dtype}[{', '.join(map(str, indices.shape))}], dense_shape {shape}"
    )
    if not jnp.issubdtype(indices.dtype, jnp.integer):
        hint = (
            "; the order is IndexedSlices(values, indices, dense_shape)"
            if jnp.issubdtype(values.dtype, jnp.integer)
            else "; cast them: indices.astype('int32')"
        )
        raise TypeError(f"IndexedSlices wants integer indices, got {got}{hint}")
    problems = []
    if indices.ndim != 1:
        problems.append(
            f"indices must have one axis, not {indices.ndim}: flatten both with "
            "values.reshape(-1, *row_shape) and indices.reshape(-1)"
        )
    elif values.ndim < 1 or values.shape[0] != indices.shape[0]:
        problems.append("values and indices must have equally many rows")
    if shape is not None:
        if len(shape) < 1 or min(shape) < 0:
            problems.append("dense_shape must be (V, *row_shape), none negative")
        elif indices.ndim == 1 and tuple(values.shape[1:]) != shape[1:]:
            rows = (shape[0], *values.shape[1:])
            problems.append(
                f"the rows of values have shape {tuple(values.shape[1:])}, those of "
                f"dense_shape {shape[1:]}: did you mean dense_shape={rows}?"
            )
    if problems:
        raise ValueError(f"IndexedSlices got {got}; " + "; ".join(problems))


def check_slices(slices: Any) -> None:
    """Refuses slices whose indices a foreign ``tree.map`` has turned into numbers."""
    if not jnp.issubdtype(slices.indices.dtype, jnp.integer):
        raise TypeError(
            f"these IndexedSlices have indices of dtype {slices.indices.dtype}, which "
            "are not row numbers any more. A tree.map (of an Optax transformation, for "
            "example) was mapped over the slices and changed them. Wrap that "
            "transformation with jslices.from_optax(...), or map over whole slices: "
            "jax.tree.map(f, grads, is_leaf=jslices.is_slices)"
        )


def check_batch_index(key: Any, length: int) -> None:
    """Refuses what JAX would clamp: numbers out of range, as far as they are known."""
    if isinstance(key, slice | jax.core.Tracer):
        return
    numbers = np.asarray(key)
    if numbers.dtype == np.bool_ and numbers.ndim != 1:
        # No axis of the batch: JAX would make a new one of it, or merge one with the rows.
        raise TypeError(
            f"a mask of a batch axis has one axis, got bool{list(numbers.shape)}"
        )
    if not np.issubdtype(numbers.dtype, np.integer):
        return
    bad = numbers[(numbers < -length) | (numbers >= length)]
    if bad.size:
        raise IndexError(f"batch index {bad[0]} is out of range for {length}")


def known_int(value: Any, refusal: str) -> int:
    """``value`` as an int that is known while tracing; else a TypeError that says so."""
    try:
        return operator.index(value)
    except (TypeError, jax.errors.ConcretizationTypeError) as error:
        raise TypeError(refusal) from error
