"""Adafactor: a second moment in two factors, one number for each row and each column."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jslices._place.boundary import filled_like
from jslices.optim.engine.constructors import optimizer
from jslices.optim.engine.protocol import GradientTransformation
from jslices.optim.engine.rule import (
    Kernel,
    Rule,
    Scalar,
    Schedule,
    Step,
    check_lazy,
    check_learning_rate,
    decayed,
    per_row,
    row_mean,
    value_at,
    with_decay,
    zeros,
)
from jslices.optim.engine.step import derivable, step_slices
from jslices.optim.engine.transformation import transformation


class AdafactorState(NamedTuple):
    """State of :func:`adafactor`; ``[1]`` stands for an array that is not kept."""

    count: jax.Array  # type: ignore[assignment]  #: int32 ``[]``, the steps taken.
    v_row: (
        Any  #: the mean of squares along the longer of two axes: ``[D]`` for a tall table.
    )
    v_col: Any  #: that along the shorter: ``[V]`` for a tall table.
    v: Any  #: like params, where nothing is factored.
    momentum: Any = None  #: like params, the mean of the updates; None without.


@optimizer
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

    Where the second moment is factored, rows share ``c``: a row whose square is not finite
    (NaN, infinite, or 1e20 in float32) spoils it for good, and with it every row that is
    stepped from then on. Clip the gradients, leave such steps out, or pass
    ``factored=False``, with which the damage stays in its row.

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
    axes_of = partial(factored_axes, factored, min_dim_size_to_factor)
    names = ("v_row", "v_col", "v")
    starts: dict[str, Any] = {name: partial(_moment, name, axes_of) for name in names}
    if momentum is not None:
        starts["momentum"] = zeros(dtype_momentum)

    def forgetting(step: Step) -> jax.Array:
        number = jnp.array(step.count - decay_offset + 1, jnp.float32)
        return 1.0 - number**-decay_rate

    def finish(
        step: Step, decays: bool, u: Any, p: Any, mean: Any, *, by_row: bool
    ) -> tuple[jax.Array, ...]:
        """The update of the direction ``u``, and the new momentum if there is one."""
        if clipping_threshold is not None:
            u = u / jnp.maximum(1.0, _size(u, by_row) / clipping_threshold)
        if learning_rate is not None:
            rate = value_at(learning_rate, step.count)
            u = u * jnp.asarray(rate, u.dtype) if callable(learning_rate) else rate * u
        if multiply_by_parameter_scale:
            u = u * jnp.maximum(_size(p, by_row), 1e-3)
        if momentum is not None:
            u = decayed(mean[0], u, momentum)
            mean = [u.astype(dtype_momentum)]
        if weight_decay_rate is not None and decays:
            u = with_decay(u, p, weight_decay_rate, step.count)
        return (-1 * u, *mean)

    def update(decays: bool, step: Step) -> Kernel:
        b = forgetting(step)

        def kernel(g: Any, p: Any, v_row: Any, v_col: Any, v: Any, *mean: Any) -> Any:
            axes = axes_of(p.shape)
            squares = g**2 + eps
            if axes is None:
                v = (b * v + (1.0 - b) * squares).astype(v.dtype)
                u = g * v**-0.5
            else:
                short, long = axes
                rows, columns = jnp.mean(squares, axis=long), jnp.mean(squares, axis=short)
                v_row = (b * v_row + (1.0 - b) * rows).astype(v_row.dtype)
                v_col = (b * v_col + (1.0 - b) * columns).astype(v_col.dtype)
                axis = short - 1 if short > long else short
                row = (v_row / jnp.mean(v_row, axis=axis, keepdims=True)) ** -0.5
                u = g * jnp.expand_dims(row, long) * jnp.expand_dims(v_col**-0.5, short)
            u, *new = finish(step, decays, u, p, mean, by_row=False)
            return u, v_row, v_col, v, *new

        return kernel

    def update_slices(decays: bool, step: Step) -> Kernel:
        b = forgetting(step)

        def from_slices(g: Any, p: Any, v_row: Any, v_col: Any, v: Any, *mean: Any) -> Any:
            axes = axes_of(p.shape)
            if axes is None:
                u, v, *mean = whole(g, p, v, *mean)
                return u, v_row, v_col, v, *mean
            if p.ndim != 2:
                raise ValueError(
                    f"adafactor got slices of a factored parameter of shape {p.shape}; it "
                    "factors tables [V, D]: reshape it, or pass factored=False"
                )
            if axes == (1, 0):  # a tall table: v_col has a number for each row
                u, v_col, v_row, *mean = in_factors(g, p, v_col, v_row, *mean)
            else:
                u, v_row, v_col, *mean = in_factors(g, p, v_row, v_col, *mean)
            return u, v_row, v_col, v, *mean

        def whole(g: Any, p: Any, v: Any, *mean: Any) -> Any:
            def kernel(g: Any, p: Any, v: Any, *mean: Any) -> tuple[Any, ...]:
                v = b * v + (1.0 - b) * (g**2 + eps)
                u, *new = finish(step, decays, g * v**-0.5, p, mean, by_row=True)
                return u, v, *new

            return step_slices(kernel, g, [p], [v, *mean])

        def in_factors(g: Any, p: Any, rows: Any, columns: Any, *mean: Any) -> Any:
            total = jnp.sum(g.values**2, axis=0, dtype=columns.dtype)
            mean_squares = total / p.shape[0] + eps
            columns = (b * columns + (1.0 - b) * mean_squares).astype(columns.dtype)

            def remember(g: Any, row: Any) -> tuple[Any, ...]:
                return g, b * row + (1.0 - b) * row_mean(g**2 + eps)

            _, rows = step_slices(remember, g, [], [rows], unique=True)
            some = jnp.any(g.indices < p.shape[0])
            by_row, by_column = (
                derivable(jnp.broadcast_to(some, x.shape), x) for x in (rows, columns)
            )
            # The mean of whichever factor has fewer numbers than the other.
            mean_square = jnp.mean(by_column if axes_of(p.shape) == (1, 0) else by_row)

            def kernel(g: Any, p: Any, row: Any, *mean: Any) -> tuple[Any, ...]:
                u = g * (by_column[None] * (per_row(row, g) / mean_square)) ** -0.5
                return finish(step, decays, u, p, mean, by_row=True)

            u, *new = step_slices(kernel, g, [p, rows], mean, unique=True)
            return u, rows, columns, *new

        return from_slices

    def rule(decays: bool) -> Rule:
        return Rule(
            starts,
            partial(update, decays),
            update_slices=partial(update_slices, decays),
            sums_first=lambda p: axes_of(p.shape) is not None,
            reads_params=True,
        )

    return transformation(
        AdafactorState, rule(True), other=rule(False), mask=weight_decay_mask
    )


def factored_axes(
    factored: bool, shortest: int, shape: tuple[int, ...]
) -> tuple[int, int] | None:
    """The second longest axis and the longest, if the second moment is factored."""
    order = np.argsort(shape)
    if not factored or len(shape) < 2 or shape[order[-2]] < shortest:
        return None
    return int(order[-2]), int(order[-1])


def _moment(name: str, axes_of: Callable[..., Any], p: Any) -> jax.Array:
    """What ``v_row``, ``v_col`` or ``v`` of a parameter starts as.

    An array of one number stands for a moment that the parameter does not have.
    """
    p = jnp.asarray(p)
    axes = axes_of(p.shape)
    if (axes is None) != (name == "v"):
        return jnp.zeros((1,), p.dtype)
    left_out = None if axes is None else axes[name == "v_row"]
    return filled_like(p, 0, axes=[n for n in range(p.ndim) if n != left_out])


def _size(x: jax.Array, by_row: bool) -> jax.Array:
    """The root mean square, of all or of each row."""
    return jnp.sqrt(per_row(row_mean(x**2), x) if by_row else jnp.mean(x**2))
