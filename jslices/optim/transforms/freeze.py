"""Rows of tables that never move, whatever the optimizer and the gradient."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jslices._jax import flatten
from jslices._slices import is_slices
from jslices.optim._engine.protocol import GradientTransformation
from jslices.optim._exact.catch_up import FROZEN
from jslices.optim.transforms.chain import as_transformation
from jslices.optim.transforms.given import is_leaf_or_masked, map_given, spread_over
from jslices.optim.transforms.rows import only_rows

ARGUMENT = "freeze_rows(frozen=...)"


def freeze_rows(tx: Any, frozen: Any) -> Any:
    """The optimizer ``tx``, by which some rows never move.

    Not by gradients, momentum or weight decay: they keep their bits, whether the gradient
    is IndexedSlices or an array (of a tied table, of an output matrix), lazy or exact.
    Whatever gradient a frozen row gets, NaN included, all of ``tx`` sees zero: global
    norms, column moments, buffers.

    Untouched rows: as ``tx`` treats them. Row gradients leave the state of a frozen row as
    it is. An array does to it what a gradient of zero does: zeros stay zero, means fade.
    Some optimizers take norms of whole arrays then (the trust ratio of ``lamb``, say), and
    these count the parameters of frozen rows.

    Args:
      tx: an optimizer of jslices or of Optax, or what combinators make of some: ``chain``,
        ``partition``, ``masked``, ``multi_steps``, ``from_optax``. Also at its place inside
        of these. Or the state of an optimizer with ``untouched="exact"``, which keeps the
        last step of every row.
      frozen: mirrors the parameters or is a prefix of them. For a table ``[V, *D]`` bools
        ``[V]``, or a function that is given row numbers ``[n]`` and returns bools ``[n]``;
        None for what stays free. Bools are part of the compiled program: for very large
        tables a function is better.

    Returns:
      A :class:`GradientTransformation`. Its state is that of ``tx``, so that it can also be
      put round an optimizer that has taken steps; with ``untouched="exact"`` call
      ``tx.flush`` before, as what frozen rows have missed is not made up. For a state that
      state, by which the same rows never move.

    Raises:
      TypeError: for the state of an optimizer that is not exact, and for anything but
        bools.
      ValueError: for bools of another length than the table, or another structure.

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
    if not hasattr(tx, "update"):
        return _frozen_state(tx, frozen)
    tx = as_transformation("freeze_rows", tx)
    each = functools.partial(_each, frozen)

    def marked(state: Any) -> Any:
        """The state, in which frozen rows have missed nothing and never will."""
        return _with_clocks(state, lambda last: each(_marked, last))

    def init(params: Any) -> Any:
        each(lambda p, bits: _check(bits, jnp.shape(p)), params)
        return marked(tx.init(params))

    def update(
        grads: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, Any]:
        dense: list[Any] = []

        def free(g: Any, bits: Any) -> Any:
            _check(bits, g.shape)
            dense.extend([] if is_slices(g) else [g])
            return only_rows(g, _free(bits), 0.0)

        grads = each(free, grads)
        if dense:  # rows that did not catch up would be refused
            state = marked(state)
        updates, state = tx.update(grads, state, params, **extra_args)
        # x + -0.0 is x for every x, and 0.0 for -0.0 + 0.0.
        return each(lambda u, bits: only_rows(u, _free(bits), -0.0), updates), state

    if not tx.catches_up:
        return GradientTransformation(init, update, plan=tx.plan)

    def catch_up(params: Any, state: Any, ids: Any) -> tuple[Any, Any]:
        leaves, structure = flatten(params, is_leaf=is_leaf_or_masked)
        given = structure.flatten_up_to(ids)
        if any(x is True for x in given):
            state = marked(state)
        rows = [
            x if bits is None or x is None or x is True else _left_out(x, bits, p.shape[0])
            for x, bits, p in zip(
                given, spread_over(ARGUMENT, frozen, params), leaves, strict=True
            )
        ]
        return tx.catch_up(params, state, structure.unflatten(rows))

    def flush(params: Any, state: Any) -> tuple[Any, Any]:
        return tx.flush(params, marked(state))

    return GradientTransformation(init, update, catch_up, flush, plan=tx.plan)


