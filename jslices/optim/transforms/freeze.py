"""Rows of tables that never move, whatever the optimizer and the gradient."""

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jslices._arguments import check_array
from jslices._jax import flatten
from jslices._place.boundary import like_first, on_any_mesh
from jslices._rows.access import per_row, rows_numbered, take_rows, where_rows
from jslices._slices import IndexedSlices
from jslices._typing import Gradients, Key, Leaf, Params, PyTree, State, Transformation
from jslices.optim.engine.clock import Clock, RowClock, map_clocks
from jslices.optim.engine.constructors import combinator
from jslices.optim.engine.protocol import StateOfRows, is_leaf
from jslices.optim.transforms import base
from jslices.optim.transforms.rows import check_by_row, only_rows

#: Which rows never move: bools ``[V]``, a function of row numbers, or a bool for all.
Frozen: TypeAlias = jax.Array | np.ndarray | bool | Callable[[jax.Array], jax.Array]

ARGUMENT = "freeze_rows(frozen=...)"


@combinator
def freeze_rows(tx: Transformation, frozen: PyTree) -> Any:
    """Keep some rows of tables from moving, whatever the optimizer ``tx``.

    Not by gradients, momentum or weight decay: they keep their bits, whether the gradient
    is IndexedSlices or an array (of a tied table, of an output matrix), lazy or exact.
    Whatever gradient a frozen row gets, NaN included, all of ``tx`` sees zero: global
    norms, column moments, buffers.

    Untouched rows: as ``tx`` treats them. Row gradients leave the state of a frozen row as
    it is. An array does to it what a gradient of zero does: zeros stay zero, means fade.
    Some optimizers take norms of whole arrays then (the trust ratio of ``lamb``, say), and
    these count the parameters of frozen rows.

    With ``untouched="exact"`` the means of frozen rows fade meanwhile. Rows that are free
    again, by another ``frozen`` or by ``tx`` alone, move from the ``flush`` of the new
    optimizer on, or once a step has read them: to freeze other rows,
    ``params, state = new_tx.flush(*old_tx.flush(params, state))``.

    Args:
      tx: an optimizer of jslices or of Optax, or what combinators make of some: ``chain``,
        ``partition``, ``masked``, ``multi_steps``, ``from_optax``. Also at its place inside
        of these. Or the state of an optimizer with ``untouched="exact"``, which keeps the
        last step of every row.
      frozen: mirrors the parameters or is a prefix of them. For a table ``[V, *D]`` bools
        ``[V]``, or a function that is given row numbers ``[n]`` and returns bools ``[n]``;
        True for all of an array, or a number; None or False for what stays free. Bools
        are part of the compiled program: for very large tables a function is better.

    Returns:
      A :class:`GradientTransformation`. Its state is that of ``tx``, so that it can also be
      put round an optimizer that has taken steps; with ``untouched="exact"`` call
      ``tx.flush`` before, as what frozen rows have missed is not made up. Given a state:
      that state, by which these rows, and no others, never move, whatever steps them. Their
      means go on by their gradients. Call ``tx.flush`` before and after.

    Raises:
      TypeError: for the state of an optimizer that is not exact, and for all but bools.
      ValueError: for bools of another length than the table, or another structure; for a
        function as :func:`scale`.

    Cost: reads K bools and writes ``K * D`` elements for row gradients; one pass over
    ``V * D`` elements, which XLA joins with those of the step, for arrays.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> tx = js.adamw(0.1, weight_decay=0.5)
      >>> tx = js.optim.freeze_rows(tx, lambda rows: rows < 2)
      >>> table = jnp.ones((4, 1))
      >>> params, state = tx.apply(jnp.ones((4, 1)), tx.init(table), table)
      >>> params.ravel().round(3)
      Array([1.  , 1.  , 0.85, 0.85], dtype=float32)

    Source: ours. The usual ways to train only the new tokens of a large vocabulary are to
    copy the old rows back after every step, or to zero their gradient, which leaves weight
    decay to move them.
    """
    frozen = jax.tree.map(lambda x: None if x is False or x is np.False_ else x, frozen)
    if not hasattr(tx, "update"):
        return _frozen_state(tx, frozen)
    tx = base.as_transformation("freeze_rows", tx)
    each = functools.partial(base.map_with_prefix, ARGUMENT, frozen)
    bits_of = functools.partial(base.values_of_prefix, ARGUMENT, frozen)

    def marked(state: State) -> State:
        """The state, in which frozen rows are held."""
        return _with_clocks(state, frozen, _held)

    def init(params: Params) -> State:
        each(lambda p, bits: _check(bits, jnp.shape(p)), params)
        return marked(tx.init(params))

    def after(grads: Gradients, state: State) -> State:
        """The state after a step; arrays step all rows, which are then no longer held."""
        leaves = flatten(grads, is_leaf=base.is_leaf_or_masked)[0]
        pairs = zip(leaves, bits_of(grads), strict=True)
        arrays = [g for g, x in pairs if x is not None and not base.is_leaf_or_masked(g)]
        return marked(state) if arrays else state

    def update(
        grads: Gradients, state: State, params: Params = None, **extra_args: PyTree
    ) -> tuple[Gradients, State]:
        grads = each(_without_frozen, grads)
        updates, state = tx.update(grads, state, params, **extra_args)
        # x + -0.0 is x for every x, and 0.0 for -0.0 + 0.0.
        updates = each(lambda u, bits: only_rows(u, _free(bits), -0.0), updates)
        return updates, after(grads, state)

    def apply(
        grads: Gradients,
        state: State,
        params: Params,
        key: Key | None = None,
        **extra_args: PyTree,
    ) -> tuple[Params, State]:
        grads = each(_without_frozen, grads)
        if extra_args.get("at_now") is not None:  # an array would free rows that it holds
            leaves, tree = flatten(grads, is_leaf=base.is_leaf_or_masked)
            at_now = base.values_of_prefix("at_now", extra_args["at_now"], grads)
            rows = list(zip(leaves, at_now, bits_of(grads), strict=True))
            whole = [y and x is not None and not is_leaf(g) for g, y, x in rows]
            if any(whole):
                ids = tree.unflatten(True if x else None for x in whole)
                params, state = catch_up(params, state, ids)
                rest = (bool(y) and not x for (_, y, _), x in zip(rows, whole, strict=True))
                extra_args["at_now"] = tree.unflatten(rest)
        new, state = tx.apply(grads, state, params, key, **extra_args)

        def kept(now: jax.Array, bits: Frozen, grad: Leaf, param: jax.Array) -> jax.Array:
            return now if is_leaf(grad) else _kept(now, bits, True, param)

        return each(kept, new, grads, params), after(grads, state)

    def catch_up(params: Params, state: State, ids: PyTree) -> tuple[Params, State]:
        leaves, structure = flatten(params, is_leaf=base.is_leaf_or_masked)
        columns = structure.flatten_up_to(ids), bits_of(params)
        rows = [
            p
            if base.is_masked(p)
            else x
            if bits is None or x is None or x is True
            else _left_out(x, bits, p.shape)
            for p, x, bits in zip(leaves, *columns, strict=True)
        ]
        mark = marked if any(x is True for x in columns[0]) else lambda state: state
        params, state = tx.catch_up(params, mark(state), structure.unflatten(rows))
        return params, mark(state)

    def of_rows(rows: StateOfRows) -> Any:
        return freeze_rows(tx.of_rows(rows), jax.tree.map(rows.renumbered, frozen))

    own: dict[str, Any] = {"init": init, "update": update, "apply": apply}
    own |= {"check": None, "flush": None, "of_rows": of_rows}
    own |= {"catch_up": catch_up} if tx.catches_up else {}
    return tx.replace(**own)


