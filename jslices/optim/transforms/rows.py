"""Masking rows, limiting their norms, weighing duplicates.

``mask_rows`` takes rows out of a gradient. ``project_rows`` limits the norms of rows after
a step. ``combine_duplicates`` decides how several entries of one row are merged.
"""

import math
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jslices._arguments import check_array
from jslices._place.boundary import like_first, on_any_mesh
from jslices._rows import access, sums
from jslices._slices import IndexedSlices, check_slices, is_slices, rows_at
from jslices._slices.held import takes_held
from jslices._typing import Leaf, Params, PyTree
from jslices.optim.engine.constructors import combinator
from jslices.optim.engine.protocol import GradientTransformation, is_leaf
from jslices.optim.transforms.base import each_leaf
from jslices.optim.transforms.clip import check_limit, clip_rows_by_norm
from jslices.optim.transforms.norms import as_leaf

Keep = jax.Array | np.ndarray | bool | Callable[[jax.Array], jax.Array]


# --- Rows left out --------------------------------------------------------------------


def mask_rows(slices: Leaf, keep: Keep) -> Any:
    """The gradient without some rows.

    It masks only this gradient. To keep rows from moving, whatever the optimizer and the
    gradient, use :func:`jslices.optim.freeze_rows`.

    In slices the entries of the other rows become empty (index ``V``, zero values). A lazy
    optimizer neither reads nor writes a row that no entry names, so it cannot move.
    Duplicates stay duplicates. In an array the other rows become zeros, and an optimizer
    still moves them, by momentum and by weight decay; with ``untouched="exact"`` or
    ``weight_decay_mode="all"`` it does so in slices, too.

    Args:
      slices: IndexedSlices with values ``[K, *D]``, or an array ``[V, *D]``.
      keep: which rows may move. bool ``[V]`` (``[L, V]`` where two axes number rows), by
        row number; or a function from the indices ``[K]`` (``V`` in empty entries) to bool
        ``[K]``; or bool ``[K]``, entry by entry, where ``K`` is not ``V`` (where it is, or
        ``dense_shape`` is None, it is by row number: pass a function); or a bool for all.

    Returns:
      IndexedSlices with values ``[K, *D]`` and indices ``[K]``, in the order they came; or
      an array ``[V, *D]``.

    Raises:
      TypeError: for a tree of gradients, if ``keep`` is not bool, or if a foreign
        ``tree.map`` has changed the indices.
      ValueError: if ``keep`` has another length, or is a function where rows are packed.

    Cost: reads and writes ``K * D`` elements, and reads K bools.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> grads = js.IndexedSlices(jnp.array([1., 2., 3.]), jnp.array([7, 2, 7]), (9,))
      >>> js.mask_rows(grads, lambda indices: indices >= 5).indices  # new tokens only
      Array([7, 9, 7], dtype=int32)

    Source: ours.
    """
    if not is_slices(slices) and not hasattr(slices, "ndim"):
        raise TypeError(
            "mask_rows wants one gradient, IndexedSlices or an array, got a "
            f"{type(slices).__name__}; in a tree mask the leaf of each table: "
            '{**grads, "table": mask_rows(grads["table"], keep)}'
        )
    if is_slices(slices):
        check_by_row("mask_rows", keep, slices, "give bools for each entry, keep(ids)")
    return only_rows(as_leaf(slices), keep, 0.0)


def only_rows(slices: Leaf, keep: Keep, rest: float) -> Any:
    """:func:`mask_rows`, with ``rest`` for the values of the other rows."""
    if not isinstance(slices, IndexedSlices):
        array = slices
        if array.ndim == 0 and (callable(keep) or jnp.ndim(keep)):
            raise ValueError("mask_rows wants rows [V, *D], got a scalar")
        axes = 1 if callable(keep) else max(1, min(jnp.ndim(keep), array.ndim))
        rows = jnp.arange(math.prod(array.shape[:axes])).reshape(array.shape[:axes])
        allowed = _allowed(keep, rows, array.shape[:axes])
        return access.where_rows(allowed, array, rest)
    check_slices(slices)
    num_rows, shape = slices.num_rows, slices.dense_shape
    indices = access.canonical_indices(slices.indices, num_rows)
    empty = access.empty_index(num_rows, indices.dtype)
    sizes = None if shape is None else shape[: slices.row_axes]
    allowed = _allowed(keep, indices, sizes) & (indices != empty)
    # Of the type that came: entries stay where they are.
    values = access.where_rows(allowed, slices.values, rest)
    indices = jnp.where(allowed, indices, jnp.array(empty, indices.dtype))
    masked = jax.tree.unflatten(jax.tree.structure(slices), (values, indices))
    return masked.with_facts(slices.facts._replace(distinct=False))


def check_by_row(caller: str, by_row: Any, x: Leaf, instead: str) -> None:
    """Refuse a function of row numbers where these are not those of the user's table."""
    per, axes = (x.facts.packed, 1) if is_slices(x) else (1, x.ndim - 1)
    if callable(by_row) and (per > 1 or axes > 1):
        packed = f"hold {per} each of those looked up, packed.reshape(V, D)[ids]"
        why = packed if per > 1 else f"may be numbered by {axes} axes"
        raise ValueError(
            f"{caller} got a function of row numbers for an array of shape {x.shape}: its "
            f"rows {why}; {instead}"
        )


