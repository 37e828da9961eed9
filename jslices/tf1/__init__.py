"""TensorFlow 1's API by TensorFlow's own names: ``import jslices.tf1 as tf``.

Variables, scopes and initializers work inside a function given to :func:`transform`,
which turns it into pure functions: ``init``, ``apply`` and a pytree of
:class:`Variables`; elsewhere they raise a RuntimeError. Everything else works on arrays as
well. ``name=`` shows in profiles; ``use_locking`` and ``validate_indices`` change nothing.
A ``dtype`` of None means that of the value, for Python's numbers float32 and int32.
Functions that jslices has too have its shapes, errors and costs. The source of each name is
TensorFlow 1's of that name.

What differs from TensorFlow on purpose, apart from what each docstring says:

* The order of the program decides what a read sees, which TensorFlow leaves undefined.
* Operations have no names, so they take none from variables and scopes; profiles show those
  of scopes instead. ``v.op`` exists for ``v.op.name``.
* Results computed from variables are JAX arrays, with NumPy's dtypes. Their operators take
  no lists: write ``v + tf.constant([1, 2])``. ``tf.float32`` and ``v.dtype`` have
  TensorFlow's attributes.
* A result of ``variable_scope`` or ``name_scope`` can be entered once; open another one,
  with the scope that it yielded.
* The order of ``get_variable`` ends ``initializer, trainable, collections, regularizer``,
  that of ``conv2d`` ``padding, data_format, name``; use keywords.
* There is no global generator: initial values are drawn with the key given to ``init``.
* Row numbers out of range are dropped by scatters and read NaN in lookups; TensorFlow
  raises on a CPU.
* Norms and clipping add duplicate rows of IndexedSlices first, as for a dense gradient.
* ``get_variable`` of a shared variable may pass a constant of its own dtype; TensorFlow
  compares with float32.
* ``bool(variable)`` and a name of None are errors; there are no custom getters, no
  partitioners, no constraints and no caching devices: those keywords take None.
* A missing name raises an AttributeError that says what to type instead.
"""

from typing import NoReturn as _NoReturn

