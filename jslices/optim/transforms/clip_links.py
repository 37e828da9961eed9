"""Clipping as transformations, links of a chain."""

import math
from typing import Any

import jax

from jslices._slices import is_slices
from jslices._typing import Leaf
from jslices.optim.engine.constructors import combinator
from jslices.optim.engine.protocol import GradientTransformation, StateOfRows, is_leaf
from jslices.optim.transforms import clip as functions
from jslices.optim.transforms.base import each_leaf, stateless
from jslices.optim.transforms.clip import check_limit


@combinator
def clip_by_global_norm(max_norm: float | jax.Array) -> GradientTransformation:
    """:func:`jslices.clip_by_global_norm` to ``max_norm`` ``[]``, without a state.

    Untouched rows stay so. Errors, the limit's at once, and cost are those of the function.

    Example:
      >>> import jax.numpy as jnp, jslices as js, optax
      >>> tx = optax.chain(js.optim.clip_by_global_norm(4.0), js.sgd(1.0))
      >>> table = jnp.zeros((4, 2))
      >>> values = jnp.array([[3., 0.], [5., 0.]])
      >>> grads = js.IndexedSlices(values, jnp.array([1, 1]), (4, 2))
      >>> updates, state = tx.update(grads, tx.init(table), table)
      >>> js.apply_updates(table, updates)[1]
      Array([-4.,  0.], dtype=float32)

    Source: ``optax.clip_by_global_norm``, which gives the same on dense gradients, except
    that an infinite norm turns finite numbers into zeros there, and into NaN here.
    """
    check_limit("clip_by_global_norm", "max_norm", max_norm, single=True)
    return stateless(lambda grads: functions.clip_by_global_norm(grads, max_norm)[0])


@combinator
def clip(max_delta: float | jax.Array) -> GradientTransformation:
    """:func:`jslices.clip_by_value` to ``[-max_delta, max_delta]``, without a state.

    Untouched rows stay untouched. Errors and cost are those of the function; the limit
    ``[]`` must not be negative.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> grads = js.IndexedSlices(jnp.array([2., 3.]), jnp.array([1, 1]), (9,))
      >>> js.optim.clip(4.0).update(grads, ())[0].values
      Array([4., 0.], dtype=float32)

    Source: ``optax.clip``.
    """
    limit = check_limit("clip", "max_delta", max_delta, single=True)
    return each_leaf(lambda g: functions.clip_by_value(g, -limit, limit))


@combinator
def clip_rows_by_norm(max_norm: float | jax.Array) -> GradientTransformation:
    """:func:`jslices.clip_rows_by_norm` to ``max_norm`` ``[]``, without a state.

    Untouched rows stay untouched. Errors and cost are those of the function; the limit is
    checked at once. The first axis of every array counts its rows; if the tree holds arrays
    other than tables, leave these out with :func:`jslices.optim.masked`.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> values = jnp.array([[3., 0.], [5., 0.]])
      >>> grads = js.IndexedSlices(values, jnp.array([1, 1]), (9, 2))
      >>> js.optim.clip_rows_by_norm(4.0).update(grads, ())[0].values[0]
      Array([4., 0.], dtype=float32)

    Source: ours. With a limit per row, one frequent row cannot scale down all others.
    """
    check_limit("clip_rows_by_norm", "max_norm", max_norm, single=True)

    def clipped(path: tuple[Any, ...], g: Leaf) -> Any:
        if g is not None and g.ndim == 0:
            raise ValueError(
                f"clip_rows_by_norm got a scalar at {jax.tree_util.keystr(path)}; leave "
                "out scalars: jslices.optim.masked(jslices.optim.clip_rows_by_norm("
                "max_norm), lambda params: jax.tree.map(lambda p: p.ndim > 0, params))"
            )
        return g if g is None else functions.clip_rows_by_norm(g, max_norm)

    return stateless(lambda g: jax.tree.map_with_path(clipped, g, is_leaf=is_leaf))


@combinator
def clip_by_block_rms(threshold: float | jax.Array) -> GradientTransformation:
    """Scales each array's gradient so that its root mean square is at most ``threshold``.

    The mean is over the dense array, untouched rows included: the result is that of the
    dense gradient. Untouched rows stay untouched. Without a state. Cost and errors are
    those of :func:`jslices.clip_by_norm`; ``update`` refuses slices with
    ``dense_shape=None``.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> grads = js.IndexedSlices(jnp.array([[3., 3.]]), jnp.array([1]), (9, 2))
      >>> js.optim.clip_by_block_rms(0.5).update(grads, ())[0].values
      Array([[1.5, 1.5]], dtype=float32)

    Source: ``optax.clip_by_block_rms``.
    """
    limit = check_limit("clip_by_block_rms", "threshold", threshold, single=True)

    def of_rows(rows: StateOfRows | None = None) -> GradientTransformation:
        def clipped(g: Leaf) -> Any:
            if is_slices(g) and g.dense_shape is None:
                raise ValueError(
                    "clip_by_block_rms takes the mean over the dense array, and these "
                    "slices have dense_shape=None; give it: IndexedSlices(s.values, "
                    "s.indices, table.shape)"
                )
            shape = g.shape if rows is None else (rows.num_rows, *g.shape[1:])
            return functions.clip_by_norm(g, limit * math.sqrt(math.prod(shape)))

        return each_leaf(clipped, of_rows=of_rows)

    return of_rows()
