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

from jslices import optim, tree
from jslices._densify import DenseUseError, DensificationWarning
from jslices._errors import (
    CancelledError,
    DataLossError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    OutOfRangeError,
    UnavailableError,
)
from jslices._exchange.all_reduce import all_reduce_slices
from jslices._exchange.plan import Exchange
from jslices._exchange.spread import spread_ids
from jslices._grad.api import grad, value_and_grad, vjp
from jslices._grad.explain import explain
from jslices._grad.ids import lookup_ids
from jslices._grad.rules import register_rowwise
from jslices._lookup.bags import embedding_lookup_sparse, safe_embedding_lookup_sparse
from jslices._lookup.embedding import embedding_lookup
from jslices._lookup.sampled import (
    log_uniform_candidate_sampler,
    nce_loss,
    sampled_softmax_loss,
)
from jslices._names import no_such_name as _no_such_name
from jslices._place.boundary import row_major
from jslices._place.hints import keep_memory
from jslices._place.hints import keep_memory_if_set as _keep_memory_if_set
from jslices._place.placement import padded_rows
from jslices._rows.ids import IdOutOfRangeError, check_ids
from jslices._scatter.elements import (
    batch_scatter_update,
    scatter_nd_add,
    scatter_nd_sub,
    scatter_nd_update,
)
from jslices._scatter.rows import (
    apply_slices,
    scatter_add,
    scatter_div,
    scatter_max,
    scatter_min,
    scatter_mul,
    scatter_sub,
    scatter_update,
)
from jslices._select import from_dense, sparse_mask
from jslices._slices import IndexedSlices, concat_slices, is_slices
from jslices.optim import (
    GradientTransformation,
    adadelta,
    adafactor,
    adagrad,
    adam,
    adamw,
    amsgrad,
    apply_updates,
    from_optax,
    ftrl,
    lamb,
    lion,
    partial_rowwise_adam,
    proximal_adagrad,
    rmsprop,
    rowwise_adagrad,
    sgd,
)
from jslices.optim.transforms.accumulate import accumulate_gradients, reduce_stacked
from jslices.optim.transforms.clip import (
    clip_by_average_norm,
    clip_by_global_norm,
    clip_by_norm,
    clip_by_value,
    clip_rows_by_norm,
)
from jslices.optim.transforms.norms import all_finite, global_norm
from jslices.optim.transforms.per_example import (
    per_example_global_norm_clip,
    per_example_norms,
)
from jslices.optim.transforms.rows import mask_rows, project_rows
from jslices.optim.transforms.train_step import train_step

if _t.TYPE_CHECKING:
    from jslices import accumulators, checkpoint, testing, tf1
    from jslices._host_table.table import HostTable
    from jslices.checkpoint import Saver

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

__all__ = [
    "CancelledError",
    "DataLossError",
    "DeadlineExceededError",
    "DenseUseError",
    "DensificationWarning",
    "Exchange",
    "FailedPreconditionError",
    "GradientTransformation",
    "HostTable",
    "IdOutOfRangeError",
    "IndexedSlices",
    "InvalidArgumentError",
    "NotFoundError",
    "OutOfRangeError",
    "Saver",
    "UnavailableError",
    "accumulate_gradients",
    "accumulators",
    "adadelta",
    "adafactor",
    "adagrad",
    "adam",
    "adamw",
    "all_finite",
    "all_reduce_slices",
    "amsgrad",
    "apply_slices",
    "apply_updates",
    "batch_scatter_update",
    "check_ids",
    "checkpoint",
    "clip_by_average_norm",
    "clip_by_global_norm",
    "clip_by_norm",
    "clip_by_value",
    "clip_rows_by_norm",
    "concat_slices",
    "embedding_lookup",
    "embedding_lookup_sparse",
    "explain",
    "from_dense",
    "from_optax",
    "ftrl",
    "global_norm",
    "grad",
    "is_slices",
    "keep_memory",
    "lamb",
    "lion",
    "log_uniform_candidate_sampler",
    "lookup_ids",
    "mask_rows",
    "nce_loss",
    "optim",
    "padded_rows",
    "partial_rowwise_adam",
    "per_example_global_norm_clip",
    "per_example_norms",
    "project_rows",
    "proximal_adagrad",
    "reduce_stacked",
    "register_rowwise",
    "rmsprop",
    "row_major",
    "rowwise_adagrad",
    "safe_embedding_lookup_sparse",
    "sampled_softmax_loss",
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
    "sgd",
    "sparse_mask",
    "spread_ids",
    "testing",
    "tf1",
    "train_step",
    "tree",
    "value_and_grad",
    "vjp",
]


def __getattr__(name: str) -> _t.Any:
    if name not in _LAZY:
        _no_such_name(__name__, name)
    module = _importlib.import_module(_LAZY[name])
    value = globals()[name] = getattr(module, name, module)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
