"""The clock of an optimizer whose rows catch up: the last step of each row, and the log."""

import contextlib
import contextvars
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jslices._jax import flatten, is_staged, is_symbolic, varying_axes
from jslices._place import boundary
from jslices._rows import access
from jslices._slices import IndexedSlices, each_shard, is_slices
from jslices._typing import Params, PyTree, State
from jslices.optim.engine.missed import MissedSteps, hash_of, is_empty
from jslices.optim.engine.rule import row_like

#: A log has at least so many columns; of taller tables one for each so many rows, so that
#: a step brings that many other rows up to date.
SHORTEST_LOG, ROWS_PER_COLUMN = 1 << 14, 1024

#: Whether logs are as short as a step needs them: a host keeps what it takes from them.
_SHORT = contextvars.ContextVar("short_logs", default=False)

#: Steps of rows that stay are kept modulo this, in integers below zero.
_CYCLE = 1 << 30

#: What to do with a clock of an earlier format.
OLD_CLOCK = (
    "The state is of an earlier version of jslices: with that version params, state = "
    'tx.flush(params, state), and jslices.Saver().save({"params": params, "state": state}, '
    "path); here saved = jslices.Saver().restore(path), and params, state = jslices."
    'checkpoint.resize_rows(tx, saved["params"], saved["state"], saved["params"])'
)
#: What to do with a clock by other numbers.
OTHER_NUMBERS = (
    "the state is of an exact optimizer with other numbers (momentum, b1, b2, eps, ...), "
    "by which rows that are behind catch up: with that one params, state = tx.flush("
    "params, state), then with this one params, state = "
    "jslices.checkpoint.resize_rows(tx, params, state, params)"
)


class Clock(NamedTuple):
    """The last steps of rows, and what the last steps know of those after them.

    A row did its last step with the whole array, or by itself, whichever came later:
    :meth:`RowClock.of`.
    """

    last: PyTree  #: like params, ``[V]`` (``row_like``): the marks of a :class:`RowClock`.
    whole: jax.Array  #: int32, one a parameter: its last step as a whole, or -1.
    #: ``[lines, L]``, of each rule, or None: see :class:`MissedSteps`.
    log: tuple[jax.Array | None, ...]
    key: jax.Array | None = None  #: uint32 ``[2]``: of the noise of all steps, secret.
    #: Of rows from elsewhere, their columns ``[U, lines]``, for each log.
    own: tuple[jax.Array | None, ...] | None = None
    #: int32 ``[2]``: a hash of the numbers that made the log, and the step since when.
    numbers: jax.Array | None = None


