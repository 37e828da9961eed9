"""Names for libraries that are built on jslices: stable, but not for programs.

``jslices`` itself, ``jslices.optim``, ``jslices.testing`` and ``jslices.tree`` are for
programs. Here is only what the parts around the core (checkpoints, accumulators, tables in
host memory, TensorFlow's names, Keras) need beyond that.
"""

# The numbers, and the strings, that an argument may be, and the error for others.
from jslices._arguments import Number as Number
from jslices._arguments import OneOf as OneOf

# The line of the user's program that is running.
from jslices._densify import current_user_line as current_user_line

# Sizes in messages: "1.5 GiB".
from jslices._densify import human_bytes as human_bytes

# Warns at the user's line, a DensificationWarning if no other category is passed.
from jslices._densify import warn_at_line as warn_at_line

# What `explain` returns.
from jslices._grad.explain import Explanation as Explanation

# The command that installs an optional part.
from jslices._install import install_command as install_command

# The values of a pytree prefix for each leaf.
from jslices._jax import broadcast_prefix as broadcast_prefix

# Whether an operator of a JAX array asks for `__jax_array__`, and could wait.
from jslices._jax import called_by_any_jax_operator as called_by_any_jax_operator

# Bags of ids in any of the forms that `embedding_lookup_sparse` takes.
from jslices._lookup.bags import as_bags as as_bags

# Where ids are that of padding.
from jslices._lookup.embedding import is_padding as is_padding

# Plain `jax.grad` of a table that is marked warns of the dense gradient.
from jslices._lookup.mark import mark_table as mark_table

# `__all__` of a module.
from jslices._names import public as public

# The mesh of an array on Explicit axes.
from jslices._place.boundary import explicit_mesh as explicit_mesh

# Lets a function that is written for one device take arrays on Explicit axes, and the types
# of its results there where these are split as the first argument is.
from jslices._place.boundary import like_first as like_first
from jslices._place.boundary import on_any_mesh as on_any_mesh

# A PerformanceHint at the user's line, once about each thing.
from jslices._place.hints import hint_once as hint_once

# Where the rows of an array are, and a function of each device's.
from jslices._place.placement import Placement as Placement
from jslices._place.placement import on_each_device as on_each_device
from jslices._place.placement import placement_at_hand as placement_at_hand

# What an index out of range means, and in which dtype: for tables and sums of their own.
from jslices._rows.access import canonical_indices as canonical_indices
from jslices._rows.access import empty_index as empty_index
from jslices._rows.access import index_dtype as index_dtype

# Reading ids as the lookups do: converted, checked and normalized by a mode.
from jslices._rows.ids import as_ids as as_ids
from jslices._rows.ids import check_mode as check_mode
from jslices._rows.ids import refuse_bad_ids as refuse_bad_ids
from jslices._rows.ids import settle as settle

# Rounding rows stochastically, to 16 or 8 bits.
from jslices._rows.rounding import key_bits as key_bits
from jslices._rows.rounding import round_rows as round_rows

# A sort of row numbers that is fast on every platform; the dtype in which rows are summed.
from jslices._rows.sums import sort_ids as sort_ids
from jslices._rows.sums import sum_dtype as sum_dtype

# Parameters of which many tables are in one array.
from jslices._slices import Stacked as Stacked

# Refuses slices that a foreign tree.map has changed.
from jslices._slices import check_slices as check_slices

# The integers of row numbers that are leaves of a pytree; other leaves as they are.
from jslices._slices import opened as opened

# Rows of an array at indices of any shape; empty entries read a fill value.
from jslices._slices import rows_at as rows_at

# Types of arguments.
from jslices._typing import Params as Params
from jslices._typing import PyTree as PyTree
from jslices._typing import State as State

# Parameters in boxes that name their axes, of Flax or registered, and out of them.
from jslices.optim.engine.boxes import boxed_as as boxed_as
from jslices.optim.engine.boxes import is_box as is_box
from jslices.optim.engine.boxes import register_box as register_box
from jslices.optim.engine.boxes import unboxed as unboxed
from jslices.optim.engine.boxes import with_axes as with_axes

# The last steps of rows, from the clock of an exact optimizer.
from jslices.optim.engine.clock import OLD_CLOCK as OLD_CLOCK
from jslices.optim.engine.clock import OTHER_NUMBERS as OTHER_NUMBERS
from jslices.optim.engine.clock import RowClock as RowClock

# The state of an exact optimizer of rows that a host keeps, with the log of their steps.
from jslices.optim.engine.clock import by_row as by_row
from jslices.optim.engine.clock import has_rows_behind as has_rows_behind
from jslices.optim.engine.clock import map_clocks as map_clocks
from jslices.optim.engine.clock import short_logs as short_logs
from jslices.optim.engine.clock import with_columns as with_columns
from jslices.optim.engine.missed import LONG_LOG as LONG_LOG

# The state of some rows of a table, for what goes by row numbers.
from jslices.optim.engine.protocol import StateOfRows as StateOfRows

# Optimizers of Optax where those of jslices are expected.
from jslices.optim.transforms.base import as_transformation as as_transformation

__all__ = [name for name in dir() if not name.startswith("_")]
__dir__ = __all__.copy
