"""One transformation after another."""

from typing import Any

from jslices.optim.protocol import GradientTransformation


def chain(*transformations: Any) -> GradientTransformation:
    """Runs transformations one after the other, each on what the one before returned.

    As ``optax.chain``, which takes our transformations just as well, but for exact
    optimizers: this one hands ``catch_up`` and ``flush`` on.

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

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        new = []
        for tx, part in zip(transformations, state, strict=True):
            grads, part = tx.update(grads, part, params)
            new.append(part)
        return grads, tuple(new)

    def last(name: str, params: Any, state: Any, *ids: Any) -> tuple[Any, Any]:
        params, part = getattr(transformations[-1], name)(params, state[-1], *ids)
        return params, (*state[:-1], part)

    if not (transformations and getattr(transformations[-1], "catches_up", False)):
        return GradientTransformation(init, update)
    return GradientTransformation(
        init,
        update,
        lambda params, state, ids: last("catch_up", params, state, ids),
        lambda params, state: last("flush", params, state),
    )
