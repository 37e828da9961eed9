"""Writing rows of an array: TensorFlow's ``scatter_*`` as pure functions.

Where they differ from TensorFlow's on purpose, docs/operations.md says so.
"""

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
