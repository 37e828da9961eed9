"""Rows that an exact optimizer shall leave where they are."""

from typing import Any

import jax
import jax.numpy as jnp

from jslices._jax import flatten
from jslices.optim._exact.catch_up import FROZEN


def freeze_rows(state: Any, frozen: Any) -> Any:
    """Keeps rows from ever moving, by gradients, momentum or weight decay.

    For optimizers with ``untouched="exact"``, whose rows also move while they wait; a lazy
    one moves only rows that have a gradient, and :func:`jslices.mask_rows` is enough. Call
    it once, after ``init``, or for rows that are up to date.

    Args:
      state: of an exact optimizer, or that of a chain that ends with one, or of what holds
        one inside (``multi_steps``, ``optax.inject_hyperparams``).
      frozen: mirrors params: bools ``[V]`` for a table, None for what stays free.

    Returns:
      The state, in which the frozen rows are marked: ``catch_up`` and ``flush`` pass them
      by, and their updates are zero.

    Raises:
      TypeError: for the state of an optimizer that is not exact, and for anything but
      bools.
      ValueError: for bools of another length than the table.

    Cost: one pass over V integers.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> tx = js.adamw(0.1, weight_decay=0.5, untouched="exact")
      >>> table = jnp.ones((3, 1))
      >>> state = js.optim.freeze_rows(tx.init(table), jnp.array([True, False, False]))
      >>> grads = js.IndexedSlices(jnp.zeros((2, 1)), jnp.array([0, 2]), (3, 1))
      >>> updates, state = tx.update(grads, state, table)
      >>> tx.flush(js.apply_updates(table, updates), state)[0].ravel()
      Array([1.  , 0.95, 0.95], dtype=float32)

    Source: ours.
    """
    if isinstance(state, tuple) and not hasattr(state, "_fields") and state:
        return (*state[:-1], freeze_rows(state[-1], frozen))
    for inner in ("inner_opt_state", "inner_state"):
        if hasattr(state, inner):
            part = freeze_rows(getattr(state, inner), frozen)
            return state._replace(**{inner: part})
    clock = getattr(state, "clock", None)
    if clock is None:
        raise TypeError(
            'freeze_rows wants the state of an optimizer with untouched="exact", got a '
            f"{type(state).__name__} whose rows do not move by themselves; mask their "
            "gradients: jslices.mask_rows(slices, ~frozen)"
        )
    leaves, tree = flatten(clock.last)
    marks = [
        _mark(last, bits)
        for last, bits in zip(leaves, tree.flatten_up_to(frozen), strict=True)
    ]
    return state._replace(clock=clock._replace(last=tree.unflatten(marks)))


def _mark(last: jax.Array, frozen: Any) -> jax.Array:
    if frozen is None:
        return last
    frozen = jnp.asarray(frozen)
    if frozen.dtype != bool:
        raise TypeError(f"freeze_rows wants bools, got {frozen.dtype}{list(frozen.shape)}")
    if frozen.shape != last.shape:
        raise ValueError(
            f"freeze_rows got {frozen.shape} bools for a table of {last.shape} rows"
        )
    return jnp.where(frozen, FROZEN, last)
