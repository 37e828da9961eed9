"""Transformations one after the other, and those that keep no state."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jslices.optim._engine.checks import check_links
from jslices.optim._engine.protocol import (
    GradientTransformation,
    is_leaf,
    widening,
)
from jslices.optim._engine.recipe import recorded


@recorded
def chain(*transformations: Any) -> GradientTransformation:
    """Runs transformations in turn, each on what the one before it returned.

    As ``optax.chain``, which takes our transformations as well. This one also offers the
    ``apply``, ``catch_up``, ``flush`` and ``plan`` of its last transformation.

    Args:
      transformations: of jslices or of Optax. An optimizer with ``untouched="exact"`` must
        be the last: the steps that a row has missed are made up by the optimizer alone,
        and whatever came after it would not apply to them.

    Returns:
      A :class:`GradientTransformation`; its state is the tuple of theirs.

    Raises:
      TypeError: for anything but a transformation.
      ValueError: for an exact optimizer that is not the last.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> tx = js.optim.chain(js.optim.clip(0.5), js.sgd(1.0))
      >>> grads = js.IndexedSlices(jnp.ones((1, 1)), jnp.array([2]), (4, 1))
      >>> updates, state = tx.update(grads, tx.init(jnp.zeros((4, 1))))
      >>> updates.values
      Array([[-0.5]], dtype=float32)

    Source: ``optax.chain``.
    """
    links = [as_transformation("chain", tx) for tx in transformations]
    if any(tx.catches_up for tx in links[:-1]):
        raise ValueError(
            'an optimizer with untouched="exact" must be the last of a chain, as what '
            "comes after it would not apply to the steps that rows have missed; to give "
            "some parameters another optimizer: jslices.optim.partition"
        )
    if not links:
        return stateless(lambda grads: grads)
    *before, last = links

    def init(params: Any) -> Any:
        return tuple(tx.init(params) for tx in links)

    def run(links: Sequence[Any], grads: Any, states: Any, params: Any) -> Any:
        new = []
        for tx, state in zip(links, states, strict=True):
            grads, state = tx.update(grads, state, params)
            new.append(state)
        return grads, tuple(new)

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        check_links(state, len(links))
        updates, new = run(links, grads, state, params)
        return updates, new

    def apply(grads: Any, state: Any, params: Any, key: Any = None) -> tuple[Any, Any]:
        check_links(state, len(links))
        first = widening(functools.partial(run, before), key)
        grads, new = first(grads, state[:-1], params)
        params, part = last.apply(grads, state[-1], params, key)
        return params, (*new, part)

    def catch_up(params: Any, state: Any, ids: Any) -> tuple[Any, Any]:
        check_links(state, len(links))
        params, part = last.catch_up(params, state[-1], ids)
        return params, (*state[:-1], part)

    def flush(params: Any, state: Any) -> tuple[Any, Any]:
        check_links(state, len(links))
        params, part = last.flush(params, state[-1])
        return params, (*state[:-1], part)

    if not last.catches_up:
        return GradientTransformation(init, update, apply=apply, plan=last.plan)
    return GradientTransformation(init, update, catch_up, flush, apply, last.plan)


def as_transformation(caller: str, tx: Any) -> GradientTransformation:
    """A transformation of jslices or of Optax as one of jslices; refuses anything else."""
    if isinstance(tx, GradientTransformation):
        return tx
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise TypeError(
            f"{caller} wants transformations (with init and update), got {tx!r}"
        )
    return GradientTransformation(tx.init, tx.update)


def stateless(f: Callable[[Any], Any]) -> GradientTransformation:
    """The transformation whose updates are ``f(grads)``, and whose state is ``()``."""

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        return f(grads), state

    return GradientTransformation(lambda params: (), update)


def each_leaf(f: Callable[[Any], Any]) -> GradientTransformation:
    """The stateless transformation that maps ``f`` over arrays and IndexedSlices."""

    def mapped(grads: Any) -> Any:
        return jax.tree.map(lambda g: g if g is None else f(g), grads, is_leaf=is_leaf)

    return stateless(mapped)
