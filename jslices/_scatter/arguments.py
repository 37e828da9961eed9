"""What is given to a scatter, checked all at once."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jslices._slices import is_slices

#: What bool, and complex numbers, have no arithmetic for.
_ORDERED = ("min", "max")


def as_ref(ref: Any, who: str) -> jax.Array:
    """``ref`` as an array that has rows."""
    if is_slices(ref):
        raise TypeError(f"{who} wants an array to change, got {ref}; use ref.to_dense()")
    _refuse_no_numbers(ref, who, "an array to change")
    array = jnp.asarray(ref)
    if array.ndim < 1:
        raise ValueError(f"{who} wants ref [V, *D], got a scalar")
    return array


def as_updates(
    updates: Any,
    ref: jax.Array,
    wanted: tuple[int, ...],
    who: str,
    name: str = "updates",
) -> Any:
    """``updates`` as an array of the dtype of ``ref`` and the shape wanted.

    Numbers and lists take the dtype of ``ref``, if it can hold their kind; arrays are
    never cast. A scalar goes to every row. ``name`` is what messages call them.

    Raises:
      TypeError, ValueError: naming everything that is wrong.
    """
    if is_slices(updates):
        raise TypeError(
            f"{who} wants {name} as an array, got {updates}; their rows are written with "
            "apply_slices(ref, slices, op)"
        )
    _refuse_no_numbers(updates, who, f"{name} as an array or a number")
    array, problems = _in_dtype(updates, ref.dtype, name)
    if array.shape != wanted and array.shape != ():
        problems.append(
            f"{name}.shape must be indices.shape + the row shape = {wanted}, or () for "
            f"a scalar, not {array.shape}"
        )
    if problems:
        error = TypeError if "dtype" in problems[0] else ValueError
        raise error(
            f"{who} got {name} {array.dtype}{list(array.shape)} for ref "
            f"{ref.dtype}{list(ref.shape)}: " + "; ".join(problems)
        )
    return jnp.broadcast_to(array, wanted)


def check_dtype(ref: jax.Array, op: str, who: str) -> None:
    """Refuses arithmetic that the dtype of ``ref`` does not have."""
    dtype = ref.dtype
    if dtype == jnp.bool_ and op != "update":
        raise TypeError(f"{who} cannot calculate with bool; cast ref: ref.astype('int32')")
    if jnp.issubdtype(dtype, jnp.complexfloating) and op in _ORDERED:
        raise TypeError(
            f"{who} got ref of dtype {dtype}, and complex numbers have no order"
        )


def _in_dtype(updates: Any, dtype: np.dtype, name: str) -> tuple[Any, list[str]]:
    array = jnp.asarray(updates)
    literal = not hasattr(updates, "dtype") or getattr(updates, "weak_type", False)
    if array.dtype == dtype:
        return array, []
    if literal and _kind(array.dtype) <= _kind(dtype):
        try:
            return jnp.asarray(updates, dtype), []
        except OverflowError:  # of Python's integers, which know no dtype
            return array, [f"{name} must fit into the dtype of ref, {dtype}"]
    return array, [
        f"both must have one dtype, as nothing is cast: {name}.astype('{dtype}')"
    ]


def _refuse_no_numbers(x: Any, who: str, wanted: str) -> None:
    if x is None or isinstance(x, str | bytes):
        raise TypeError(f"{who} wants {wanted}, got {x!r}")


def _kind(dtype: np.dtype) -> int:
    kinds = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)
    return next(i for i, kind in enumerate(kinds) if jnp.issubdtype(dtype, kind))
