"""Adafactor: a second moment in two factors, one number for each row and each column."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jslices._jax import flatten
from jslices._rows.bounds import set_rows
from jslices._slices import IndexedSlices, is_slices
from jslices.optim._engine.apply import check_fits
from jslices.optim._engine.arithmetic import (
    Scalar,
    Schedule,
    check_learning_rate,
    next_count,
    per_row,
    row_mean,
    value_at,
    zero_count,
)
from jslices.optim._engine.decay import with_decay
from jslices.optim._engine.dense_sums import warn_in_multi_steps
from jslices.optim._engine.in_place import step_rows
from jslices.optim._engine.leaf import known_rows
from jslices.optim._engine.moments import decayed
from jslices.optim._engine.protocol import GradientTransformation
from jslices.optim._engine.rule import check_lazy
from jslices.optim._engine.transformation import spread


class AdafactorState(NamedTuple):
    """State of :func:`adafactor`; arrays ``[1]`` stand for what a parameter has not."""

    count: jax.Array  # type: ignore[assignment]  #: int32 ``[]``, the steps taken.
    v_row: (
        Any  #: the mean of squares along the longer of two axes: ``[D]`` for a tall table.
    )
    v_col: Any  #: that along the shorter: ``[V]`` for a tall table.
    v: Any  #: like params, where nothing is factored.
    momentum: Any = None  #: like params, the mean of the updates; None without.


def adafactor(
    learning_rate: Scalar | Schedule | None = None,
    min_dim_size_to_factor: int = 128,
    decay_rate: float = 0.8,
    decay_offset: int = 0,
    multiply_by_parameter_scale: bool = True,
    clipping_threshold: float | None = 1.0,
    momentum: float | None = None,
    dtype_momentum: DTypeLike = jnp.float32,
    weight_decay_rate: Scalar | Schedule | None = None,
    eps: float = 1e-30,
    factored: bool = True,
    weight_decay_mask: Any = None,
    *,
    untouched: str = "lazy",
) -> GradientTransformation:
    """Adafactor: gradients divided by the root of a second moment that is kept in factors.

    With ``b = 1 - t**-decay_rate`` the means ``r`` of ``g**2`` over each row and ``c`` over
    each column decay by b; ``u = g / sqrt(r * c / mean(c))``, clipped to a root mean square
    of ``clipping_threshold``, times the learning rate and the root mean square of p.

    For IndexedSlices the column means are those of the whole gradient, zeros included; the
    clipping and the scale of the parameter are **of each row by itself**, as those of a
    whole table would cost a pass over all of it.

    Untouched rows: lazy. A row without gradient is neither read nor written, and nor is its
    state.

    Args:
      learning_rate: a number, a schedule of the step (from 0), or None for 1.
      min_dim_size_to_factor: the shorter axis must be that long; pass 1 to factor tables
        with narrow rows as well.
      decay_rate: how fast the means forget less.
      decay_offset: subtracted from the step, for fine-tuning.
      multiply_by_parameter_scale: whether steps are relative to the parameter.
      clipping_threshold: None does not clip.
      momentum: decay of a mean of the updates; None keeps none.
      dtype_momentum: dtype of that mean.
      weight_decay_rate: added to the update times the parameter, of touched rows; not times
        the learning rate.
      eps: added to the squares.
      factored: False keeps the second moment whole.
      weight_decay_mask: bools in the structure of params or a prefix of it, or a function
        from params to that: which of them decay.
      untouched: ``"lazy"``; ``"exact"`` is refused.

    Returns:
      A :class:`GradientTransformation`; ``update`` needs the parameters. State per row: one
      number (and D for the table) if factored, D if not; D more with momentum.

    Raises:
      ValueError: for ``untouched="exact"``; from ``update``, for slices of a factored
      parameter of rank 3 or more.

    Cost: a step reads and writes ``U * D`` elements of the parameter and ``U`` numbers of
    state.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> tx = js.adafactor(0.1, min_dim_size_to_factor=1)
      >>> table = jnp.ones((1000, 64))
      >>> sum(x.size for x in (tx.init(table).v_row, tx.init(table).v_col))
      1064

    Source: Shazeer and Stern, 2018; ``optax.adafactor``, with its names and defaults; dense
    gradients give its result.
    """
    if learning_rate is not None:
        check_learning_rate("adafactor", learning_rate)
    check_lazy("adafactor", untouched, "as what a row misses depends on all the others")

    def init(params: Any) -> AdafactorState:
        warn_in_multi_steps()
        parts = [_start(p, factored, min_dim_size_to_factor) for p in flatten(params)[0]]
        tree = flatten(params)[1]
        v_row, v_col, v = (tree.unflatten([part[i] for part in parts]) for i in range(3))
        mean = None
        if momentum is not None:
            mean = jax.tree.map(lambda p: jnp.zeros_like(p, dtype=dtype_momentum), params)
        return AdafactorState(zero_count(), v_row, v_col, v, mean)

    def update(
        grads: Any, state: AdafactorState, params: Any = None
    ) -> tuple[Any, AdafactorState]:
        if params is None:
            raise ValueError(
                "adafactor needs the parameters as well: tx.update(grads, state, params)"
            )
        leaves, tree = flatten(grads, is_leaf=lambda x: x is None or is_slices(x))
        arrays = tree.flatten_up_to(params)
        masked = spread(weight_decay_mask, params, len(leaves))
        means = [None] * len(leaves)
        if momentum is not None:
            means = tree.flatten_up_to(state.momentum)
        moments = [tree.flatten_up_to(x) for x in (state.v_row, state.v_col, state.v)]
        results = []
        for g, p, decays, mean, *v in zip(
            leaves, arrays, masked, means, *moments, strict=True
        ):
            finish = functools.partial(_finish, state.count, decays)
            step = _rows if is_slices(g) else _array
            kept = (None, *v, mean)
            results.append(kept if g is None else step(state.count, g, p, v, mean, finish))
        new = [tree.unflatten([result[i] for result in results]) for i in range(5)]
        mean = new[4] if momentum is not None else None
        return new[0], AdafactorState(next_count(state.count), new[1], new[2], new[3], mean)

    def _array(count: Any, g: Any, p: Any, v: Any, mean: Any, finish: Any) -> Any:
        b, axes = _forget(count), factored_axes(p.shape, factored, min_dim_size_to_factor)
        v_row, v_col, whole = v
        squares = g**2 + eps
        if axes is None:
            whole = (b * whole + (1.0 - b) * squares).astype(whole.dtype)
            u = g * whole**-0.5
        else:
            short, long = axes
            rows, columns = jnp.mean(squares, axis=long), jnp.mean(squares, axis=short)
            v_row = (b * v_row + (1.0 - b) * rows).astype(v_row.dtype)
            v_col = (b * v_col + (1.0 - b) * columns).astype(v_col.dtype)
            axis = short - 1 if short > long else short
            row = (v_row / jnp.mean(v_row, axis=axis, keepdims=True)) ** -0.5
            u = g * jnp.expand_dims(row, long) * jnp.expand_dims(v_col**-0.5, short)
        u, mean = finish(u, p, mean, by_row=False)
        return u, v_row, v_col, whole, mean

    def _rows(count: Any, g: IndexedSlices, p: Any, v: Any, mean: Any, finish: Any) -> Any:
        b, axes = _forget(count), factored_axes(p.shape, factored, min_dim_size_to_factor)
        if axes is not None and p.ndim != 2:
            raise ValueError(
                f"adafactor got slices of a factored parameter of shape {p.shape}; it "
                "factors tables [V, D]: reshape it, or pass factored=False"
            )
        moving = [] if mean is None else [mean]
        tall = axes == (1, 0)
        kept = v[2] if axes is None else v[1] if tall else v[0]
        g = known_rows(g, (p, kept, *moving)).coalesce()
        check_fits(g, p)
        if axes is None:

            def full(g: Any, p: Any, whole: Any, *mean: Any) -> tuple[Any, ...]:
                whole = b * whole + (1.0 - b) * (g**2 + eps)
                u, new = finish(g * whole**-0.5, p, *(mean or (None,)), by_row=True)
                return (u, whole, *([] if new is None else [new]))

            u, whole, *new = step_rows(
                full, g.indices, g.values, [v[2], *moving], [p], quarters=bool(moving)
            )
            return _slices(u, g), v[0], v[1], whole, new[0] if new else None
        rows, columns = (v[1], v[0]) if tall else (v[0], v[1])
        total = jnp.sum(g.values**2, axis=0, dtype=columns.dtype)
        mean_squares = total / p.shape[0] + eps
        columns = (b * columns + (1.0 - b) * mean_squares).astype(columns.dtype)
        near = rows.at[jnp.minimum(g.indices, p.shape[0] - 1)].get(mode="clip")
        new_rows = b * near + (1.0 - b) * row_mean(g.values**2 + eps)
        rows = set_rows(rows, g.indices, new_rows.astype(rows.dtype))
        # The mean of whichever factor has fewer numbers than the other.
        mean_square = jnp.mean(columns if tall else rows)

        def kernel(g: Any, p: Any, row: Any, *mean: Any) -> tuple[Any, ...]:
            u = g * (columns[None] * (per_row(row, g) / mean_square)) ** -0.5
            u, new = finish(u, p, *(mean or (None,)), by_row=True)
            return (u, *([] if new is None else [new]))

        u, *new = step_rows(kernel, g.indices, g.values, moving, [p, rows])
        v = (columns, rows) if tall else (rows, columns)
        return _slices(u, g), *v, moments_of_nothing(p), new[0] if new else None

    def _forget(count: jax.Array) -> jax.Array:
        return 1.0 - jnp.array(count - decay_offset + 1, jnp.float32) ** -decay_rate

    def _finish(
        count: Any, decays: bool, u: Any, p: Any, mean: Any, *, by_row: bool
    ) -> tuple[jax.Array, Any]:
        if clipping_threshold is not None:
            u = u / jnp.maximum(1.0, _size(u, by_row) / clipping_threshold)
        if learning_rate is not None:
            rate = value_at(learning_rate, count)
            u = u * jnp.asarray(rate, u.dtype) if callable(learning_rate) else rate * u
        if multiply_by_parameter_scale:
            u = u * jnp.maximum(_size(p, by_row), 1e-3)
        if momentum is not None:
            u = decayed(mean, u, momentum)
            mean = u.astype(dtype_momentum)
        if weight_decay_rate is not None and decays:
            u = with_decay(u, p, weight_decay_rate, count)
        return -1 * u, mean

    return GradientTransformation(init, update)


def factored_axes(
    shape: tuple[int, ...], factored: bool, shortest: int
) -> tuple[int, int] | None:
    """The second longest axis and the longest, if the second moment is factored."""
    order = np.argsort(shape)
    if not factored or len(shape) < 2 or shape[order[-2]] < shortest:
        return None
    return int(order[-2]), int(order[-1])


def moments_of_nothing(p: Any) -> jax.Array:
    """Stands for a moment that a parameter does not have."""
    return jnp.zeros((1,), p.dtype)


def _start(p: Any, factored: bool, shortest: int) -> tuple[jax.Array, ...]:
    p = jnp.asarray(p)
    axes = factored_axes(p.shape, factored, shortest)
    if axes is None:
        return moments_of_nothing(p), moments_of_nothing(p), jnp.zeros_like(p)
    row, col = (jnp.zeros(np.delete(p.shape, axis), p.dtype) for axis in axes[::-1])
    return row, col, moments_of_nothing(p)


def _size(x: jax.Array, by_row: bool) -> jax.Array:
    """The root mean square, of all or of each row."""
    return jnp.sqrt(per_row(row_mean(x**2), x) if by_row else jnp.mean(x**2))


def _slices(update: jax.Array, grad: IndexedSlices) -> IndexedSlices:
    return IndexedSlices(update, grad.indices, grad.dense_shape)