from jslices import DensificationWarning as DensificationWarning
from jslices import IndexedSlices as IndexedSlices
from jslices import accumulators as _accumulators
from jslices import errors as errors
from jslices.tf1 import _collections, _ops
from jslices.tf1 import dtypes as dtypes
from jslices.tf1 import initializers as initializers
from jslices.tf1 import nn as nn
from jslices.tf1 import random as random
from jslices.tf1 import sparse as sparse
from jslices.tf1 import train as train
from jslices.tf1._initial_values import constant as constant
from jslices.tf1._initial_values import ones as ones
from jslices.tf1._initial_values import random_normal as random_normal
from jslices.tf1._initial_values import random_uniform as random_uniform
from jslices.tf1._initial_values import set_random_seed as set_random_seed
from jslices.tf1._initial_values import truncated_normal as truncated_normal
from jslices.tf1._initial_values import zeros as zeros
from jslices.tf1._initial_values import zeros_like as zeros_like
from jslices.tf1._instead import missing as _missing
from jslices.tf1._ops import assign as assign
from jslices.tf1._ops import assign_add as assign_add
from jslices.tf1._ops import assign_sub as assign_sub
from jslices.tf1._ops import batch_scatter_update as batch_scatter_update
from jslices.tf1._ops import clip_by_average_norm as clip_by_average_norm
from jslices.tf1._ops import clip_by_global_norm as clip_by_global_norm
from jslices.tf1._ops import clip_by_norm as clip_by_norm
from jslices.tf1._ops import clip_by_value as clip_by_value
from jslices.tf1._ops import convert_to_tensor as convert_to_tensor
from jslices.tf1._ops import count_up_to as count_up_to
from jslices.tf1._ops import gather as gather
from jslices.tf1._ops import global_norm as global_norm
from jslices.tf1._ops import matmul as matmul
from jslices.tf1._ops import scatter_add as scatter_add
from jslices.tf1._ops import scatter_div as scatter_div
from jslices.tf1._ops import scatter_max as scatter_max
from jslices.tf1._ops import scatter_min as scatter_min
from jslices.tf1._ops import scatter_mul as scatter_mul
from jslices.tf1._ops import scatter_nd_add as scatter_nd_add
from jslices.tf1._ops import scatter_nd_sub as scatter_nd_sub
from jslices.tf1._ops import scatter_nd_update as scatter_nd_update
from jslices.tf1._ops import scatter_sub as scatter_sub
from jslices.tf1._ops import scatter_update as scatter_update
from jslices.tf1._ops import shape as shape
from jslices.tf1._ops import sigmoid as sigmoid
from jslices.tf1._ops import sparse_mask as sparse_mask
from jslices.tf1._scopes import AUTO_REUSE as AUTO_REUSE
from jslices.tf1._scopes import VariableScope as VariableScope
from jslices.tf1._scopes import get_variable as get_variable
from jslices.tf1._scopes import get_variable_scope as get_variable_scope
from jslices.tf1._scopes import name_scope as name_scope
from jslices.tf1._scopes import variable_scope as variable_scope
from jslices.tf1._state import VariableInfo as VariableInfo
from jslices.tf1._state import Variables as Variables
from jslices.tf1._transform import Transformed as Transformed
from jslices.tf1._transform import transform as transform
from jslices.tf1._variable import Variable as Variable
from jslices.tf1.dtypes import DType as DType
from jslices.tf1.dtypes import as_dtype as as_dtype
from jslices.tf1.dtypes import bfloat16 as bfloat16
from jslices.tf1.dtypes import bool as bool
from jslices.tf1.dtypes import complex64 as complex64
from jslices.tf1.dtypes import complex128 as complex128
from jslices.tf1.dtypes import double as double
from jslices.tf1.dtypes import float16 as float16
from jslices.tf1.dtypes import float32 as float32
from jslices.tf1.dtypes import float64 as float64
from jslices.tf1.dtypes import half as half
from jslices.tf1.dtypes import int8 as int8
from jslices.tf1.dtypes import int16 as int16
from jslices.tf1.dtypes import int32 as int32
from jslices.tf1.dtypes import int64 as int64
from jslices.tf1.dtypes import uint8 as uint8
from jslices.tf1.dtypes import uint16 as uint16
from jslices.tf1.dtypes import uint32 as uint32
from jslices.tf1.dtypes import uint64 as uint64
from jslices.tf1.sparse import SparseTensor as SparseTensor

# Long names, from the modules that define them.
ConditionalAccumulator = _accumulators.ConditionalAccumulator
ConditionalAccumulatorBase = _accumulators.ConditionalAccumulatorBase
SparseConditionalAccumulator = _accumulators.SparseConditionalAccumulator
convert_to_tensor_or_indexed_slices = _ops.convert_to_tensor_or_indexed_slices
GraphKeys = _collections.GraphKeys
all_variables = _collections.all_variables
assert_variables_initialized = _collections.assert_variables_initialized
get_collection = _collections.get_collection
global_variables = _collections.global_variables
global_variables_initializer = _collections.global_variables_initializer
initialize_all_variables = _collections.initialize_all_variables
initialize_variables = _collections.initialize_variables
report_uninitialized_variables = _collections.report_uninitialized_variables
trainable_variables = _collections.trainable_variables
variables_initializer = _collections.variables_initializer
constant_initializer = initializers.constant_initializer
glorot_normal_initializer = initializers.glorot_normal_initializer
glorot_uniform_initializer = initializers.glorot_uniform_initializer
ones_initializer = initializers.ones_initializer
orthogonal_initializer = initializers.orthogonal_initializer
random_normal_initializer = initializers.random_normal_initializer
random_uniform_initializer = initializers.random_uniform_initializer
truncated_normal_initializer = initializers.truncated_normal_initializer
uniform_unit_scaling_initializer = initializers.uniform_unit_scaling_initializer
variance_scaling_initializer = initializers.variance_scaling_initializer
zeros_initializer = initializers.zeros_initializer

__all__ = [name for name in dir() if not name.startswith("_")]
__dir__ = __all__.copy


def __getattr__(name: str) -> _NoReturn:
    raise _missing(__name__, name)
