"""Catching up: untouched rows move to where a dense optimizer would have them.

Every row remembers the last step it did. Before it is read it does the missed ones in
closed form (``catch_up``), and before parameters are saved or evaluated all rows do
(``flush``).
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

from jslices._jax import flatten, varying_axes
from jslices._place import boundary
from jslices._place.placement import placement_at_hand
from jslices._rows import access
from jslices._rows.sums import number_by_first, number_by_runs
from jslices._slices import Facts, IndexedSlices, rows_at, sent_to_owners, slices_of
from jslices._typing import Arrays, Leaf, Params, PyTree
from jslices.optim.engine.missed import MissedSteps
from jslices.optim.engine.rule import Kernel, Rule, decayed, next_count, per_row, row_like
from jslices.optim.engine.step import Plan, execute, read_rows, step_rows

#: Elements of a table that ``flush`` brings up to date at a time.
CHUNK_ELEMENTS = 1 << 18

#: Minus this, the last step of a row that never moves.
FROZEN = np.iinfo(np.int32).max

#: Of a traced step of rows that have not caught up, as far as is known.
STALE = (
    'a step of rows that must catch up (untouched="exact", or weight_decay_mode="all") is '
    "traced, and before it no row catches up by this tx: a row that misses a step becomes "
    "NaN in the next that reads it. Type jax.jit(js.train_step(loss, tx)), or, before the "
    "gradient is taken, params, state = tx.catch_up(params, state, ids). Rows of a "
    "HostTable catch up by its tx, at that rate: step with the same one"
)


class Clock(NamedTuple):
    """The last step of each row, and what it has to remember of it.

    ``~last`` says that the row did not move since: a transformation holds it, and whatever
    catches it up without that transformation frees it. ``FROZEN - last``: it never moves.
    """

    last: Any  #: like params, int32 ``[V]`` (``row_like``): the last step of each row.
    snapshot: Any  #: like params, some of floats ``[V]``: see :class:`MissedSteps`.
    run: jax.Array  #: ``[2]``: how far a schedule has run; with an average its pull too.
    key: jax.Array | None = None  #: uint32 ``[2]``: of the noise of all steps, secret.


def new_clock(params: Params, missed: Sequence[MissedSteps]) -> Clock:
    """The clock before the first step of optimizers whose rows catch up."""
    leaves, tree = flatten(params)
    widest = jnp.result_type(np.float32, *map(_float_like, leaves))
    start, run = jnp.zeros((), jnp.int32), jnp.zeros((2,), widest)
    if missed and missed[0].average is not None:
        run = jnp.append(run, 1)
    last = [row_like(p, 0, jnp.int32) for p in leaves]

    # A learning rate that is an array is of the mesh of a step's inside.
    @boundary.on_any_mesh(boundary.like_first)
    def before(run: jax.Array, start: jax.Array) -> list[list[jax.Array]]:
        return [
            [x for part in steps.parts for x in part.around(start, run).before]
            for steps in missed
        ]

    snapshot = [
        tuple(row_like(p, x, _float_like(p)) for x in numbers)
        for numbers, p in zip(before(run, start), leaves, strict=True)
    ]
    noise = missed[0].noise if missed else None
    key = None if noise is None else jnp.array(noise[1])
    return Clock(tree.unflatten(last), tree.unflatten(snapshot), run, key)


def row_names(path: str, last: Any, param: Any) -> Any:
    """What noise knows rows by, uint32 ``[..., 2]``; XLA makes only those that are read.

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
    steps: MissedSteps, key: Any, names: Any, first: Any, last: Any, variance: Any, p: Any
) -> jax.Array:
    """The noise of rows ``p`` in the steps after ``first`` up to ``last``.

    A function of the row and these two numbers: the same in a peek and in the step that
    follows it, in chunks and on every mesh, and independent for any other steps. One draw
    for all rows that are there would be neither.
    """
    assert steps.noise is not None
    names = names.reshape(-1, 2)
    width = p.size // max(len(names), 1)
    key = jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), last)

    def draw(name: jax.Array, first: jax.Array) -> jax.Array:
        one = functools.reduce(jax.random.fold_in, (*name, first), key)
        return jax.random.normal(one, (width,), _float_like(p))

    first = jnp.broadcast_to(first, len(names)) if first.ndim == 0 else first.reshape(-1)
    deviation = steps.noise[0] * jnp.sqrt(variance).astype(_float_like(p))
    return deviation * jax.vmap(draw)(names, first).reshape(p.shape)