def new_clock(params: Params, missed: Sequence[MissedSteps]) -> Clock:
    """The clock before the first step of optimizers whose rows catch up."""
    leaves, tree = flatten(params)
    widest = jnp.result_type(np.float32, *map(float_like, leaves))
    last = [row_like(p, 0, jnp.int32) for p in leaves]
    sizes = (x.size for x in last if not is_symbolic(x.size))
    num_rows = max(sizes, default=0)
    columns = max(SHORTEST_LOG, num_rows // ROWS_PER_COLUMN) * (not _SHORT.get())
    logs = tuple(steps.opened(columns, widest) for steps in missed)
    noise = missed[0].noise if missed else None
    key = None if noise is None else jnp.array(noise[1])
    whole = jnp.full(max(1, len(leaves)), -1, jnp.int32)  # Orbax wants elements
    numbers = None if _SHORT.get() else jnp.array([hash_of(missed), 0], jnp.int32)
    return Clock(tree.unflatten(last), whole, logs, key, None, numbers)


@contextlib.contextmanager
def short_logs() -> Iterator[None]:
    """Clocks that are made in this context have short logs."""
    token = _SHORT.set(True)
    try:
        yield
    finally:
        _SHORT.reset(token)


def with_columns(state: State, columns: Sequence[jax.Array]) -> State:
    """The state of rows that bring their columns along, ``[U, lines]`` for each log."""
    left = iter(columns)

    def with_own(clock: Clock, count: jax.Array) -> Clock:
        if not jax.tree.leaves(clock.last):  # of no parameter
            return clock
        own = tuple(None if is_empty(x) else next(left) for x in clock.log)
        return clock._replace(own=own)

    return map_clocks(with_own, state)


def float_like(p: Any) -> np.dtype:
    """The dtype of numbers that missed steps take of a parameter: float32 or float64."""
    return np.dtype("f8" if jnp.result_type(p) in ("float64", "complex128") else "f4")


# --- The last steps of rows ---------------------------------------------------------------


class RowClock(NamedTuple):
    """The last steps of rows, after ``count`` steps of their optimizer.

    A mark is the last step of a row that moves. A row that stays has a mark below zero, of
    its last step modulo 2**30: it is held, by a transformation that leaves it out, and
    whatever catches it up without that transformation frees it; or it is frozen for good.
    """

    marks: jax.Array  #: int32 ``[n]``
    count: Any  # type: ignore[assignment]  #: int32 ``[]``

    @classmethod
    def of(cls, last: ArrayLike, whole: ArrayLike, count: Any) -> "RowClock":
        """Of rows ``last`` of an array whose last step as a whole was ``whole``.

        Which frees rows that were held until then.
        """
        rows, whole = cls(jnp.asarray(last), count), jnp.asarray(whole)
        as_whole = jnp.where(rows.is_frozen, _frozen(whole), whole)
        return cls(jnp.where(rows.step <= whole, as_whole, rows.marks), count)

    @property
    def step(self) -> jax.Array:
        """The last step of each row, whether it moved in it or not."""
        ago = (self.count - _in_cycle(self.marks)) & (_CYCLE - 1)
        return jnp.where(self.stays, self.count - ago, self.marks)

    @property
    def stays(self) -> jax.Array:
        """Whether a row is held or frozen."""
        return self.marks < 0

    @property
    def is_held(self) -> jax.Array:
        return self.stays & ~self.is_frozen

    @property
    def is_frozen(self) -> jax.Array:
        return self.marks < -_CYCLE

    @property
    def is_late(self) -> jax.Array:
        """Whether a row has missed steps."""
        return self.step < self.count

    @property
    def held(self) -> jax.Array:
        """The marks of these rows, held from now on, frozen ones too."""
        return -1 - _in_cycle(self.marks)

    @property
    def frozen(self) -> jax.Array:
        """The marks of these rows, frozen from now on."""
        return _frozen(self.marks)

    def after(self, step: jax.Array) -> jax.Array:
        """The marks of these rows, moved by ``step``; frozen ones stay so.

        They depend on the old ones on purpose: XLA may otherwise write them before it has
        read the rows, and copies the whole array for that.
        """
        return jnp.where(self.is_frozen, _frozen(step), jnp.maximum(self.marks, step))

    def after_all(self) -> jax.Array:
        """The marks of rows that have done all steps; those that stay do so."""
        count = RowClock(jnp.asarray(self.count), self.count)
        marks = jnp.where(self.is_frozen, count.frozen, count.held)
        return jnp.where(self.stays, marks, self.count)


#: The mark of a frozen row that did no step.
FROZEN = -1 - _CYCLE


def _frozen(step: jax.Array) -> jax.Array:
    return FROZEN - _in_cycle(step)


def _in_cycle(marks: jax.Array) -> jax.Array:
    return jnp.where(marks < 0, ~marks, marks) & (_CYCLE - 1)


def _has_clock(x: PyTree) -> bool:
    return isinstance(getattr(x, "clock", None), Clock)


def is_without_clocks(state: State) -> bool:
    """Whether rows catch up in no optimizer that a state is of."""
    return not any(map(_has_clock, jax.tree.leaves(state, is_leaf=_has_clock)))


def map_clocks(change: Callable[[Clock, jax.Array], Clock], state: State) -> State:
    """The state with every clock in it as ``change(clock, count)`` makes it."""

    def changed(x: PyTree) -> PyTree:
        return x._replace(clock=change(x.clock, x.count)) if _has_clock(x) else x

    is_leaf = lambda x: _has_clock(x) or is_slices(x)  # noqa: E731
    return jax.tree.map(changed, state, is_leaf=is_leaf)


def by_row(clock: Clock, count: jax.Array) -> Clock:
    """The same clock, for rows that go apart: each keeps the last step of the whole."""
    leaves, tree = flatten(clock.last)
    steps = [RowClock.of(x, clock.whole[i], count).marks for i, x in enumerate(leaves)]
    return clock._replace(last=tree.unflatten(steps), whole=jnp.full_like(clock.whole, -1))


def has_rows_behind(state: Any) -> bool:
    """Whether rows of an optimizer have missed steps; nothing may be traced."""
    clock = getattr(state, "clock", None)
    rows = [] if clock is None else jax.tree.leaves(by_row(clock, state.count).last)
    return any(RowClock(x, state.count).is_late.any() for x in rows)


@functools.partial(jax.jit, inline=True)
def flushed(clock: Clock, count: jax.Array) -> Clock:
    """The clock after all rows have caught up, whatever they did before."""
    clock = by_row(clock, count)
    done = lambda x: RowClock(x, count).after_all()  # noqa: E731
    return clock._replace(last=jax.tree.map(done, clock.last))


# --- Rows in turn -------------------------------------------------------------------------


@boundary.one_program
def with_rows_in_turn(
    rows: IndexedSlices, last: jax.Array, count: jax.Array, *, columns: int
) -> IndexedSlices:
    """``rows``, and a few others in turn, so that a log forgets no step that a row needs.

    Each step names about ``2 * V / L`` more, with values of zeros; on a mesh each device as
    many of its own. A row comes twice while a log lasts, as tables may be resized, or split
    otherwise, and the order of rows changes. Rows that do not move need no log, and stay as
    they are. A short log is one of rows that a host keeps, with the log of all steps.
    """
    if columns < SHORTEST_LOG:
        return rows
    period = (columns - 1) // 2

    def local(rows: IndexedSlices, last: jax.Array, count: jax.Array) -> IndexedSlices:
        axes = rows.row_axes
        height = access.rows_numbered(last.shape, axes)
        if not access.is_below(0, height):
            return rows
        entries, more = rows.indices.shape[0], -(-height // period)
        dtype = access.index_dtype(height, np.dtype(rows.indices.dtype))
        # In so many of the steps of a period, and the last of them, as a run may be over
        # before.
        turns = -(-height // more)
        first = (count.astype(dtype) % period - (period - turns)) * more
        turn = first + jnp.arange(more, dtype=dtype)
        near = jnp.clip(turn, 0, height - 1)
        marks = access.take_rows(last, near, mode="promise_in_bounds", row_axes=axes)
        stays = RowClock(marks.reshape(more, -1), count).stays
        waits = jnp.all(stays, axis=1) | (near != turn)
        turn = jnp.where(waits, height, turn)
        # Padded and added: what is concatenated is a kernel of its own on a GPU.
        row = [(0, 0)] * (rows.values.ndim - 1)
        both = jnp.pad(rows.indices.astype(dtype), (0, more)), jnp.pad(turn, (entries, 0))
        return rows.of(
            jnp.pad(rows.values, ((0, more), *row)),
            both[0] + both[1],
            rows.dense_shape,
            rows.facts._replace(distinct=False, named=None),
        )

    if rows.facts.placement is None:
        return local(rows, last, count)
    return each_shard(local, rows, last, shared=(count,))  # type: ignore[no-any-return]


#: Whether a step is traced as a branch.
IN_BRANCH: contextvars.ContextVar[bool] = contextvars.ContextVar("branch", default=False)


def after_all(count: jax.Array, stepped: PyTree) -> jax.Array:
    """``count``, but not before all arrays have been stepped.

    Rows are stepped by the log, and if XLA:CPU may write it before, it copies the log. But
    in a branch it copies each array of which a number is read here.
    """
    if not is_staged() or IN_BRANCH.get():
        return count
    arrays = jax.tree.leaves(stepped)
    arrays = [x for x in arrays if x.size and jnp.issubdtype(x.dtype, np.inexact)]
    types = [jax.typeof(x) for x in arrays]
    if any(map(boundary.mesh_of, types)) or varying_axes(*types):
        return count
    firsts = (x[(0,) * x.ndim].real for x in arrays)
    never = functools.reduce(operator.or_, (x > np.inf for x in firsts), False)
    return jnp.where(never, 0, count)
