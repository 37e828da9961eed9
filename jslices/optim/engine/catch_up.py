"""Catching up: untouched rows move to where a dense optimizer would have them.

Every row remembers the last step it did (clock.py). A step from a row that is behind is NaN
(``with_clock``), so that no stale row passes for a right one. The closed form of what rows
missed is one kernel (``make_missed_kernel``, by the log of missed.py), which runs

  * where rows are read as they are now, and nothing is written (``as_missed``);
  * before the kernel of a step, in one pass over the rows (``after``);
  * by itself, before rows are read or saved (``catch_up_rows``).

Small arrays catch up as one vector, which XLA compiles once (``catch_up_small``). On a CPU
a step whose rows catch up before the loss takes 1.2 to 2.6 times a lazy one, and one that
reads them as they are now 1.3 to 2.0 (docs/decisions.md). Begin with ``advanced``.
"""

import dataclasses
import functools
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import Partial, PyTreeDef
from jax.typing import ArrayLike

from jslices._grad.now import Missed as MissedRows
from jslices._jax import varying_axes
from jslices._place import boundary
from jslices._place.placement import placement_at_hand
from jslices._rows import access
from jslices._slices import Facts, IndexedSlices, rows_at, sent_to_owners, slices_of
from jslices._typing import Change, Leaf, PyTree, Record
from jslices.optim.engine.clock import FROZEN, Clock, RowClock, float_like
from jslices.optim.engine.missed import Log, Missed, MissedSteps
from jslices.optim.engine.numbers import next_count
from jslices.optim.engine.rule import Kernel, Rule, decayed, in_dtypes_of, per_row
from jslices.optim.engine.step import Plan, execute, step_rows

#: Elements of a table that ``flush`` brings up to date at a time.
CHUNK_ELEMENTS = 1 << 18

#: Of a traced step of rows that have not caught up, as far as is known.
STALE = (
    'a step of rows that must catch up (untouched="exact", or weight_decay_mode="all") is '
    "traced, and before it no row catches up by this tx: a row that misses a step becomes "
    "NaN in the next that reads it. Type js.train_step(loss, tx), or, before the "
    "gradient is taken, params, state = tx.catch_up(params, state, ids). Rows of a "
    "HostTable catch up by its tx: step with the same one"
)


def row_keys(path: str, last: Leaf, param: Leaf) -> Leaf:
    """The keys of rows in their noise, uint32 ``[..., 2]``; XLA makes only those read.

    By the path of the array, as parts of a tree may be stepped apart (``partition``), and
    the number of the row; inside a ``shard_map`` by the device as well.
    """
    if not hasattr(last, "shape"):  # of no parameter
        return None
    array = jnp.uint32(zlib.crc32(path.encode()))
    for axis in sorted(varying_axes(jax.typeof(last), jax.typeof(param))):
        array = array * jnp.uint32(0x9E3779B1) + lax.axis_index(axis).astype(jnp.uint32)
    rows = jnp.arange(last.size, dtype=jnp.uint32).reshape(*last.shape, 1)
    first = lax.broadcasted_iota(jnp.uint32, (*last.shape, 2), last.ndim) == 0
    return jnp.where(first, array, rows)


def _noise(
    steps: MissedSteps, key: Any, keys: Any, start: Any, stop: Any, variance: Any, p: Any
) -> jax.Array:
    """The noise of rows ``p`` in the steps after ``start`` up to ``stop``.

    A function of the row and these two numbers: the same where it is read and in the step
    that follows, in chunks and on every mesh, and independent for any other steps. One draw
    for all rows that are there would be neither.
    """
    assert steps.noise is not None
    keys = keys.reshape(-1, 2)
    width = p.size // max(len(keys), 1)
    key = jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), stop)

    def draw(own: jax.Array, start: jax.Array) -> jax.Array:
        one = functools.reduce(jax.random.fold_in, (*own, start), key)
        return jax.random.normal(one, (width,), float_like(p))

    start = jnp.broadcast_to(start, len(keys)) if start.ndim == 0 else start.reshape(-1)
    deviation = steps.noise[0] * jnp.sqrt(variance).astype(float_like(p))
    return deviation * jax.vmap(draw)(keys, start).reshape(p.shape)


