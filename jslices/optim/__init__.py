"""Optimizers that read and write only the rows that got a gradient.

Each optimizer is one file: a state, an ``init`` and a *kernel*, the arithmetic of one
step on whatever array it is given. ``rows`` runs the kernel on whole arrays for dense
gradients and on the touched rows for IndexedSlices.
"""

from jslices.optim.adagrad import AdagradState as AdagradState
from jslices.optim.adagrad import adagrad as adagrad
from jslices.optim.adam import AdamState as AdamState
from jslices.optim.adam import adam as adam
from jslices.optim.apply import apply_updates as apply_updates
from jslices.optim.base import GradientTransformation as GradientTransformation
from jslices.optim.base import Schedule as Schedule
from jslices.optim.clip_transforms import clip as clip
from jslices.optim.clip_transforms import clip_by_block_rms as clip_by_block_rms
from jslices.optim.clip_transforms import clip_by_global_norm as clip_by_global_norm
from jslices.optim.clip_transforms import clip_rows_by_norm as clip_rows_by_norm
from jslices.optim.combine import combine_duplicates as combine_duplicates
from jslices.optim.from_optax import from_optax as from_optax
from jslices.optim.sgd import SgdState as SgdState
from jslices.optim.sgd import sgd as sgd
