"""Dtypes by name, and arrays as bytes."""

import math
from typing import Any

import ml_dtypes
import numpy as np

#: What safetensors has a name for; everything else is stored as bytes.
CODES = {
    "bool": "BOOL",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
}
_ALIGNMENT = 64  # what XLA wants, to use an array without a copy


def dtype_named(name: str) -> np.dtype[Any]:
    """A dtype of NumPy or of ml_dtypes."""
    return np.dtype(getattr(ml_dtypes, name, name))


def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """An array that XLA can use as it is, without a copy."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def as_bytes(array: np.ndarray) -> memoryview:
    """The memory of a contiguous array."""
    flat: Any = array.reshape(-1).view(np.uint8)
    return memoryview(flat)
