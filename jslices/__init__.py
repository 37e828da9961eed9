"""Row gradients for JAX.

The gradient of a table lookup is the rows that were looked up, not an array as large as
the table. Change ``jax.value_and_grad`` to ``jslices.value_and_grad`` and the gradients
of arrays that are only looked up come back as :class:`IndexedSlices`; the optimizers here
then touch only those rows, in place, under ``jit``.

The shape legend of the whole package: ``V`` rows of a table, ``*D`` the shape of a row
(and D its number of elements), ``K`` looked-up rows (duplicates counted), ``U`` the
static capacity for unique rows, ``B`` the batch. *ids* are what one passes to a lookup,
*indices* what slices hold.
"""

from jslices import accumulators as accumulators
from jslices import checkpoint as checkpoint
from jslices import initializers as initializers
from jslices import optim as optim
from jslices import testing as testing
from jslices import tf1 as tf1
from jslices import tree as tree
from jslices._densify import DenseUseError as DenseUseError
from jslices._densify import DensificationWarning as DensificationWarning
from jslices._devices.all_reduce import all_reduce_slices as all_reduce_slices
from jslices._devices.memory import keep_memory as keep_memory
from jslices._errors import FailedPreconditionError as FailedPreconditionError
from jslices._errors import InvalidArgumentError as InvalidArgumentError
from jslices._errors import OutOfRangeError as OutOfRangeError
from jslices._grad.api import grad as grad
from jslices._grad.api import value_and_grad as value_and_grad
from jslices._grad.api import vjp as vjp
from jslices._grad.explain import explain as explain
from jslices._lookup import embedding_lookup as embedding_lookup
from jslices._lookup import embedding_lookup_sparse as embedding_lookup_sparse
from jslices._lookup import log_uniform_candidate_sampler as log_uniform_candidate_sampler
from jslices._lookup import nce_loss as nce_loss
from jslices._lookup import safe_embedding_lookup_sparse as safe_embedding_lookup_sparse
from jslices._lookup import sampled_softmax_loss as sampled_softmax_loss
from jslices._rows.ids import check_ids as check_ids
from jslices._scatter import apply_slices as apply_slices
from jslices._scatter import batch_scatter_update as batch_scatter_update
from jslices._scatter import scatter_add as scatter_add
from jslices._scatter import scatter_div as scatter_div
from jslices._scatter import scatter_max as scatter_max
from jslices._scatter import scatter_min as scatter_min
from jslices._scatter import scatter_mul as scatter_mul
from jslices._scatter import scatter_nd_add as scatter_nd_add
from jslices._scatter import scatter_nd_sub as scatter_nd_sub
from jslices._scatter import scatter_nd_update as scatter_nd_update
from jslices._scatter import scatter_sub as scatter_sub
from jslices._scatter import scatter_update as scatter_update
from jslices._select import from_dense as from_dense
from jslices._select import sparse_mask as sparse_mask
from jslices._slices import IndexedSlices as IndexedSlices
from jslices._slices import concat_slices as concat_slices
from jslices._slices import is_slices as is_slices
from jslices.accumulators import ConditionalAccumulator as ConditionalAccumulator
from jslices.accumulators import (
    SparseConditionalAccumulator as SparseConditionalAccumulator,
)
from jslices.accumulators import sparse_accumulator as sparse_accumulator
from jslices.checkpoint import Saver as Saver
from jslices.checkpoint import get_checkpoint_state as get_checkpoint_state
from jslices.checkpoint import latest_checkpoint as latest_checkpoint
from jslices.checkpoint import update_checkpoint_state as update_checkpoint_state
from jslices.optim import GradientTransformation as GradientTransformation
from jslices.optim import adadelta as adadelta
from jslices.optim import adafactor as adafactor
from jslices.optim import adagrad as adagrad
from jslices.optim import adam as adam
from jslices.optim import adamw as adamw
from jslices.optim import amsgrad as amsgrad
from jslices.optim import apply_updates as apply_updates
from jslices.optim import from_optax as from_optax
from jslices.optim import ftrl as ftrl
from jslices.optim import lamb as lamb
from jslices.optim import lion as lion
from jslices.optim import partial_rowwise_adam as partial_rowwise_adam
from jslices.optim import proximal_adagrad as proximal_adagrad
from jslices.optim import rmsprop as rmsprop
from jslices.optim import rowwise_adagrad as rowwise_adagrad
from jslices.optim import sgd as sgd
from jslices.optim.transforms.accumulate import accumulate_gradients as accumulate_gradients
from jslices.optim.transforms.accumulate import reduce_stacked as reduce_stacked
from jslices.optim.transforms.clip import clip_by_average_norm as clip_by_average_norm
from jslices.optim.transforms.clip import clip_by_global_norm as clip_by_global_norm
from jslices.optim.transforms.clip import clip_by_norm as clip_by_norm
from jslices.optim.transforms.clip import clip_by_value as clip_by_value
from jslices.optim.transforms.clip import clip_rows_by_norm as clip_rows_by_norm
from jslices.optim.transforms.norms import all_finite as all_finite
from jslices.optim.transforms.norms import global_norm as global_norm
from jslices.optim.transforms.per_example import (
    per_example_global_norm_clip as per_example_global_norm_clip,
)
from jslices.optim.transforms.per_example import per_example_norms as per_example_norms
from jslices.optim.transforms.rows import mask_rows as mask_rows
from jslices.optim.transforms.rows import project_rows as project_rows
from jslices.tf1 import AUTO_REUSE as AUTO_REUSE
from jslices.tf1 import Variable as Variable
from jslices.tf1 import Variables as Variables
from jslices.tf1 import all_variables as all_variables
from jslices.tf1 import assert_variables_initialized as assert_variables_initialized
from jslices.tf1 import constant as constant
from jslices.tf1 import constant_initializer as constant_initializer
from jslices.tf1 import get_collection as get_collection
from jslices.tf1 import get_variable as get_variable
from jslices.tf1 import get_variable_scope as get_variable_scope
from jslices.tf1 import glorot_normal_initializer as glorot_normal_initializer
from jslices.tf1 import glorot_uniform_initializer as glorot_uniform_initializer
from jslices.tf1 import initialize_all_variables as initialize_all_variables
from jslices.tf1 import initialize_variables as initialize_variables
from jslices.tf1 import name_scope as name_scope
from jslices.tf1 import nn as nn
from jslices.tf1 import ones as ones
from jslices.tf1 import ones_initializer as ones_initializer
from jslices.tf1 import orthogonal_initializer as orthogonal_initializer
from jslices.tf1 import random_normal as random_normal
from jslices.tf1 import random_normal_initializer as random_normal_initializer
from jslices.tf1 import random_uniform as random_uniform
from jslices.tf1 import random_uniform_initializer as random_uniform_initializer
from jslices.tf1 import (
    report_uninitialized_variables as report_uninitialized_variables,
)
from jslices.tf1 import trainable_variables as trainable_variables
from jslices.tf1 import transform as transform
from jslices.tf1 import truncated_normal as truncated_normal
from jslices.tf1 import truncated_normal_initializer as truncated_normal_initializer
from jslices.tf1 import (
    uniform_unit_scaling_initializer as uniform_unit_scaling_initializer,
)
from jslices.tf1 import variable_scope as variable_scope
from jslices.tf1 import variance_scaling_initializer as variance_scaling_initializer
from jslices.tf1 import zeros as zeros
from jslices.tf1 import zeros_initializer as zeros_initializer

variables = tf1

__version__ = "0.1.0"
