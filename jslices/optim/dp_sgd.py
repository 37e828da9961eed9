"""DP-SGD whose rows get the noise of the steps that they missed when they are read."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jslices._densify import warn_at_line
from jslices._rows.rounding import key_bits
from jslices._slices import is_slices
from jslices._typing import Change, Key, Record
from jslices.errors import InvalidArgumentError
from jslices.optim.engine import arguments, rule
from jslices.optim.engine.constructors import optimizer
from jslices.optim.engine.missed import MissedSteps
from jslices.optim.engine.protocol import GradientTransformation, StateOfRows
from jslices.optim.engine.transformation import transformation

_CLIP = (
    "Type total, _ = js.per_example_global_norm_clip(jax.vmap(js.grad(loss), "
    "in_axes=(None, 0))(params, batch), l2_norm_clip), and tx.apply(total, state, params)"
)
_UNCLIPPED = (
    "dp_sgd got a gradient by rows as it was taken: if no example was clipped, nothing is "
    f"private. {_CLIP}"
)


class DpSgdState(NamedTuple):
    """State of :func:`jslices.optim.dp_sgd`; with it anybody can take the noise away."""

    count: jax.Array  # type: ignore[assignment]  #: int32 ``[]``, the steps taken.
    clock: Any  #: how far each row is, and the key of the noise.


@optimizer
def dp_sgd(
    learning_rate: arguments.LearningRate,
    l2_norm_clip: arguments.Positive,
    noise_multiplier: arguments.NotNegative,
    expected_batch_size: arguments.Positive,
    key: Key,
) -> GradientTransformation:
    """Differentially private gradient descent, on the sum of clipped gradients::

        p -= lr * (sum(g_i * min(1, C / norm(g_i))) + sigma * C * normal) / batch

    The sum is that of :func:`jslices.per_example_global_norm_clip` with the same ``C``: an
    example more or less changes it by at most ``C``. ``normal`` is another number for each
    element of each row in each step.

    Untouched rows: exact. They get the noise of the steps that they missed when they catch
    up, normal with the sum of these steps' variances (under a schedule too): what has
    been read, and all rows after ``flush``, have the joint distribution of dense DP-SGD.
    **Nothing is private before** ``tx.flush(params, state)``; go on from what it returns.

    Args:
      learning_rate: a number, or a schedule of the step (from 0).
      l2_norm_clip: ``C``, the limit that the gradients of single examples were clipped to.
      noise_multiplier: ``sigma``, for the accounting.
      expected_batch_size: the divisor, which must not depend on the data: under Poisson
        sampling the expected size, not that of a batch.
      key: of ``jax.random``, secret and not used for anything else; the state keeps it.

    Returns:
      A :class:`jslices.GradientTransformation`. State per row: 4 bytes; under a schedule
      12. Gradients are per array, duplicates summed; an array gets noise as a whole.

    Raises:
      TypeError: for numbers that are arrays, as they may change while noise waits; for a
        key that is none; in a step, for parameters that are not float32 or float64.
      ValueError: in a :func:`jslices.train_step`, whose gradients are not clipped by
        example; in a :class:`jslices.HostTable`.

    Warns of a gradient by rows that comes as :func:`jslices.grad` gave it. It cannot see
    whether gradients in arrays were clipped, nor with the same ``C``; nor whether you flush
    before a release: ``js.hold(params)`` gives tables that cannot be read before that.

    Cost: a step reads and writes ``U * D`` elements and draws them twice.

    Example:
      >>> import jax, jax.numpy as jnp, jslices as js
      >>> def loss(table, ids, label):  # of one example
      ...     return (table[ids].sum() - label) ** 2
      >>> tx = js.optim.dp_sgd(0.1, 1.0, 0.8, 2, jax.random.key(42))
      >>> @jax.jit
      ... def step(table, state, ids, labels):
      ...     table, state = tx.catch_up(table, state, ids)
      ...     grads = jax.vmap(js.grad(loss), in_axes=(None, 0, 0))(table, ids, labels)
      ...     total, num_clipped = js.per_example_global_norm_clip(grads, 1.0)
      ...     return tx.apply(total, state, table)
      >>> table = jnp.ones((6, 2))
      >>> ids, labels = jnp.array([[0, 3], [3, 3]]), jnp.zeros(2)
      >>> table, state = step(table, tx.init(table), ids, labels)
      >>> (table != 1).all(axis=1)
      Array([ True, False, False,  True, False, False], dtype=bool)
      >>> table, state = tx.flush(table, state)
      >>> (table != 1).all(axis=1)
      Array([ True,  True,  True,  True,  True,  True], dtype=bool)

    Source: Abadi et al., 2016; ``optax.contrib.dpsgd``, which clips as well, divides by
    the size of the batch, and writes all rows. That noise may wait, and its sum be drawn at
    once, is from LazyDP (Lim et al., 2024), which adds it one batch ahead of the read.
    """
    numbers = learning_rate, l2_norm_clip, noise_multiplier, expected_batch_size
    if any(isinstance(x, jax.Array | np.ndarray) for x in numbers):
        raise TypeError(
            "dp_sgd wants numbers of Python, not arrays, which may be others when missed "
            "noise is drawn; a learning rate that changes is a function of the step"
        )

    def update(step: rule.Step) -> rule.Kernel:
        size = step.size(learning_rate)

        def kernel(g: jax.Array, p: jax.Array, state: Record) -> Change:
            if p.dtype not in (jnp.float32, jnp.float64):
                raise TypeError(
                    f"dp_sgd steps float32 and float64, got a parameter of {p.dtype}, "
                    "whose rounding would tell how often a row was read"
                )
            return rule.scaled(size, g / expected_batch_size), {}

        return kernel

    def variance(count: jax.Array) -> Any:
        return rule.value_at(learning_rate, count) ** 2

    deviation = float(l2_norm_clip * noise_multiplier / expected_batch_size)
    missed = MissedSteps(
        lambda missed, p, state: (jnp.zeros_like(p), {}),
        variance if callable(learning_rate) else learning_rate**2,
        keeps_rates=True,
        noise=(deviation, key_bits(key, "dp_sgd")),
        numbers=(deviation,),
    )
    tx = transformation(DpSgdState, rule.Rule({}, update, reads_params=True, missed=missed))

    def check(call: str, grads: Any, *args: Any, exact: Any = False, **more: Any) -> None:
        if exact:
            raise ValueError(
                "train_step takes the gradient of a batch, in which no example is clipped, "
                f"and so nothing would be private. {_CLIP}"
            )
        slices = filter(is_slices, jax.tree.leaves(grads, is_leaf=is_slices))
        if noise_multiplier and any(g.facts.as_taken for g in slices):
            warn_at_line(_UNCLIPPED, category=UserWarning)
        tx.check(call, grads, *args, **more)

    def of_rows(rows: StateOfRows) -> GradientTransformation:
        if rows.numbers is None:
            return tx
        raise InvalidArgumentError(
            "dp_sgd steps tables whose rows are all in memory: those of a HostTable that "
            "were never read would never get noise"
        )

    return tx.replace(check=check, of_rows=of_rows, averaged=None)
