"""Arguments of accumulators, converted and checked.

The first words of every message are TensorFlow's.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jslices import InvalidArgumentError, is_slices
from jslices._arguments import OneOf

#: An array in memory, or traced.
Array: TypeAlias = np.ndarray | jax.Array
#: A shape with None for unknown lengths; None if not even the rank is known.
PartialShape: TypeAlias = tuple[int | None, ...] | None

#: How the accumulated gradients are reduced.
REDUCTIONS = OneOf("MEAN", "SUM")


def float_dtype(owner: str, dtype: DTypeLike) -> np.dtype:
    """Check that a dtype is a real floating one."""
    try:
        result = np.dtype(dtype)
    except TypeError:
        result = np.dtype(object)
    if not jnp.issubdtype(result, jnp.floating):
        raise InvalidArgumentError(
            f"{owner}(dtype={dtype!r}): gradients are accumulated in a floating dtype, for "
            "example 'float32'"
        )
    return result


def partial_shape(
    owner: str, shape: Sequence[SupportsIndex | None] | None, name: str = "shape"
) -> PartialShape:
    """Check a shape, in which None or -1 is an unknown length."""
    if shape is None:
        return None
    try:
        sizes = tuple(None if n is None else operator.index(n) for n in shape)
    except TypeError:
        sizes = (-2,)
    if any(n is not None and n < -1 for n in sizes):
        raise InvalidArgumentError(
            f"{owner}({name}={shape!r}): a shape is a tuple of whole numbers, None where "
            "one is not known: (num_rows, 64) or (None, 64)"
        )
    return tuple(None if n == -1 else n for n in sizes)


def whole_number(
    name: str,
    value: ArrayLike,
    convert: Callable[[Any], int] = int,
    wanted: str = "a number",
) -> int:
    """Convert to an int, cutting off a fraction as TensorFlow does for steps."""
    refuse_tracer(name, value)
    try:
        return convert(value)
    except (TypeError, ValueError, OverflowError):
        raise InvalidArgumentError(f"{name} wants {wanted}, got {value!r}") from None


def positive(num_required: ArrayLike) -> int:
    """Check the number of gradients that a take requires."""
    wanted = "a whole number"
    number = whole_number("num_required", num_required, operator.index, wanted)
    if number < 1:
        raise InvalidArgumentError(
            f"Argument num_required must be positive, but was {number}"
        )
    return number


def refuse_tracer(name: str, value: object) -> None:
    """Refuse a traced value, as the blocking accumulators live on the host."""
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"{name} is a traced value, but this accumulator lives on the host; inside "
            "jit use the pure form, jslices.accumulators.sparse_accumulator, or call this "
            "after the jitted function has returned"
        )


def host_array(name: str, value: ArrayLike, dtype: np.dtype) -> np.ndarray:
    """Copy to the host. Lists and numbers take on ``dtype``; arrays keep theirs."""
    array = on_host(name, value)
    if hasattr(value, "dtype"):
        return array
    if array.dtype.kind not in "biuf":
        raise InvalidArgumentError(f"{name} holds no real numbers, but {array.dtype}")
    return array.astype(dtype)


def host_indices(indices: ArrayLike) -> np.ndarray:
    """Copy row numbers to the host as int64, refusing other numbers."""
    array = on_host("grad_indices", indices)
    if array.size == 0 and not hasattr(indices, "dtype"):
        array = array.astype(np.int64)  # np.asarray([]) is float64
    if not np.issubdtype(array.dtype, np.integer):
        raise InvalidArgumentError(
            f"grad_indices wants integers, got {array.dtype}{list(array.shape)}. If a "
            "tree.map (of an Optax transformation, for example) has changed slices, wrap "
            "that transformation with jslices.from_optax(...)"
        )
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        raise InvalidArgumentError("grad_indices has numbers beyond int64")
    return array.astype(np.int64)


def on_host(name: str, value: ArrayLike) -> np.ndarray:
    """Copy to the host."""
    refuse_tracer(name, value)
    try:
        return np.asarray(value)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"{name} is not an array: {error}") from None


def check_is_slices(call: str, grad: Any, dense: str) -> None:
    """Refuse what is not slices, and rows that several axes number: TensorFlow has one."""
    if not is_slices(grad):
        raise TypeError(
            f"{call} wants IndexedSlices, got a {type(grad).__name__}; a dense gradient "
            f"goes to a jslices.accumulators.{dense}"
        )
    if grad.row_axes > 1:
        raise InvalidArgumentError(
            f"an accumulator of rows numbers them by one axis, got {grad}, "
            f"row_axes={grad.row_axes}; pass slices.flat, of shape {grad.flat.shape}"
        )


def check_sparse(
    indices: Array,
    values: Array,
    grad_shape: PartialShape,
    shape: PartialShape,
    dtype: np.dtype,
    exact: bool = False,
) -> None:
    """Refuse a gradient that does not fit, naming every misfit at once.

    Works on NumPy and on traced arrays alike; :func:`check_rows` checks the row numbers.
    Rows may have further axes than the shape unless ``exact``.
    """
    problems = []
    if indices.ndim != 1:
        sizes = ",".join(map(str, indices.shape))
        problems.append(f"Input indices should be vector but received shape: [{sizes}]")
    if values.ndim == 0:
        problems.append("Values cannot be 0-dimensional.")
    elif indices.ndim == 1 and values.shape[0] != indices.shape[0]:
        problems.append(
            f"Expected {indices.shape[0]} non-empty input values, got {values.shape[0]}"
        )
    if values.dtype != dtype:
        problems.append(_other_dtype("values", values.dtype, dtype))
    problems += shape_problems("shape", grad_shape, shape)
    if values.ndim and shape is not None:
        problems += shape_problems("values", values.shape, (None, *shape[1:]), exact)
    if problems:
        raise InvalidArgumentError("; ".join(problems))


def check_dense(grad: Array, shape: PartialShape, dtype: np.dtype, note: str = "") -> None:
    """Refuse a dense gradient that does not fit; the note is the end of the error."""
    problems = []
    if grad.dtype != dtype:
        problems.append(_other_dtype("grad", grad.dtype, dtype))
    if shape is not None and (
        grad.ndim != len(shape)
        or any(n is not None and n != m for n, m in zip(shape, grad.shape, strict=True))
    ):
        expected = ",".join("?" if n is None else str(n) for n in shape)
        actual = ",".join(map(str, grad.shape))
        problems.append(f"Shape mismatch: expected [{expected}], got [{actual}]")
    if problems:
        raise InvalidArgumentError("; ".join(problems) + note)


def check_rows(indices: np.ndarray, shape: PartialShape) -> None:
    """Refuse a row number beyond the last row."""
    if shape is None or shape[0] is None:
        return
    beyond = np.flatnonzero(indices >= shape[0])
    if beyond.size:
        where = int(beyond[0])
        raise InvalidArgumentError(
            f"Shape mismatch: index of slice {where} exceeded limits of shape; index is "
            f"{indices[where]} exceeded {shape[0]}"
        )


def _other_dtype(name: str, actual: np.dtype, expected: np.dtype) -> str:
    return (
        f"expected {name} of dtype {expected}, got {actual}; cast them: "
        f"{name}.astype('{expected}')"
    )


def shape_problems(
    name: str, actual: PartialShape, expected: PartialShape, exact: bool = False
) -> list[str]:
    """Misfits of known lengths; further axes than expected may follow unless ``exact``."""
    if actual is None or expected is None:
        return []
    if len(actual) < len(expected) or (exact and len(actual) > len(expected)):
        rank = f"{'' if exact else 'at least '}{len(expected)}, got {len(actual)}"
        return [f"Shape mismatch: expected {name} rank {rank}"]
    return [
        f"Shape mismatch: expected {name} dim {axis} to be {size}, got {length}"
        for axis, (size, length) in enumerate(zip(expected, actual, strict=False))
        if size is not None and length not in (None, -1, size)
    ]
