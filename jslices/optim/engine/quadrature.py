"""Gauss' quadrature for the missed steps of Adam and its relatives.

A row that missed some steps moves by the sum of ``w * m / (sqrt(v) * q + eps)`` over them,
where ``w`` and ``q`` depend on the steps alone (:func:`jslices.optim.engine.missed.
step_moments`), and ``eps / sqrt(v)`` is each element's own. So the steps are split into a
few panels by their age, and two nodes a panel take the place of its steps.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

#: Variance below this multiple of ``eps`` of the square is rounding error.
ROUNDING = 8
#: Panels are as many as keep the error of a movement below this share of it; a single one
#: may err a little more, by which Adam's defaults need one.
MOST_ERROR, MOST_ERROR_OF_ONE = 2.8e-3, 3.2e-3
#: Each node is a division for each element of a row.
MOST_PANELS = 12


def gauss_nodes(moments: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two steps in place of all of a panel: ``w/q`` of each, and ``q``: ``[..., 2, n]``.

    ``moments`` ``[4, ..., n]`` are the sums of ``w/q``, ``w``, ``w*q`` and ``w*q**2``. Two
    nodes are exact for every cubic in ``q``, and so for a step whose ``eps`` is nothing, or
    everything, against the root.
    """
    eps = jnp.finfo(moments.dtype).eps
    total = jnp.where(moments[0] != 0, moments[0], 1.0)
    mean, square, cube = moments[1:] / total[None]
    variance = square - mean**2
    # Of a single step it is rounding, and its root has an infinite derivative at zero.
    varies = (mean > 0) & (variance > ROUNDING * eps * square)
    variance = jnp.where(varies, variance, 1.0)
    third = jnp.where(varies, cube - 3 * mean * square + 2 * mean**3, 0.0)
    skew = third / (2 * variance)
    apart = jnp.sqrt(skew**2 + variance)
    varies &= apart < jnp.inf
    skew, apart = jnp.where(varies, skew, 0.0), jnp.where(varies, apart, 0.0)
    upper = jnp.where(varies, (apart - skew) / jnp.where(varies, 2 * apart, 1), 0.5)
    low, high = jnp.maximum(mean + skew - apart, eps * mean), mean + skew + apart
    # Learning rates of both signs have no mean; the root is then taken as it was.
    usual = (low > 0) & (square > 0) & (high < jnp.inf)
    low, high = jnp.where(usual, low, 1.0), jnp.where(usual, high, 1.0)
    weights = jnp.stack([(1 - upper) * moments[0], upper * moments[0]], axis=-2)
    return weights, jnp.stack([low, high], axis=-2)


@functools.cache
def panel_ends(b1: float, b2: float, eps_root: bool = False) -> tuple[int, ...]:
    """The ages that end the panels but the last: as few as :data:`MOST_ERROR` takes.

    By trial, at a constant learning rate and for each ``eps``, or ``eps_root``, against the
    root. Panels have equal shares of what is hard: a wide range of ``q`` that counts.

    Raises:
      ValueError: for decays that need too many.
    """
    if b1**2 <= 1e-8 * b2:
        return ()
    ages = np.arange(1.0, 2 + math.log(1e-4) / math.log(b1 / math.sqrt(b2)))
    cases: list[tuple[np.ndarray, ...]] = []
    for last in (math.inf, 1):  # after many steps, and after one, where q falls fastest
        seen1, seen2 = (-np.expm1((ages + last) * math.log(b)) for b in (b1, b2))
        log_q = (ages * math.log(b2) - np.log(seen2)) / 2
        w, q = np.exp(ages * math.log(b1) - log_q) / seen1, np.exp(log_q)
        small = np.exp(np.linspace(max(log_q[-1], -28), log_q[0], 24))[:, None]
        cases.append((w, q, small))
    falls = -np.diff(log_q, prepend=log_q[0])
    share = np.cumsum((w / np.cumsum(w)) ** 0.3 * falls**0.7)
    for n in range(1, MOST_PANELS + 1):
        ends = np.unique(np.searchsorted(share, share[-1] * np.arange(1, n) / n).clip(1))
        worst = max(_error(case, eps_root, [0, *ends]) for case in cases)
        if worst < (MOST_ERROR if n > 1 or eps_root else MOST_ERROR_OF_ONE):
            return tuple(ends.tolist())
    raise ValueError(
        f"b1={b1} and b2={b2} have no closed form of missed steps: b1**2 is too close to "
        f"b2, and they would take more than {2 * MOST_PANELS} nodes; wanted "
        f"b2 > b1**{1 / 0.75:.2f} or so"
    )


def _error(case: Sequence[np.ndarray], eps_root: bool, starts: Sequence[int]) -> float:
    """Of nodes in place of steps ``w/q`` at ``q``, relative: the worst of all panels."""
    w, q, small = case

    def step(q: np.ndarray) -> Any:
        return q / (np.hypot(q, small) if eps_root else q + small)

    total, *means = np.add.reduceat(w * q ** np.arange(4)[:, None], starts, axis=1)
    mean, square, cube = means / total
    variance = np.maximum(square - mean**2, 1e-12 * square)
    skew = (cube - 3 * mean * square + 2 * mean**3) / (2 * variance)
    apart = np.hypot(skew, np.sqrt(variance))
    taken = sum(
        step(mean + skew + side * apart) * total * (1 - side * skew / apart) / 2
        for side in (-1, 1)
    )
    exact = np.add.reduceat(step(q) * w, starts, axis=1)
    return float(np.abs(np.cumsum(taken, axis=1) / np.cumsum(exact, axis=1) - 1).max())