def _frozen_state(state: State, frozen: PyTree) -> State:
    """The state of an exact optimizer, in which frozen rows are marked."""
    tables: list[jax.Array] = []

    def mark(rows: RowClock, bits: Frozen) -> jax.Array:
        _check(bits, rows.marks.shape)
        tables.append(rows.marks)
        freed = jnp.where(rows.is_frozen, rows.held, rows.marks)
        return _where_frozen(freed, bits, rows.frozen)

    new = _with_clocks(state, frozen, mark)
    if len(tables) < len(jax.tree.leaves(frozen)):
        raise TypeError(
            "freeze_rows wants an optimizer, or the state of an optimizer with "
            f'untouched="exact" for every table whose rows are frozen, got a '
            f"{type(state).__name__}; type tx = jslices.optim.freeze_rows(tx, frozen), "
            "which holds for any optimizer, and then tx.init(params)"
        )
    return new


def _check(bits: Frozen, shape: tuple[int | None, ...]) -> None:
    """Refuses anything but a function, or bools of the right length."""
    if callable(bits):
        return
    check_array(ARGUMENT, bits, "bools for each row, or a function of row numbers")
    array = jnp.asarray(bits)
    if array.dtype != bool:
        raise TypeError(
            f"freeze_rows wants bools, got {array.dtype}{list(array.shape)}; for row "
            "numbers: lambda rows: jnp.isin(rows, numbers)"
        )
    sizes = shape[: array.ndim]
    if len(sizes) < array.ndim or any(
        n not in (None, m) for n, m in zip(sizes, array.shape, strict=True)
    ):
        raise ValueError(
            f"freeze_rows got bools of shape {array.shape} for a table of shape {shape}; "
            "it wants one for each row, or True for all of the array"
        )


