"""The protocol of an optimizer, which is Optax's, and adding updates to parameters."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jslices._densify import warn_dense
from jslices._devices.layouts import row_major_array
from jslices._rows.bounds import canonical_indices
from jslices._rows.sums import add_rows
from jslices._slices import IndexedSlices, check_slices, is_slices


@jax.tree_util.register_pytree_with_keys_class
class EveryRow(IndexedSlices):
    """IndexedSlices of V entries in which entry v is of row v, or empty.

    As the type says so, adding them takes no scatter, only one pass over the array.
    """


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
        and ``state`` are donated. Raises ValueError without params, or with slices of an
        array of another shape.
      catch_up: ``catch_up(params, state, ids) -> (params, state)``. With
        ``untouched="exact"``, brings the rows that are about to be read up to date. ``ids``
        mirrors ``params``: integers of any shape for a table, out-of-range ones being
        dropped; None for what needs nothing, True for all rows of it. Other optimizers
        return what they got.
      flush: ``flush(params, state) -> (params, state)``. The same for every row, before
        parameters are saved or evaluated.
      catches_up: whether rows have to catch up.
      plan: ``plan(grads, params, platform=None)``: for every gradient that is IndexedSlices
        how its rows are stepped, a :class:`Plan` to print; None for the others, and where a
        transformation does not tell. Shapes and dtypes suffice:
        ``tx.plan(jax.eval_shape(js.grad(loss), params, batch), params)``. ``platform`` is
        ``"cpu"``, ``"gpu"`` or ``"tpu"``; None means that of the default device.

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
    plan: Callable[..., Any]

    def __new__(
        cls,
        init: Callable[[Any], Any],
        update: Callable[..., tuple[Any, Any]],
        catch_up: Callable[[Any, Any, Any], tuple[Any, Any]] | None = None,
        flush: Callable[[Any, Any], tuple[Any, Any]] | None = None,
        apply: Callable[[Any, Any, Any], tuple[Any, Any]] | None = None,
        plan: Callable[..., Any] | None = None,
    ) -> "GradientTransformation":
        new = super().__new__(cls, init, update)
        new.apply = _with_params(apply or _in_two(update))
        new.catches_up = catch_up is not None
        new.catch_up = catch_up or (lambda params, state, ids: (params, state))
        new.flush = flush or (lambda params, state: (params, state))
        new.plan = plan or _unknown_plan
        return new


def _in_two(update: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
    def apply(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        updates, state = update(grads, state, params)
        return apply_updates(params, updates), state

    return apply


def _unknown_plan(grads: Any, params: Any, platform: str | None = None) -> Any:
    del params, platform
    return jax.tree.map(lambda g: None, grads, is_leaf=is_leaf)


def _with_params(apply: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
    def checked(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        if params is None and grads is not None:
            raise ValueError(
                "tx.apply steps the parameters, but these are None: "
                "params, state = tx.apply(grads, state, params)"
            )
        return apply(grads, state, params)

    return checked


def apply_updates(params: Any, updates: Any) -> Any:
    """``params`` plus ``updates``, in place where ``params`` are donated.

    Args:
      params: a pytree of arrays.
      updates: the same tree with, for each array ``[V, *D]``, an array of that shape, an
        IndexedSlices of it, or None (the array then stays).

    Returns:
      The new parameters, each in the dtype it had. Rows that an IndexedSlices does not
      name are neither read nor written; duplicates add; out-of-range indices drop.

    Raises:
      ValueError: for slices of an array of another shape.
      TypeError: for slices whose indices a foreign ``tree.map`` has changed.

    Cost: one scatter of ``U * D`` elements per IndexedSlices.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> params = {"table": jnp.zeros((4, 1)), "w": jnp.ones(2)}
      >>> rows = js.IndexedSlices(jnp.array([[5.0]]), jnp.array([2]), (4, 1))
      >>> js.apply_updates(params, {"table": rows, "w": None})["table"].ravel()
      Array([0., 0., 5., 0.], dtype=float32)

    Source: ``optax.apply_updates``, which gives the same result on these updates (but takes
    no None).
    """
    return jax.tree_util.tree_map_with_path(_add, updates, params, is_leaf=is_leaf)


def is_leaf(x: Any) -> bool:
    """True for what stands in a tree of gradients where the parameters have an array."""
    return x is None or is_slices(x)


def _add(path: Any, update: Any, param: Any) -> Any:
    if update is None or param is None:
        return param
    if not isinstance(update, IndexedSlices):
        if jnp.shape(update) not in ((), jnp.shape(param)):
            raise _misfit(path, f"an array of shape {jnp.shape(update)}", param)
        return jnp.asarray(param + update).astype(jnp.asarray(param).dtype)
    param = jnp.asarray(param)
    check_slices(update)
    rows = update.values.shape[update.indices.ndim :]
    expected = param.shape[:1] if update.dense_shape is None else update.dense_shape
    if param.shape != (*expected[:1], *rows) or update.indices.ndim != 1:
        raise _misfit(path, update, param)
    indices = canonical_indices(update.indices, param.shape[0])
    values = update.values.astype(param.dtype)
    if isinstance(update, EveryRow) and len(indices) == len(param):
        return row_major_array(param + values)
    return row_major_array(add_rows(param, indices, values, update._distinct))


def _misfit(path: Any, update: Any, param: Any) -> ValueError:
    place = f" at {jax.tree_util.keystr(path)}" if path else ""
    return ValueError(
        f"cannot add {update} to a parameter of shape {jnp.shape(param)}{place}; the "
        "shapes must be equal"
    )


#: ``optax.MultiSteps`` adds each gradient to a dense array before it calls the optimizer.
#: With IndexedSlices that ends in an error at the first step; ``init`` is called earlier.
IN_MULTI_STEPS = (
    "optax.MultiSteps adds gradients to dense arrays as large as the parameters: JAX will "
    "refuse IndexedSlices there ('different types at key path'). To accumulate rows, type "
    "jslices.optim.multi_steps(tx, k, jax.eval_shape(jslices.grad(loss), params, batch)), "
    "or jslices.accumulate_gradients for micro-batches that are there together. If every "
    "gradient is dense, nothing has to change"
)


def warn_in_multi_steps() -> None:
    """Warns once for each line of the user's that is in ``optax.MultiSteps.init``."""
    steps = getattr(sys.modules.get("optax"), "MultiSteps", None)
    code = getattr(getattr(steps, "init", None), "__code__", None)
    if code is None:  # no Optax, or one that is of another make
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            return warn_dense(IN_MULTI_STEPS)
        frame = frame.f_back
