"""Max-norm constraint on the rows that a step has touched."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jslices._rows.bounds import canonical_indices, set_rows, take_rows
from jslices._rows.numbering import sort_ids
from jslices._slices import IndexedSlices, check_slices
from jslices.optim.transforms.clipping import clip_rows_by_norm
from jslices.optim.transforms.leaves import as_leaf, is_leaf
from jslices.optim.transforms.limits import check_limit


def project_rows(params: Any, touched: Any, max_norm: ArrayLike) -> Any:
    """Scales the touched rows of tables down whose norm exceeds a limit, in place.

    Call it after the step: ``params = js.project_rows(js.apply_updates(params, updates),
    updates, 1.0)``. As only touched rows can have grown, the whole table then keeps the
    limit that it starts with.

    Args:
      params: an array ``[V, *D]``, or a pytree of arrays.
      touched: the updates or gradients of the step: the same tree, with an IndexedSlices
        (values ``[K, *D]``, which are not read) where rows are to be limited. Where it
        holds an array or None the parameter stays as it is; limit a table whose gradient
        is dense with :func:`jslices.clip_rows_by_norm`.
      max_norm: the limit, ``[]``.

    Returns:
      The parameters, in their dtypes. Rows that no IndexedSlices names are neither read
      nor written; duplicates count once; out-of-range indices are dropped. A row that
      holds NaN or an infinity becomes NaN.

    Raises:
      TypeError: for slices whose indices a foreign ``tree.map`` has changed.
      ValueError: for slices of an array of another shape, or a limit that is negative or
        not a single number.

    Cost: a sort of K integers; reads and writes ``K * D`` elements, in place where
    ``params`` are donated.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> table = jnp.array([[3., 4.], [6., 8.]])
      >>> updates = js.IndexedSlices(jnp.zeros((1, 2)), jnp.array([1]), (2, 2))
      >>> js.project_rows(table, updates, 5.0)
      Array([[3., 4.],
             [3., 4.]], dtype=float32)

    Source: the ``MaxNorm`` constraint of Keras, for all rows; PyTorch's ``Embedding``
    renormalises rows in the forward pass, in place and in the order of the ids.
    """
    limit = check_limit("project_rows", "max_norm", max_norm, single=True)
    return jax.tree.map(
        lambda t, p: _projected(p, t, limit) if isinstance(t, IndexedSlices) else p,
        touched,
        params,
        is_leaf=is_leaf,
    )


def _projected(param: Any, touched: IndexedSlices, limit: jax.Array) -> jax.Array:
    touched = as_leaf(touched)
    check_slices(touched)
    table = jnp.asarray(param)
    rows = touched.values.shape[touched.indices.ndim :]
    shape = touched.dense_shape or (*table.shape[:1], *rows)
    if table.shape != shape:
        raise ValueError(
            f"project_rows got {touched} for a parameter of shape {table.shape}; the "
            "shapes must be equal"
        )
    ids, _ = sort_ids(canonical_indices(touched.indices.reshape(-1), table.shape[0]))
    again = jnp.concatenate([jnp.zeros((1,), bool), ids[1:] == ids[:-1]])[: ids.shape[0]]
    once = jnp.where(again, jnp.array(table.shape[0], ids.dtype), ids)
    return set_rows(table, once, clip_rows_by_norm(take_rows(table, once), limit))
