"""The protocol of an optimizer."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jslices.optim._engine.apply import apply_updates


class _InitUpdate(NamedTuple):
    init: Callable[[Any], Any]
    update: Callable[..., tuple[Any, Any]]


class GradientTransformation(_InitUpdate):
    """A pair of pure functions in Optax's protocol, both in one, and two for exact ones.

    It is a pair, so ``init, update = tx`` holds and Optax's combinators take it.

    Attributes:
      init: ``init(params) -> state``.
      update: ``update(grads, state, params=None) -> (updates, state)``. ``grads`` mirrors
        ``params``, with an IndexedSlices where the gradient is sparse, None where there
        is none; so do the updates, which :func:`jslices.apply_updates` (or, without None,
        ``optax.apply_updates``) adds.
      apply: ``apply(grads, state, params) -> (params, state)``: ``update`` and
        :func:`jslices.apply_updates` in one call, with the same result: parameters of the
        shapes and dtypes that came, duplicates summed before the step, out-of-range ids
        dropped, rows that no id names neither read nor written. In place where ``params``
        and ``state`` are donated. A step of K ids on rows of D is as fast or faster than
        in two calls, and where the gradient is large it holds no updates ``[K, D]``
        (docs/speed.md). Raises ValueError, before anything is computed, without params or
        with slices of an array of another shape.
      catch_up: ``catch_up(params, state, ids) -> (params, state)``. With
        ``untouched="exact"``, brings the rows that are about to be read up to date. ``ids``
        mirrors ``params``: integers of any shape for a table, out-of-range ones being
        dropped; None for what needs nothing, True for all rows of it. Other optimizers
        return what they got.
      flush: ``flush(params, state) -> (params, state)``. The same for every row, before
        parameters are saved or evaluated.
      catches_up: whether rows have to catch up.

    Example:
      >>> import jslices as js
      >>> init, update = js.sgd(0.1)
      >>> js.adam(0.1, untouched="exact").flush is not None
      True
      >>> import jax.numpy as jnp
      >>> tx, params = js.sgd(0.5), jnp.zeros((5, 1))
      >>> grads = js.IndexedSlices(jnp.ones((2, 1)), jnp.array([3, 3]), (5, 1))
      >>> params, state = tx.apply(grads, tx.init(params), params)
      >>> params.ravel()
      Array([ 0.,  0.,  0., -1.,  0.], dtype=float32)
    """

    apply: Callable[[Any, Any, Any], tuple[Any, Any]]
    catch_up: Callable[[Any, Any, Any], tuple[Any, Any]]
    flush: Callable[[Any, Any], tuple[Any, Any]]
    catches_up: bool

    def __new__(
        cls,
        init: Callable[[Any], Any],
        update: Callable[..., tuple[Any, Any]],
        catch_up: Callable[[Any, Any, Any], tuple[Any, Any]] | None = None,
        flush: Callable[[Any, Any], tuple[Any, Any]] | None = None,
        apply: Callable[[Any, Any, Any], tuple[Any, Any]] | None = None,
    ) -> "GradientTransformation":
        new = super().__new__(cls, init, update)
        new.apply = _with_params(apply or _in_two(update))
        new.catches_up = catch_up is not None
        new.catch_up = catch_up or (lambda params, state, ids: (params, state))
        new.flush = flush or (lambda params, state: (params, state))
        return new


def _in_two(update: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
    def apply(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        updates, state = update(grads, state, params)
        return apply_updates(params, updates), state

    return apply


def _with_params(apply: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
    def checked(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        if params is None and grads is not None:
            raise ValueError(
                "tx.apply steps the parameters, but these are None: "
                "params, state = tx.apply(grads, state, params)"
            )
        return apply(grads, state, params)

    return checked
