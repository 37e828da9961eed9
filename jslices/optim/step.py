"""From slices to the update and the new state: the way is chosen from the shapes.

    few rows               ``in_place.step_at_once``    number, sum, gather, step, scatter
    more rows, on a CPU    ``in_place.step_rows``       the same in chunks, in cache
    many bytes, on a CPU   ``fold.step_folded``         sums and update in the gradient
    the same in one call   ``stream.step_streamed``     no update, and perhaps no gradient
    much of the table      ``whole.step_whole``         no numbers, one pass over all rows

Each was chosen by measurement (docs/speed.md).
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jslices._bounds import canonical_indices, take_rows
from jslices._coalesce import sum_duplicates
from jslices._grad.reread import slots_again, values_again
from jslices._memory import SHORT, is_large, memory_is_cheap
from jslices._slices import IndexedSlices
from jslices.optim.fold import step_folded
from jslices.optim.in_place import CHUNK, Kernel, like, loop_on_cpu, step_at_once, step_rows
from jslices.optim.stream import step_streamed
from jslices.optim.whole import EveryRow, step_whole

#: Tables of this many bytes are better not summed densely, which makes one more of them.
LARGE_TABLE = 16 * 10**6
#: Below so many slots nothing is won by choosing.
SMALL = 512


def step_slices(
    kernel: Kernel,
    grad: IndexedSlices,
    state: Sequence[jax.Array],
    read: Sequence[jax.Array] = (),
    *,
    still: bool = False,
) -> tuple[Any, ...]:
    """Runs ``kernel`` on the rows that ``grad`` names, duplicates summed first.

    Args:
      kernel: the arithmetic of the step.
      grad: of an array ``[V, *D]``, K slots.
      state: arrays ``[V, ...]``, whose rows are written back.
      read: arrays ``[V, ...]``, whose rows are only read; there is one in both together.
      still: whether a row whose gradient is zero keeps all it has.

    Returns:
      ``(update, *state)``: IndexedSlices in which each row appears once, its other slots
      empty and zero, and the new arrays.
    """
    arrays = (*read, *state)
    height = arrays[0].shape[0]
    if covers(len(grad.indices), row_bytes(grad.values), height):
        return step_all_rows(kernel, grad, arrays, len(read), still)
    indices, values = canonical_indices(grad.indices, height), grad.values
    if _fits_in_gradient(kernel, values, arrays):
        values = values_again(grad)
        indices, update, *new = _large(kernel, indices, values, arrays, len(read))
    else:
        values, indices, present = sum_duplicates(
            values, indices, height, None, ordered=False
        )
        update, *new = step_rows(kernel, indices, values, state, read, present)
    return (IndexedSlices(update, indices, grad.dense_shape), *new)


def apply_slices(
    kernel: Kernel, grad: IndexedSlices, arrays: Sequence[jax.Array], *, still: bool = False
) -> Sequence[jax.Array]:
    """:func:`step_slices` of a kernel that changes the parameter as well.

    Args:
      kernel: ``kernel(gradient, *rows) -> (nothing, *rows)``.
      grad: of an array ``[V, *D]``, K slots.
      arrays: ``[V, ...]``, the parameter first.
      still: whether a row whose gradient is zero keeps all it has.

    Returns:
      The new arrays.
    """
    height = arrays[0].shape[0]
    indices, values = canonical_indices(grad.indices, height), grad.values
    if covers(len(indices), row_bytes(values), height):
        return step_whole(kernel, indices, values, height, arrays, 0, still)[2:]
    if _is_large(values):
        return _in_one_call(kernel, indices, grad, arrays)
    values, indices, present = sum_duplicates(values, indices, height, None, ordered=False)
    return step_rows(kernel, indices, values, arrays, (), present)[1:]


def step_all_rows(
    kernel: Kernel,
    grad: IndexedSlices,
    arrays: Sequence[jax.Array],
    reads: int,
    still: bool,
) -> tuple[Any, ...]:
    """:func:`step_slices` in one pass over arrays, of which there may be none."""
    assert grad.dense_shape is not None
    height = grad.dense_shape[0]
    indices = canonical_indices(grad.indices, height)
    indices, update, *new = step_whole(
        kernel, indices, grad.values, height, arrays, reads, still
    )
    return (EveryRow(update, indices, grad.dense_shape), *new)


def covers(num_ids: int, row_bytes: int, num_rows: int, by_slot: bool = False) -> bool:
    """Whether so many ids are enough of a table to step all of it.

    ``by_slot``: else each id would be added by itself, of which only short rows are slow:
    they take as long to be told from empty slots as to be added.
    """
    if by_slot:
        return row_bytes <= SHORT and num_ids >= max(SMALL, num_rows * 2)
    if num_rows * row_bytes < LARGE_TABLE:
        enough = num_rows / 2
    else:  # one pass needs memory for the sums, [V, D]
        enough = num_rows if memory_is_cheap() else num_rows * 2
    return num_ids >= max(SMALL, enough)


def row_bytes(values: jax.Array) -> int:
    return math.prod(values.shape[1:]) * values.dtype.itemsize


def _is_large(values: jax.Array) -> bool:
    if values.dtype.itemsize < 4:  # summed in float32
        return False
    return len(values) > CHUNK and is_large(len(values), row_bytes(values))


def _fits_in_gradient(
    kernel: Kernel, values: jax.Array, arrays: Sequence[jax.Array]
) -> bool:
    """Whether the gradient is large, and its memory can hold sums and update."""
    if not _is_large(values):
        return False
    update = jax.eval_shape(kernel, *like([values, *arrays], CHUNK))[0]
    return update.dtype == values.dtype and update.shape[1:] == values.shape[1:]


def _large(
    kernel: Kernel,
    indices: jax.Array,
    values: jax.Array,
    arrays: Sequence[jax.Array],
    reads: int,
) -> tuple[jax.Array, ...]:
    def folded(kernel: Kernel, values: jax.Array, *arrays: jax.Array) -> Any:
        return step_folded(kernel, indices, values, arrays, reads)

    at_once = functools.partial(_at_once, indices, reads)
    result: tuple[jax.Array, ...] = loop_on_cpu(folded, at_once, kernel, values, arrays)
    return result


def _at_once(
    indices: jax.Array, reads: int, kernel: Kernel, values: jax.Array, *arrays: jax.Array
) -> Any:
    height = arrays[0].shape[0]
    summed, unique, present = sum_duplicates(values, indices, height, len(indices))
    return (unique, *step_at_once(kernel, unique, summed, arrays, reads, present))


def _in_one_call(
    kernel: Kernel, indices: jax.Array, grad: IndexedSlices, arrays: Sequence[jax.Array]
) -> Sequence[jax.Array]:
    by_slot = slots_again(grad)
    more: Sequence[jax.Array] = ()

    def from_rows(slots: jax.Array, ids: jax.Array, table: jax.Array) -> jax.Array:
        assert by_slot is not None
        return by_slot(slots, take_rows(table, ids, mode="clip"))

    if by_slot is not None:
        some = jnp.zeros((CHUNK,), jnp.int32)
        from_rows, more = jax.closure_convert(from_rows, some, some, arrays[0])

    def streamed(kernel: Kernel, values: jax.Array, *rest: jax.Array) -> Any:
        arrays, more = rest[: len(rest) - num_more], rest[len(rest) - num_more :]

        def source(slots: jax.Array, ids: jax.Array, table: jax.Array) -> jax.Array:
            if by_slot is not None:
                return from_rows(slots, ids, table, *more)
            return take_rows(values, slots, mode="promise_in_bounds")

        return step_streamed(kernel, indices, source, arrays, values)

    def at_once(kernel: Kernel, values: jax.Array, *arrays: jax.Array) -> Any:
        return list(_at_once(indices, 0, kernel, values, *arrays)[2:])

    num_more = len(more)
    new: Sequence[jax.Array] = loop_on_cpu(
        streamed, at_once, kernel, grad.values, arrays, more
    )
    return new
