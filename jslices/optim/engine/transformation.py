"""Optimizers of trees of arrays, made from a rule."""

import collections
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial, PyTreeDef

from jslices._arguments import check_array, is_function, shown
from jslices._densify import warn_at_line
from jslices._jax import broadcast_prefix, flatten, is_staged, traces, usual_promotion
from jslices._place.boundary import laid_out_as, on_any_mesh, platform_of, shardings_of
from jslices._place.hints import (
    HINT_BYTES,
    hint_large_step,
    hint_rows,
    warn_of_columns,
)
from jslices._rows.access import is_below
from jslices._slices import IndexedSlices, check_slices, is_slices
from jslices._typing import Gradients, Key, Leaf, Params, PyTree, State
from jslices.optim.engine import catch_up as exact
from jslices.optim.engine import protocol
from jslices.optim.engine.boxes import boxed_anew, unboxed, within_boxes
from jslices.optim.engine.clock import (
    OLD_CLOCK,
    Clock,
    after_all,
    last_steps,
    new_clock,
    with_rows_in_turn,
)
from jslices.optim.engine.missed import MissedSteps
from jslices.optim.engine.protocol import GradientTransformation
from jslices.optim.engine.rule import Kernel, Rule, Step, next_count, row_of, zero_count
from jslices.optim.engine.step import Plan, choose_plan, step_rows

#: The names of state arrays, and their shapes.
Shapes = Mapping[str, tuple[int, ...]]


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
    return tx.replace(catch_up=run.catch_up, peek=run.peek, check=run.check)


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


