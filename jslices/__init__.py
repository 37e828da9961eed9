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
from jslices import optim as optim
from jslices._all_reduce import all_reduce_slices as all_reduce_slices
from jslices._densify import DenseUseError as DenseUseError
from jslices._densify import DensificationWarning as DensificationWarning
from jslices._errors import InvalidArgumentError as InvalidArgumentError
from jslices._grad.api import grad as grad
from jslices._grad.api import value_and_grad as value_and_grad
from jslices._grad.api import vjp as vjp
from jslices._grad.explain import explain as explain
from jslices._lookup import embedding_lookup as embedding_lookup
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
from jslices.optim.accumulate import accumulate_gradients as accumulate_gradients
from jslices.optim.accumulate import reduce_stacked as reduce_stacked
from jslices.optim.clip_value import clip_by_value as clip_by_value
from jslices.optim.clipping import clip_by_average_norm as clip_by_average_norm
from jslices.optim.clipping import clip_by_global_norm as clip_by_global_norm
from jslices.optim.clipping import clip_by_norm as clip_by_norm
from jslices.optim.clipping import clip_rows_by_norm as clip_rows_by_norm
from jslices.optim.finite import all_finite as all_finite
from jslices.optim.mask import mask_rows as mask_rows
from jslices.optim.norms import global_norm as global_norm
from jslices.optim.per_example import (
    per_example_global_norm_clip as per_example_global_norm_clip,
)
from jslices.optim.per_example import per_example_norms as per_example_norms
from jslices.optim.project import project_rows as project_rows

__version__ = "0.1.0"
