"""Reading rows of a table, with a gradient that consists of rows.

Where they differ from TensorFlow's on purpose, docs/operations.md says so.
"""

from jslices._lookup.bags import embedding_lookup_sparse as embedding_lookup_sparse
from jslices._lookup.bags import (
    safe_embedding_lookup_sparse as safe_embedding_lookup_sparse,
)
from jslices._lookup.embedding import embedding_lookup as embedding_lookup
from jslices._lookup.sampled import (
    log_uniform_candidate_sampler as log_uniform_candidate_sampler,
)
from jslices._lookup.sampled import nce_loss as nce_loss
from jslices._lookup.sampled import sampled_softmax_loss as sampled_softmax_loss
