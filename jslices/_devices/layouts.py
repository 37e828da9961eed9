"""Row-major tables: the elements of a row side by side, so that reading rows copies none.

XLA:TPU lays an array out by columns where its rows are not a multiple of 128 elements long.
A gather or scatter of rows then copies the whole table, there and back.
"""

import math
import warnings
from typing import Any

import jax
from jax.experimental.layout import Format
from jax.sharding import SingleDeviceSharding

from jslices._densify import current_user_line, human_bytes
from jslices._devices.memory import PerformanceHint
from jslices._jax import CONSTRAINS_LAYOUTS, OutputLayout, with_output_layout

#: An array is taken for a table if it has so many rows for each element of a row.
TALL = 32
_warned: set[Any] = set()


def row_major(tree: Any) -> Any:
    """The arrays of ``tree`` placed so that XLA reads and writes their rows in place.

    On a TPU a table is laid out by columns unless its rows are a multiple of 128 elements
    long, and each lookup and each step then copies all of it. Give the tables, and the
    state of their optimizer if it was made before, to this function once: what
    ``tx.init``, ``tx.update``, ``tx.apply`` and :func:`jslices.apply_updates` return stays
    row-major. (What a ``jit`` of yours returns does if it comes straight from one of them;
    after a loop or a ``cond``, return ``jslices.row_major(params)``. It takes jax 0.11.1.)

    Args:
      tree: a pytree of arrays ``[V, *D]`` or ``jax.ShapeDtypeStruct``, under ``jit`` too.
        Everything else is handed back.

    Returns:
      The same tree, shapes, dtypes, values and shardings. Arrays that are row-major
      already, as all are on CPUs and GPUs, and arrays of rows of one element are handed
      back as they are. A struct becomes that of a row-major array, on the first device if
      it names none.

    Memory: a TPU pads rows to 128 elements, row-major ones of 16 to 8 times their size
    (docs/packed_tables.md says how to store short rows). Cost: one copy of each array that
    is moved.

    Example:
      >>> import jax, jax.numpy as jnp, jslices as js
      >>> params = {"table": jnp.zeros((5, 3)), "bias": jnp.zeros(3)}
      >>> js.row_major(params)["table"] is params["table"]  # nothing to do on a CPU
      True
      >>> struct = jax.ShapeDtypeStruct((1_000_000, 64), jnp.float32)
      >>> js.row_major(struct).format.layout.major_to_minor
      (0, 1)

    Source: the layouts of ``jax.experimental.layout``, which this sets for tables.
    """
    return jax.tree.map(row_major_array, tree)


def row_major_array(x: Any) -> Any:
    """:func:`row_major` of one array."""
    if not isinstance(x, jax.Array | jax.ShapeDtypeStruct) or is_row_major(x):
        return x
    layout = _by_rows(x)
    if isinstance(x, jax.core.Tracer):
        return with_output_layout(x, layout) if CONSTRAINS_LAYOUTS else x
    sharding = x.sharding or SingleDeviceSharding(jax.devices()[0])
    placed = Format(layout, sharding)
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed)
    return jax.device_put(x, placed)


def row_major_tables(tree: Any) -> Any:
    """The tree with what looks like a table in it row-major."""
    return jax.tree.map(lambda x: row_major_array(x) if _is_tall(x) else x, tree)


def is_row_major(x: Any) -> bool:
    """Whether nothing is to be done. Of what is traced the layout is not known."""
    if math.prod(x.shape[1:]) < 2:
        return True
    if isinstance(x, jax.core.Tracer):
        return False
    layout = x.format.layout
    return layout is not None and layout.major_to_minor == _by_rows(x).major_to_minor


def laid_out_as(table: Any, array: Any) -> Any:
    """``array``, made for the rows of ``table``, row-major if that is known to be."""
    known = isinstance(table, jax.Array) and not isinstance(table, jax.core.Tracer)
    return row_major_array(array) if known and is_row_major(table) else array


def warn_of_columns(place: str, x: Any) -> None:
    """Says, once for each table, what one that is laid out by columns costs."""
    if isinstance(x, jax.core.Tracer) or not isinstance(x, jax.Array) or is_row_major(x):
        return
    key = place, x.shape, x.dtype
    if not _is_tall(x) or key in _warned:
        return
    _warned.add(key)
    line = current_user_line()
    warnings.warn_explicit(
        f"the table{place}, {x.dtype}{list(x.shape)}, is laid out by columns: each lookup, "
        f"and each step, copies all of it, {human_bytes(x.nbytes)}, to rows and back. "
        "Type params = jslices.row_major(params) before tx.init(params)",
        PerformanceHint,
        filename=line.file,
        lineno=line.line,
    )


def _is_tall(x: Any) -> bool:
    return x.ndim > 0 and x.shape[0] >= TALL * math.prod(x.shape[1:])


def _by_rows(x: Any) -> OutputLayout:
    return OutputLayout(tuple(range(x.ndim)))
