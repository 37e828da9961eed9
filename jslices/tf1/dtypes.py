"""The dtypes by TensorFlow's names: ``tf.float32`` equals ``numpy.dtype("float32")``."""

import builtins
import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jslices._names import public


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class DType:
    """A dtype that NumPy and JAX accept, with the attributes of TensorFlow's.

    ``dtype`` is that of NumPy, which it equals, and whose attributes it has too.

    Example:
      >>> import numpy as np, jslices.tf1 as tf
      >>> tf.float32 == np.dtype("float32"), tf.float32.as_numpy_dtype is np.float32
      (True, True)

    Arrays have dtypes of NumPy, without these attributes.
    """

    dtype: np.dtype

    @property
    def as_numpy_dtype(self) -> type[np.generic]:
        """The scalar type of NumPy."""
        return self.dtype.type

    @property
    def base_dtype(self) -> "DType":
        """The same: there are no references to variables with dtypes of their own."""
        return self

    @property
    def size(self) -> int:
        """The bytes of one element."""
        return self.dtype.itemsize

    def __getattr__(self, name: str) -> Any:
        if name in ("dtype", "shape") or name.startswith("_"):  # not yet made; no array
            raise AttributeError(name)
        return getattr(self.dtype, name)

    def __eq__(self, other: object) -> builtins.bool:
        try:  # for NumPy None is a dtype, too
            return other is not None and self.dtype == np.dtype(other)  # type: ignore[call-overload,no-any-return]
        except TypeError:
            return NotImplemented

    def __hash__(self) -> int:
        return hash(self.dtype)

    def __str__(self) -> str:
        return self.dtype.name

    def __repr__(self) -> str:
        return f"tf.{self.dtype}"


def as_dtype(type_value: DTypeLike) -> DType:
    """The :class:`jslices.tf1.DType` of a dtype or of its name, such as ``"float32"``."""
    return DType(np.dtype(type_value))


bfloat16 = as_dtype(jnp.bfloat16)
bool = as_dtype(np.bool_)
complex64 = as_dtype(np.complex64)
complex128 = as_dtype(np.complex128)
float16 = half = as_dtype(np.float16)
float32 = as_dtype(np.float32)
float64 = double = as_dtype(np.float64)
int8 = as_dtype(np.int8)
int16 = as_dtype(np.int16)
int32 = as_dtype(np.int32)
int64 = as_dtype(np.int64)
uint8 = as_dtype(np.uint8)
uint16 = as_dtype(np.uint16)
uint32 = as_dtype(np.uint32)
uint64 = as_dtype(np.uint64)

__all__, __dir__ = public(__name__)