def never_moves(last: jax.Array) -> jax.Array:
    return last > FROZEN // 2


def last_done(last: jax.Array) -> jax.Array:
    """The last steps of rows, of frozen ones as well."""
    return jnp.where(never_moves(last), FROZEN - last, jnp.maximum(last, ~last))


def _float_like(p: Any) -> np.dtype:
    """The dtype of numbers that missed steps take of a parameter: float32 or float64."""
    return np.dtype("f8" if jnp.result_type(p) in ("float64", "complex128") else "f4")


def with_clock(
    kernel: Kernel,
    steps: MissedSteps,
    count: jax.Array,
    clock: Clock,
    missed: Partial | None,
) -> Kernel:
    """Extend a kernel by the arrays of a clock, in which rows remember the step.

    ``missed`` is what rows do before it; without it a row that has not caught up gets NaN:
    under jit nothing can be raised, and a step from a stale row must not pass for a right
    one.
    """
    step, (*_, run, key) = next_count(count), clock
    snapshot = [x for part in steps.parts for x in part.around(count, run).after]
    average = steps.average

    def timed(missed: Any, g: jax.Array, p: Any, *rest: jax.Array) -> Arrays:
        names, arrays, last, old = _clock_apart(rest, len(snapshot), key)
        stays = never_moves(last)
        moves, held, before = ~stays, last < 0, None
        if missed is None:
            moves &= last_done(last) == count
        else:  # which frees them
            before, *later = missed(None, p, *rest)
            p, arrays = (p + before).astype(p.dtype), later[: len(arrays)]
            held = jnp.zeros_like(held)
        if average is not None:
            *arrays, mean = arrays
        update, *new = kernel(g, p, *arrays)
        if key is not None:
            variance = steps.pace(step[None], run.dtype)[0]
            update += _noise(steps, key, names, count, step, variance, update)
        # x + -0.0 is x for every x, and 0.0 for -0.0 + 0.0.
        wrong = jnp.where(per_row(stays, update), -0.0, jnp.nan)
        update = access.where_rows(moves, update, wrong.astype(update.dtype))
        if average is not None:  # to where held rows are
            now = p + access.where_rows(~held, update, jnp.zeros((), update.dtype))
            new.append(decayed(mean, now, average).astype(mean.dtype))
        if before is not None:
            update = (before + update).astype(update.dtype)
        # The clock waits for the gradient, which waits for all reads (value_and_grad).
        first = g[(0,) * g.ndim].real if g.size else 0
        return update, *new, *_now(step, snapshot, last, old, never=first > jnp.inf)

    return Partial(timed, missed)


def refuse_stale(
    grads: Sequence[Leaf], last: Sequence[jax.Array], count: jax.Array
) -> None:
    """Raise for rows that have not caught up; no value may be traced."""
    tables = [(g, steps) for g, steps in zip(grads, last, strict=True) if g is not None]
    for (_, steps), (rows, late) in zip(tables, _late(tables, count), strict=True):
        if isinstance(late, jax.core.Tracer):  # all is known, but something is traced
            continue
        behind = np.asarray(late)
        if behind.any():
            row = int(rows.reshape(-1)[int(np.argmax(behind))])
            before = int(last_done(jnp.ravel(steps)[row]))
            raise ValueError(
                f"row {row} did its last step at {before}, the optimizer has done "
                f'{int(count)}: with untouched="exact" rows catch up before they are read: '
                "params, state = tx.catch_up(params, state, ids), or all of them by "
                "tx.flush(params, state)"
            )


