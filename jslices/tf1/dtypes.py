"""The dtypes by TensorFlow's names: ``tf.float32`` equals ``numpy.dtype("float32")``."""

import builtins
import dataclasses

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jslices.tf1._arrays import kind_of


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class DType:
    """A dtype that NumPy and JAX accept, with the attributes of TensorFlow's.

    Attributes:
      dtype: that of NumPy, which it equals.

    Example:
      >>> import numpy as np, jslices.tf1 as tf
      >>> tf.float32 == np.dtype("float32"), tf.float32.as_numpy_dtype(1.5)
      (True, np.float32(1.5))

    Source: ``tf.DType``. Arrays have dtypes of NumPy, without these attributes.
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
    def name(self) -> str:
        """``"float32"``."""
        return self.dtype.name

    @property
    def size(self) -> int:
        """The bytes of one element."""
        return self.dtype.itemsize

    itemsize = size

    @property
    def kind(self) -> str:
        """The letter of NumPy for it."""
        return self.dtype.kind

    @property
    def is_integer(self) -> builtins.bool:
        """True for integers."""
        return kind_of(self.dtype) == 1

    @property
    def is_floating(self) -> builtins.bool:
        """True for real floats."""
        return kind_of(self.dtype) == 2

    def __eq__(self, other: object) -> builtins.bool:
        try:
            return self.dtype == np.dtype(other)  # type: ignore[call-overload,no-any-return]
        except TypeError:
            return NotImplemented

    def __hash__(self) -> int:
        return hash(self.dtype)

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"tf.{self.name}"


def as_dtype(type_value: DTypeLike) -> DType:
    """The :class:`DType` of a dtype or of its name.

    Example:
      >>> import jslices.tf1 as tf
      >>> tf.as_dtype("float32")
      tf.float32

    Source: ``tf.as_dtype``.
    """
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
