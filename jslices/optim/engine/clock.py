"""The clock of an optimizer whose rows catch up: the last step of each row, and the log."""

import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jslices._jax import flatten, is_symbolic, varying_axes
from jslices._place.boundary import mesh_of
from jslices._rows import access
from jslices._slices import IndexedSlices, each_shard
from jslices._typing import Params
from jslices.optim.engine.missed import MissedSteps
from jslices.optim.engine.rule import row_like

#: Steps of rows that do not move are kept modulo this, in integers below zero.
_CYCLE = 1 << 30
#: The mark of a frozen row that did no step.
FROZEN = -1 - _CYCLE
#: What to do with a clock of the format before this one.
OLD_CLOCK = (
    "The state keeps snapshots of an earlier version of jslices: with that version type "
    "params, state = tx.flush(params, state), and save params and slots (jslices.checkpoint."
    "export_state); then here jslices.checkpoint.import_state(tx, params, slots, count)"
)


class Clock(NamedTuple):
    """The last steps of rows, and what the last steps know of those after them.

    A row that a transformation holds did not move since its last step, and whatever catches
    it up without that transformation frees it; a frozen row never moves. Both have numbers
    below zero in ``last``. A row did its last step with the whole array, or by itself,
    whichever came later: :func:`last_steps`.
    """

    last: Any  #: like params, int32 ``[V]`` (``row_like``): the last step of each row.
    whole: jax.Array  #: int32, one a parameter: its last step as a whole.
    log: tuple[jax.Array, ...]  #: ``[lines, L]``, of each rule: see :class:`MissedSteps`.
    key: jax.Array | None = None  #: uint32 ``[2]``: of the noise of all steps, secret.


def new_clock(params: Params, missed: Sequence[MissedSteps]) -> Clock:
    """The clock before the first step of optimizers whose rows catch up."""
    leaves, tree = flatten(params)
    widest = jnp.result_type(np.float32, *map(float_like, leaves))
    last = [row_like(p, 0, jnp.int32) for p in leaves]
    num_rows = max((x.size for x in last), default=0)
    logs = tuple(steps.opened(num_rows, widest) for steps in missed)
    noise = missed[0].noise if missed else None
    key = None if noise is None else jnp.array(noise[1])
    return Clock(tree.unflatten(last), jnp.zeros(len(leaves), jnp.int32), logs, key)


def float_like(p: Any) -> np.dtype:
    """The dtype of numbers that missed steps take of a parameter: float32 or float64."""
    return np.dtype("f8" if jnp.result_type(p) in ("float64", "complex128") else "f4")


# --- The last step of a row ---------------------------------------------------------------


def last_done(last: jax.Array, count: jax.Array) -> jax.Array:
    """The last steps of rows, of held and frozen ones too, after ``count`` steps."""
    return jnp.where(last < 0, count - ((count - _in_cycle(last)) % _CYCLE), last)


def never_moves(last: jax.Array) -> jax.Array:
    return last < -_CYCLE


def held(last: jax.Array) -> jax.Array:
    """The marks of rows that did their last steps then, and are held since."""
    return -1 - _in_cycle(last)


def frozen(last: jax.Array) -> jax.Array:
    """The marks of rows that never move."""
    return FROZEN - _in_cycle(last)


def _in_cycle(last: jax.Array) -> jax.Array:
    return jnp.where(last < 0, -1 - last, last) % _CYCLE


def last_steps(last: jax.Array, whole: jax.Array, count: jax.Array) -> jax.Array:
    """``last`` of rows of an array whose last step as a whole was ``whole``."""
    as_whole = jnp.where(never_moves(last), frozen(whole), whole)
    return jnp.where(last_done(last, count) < whole, as_whole, last)


def steps_done(last: Any, whole: Any, count: Any) -> jax.Array:
    """The last step of each row of an array, whether it moved in it or not."""
    return last_done(last_steps(jnp.asarray(last), jnp.asarray(whole), count), count)


def with_all_done(last: jax.Array, count: Any) -> jax.Array:
    """``last`` of rows that have done all ``count`` steps; held and frozen ones stay so."""
    marks = jnp.where(never_moves(last), frozen(count), held(count))
    return jnp.where(last < 0, marks, count)


# --- Rows in turn -------------------------------------------------------------------------


def with_rows_in_turn(
    rows: IndexedSlices, last: jax.Array, log: jax.Array, count: jax.Array
) -> IndexedSlices:
    """``rows``, and a few others in turn, so that a log forgets no step that a row needs.

    Each step names about ``2 * V / L`` more, with values of zeros; on a mesh each device
    as many of its own. A row comes twice while a log lasts, as tables may be resized, or
    spread over other devices, and the order of rows changes. Rows that do not move need no
    log, and stay as they are.
    """
    period = (log.shape[1] - 1) // 2
    if not log.size:
        return rows

    def local(rows: IndexedSlices, last: jax.Array, count: jax.Array) -> IndexedSlices:
        axes = rows.row_axes
        height = access.rows_numbered(last.shape, axes)
        if is_symbolic(height) or not height:
            return rows
        more = -(-height // period)
        dtype = access.index_dtype(height, np.dtype(rows.indices.dtype))
        # In so many of the steps of a period, and the last of them, as a run may be over
        # before.
        turns = -(-height // more)
        turn = count.astype(dtype) % period - (period - turns)
        turn = turn * more + np.arange(more, dtype=dtype)
        near = jnp.clip(turn, 0, height - 1)
        marks = access.take_rows(last, near, mode="promise_in_bounds", row_axes=axes)
        waits = jnp.all(marks.reshape(more, -1) < 0, axis=1) | (near != turn)
        indices = rows.indices.astype(dtype), jnp.where(waits, height, turn)
        values = rows.values, jnp.zeros((more, *rows.values.shape[1:]), rows.values.dtype)
        named = None if rows.facts.named is None else rows.facts.named + more
        return rows.of(
            jnp.concatenate(values),
            jnp.concatenate(indices),
            rows.dense_shape,
            rows.facts._replace(distinct=False, named=named),
        )

    if rows.facts.placement is None:
        return local(rows, last, count)
    return each_shard(local, rows, last, shared=(count,))  # type: ignore[no-any-return]


def after_all(count: jax.Array, stepped: Sequence[Any]) -> jax.Array:
    """``count``, but not before all arrays have been stepped.

    Rows are stepped by the log, and if XLA:CPU may write it before, it copies the log.
    """
    arrays = [x.values if isinstance(x, IndexedSlices) else x for x in stepped]
    arrays = [x for x in arrays if x is not None and x.size]
    types = [jax.typeof(x) for x in arrays]
    if any(map(mesh_of, types)) or varying_axes(*types):
        return count
    firsts = [x[(0,) * x.ndim].real.astype(np.float32) for x in arrays]
    never = functools.reduce(operator.or_, (x > np.inf for x in firsts), False)
    return jnp.where(never, 0, count)
