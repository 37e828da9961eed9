"""A step from a gradient of many bytes: on a CPU with as few arrays ``[K, D]`` as can be.

XLA:CPU allocates its temporaries anew at every execution. Above 32 MB the allocator takes
them fresh from the operating system each time, and then a step is spent on page faults more
than on arithmetic (12,500 of them for each 50 MB).

    ``tx.apply``, which needs no update           ``stream``   no sums, no update
    else                                          ``fold``     all three in one array
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jslices import _jax
from jslices._rows.bounds import take_rows
from jslices._rows.sums import sum_duplicates
from jslices._slices import IndexedSlices
from jslices.optim._engine.fold import step_folded
from jslices.optim._engine.in_place import (
    CHUNK,
    Kernel,
    loop_on_cpu,
    step_at_once,
)
from jslices.optim._engine.stream import step_streamed


def step_large(
    kernel: Kernel,
    indices: jax.Array,
    grad: IndexedSlices,
    arrays: Sequence[jax.Array],
    reads: int,
    applies: bool = False,
) -> tuple[jax.Array, ...]:
    """Runs ``kernel`` on the rows that ``indices`` name.

    Args:
      kernel: the arithmetic. Its update has the shape and dtype of the gradient, or, if it
        changes the parameter itself, no elements.
      indices: ``[K]``, canonical: in any order, with duplicates and empty slots (V); K is
        more than ``CHUNK``.
      grad: ``[K, *D]``, with these indices.
      arrays: ``[V, ...]``, of which the first ``reads`` are only read.
      applies: whether the kernel changes the parameter, the first of the arrays.

    Returns:
      ``(indices, update, *state)``: indices ``[K]``, each row once, else V; update
      ``[K, ...]``, zero there.
    """
    values, source, more = _source(grad, arrays, applies)
    every = (indices, values, *arrays)
    indices, values, *arrays = _jax.as_varying_as(every, *every)

    def on_cpu(kernel: Kernel, values: jax.Array, *rest: jax.Array) -> Any:
        arrays, more = rest[: len(rest) - num_more], rest[len(rest) - num_more :]
        if source is None:
            return step_folded(kernel, indices, values, arrays, reads)
        gradient = functools.partial(source, values, more)
        return step_streamed(kernel, indices, gradient, values, arrays, reads)

    def elsewhere(kernel: Kernel, values: jax.Array, *arrays: jax.Array) -> Any:
        height = arrays[0].shape[0]
        summed, unique, _ = sum_duplicates(values, indices, height, len(indices))
        return (unique, *step_at_once(kernel, unique, summed, arrays, reads))

    num_more = len(more)
    result: tuple[jax.Array, ...] = loop_on_cpu(
        on_cpu, elsewhere, kernel, values, arrays, CHUNK, more
    )
    return result


def _source(
    grad: IndexedSlices, arrays: Sequence[jax.Array], applies: bool
) -> tuple[jax.Array, Callable[..., jax.Array] | None, Sequence[jax.Array]]:
    """The values ``[K, *D]``, how to get some of them, and what else that takes."""
    del arrays
    values = grad.values
    if not applies:
        return values, None, ()

    def gathered(values: Any, more: Any, slots: Any, ids: Any, first: Any) -> jax.Array:
        return take_rows(values, slots, mode="promise_in_bounds")

    return values, gathered, ()
