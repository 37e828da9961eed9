"""Missed steps in closed form.

Without a gradient the state of an optimizer only decays, so that what a missed step adds
to a row is a factor of that row (its momentum, say) times a number that depends on the
step alone. The sum of these numbers over the missed steps is all that a row has to know.
With ``n`` steps taken, ``k`` of them missed, and weight decay shrinking what was moved
before::

    sum(lr(s + j) * weight(s + j) * ratio**j * (decay of the steps s+j+1 .. n), j = 1 .. k)

where ``s = n - k`` is the last step of the row. For ``k`` up to a window, beyond which
``ratio**j`` is lost to rounding, it is an entry of a small table, made anew for every
``n``. For longer gaps it no longer grows: it is what was still to come at step ``s``, times
the decay since. Without a schedule that is an entry of a table as well, which is made once
and ends where the corrections of the means do. With one it is the row's snapshot, taken at
the last step of the row (a schedule knows the future).

All numbers have the dtype of the clock's run: float64 where a table has it, else float32.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jslices._place import boundary
from jslices._typing import Arrays, Scalar, Schedule
from jslices.optim.engine.rule import weight_seen

#: What is left of a term beyond the window, relative to the first, and how much of a square
#: is the rounding of what is taken from it: as multiples of the smallest ``eps``.
NEGLIGIBLE, ROUNDING = 2**-7, 8
#: A table of what is still to come has at most so many entries. That of Adam with
#: ``b2=0.999`` has 21,000.
MOST_STEPS = 1 << 17


#: Numbers of steps, counted from 1: of JAX in a program, of NumPy for what is a constant.
Steps = jax.Array | np.ndarray


class Series(NamedTuple):
    """One such sum."""

    ratio: Scalar  #: how its terms fall off.
    weight: Callable[[Steps], Any]  #: of each step, counted from 1.
    times_learning_rate: bool = True
    settles: Scalar = 0.0  #: decay per step of the distance to the limit of the weight.


class Missed(NamedTuple):
    """Sums over the missed steps of some rows, one number a row: ``[n, 1, ...]``."""

    steps: jax.Array  #: the number of steps, int32.
    sums: Arrays  #: one for each series, or two steps.
    decay: Any  #: what weight decay adds to the row, as a share of it; 0.0 without.
    run: Any  #: the sum of log(1 - lr * weight_decay), or of lr without weight decay.


class Around(NamedTuple):
    """What all rows share in a step."""

    table: jax.Array  #: sums over the last 0, 1, ... steps, a window: ``[series, steps]``.
    before: Arrays  #: what is kept with a row that has done all steps before it.
    after: Arrays  #: what is kept with a row that has done it.
    run: jax.Array  #: the run after it.


@dataclasses.dataclass(frozen=True, eq=False)
class MissedSteps:
    """The missed steps of an optimizer, and the numbers that they take.

    Attributes:
      advance: ``advance(missed, p, *state) -> (move, *state)``: what missed steps add to
        rows ``p``, and the state after them, which does not depend on ``p``.
      learning_rate: a number or a schedule.
      series: the sums it needs.
      weight_decay: of decoupled weight decay, which missed steps have applied as well.
      run: whether the movement is no sum of series: by :attr:`Missed.run`, say, which is
        kept then though there is no weight decay.
      average: the decay ``d`` of an average of the row, its last state array. Weight decay
        leaves ``average - pull * row`` alone, which fades by ``d`` a step: the pull is 1
        before the first step, then ``1 - d + d * pull / (1 - lr * weight_decay)``.
      by_two_steps: whether the sums are those of :func:`step_moments`, and rows get
        :func:`two_steps` of them: made of the small tables, it is not made for each row.
      noise: of steps that add normal noise to all rows, its deviation for a learning rate
        of 1, and a key, uint32 ``[2]``. The ``learning_rate`` is then that of the variance,
        its square, and the run is the variance.
    """

    advance: Callable[..., Arrays]
    learning_rate: Scalar | Schedule
    series: tuple[Series, ...] = ()
    weight_decay: Scalar | Schedule = 0.0
    run: bool = False
    by_two_steps: bool = False
    noise: tuple[float, jax.Array] | None = None
    average: float | None = None

    @property
    def decays(self) -> bool:
        rate = self.weight_decay
        return callable(rate) or isinstance(rate, jax.core.Tracer) or float(rate) != 0.0

    @property
    def _is_factor(self) -> bool:
        """Whether the learning rate is a factor that the tables leave to the sums.

        An array may be another one in each step. The tables are made once all the same.
        """
        return isinstance(self.learning_rate, jax.Array) and not self.decays

    @property
    def _is_scheduled(self) -> bool:
        return callable(self.learning_rate) or callable(self.weight_decay)

    @property
    def keeps_run(self) -> bool:
        """Whether how far the schedule has run must be kept with each row."""
        changes = self._is_scheduled or self.average is not None
        return changes and (self.run or self.decays)

    def keeps_series(self, dtype: np.dtype) -> bool:
        """Whether tail sums must be kept with each row."""
        long = self._is_scheduled or self._settled(dtype) > MOST_STEPS
        return long and bool(self.series)

    def pace(self, steps: Steps, dtype: np.dtype) -> Any:
        """The growth of the run in each of ``steps`` (counted from 1)."""
        rates = _at_each(self.learning_rate, steps, dtype)
        if not self.decays:
            return rates if self.run else 0 * rates
        log1p = np.log1p if isinstance(steps, np.ndarray) else jnp.log1p
        return log1p(-rates * _at_each(self.weight_decay, steps, dtype))

    @functools.cached_property
    def around(self) -> Callable[[jax.Array, jax.Array], Around]:
        """What all rows share in the step that follows ``count`` steps, from these and run.

        The steps before and after it are evaluated together, once: XLA compiles a schedule,
        powers and sums as slowly as all that is done to the rows of a table. Compiled, as
        eager it would dispatch dozens of scalars and small tables.
        """
        return jax.jit(self._around, inline=True)

    def _around(self, count: jax.Array, run: jax.Array) -> Around:
        dtype, width = run.dtype, self._window(run.dtype)
        back = np.arange(width, dtype=np.int32)
        ahead = np.arange(1, 2 + width * self.keeps_series(dtype), dtype=np.int32)
        steps = jnp.maximum(count + np.append(-back, ahead), 1)
        paces, sums = self.pace(steps, dtype), jnp.zeros((0, 1), dtype)
        if self.series:
            terms = self._terms(jnp, steps, dtype)
            if self.decays:
                terms = terms * self._shares(steps, run, width)[None]
            heads = jnp.where((back < count)[None], terms[:, :width], 0)
            heads = jnp.cumsum(heads * self._powers(-back, dtype), axis=1)
            sums = jnp.pad(heads * self._powers(back + 1, dtype), ((0, 0), (1, 0)))
            if self.keeps_series(dtype):  # what is to come after this step and before it
                now = jnp.sum(terms[:, width:] * self._powers(ahead, dtype), axis=1)
                powers = self._powers(ahead[1:] - 1, dtype)
                later = jnp.sum(terms[:, width + 1 :] * powers, axis=1)
                if self.decays:
                    later = later * jnp.exp(paces[width])
                sums = jnp.append(sums, jnp.stack([now, later], axis=1), axis=1)
            sums = self._summed_up(jnp, sums, dtype)
        kept = [tuple(sums[:, i]) if self.keeps_series(dtype) else () for i in (-2, -1)]
        if not self.keeps_run:
            return Around(sums, kept[0], kept[1], run)
        # A sum of two numbers, as small steps are many.
        more = paces[width] + run[1]
        total = run[0] + more
        part = total - run[0]
        new = [total, (run[0] - (total - part)) + (more - part)]
        if self.average is not None:
            new.append(1 - self.average + self.average * run[2] * jnp.exp(run[0] - total))
        return Around(sums, (*kept[0], *run), (*kept[1], *new), jnp.stack(new))

    def _shares(self, steps: jax.Array, run: jax.Array, width: int) -> jax.Array:
        """What decay leaves until now of what moved in each of ``steps``.

        The first ``width`` of them are the last ones, backwards. As many times as much has
        to move in each of the others, which come next.
        """
        paces = self.pace(steps, run.dtype)
        far = jnp.cumsum(paces)
        is_back = np.arange(paces.size) < width
        return jnp.exp(jnp.where(is_back, far - paces, far[width - 1] - far))

    @functools.cached_property
    def parts(self) -> "tuple[MissedSteps, ...]":
        """What these steps do to a row, and to its average."""
        if self.average is None:
            return (self,)
        fields = {x.name: getattr(self, x.name) for x in dataclasses.fields(self)}
        return self, _OfAverage(**fields, of_row=self)

    def missed(
        self,
        count: jax.Array,
        run: jax.Array,
        tables: tuple[jax.Array, jax.Array],
        last: jax.Array,
        snapshot: Sequence[jax.Array],
    ) -> Missed:
        """The missed steps of rows, from the ``last`` step ``[n]`` of each.

        ``tables`` are :attr:`Around.table` and :meth:`after_each`; ``snapshot`` is what was
        kept with the rows then, ``[n]`` each.
        """
        table, after_each = tables
        steps = count - last
        if self.keeps_run:
            high, low, *_ = snapshot[len(snapshot) - len(run) :]
            since = (run[0] - high) + (run[1] - low)
        else:
            since = steps * self.pace(jnp.ones((1,), jnp.int32), run.dtype)[0]
        decay = jnp.expm1(since) if self.decays else jnp.zeros_like(since)
        sums: Arrays = ()
        if self.series:
            kept = snapshot[: len(self.series)]
            tails = kept if self.keeps_series(run.dtype) else _read(after_each, last)
            tails = self._scaled(1 + decay, tails)
            is_near = steps <= self._window(run.dtype)
            near = _read(table, steps)
            sums = tuple(jnp.where(is_near, *x) for x in zip(near, tails, strict=True))
        if self._is_factor:
            factors = [x.times_learning_rate for x in self.series]
            sums = self._scaled(self.learning_rate, sums, factors)
        return Missed(steps, sums, decay, since)

    def _scaled(self, factor: Any, sums: Any, which: Sequence[bool] = ()) -> Arrays:
        """The sums ``[n]`` of terms that are so many times as large."""
        which = (True, True, False, False) if self.by_two_steps else which
        scales = which or [True] * len(self.series)
        return tuple(factor * x if y else x for x, y in zip(sums, scales, strict=True))

    def _summed_up(self, xp: Any, sums: Any, dtype: np.dtype) -> Any:
        """What rows are told of their sums ``[series, ...]``."""
        return two_steps(xp, sums, dtype) if self.by_two_steps else sums

    def _terms(self, xp: Any, steps: Steps, dtype: np.dtype) -> Any:
        """``[series, steps]``: weight and learning rate of each of ``steps``."""
        rate = 1.0 if self._is_factor else self.learning_rate
        one, rates = (_at_each(x, steps, dtype) for x in (1.0, rate))
        numbers = steps.astype(dtype)
        terms = [
            x.weight(numbers) * (rates if x.times_learning_rate else one)
            for x in self.series
        ]
        return xp.stack(terms)

    def _powers(self, exponents: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """``[series, *exponents]``: powers of the ratio of each."""
        with np.errstate(over="ignore"):  # of what a window much longer than its own has
            powers = np.stack([float(x.ratio) ** exponents for x in self.series])
            return powers.astype(dtype)

    def _window(self, dtype: np.dtype) -> int:
        """The number of terms of the series that are not negligible."""
        return max((_steps_to_vanish(x.ratio, dtype) for x in self.series), default=0)

    def _settled(self, dtype: np.dtype) -> int:
        """The step from which on the weights of the series no longer change."""
        return max((_steps_to_vanish(x.settles, dtype) for x in self.series), default=0)

    def after_each(self, dtype: np.dtype) -> jax.Array:
        """What is to come after 0, 1, ... steps, if not scheduled: ``[series, steps]``."""
        if self.keeps_series(dtype) or not self.series:
            return jnp.zeros((0, 1))
        numbers = (self.learning_rate, self.weight_decay)
        traced = any(isinstance(x, jax.core.Tracer) for x in numbers)
        made_here = functools.partial(self._tail_sums, jnp)
        sums = (made_here if traced and not self._is_factor else self._constants)(dtype)
        return jnp.asarray(sums)

    @functools.cached_property
    def _constants(self) -> Callable[[np.dtype], np.ndarray]:
        """In NumPy: nothing has to be compiled for it, and under ``jit`` it is a constant.

        Weights are those of the dtype, which Optax corrects its means in.
        """
        return functools.cache(lambda dtype: self._tail_sums(np, dtype).astype(dtype))

    def _tail_sums(self, xp: Any, dtype: np.dtype) -> Any:
        """:meth:`after_each`, by NumPy or JAX."""
        wide = np.float64 if xp is np else dtype
        reach = 1 << (2 * self._window(dtype) - 1).bit_length()
        steps = xp.arange(1, self._settled(dtype) + reach + 1, dtype=np.int32)
        factors = xp.asarray([[series.ratio] for series in self.series], wide)
        if self.decays:
            factors = factors * xp.exp(-self.pace(steps[:1], dtype)[0].astype(wide))
        sums, ahead = factors * self._terms(xp, steps, dtype), 1
        while ahead < reach:  # sums over the next 1, 2, 4, ... steps
            sums = sums[:, :-ahead] + factors * sums[:, ahead:]
            factors, ahead = factors * factors, 2 * ahead
        return self._summed_up(xp, sums, dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class _OfAverage(MissedSteps):
    """What missed steps do to ``average - pull * row``: a quantity that decays by ``d``.

    Weight decay of the row does nothing else to it, by the choice of the pull. A step that
    moves the row by ``u`` adds ``-d * share * u``, where ``d * share = pull - (1 - d)``
    with the pull after the step; without weight decay the pull and the share are 1.
    """

    of_row: Any = None
    decays, keeps_run = True, False  # type: ignore[assignment]

    @property
    def _is_factor(self) -> bool:
        return self.of_row._is_factor  # type: ignore[no-any-return]

    def keeps_series(self, dtype: np.dtype) -> bool:
        return bool(self.series) and (self.of_row.decays or super().keeps_series(dtype))

    def pace(self, steps: Steps, dtype: np.dtype) -> Any:
        return _at_each(math.log(self.average), steps, dtype)  # type: ignore[arg-type]

    def _shares(self, steps: jax.Array, run: jax.Array, width: int) -> jax.Array:
        faded = super()._shares(steps, run, width)
        if not self.of_row.decays:
            return faded
        d, left = self.of_row.average, self.of_row._shares(steps, run, width)
        # A pull is ``1 - d`` and ``d / (1 - lr * weight_decay)`` of the one before: what
        # each step adds, as it has grown until now.
        adds = (1 - d) * faded / left
        back, ahead = jnp.cumsum(adds[:width]), jnp.cumsum(adds[width:])
        pull = jnp.append(run[2] - back, run[2] + ahead - adds[width:])
        return left * pull / d


def momentum_series(b1: Scalar, nesterov: bool = False, corrected: bool = True) -> Series:
    """How a first moment ``m`` goes on without gradients, ``b1**j * m`` after j steps."""

    def weight(step: Steps) -> Any:
        ahead = b1 if nesterov else 1.0
        return ahead / weight_seen(b1, step + nesterov) if corrected else ahead

    return Series(b1, weight, settles=b1 if corrected else 0.0)


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
        def weight(step: Steps) -> Any:
            exponent = 0.5 if eps_hat else -of / 2
            return first.weight(step) * weight_seen(b2, step) ** exponent

        return Series(b1 * b2 ** (of / 2), weight, settles=max(b1, b2))

    return tuple(power(of) for of in (-1, 0, 1, 2))


def two_steps(xp: Any, sums: Any, dtype: np.dtype) -> Any:
    """Two sizes ``w/q``, then the ``q`` of each: two steps in place of all missed ones.

    This is Gauss' quadrature with two nodes: exact for every cubic in ``q``, and so for a
    step whose ``eps`` is nothing, or everything, against the root. By NumPy or JAX.
    """
    total = xp.where(sums[0] != 0, sums[0], 1.0)
    mean, square, cube = sums[1:] / total[None]
    variance = square - mean**2
    # Of a single step it is rounding, and its root has an infinite derivative at zero.
    varies = variance > ROUNDING * jnp.finfo(dtype).eps * square
    variance = xp.where(varies, variance, 1.0)
    third = cube - 3 * mean * square + 2 * mean**3
    skew = xp.where(varies, third / (2 * variance), 0.0)
    apart = xp.where(varies, xp.sqrt(skew**2 + variance), 0.0)
    upper = xp.where(varies, (apart - skew) / xp.where(varies, 2 * apart, 1), 0.5)
    low, high = xp.maximum(mean + skew - apart, 0.0), mean + skew + apart
    # Learning rates of both signs have no mean; the root is then taken as it was.
    usual = (mean > 0) & (square > 0)
    low, high = xp.where(usual, low, 1.0), xp.where(usual, high, 1.0)
    return xp.stack([(1 - upper) * sums[0], upper * sums[0], low, high])


def fading(decay: Scalar, missed: Missed) -> jax.Array:
    """``decay ** steps``, what the missed steps leave of a decaying mean."""
    dtype = missed.run.dtype
    return jnp.power(jnp.asarray(decay, dtype), missed.steps.astype(dtype))


def _at_each(value: Scalar | Schedule, steps: Steps, dtype: np.dtype) -> Any:
    """A hyperparameter at each of ``steps`` (a schedule counts from 0)."""
    if callable(value):
        return jax.vmap(lambda step: jnp.asarray(value(step), dtype))(steps - 1)
    if isinstance(steps, np.ndarray):
        return np.full(steps.shape, value, dtype)
    return jnp.broadcast_to(jnp.asarray(value, dtype), steps.shape)


def _read(table: jax.Array, steps: jax.Array) -> jax.Array:
    """The numbers ``[series, n]`` in columns of a table, whose last goes on for ever.

    Each series by itself on a TPU, which of all together would read a tile for each number.
    """
    near = jnp.minimum(steps, table.shape[1] - 1)
    if boundary.platform_of(table) != "tpu":
        return table.at[:, near].get(mode="promise_in_bounds")
    return jnp.stack([x.at[near].get(mode="promise_in_bounds") for x in table])


def _steps_to_vanish(ratio: Scalar, dtype: np.dtype) -> int:
    left = NEGLIGIBLE * float(jnp.finfo(dtype).eps)
    return max(1, math.ceil(math.log(left) / math.log(max(ratio, left))))
