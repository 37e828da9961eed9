"""One transformation after another."""

from collections.abc import Sequence
from typing import Any

from jslices.optim._engine.protocol import GradientTransformation


def chain(*transformations: Any) -> GradientTransformation:
    """Runs transformations one after the other, each on what the one before returned.

    As ``optax.chain``, which takes our transformations just as well; this one also hands
    on the last one's ``apply``, ``catch_up`` and ``flush``.

    Args:
      transformations: of jslices or of Optax. One that catches rows up must be the last:
        what stands behind it would not see the missed steps.

    Returns:
      A :class:`GradientTransformation`; its state is the tuple of theirs.

    Raises:
      TypeError: for what is not a transformation.
      ValueError: for an exact optimizer that is not the last.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> tx = js.optim.chain(js.sgd(1.0), js.sgd(0.5))
      >>> grads = js.IndexedSlices(jnp.ones((1, 1)), jnp.array([2]), (4, 1))
      >>> updates, state = tx.update(grads, tx.init(jnp.zeros((4, 1))))
      >>> updates.values
      Array([[0.5]], dtype=float32)

    Source: ``optax.chain``.
    """
    for number, tx in enumerate(transformations):
        if not (hasattr(tx, "init") and hasattr(tx, "update")):
            raise TypeError(
                f"chain wants transformations (with init and update), got {tx!r}"
            )
        if number + 1 < len(transformations) and getattr(tx, "catches_up", False):
            raise ValueError(
                'an optimizer with untouched="exact" must be the last of a chain: what '
                "comes behind it would not apply to the steps that rows have missed"
            )

    def init(params: Any) -> Any:
        return tuple(tx.init(params) for tx in transformations)

    def pass_on(parts: Sequence[Any], grads: Any, state: Any, params: Any) -> Any:
        new = []
        for tx, part in zip(parts, state, strict=True):
            grads, part = tx.update(grads, part, params)
            new.append(part)
        return grads, tuple(new)

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, new = pass_on(transformations, grads, state, params)
        return updates, new

    if not (transformations and isinstance(transformations[-1], GradientTransformation)):
        return GradientTransformation(init, update)
    *before, last = transformations

    def apply(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        grads, new = pass_on(before, grads, state[:-1], params)
        params, part = last.apply(grads, state[-1], params)
        return params, (*new, part)

    def catch_up(params: Any, state: Any, ids: Any) -> tuple[Any, Any]:
        params, part = last.catch_up(params, state[-1], ids)
        return params, (*state[:-1], part)

    def flush(params: Any, state: Any) -> tuple[Any, Any]:
        params, part = last.flush(params, state[-1])
        return params, (*state[:-1], part)

    if not last.catches_up:
        return GradientTransformation(init, update, apply=apply)
    return GradientTransformation(init, update, catch_up, flush, apply)
