"""Missed steps in closed form, by a log of steps.

Without a gradient the state of an optimizer only decays, so that what a missed step adds
to a row is a factor of that row (its momentum, say) times a number that depends on the
steps alone. For a row whose last step was ``s``, now that ``n`` are done::

    S(s, n) = sum(f(t) * ratio**(t - s) * P(t, n), t = s+1 .. n)
    P(t, n) = prod(1 - lr(u) * weight_decay(u), u = t+1 .. n)

with ``f(t) = lr(t) * weight(t)``. The log keeps these numbers by step: column ``s % L`` is
what a row that did its last step at ``s`` has to know. Step ``n`` opens its own column,
and brings those of the last W steps up to date, ``S(s, n) = S(s, n - 1) * (1 - lr(n) *
weight_decay(n)) + f(n) * ratio**(n - s)``. Beyond this window ``ratio**W`` is lost to
rounding, and a column stays as it is: what is left of it is ``S(s, s + W) * P(s + W, n)``.
Only rates of steps that were taken are used, whatever they come from. docs/exact.md has it
in pictures, and what was measured. Begin with ``opened``, ``logged`` and ``missed``.

All numbers have the dtype of the log: float64 where a table has it, else float32.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import Partial
from jax.typing import ArrayLike

from jslices._rows.access import per_row
from jslices._typing import Arrays, Change, Record, Scalar, Schedule
from jslices.optim.engine.numbers import next_count, value_at, weight_seen
from jslices.optim.engine.quadrature import gauss_nodes

#: Relative size below which a term of a sum is dropped, as a multiple of ``eps``.
NEGLIGIBLE = 2**-7
#: Logarithm of a factor that is zero: nothing is left of a row, in float64 either.
LOG_ZERO = -1e4
#: So many columns has a log at least of which rows take more than one.
LONG_LOG = 1 << 11
#: The window has at most so many steps, each of which every step brings up to date.
LONGEST_WINDOW = 1 << 18


#: A log ``[lines, L]``, and the step since when it is by the numbers of its rule, if kept.
Log: TypeAlias = tuple[jax.Array | None, jax.Array | None]


class Series(NamedTuple):
    """A sum over the missed steps."""

    ratio: Scalar  #: how its terms fall off.
    weight: Callable[[Any], Any]  #: of a step, counted from 1.
    times_learning_rate: bool = True


class Missed(NamedTuple):
    """Numbers of the missed steps of some rows, one a row: ``[n, 1, ...]``."""

    steps: jax.Array  #: the number of steps, int32.
    sums: Arrays  #: one for each series; or of nodes, their weights, then their places.
    decay: Any  #: what weight decay adds to the row, as a share of it; 0.0 without.
    rates: Any  #: the sum of the learning rates; 0.0 where it is not kept.
    unknown: Any  #: NaN for rows of which the log does not know what they missed, or 0.
    #: ``(decay, rates)`` of these steps without the first ``[n, *D]`` of each row.
    without_first: Partial

    def for_rows(self, p: jax.Array, dtype: np.dtype) -> "Missed":
        """The same for the arithmetic of rows ``p`` ``[n, *D]``."""
        number = lambda x: per_row(jnp.asarray(x, dtype), p)  # noqa: E731
        sums, steps = tuple(map(number, self.sums)), per_row(self.steps, p)
        decay, rates, unknown = map(number, (self.decay, self.rates, self.unknown))
        return Missed(steps, sums, decay, rates, unknown, self.without_first)


@dataclasses.dataclass(frozen=True, eq=False)
class MissedSteps:
    """The missed steps of an optimizer, and the numbers that they take.

    Attributes:
      advance: ``advance(missed, p, state) -> (move, new_state)``: what missed steps add to
        rows ``p``, and what they change of the state, which does not depend on ``p``.
      learning_rate: a number or a schedule.
      series: the sums it needs.
      weight_decay: of decoupled weight decay, which missed steps have applied as well.
      keeps_rates: whether the movement takes the sum of the learning rates.
      average: the decay ``d`` of an average of the row, ``ema`` of its state. Weight decay
        leaves ``average - pull * row`` alone, which fades by ``d`` a step: the pull is 1
        before the first step, then ``1 - d + d * pull / (1 - lr * weight_decay)``.
      looks_on: whether ``advance`` takes ``without_first``, and so columns of later steps.
      panels: with the moments of :mod:`quadrature <jslices.optim.engine.quadrature>`, the
        ages that end its panels but the last. Rows get the nodes, not the moments.
      noise: of steps that add normal noise to all rows, its deviation for a learning rate
        of 1, and a key, uint32 ``[2]``. The ``learning_rate`` is then that of the variance,
        its square, and the sum of the rates is the variance.
      numbers: those that rows miss steps by, but for rates.
    """

    advance: Callable[["Missed", jax.Array, Record], Change]
    learning_rate: Scalar | Schedule
    series: tuple[Series, ...] = ()
    weight_decay: Scalar | Schedule = 0.0
    keeps_rates: bool = False
    looks_on: bool = False
    panels: tuple[int, ...] | None = None
    noise: tuple[float, jax.Array] | None = None
    average: float | None = None
    numbers: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        width = self.window(np.dtype(np.float32))
        if width > LONGEST_WINDOW:
            ratio = max(float(x.ratio) for x in self.series)
            raise ValueError(
                f"missed steps count until they have faded, got a momentum that fades by "
                f"{ratio:.6g} a step, for {width:,} steps; wanted at most "
                f"{LONGEST_WINDOW:,}, a decay up to 0.99992 or so"
            )

    @property
    def decays(self) -> bool:
        rate = self.weight_decay
        return callable(rate) or isinstance(rate, jax.core.Tracer) or float(rate) != 0.0

    def rate(self, count: Any, dtype: np.dtype) -> jax.Array:
        """The learning rate of the step that follows ``count`` steps."""
        return jnp.asarray(value_at(self.learning_rate, count), dtype)

    def decay(self, count: Any, dtype: np.dtype) -> jax.Array:
        """The share of a row that weight decay takes in that step."""
        rate = value_at(self.weight_decay, count)
        return self.rate(count, dtype) * jnp.asarray(rate, dtype)

    # --- the log --------------------------------------------------------------------------

    @functools.cached_property
    def _lines(self) -> dict[str, slice]:
        """The lines of the log: its sums, those of the average, and what runs on."""
        sums, averages = len(self.series) * self._num_panels, self.average is not None
        sizes = {
            "sums": sums,
            "average": sums * averages,
            # What rows get of these two: the same, or the nodes of each panel.
            "nodes": sums * (1 + averages) * (self.panels is not None),
            "decay": 3 * self.decays,  # the logarithm, in two numbers, and the sign
            "end": 3 * self.decays * bool(sums),  # the same, at the end of the window
            "rates": 2 * self.keeps_rates,
            "pull": self.decays and averages,
        }
        ends = np.cumsum([*sizes.values()]).tolist()
        return {k: slice(end - sizes[k], end) for k, end in zip(sizes, ends, strict=True)}

    @property
    def _num_panels(self) -> int:
        return 1 if self.panels is None else len(self.panels) + 1

    def window(self, dtype: np.dtype) -> int:
        """The number of steps back whose columns are not finished."""
        return max((_steps_to_vanish(x.ratio, dtype) for x in self.series), default=0)

    def opened(self, columns: int, dtype: np.dtype) -> jax.Array | None:
        """The log ``[lines, L]`` before the first step, of so many columns at least.

        None if rows need no number of the steps that they miss.
        """
        lines = self._lines
        if not lines["pull"].stop:
            return None
        columns = max(columns, 2 * self._block(dtype), LONG_LOG * self.looks_on)
        log = jnp.zeros((lines["pull"].stop, 1 << (columns - 1).bit_length()), dtype)
        signs = range(lines["decay"].start + 2, lines["end"].stop, 3)
        return log.at[
            np.array([*signs, *range(*lines["pull"].indices(len(log)))], int)
        ].set(1)

    def fits(self, log: jax.Array | None) -> bool:
        """Whether an array has the form of the log, or is an empty one."""
        if log is None:
            return not self._lines["pull"].stop
        lines, columns = self._lines["pull"].stop, 2 * self._block(log.dtype)
        return log.shape[0] == lines and (log.shape[1] >= columns or not log.size)

    @functools.cached_property
    def logged(self) -> Callable[[jax.Array | None, jax.Array], jax.Array | None]:
        """The log after the step that follows ``count`` steps, ``(log, count) -> log``.

        Compiled, as eager it would dispatch dozens of scalars.
        """
        return jax.jit(self._logged, inline=True)

    def _logged(self, log: jax.Array | None, count: jax.Array) -> jax.Array | None:
        if log is None or is_empty(log):
            return log
        dtype, step, lines = log.dtype, next_count(count), self._lines
        rate, decay = self.rate(count, dtype), self.decay(count, dtype)
        # The window is in two blocks, this step's and the one before, each a slice.
        width, block = self.window(dtype), self._block(dtype)
        ends = [(step - back & -block) & (log.shape[1] - 1) for back in (block, 0)]
        old = jnp.concatenate([_slice(log, x, block) for x in ends], axis=1)
        ages = block + (step & (block - 1)) - np.arange(2 * block, dtype=np.int32)
        before = _at(log, step - 1)
        opened, new = self._run_on(before, rate, decay), old
        if self.series:
            number = step.astype(dtype)
            weights = [
                jnp.asarray(x.weight(number), dtype)
                * (rate if x.times_learning_rate else 1)
                for x in self.series
            ]
            powers = _slice(
                self._powers(dtype), block - 1 - (step & (block - 1)), 2 * block
            )
            terms = jnp.stack(weights * self._num_panels)[:, None] * powers
            parts = [old[lines["sums"]] * (1 - decay if self.decays else 1) + terms]
            if self.average is not None:
                share = before[lines["pull"].start] / (1 - decay) if self.decays else 1
                parts.append(old[lines["average"]] * self.average + share * terms)
            if self.panels is not None:
                parts.append(self._nodes(jnp.concatenate(parts)))
            parts.append(old[lines["nodes"].stop : lines["end"].start])
            end = opened[lines["decay"], None]
            parts.append(jnp.broadcast_to(end, old[lines["end"]].shape))
            new = jnp.concatenate([*parts, old[lines["end"].stop :]])
        in_window = ((ages > 0) & (ages <= width))[None]
        new = jnp.where(in_window, new, jnp.where((ages == 0)[None], opened[:, None], old))
        for x, part in zip(ends, jnp.split(new, 2, axis=1), strict=True):
            log = lax.dynamic_update_slice_in_dim(log, part, x, 1)
        return log

    def _block(self, dtype: np.dtype) -> int:
        """A power of two of columns that a window fits in."""
        return 1 << self.window(dtype).bit_length()

    def _run_on(self, column: jax.Array, rate: jax.Array, decay: jax.Array) -> jax.Array:
        """The column that a step opens, from that of the step before."""
        lines, sums = self._lines, self._lines["nodes"].stop
        parts = [jnp.zeros(sums, column.dtype)]
        if self.decays:
            high, low, sign = column[lines["decay"]]
            usual = decay < 1
            growth = jnp.where(
                usual,
                jnp.log1p(-jnp.where(usual, decay, 0)),
                jnp.where(decay > 1, jnp.log(jnp.where(usual, 2, decay) - 1), LOG_ZERO),
            )
            sign = jnp.where(decay > 1, -sign, sign)
            parts += [jnp.stack([*_added(high, low, growth), sign])] * (1 + bool(sums))
        if self.keeps_rates:
            high, low = column[lines["rates"]]
            parts.append(jnp.stack(_added(high, low, rate)))
        if self.decays and self.average is not None:
            pull = column[lines["pull"]] / (1 - decay)
            parts.append(1 - self.average + self.average * pull)
        return jnp.concatenate(parts)

    def _powers(self, dtype: np.dtype) -> np.ndarray:
        """``[sums, 3 * block]``: what the ratios leave of a term, from the oldest one on.

        0 in other panels than that of its age, and outside of the window.
        """
        width, block = self.window(dtype), self._block(dtype)
        ages = 2 * block - 1 - np.arange(3 * block)
        inside = np.clip(ages, 0, width)
        powers = np.array([[float(x.ratio)] for x in self.series]) ** inside
        panel = np.searchsorted(self.panels or (), ages)
        here = (panel == np.arange(self._num_panels)[:, None, None]) & (ages == inside)
        return np.where(here, powers, 0).reshape(-1, ages.size).astype(dtype)

    # --- rows -----------------------------------------------------------------------------

    def missed(
        self,
        known_log: Log,
        count: jax.Array,
        last: jax.Array,
        columns: Sequence[jax.Array] = (),
    ) -> tuple[Missed, Missed, tuple[Any, Any]]:
        """The missed steps of rows since the ``last`` one ``[n]`` of each, and of averages.

        And the pull of the average, then and now. A row that missed more steps than the log
        has columns needs one of its own, ``columns`` ``[n]`` of each line, or gets NaN; as
        does one that missed steps before the log, with which comes since when, was by these
        numbers.
        """
        (log, since), lines = known_log, self._lines
        if log is None:
            log = jnp.zeros((0, 1), float)
        dtype, steps = log.dtype, count - last
        known = steps < log.shape[1]
        column = self._column(log, last)
        if columns:
            pairs = zip(column, columns, strict=True)
            column = [jnp.where(known, mine, own) for mine, own in pairs]
        decay, rates = self._since(log, count, column)
        of_row, of_average = self._told(column)
        if self.decays and self.series:
            left, _ = self._since(log, count, column, "end")
            of_row = self._scaled(of_row, 1 + left)
        without_first = Partial(self._without_first, log, count, last)
        is_known = known if log.size and not columns else True
        is_known = is_known if since is None else is_known & (last >= since)
        unknown = jnp.where(is_known, 0, jnp.asarray(jnp.nan, dtype))
        own = Missed(steps, of_row, decay, rates, unknown, without_first)
        if self.average is None:
            return own, own, (1.0, 1.0)
        fades = jnp.asarray(math.log(self.average), dtype)
        later = jnp.maximum(steps - self.window(dtype), 0)  # than the window
        of_average = self._scaled(of_average, jnp.exp(fades * later))
        averaged = own._replace(sums=of_average, decay=jnp.expm1(fades * steps))
        if not self.decays:
            return own, averaged, (1.0, 1.0)
        (was,), (pull,) = column[lines["pull"]], _at(log, count)[lines["pull"]]
        return own, averaged, (was, pull)

    def _without_first(
        self, log: jax.Array, count: jax.Array, last: jax.Array, first: jax.Array
    ) -> tuple[Any, Any]:
        return self._since(log, count, self._column(log, per_row(last, first) + first))

    def _column(self, log: jax.Array, step: jax.Array) -> list[jax.Array]:
        """What rows have to know whose last step was ``step``, ``[n]``, of each line.

        Each line by itself: XLA:CPU would transpose what it gathers of all together, and a
        TPU read a tile for each number.
        """
        at = step & (log.shape[1] - 1)
        return [x.at[at].get(mode="promise_in_bounds") for x in log]

    def _since(
        self,
        log: jax.Array,
        count: jax.Array,
        column: Sequence[jax.Array],
        start: str = "decay",
    ) -> tuple[Any, Any]:
        """What decay has added since a column was opened, and the sum of the rates.

        Or what it has added since the ``"end"`` of the column's window.
        """
        lines = self._lines
        decay = rates = jnp.zeros_like(column[0]) if column else jnp.zeros((), log.dtype)
        if not (self.decays or self.keeps_rates):
            return decay, rates
        now = _at(log, count)
        if self.decays:
            *before, sign = column[lines[start]]
            *log_now, sign_now = now[lines["decay"]]
            log_left = _apart(log_now, before)
            decay = jnp.expm1(log_left)
            decay = jnp.where(sign * sign_now < 0, -2 - decay, decay)
        if self.keeps_rates:
            rates = _apart(now[lines["rates"]], column[lines["rates"]])
        return decay, rates

    def _nodes(self, sums: jax.Array) -> jax.Array:
        """The nodes of each panel from the sums ``[lines, W]`` of the row, and its average:
        of each the weights, then the places."""
        moments = sums.reshape(-1, self._num_panels, 4, sums.shape[-1])
        weights, places = gauss_nodes(jnp.moveaxis(moments, 2, 0))
        return jnp.stack([weights, places], axis=1).reshape(sums.shape)

    def _told(self, column: Sequence[jax.Array]) -> tuple[Arrays, Arrays]:
        """The sums of a column as rows get them, and those of their average."""
        lines = self._lines
        if self.panels is None:
            return tuple(column[lines["sums"]]), tuple(column[lines["average"]])
        nodes, half = tuple(column[lines["nodes"]]), lines["sums"].stop
        return nodes[:half], nodes[half:]

    def _scaled(self, sums: Arrays, factor: jax.Array) -> Arrays:
        """Sums of terms that are so many times as large."""
        weights = len(sums) if self.panels is None else len(sums) // 2
        return *(factor * x for x in sums[:weights]), *sums[weights:]


def hash_of(missed: Sequence[MissedSteps]) -> Any:
    """A hash, int32 ``[]``, of the numbers that rows miss steps by."""
    numbers = [y for x in missed for y in (*x.numbers, x.average or 0)]
    xp: Any = jnp if any(isinstance(x, jax.core.Tracer) for x in numbers) else np
    bits = xp.stack([xp.asarray(x, np.float32) for x in numbers]).view(np.uint32)
    odd = np.array([pow(0x9E3779B1, n + 1, 1 << 32) for n in range(len(numbers))], "u4")
    return (bits * odd).sum(dtype=np.uint32).view(np.int32)


def is_empty(log: jax.Array | None) -> bool:
    """Whether a log has no column, as those of earlier versions where it is now None."""
    return log is None or not log.size


def _at(log: jax.Array, step: jax.Array) -> jax.Array:
    """The column ``[lines]`` of a step."""
    return _slice(log, step & (log.shape[1] - 1), 1)[:, 0]


def _slice(log: ArrayLike, start: jax.Array, columns: int) -> jax.Array:
    return lax.dynamic_slice_in_dim(jnp.asarray(log), start, columns, axis=1)


def _added(high: jax.Array, low: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``high + low + x``, again as two numbers, as small steps are many."""
    more = x + low
    total = high + more
    part = total - high
    return total, (high - (total - part)) + (more - part)


