"""Writing rows of an array: TensorFlow's ``scatter_*`` as pure functions.

What differs from TensorFlow, on purpose:

====================================  ==================================================
TensorFlow                            here
====================================  ==================================================
changes a variable                    returns a new array; in place under jit, donated
a bad index raises, rows before it    ``mode="drop"`` ignores it; ``mode="check"`` raises
are changed already                   and nothing is changed
integer division by zero kills the    -1 (all bits set), XLA's rule
process
``scatter_div`` divides once per      floats are divided once, by the product of their
duplicate                             divisors (equal up to rounding)
``scatter_min(1, nan)`` is 1          NaN, as in ``jnp.minimum``
``scatter_min`` and ``_max`` refuse   work for every dtype that has an order
8-bit integers
no gradient                           differentiable in ``ref`` and ``updates``
====================================  ==================================================
"""

from jslices._scatter.elements import batch_scatter_update as batch_scatter_update
from jslices._scatter.elements import scatter_nd_add as scatter_nd_add
from jslices._scatter.elements import scatter_nd_sub as scatter_nd_sub
from jslices._scatter.elements import scatter_nd_update as scatter_nd_update
from jslices._scatter.rows import scatter_add as scatter_add
from jslices._scatter.rows import scatter_div as scatter_div
from jslices._scatter.rows import scatter_max as scatter_max
from jslices._scatter.rows import scatter_min as scatter_min
from jslices._scatter.rows import scatter_mul as scatter_mul
from jslices._scatter.rows import scatter_sub as scatter_sub
from jslices._scatter.rows import scatter_update as scatter_update
from jslices._scatter.slices import apply_slices as apply_slices