def with_clock(
    kernel: Kernel,
    steps: MissedSteps,
    count: jax.Array,
    clock: Clock,
    whole: ArrayLike,
) -> Kernel:
    """Extend a kernel by the ``"last"`` steps of rows.

    ``whole`` is the last step of the array as a whole. A row that has not caught up gets
    NaN: under jit nothing can be raised, and a step from a stale row must not pass for a
    right one.
    """
    step, key, average = next_count(count), clock.key, steps.average

    def timed(whole: ArrayLike, g: jax.Array, p: Any, state: Record) -> Change:
        rows = RowClock.of(state["last"], whole, count)
        moves = ~rows.is_frozen & (rows.step == count)
        update, new = kernel(g, p, state)
        if key is not None:
            variance = steps.rate(count, jnp.result_type(clock.log[0]))
            update += _noise(steps, key, state["row_keys"], count, step, variance, update)
        # x + -0.0 is x for every x, and 0.0 for -0.0 + 0.0.
        wrong = jnp.where(per_row(rows.is_frozen, update), -0.0, jnp.nan)
        update = access.where_rows(moves, update, wrong.astype(update.dtype))
        if average is not None:  # to where held rows are
            now = p + access.where_rows(~rows.stays, update, jnp.zeros((), update.dtype))
            new = {**new, "ema": decayed(state["ema"], now, average)}
        # The clock waits for the gradient, which waits for all reads (value_and_grad).
        first = g[(0,) * g.ndim].real if g.size else 0
        return update, {**new, "last": rows.after(jnp.where(first > jnp.inf, 0, step))}

    return Partial(timed, whole)


#: Gradients; the last steps of rows of the array of each, and of all of it.
Stepped: TypeAlias = Sequence[tuple[Leaf, jax.Array, ArrayLike]]


def refuse_stale(tables: Stepped, count: jax.Array) -> None:
    """Raise for rows that have not caught up; no value may be traced."""
    for rows, late, done in _stale_rows(tables, count):
        if isinstance(late, jax.core.Tracer):  # all is known, but something is traced
            continue
        behind = np.asarray(late)
        if behind.any():
            first = int(np.argmax(behind))
            row, before = (int(x.reshape(-1)[first]) for x in (rows, done))
            raise ValueError(
                f"row {row} did its last step at {before}, the optimizer has done "
                f'{int(count)}: with untouched="exact" rows catch up before they are read: '
                "params, state = tx.catch_up(params, state, ids), or all of them by "
                "tx.flush(params, state)"
            )


@boundary.one_program
@boundary.on_any_mesh(lambda *args: None)
def _stale_rows(
    tables: Stepped, count: jax.Array
) -> list[tuple[jax.Array, jax.Array, jax.Array]]:
    """For each gradient its rows ``[n]``, which have not caught up, and what they did."""
    results = []
    for grad, last, whole in tables:
        marks = jnp.atleast_1d(RowClock.of(last, whole, count).marks)
        # A row of several numbers, of which each has a step of its own.
        numbers = jnp.arange(marks.size).reshape(marks.shape)
        if isinstance(grad, IndexedSlices):
            height = access.rows_numbered(marks.shape, grad.row_axes)
            at = access.canonical_indices(grad.indices, height)
            numbers, marks = (
                rows_at(x, at, fill_value=fill, row_axes=grad.row_axes)
                for x, fill in ((numbers, 0), (marks, FROZEN))
            )
        rows = RowClock(marks, count)
        late = (rows.step != count) & ~rows.is_frozen
        results.append((numbers, late, rows.step))
    return results


#: The rows of a parameter that catch up; True for all of them, False for none.
Behind: TypeAlias = IndexedSlices | bool


def rows_behind(leaves: Sequence[Leaf], tree: PyTreeDef, ids: PyTree) -> list[Behind]:
    """For each leaf of params the rows that ``ids`` name, for :func:`catch_up_rows`.

    Raises:
      ValueError: if ``ids`` do not mirror ``params``.
      TypeError: for what are no row numbers.
    """
    try:
        each = tree.flatten_up_to(ids)
    except ValueError as error:
        raise ValueError(
            "catch_up(params, state, ids): ids must mirror params, with an array of row "
            f"numbers for each table about to be read and None elsewhere; {error}"
        ) from error
    return [_entries(i, p) for i, p in zip(each, leaves, strict=True)]