class _RuleOnTrees:
    """A rule, run on trees of arrays and IndexedSlices."""

    def __init__(
        self, state_type: type[State], rule: Rule, other: Rule, mask: PyTree
    ) -> None:
        self.state_type, self.rule, self.other, self.mask = state_type, rule, other, mask
        self.names = tuple(rule.state)
        self.fields = self.names if rule.missed is None else (*self.names, "clock")
        self.state_shapes = functools.cache(_state_shapes)
        self.arithmetic = functools.cache(exact.arithmetic)
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
        for path, p in zip(paths, leaves, strict=True):
            name = f"tx.init(params): the parameter{path}"
            check_array(name, p)
            if jnp.issubdtype(getattr(p, "dtype", np.float32), jax.dtypes.extended):
                raise TypeError(f"{name}: wanted an array of numbers, got {shown(p)}")
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
        peeked: PyTree = None,
    ) -> tuple[Gradients, State]:
        """What :meth:`apply` adds, and the new state."""
        return self._step(protocol.left_to_xla(grads, state), state, params, peeked, False)

    @within_boxes(2, 1)
    def apply(
        self,
        grads: Gradients,
        state: State,
        params: Params,
        key: Key | None = None,
        peeked: PyTree = None,
    ) -> tuple[Params, State]:
        if key is not None:  # each row is rounded once, when all is added
            return protocol.in_two(self.update)(grads, state, params, key, peeked=peeked)
        return self._step(protocol.left_to_xla(grads, state), state, params, peeked, True)

    @on_any_mesh(lambda _, *args: protocol.shardings_of_step(*args, adds=args[-1]))
    @usual_promotion
    def _step(
        self, grads: Gradients, state: State, params: Params, peeked: PyTree, adds: bool
    ) -> tuple[PyTree, State]:
        """``(params, state)`` after a step, or the updates where it ``adds`` nothing."""
        check_state(state, self.state_type, self.fields)
        protocol.refuse_nothing("tx.update", grads, (params, state._replace(count=None)))
        protocol.refuse_alone("tx.update", grads, params)
        is_peeked = self._peeked(peeked, grads)
        reads_params = self.rule.reads_params or any(is_peeked) or "ema" in self.names
        reads_params |= adds and grads is not None
        if params is None and (reads_params or self.mask is not None):
            raise ValueError(
                "this optimizer needs the parameters as well, for its weight decay or its "
                "norms: tx.update(grads, state, params)"
            )
        leaves, tree = flatten(grads, is_leaf=protocol.is_leaf)
        stepped, new, kernel_of = [], [], self._kernels(state)
        as_whole = np.zeros(jax.tree.structure(self._last(state)).num_leaves, bool)
        for path, rule, grad, read, kept, number, *kind in zip(
            protocol.paths_of(tree),
            self._rules(params, tree),
            leaves,
            self._read(state, tree, _parameters(tree, params, reads_params)),
            self._kept(state, tree),
            self._numbers(state, tree),
            is_peeked,
            strict=True,
        ):
            shapes = functools.partial(self.state_shapes, rule)
            mine = kept[: len(self.names)]
            grad = checked_gradient(path, grad, read[0], mine, shapes)
            if rule.missed is not None and isinstance(grad, IndexedSlices):
                kind[0] |= protocol.has_no_rows(grad) and adds and read[0] is not None
                if kind[0]:
                    grad = self._with_rows_in_turn(state, rule, kept[-1], grad)
            by_row = isinstance(grad, IndexedSlices)
            kernel = kernel_of(rule, by_row, number)
            if kind[0]:
                kernel = exact.after(self._missed(state, rule, number), kernel)
            first, arrays = _step_leaf(adds, path, rule, kernel, grad, read, kept)
            if rule.missed is not None and arrays is not None and not by_row:
                as_whole[number], arrays = True, (*arrays[:-1], kept[-1])
            stepped.append(first)
            new.append(arrays)
        if self.rule.missed is not None:
            clock = self._ticked(state, as_whole, stepped)
            state = state._replace(clock=clock)
        count = next_count(state.count)
        state = self._with_arrays(state, tree, new)._replace(count=count)
        return tree.unflatten(stepped), state

    def _ticked(
        self, state: State, as_whole: np.ndarray, stepped: Sequence[Leaf]
    ) -> Clock:
        """The clock after a step, but for the last steps of rows."""
        clock, count = state.clock, after_all(state.count, stepped)
        pairs = zip(self._missed_of_rules, clock.log, strict=True)
        log = tuple(steps.logged(log, count) for steps, log in pairs)
        if as_whole.any():
            whole = jnp.where(as_whole, next_count(state.count), clock.whole)
            clock = clock._replace(whole=whole)
        return clock._replace(log=log)

    def _kernels(self, state: State) -> Callable[[Rule, bool, int], Kernel]:
        """``kernel_of(rule, by_row, number)`` of the parameter of a number.

        In a program it is traced once for all arrays, or rows of them, of one shape.
        """
        step = Step(state.count)

        @functools.cache
        def of_rule(rule: Rule, by_row: bool) -> Kernel:
            if by_row and rule.update_slices is not None:
                return rule.update_slices(step)
            kernel = ((by_row and rule.update_rows) or rule.update)(step)
            return jax.jit(kernel, inline=True) if is_staged() else kernel

        def kernel_of(rule: Rule, by_row: bool, number: int) -> Kernel:
            kernel = of_rule(rule, by_row)
            if rule.missed is None:
                return kernel
            clock = state.count, state.clock, state.clock.whole[number]
            return exact.with_clock(kernel, rule.missed, *clock)

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
        return self._advance(params, state, self._behind(params, state, ids))

    @within_boxes(0)
    def peek(self, params: Params, state: State, rows: PyTree) -> PyTree:
        return self._peek(params, state, self._behind(params, state, rows))

    def _behind(self, params: Params, state: State, ids: PyTree) -> list[exact.Behind]:
        """The rows that ``ids`` name, once it is clear that they can catch up."""
        check_state(state, self.state_type, self.fields)
        leaves, tree = flatten(params)
        arrays = self._rules(params, tree), self._kept(state, tree)
        for path, p, rule, kept in zip(
            protocol.paths_of(tree), leaves, *arrays, strict=True
        ):
            shapes = self.state_shapes(rule, jnp.shape(p))
            check_shapes(path, jnp.shape(p), kept[: len(self.names)], shapes)
        return protocol.left_to_xla(exact.rows_behind(leaves, tree, ids), state)  # type: ignore[no-any-return]

    def _missed(self, state: State, rule: Rule, number: int) -> Partial:
        """What rows of the parameter of this number do that are behind."""
        assert rule.missed is not None
        clock, log = state.clock, self._log(state, rule)
        shared = state.count, log, clock.key, clock.whole[number]
        return exact.missed_steps(self.arithmetic(rule.missed), *shared)

    @functools.cached_property
    def _missed_of_rules(self) -> list[MissedSteps]:
        """The missed steps of the rules, each of which has a log."""
        rules = self.rule, *([] if self.mask is None else [self.other])
        return [rule.missed for rule in rules if rule.missed is not None]

    def _log(self, state: State, rule: Rule) -> jax.Array:
        return state.clock.log[self._missed_of_rules.index(rule.missed)]  # type: ignore

    def _with_rows_in_turn(
        self, state: State, rule: Rule, last: jax.Array, rows: IndexedSlices
    ) -> IndexedSlices:
        return with_rows_in_turn(rows, last, self._log(state, rule), state.count)

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
        late = self._late(params, state, behind)
        new = [exact.caught_up(*rows, state.count) for rows in late]
        pairs = zip(leaves, new, strict=True)
        params = tree.unflatten([p if mine is None else mine[0] for p, mine in pairs])
        arrays = [None if mine is None else mine[1:] for mine in new]
        return params, self._with_arrays(state, tree, arrays)

    @on_any_mesh(lambda *args: None)
    @usual_promotion
    def _peek(self, params: Params, state: State, behind: Sequence[exact.Behind]) -> PyTree:
        late = self._late(params, state, behind)
        rows = [
            exact.peeked(*mine, None if isinstance(x, bool) else len(x.indices))
            for (*mine, _), x in zip(late, behind, strict=True)
        ]
        return flatten(params)[1].unflatten(rows)

    def _late(
        self, params: Params, state: State, behind: Sequence[exact.Behind]
    ) -> Iterator[tuple[Any, ...]]:
        """For each parameter its missed steps, its rows, what these read and keep, and
        its last step as a whole."""
        leaves, tree = flatten(params)
        rules, numbers = self._rules(params, tree), self._numbers(state, tree)
        behind = [
            x if isinstance(x, bool) else self._with_rows_in_turn(state, rule, last, x)
            for x, rule, last in zip(
                behind, rules, arrays_of(state.clock, "last", tree), strict=True
            )
        ]
        kernels = map(functools.partial(self._missed, state), rules, numbers)
        arrays = self._read(state, tree, leaves), self._kept(state, tree)
        whole = (state.clock.whole[number] for number in numbers)
        return zip(kernels, behind, *arrays, whole, strict=True)

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
        if name not in ("update", "apply"):
            return
        here = [x for x in around if x in self.caught_up]
        self.caught_up.update(dict.fromkeys(here, True))
        grads, state, peeked = unboxed((tree, state, more.get("peeked")))
        check_state(state, self.state_type, self.fields)
        arrays = jax.tree.leaves((grads, state))
        is_traced = any(isinstance(x, jax.core.Tracer) for x in arrays)
        if is_traced and (here or not all(self.caught_up.values())):
            return
        leaves, tree = flatten(grads, is_leaf=protocol.is_leaf)
        last = arrays_of(state.clock, "last", tree)
        leaves = [
            None if is_peeked or protocol.has_no_rows(x) else x
            for x, is_peeked in zip(leaves, self._peeked(peeked, grads), strict=True)
        ]
        if not is_traced:
            whole, count = state.clock.whole, state.count
            steps = [
                x if g is None else last_steps(x, whole[number], count)
                for g, x, number in zip(
                    leaves, last, self._numbers(state, tree), strict=True
                )
            ]
            exact.refuse_stale(leaves, steps, count)
        elif any(map(is_slices, leaves)):
            warn_at_line(exact.STALE, category=UserWarning)

    def _peeked(self, peeked: PyTree, grads: Gradients) -> list[bool]:
        """For each gradient whether its rows have missed steps that are to be done."""
        if peeked is None:
            return [False] * len(flatten(grads, is_leaf=protocol.is_leaf)[0])
        text = "peeked must be bools in the structure of params"
        bits = broadcast_prefix(
            peeked, grads, f"{text}, or a prefix of it", protocol.is_leaf
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

    def _read(
        self, state: State, tree: PyTreeDef, params: Sequence[Any]
    ) -> list[tuple[Any, ...]]:
        """For each leaf its parameter, and if there is noise what this knows rows by."""
        if self.rule.missed is None or self.rule.missed.noise is None:
            return list(zip(params, strict=True))
        last = arrays_of(state.clock, "last", tree)
        names = map(exact.row_names, protocol.paths_of(tree), last, params)
        return list(zip(params, names, strict=True))

    def _kept(self, state: State, tree: PyTreeDef) -> list[list[jax.Array]]:
        """For each leaf its state arrays; then ``last`` of a clock.

        Where a None gradient stands for None, or for a part of the parameters, it is
        whatever the state has there.
        """
        columns = [arrays_of(state, name, tree) for name in self.names]
        if self.rule.missed is not None:
            columns.append(arrays_of(state.clock, "last", tree))
        return [list(x) for x in zip(*columns, strict=True)] or [[]] * tree.num_leaves

    def _last(self, state: State) -> PyTree:
        return None if self.rule.missed is None else state.clock.last

    def _numbers(self, state: State, tree: PyTreeDef) -> list[int]:
        """For each leaf the number of its parameter, among those that the state is of."""
        if self.rule.missed is None:
            return [0] * tree.num_leaves
        sizes = (len(jax.tree.leaves(x)) for x in arrays_of(state.clock, "last", tree))
        return [0, *itertools.accumulate(sizes)][: tree.num_leaves]

    def _with_arrays(
        self, state: State, tree: PyTreeDef, arrays: Sequence[tuple[jax.Array, ...] | None]
    ) -> State:
        """The state with these arrays, as :meth:`_kept` gives them; None: as it was."""

        def changed(old: PyTree, at: int) -> PyTree:
            pairs = zip(tree.flatten_up_to(old), arrays, strict=True)
            return tree.unflatten([x if mine is None else mine[at] for x, mine in pairs])

        new = {name: changed(getattr(state, name), i) for i, name in enumerate(self.names)}
        if self.rule.missed is not None:
            last = changed(state.clock.last, len(self.names))
            new["clock"] = state.clock._replace(last=last)
        return state._replace(**new)


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
    adds: bool,
    path: str,
    rule: Rule,
    kernel: Kernel,
    grad: Leaf,
    read: Sequence[Any],
    arrays: Sequence[jax.Array],
) -> tuple[Leaf, tuple[jax.Array, ...] | None]:
    """The parameter, or its update where nothing is added, and the new state arrays.

    None for these where they stay as they are. The parameter, the first that is ``read``,
    may be None where neither the rule reads it nor anything is added.
    """
    param = read[0]
    if grad is None or protocol.has_no_rows(grad):
        return (param if adds else grad), None
    if adds and param is None:  # whose state moves all the same, as by `update`
        return None, _step_leaf(False, path, rule, kernel, grad, read, arrays)[1]
    if adds:
        protocol.check_kinds(path, grad, param)
    by_rows = isinstance(grad, IndexedSlices)
    if by_rows and rule.sums_first is not None and rule.sums_first(param):
        grad = grad.coalesce()
    if not by_rows or rule.update_slices is not None:
        update, *new = kernel(grad, *read, *arrays)
        return protocol.add_update(path, update, param) if adds else update, tuple(new)
    how = {"adds": adds, "linear": rule.linear}
    if param is not None:
        stepped, *new = step_rows(kernel, grad, read, arrays, **how)
    else:
        without = lambda g, *state: kernel(g, None, *state)  # noqa: E731
        stepped, *new = step_rows(without, grad, [], arrays, **how)
    return stepped, tuple(new)


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


