"""TensorFlow 1's API by TensorFlow's own names: ``import jslices.tf1 as tf``.

Variables, scopes and initializers work inside of a function given to :func:`transform`,
which turns it into pure functions: ``init``, ``apply`` and a pytree of
:class:`Variables`. Everything else works on arrays as well.

What differs from TensorFlow, on purpose:

* The order of the program decides what a read sees, not a session.
* Operations have no names, so they take none away from variables and scopes; scopes show
  theirs in profiles instead. ``v.op`` is there for ``v.op.name``.
* What is computed from variables are JAX arrays: operators take no lists, but
  ``v + tf.constant([1, 2])``.
* A variable keeps its shape: ``assign(..., validate_shape=False)`` cannot give it another.
* What ``variable_scope`` or ``name_scope`` returned is entered once; open another one, with
  the scope that it gave.
* Initializers take a PRNG key; a value depends on the key and the variable's name.
* A float variable without an initializer gets ``glorot_uniform_initializer``, as from
  TensorFlow 1.0 on (before, it was ``uniform_unit_scaling_initializer``).
* Sampled losses take ``key=`` or ``seed=``; there is no global generator.
* ``Saver`` is given variables, not a session, and ``restore`` returns them; it has no
  ``builder``, ``defer_build``, ``write_version`` and ``filename``.
* ``update_checkpoint_state`` refuses a checkpoint that would be the state file, however the
  two paths are written.
* Row numbers out of range are dropped by scatters and read NaN in lookups; TensorFlow
  raises on a CPU.
* Norms and clipping add duplicate rows of IndexedSlices first, as for a dense gradient.
* Regularizers are called by ``get_collection``, when you ask for their losses.
* ``count_up_to`` raises at the limit where it can; under ``jit`` it returns the limit.
* A shared variable may be asked for by a constant of its own dtype; TensorFlow compares
  with float32.
* ``bool(variable)`` and a name of None are errors; there are no custom getters, no
  partitioners and no caching devices.
"""

from jslices import DensificationWarning, IndexedSlices
from jslices.accumulators import ConditionalAccumulator, SparseConditionalAccumulator
from jslices.tf1 import dtypes, errors, initializers, nn, random, sparse, train
from jslices.tf1._collections import (
    GraphKeys,
    all_variables,
    assert_variables_initialized,
    get_collection,
    global_variables,
    global_variables_initializer,
    initialize_all_variables,
    initialize_variables,
    report_uninitialized_variables,
    trainable_variables,
    variables_initializer,
)
from jslices.tf1._initial_values import (
    constant,
    ones,
    random_normal,
    random_uniform,
    truncated_normal,
    zeros,
)
from jslices.tf1._initializers import (
    constant_initializer,
    glorot_normal_initializer,
    glorot_uniform_initializer,
    ones_initializer,
    orthogonal_initializer,
    random_normal_initializer,
    random_uniform_initializer,
    truncated_normal_initializer,
    uniform_unit_scaling_initializer,
    variance_scaling_initializer,
    zeros_initializer,
)
from jslices.tf1._ops import (
    assign,
    assign_add,
    assign_sub,
    batch_scatter_update,
    clip_by_average_norm,
    clip_by_global_norm,
    clip_by_norm,
    clip_by_value,
    convert_to_tensor,
    convert_to_tensor_or_indexed_slices,
    count_up_to,
    gather,
    global_norm,
    scatter_add,
    scatter_div,
    scatter_max,
    scatter_min,
    scatter_mul,
    scatter_nd_add,
    scatter_nd_sub,
    scatter_nd_update,
    scatter_sub,
    scatter_update,
    shape,
    sparse_mask,
)
from jslices.tf1._scopes import (
    AUTO_REUSE,
    VariableScope,
    get_variable,
    get_variable_scope,
    name_scope,
    variable_scope,
)
from jslices.tf1._state import VariableInfo, Variables
from jslices.tf1._transform import Transformed, transform
from jslices.tf1._variable import Variable
from jslices.tf1.dtypes import (
    bfloat16,
    bool,
    complex64,
    complex128,
    double,
    float16,
    float32,
    float64,
    half,
    int8,
    int16,
    int32,
    int64,
    uint8,
    uint16,
    uint32,
    uint64,
)
from jslices.tf1.sparse import SparseTensor

__all__ = [
    "AUTO_REUSE",
    "ConditionalAccumulator",
    "DensificationWarning",
    "GraphKeys",
    "IndexedSlices",
    "SparseConditionalAccumulator",
    "SparseTensor",
    "Transformed",
    "Variable",
    "VariableInfo",
    "VariableScope",
    "Variables",
    "all_variables",
    "assert_variables_initialized",
    "assign",
    "assign_add",
    "assign_sub",
    "batch_scatter_update",
    "bfloat16",
    "bool",
    "clip_by_average_norm",
    "clip_by_global_norm",
    "clip_by_norm",
    "clip_by_value",
    "complex64",
    "complex128",
    "constant",
    "constant_initializer",
    "convert_to_tensor",
    "convert_to_tensor_or_indexed_slices",
    "count_up_to",
    "double",
    "dtypes",
    "errors",
    "float16",
    "float32",
    "float64",
    "gather",
    "get_collection",
    "get_variable",
    "get_variable_scope",
    "global_norm",
    "global_variables",
    "global_variables_initializer",
    "glorot_normal_initializer",
    "glorot_uniform_initializer",
    "half",
    "initialize_all_variables",
    "initialize_variables",
    "initializers",
    "int8",
    "int16",
    "int32",
    "int64",
    "name_scope",
    "nn",
    "ones",
    "ones_initializer",
    "orthogonal_initializer",
    "random",
    "random_normal",
    "random_normal_initializer",
    "random_uniform",
    "random_uniform_initializer",
    "report_uninitialized_variables",
    "scatter_add",
    "scatter_div",
    "scatter_max",
    "scatter_min",
    "scatter_mul",
    "scatter_nd_add",
    "scatter_nd_sub",
    "scatter_nd_update",
    "scatter_sub",
    "scatter_update",
    "shape",
    "sparse",
    "sparse_mask",
    "train",
    "trainable_variables",
    "transform",
    "truncated_normal",
    "truncated_normal_initializer",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "uniform_unit_scaling_initializer",
    "variable_scope",
    "variables_initializer",
    "variance_scaling_initializer",
    "zeros",
    "zeros_initializer",
]