def _frozen_state(state: Any, frozen: Any) -> Any:
    """The state of an exact optimizer, which knows by itself what never moves."""
    marked: list[Any] = []

    def mark(last: jax.Array, bits: Any) -> jax.Array:
        _check(bits, last.shape)
        marked.append(last)
        return _marked(last, bits)

    new = _with_clocks(state, lambda last: _each(frozen, mark, last))
    if len(marked) < len(jax.tree.leaves(frozen)):
        raise TypeError(
            "freeze_rows wants an optimizer, or the state of an optimizer with "
            f'untouched="exact" for every table whose rows are frozen, got a '
            f"{type(state).__name__}; type tx = jslices.optim.freeze_rows(tx, frozen), "
            "which holds for any optimizer, and then tx.init(params)"
        )
    return new


def _each(frozen: Any, f: Callable[[Any, Any], Any], tree: Any) -> Any:
    """``tree``, which mirrors the parameters, with ``f(leaf, frozen)`` for tables."""
    return map_given(ARGUMENT, f, frozen, tree)


def _check(bits: Any, shape: tuple[int | None, ...]) -> None:
    """Refuses anything but a function, or bools of the right length."""
    if callable(bits):
        return
    given = jnp.asarray(bits)
    if given.dtype != bool:
        raise TypeError(
            f"freeze_rows wants bools, got {given.dtype}{list(given.shape)}; for row "
            "numbers: lambda rows: jnp.isin(rows, numbers)"
        )
    if given.ndim != 1 or shape[:1] not in (given.shape, (None,)):
        raise ValueError(
            f"freeze_rows got bools of shape {given.shape} for a table of shape {shape}; "
            "it wants one for each row"
        )


def _free(bits: Any) -> Any:
    return (lambda rows: ~bits(rows)) if callable(bits) else ~jnp.asarray(bits)


def _frozen(bits: Any, rows: jax.Array) -> jax.Array:
    """bool, of the shape of ``rows``, numbers in ``[0, V)``: whether they are frozen."""
    return bits(rows) if callable(bits) else jnp.asarray(bits)[rows]


def _marked(last: jax.Array, bits: Any) -> jax.Array:
    rows = jnp.arange(last.shape[0], dtype=jnp.int32)
    return jnp.where(_frozen(bits, rows), FROZEN, last)


def _left_out(ids: Any, bits: Any, num_rows: int) -> Any:
    """Row numbers, out of range where the row is frozen."""
    if is_slices(ids) or not jnp.issubdtype(jnp.asarray(ids).dtype, jnp.integer):
        return ids  # which catch_up refuses
    ids = jnp.asarray(ids).reshape(-1)
    near = jnp.clip(ids, 0, max(num_rows - 1, 0))
    return jnp.where(_frozen(bits, near), num_rows, ids)


def _with_clocks(state: Any, mark: Callable[[Any], Any]) -> Any:
    """The state with every ``clock.last`` in it as ``mark`` makes it."""
    if getattr(state, "clock", None) is not None:
        return state._replace(clock=state.clock._replace(last=mark(state.clock.last)))
    if hasattr(state, "inner_states"):
        parts = {k: _with_clocks(x, mark) for k, x in state.inner_states.items()}
        return state._replace(inner_states=parts)
    for name in ("inner_opt_state", "inner_state"):
        if hasattr(state, name):
            return state._replace(**{name: _with_clocks(getattr(state, name), mark)})
    if isinstance(state, tuple) and not hasattr(state, "_fields"):
        return tuple(_with_clocks(part, mark) for part in state)
    return state
