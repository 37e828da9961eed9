"""Shapes and dtypes: what users give, and what may be assigned to a variable of them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import dtypes

from jslices._slices import IndexedSlices
from jslices.tf1._operators import ArrayOperators

_KINDS = (np.bool_, np.integer, np.floating, np.complexfloating)


def is_array(x: Any) -> bool:
    """True for what has a dtype of its own; False for Python numbers and lists."""
    return hasattr(x, "dtype") and hasattr(x, "shape")


def canonical_dtype(dtype: Any) -> np.dtype:
    """The dtype JAX makes of this one: 64 bits only where they are switched on."""
    return np.dtype(dtypes.canonicalize_dtype(dtype))


def dtype_of(value: Any) -> np.dtype:
    """The dtype of a constant: float32 and int32 for Python's numbers, as TensorFlow."""
    if isinstance(value, str | bytes):
        raise TypeError(f"a variable cannot hold a string, got {value!r}")
    return canonical_dtype(value.dtype if is_array(value) else np.asarray(value).dtype)


def kind_of(dtype: Any) -> int:
    """0, 1, 2, 3 for truth values, integers, floats and complex numbers."""
    return next((i for i, kind in enumerate(_KINDS) if jnp.issubdtype(dtype, kind)), 4)


def as_value(value: Any, dtype: np.dtype, what: str) -> jax.Array:
    """``value`` as an array of ``dtype``.

    Python's numbers become it where nothing is lost; arrays must have it already.

    Raises:
      TypeError: naming both dtypes, and ``what``.
    """
    if isinstance(value, ArrayOperators):
        value = value.value()
    if isinstance(value, IndexedSlices):
        value = jnp.asarray(value)
    if is_array(value):
        weak = getattr(value, "weak_type", False)
        fits = jnp.result_type(value, dtype) == dtype if weak else False
        if not fits:
            check_dtype(value.dtype, dtype, what)
        return jnp.asarray(value, dtype)
    if _contains_arrays(value):
        return as_value(jnp.asarray(value), dtype, what)
    theirs, ours = kind_of(dtype_of(value)), kind_of(dtype)
    if theirs > ours or (theirs == 0) != (ours == 0):
        raise TypeError(f"{what} wants {dtype}, got {value!r}")
    return jnp.asarray(value, dtype)


def check_dtype(theirs: Any, dtype: np.dtype, what: str) -> None:
    """Refuses an array of another dtype."""
    if canonical_dtype(theirs) != dtype:
        raise TypeError(
            f"{what} wants {dtype}, got an array of {theirs}; cast it: "
            f"value.astype('{dtype}')"
        )


def _contains_arrays(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(_contains_arrays(x) for x in value)
    return is_array(value) or isinstance(value, ArrayOperators)


def check_shape(value: Any, shape: tuple[int, ...], what: str) -> None:
    """Refuses another shape: assignment does not broadcast."""
    if tuple(np.shape(value)) != shape:
        raise ValueError(
            f"{what} requires both shapes to match: the variable has {shape}, the value "
            f"{tuple(np.shape(value))}; nothing is broadcast, so pass "
            f"jnp.broadcast_to(value, {shape}) if that is meant"
        )


def static_shape(shape: Any, what: str) -> tuple[int, ...]:
    """A shape as a tuple of ints.

    Raises:
      TypeError: if it is not known before tracing, naming ``what``.
      ValueError: if something in it is negative.
    """
    dims = tuple(shape) if isinstance(shape, list | tuple | np.ndarray) else (shape,)
    try:
        whole = tuple(int(n.__index__()) for n in dims)
    except (AttributeError, TypeError, jax.errors.TracerIntegerConversionError) as error:
        raise TypeError(
            f"the shape of {what} must be ints known before tracing, got {shape!r}"
        ) from error
    if any(n < 0 for n in whole):
        raise ValueError(f"the shape of {what} must not be negative, got {whole}")
    return whole