# --- Gradients, parameters and state belong together --------------------------------------


def check_state(state: State, state_type: type[State], names: Sequence[str]) -> None:
    """Refuses the state of another optimizer, or of one with other settings."""
    if not isinstance(state, state_type):
        raise TypeError(other_state("this optimizer", state, _shown(state_type)))
    if not jax.tree.leaves(state._replace(count=None)):  # of no parameters
        return
    present = [name for name in state._fields[1:] if getattr(state, name) is not None]
    if set(present) != set(names):
        raise TypeError(
            f"this optimizer keeps {_listed(names)} in its {state_type.__name__}, got one "
            f"with {_listed(present)}: it was made by tx.init with other settings"
        )
    if hasattr(getattr(getattr(state, "clock", None), "log", None), "shape"):
        raise TypeError(OLD_CLOCK)  # unpickled, as old ones had as many fields


def check_fields(caller: str, state: State, state_type: type[State]) -> None:
    """Refuses a state without these fields, which that of Optax has as well."""
    if not all(hasattr(state, name) for name in state_type._fields):
        raise TypeError(other_state(caller, state, _shown(state_type)))


def checked_gradient(
    path: str,
    grad: Leaf,
    param: Leaf,
    state: Sequence[jax.Array] = (),
    state_shapes: Callable[[tuple[int, ...]], Shapes] = lambda shape: {},
) -> Leaf:
    """The gradient of one array, as IndexedSlices with the shape of that array.

    Args:
      path: of the leaf, as JAX writes it, for errors.
      grad: an array ``[V, *D]``, IndexedSlices of it, or None.
      param: the array, or None where it is not known.
      state: its state arrays.
      state_shapes: from the shape of the array to those of its state.

    Raises:
      TypeError: for slices whose indices a foreign ``tree.map`` has changed.
      ValueError: for slices with a batch axis, and where the shapes do not belong together.
    """
    if grad is None or protocol.is_float0(grad):
        return None
    protocol.refuse_slices(path, param)
    if not isinstance(grad, IndexedSlices):
        check_array(f"the gradient{path}", grad, "an array, IndexedSlices or None")
        shape, dtype = jnp.shape(grad), jnp.result_type(grad)
    else:
        check_slices(grad)
        if grad.indices.ndim != 1:
            raise ValueError(
                f"an optimizer got {grad}{path}, which carries a batch axis from vmap; "
                "sum it first: IndexedSlices(s.values.reshape(-1, *row_shape), "
                "s.indices.reshape(-1), s.dense_shape)"
            )
        if is_below(HINT_BYTES - 1, grad.values.nbytes):
            hint_large_step(grad.values)
        if grad.dense_shape is None:
            tall = [x for x in (param, *state) if x is not None]
            if not tall:
                return grad
            shape = (*tall[0].shape[:1], *grad.values.shape[1:])
            grad = IndexedSlices(grad.values, grad.indices, shape)
        shape, dtype = grad.dense_shape, grad.dtype
    if param is not None and shape != jnp.shape(param):
        raise ValueError(
            f"the gradient{path} belongs to an array of shape {shape}, and the parameter "
            f"has shape {jnp.shape(param)}; pass tx.update(grads, state, params) the "
            "gradients of these params"
        )
    protocol.check_width(f"the gradient{path}", dtype)
    check_shapes(path, shape, state, state_shapes(shape))
    if not isinstance(grad, IndexedSlices):
        return grad
    axes = grad.row_axes
    if 1 < axes == len(shape) and any(x.shape == shape[:-1] for x in state):
        raise ValueError(
            f"the gradient{path} has rows numbered by {axes} axes of {shape}, and this "
            f"optimizer keeps a number for each vector along the last axis; give it rows "
            f"of at least that: row_axes={len(shape) - 1}"
        )
    if platform_of(grad.values, param) == "tpu":
        hint_rows(path, shape, axes, grad.values, param)
    return grad