def _without_frozen(grad: jax.Array | IndexedSlices, bits: Frozen) -> PyTree:
    _check(bits, grad.shape)
    check_by_row("freeze_rows", bits, grad, "give bools for each row of the array")
    return only_rows(grad, _free(bits), 0.0)


def _free(bits: Frozen) -> Frozen:
    return (lambda rows: ~bits(rows)) if callable(bits) else ~jnp.asarray(bits)


def _held(rows: RowClock, bits: Frozen) -> jax.Array:
    return _where_frozen(rows.marks, bits, jnp.where(rows.is_frozen, rows.marks, rows.held))


@on_any_mesh(like_first)
def _where_frozen(marks: jax.Array, bits: Frozen, frozen: jax.Array) -> jax.Array:
    """The marks of rows, ``frozen`` of those that ``bits`` name."""
    if not callable(bits):
        return jnp.where(per_row(jnp.asarray(bits), marks), frozen, marks)
    if marks.ndim > 1:
        raise ValueError(
            "freeze_rows got a function of row numbers for a table whose rows may be "
            f"numbered by {marks.ndim} axes; give bools of shape {marks.shape}"
        )
    rows = jnp.arange(marks.shape[0], dtype=jnp.int32)
    return jnp.where(bits(rows), frozen, marks)


def _kept(
    now: jax.Array, bits: Frozen, ids: IndexedSlices | ArrayLike | bool, param: jax.Array
) -> jax.Array:
    """Rows ``now`` of a parameter, all of them or those of ``ids``; frozen ones stay."""
    if ids is True:
        rows = bits(jnp.arange(param.shape[0])) if callable(bits) else jnp.asarray(bits)
        return where_rows(rows, param, now)
    left, axes = _left_out(ids, bits, param.shape), 1
    if isinstance(ids, IndexedSlices):
        left, axes, ids = left.indices, ids.row_axes, ids.indices
    old = take_rows(param, jnp.asarray(ids).reshape(-1), mode="clip", row_axes=axes)
    stay = (left < 0) | (left >= rows_numbered(param.shape, axes))
    return where_rows(stay, old, now)


@on_any_mesh(like_first)
def _left_out(ids: IndexedSlices | ArrayLike, bits: Frozen, shape: tuple[int, ...]) -> Any:
    """Row numbers, out of range where the row is frozen."""
    if isinstance(ids, IndexedSlices):
        return only_rows(ids, _free(bits), 0.0)
    if not jnp.issubdtype(jnp.asarray(ids).dtype, jnp.integer):
        return ids  # which catch_up refuses
    num_rows, ids = shape[0], jnp.asarray(ids)
    near = jnp.clip(ids.reshape(-1), 0, max(num_rows - 1, 0))
    stay = bits(near) if callable(bits) else jnp.take(jnp.ravel(bits), near, mode="clip")
    return jnp.where(jnp.reshape(stay, ids.shape), num_rows, ids)


def _with_clocks(
    state: State, frozen: PyTree, mark: Callable[[RowClock, Frozen], jax.Array]
) -> State:
    """The state with the marks of rows of every clock in it as ``mark`` makes them."""

    def marked(old: Clock, count: jax.Array) -> Clock:
        whole = old.whole
        if whole is None:
            return old
        leaves, tree = flatten(old.last)
        numbers = tree.unflatten(range(len(leaves)))
        alone = np.zeros(len(leaves), bool)  # whose rows go by themselves again

        def steps(last: jax.Array, bits: Frozen, number: int) -> jax.Array:
            alone[number] = True
            return mark(RowClock.of(last, whole[number], count), bits)

        last = base.map_with_prefix(ARGUMENT, frozen, steps, old.last, numbers)
        return old._replace(last=last, whole=jnp.where(alone, -1, whole))

    return map_clocks(marked, state)
