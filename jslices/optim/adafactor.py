"""Adafactor: a second moment in two factors, one number for each row and each column."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jslices._place.boundary import filled_like
from jslices._slices import IndexedSlices
from jslices._typing import Change, PyTree, Record, Scalar, Schedule
from jslices.optim.engine import arguments, rule
from jslices.optim.engine.constructors import optimizer
from jslices.optim.engine.protocol import GradientTransformation
from jslices.optim.engine.rule import Rule, Step
from jslices.optim.engine.step import derivable, step_rows
from jslices.optim.engine.transformation import transformation


class AdafactorState(NamedTuple):
    """State of :func:`adafactor`; ``[1]`` in place of an array that is not kept."""

    count: jax.Array  # type: ignore[assignment]  #: int32 ``[]``, the steps taken.
    v_row: Any  #: the mean of squares along the longer axis: ``[D]`` for a tall table.
    v_col: Any  #: that along the shorter: ``[V]`` for a tall table.
    v: Any  #: like params, where nothing is factored.
    momentum: Any = None  #: like params, the mean of the updates; None without.


@optimizer
def adafactor(
    learning_rate: arguments.LearningRate | None = None,
    min_dim_size_to_factor: arguments.Count = 128,
    decay_rate: arguments.NotNegative = 0.8,
    decay_offset: arguments.Whole = 0,
    multiply_by_parameter_scale: bool = True,
    clipping_threshold: arguments.Positive | None = 1.0,
    momentum: arguments.Decay | None = None,
    dtype_momentum: arguments.StateDtype = "float32",
    weight_decay_rate: arguments.WeightDecay | None = None,
    eps: arguments.NotNegative = 1e-30,
    factored: bool = True,
    weight_decay_mask: PyTree = None,
    *,
    untouched: arguments.Untouched = "lazy",
) -> GradientTransformation:
    """Adafactor: gradients divided by the root of a second moment that is kept in factors.

    With ``b = 1 - t**-decay_rate`` the means ``r`` of ``g**2`` over each row and ``c`` over
    each column decay by b; ``u = g / sqrt(r * c / mean(c))``, clipped to a root mean square
    of ``clipping_threshold``, times the learning rate and the root mean square of p.

    For IndexedSlices the column means are those of the whole gradient, zeros included; the
    clipping and the scale of the parameter are **of each row by itself**, as those of a
    whole table would cost a pass over all of it.

    If the second moment is factored, rows share ``c``: a row whose square is not finite
    (NaN, infinite, or 1e20 in float32) spoils it for good, and every row that is stepped
    afterwards. Clip the gradients, skip such steps, or pass ``factored=False``, which keeps
    the damage in its row.

    Untouched rows: lazy. A row without gradient and its state are neither read nor written.

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
      weight_decay_mask: which parameters decay, the ``mask`` of :func:`jslices.adamw`.
      untouched: ``"lazy"``; ``"exact"`` is refused.

    Returns:
      A :class:`GradientTransformation`; ``update`` needs the parameters. State per row: one
      number (and D for the table) if factored, D if not; D more with momentum.

    Raises:
      ValueError: for ``untouched="exact"``; from ``update``, for slices of a factored
        parameter of rank 3 or more.

    Cost: a step reads and writes ``U * D`` elements of the parameter, ``U`` of the state.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> tx = js.adafactor(0.1, min_dim_size_to_factor=1)
      >>> table = jnp.ones((1000, 64))
      >>> sum(x.size for x in (tx.init(table).v_row, tx.init(table).v_col))
      1064

    Source: Shazeer and Stern, 2018; ``optax.adafactor``, with its names and defaults; dense
    gradients give its result.
    """
    rule.check_lazy(
        "adafactor", untouched, "as what a row misses depends on all the others"
    )
    if isinstance(min_dim_size_to_factor, jax.core.Tracer):
        raise TypeError(
            "adafactor needs min_dim_size_to_factor as a number that is known while "
            "tracing; with optax.inject_hyperparams under jax.jit pass "
            'static_args=("min_dim_size_to_factor",)'
        )
    axes_of = partial(factored_axes, factored, int(min_dim_size_to_factor))
    starts: dict[str, Callable[[jax.Array], jax.Array]] = {
        name: partial(_moment, name, axes_of) for name in ("v_row", "v_col", "v")
    }
    if momentum is not None:
        starts["momentum"] = rule.zeros(dtype_momentum)

    def rule_of(decay: Scalar | Schedule | None) -> Rule:
        def finished(step: Step, by_row: bool, u: Any, p: Any, state: Record) -> Change:
            """The update of the direction ``u``, and the new momentum if there is one."""
            new = {}
            if clipping_threshold is not None:
                u = u / jnp.maximum(1.0, _size(u, by_row) / clipping_threshold)
            if learning_rate is not None:
                rate = rule.value_at(learning_rate, step.count)
                constant = isinstance(learning_rate, int | float)
                u = rate * u if constant else u * jnp.asarray(rate, u.dtype)
            if multiply_by_parameter_scale:
                u = u * jnp.maximum(_size(p, by_row), 1e-3)
            if momentum is not None:
                u = rule.decayed(state["momentum"], u, momentum)
                new["momentum"] = u.astype(dtype_momentum)
            if decay is not None:
                u = rule.with_decay(u, p, decay, step.count)
            return -1 * u, new

        return _Factors(axes_of, eps, decay_rate, decay_offset, finished).rule(starts)

    first, other = rule_of(weight_decay_rate), rule_of(None)
    return transformation(AdafactorState, first, other=other, mask=weight_decay_mask)


@dataclasses.dataclass(frozen=True, eq=False)
class _Factors:
    """The second moment, and what uses it: ``finished(step, by_row, u, p, state)``."""

    axes_of: Callable[[tuple[int, ...]], tuple[int, int] | None]
    eps: Scalar
    decay_rate: Scalar
    decay_offset: int
    finished: Callable[..., Change]

    def rule(self, state: Mapping[str, Callable[[jax.Array], jax.Array]]) -> Rule:
        return Rule(
            state,
            lambda step: partial(self.on_array, step),
            update_slices=lambda step: partial(self.on_slices, step),
            sums_first=lambda p: self.axes_of(p.shape) is not None,
            reads_params=True,
        )

    def on_array(self, step: Step, g: jax.Array, p: jax.Array, state: Record) -> Change:
        """A step of a whole array."""
        axes = self.axes_of(p.shape)
        if axes is None:
            return self._unfactored(step, False, g, p, state)
        squares, (short, long) = rule.squared(g) + self.eps, axes
        v_row = self._mixed(step, state["v_row"], jnp.mean(squares, axis=long))
        v_col = self._mixed(step, state["v_col"], jnp.mean(squares, axis=short))
        axis = short - 1 if short > long else short
        row = (v_row / jnp.mean(v_row, axis=axis, keepdims=True)) ** -0.5
        u = g * jnp.expand_dims(row, long) * jnp.expand_dims(v_col**-0.5, short)
        u, mean = self.finished(step, False, u, p, state)
        return u, {"v_row": v_row, "v_col": v_col, **mean}

    def on_slices(self, step: Step, g: IndexedSlices, p: jax.Array, state: Record) -> Any:
        """A step of the rows that have a gradient."""
        axes = self.axes_of(p.shape)
        by_row = {k: x for k, x in state.items() if k in ("v", "momentum")}
        if axes is None:
            return step_rows(partial(self._unfactored, step, True), g, p, by_row)
        if p.ndim != 2:
            rows = "" if g.row_axes == 1 else f"; or keep the table as {list(g.flat.shape)}"
            raise ValueError(
                f"adafactor got slices of a factored parameter of shape {p.shape}, and "
                f"factors tables [V, D]: type factored=False{rows}"
            )
        # Of a tall table v_col has a number for each row.
        names = ("v_col", "v_row") if axes == (1, 0) else ("v_row", "v_col")
        return self._in_factors(step, g, p, state, *names)

    def _unfactored(
        self, step: Step, by_row: bool, g: Any, p: Any, state: Record
    ) -> Change:
        """A step of an array, or of rows, whose second moment is whole."""
        v = self._mixed(step, state["v"], rule.squared(g) + self.eps)
        u, mean = self.finished(step, by_row, g * v**-0.5, p, state)
        return u, {"v": v, **mean}

    def _in_factors(
        self, step: Step, g: IndexedSlices, p: jax.Array, state: Record, row: str, col: str
    ) -> Any:
        """A step of rows whose second moment is a number for each row and column."""
        columns, b = state[col], self._forgetting(step)
        total = jnp.sum(g.values**2, axis=0, dtype=columns.dtype)
        columns = self._mixed(step, columns, total / p.shape[0] + self.eps)

        def remember(g: jax.Array, p: None, state: Record) -> Change:
            mean = rule.row_mean(rule.squared(g) + self.eps)
            return g, {row: b * state[row] + (1.0 - b) * mean}

        _, factor = step_rows(remember, g, None, {row: state[row]}, unique=True)
        rows = factor[row]
        some = jnp.any(g.indices < p.shape[0])
        by_row, by_column = (
            derivable(jnp.broadcast_to(some, x.shape), x) for x in (rows, columns)
        )
        # The mean of whichever factor has fewer numbers than the other.
        tall = self.axes_of(p.shape) == (1, 0)
        mean_square = jnp.mean(by_column if tall else by_row)

        def kernel(g: jax.Array, p: jax.Array, state: Record) -> Change:
            mean = rule.per_row(state[row], g) / mean_square
            u = g * (by_column[None] * mean) ** -0.5
            return self.finished(step, True, u, p, state)

        momentum = {k: x for k, x in state.items() if k == "momentum"}
        u, new = step_rows(kernel, g, p, {row: rows, **momentum}, unique=True)
        return u, {**new, col: columns}

    def _forgetting(self, step: Step) -> jax.Array:
        """How much of a mean stays."""
        number = jnp.array(step.count - self.decay_offset + 1, jnp.float32)
        return 1.0 - number**-self.decay_rate

    def _mixed(self, step: Step, mean: jax.Array, new: jax.Array) -> jax.Array:
        b = self._forgetting(step)
        return (b * mean + (1.0 - b) * new).astype(mean.dtype)


def factored_axes(
    factored: bool, shortest: int, shape: tuple[int, ...]
) -> tuple[int, int] | None:
    """The second longest axis and the longest, if the second moment is factored."""
    order = np.argsort(shape)
    if not factored or len(shape) < 2 or shape[order[-2]] < shortest:
        return None
    return int(order[-2]), int(order[-1])


def _moment(
    name: str, axes_of: Callable[[tuple[int, ...]], tuple[int, int] | None], p: jax.Array
) -> jax.Array:
    """Initial ``v_row``, ``v_col`` or ``v`` of a parameter.

    A moment that the parameter does not have is an array of one number.
    """
    p = jnp.asarray(p)
    axes = axes_of(p.shape)
    if (axes is None) != (name == "v"):
        return jnp.zeros((1,), p.dtype)
    left_out = None if axes is None else axes[name == "v_row"]
    return filled_like(p, 0, axes=[n for n in range(p.ndim) if n != left_out])


def _size(x: jax.Array, by_row: bool) -> jax.Array:
    """The root mean square, of all or of each row."""
    squares = rule.squared(x)
    if not by_row:
        return jnp.sqrt(jnp.mean(squares))
    return jnp.sqrt(rule.per_row(rule.row_mean(squares), x))
