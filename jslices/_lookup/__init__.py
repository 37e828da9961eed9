"""Reading rows of a table, with a gradient that consists of rows."""

from jslices._lookup.bags import embedding_lookup_sparse as embedding_lookup_sparse
from jslices._lookup.bags import (
    safe_embedding_lookup_sparse as safe_embedding_lookup_sparse,
)
from jslices._lookup.embedding import embedding_lookup as embedding_lookup
