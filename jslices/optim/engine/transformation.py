"""Optimizers of trees of arrays, made from a rule.

A rule knows one array, or some rows of it; trees are made lists here. ``_arrays`` has each
parameter with its record of the state and its clock, ``_kernels`` the arithmetic,
``_step_leaf`` runs it, by ``step_rows`` where the gradient is rows, and ``_with_arrays``
puts back what changed. Rows that no gradient touches stay as they are, and a parameter and
its state where the gradient is None.

The log is written when all leaves are stepped (``_ticked``): XLA:CPU copies it otherwise.
Begin with ``_step``. A lazy optimizer needs nothing of "rows that catch up".
"""

import collections
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial, PyTreeDef
from jax.typing import ArrayLike

from jslices._arguments import check_array, is_function, refuse_host_memory, shown
from jslices._densify import warn_at_line
from jslices._grad.now import as_now
from jslices._jax import broadcast_prefix, flatten, is_staged, traces, usual_promotion
from jslices._place.boundary import laid_out_as, on_any_mesh, platform_of, shardings_of
from jslices._place.hints import hint_many_tables, warn_of_columns
from jslices._slices import IndexedSlices, is_slices
from jslices._typing import Change, Gradients, Key, Leaf, Params, PyTree, Record, State
from jslices.optim.engine import catch_up as exact
from jslices.optim.engine import protocol
from jslices.optim.engine.boxes import boxed_anew, unboxed, within_boxes
from jslices.optim.engine.checks import (
    Shapes,
    arrays_of,
    check_shapes,
    check_state,
    checked_gradient,
)
from jslices.optim.engine.clock import (
    OTHER_NUMBERS,
    Clock,
    after_all,
    has_rows_behind,
    new_clock,
    with_rows_in_turn,
)
from jslices.optim.engine.missed import Log, MissedSteps, hash_of, is_empty
from jslices.optim.engine.now import Reading, current_reading
from jslices.optim.engine.numbers import next_count, zero_count
from jslices.optim.engine.protocol import GradientTransformation
from jslices.optim.engine.rule import Kernel, Rule, Step, in_dtypes_of, row_of
from jslices.optim.engine.step import Plan, choose_plan, step_rows


def transformation(
    state_type: type[State],
    rule: Rule,
    *,
    other: Rule | None = None,
    mask: PyTree = None,
) -> GradientTransformation:
    """The optimizer of a rule.

    Args:
      state_type: makes its state from ``count``, a tree for each of the rule's state
        arrays, and ``clock`` if its rows catch up.
      rule: the arithmetic.
      other: the arithmetic for leaves that ``mask`` leaves out (no weight decay, say).
      mask: bools in the structure of params or a prefix of it, or a function from params
        to that; None means every leaf.

    In ``update``, a None gradient has update None and keeps its state. Rows of the state
    that no gradient touches are neither read nor written.
    """
    mask = mask if is_function(mask) else unboxed(mask)
    run = _RuleOnTrees(state_type, rule, rule if other is None else other, mask)
    tx = GradientTransformation(
        run.init, run.update, apply=run.apply, plan=run.plan, averaged=run.averaged
    )
    if rule.missed is None:
        return tx
    return tx.replace(catch_up=run.catch_up, check=run.check)


@functools.cache
def _averaging(state_type: Any) -> Any:
    """The state of an optimizer that keeps an average as well: the same class each time."""
    names = dict.fromkeys((*state_type._fields, "clock", "ema"))
    make: Any = collections.namedtuple  # mypy wants literal names
    kind = make(state_type.__name__, names, defaults=names.values())
    kind.without_average = state_type
    kind.__reduce__ = lambda state: (_unpickled, (state_type, *state))
    return kind


def _unpickled(state_type: Any, *parts: PyTree) -> Any:
    return _averaging(state_type)(*parts)


