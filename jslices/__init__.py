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

from jslices import optim as optim
from jslices import tree as tree
from jslices._densify import DenseUseError as DenseUseError
from jslices._densify import DensificationWarning as DensificationWarning
from jslices._grad.api import grad as grad
from jslices._grad.api import value_and_grad as value_and_grad
from jslices._grad.api import vjp as vjp
from jslices._grad.explain import explain as explain
from jslices._ids import check_ids as check_ids
from jslices._lookup import embedding_lookup as embedding_lookup
from jslices._lookup import embedding_lookup_sparse as embedding_lookup_sparse
from jslices._lookup import log_uniform_candidate_sampler as log_uniform_candidate_sampler
from jslices._lookup import nce_loss as nce_loss
from jslices._lookup import safe_embedding_lookup_sparse as safe_embedding_lookup_sparse
from jslices._lookup import sampled_softmax_loss as sampled_softmax_loss
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
from jslices.optim import GradientTransformation as GradientTransformation
from jslices.optim import adagrad as adagrad
from jslices.optim import adam as adam
from jslices.optim import apply_updates as apply_updates
from jslices.optim import from_optax as from_optax
from jslices.optim import sgd as sgd

__version__ = "0.1.0"
