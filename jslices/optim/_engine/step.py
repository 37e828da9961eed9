"""From slices to the update and the new state: the way is chosen from the shapes.

    few rows               ``in_place.step_at_once``    number, sum, gather, step, scatter
      of many arrays       ``in_place.step_rows``       the same in quarters, on a CPU
    more rows, on a CPU    ``in_place.step_rows``       the same in chunks, in cache
    many bytes, on a CPU   ``large.step_large``         as few arrays ``[K, D]`` as can be
    much of the table      ``whole.step_whole``         no numbers, one pass over all rows

Each was chosen by measurement (docs/speed.md).
"""

from collections.abc import Sequence
from typing import Any

import jax

from jslices._devices.memory import SHORT, is_large
from jslices._rows.bounds import canonical_indices
from jslices._rows.sums import Order, sum_duplicates
from jslices._slices import IndexedSlices
from jslices.optim._engine.in_place import (
    CHUNK,
    Kernel,
    are_few,
    like,
    row_bytes,
    step_rows,
)
from jslices.optim._engine.large import step_large
from jslices.optim._engine.rule import Rule
from jslices.optim._engine.whole import EveryRow, step_whole

#: Tables of this many bytes are better not summed densely, which makes one more of them.
LARGE_TABLE = 16 * 10**6
#: The pass over rows of fewer bytes takes so little time that it may take more memory.
SHORT_ROW = 32
#: Below so many slots nothing is won by choosing.
SMALL = 512


def step_slices(
    kernel: Kernel,
    grad: IndexedSlices,
    state: Sequence[jax.Array],
    read: Sequence[jax.Array],
    rule: Rule,
) -> tuple[Any, ...]:
    """Runs ``kernel`` on the rows that ``grad`` names, duplicates summed first.

    Args:
      kernel: the arithmetic of the step.
      grad: of an array ``[V, *D]``, K slots.
      state: arrays ``[V, ...]``, whose rows are written back.
      read: arrays ``[V, ...]``, whose rows are only read; there is one in both together.
      rule: whose kernel it is.

    Returns:
      ``(update, *state)``: IndexedSlices in which each row appears once, its other slots
      empty and zero, and the new arrays.
    """
    arrays = (*read, *state)
    height = arrays[0].shape[0]
    kind = IndexedSlices
    indices, values = canonical_indices(grad.indices, height), grad.values
    if _covered(grad, height, rule):
        kind = EveryRow
        indices, update, *new = step_whole(
            kernel, indices, values, height, arrays, len(read), rule.still
        )
    elif _is_large(values) and _fits_in_gradient(kernel, values, arrays):
        indices, update, *new = step_large(kernel, indices, grad, arrays, len(read))
    else:
        few = are_few(len(indices), *map(row_bytes, (values, *arrays)))
        order: Order = "gaps" if few else "any"
        values, indices, present = sum_duplicates(
            values, indices, height, None, order=order
        )
        update, *new = step_rows(
            kernel, indices, values, state, read, present, quarters=rule.quarters
        )
    return (kind(update, indices, grad.dense_shape), *new)


def apply_large(
    kernel: Kernel, grad: IndexedSlices, arrays: Sequence[jax.Array]
) -> tuple[jax.Array, ...]:
    """The same from a large gradient by a kernel that steps the parameter along.

    Args:
      kernel: ``kernel(gradient, *rows) -> (nothing, *rows)``.
      grad: of an array ``[V, *D]``, K slots.
      arrays: ``[V, ...]``, the parameter first.

    Returns:
      The new arrays.
    """
    indices = canonical_indices(grad.indices, arrays[0].shape[0])
    return step_large(kernel, indices, grad, arrays, 0, applies=True)[2:]


def step_all_rows(kernel: Kernel, grad: IndexedSlices) -> EveryRow:
    """The update of a kernel without state, in one pass over all rows."""
    assert grad.dense_shape is not None
    height = grad.dense_shape[0]
    indices = canonical_indices(grad.indices, height)
    indices, update = step_whole(kernel, indices, grad.values, height, (), 0, True)
    return EveryRow(update, indices, grad.dense_shape)


def covers(num_ids: int, row_bytes: int, num_rows: int, held: float) -> bool:
    """Whether so many ids are enough of a table to step all of it.

    ``held``: arrays [V, D] that this takes. With these and what else there is, steps of
    rows of 8 elements take up to 5.98 arrays [K, D] at the limit, of longer rows fewer;
    they are to take less than six.
    """
    ids_a_row = (held + 0.62) / 6 * min(row_bytes / SHORT_ROW, 1)
    if num_rows * row_bytes >= LARGE_TABLE:
        # Beyond the caches the pass takes as long as its bytes, and an id as 192 of them,
        # up to two ids a row: from SHORT bytes on the other ways sum within the gradient,
        # from twice as many on slot by slot.
        ids_a_row = min(max(ids_a_row, row_bytes / 192), 2)
    return num_ids >= max(SMALL, num_rows * ids_a_row)


def covers_by_slot(num_ids: int, row_bytes: int, num_rows: int) -> bool:
    """The same, where each id would else be added by itself.

    Of these only short rows are slow: they take as long to be told from empty slots as to
    be added.
    """
    return row_bytes <= SHORT and num_ids >= max(SMALL, num_rows * 2)


def steps_large(grad: IndexedSlices, height: int, rule: Rule) -> bool:
    """Whether the gradient is large, and not of so many rows that all V are stepped."""
    return not _covered(grad, height, rule) and _is_large(grad.values)


def _covered(grad: IndexedSlices, height: int, rule: Rule) -> bool:
    # Of rows that catch up, the steps that they have done are kept too: arrays [V].
    held = rule.held if rule.drift is None else rule.held + 0.2
    return covers(len(grad.indices), row_bytes(grad.values), height, held)


def _is_large(values: jax.Array) -> bool:
    if values.dtype.itemsize < 4:  # summed in float32
        return False
    return len(values) > CHUNK and is_large(len(values), row_bytes(values))


def _fits_in_gradient(
    kernel: Kernel, values: jax.Array, arrays: Sequence[jax.Array]
) -> bool:
    """Whether the gradient's memory can hold sums and update."""
    update = jax.eval_shape(kernel, *like([values, *arrays], CHUNK))[0]
    return update.dtype == values.dtype and update.shape[1:] == values.shape[1:]