class _OfClock(NamedTuple):
    """What the clock has of an array, besides the last steps of its rows."""

    log: Log  #: of its rule, and since when it is by its numbers.
    whole: ArrayLike  #: its last step as a whole, or -1.
    number: int  #: of the parameter, among those that the state is of.
    own: jax.Array | None  #: the columns of its rows, if they bring them along.


class _Array(NamedTuple):
    """A parameter, and what is kept with it."""

    path: str  #: of the leaf, as JAX writes it, for errors.
    rule: Rule
    p: Any
    state: Record  #: with ``"last"`` if its rows catch up, and ``"row_keys"`` if by noise.
    of_clock: _OfClock | None  #: if its rows catch up.

    @property
    def clock(self) -> _OfClock:
        assert self.of_clock is not None
        return self.of_clock


class _RuleOnTrees:
    """A rule, run on trees of arrays and IndexedSlices."""

    def __init__(
        self, state_type: type[State], rule: Rule, other: Rule, mask: PyTree
    ) -> None:
        self.state_type, self.rule, self.other, self.mask = state_type, rule, other, mask
        self.names = tuple(rule.state)
        self.fields = self.names if rule.missed is None else (*self.names, "clock")
        self.state_shapes = functools.cache(_state_shapes)
        self.missed_kernels = functools.cache(exact.make_missed_kernel)
        self.missed_views = functools.cache(exact.as_missed)
        #: By the trace in which rows caught up, None outside: whether a step followed.
        self.caught_up: dict[Any, bool] = {}

    def averaged(self, decay: float) -> GradientTransformation:
        """The optimizer that keeps an average of its parameters, ``ema`` in its state."""
        own, other = (exact.averaging(x, decay) for x in (self.rule, self.other))
        kind = _averaging(self.state_type)  # type: ignore[arg-type]
        return transformation(kind, own, other=other, mask=self.mask)

    @usual_promotion
    def init(self, params: Params) -> State:
        in_boxes, params = params, unboxed(params)
        leaves, tree = flatten(params, is_leaf=is_slices)
        paths = protocol.paths_of(tree)
        for path, p in zip(paths, leaves, strict=True):
            protocol.refuse_slices(path, p)
        rules = self._rules(params, tree)
        if self.rule.update_slices is not None:
            protocol.refuse_stacked(params)
        for path, p in zip(paths, leaves, strict=True):
            name = f"tx.init(params): the parameter{path}"
            check_array(name, p)
            if jnp.issubdtype(getattr(p, "dtype", np.float32), jax.dtypes.extended):
                raise TypeError(f"{name}: wanted an array of numbers, got {shown(p)}")
            if not isinstance(p, jax.core.Tracer):
                refuse_host_memory(name, p)
            protocol.check_width(name, jnp.result_type(p))
            warn_of_columns(path, p)
        state = {}
        for name in self.names:
            starts = [rule.state[name] for rule in rules]
            pairs = zip(starts, leaves, strict=True)
            arrays = tree.unflatten([laid_out_as(p, start(p)) for start, p in pairs])
            state[name] = boxed_anew(in_boxes, starts, arrays)
        if self.rule.missed is not None:
            clock = new_clock(params, self._missed_of_rules)
            last = boxed_anew(in_boxes, [row_of(0)] * len(rules), clock.last)
            state["clock"] = clock._replace(last=last)
        return self.state_type(count=zero_count(), **state)

    # --- a step ---------------------------------------------------------------------------

    @within_boxes(0, 1)
    def update(
        self,
        grads: Gradients,
        state: State,
        params: Params = None,
        at_now: PyTree = None,
    ) -> tuple[Gradients, State]:
        """What :meth:`apply` adds, and the new state."""
        return self._step(protocol.left_to_xla(grads, state), state, params, at_now, False)

    @within_boxes(2, 1)
    def apply(
        self,
        grads: Gradients,
        state: State,
        params: Params,
        key: Key | None = None,
        at_now: PyTree = None,
    ) -> tuple[Params, State]:
        if key is not None:  # each row is rounded once, when all is added
            return protocol.apply_from_update(self.update)(
                grads, state, params, key, at_now=at_now
            )
        return self._step(protocol.left_to_xla(grads, state), state, params, at_now, True)

    @on_any_mesh(lambda _, *args: protocol.shardings_of_step(*args, adds=args[-1]))
    @usual_promotion
    def _step(
        self, grads: Gradients, state: State, params: Params, at_now: PyTree, adds: bool
    ) -> tuple[PyTree, State]:
        """``(params, state)`` after a step, or the updates where it ``adds`` nothing."""
        check_state(state, self.state_type, self.fields)
        protocol.refuse_nothing("tx.update", grads, (params, state._replace(count=None)))
        protocol.refuse_alone("tx.update", grads, params)
        is_now = self._now_flags(at_now, grads)
        reads_params = self.rule.reads_params or any(is_now) or "ema" in self.names
        reads_params |= adds and grads is not None
        if params is None and (reads_params or self.mask is not None):
            raise ValueError(
                "this optimizer needs the parameters as well, for its weight decay or its "
                "norms: tx.update(grads, state, params)"
            )
        leaves, tree = flatten(grads, is_leaf=protocol.is_leaf)
        rows = [x for x in leaves if is_slices(x) and not protocol.has_no_rows(x)]
        if is_staged():
            hint_many_tables((x.values.shape[1:], str(x.dtype)) for x in rows)
        stepped, new, as_whole, by_log = [], [], [], []
        kernel_of, count = self._kernels(state), state.count
        params_of = _parameters(tree, params, reads_params)
        arrays = self._arrays(state, params, tree, params_of)
        for each, grad, does_missed in zip(arrays, leaves, is_now, strict=True):
            shapes = functools.partial(self.state_shapes, each.rule)
            mine = {name: each.state[name] for name in self.names}
            grad = checked_gradient(each.path, grad, each.p, mine, shapes)
            by_row = isinstance(grad, IndexedSlices)
            if each.of_clock is not None and by_row:
                is_unread = protocol.has_no_rows(grad) and adds and each.p is not None
                does_missed |= is_unread
                if does_missed:
                    # Rows of it may be read without gradient, before those of the others.
                    now = after_all(count, leaves) if is_unread else count
                    grad = self._with_rows_in_turn(each, grad, now)
            kernel = kernel_of(each, by_row)
            if does_missed:
                kernel = exact.after(self._missed_kernel(state, each), kernel)
            first, changed = _step_leaf(adds, each, kernel, grad)
            if each.of_clock is not None and changed is not None and not by_row:
                as_whole.append(each.clock.number)
                changed["last"] = each.state["last"]
            elif does_missed:
                by_log.append((first, changed))
            stepped.append(first)
            new.append(changed)
        if self.rule.missed is not None:
            clock = self._ticked(state, as_whole, by_log or new)
            state = state._replace(clock=clock)
        state = self._with_arrays(state, tree, new)._replace(count=next_count(count))
        return tree.unflatten(stepped), state

    def _ticked(self, state: State, as_whole: list[int], stepped: PyTree) -> Clock:
        """The clock after a step of some arrays ``as_whole``, not before all is stepped."""
        clock, count = state.clock, after_all(state.count, stepped)
        pairs = zip(self._missed_of_rules, clock.log, strict=True)
        log = tuple(steps.logged(log, count) for steps, log in pairs)
        whole = _set(clock.whole, as_whole, next_count(state.count))
        if clock.numbers is not None:
            now = hash_of(self._missed_of_rules), self._since(state._replace(count=count))
            clock = clock._replace(numbers=jnp.array(now, jnp.int32))
        return clock._replace(log=log, whole=whole)  # type: ignore[no-any-return]

    def _since(self, state: State) -> jax.Array | None:
        """The step since when the log is by the numbers of these rules."""
        rules, logs, numbers = self._missed_of_rules, state.clock.log, state.clock.numbers
        fits = [steps.fits(log) for steps, log in zip(rules, logs, strict=False)]
        if not all(fits) or len(rules) != len(logs):
            raise ValueError(OTHER_NUMBERS)
        if numbers is None:
            return None
        return jnp.where(numbers[0] == hash_of(rules), numbers[1], state.count)

    def _kernels(self, state: State) -> "Callable[[_Array, bool], Kernel]":
        """``kernel_of(array, by_row)``.

        In a program it is traced once for all arrays, or rows of them, of one shape.
        """
        step = Step(state.count)

        @functools.cache
        def of_rule(rule: Rule, by_row: bool) -> Kernel:
            if by_row and rule.update_slices is not None:
                return rule.update_slices(step)
            arithmetic = ((by_row and rule.update_rows) or rule.update)(step)

            def kernel(g: jax.Array, p: Any, state: Record) -> Change:
                update, new = arithmetic(g, p, state)
                return update, in_dtypes_of(state, new)

            return jax.jit(kernel, inline=True) if is_staged() else kernel

        def kernel_of(each: _Array, by_row: bool) -> Kernel:
            kernel = of_rule(each.rule, by_row)
            if each.rule.missed is None:
                return kernel
            clock = state.count, state.clock, each.clock.whole
            return exact.with_clock(kernel, each.rule.missed, *clock)

        return kernel_of

    @within_boxes(0)
    def plan(self, grads: Gradients, params: Params, platform: str | None = None) -> PyTree:
        leaves, tree = flatten(grads, is_leaf=protocol.is_leaf)
        rules, shapes = self._rules(params, tree), tree.flatten_up_to(params)
        return tree.unflatten(
            [
                _plan_of(rule, grad, param, platform or platform_of())
                for rule, grad, param in zip(rules, leaves, shapes, strict=True)
            ]
        )

    # --- rows that catch up ---------------------------------------------------------------

    @within_boxes(0, 1)
    def catch_up(self, params: Params, state: State, ids: PyTree) -> tuple[Params, State]:
        rows = self._rows_named(params, state, ids)
        if reading := current_reading():
            return self._now(params, state, rows, reading), state
        return self._advance(params, state, rows)

    @usual_promotion
    def _now(
        self, params: Params, state: State, rows: Sequence[exact.Behind], reading: Reading
    ) -> Params:
        """The parameters after missed steps, as views of rows."""
        leaves, tree = flatten(params)
        for i, each in enumerate(self._arrays(state, params, tree, leaves)):
            if rows[i] is not True:
                continue
            log, whole, *_ = each.clock
            kernel = self.missed_kernels(each.rule.missed)
            missed = self.missed_views(kernel, reading.caught_up)
            shared = state.count, log, state.clock.key, whole
            leaves[i] = as_now(missed, each.p, each.state, shared)
            reading.views.append(leaves[i])
        return tree.unflatten(leaves)

    def _rows_named(self, params: Params, state: State, ids: PyTree) -> list[exact.Behind]:
        """The rows that ``ids`` name, once it is clear that they can catch up."""
        check_state(state, self.state_type, self.fields)
        leaves, tree = flatten(params)
        for path, rule, p, arrays, _ in self._arrays(state, params, tree, leaves):
            shapes = self.state_shapes(rule, jnp.shape(p))
            check_shapes(path, jnp.shape(p), arrays, shapes)
        return protocol.left_to_xla(exact.rows_behind(leaves, tree, ids), state)  # type: ignore[no-any-return]

    def _missed_kernel(self, state: State, each: "_Array") -> Partial:
        """What rows of an array do that are behind."""
        log, whole, *_ = each.clock
        shared = state.count, log, state.clock.key, whole
        return exact.missed_kernel(self.missed_kernels(each.rule.missed), *shared)

    @functools.cached_property
    def _missed_of_rules(self) -> list[MissedSteps]:
        """The missed steps of the rules, each of which has a log."""
        rules = self.rule, *([] if self.mask is None else [self.other])
        return [rule.missed for rule in rules if rule.missed is not None]

    @on_any_mesh(lambda self, params, state, behind: shardings_of((params, state)))
    @usual_promotion
    def _advance(
        self, params: Params, state: State, behind: Sequence[exact.Behind]
    ) -> tuple[Params, State]:
        """Does the missed steps of some rows of each parameter, of all rows, or of none.

        In place. Cost for some rows: a sort of K integers, and ``U * D`` elements of each
        parameter and array. For all rows: reads and writes ``V * D`` elements of each, some
        rows at a time.
        """
        leaves, tree = flatten(params)
        arrays = self._arrays(state, params, tree, leaves)
        new: list[Any] = [None] * len(leaves)
        together: dict[Any, list[int]] = {}
        for i, (each, rows) in enumerate(zip(arrays, behind, strict=True)):
            missed: Any = each.rule.missed
            brings = rows is True and each.clock.own is not None
            if brings or (rows is True and exact.is_small(missed, leaves[i])):
                together.setdefault(missed, []).append(i)
            elif rows is not False:
                rows = self._with_rows_in_turn(each, rows, state.count)
                clock = each.clock.whole, state.count
                kernel = self._missed_kernel(state, each)
                new[i] = exact.catch_up_rows(kernel, rows, each.p, each.state, *clock)
        for missed, members in together.items():
            log, _, _, own = arrays[members[0]].clock
            small = [(arrays[i].p, arrays[i].state) for i in members]
            whole = [arrays[i].clock.whole for i in members]
            done = exact.catch_up_small(missed, state.count, log, small, whole, own)
            for i, mine in zip(members, done, strict=True):
                new[i] = mine
        as_whole = [arrays[i].clock.number for i in itertools.chain(*together.values())]
        steps = _set(state.clock.whole, as_whole, state.count)
        clock = state.clock._replace(whole=steps, own=None)
        state = state._replace(clock=clock)
        pairs = zip(leaves, new, strict=True)
        params = tree.unflatten([p if mine is None else mine[0] for p, mine in pairs])
        changed = [None if mine is None else mine[1] for mine in new]
        return params, self._with_arrays(state, tree, changed)

    def _with_rows_in_turn(self, each: "_Array", rows: Any, count: jax.Array) -> Any:
        log, _ = each.clock.log
        if isinstance(rows, bool) or log is None or is_empty(log):
            return rows
        columns = log.shape[1]
        return with_rows_in_turn(rows, each.state["last"], count, columns=columns)

    def check(self, name: str, tree: PyTree, state: State, *rest: Any, **more: Any) -> None:
        """Refuses a step of rows that are behind; traced, warns where they must be.

        Rows that caught up in the same program, or around it, are those of the step. What
        ran before a program it cannot tell: once rows caught up outside of any that steps,
        nothing is said of equal optimizers. Unless all rows did, as to be saved.
        """
        around = traces() or [None]
        if name == "catch_up":
            all_rows = all(x is True for ids in rest for x in jax.tree.leaves(ids))
            self.caught_up[around[0]] = self.caught_up.get(around[0], True) and all_rows
        grads, state, at_now = unboxed((tree, state, more.get("at_now")))
        check_state(state, self.state_type, self.fields)
        arrays = jax.tree.leaves((grads, state, hash_of(self._missed_of_rules)))
        is_traced = any(isinstance(x, jax.core.Tracer) for x in arrays)
        if not is_traced and state.clock.numbers is not None:
            same = np.asarray(state.clock.numbers)[0] == hash_of(self._missed_of_rules)
            if not same and has_rows_behind(state):
                raise ValueError(OTHER_NUMBERS)
        if name not in ("update", "apply"):
            return
        here = [x for x in around if x in self.caught_up]
        self.caught_up.update(dict.fromkeys(here, True))
        if is_traced and (here or not all(self.caught_up.values())):
            return
        leaves, tree = flatten(grads, is_leaf=protocol.is_leaf)
        leaves = [
            None if is_now or protocol.has_no_rows(x) else x
            for x, is_now in zip(leaves, self._now_flags(at_now, grads), strict=True)
        ]
        if not is_traced:
            clocks = zip(leaves, self._clocks(state, tree), strict=True)
            tables = [(g, *steps) for g, (*steps, _) in clocks if g is not None]
            exact.refuse_stale(tables, state.count)
        elif any(map(is_slices, leaves)):
            warn_at_line(exact.STALE, category=UserWarning)

    def _now_flags(self, at_now: PyTree, grads: Gradients) -> list[bool]:
        """For each gradient whether its rows have missed steps that are to be done."""
        if at_now is None:
            return [False] * len(flatten(grads, is_leaf=protocol.is_leaf)[0])
        text = "at_now must be bools in the structure of params"
        bits = broadcast_prefix(
            at_now, grads, f"{text}, or a prefix of it", protocol.is_leaf
        )
        if not all(bit is None or isinstance(bit, bool | np.bool_) for bit in bits):
            raise TypeError(f"{text}, got {', '.join(map(shown, bits))}")
        return [bool(bit) and self.rule.missed is not None for bit in bits]

    # --- trees as lists of leaves ---------------------------------------------------------

    def _rules(self, params: Params, tree: PyTreeDef) -> list[Rule]:
        """The rule of each leaf of ``tree``, the structure of params or of gradients."""
        if self.mask is None:
            return [self.rule] * tree.num_leaves
        mask = self.mask(params) if is_function(self.mask) else self.mask
        text = "the mask of the weight decay must be bools in the structure of params"
        bits = broadcast_prefix(mask, params, f"{text}, or a prefix of it")
        if not all(isinstance(bit, bool | np.bool_ | int) for bit in bits):
            raise TypeError(f"{text}, got {', '.join(map(shown, bits))}")
        by_leaf = [self.rule if bit else self.other for bit in bits]
        rules = tree.flatten_up_to(flatten(params)[1].unflatten(by_leaf))
        # A None gradient stands for None or any part of the parameters: none is stepped.
        return [r if isinstance(r, Rule) else self.rule for r in rules]

    def _arrays(
        self, state: State, params: Params, tree: PyTreeDef, leaves: Sequence[Any]
    ) -> "list[_Array]":
        """For each leaf of ``tree``, whose parameters are ``leaves``, what is kept with it.

        Where a None gradient stands for None, or for a part of the parameters, it is
        whatever the state has there.
        """
        records: list[Record] = [{} for _ in leaves]
        for name in self.names:
            for mine, x in zip(records, arrays_of(state, name, tree), strict=True):
                mine[name] = x
        each = protocol.paths_of(tree), self._rules(params, tree), leaves, records
        if self.rule.missed is None:
            return [_Array(*x, None) for x in zip(*each, strict=True)]
        own = state.clock.own or [None] * len(state.clock.log)
        since = self._since(state)
        logs = (((x, since), y) for x, y in zip(state.clock.log, own, strict=True))
        log_of = dict(zip(self._missed_of_rules, logs, strict=True))
        arrays, clocks = [], self._clocks(state, tree)
        for path, rule, p, mine, (last, whole, number) in zip(*each, clocks, strict=True):
            assert rule.missed is not None
            mine["last"] = last
            if rule.missed.noise is not None and p is not None:
                mine["row_keys"] = exact.row_keys(path, last, p)
            log, columns = log_of[rule.missed]
            of_clock = _OfClock(log, whole, number, columns)
            arrays.append(_Array(path, rule, p, mine, of_clock))
        return arrays

    def _clocks(self, state: State, tree: PyTreeDef) -> list[tuple[Leaf, ArrayLike, int]]:
        """For each leaf the last steps of its rows, of all of it, and its number."""
        clocks, number, whole = [], 0, state.clock.whole
        if not isinstance(whole, jax.core.Tracer):  # or each number is a program
            whole = np.asarray(whole)
        for last in arrays_of(state.clock, "last", tree):
            own = whole[number] if hasattr(last, "shape") else -1  # of no parameter
            clocks.append((last, own, number))
            number += len(jax.tree.leaves(last))
        return clocks

    def _with_arrays(
        self, state: State, tree: PyTreeDef, arrays: Sequence[Record | None]
    ) -> State:
        """The state with these arrays; None: as it was."""

        def changed(old: PyTree, name: str) -> PyTree:
            pairs = zip(tree.flatten_up_to(old), arrays, strict=True)
            return tree.unflatten([x if mine is None else mine[name] for x, mine in pairs])

        new = {name: changed(getattr(state, name), name) for name in self.names}
        if self.rule.missed is not None:
            last = changed(state.clock.last, "last")
            new["clock"] = state.clock._replace(last=last)
        return state._replace(**new)