@boundary.one_program
@boundary.on_any_mesh(lambda *args: None)
def _late(
    tables: Sequence[tuple[Leaf, jax.Array]], count: jax.Array
) -> list[tuple[jax.Array, jax.Array]]:
    """For each gradient its rows ``[n]``, and which of them have not caught up."""
    results = []
    for grad, last in tables:
        steps = jnp.atleast_1d(last)
        # A row of several numbers, of which each has a step of its own.
        rows = jnp.arange(steps.size).reshape(steps.shape)
        if isinstance(grad, IndexedSlices):
            height = access.rows_numbered(steps.shape, grad.row_axes)
            at = access.canonical_indices(grad.indices, height)
            rows, steps = (
                rows_at(x, at, fill_value=FROZEN, row_axes=grad.row_axes)
                for x in (rows, steps)
            )
        results.append((rows, (last_done(steps) != count) & ~never_moves(steps)))
    return results


#: The rows of a parameter that catch up; True for all of them, False for none.
Behind: TypeAlias = IndexedSlices | bool


def rows_behind(leaves: Sequence[Leaf], tree: PyTreeDef, ids: PyTree) -> list[Behind]:
    """For each leaf of params the rows that ``ids`` name, as :func:`caught_up` takes them.

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


def caught_up(
    kernel: Kernel,
    behind: Behind,
    read: Sequence[ArrayLike],
    kept: Sequence[ArrayLike],
    clock_at: int,
    count: jax.Array,
) -> Arrays | None:
    """A parameter and what is kept with it, after the missed steps of some rows or all.

    Where all rows are meant, and none has missed a step, as in an array that each step
    moves as a whole, held ones are freed, and nothing else is done. The parameter is the
    first that is ``read``; ``kept[clock_at]`` are the last steps.
    """
    if behind is False:
        return None
    old = [jnp.asarray(x) for x in read], [jnp.asarray(x) for x in kept]
    if behind is not True:
        return step_rows(kernel, behind, *old, adds=True)
    last = old[1][clock_at]
    late = last_done(last) < count
    old[1][clock_at] = jnp.where((last < 0) & ~late, ~last, last)
    every_row = functools.partial(_every_row, kernel)
    as_it_is = lambda read, kept: (read[0], *kept)  # noqa: E731

    def if_late(*arrays: list[jax.Array]) -> Arrays:
        return lax.cond(jnp.any(late), every_row, as_it_is, *arrays)  # type: ignore[no-any-return]

    if old[0][0].size > CHUNK_ELEMENTS:
        return if_late(*old)
    # But for a CPU it takes longer to wait for what has been computed than to compute.
    result: Arrays = lax.platform_dependent(*old, cpu=if_late, default=every_row)
    return result


def peeked(
    kernel: Kernel, behind: Behind, read: Sequence[ArrayLike], kept: Sequence[ArrayLike]
) -> jax.Array | None:
    """The rows ``[K, *D]`` of a parameter after their missed steps; nothing is written.

    An entry that is empty reads any row. The whole array where all rows are meant.
    """
    if behind is False:
        return None
    old = [jnp.asarray(x) for x in (*read, *kept)]
    if behind is True:
        return _caught_up(kernel, old)[0]
    axes = behind.row_axes
    num_rows = access.rows_numbered(old[0].shape, axes)
    # As the step that follows numbers them, so that XLA finds that it reads and moves the
    # same rows, and does both once.
    indices = access.canonical_indices(behind.indices, num_rows)
    if behind.facts.distinct:
        numbers = None
    elif boundary.platform_of(*old) == "cpu":
        indices, numbers, _ = number_by_first(indices, num_rows, len(indices), False)
        numbers = jnp.minimum(numbers, len(numbers) - 1)
    else:
        indices, numbers = number_by_runs(behind.indices, num_rows)
    rows = _caught_up(kernel, [read_rows(x, indices, axes) for x in old])[0]
    # Kept, or XLA computes them again where they are read, from state written since.
    rows = lax.optimization_barrier(rows)
    if numbers is None:
        return rows
    return access.take_rows(rows, numbers, mode="promise_in_bounds")


def missed_steps(
    steps: MissedSteps, kernel: Callable[..., Arrays], count: jax.Array, clock: Clock
) -> Partial:
    """``kernel(nothing, p, *arrays, last, *snapshot)``: the missed steps of some rows.

    Of frozen rows they change the state alone. ``kernel`` is their :func:`arithmetic`.
    """
    *_, run, key = clock
    around = [part.around(count, run) for part in steps.parts]
    pairs = zip(around, steps.parts, strict=True)
    tables = [(x.table, part.after_each(run.dtype)) for x, part in pairs]
    shared = count, run, tables, [x.before for x in around], key
    return Partial(lambda shared, nothing, *arrays: kernel(shared, *arrays), shared)


def arithmetic(steps: MissedSteps) -> Callable[..., Arrays]:
    """``(shared, p, *arrays, last, *snapshot) -> (move, *new)`` of missed steps.

    A step calls it in several places, and so does what peeks before it: one function for
    all of them is traced once for each shape.
    """

    @functools.partial(jax.jit, inline=True)
    def kernel(shared: PyTree, p: jax.Array, *rest: jax.Array) -> Arrays:
        count, run, tables, before, key = shared
        now, width = [x for each in before for x in each], len(before[0])
        names, arrays, last, snapshot = _clock_apart(rest, len(now), key)
        if steps.average is not None:
            *arrays, mean = arrays
        last = access.gathered_once(last)  # or a GPU copies those of all rows
        done = last_done(last)
        late = done < count
        column, dtype = per_row(late, p), _float_like(p)
        moves = late & (done == last)

        def of_rows(x: jax.Array) -> jax.Array:
            return x.reshape(*x.shape[: x.ndim - last.ndim], *column.shape)

        def advanced(number: int, p: jax.Array, kept: Sequence[jax.Array]) -> Any:
            missed = steps.parts[number].missed(count, run, tables[number], done, kept)
            numbers = jax.tree.map(lambda x: x.astype(dtype), missed)
            missed = jax.tree.map(of_rows, numbers._replace(steps=missed.steps))
            move, *new = steps.advance(missed, p, *arrays)
            if key is not None:
                move += _noise(steps, key, names, done, count, missed.run, p)
            # A row that missed nothing stays as it is, to the bit.
            move = access.where_rows(moves, move, jnp.array(-0.0, move.dtype))
            return missed.decay, move, new

        _, move, new = advanced(0, p, snapshot[:width])
        if steps.average is not None:
            fade, share, _ = advanced(1, jnp.zeros_like(p), snapshot[width:])
            pulls = (snapshot[width - 1], run[2]) if steps.keeps_run else (1.0, 1.0)
            was, pull = (per_row(jnp.where(moves, x, 1.0), p) for x in pulls)
            rest = (1 + fade) * (mean - was * p) - steps.average * share
            new, arrays = [*new, rest + pull * (p + move)], [*arrays, mean]
        moved = [
            access.where_rows(late, x, old).astype(old.dtype)
            for x, old in zip(new, arrays, strict=True)
        ]
        return move, *moved, *_now(count, now, last, snapshot)

    return kernel


def _caught_up(kernel: Kernel, arrays: Sequence[jax.Array]) -> Arrays:
    """A parameter and what is kept with it, or rows of them, after their missed steps."""
    p = arrays[0]
    move, *new = kernel(None, *arrays)
    return (p + move).astype(p.dtype), *new


def _clock_apart(
    arrays: Sequence[jax.Array], width: int, key: jax.Array | None
) -> tuple[Any, Sequence[jax.Array], jax.Array, Sequence[jax.Array]]:
    """``(names, state arrays, last, snapshot)`` from all of them in a row."""
    before, start = len(arrays) - width, int(key is not None)
    state = arrays[start : before - 1]
    if before < 1 or not jnp.issubdtype(arrays[before - 1].dtype, jnp.integer):
        raise TypeError(
            "the clock of this state is that of an optimizer with another learning rate: "
            "one of the two has a schedule. Flush by the optimizer that made it, and "
            "type jslices.checkpoint.import_state(tx, params, slots, count)"
        )
    return arrays[0], state, arrays[before - 1], arrays[before:]


def averaging(rule: Rule, decay: float) -> Rule:
    """The rule that keeps an average of the parameters too, ``ema``: its last array."""
    missed = rule.missed or MissedSteps(lambda _, p, *state: (0 * p, *state), 0.0)
    momentum = max((float(x.ratio) for x in missed.series), default=0.0)
    if missed.run or rule.update_slices is not None or momentum > decay:
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
            left = float(np.exp(missed.pace(steps, np.dtype("f4"))).min())
    if not left >= decay - 1e-6:  # nor NaN, where nothing would be left
        raise ValueError(
            f"params_ema wants rows that decay no faster than the average, in each of the "
            f"first 100,000 steps, got weight decay that leaves {left:g} of a row, and "
            f"decay={decay:g}; wanted learning_rate * weight_decay up to {1 - decay:g}"
        )
    mean = lambda p: jnp.array(p, jnp.promote_types(p.dtype, "float32"), copy=True)  # noqa: E731
    missed, state = dataclasses.replace(missed, average=decay), {**rule.state, "ema": mean}
    return dataclasses.replace(rule, state=state, missed=missed, linear=False)


def _now(
    step: jax.Array,
    snapshot: Sequence[jax.Array],
    last: jax.Array,
    old: Sequence[jax.Array],
    never: jax.Array | bool = False,
) -> tuple[jax.Array, ...]:
    """The arrays of a clock for rows that have done ``step``.

    The new value depends on the old one, and on what is ``never`` true, on purpose: XLA may
    otherwise write it before it has read the rows, and copies the whole arrays for that.
    """
    news = (  # but for NaN they are new
        jnp.where((x != x) | never, x, new.astype(x.dtype))
        for new, x in zip(snapshot, old, strict=True)
    )
    done = jnp.maximum(last_done(last), jnp.where(never, 0, step))
    return jnp.where(never_moves(last), FROZEN - done, done), *news


def _every_row(kernel: Kernel, read: list[jax.Array], kept: list[jax.Array]) -> Arrays:
    """The kernel on all rows, as many at a time as stay in the cache.

    They are gathered and scattered: of slices that are read and written XLA copies the
    whole arrays in every turn of a loop. Not on a mesh, where each device would ask the
    others for its rows.
    """
    p = read[0]
    axes = max(1, p.ndim - 1)
    mesh = boundary.mesh_of(jax.typeof(p))
    on_mesh = mesh is not None and mesh.size > 1
    if p.ndim == 0 or p.size <= CHUNK_ELEMENTS or on_mesh:
        return _caught_up(kernel, (*read, *kept))
    height = access.rows_numbered(p.shape, axes)
    chunk = max(1, CHUNK_ELEMENTS * height // p.size)
    plan = Plan("in chunks", height, height, sums=False, chunk=chunk, why="all catch up")
    rows = jnp.arange(height, dtype=access.index_dtype(height, np.dtype(np.int32)))
    nothing = jnp.zeros((height, 0))
    operands = plan, rows, nothing, read, kept
    _, *new = execute(kernel, p.shape[:axes], *operands, adds=True)
    return tuple(map(boundary.row_major_array, new))
