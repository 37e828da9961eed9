"""Reading the gradients that accumulators are given, and refusing what cannot be added.

The first words of every message are TensorFlow's.
"""

import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jslices import InvalidArgumentError

#: A shape that is known in part; None when nothing is known of it, not even the rank.
PartialShape = tuple[int | None, ...] | None
REDUCTIONS = ("MEAN", "SUM")


def float_dtype(owner: str, dtype: Any) -> np.dtype:
    """``dtype``, which must be a real floating one."""
    try:
        found = np.dtype(dtype)
    except TypeError:
        found = np.dtype(object)
    if not jnp.issubdtype(found, jnp.floating):
        raise InvalidArgumentError(
            f"{owner}(dtype={dtype!r}): gradients are accumulated in a floating dtype, for "
            "example 'float32'"
        )
    return found


def partial_shape(owner: str, shape: Any, name: str = "shape") -> PartialShape:
    """A shape with None (or -1) for unknown lengths."""
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


def check_reduction(owner: str, reduction_type: Any) -> None:
    """Refuses everything but "MEAN" and "SUM"."""
    if reduction_type not in REDUCTIONS:
        raise InvalidArgumentError(
            f"{owner}(reduction_type={reduction_type!r}): it must be 'MEAN' or 'SUM'"
        )


def whole_number(name: str, value: Any) -> int:
    """``value`` as an int; numbers with a fraction are cut, as TensorFlow casts steps."""
    refuse_tracer(name, value)
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        raise InvalidArgumentError(f"{name} wants a number, got {value!r}") from None


def positive(num_required: Any) -> int:
    """How many gradients a take asks for."""
    refuse_tracer("num_required", num_required)
    try:
        number = operator.index(num_required)
    except TypeError:
        raise InvalidArgumentError(
            f"num_required wants a whole number, got {num_required!r}"
        ) from None
    if number < 1:
        raise InvalidArgumentError(
            f"Argument num_required must be positive, but was {number}"
        )
    return number


def refuse_tracer(name: str, value: Any) -> None:
    """The blocking accumulators live on the host, and can only be used there."""
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"{name} is a traced value, but this accumulator lives on the host; inside "
            "jit use the pure form, jslices.accumulators.sparse_accumulator, or call this "
            "after the jitted function has returned"
        )


def host_array(name: str, value: Any, dtype: np.dtype) -> np.ndarray:
    """``value`` on the host. Lists and numbers take on ``dtype``; arrays keep theirs."""
    found = _on_host(name, value)
    if hasattr(value, "dtype"):
        return found
    if found.dtype.kind not in "biuf":
        raise InvalidArgumentError(f"{name} holds no real numbers, but {found.dtype}")
    return found.astype(dtype)


def host_indices(indices: Any) -> np.ndarray:
    """Row numbers as int64; no rounding of anything else."""
    found = _on_host("grad_indices", indices)
    if found.size == 0 and not hasattr(indices, "dtype"):
        found = found.astype(np.int64)  # np.asarray([]) is float64
    if not np.issubdtype(found.dtype, np.integer):
        raise InvalidArgumentError(
            f"grad_indices wants integers, got {found.dtype}{list(found.shape)}. If a "
            "tree.map (of an Optax transformation, for example) has changed slices, wrap "
            "that transformation with jslices.from_optax(...)"
        )
    if found.dtype == np.uint64 and found.size and found.max() > np.iinfo(np.int64).max:
        raise InvalidArgumentError("grad_indices has numbers beyond int64")
    return found.astype(np.int64)


def _on_host(name: str, value: Any) -> np.ndarray:
    refuse_tracer(name, value)
    try:
        return np.asarray(value)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"{name} is not an array: {error}") from None


def check_sparse(
    indices: Any, values: Any, grad_shape: Any, shape: PartialShape, dtype: np.dtype
) -> None:
    """Refuses a gradient that does not fit, naming every misfit at once.

    Works on NumPy and on traced arrays alike; what the numbers in ``indices`` are is for
    :func:`check_rows`.
    """
    problems = []
    if indices.ndim != 1:
        given = ",".join(map(str, indices.shape))
        problems.append(f"Input indices should be vector but received shape: [{given}]")
    if values.ndim == 0:
        problems.append("Values cannot be 0-dimensional.")
    elif indices.ndim == 1 and values.shape[0] != indices.shape[0]:
        problems.append(
            f"Expected {indices.shape[0]} non-empty input values, got {values.shape[0]}"
        )
    if values.dtype != dtype:
        problems.append(_other_dtype("values", values.dtype, dtype))
    problems += _shape_problems("shape", grad_shape, shape, first=0)
    if values.ndim:
        problems += _shape_problems("values", values.shape, shape, first=1)
    if problems:
        raise InvalidArgumentError("; ".join(problems))


def check_dense(grad: Any, shape: PartialShape, dtype: np.dtype) -> None:
    """The same for a dense gradient."""
    problems = []
    if grad.dtype != dtype:
        problems.append(_other_dtype("grad", grad.dtype, dtype))
    if shape is not None and (
        grad.ndim != len(shape)
        or any(n is not None and n != m for n, m in zip(shape, grad.shape, strict=True))
    ):
        wanted = ",".join("?" if n is None else str(n) for n in shape)
        given = ",".join(map(str, grad.shape))
        problems.append(f"Shape mismatch: expected [{wanted}], got [{given}]")
    if problems:
        raise InvalidArgumentError("; ".join(problems))


def check_rows(indices: np.ndarray, shape: PartialShape) -> None:
    """Refuses a row number beyond the last row."""
    if shape is None or shape[0] is None:
        return
    beyond = np.flatnonzero(indices >= shape[0])
    if beyond.size:
        where = int(beyond[0])
        raise InvalidArgumentError(
            f"Shape mismatch: index of slice {where} exceeded limits of shape; index is "
            f"{indices[where]} exceeded {shape[0]}"
        )


def _other_dtype(name: str, given: Any, wanted: np.dtype) -> str:
    return (
        f"expected {name} of dtype {wanted}, got {given}; cast them: "
        f"{name}.astype('{wanted}')"
    )


def _shape_problems(
    name: str, given: Sequence[Any] | None, wanted: PartialShape, first: int
) -> list[str]:
    """Misfits along the axes from ``first`` on; axes beyond the wanted ones are free."""
    if given is None or wanted is None:
        return []
    if len(given) < len(wanted):
        rank = f"{len(wanted)}, got {len(given)}"
        return [f"Shape mismatch: expected {name} rank at least {rank}"]
    pairs = list(enumerate(zip(wanted, given, strict=False)))[first:]
    return [
        f"Shape mismatch: expected {name} dim {axis} to be {size}, got {found}"
        for axis, (size, found) in pairs
        if size is not None and found not in (None, -1, size)
    ]