def _apart(now: Any, before: Any) -> Any:
    """The difference of two such sums."""
    (high, low), (high_before, low_before) = now, before
    return (high - high_before) + (low - low_before)


def momentum_series(b1: Scalar, nesterov: bool = False, corrected: bool = True) -> Series:
    """How a first moment ``m`` goes on without gradients, ``b1**j * m`` after j steps."""

    def weight(step: Any) -> Any:
        ahead = b1 if nesterov else 1.0
        return ahead / weight_seen(b1, step + nesterov) if corrected else ahead

    return Series(b1, weight)


def step_moments(
    b1: float, b2: float, nesterov: bool = False, eps_hat: bool = False
) -> tuple[Series, ...]:
    """Sums over the missed steps of Adam, of ``w/q``, ``w``, ``w*q`` and ``w*q**2``.

    ``w`` is how far a step goes, ``q`` how far the root of the second moment has shrunk,
    of the corrected one without ``eps_hat``: a step moves by
    ``w * m / (sqrt(v) * q + eps)``.
    """
    first = momentum_series(b1, nesterov)

    def power(of: int) -> Series:
        def weight(step: Any) -> Any:
            exponent = 0.5 if eps_hat else -of / 2
            return first.weight(step) * weight_seen(b2, step) ** exponent

        return Series(b1 * b2 ** (of / 2), weight)

    return tuple(power(of) for of in (-1, 0, 1, 2))


def only_decay(missed: Missed, p: jax.Array, state: Record) -> Change:
    """Missed steps that move rows by weight decay alone."""
    return missed.decay * p, {}


def faded(decay: Scalar, missed: Missed, mean: jax.Array) -> jax.Array:
    """What the missed steps leave of a decaying mean: ``decay ** steps`` of it.

    Nothing less than the smallest number, so that an infinite mean stays, as in a step.
    """
    dtype = jnp.result_type(missed.decay)
    left = jnp.power(jnp.asarray(decay, dtype), missed.steps.astype(dtype))
    return jnp.maximum(left, jnp.finfo(dtype).tiny) * mean


def _steps_to_vanish(ratio: Scalar, dtype: np.dtype) -> int:
    left = NEGLIGIBLE * float(jnp.finfo(dtype).eps)
    return max(1, math.ceil(math.log(left) / math.log(max(ratio, left))))
