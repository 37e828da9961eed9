"""RMSProp: gradients divided by their recent size."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jslices.optim._engine.arithmetic import (
    Scalar,
    Schedule,
    check_learning_rate,
    next_count,
    scaled,
    step_size,
)
from jslices.optim._engine.in_place import Kernel
from jslices.optim._engine.moments import decayed, divided, weight_seen
from jslices.optim._engine.protocol import GradientTransformation
from jslices.optim._engine.rule import Rule, check_fading, check_untouched, full, zeros
from jslices.optim._engine.transformation import transformation
from jslices.optim._exact.drift import Drift, Missed, Series, fading


class RmspropState(NamedTuple):
    """State of :func:`rmsprop`."""

    count: jax.Array  # type: ignore[assignment]  #: int32 ``[]``, the steps taken.
    nu: Any  #: like params, the mean of the squared gradients.
    mu: Any = None  #: like params, the mean of the gradients; None unless centered.
    trace: Any = None  #: like params, the momentum; None without.
    clock: Any = None  #: how far each row is; None unless ``untouched="exact"``.


def rmsprop(
    learning_rate: Scalar | Schedule,
    decay: Scalar = 0.9,
    eps: Scalar = 1e-8,
    initial_scale: Scalar = 0.0,
    eps_in_sqrt: bool = True,
    centered: bool = False,
    momentum: Scalar | None = None,
    nesterov: bool = False,
    bias_correction: bool = False,
    *,
    untouched: str = "lazy",
) -> GradientTransformation:
    """RMSProp: ``nu = decay * nu + (1 - decay) * g**2``, ``p -= lr * g / sqrt(nu + eps)``.

    Centered, ``nu - mu**2`` stands for ``nu``, with the mean ``mu`` of the gradients. With
    momentum the steps, learning rate included, add up in ``t = momentum * t + step``.

    Untouched rows: lazy or exact. Lazy: a row without gradient is neither read nor written,
    and nor is its state. Exact: its means decay and its momentum moves it on when it
    catches up, as in a dense optimizer.

    Args:
      learning_rate: a number, or a schedule of the step (from 0).
      decay: of the means.
      eps: keeps the root away from zero.
      initial_scale: what ``nu`` starts from.
      eps_in_sqrt: whether ``eps`` is added inside the root.
      centered: whether to subtract the squared mean.
      momentum: decay of the trace; None keeps no trace.
      nesterov: whether to look ahead.
      bias_correction: whether the means are divided by the weight they have seen.
      untouched: ``"lazy"`` or ``"exact"`` (see :mod:`jslices.optim`).

    Returns:
      A :class:`GradientTransformation`. State per row: D numbers, D more if centered, D
      more with momentum; 4 bytes more if exact, 8 with momentum.

    Cost: a step reads and writes ``U * D`` elements of the parameter and of each of these;
    catching up the same once more.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> tx = js.rmsprop(0.5)
      >>> table = jnp.zeros((5, 1))
      >>> grads = js.IndexedSlices(jnp.ones((1, 1)), jnp.array([3]), (5, 1))
      >>> updates, state = tx.update(grads, tx.init(table), table)
      >>> state.nu.ravel().round(3)
      Array([0. , 0. , 0. , 0.1, 0. ], dtype=float32)

    Source: Hinton, 2012; ``optax.rmsprop``, with its names and defaults; dense gradients
    give its result. TensorFlow's ``nu`` starts from 1 and its ``eps`` is 1e-10; PyTorch's
    ``eps`` stands outside the root and its ``decay`` is 0.99.
    """
    check_learning_rate("rmsprop", learning_rate)
    exact = check_untouched("rmsprop", untouched)
    names = ["nu", *["mu"] * centered, *["trace"] * (momentum is not None)]

    def step(count: jax.Array) -> Kernel:
        size = step_size(learning_rate, count)
        whole = weight_seen(decay, next_count(count)) if bias_correction else None

        def kernel(g: jax.Array, *rows: jax.Array) -> tuple[jax.Array, ...]:
            old = dict(zip(names, rows, strict=True))
            new = {"nu": decayed(old["nu"], g**2, decay)}
            if centered:
                new["mu"] = decayed(old["mu"], g, decay)
            means = {k: divided(x, whole) if bias_correction else x for k, x in new.items()}
            square = means["nu"] - means["mu"] ** 2 if centered else means["nu"]
            if eps_in_sqrt:
                scale = lax.rsqrt(square + eps)
            else:
                scale = 1 / (jnp.sqrt(square) + eps)
            update = scaled(size, scale * g)
            if momentum is not None:
                small = update
                update = new["trace"] = small + momentum * old["trace"]
                if nesterov:
                    update = small + momentum * update
            return update, *(new[name] for name in names)

        return kernel

    starts = {"nu": full(initial_scale), "mu": zeros(), "trace": zeros()}
    slots = {name: starts[name] for name in names}
    moves = momentum is not None
    held = 2 if moves and nesterov else 1
    plain = Rule(slots, step, quarters=moves, held=held)
    if not exact:
        return transformation(RmspropState, plain)
    check_fading("rmsprop", decay=decay, momentum=momentum)
    fade: Any = decay
    carry: Any = momentum

    def coast(missed: Missed, p: jax.Array, *rows: jax.Array) -> tuple[jax.Array, ...]:
        old = dict(zip(names, rows, strict=True))
        new = {name: fading(fade, missed) * x for name, x in old.items()}
        if momentum is not None:
            p = p + missed.sums[0] * old["trace"]
            new["trace"] = fading(carry, missed) * old["trace"]
        return p, *(new[name] for name in names)

    def ahead(steps: jax.Array) -> jax.Array:
        return jnp.full(steps.shape, carry if nesterov else 1.0)

    series = (Series(carry, ahead, False),) if momentum is not None else ()
    drift = Drift(learning_rate, series)
    rule = dataclasses.replace(plain, drift=drift, coast=coast)
    return transformation(RmspropState, rule)
