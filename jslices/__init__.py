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

import importlib as _importlib
import typing as _t

from jslices import errors as errors
from jslices import optim as optim
from jslices import tree as tree
from jslices._densify import DenseUseError as DenseUseError
from jslices._densify import DensificationWarning as DensificationWarning
from jslices._exchange.all_reduce import all_reduce_slices as all_reduce_slices
from jslices._exchange.plan import Exchange as Exchange
from jslices._exchange.spread import spread_ids as spread_ids
from jslices._grad.api import grad as grad
from jslices._grad.api import value_and_grad as value_and_grad
from jslices._grad.api import vjp as vjp
from jslices._grad.explain import explain as explain
from jslices._grad.ids import lookup_ids as lookup_ids
from jslices._grad.rules import register_rowwise as register_rowwise
from jslices._lookup.bags import embedding_lookup_sparse as embedding_lookup_sparse
from jslices._lookup.bags import (
    safe_embedding_lookup_sparse as safe_embedding_lookup_sparse,
)
from jslices._lookup.embedding import embedding_lookup as embedding_lookup
from jslices._lookup.sampled import (
    fixed_unigram_candidate_sampler as fixed_unigram_candidate_sampler,
)
from jslices._lookup.sampled import (
    log_uniform_candidate_sampler as log_uniform_candidate_sampler,
)
from jslices._lookup.sampled import nce_loss as nce_loss
from jslices._lookup.sampled import sampled_softmax_loss as sampled_softmax_loss
from jslices._names import no_such_name as _no_such_name
from jslices._place.boundary import row_major as row_major
from jslices._place.hints import PerformanceHint as PerformanceHint
from jslices._place.hints import keep_memory as keep_memory
from jslices._place.hints import keep_memory_if_set as _keep_memory_if_set
from jslices._place.placement import padded_rows as padded_rows
from jslices._rows.ids import IdOutOfRangeError as IdOutOfRangeError
from jslices._rows.ids import check_ids as check_ids
from jslices._scatter.elements import batch_scatter_update as batch_scatter_update
from jslices._scatter.elements import scatter_nd_add as scatter_nd_add
from jslices._scatter.elements import scatter_nd_sub as scatter_nd_sub
from jslices._scatter.elements import scatter_nd_update as scatter_nd_update
from jslices._scatter.rows import apply_slices as apply_slices
from jslices._scatter.rows import scatter_add as scatter_add
from jslices._scatter.rows import scatter_div as scatter_div
from jslices._scatter.rows import scatter_max as scatter_max
from jslices._scatter.rows import scatter_min as scatter_min
from jslices._scatter.rows import scatter_mul as scatter_mul
from jslices._scatter.rows import scatter_sub as scatter_sub
from jslices._scatter.rows import scatter_update as scatter_update
from jslices._select import from_dense as from_dense
from jslices._select import sparse_mask as sparse_mask
from jslices._slices import IndexedSlices as IndexedSlices
from jslices._slices import concat_slices as concat_slices
from jslices._slices import is_slices as is_slices
from jslices._slices.held import hold as hold
from jslices.errors import InvalidArgumentError as InvalidArgumentError
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
from jslices.optim.transforms.accumulate import sum_stacked as sum_stacked
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
from jslices.optim.transforms.train_step import eval_step as eval_step
from jslices.optim.transforms.train_step import train_step as train_step

if _t.TYPE_CHECKING:
    from jslices import accumulators as accumulators
    from jslices import checkpoint as checkpoint
    from jslices import testing as testing
    from jslices import tf1 as tf1
    from jslices._host_table.table import HostTable as HostTable
    from jslices.checkpoint import Saver as Saver

__version__ = "0.1.0"

_keep_memory_if_set()

#: Names that are loaded when first used, and their modules.
_LAZY = {
    "HostTable": "jslices._host_table.table",
    "Saver": "jslices.checkpoint",
    "accumulators": "jslices.accumulators",
    "checkpoint": "jslices.checkpoint",
    "testing": "jslices.testing",
    "tf1": "jslices.tf1",
}

__all__ = sorted({name for name in dir() if not name.startswith("_")} | {*_LAZY})
__dir__ = __all__.copy


def __getattr__(name: str) -> _t.Any:
    if name not in _LAZY:
        _no_such_name(__name__, name)
    module = _importlib.import_module(_LAZY[name])
    value = globals()[name] = getattr(module, name, module)
    return value
