"""Names for libraries that are built on jslices: stable, but not for programs.

``jslices`` itself, ``jslices.optim``, ``jslices.testing`` and ``jslices.tree`` are for
programs. What the parts around the core (checkpoints, accumulators, tables in host memory,
TensorFlow's names, Keras) need beyond that is here, and nothing else.
"""

# Sizes in messages: "1.5 GiB".
from jslices._densify import human_bytes as human_bytes

# What an index out of range means, and in which dtype: for tables and sums of their own.
from jslices._rows.bounds import canonical_indices as canonical_indices
from jslices._rows.bounds import empty_index as empty_index
from jslices._rows.bounds import index_dtype as index_dtype

# A sort of row numbers that is fast on every platform.
from jslices._rows.numbering import sort_ids as sort_ids

# Refuses slices that a foreign tree.map has changed.
from jslices._slices import check_slices as check_slices

# Types of arguments.
from jslices._typing import Params as Params
from jslices._typing import PyTree as PyTree
from jslices._typing import State as State

# Optimizers of Optax where those of jslices are expected.
from jslices.optim.transforms.base import as_transformation as as_transformation

__all__ = [
    "Params",
    "PyTree",
    "State",
    "as_transformation",
    "canonical_indices",
    "check_slices",
    "empty_index",
    "human_bytes",
    "index_dtype",
    "sort_ids",
]