def _allowed(keep: Keep, indices: jax.Array, sizes: tuple[int, ...] | None) -> jax.Array:
    """bool, of the shape of ``indices``: whether the row of each entry may move.

    ``sizes`` are those of the axes that number the rows, None if unknown.
    """
    by_entry = callable(keep)
    mask = jnp.asarray(keep(indices) if callable(keep) else keep)
    if mask.dtype != bool:
        raise TypeError(
            f"mask_rows wants keep to be bool, got {mask.dtype}{list(mask.shape)}; to keep "
            "rows by their numbers: keep=lambda indices: jnp.isin(indices, ids)"
        )
    if not by_entry and not mask.ndim:  # of all of it
        return jnp.broadcast_to(mask, indices.shape)
    of_rows = mask.ndim == 1 if sizes is None else mask.shape == sizes
    if not by_entry and of_rows:
        return rows_at(mask.reshape(-1), indices, fill_value=False)
    if mask.shape != indices.shape:
        wanted = f"{list(indices.shape)} (one for each entry)"
        if not by_entry:
            rows = None if sizes is None else ", ".join(map(str, sizes))
            wanted = f"[{rows}] (one for each row of the table) or {wanted}"
        raise ValueError(f"mask_rows wants keep of shape {wanted}, got {list(mask.shape)}")
    return mask


# --- Norms of rows --------------------------------------------------------------------


@takes_held(like=0)
def project_rows(params: Params, touched: PyTree, max_norm: ArrayLike) -> Any:
    """Scales down the touched rows of tables whose norm exceeds a limit, in place.

    Call it after the step:
    ``params = js.project_rows(js.apply_updates(params, updates), updates, 1.0)``. As only
    touched rows can have grown, a table that starts within the limit stays within it.

    Args:
      params: an array ``[V, *D]``, or a pytree of arrays.
      touched: the updates or gradients of the step: the same tree, with an IndexedSlices
        (values ``[K, *D]``, which are not read) where rows are to be limited. Where it
        holds an array or None the parameter is returned unchanged; limit a table whose
        gradient is dense with :func:`jslices.clip_rows_by_norm`.
      max_norm: the limit, ``[]``.

    Returns:
      The parameters, in their dtypes. Rows that no IndexedSlices names are neither read
      nor written; duplicates count once; out-of-range indices are dropped. A row that
      holds NaN or an infinity becomes NaN.

    Raises:
      TypeError: for row numbers, and indices that a foreign ``tree.map`` has changed.
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

    @on_any_mesh(like_first)
    def project(params: Params, touched: PyTree, limit: jax.Array) -> Any:
        project_leaf = lambda t, p: _projected(p, t, limit)  # noqa: E731
        return jax.tree.map(project_leaf, touched, params, is_leaf=is_leaf)

    return project(params, touched, limit)


def _projected(param: jax.Array, touched: Leaf, limit: jax.Array) -> jax.Array:
    if not isinstance(touched, IndexedSlices):
        dtype = getattr(touched, "dtype", None) or np.asarray(touched).dtype
        if jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.bool_):
            raise TypeError(
                "project_rows wants the updates or gradients of the step, got "
                f"{dtype}{list(np.shape(touched))}; for row numbers type "
                "jslices.IndexedSlices(table[ids], ids, table.shape) in place of ids"
            )
        return param
    touched = as_leaf(touched)
    check_slices(touched)
    check_array("project_rows(params=...)", param)
    table = jnp.asarray(param)
    axes, rows = touched.row_axes, touched.values.shape[touched.indices.ndim :]
    shape = touched.dense_shape or (*table.shape[:axes], *rows)
    if table.shape != shape:
        raise ValueError(
            f"project_rows got {touched} for a parameter of shape {table.shape}; the "
            "shapes must be equal"
        )
    num_rows = access.rows_numbered(shape, axes)
    ids, _ = sums.sort_ids(access.canonical_indices(touched.indices.reshape(-1), num_rows))
    first = sums.starts_of_runs(ids)[: ids.shape[0]]
    once = jnp.where(first, ids, jnp.array(num_rows, ids.dtype))
    rows = clip_rows_by_norm(access.take_rows(table, once, row_axes=axes), limit)
    return access.set_rows(table, once, rows)


# --- Frequent rows --------------------------------------------------------------------


@combinator
def combine_duplicates(combine: Annotated[str, sums.COMBINER]) -> GradientTransformation:
    """Merges duplicate rows, optionally so that frequent rows weigh less.

    Untouched rows stay untouched. Dense arrays pass unchanged: their duplicates have been
    summed already, and how many there were is not known.

    Args:
      combine: ``"sum"``, ``"mean"`` (the sum divided by the number of occurrences), or
        ``"sqrtn"`` (divided by the square root of it).

    Returns:
      A stateless :class:`jslices.GradientTransformation`; put it first in a chain, as
      everything after it sees each row once.

    Raises:
      ValueError: for another ``combine``.

    Cost: a sort of K integers and two passes over ``K * D`` elements per IndexedSlices.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> grads = js.IndexedSlices(jnp.array([2., 4.]), jnp.array([1, 1]), (9,))
      >>> js.optim.combine_duplicates("mean").update(grads, ())[0].values
      Array([3., 0.], dtype=float32)

    Source: PyTorch's ``scale_grad_by_freq``, there for dense gradients only. See
    :meth:`jslices.IndexedSlices.coalesce`.
    """
    return each_leaf(lambda g: g.coalesce(combine=combine) if is_slices(g) else g)