def _set(whole: jax.Array, numbers: Sequence[int], step: jax.Array) -> jax.Array:
    if not numbers:
        return whole
    return jnp.where(np.isin(np.arange(len(whole)), numbers), step, whole)


def _state_shapes(rule: Rule, shape: tuple[int, ...]) -> Shapes:
    p = jax.ShapeDtypeStruct(shape, jnp.float32)
    return {k: jax.eval_shape(start, p).shape for k, start in rule.state.items()}


def _parameters(tree: PyTreeDef, params: Params, needed: bool) -> list[jax.Array | None]:
    """The parameter of each gradient; None where it is neither there nor needed.

    As in Optax, parameters that are not needed may have any structure.
    """
    try:
        if params is not None:
            return list(tree.flatten_up_to(params))
    except ValueError as error:
        if needed:
            raise ValueError(
                "the gradients have another structure than the parameters; pass those of "
                f"these parameters, with None where there is none. {error}"
            ) from error
    return [None] * tree.num_leaves


def _step_leaf(
    adds: bool, each: _Array, kernel: Kernel, grad: Leaf
) -> tuple[Leaf, Record | None]:
    """The parameter, or its update where nothing is added, and its new state.

    None for the state where it stays as it is. The parameter may be None where neither the
    rule reads it nor anything is added.
    """
    path, rule, param, state, _ = each
    if grad is None or protocol.has_no_rows(grad):
        return (param if adds else grad), None
    if adds and param is None:  # whose state moves all the same, as by `update`
        return None, _step_leaf(False, each, kernel, grad)[1]
    if adds:
        protocol.check_kinds(path, grad, param)
    by_rows = isinstance(grad, IndexedSlices)
    if by_rows and rule.sums_first is not None and rule.sums_first(param):
        grad = grad.coalesce()
    if not by_rows or rule.update_slices is not None:
        update, new = kernel(grad, param, state)
        stepped = protocol.add_update(path, update, param) if adds else update
        return stepped, {**state, **new}
    return step_rows(kernel, grad, param, state, adds=adds, linear=rule.linear)


def _plan_of(rule: Rule, grad: Leaf, param: jax.Array, platform: str) -> Plan | None:
    """How the rows of one gradient are stepped; None if it is an array, or has none."""
    if not isinstance(grad, IndexedSlices) or protocol.has_no_rows(grad):
        return None
    state = jax.eval_shape(lambda p: [start(p) for start in rule.state.values()], param)
    grad = grad.numbered_as(param.shape)
    axes = grad.row_axes
    by_row = [x for x in state if x.shape[:axes] == param.shape[:axes]]
    unique = rule.sums_first is not None and rule.sums_first(param)
    if unique:
        grad = jax.eval_shape(lambda g: g.coalesce(), grad)
    arrays = [param, *by_row] if by_row or not rule.linear else []
    return choose_plan(grad, arrays, platform, linear=rule.linear, unique=unique)
