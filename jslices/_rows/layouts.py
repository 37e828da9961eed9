"""Row-major tables: rows whose elements lie side by side, so that reading one copies none.

XLA:TPU prefers columns where rows are not a multiple of 128 elements long, and gathers and
scatters of rows then copy the whole table there and back.
"""

import math
from typing import Any

import jax
from jax.experimental.layout import Format, Layout, with_layout_constraint


def row_major(tree: Any) -> Any:
    return jax.tree.map(row_major_array, tree)


def row_major_array(x: Any) -> Any:
    """``x`` with rows side by side, if it is an array of rows of more than one element."""
    if not isinstance(x, jax.Array | jax.ShapeDtypeStruct) or math.prod(x.shape[1:]) < 2:
        return x
    layout = Layout(tuple(range(x.ndim)))
    if isinstance(x, jax.core.Tracer):
        return with_layout_constraint(x, layout)
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=Format(layout, x.sharding))
    if x.format.layout.major_to_minor == layout.major_to_minor:
        return x
    return jax.device_put(x, Format(layout, x.sharding))