def check_shapes(
    path: str, shape: tuple[int, ...], state: Sequence[jax.Array], shapes: Shapes
) -> None:
    """Refuses state arrays that do not belong to an array of this shape."""
    for array, (name, needed) in zip(state, shapes.items(), strict=True):
        if jnp.shape(array) != needed:
            raise ValueError(
                f"an array of shape {shape}{path} needs {name} of shape {needed} in the "
                f"optimizer state, got {jnp.shape(array)}; was the state made with "
                "tx.init(params) for these params?"
            )


def arrays_of(state: State, name: str, tree: PyTreeDef) -> list[jax.Array]:
    """The state arrays of this name, one for each leaf of ``tree``."""
    try:
        return list(tree.flatten_up_to(getattr(state, name)))
    except ValueError as error:
        raise ValueError(
            f"the {name} of the optimizer state has another structure than the gradients "
            f"or parameters; was the state made with tx.init(params) for these? {error}"
        ) from error


def other_state(caller: str, state: State, expected: str) -> str:
    """The error for a state that the caller did not make."""
    help = (
        "; jslices.checkpoint.import_state makes it from another optimizer's arrays"
        if isinstance(state, tuple)
        else ": tx.apply(grads, state, params), tx.flush(params, state)"
    )
    return (
        f"{caller} keeps its state in {expected}, got a {_shown(type(state))}; pass the "
        f"state that its own tx.init(params) or its last step returned{help}"
    )


def _shown(state_type: type) -> str:
    fields = getattr(state_type, "_fields", ())
    return f"{state_type.__name__}({', '.join(fields)})" if fields else state_type.__name__


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "nothing"