def _entries(ids: ArrayLike | Behind | None, param: jax.Array) -> Behind:
    """Row numbers as a gradient without elements."""
    if ids is None or ids is True:
        return bool(ids)
    if isinstance(ids, IndexedSlices):
        shape = jnp.shape(param)
        if ids.shape == (*shape[: ids.row_axes], 0) and ids.row_axes < max(2, len(shape)):
            return ids  # as lookup_ids gives them
        raise TypeError(
            f"catch_up wants row numbers, got {ids}; rows catch up before their gradient "
            "is taken, so pass the ids that the lookup is about to read (slices.indices "
            "are those of a gradient)"
        )
    ids = jnp.asarray(ids)
    if not jnp.issubdtype(ids.dtype, jnp.integer) or not jnp.ndim(param):
        raise TypeError(
            f"catch_up wants integer row numbers of a table, got {ids.dtype}"
            f"{list(ids.shape)} for a parameter of shape {jnp.shape(param)}; pass None for "
            "what is not looked up, True for all of it"
        )
    ids, placement = ids.reshape(-1), placement_at_hand(param)
    if placement is not None:
        entries = sent_to_owners(placement, param.shape[0], ids)
        return slices_of(*entries, (param.shape[0], 0), Facts(placement=placement))
    return IndexedSlices(jnp.zeros((ids.shape[0], 0)), ids, (param.shape[0], 0))


def catch_up_rows(
    kernel: Kernel, behind: Behind, p: Any, state: Record, whole: ArrayLike, count: Any
) -> Change:
    """A parameter and its state, after the missed steps of some rows or all.

    Where all rows are meant, and none has missed a step, as in an array that each step
    moves as a whole, held ones are freed, and nothing else is done. ``whole`` is the last
    step of the array as a whole.
    """
    p, state = jax.tree.map(jnp.asarray, (p, state))
    if isinstance(behind, IndexedSlices):
        return step_rows(kernel, behind, p, state, adds=True)
    last = state["last"]
    late = RowClock.of(last, whole, count).is_late
    freed = jnp.where(RowClock(last, count).is_held & ~late, count, last)
    every_row = functools.partial(_every_row, kernel)
    return _if_any(late, every_row, p, {**state, "last": freed})  # type: ignore[return-value]


def _if_any(late: jax.Array, catch_up: Callable[..., PyTree], *operands: PyTree) -> PyTree:
    """``catch_up(*operands)`` if any row is late, else ``operands``."""
    any_late, sizes = jnp.any(late), [x.size for x in jax.tree.leaves(operands)]
    if max(sizes, default=0) <= CHUNK_ELEMENTS:
        # But on a CPU it takes longer to wait for what has been computed than to compute.
        always = {"cpu": lambda x: x, "default": jnp.ones_like}
        any_late = lax.platform_dependent(any_late, **always)
    return lax.cond(any_late, catch_up, lambda *x: x, *operands)


def as_missed(kernel: Callable[..., Change], caught_up: bool) -> MissedRows:
    """A kernel of :func:`make_missed_kernel` as a row-wise view, to be read alone."""

    def rows(p: jax.Array, state: Record, shared: PyTree) -> jax.Array:
        return _advance_rows(missed_kernel(kernel, *shared), p, state)[0]

    def whole(p: jax.Array, state: Record, shared: PyTree) -> jax.Array:
        count, _, _, last = shared
        missed = missed_kernel(kernel, *shared)
        return catch_up_rows(missed, True, p, state, last, count)[0]

    return MissedRows(rows, None if caught_up else whole)


def after(before: Partial, kernel: Kernel) -> Kernel:
    """A kernel of rows that do their missed steps before."""

    def both(before: Partial, kernel: Partial, g: Any, p: Any, state: Record) -> Change:
        move, caught_up = before(None, p, state)
        now = (p + move).astype(p.dtype), {**state, **caught_up}
        update, new = kernel(g, *now)
        return (move + update).astype(update.dtype), {**caught_up, **new}

    return Partial(both, before, kernel)


