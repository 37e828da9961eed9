"""One step of an optimizer on some rows of its arrays, in place and in cache.

On a CPU the rows are worked off in chunks, and only as many chunks as hold rows: a chunk's
rows are still in the cache, and in the table of pages, when they are written back. (At
V = 1e6, D = 64 and 1e4 Zipf ids this takes a fifth off the step, and most of what it grows
with V.) Few rows go at once, or in quarters where that would take too much memory. Not on a
CPU, all rows go at once, as a loop would only launch kernels.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jslices import _jax
from jslices._rows.bounds import set_rows, take_rows
from jslices._rows.select import leading, where_rows

#: ``kernel(gradient, *read, *slots) -> (update, *new_slots)``, the same for an array and
#: for some rows of it: everything in it must be elementwise or within a row.
Kernel = Callable[..., tuple[jax.Array, ...]]

CHUNK = 2048
#: So many slots, or slots of so many bytes, are better stepped together: chunks of them
#: take 0.74 to 1.7 times as long, 1.04 to 1.2 in the median (docs/speed.md).
FEW_ROWS, FEW_BYTES = 2 * CHUNK, 1.5e6

#: To write into a bfloat16 array, XLA:CPU of these releases makes all of it float32, and
#: back: better once a step than once a chunk. (jax 0.10.2 does it, 0.12 does not.)
WIDENS_BFLOAT16 = jax.__version_info__ < (0, 12)


def step_rows(
    kernel: Kernel,
    indices: jax.Array,
    values: jax.Array,
    state: Sequence[jax.Array],
    read: Sequence[jax.Array] = (),
    present: jax.Array | None = None,
    *,
    quarters: bool = False,
) -> tuple[jax.Array, ...]:
    """Runs ``kernel`` on the rows that ``indices`` name.

    Args:
      kernel: the arithmetic of the step.
      indices: ``[U]``, unique, and empty slots (index V), which stand at the end unless
        the slots :func:`are_few`.
      values: ``[U, *D]``, the gradient of these rows.
      state: arrays ``[V, ...]``, whose rows are written back.
      read: arrays ``[V, ...]``, whose rows are only read; there is one in both together.
      present: int32 ``[]``, how many rows there are besides the empty slots, if known.
      quarters: whether few slots are stepped in four quarters on a CPU, as together they
        would take too much memory.

    Returns:
      ``(update, *state)``: ``[U, *D]``, zero in empty slots, and the new arrays.
    """
    reads, arrays = len(read), [*read, *state]
    every = (indices, values, *arrays)
    indices, values, *arrays = _jax.as_varying_as(every, *every)
    count, chunk = len(indices), CHUNK
    few = are_few(count, *map(row_bytes, (values, *arrays)))
    widens = WIDENS_BFLOAT16 and any(x.dtype == jnp.bfloat16 for x in state)
    if widens or (few and not (quarters and count > 1)):
        return step_at_once(kernel, indices, values, arrays, reads)
    if few:
        present, chunk = jnp.int32(count), -(-count // 4)
    elif present is None:
        present = jnp.sum(indices < arrays[0].shape[0], dtype=jnp.int32)

    def at_once(kernel: Kernel, values: jax.Array, *arrays: jax.Array) -> Any:
        return step_at_once(kernel, indices, values, arrays, reads)

    def chunked(kernel: Kernel, values: jax.Array, *arrays: jax.Array) -> Any:
        return step_in_chunks(kernel, indices, values, arrays, reads, present, chunk)

    result: tuple[jax.Array, ...] = loop_on_cpu(
        chunked, at_once, kernel, values, arrays, chunk
    )
    return result


def loop_on_cpu(
    loop: Callable[..., Any],
    at_once: Callable[..., Any],
    kernel: Kernel,
    values: jax.Array,
    arrays: Sequence[jax.Array],
    chunk: int,
    more: Sequence[jax.Array] = (),
) -> Any:
    """``loop(kernel, values, *arrays, *more)`` on a CPU, else ``at_once`` without ``more``.

    The loop's length depends on values, so it has no reverse derivative of its own; it is
    given that of doing all rows at once. A custom_jvp must be handed what its function
    closes over (a learning rate that is itself learned, say), and a converted function has
    fixed shapes, hence two: of all slots, and of a chunk of them.
    """
    rows = (values, *arrays)
    whole, whole_consts = jax.closure_convert(kernel, *like(rows, len(values)))
    part, part_consts = jax.closure_convert(kernel, *like(rows, chunk))

    def looped(consts: Any, *rows: jax.Array) -> Any:
        return loop(lambda *x: part(*x, *consts[1]), *rows, *consts[2])

    def together(consts: Any, *rows: jax.Array) -> Any:
        return at_once(lambda *x: whole(*x, *consts[0]), *rows)

    @jax.custom_jvp
    def step(consts: Any, *rows: jax.Array) -> Any:
        return lax.platform_dependent(consts, *rows, cpu=looped, default=together)

    step.defjvp(lambda primals, tangents: jax.jvp(together, primals, tangents))
    return step((whole_consts, part_consts, more), *rows)


def are_few(count: int, *row_bytes: int) -> bool:
    """Whether so many rows of such arrays are stepped together on a CPU too.

    Who orders the slots and who steps them must ask for the same arrays.
    """
    return count <= FEW_ROWS or count * max(row_bytes) <= FEW_BYTES


def row_bytes(values: jax.Array) -> int:
    """Of a row of ``[n, *D]``."""
    return math.prod(values.shape[1:]) * values.dtype.itemsize


def like(arrays: Sequence[jax.Array], count: int) -> list[jax.Array]:
    """Zeros as ``count`` rows of each array, varying as these do inside a ``shard_map``."""
    zeros = (jnp.zeros((count, *x.shape[1:]), x.dtype) for x in arrays)
    return _jax.as_varying_as(arrays, *zeros)


def step_at_once(
    kernel: Kernel,
    indices: jax.Array,
    values: jax.Array,
    arrays: Sequence[jax.Array],
    reads: int,
) -> tuple[jax.Array, ...]:
    """:func:`step_rows` without a loop; of ``arrays`` the first ``reads`` are only read."""
    height = arrays[0].shape[0]
    # Empty slots read the last row; nothing is written back there.
    near = jnp.minimum(indices, max(height - 1, 0))
    rows = [take_rows(x, near, mode="promise_in_bounds") for x in arrays]
    update, *new_rows = kernel(values, *rows)
    update = where_rows(indices < height, update, jnp.zeros((), update.dtype))
    new_state = [
        set_rows(slot, indices, new.astype(slot.dtype))
        for slot, new in zip(arrays[reads:], new_rows, strict=True)
    ]
    return (update, *new_state)


def step_in_chunks(
    kernel: Kernel,
    indices: jax.Array,
    values: jax.Array,
    arrays: Sequence[jax.Array],
    reads: int,
    present: jax.Array,
    chunk: int,
    gradient: Callable[..., jax.Array] | None = None,
) -> tuple[jax.Array, ...]:
    """:func:`step_at_once`, a chunk at a time, of at least one chunk of slots.

    ``gradient(start, *arrays)`` gives the rows ``[chunk, *D]`` from slot ``start`` on, the
    arrays being as the chunks before have left them; else they are those of ``values``.
    """
    count, height = indices.shape[0], arrays[0].shape[0]
    read, state = arrays[:reads], arrays[reads:]

    def body(start: jax.Array, fresh: jax.Array, carry: Any) -> Any:
        update, *state = carry
        cut = lambda x: lax.dynamic_slice_in_dim(x, start, chunk)  # noqa: E731
        ids = jnp.where(fresh, cut(indices), height)
        rows = (*read, *state)
        given = cut(values) if gradient is None else gradient(start, *rows)
        new, *state = step_at_once(kernel, ids, given, rows, reads)
        new = leading(cut(update), chunk - jnp.sum(fresh, dtype=jnp.int32), new)
        return [lax.dynamic_update_slice_in_dim(update, new, start, 0), *state]

    # In the kernel's own dtype, which need not be that of the gradient.
    shape = jax.eval_shape(kernel, *like([values, *arrays], chunk))[0]
    update = jnp.zeros((count, *shape.shape[1:]), shape.dtype)
    (update,) = _jax.as_varying_as(arrays, update)
    return tuple(in_chunks(present, count, chunk, body, [update, *state]))


def in_chunks(
    total: Any,
    count: int,
    chunk: int,
    body: Callable[..., Any],
    carry: Sequence[jax.Array],
    first: jax.Array | None = None,
) -> Sequence[jax.Array]:
    """``carry = body(start, fresh, carry)`` for chunks of the first ``total`` of ``count``.

    They begin with slot ``first``, or 0.

    The last chunk may begin early, so that it ends with the last slot; ``fresh`` (bools
    ``[chunk]``) shows which slots no chunk had before.
    """

    def step(done_carry: Any) -> Any:
        done, *carry = done_carry
        start = jnp.minimum(done, count - chunk)
        fresh = start + jnp.arange(chunk, dtype=jnp.int32) >= done
        return [done + chunk, *body(start, fresh, carry)]

    first = jnp.zeros((), jnp.int32) if first is None else first
    return lax.while_loop(lambda x: x[0] < total, step, [first, *carry])[1:]
