"""Checks of the parts of IndexedSlices."""

import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jslices._jax import is_symbolic
from jslices._rows.access import in_32_bits
from jslices._slices.entries import Entries
from jslices._typing import Index, Size


def as_array(x: ArrayLike) -> jax.Array:
    """Lists, numbers and NumPy arrays as JAX arrays; anything with a dtype unchanged."""
    if isinstance(x, np.ndarray | np.generic) or not hasattr(x, "dtype"):
        return jnp.asarray(x)
    return x  # type: ignore[return-value]


def as_indices(x: ArrayLike) -> Any:
    """:func:`as_array` for row numbers, without changing any of them."""
    if isinstance(x, list | tuple) and all(type(n) is int for n in x):
        x = np.asarray(x, np.int64)
    return as_array(in_32_bits(x) if isinstance(x, np.ndarray) and x.size else x)


def static_shape(shape: Sequence[Size] | None) -> tuple[int, ...] | None:
    """``dense_shape`` as a tuple of ints."""
    if shape is None:
        return None
    try:
        return tuple(n if is_symbolic(n) else operator.index(n) for n in shape)
    except (jax.errors.ConcretizationTypeError, TypeError, ValueError) as error:
        raise TypeError(
            f"dense_shape must be a tuple of ints known before tracing, got {shape!r}; "
            "pass the shape of the table: dense_shape=table.shape"
        ) from error


def check_parts(
    values: jax.Array,
    indices: jax.Array,
    shape: tuple[int, ...] | None,
    row_axes: int,
) -> None:
    """Refuses parts that do not fit together, with all problems in one message."""
    got = (
        f"values {values.dtype}{list(values.shape)}, indices {indices.dtype}"
        f"{list(indices.shape)}, dense_shape {shape}"
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
    if shape is None and row_axes > 1:
        problems.append(
            f"row_axes={row_axes} wants dense_shape, whose first {row_axes} axes these are"
        )
    if shape is not None:
        if len(shape) < row_axes or any(n < 0 for n in shape):
            rows = "V" if row_axes == 1 else f"{row_axes} axes of rows"
            problems.append(f"dense_shape must be ({rows}, *row_shape), none negative")
        elif indices.ndim == 1 and tuple(values.shape[1:]) != shape[row_axes:]:
            problems.append(
                f"the rows of values have shape {tuple(values.shape[1:])}, those of "
                f"dense_shape {shape[row_axes:]}: {_suggestion(values, shape, row_axes)}"
            )
    if problems:
        raise ValueError(f"IndexedSlices got {got}; " + "; ".join(problems))


def _suggestion(values: jax.Array, shape: tuple[int, ...], row_axes: int) -> str:
    row = tuple(values.shape[1:])
    axes = len(shape) - len(row)
    if 0 < axes != row_axes and shape[axes:] == row:
        return f"if {axes} axes number the rows, type row_axes={axes}"
    return f"did you mean dense_shape={(*shape[:row_axes], *row)}?"


def common_shape(parts: Sequence[Entries]) -> tuple[int, ...] | None:
    """``dense_shape`` of slices to be added, which are of one array."""
    batches = {tuple(s.indices.shape[:-1]) for s in parts}
    if len(batches) > 1:
        raise ValueError(
            f"concat_slices got slices of different batches {sorted(batches)}; make the "
            "axes of a batch alike with vmap, or take examples out of it: slices[0]"
        )
    shapes = {s.dense_shape for s in parts if s.dense_shape is not None}
    rows = {s.values.shape[s.indices.ndim :] for s in parts}
    if len(shapes) > 1 or len(rows) > 1:
        shapes_in_words = ", ".join(str(s.shape) for s in parts)
        raise ValueError(
            f"cannot add slices of arrays of different shapes: {shapes_in_words}"
        )
    return shapes.pop() if shapes else None


def static_row_axes(row_axes: int) -> int:
    """``row_axes`` as an int of at least 1."""
    try:
        count = operator.index(row_axes)
    except TypeError:
        count = 0
    if count < 1:
        raise ValueError(
            f"row_axes must be how many leading axes number the rows, at least 1, got "
            f"{row_axes!r}"
        )
    return count


def check_batch_index(key: Index, length: int) -> None:
    """Refuses known numbers out of range, which JAX would clamp."""
    if isinstance(key, slice | jax.core.Tracer):
        return
    numbers = np.asarray(key)
    if numbers.dtype == np.bool_ and numbers.ndim != 1:
        # JAX would add an axis for it, or merge a batch axis with the rows.
        raise TypeError(
            f"a mask of a batch axis has one axis, got bool{list(numbers.shape)}"
        )
    if not np.issubdtype(numbers.dtype, np.integer):
        return
    bad = numbers[(numbers < -length) | (numbers >= length)]
    if bad.size:
        raise IndexError(f"batch index {bad[0]} is out of range for {length}")