def missed_kernel(kernel: Callable[..., Change], *shared: PyTree) -> Partial:
    """``kernel(nothing, p, state)``: the missed steps of some rows of an array.

    Of frozen rows they change the state alone. ``kernel`` is that of
    :func:`make_missed_kernel`, and ``shared`` what it wants.
    """
    return Partial(lambda shared, nothing, *rows: kernel(shared, *rows), shared)


def make_missed_kernel(steps: MissedSteps) -> Callable[..., Change]:
    """``(shared, p, state) -> (move, new_state)`` of missed steps.

    ``shared`` are the count, the log, the key of the noise, and the last step of the array
    as a whole.

    A step calls it in several places, and so does what reads before it: one function for
    all of them is traced once for each shape.
    """

    @functools.partial(jax.jit, inline=True)
    def kernel(shared: PyTree, p: jax.Array, state: Record) -> Change:
        count, log, key, whole = shared
        last = access.gathered_once(state["last"])  # or a GPU copies those of all rows
        waited = waited_of(steps, log, RowClock.of(last, whole, count))
        return advanced(steps, key, waited, p, state)

    return kernel


class Waited(NamedTuple):
    """Numbers of rows that may have missed steps, ``[n]`` each."""

    rows: RowClock
    late: jax.Array  #: whether they have missed some.
    moves: jax.Array  #: whether these move them.
    own: Missed
    averaged: Missed  #: of their average.
    pulls: tuple[Any, Any]  #: of the average, then and now.


def waited_of(
    steps: MissedSteps,
    log: Log,
    rows: RowClock,
    columns: Sequence[jax.Array] = (),
) -> Waited:
    late, missed = rows.is_late, steps.missed(log, rows.count, rows.step, columns)
    return Waited(rows, late, late & ~rows.stays, *missed)


def advanced(
    steps: MissedSteps,
    key: jax.Array | None,
    waited: Waited,
    p: jax.Array,
    state: Record,
) -> Change:
    """``(move, new_state)`` of rows ``p``."""
    rows, late, moves, own, averaged, pulls = waited

    def moved(missed: Missed, p: jax.Array) -> Any:
        missed = missed.for_rows(p, float_like(p))
        move, new = steps.advance(missed, p, state)
        if key is not None:
            between = rows.step, rows.count
            move += _noise(steps, key, state["row_keys"], *between, missed.rates, p)
        # A row that missed nothing stays as it is, to the bit.
        move = access.where_rows(moves, move + missed.unknown, jnp.array(-0.0, move.dtype))
        return missed.decay, move, new

    _, move, new = moved(own, p)
    if steps.average is not None:
        mean, (fade, share, _) = state["ema"], moved(averaged, jnp.zeros_like(p))
        was, pull = (per_row(jnp.where(moves, x, 1.0), p) for x in pulls)
        left = (1 + fade) * (mean - was * p) - steps.average * share
        new = {**new, "ema": access.where_rows(late, left + pull * (p + move), mean)}
    return move, {**in_dtypes_of(state, new), "last": rows.after(rows.count)}


def is_small(steps: MissedSteps, p: Any) -> bool:
    """Whether :func:`catch_up_small` is for an array, as far as is known."""
    kind = jax.typeof(p)
    on_mesh = boundary.mesh_of(kind) is not None or varying_axes(kind)
    return 0 < p.size <= CHUNK_ELEMENTS and not (on_mesh or steps.noise)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def catch_up_small(
    steps: MissedSteps,
    count: jax.Array,
    log: Log,
    arrays: Sequence[Change],
    whole: Sequence[ArrayLike],
    own: jax.Array | None = None,
) -> tuple[Change, ...]:
    """Small arrays and their state, after the missed steps of all rows, if there are any.

    ``whole`` are their last steps as a whole; those of rows stay. There are no missed steps
    in arrays that each step moves as a whole, so one branch is for all of them, and
    their numbers are one vector's: XLA compiles these as slowly as the rest. ``own`` are
    the columns ``[*V, lines]`` of the rows of a single array that bring them along.
    """
    pairs = zip(arrays, whole, strict=True)
    marks = [RowClock.of(state["last"], n, count).marks for (_, state), n in pairs]
    rows = RowClock(jnp.concatenate([x.reshape(-1) for x in marks]), count)
    every = rows.marks.shape

    def every_row(*arrays: Change) -> tuple[Change, ...]:
        columns = () if own is None else tuple(own.reshape(-1, own.shape[-1]).T)
        waited, at = waited_of(steps, log, rows, columns), 0
        new: list[Change] = []
        for (p, state), mine in zip(arrays, marks, strict=True):
            these = slice(at, at + mine.size)
            part = lambda x: x[these].reshape(mine.shape) if np.shape(x) == every else x  # noqa: B023, E731
            numbers = jax.tree.map(part, waited)
            move, now = advanced(steps, None, numbers, p, state)
            now = {**state, **now, "last": state["last"]}
            new.append(((p + move).astype(p.dtype), now))
            at += mine.size
        return tuple(new)

    return _if_any(rows.is_late, every_row, *arrays)  # type: ignore[return-value]


