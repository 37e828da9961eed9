"""Reading rows of a table, with a gradient that consists of rows."""

from jslices._lookup.embedding import embedding_lookup as embedding_lookup
