"""TensorFlow 1's API by TensorFlow's own names: ``import jslices.tf1 as tf``.

Variables, scopes and initializers work inside a function given to :func:`transform`,
which turns it into pure functions: ``init``, ``apply`` and a pytree of
:class:`Variables`; elsewhere they raise a RuntimeError. Everything else works on arrays as
well. ``name=`` shows in profiles; ``use_locking`` and ``validate_indices`` change nothing.

What differs from TensorFlow, on purpose:

* The order of the program decides what a read sees, not a session.
* Operations have no names, so they take none from variables and scopes; profiles show those
  of scopes instead. ``v.op`` exists for ``v.op.name``.
* Results computed from variables are JAX arrays, whose operators take no lists: write
  ``v + tf.constant([1, 2])``.
* A variable keeps its shape: ``assign(..., validate_shape=False)`` cannot give it another.
* A result of ``variable_scope`` or ``name_scope`` can be entered once; open another one,
  with the scope that it yielded.
* A value depends on the key given to ``init`` and on the variable's name; initializers
  take a key, as in JAX, or only TensorFlow's ``init(shape, dtype)``.
* ``initialize_variables`` and the like do nothing in a function: there is no session to run
  them.
* A float variable without an initializer gets ``glorot_uniform_initializer``, as from
  TensorFlow 1.0 on.
* Sampled losses take ``key=`` or ``seed=``; there is no global generator.
* ``train.Saver`` takes variables where TensorFlow takes a session, and ``restore`` returns
  them. A dict of arrays is not a ``var_list``: arrays do not know their variables.
* The order of ``get_variable`` ends ``initializer, trainable, collections, regularizer``,
  that of ``conv2d`` ``padding, data_format, name``; use keywords.
* Arrays have NumPy's dtypes; ``tf.float32`` and ``v.dtype`` have TensorFlow's attributes.
* ``update_checkpoint_state`` refuses a checkpoint that would be the state file, however the
  two paths are written.
* Row numbers out of range are dropped by scatters and read NaN in lookups; TensorFlow
  raises on a CPU.
* Norms and clipping add duplicate rows of IndexedSlices first, as for a dense gradient.
* Regularizers are called by ``get_collection``, when you ask for their losses.
* ``count_up_to`` raises at the limit where it can; under ``jit`` it returns the limit.
* ``get_variable`` of a shared variable may pass a constant of its own dtype; TensorFlow
  compares with float32.
* ``bool(variable)`` and a name of None are errors; there are no custom getters, no
  partitioners, no constraints and no caching devices: those keywords take None.
* A missing name raises an AttributeError that says what to type instead.
"""

from typing import NoReturn as _NoReturn

from jslices import DensificationWarning as DensificationWarning
from jslices import IndexedSlices as IndexedSlices
from jslices.accumulators import ConditionalAccumulator as ConditionalAccumulator
from jslices.accumulators import (
    ConditionalAccumulatorBase as ConditionalAccumulatorBase,
)
from jslices.accumulators import (
    SparseConditionalAccumulator as SparseConditionalAccumulator,
)
from jslices.tf1 import dtypes as dtypes
from jslices.tf1 import errors as errors
from jslices.tf1 import initializers as initializers
from jslices.tf1 import nn as nn
from jslices.tf1 import random as random
from jslices.tf1 import sparse as sparse
from jslices.tf1 import train as train
from jslices.tf1._collections import GraphKeys as GraphKeys
from jslices.tf1._collections import all_variables as all_variables
from jslices.tf1._collections import (
    assert_variables_initialized as assert_variables_initialized,
)
from jslices.tf1._collections import get_collection as get_collection
from jslices.tf1._collections import global_variables as global_variables
from jslices.tf1._collections import (
    global_variables_initializer as global_variables_initializer,
)
from jslices.tf1._collections import initialize_all_variables as initialize_all_variables
from jslices.tf1._collections import initialize_variables as initialize_variables
from jslices.tf1._collections import (
    report_uninitialized_variables as report_uninitialized_variables,
)
from jslices.tf1._collections import trainable_variables as trainable_variables
from jslices.tf1._collections import variables_initializer as variables_initializer
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
from jslices.tf1._ops import (
    convert_to_tensor_or_indexed_slices as convert_to_tensor_or_indexed_slices,
)
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
from jslices.tf1.initializers import constant_initializer as constant_initializer
from jslices.tf1.initializers import glorot_normal_initializer as glorot_normal_initializer
from jslices.tf1.initializers import (
    glorot_uniform_initializer as glorot_uniform_initializer,
)
from jslices.tf1.initializers import ones_initializer as ones_initializer
from jslices.tf1.initializers import orthogonal_initializer as orthogonal_initializer
from jslices.tf1.initializers import random_normal_initializer as random_normal_initializer
from jslices.tf1.initializers import (
    random_uniform_initializer as random_uniform_initializer,
)
from jslices.tf1.initializers import (
    truncated_normal_initializer as truncated_normal_initializer,
)
from jslices.tf1.initializers import (
    uniform_unit_scaling_initializer as uniform_unit_scaling_initializer,
)
from jslices.tf1.initializers import (
    variance_scaling_initializer as variance_scaling_initializer,
)
from jslices.tf1.initializers import zeros_initializer as zeros_initializer
from jslices.tf1.sparse import SparseTensor as SparseTensor

__all__ = [name for name in dir() if not name.startswith("_")]


def __getattr__(name: str) -> _NoReturn:
    raise _missing(__name__, name)