def _advance_rows(kernel: Kernel, p: jax.Array, state: Record) -> Change:
    """A parameter and its state, or rows of them, after their missed steps."""
    move, new = kernel(None, p, state)
    return (p + move).astype(p.dtype), {**state, **new}


def averaging(rule: Rule, decay: float) -> Rule:
    """The rule that keeps an average of the parameters too, its state array ``ema``."""
    missed = rule.missed or MissedSteps(lambda missed, p, state: (0 * p, {}), 0.0)
    momentum = max((float(x.ratio) for x in missed.series), default=0.0)
    if missed.keeps_rates or rule.update_slices is not None or momentum > decay:
        raise ValueError(
            "params_ema has no closed form of what rows average in steps that they miss, "
            'for adafactor, lion and proximal_adagrad with untouched="exact", and '
            "averages that fade faster than momentum does, got "
            f"decay={decay:g} and momentum that fades by {momentum:.4f}"
        )
    left, rates = 1.0, (missed.learning_rate, missed.weight_decay)
    if missed.decays and not any(isinstance(x, jax.core.Tracer) for x in rates):
        with jax.ensure_compile_time_eval():
            steps = jnp.unique(jnp.geomspace(1, 1e5, 400).astype(jnp.int32))
            decays = jax.vmap(lambda count: missed.decay(count, np.dtype("f4")))(steps - 1)
            left = float(1 - decays.max())
    if not left >= decay - 1e-6:  # nor NaN, where nothing would be left
        raise ValueError(
            f"params_ema wants rows that decay no faster than the average, in each of the "
            f"first 100,000 steps, got weight decay that leaves {left:g} of a row, and "
            f"decay={decay:g}; wanted learning_rate * weight_decay up to {1 - decay:g}"
        )
    mean = lambda p: jnp.array(p, jnp.promote_types(p.dtype, "float32"), copy=True)  # noqa: E731
    missed, state = dataclasses.replace(missed, average=decay), {**rule.state, "ema": mean}
    return dataclasses.replace(rule, state=state, missed=missed, linear=False)


def _every_row(kernel: Kernel, p: jax.Array, state: Record) -> Change:
    """The kernel on all rows, as many at a time as stay in the cache.

    They are gathered and scattered: of slices that are read and written XLA copies the
    whole arrays in every turn of a loop. Not on a mesh, where each device would ask the
    others for its rows.
    """
    axes = max(1, p.ndim - 1)
    mesh = boundary.mesh_of(jax.typeof(p))
    on_mesh = mesh is not None and mesh.size > 1
    if p.ndim == 0 or p.size <= CHUNK_ELEMENTS or on_mesh:
        return _advance_rows(kernel, p, state)
    height = access.rows_numbered(p.shape, axes)
    chunk = max(1, CHUNK_ELEMENTS * height // p.size)
    plan = Plan("in chunks", height, height, sums=False, chunk=chunk, why="all catch up")
    rows = jnp.arange(height, dtype=access.index_dtype(height, np.dtype(np.int32)))
    nothing = jnp.zeros((height, 0))
    operands = plan, rows, nothing, p, state
    _, *new = execute(kernel, p.shape[:axes], *operands, adds=True)
    return tuple(jax.tree.map(boundary.row_major_array, new))
