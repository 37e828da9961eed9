"""Rows treated apart: frozen, kept short, or weighed by how often they occur.

``mask_rows`` takes rows out of a gradient, and ``freeze_rows`` marks them in the state of
an optimizer whose rows also move without a gradient. ``project_rows`` limits the norms of
rows after a step. ``combine_duplicates`` says what several entries of one row add up to.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jslices._jax import flatten
from jslices._rows.bounds import canonical_indices, empty_index, set_rows, take_rows
from jslices._rows.numbering import sort_ids
from jslices._rows.sums import check_combine
from jslices._slices import IndexedSlices, check_slices, is_slices
from jslices.optim._engine.protocol import GradientTransformation, is_leaf
from jslices.optim._exact.catch_up import FROZEN
from jslices.optim.transforms.chain import each_leaf
from jslices.optim.transforms.clip import check_limit, clip_rows_by_norm
from jslices.optim.transforms.norms import as_leaf

Keep = jax.Array | np.ndarray | Callable[[jax.Array], jax.Array]


# --- Frozen rows ----------------------------------------------------------------------


def mask_rows(slices: Any, keep: Keep) -> Any:
    """The gradient without the rows that are frozen.

    The entries of frozen rows become empty (index ``V``, zero values). A lazy optimizer
    neither reads nor writes a row that no entry names, so it cannot move: not by momentum,
    not by weight decay. Duplicates stay duplicates.

    With ``untouched="exact"`` or ``weight_decay_mode="all"`` rows also move without a
    gradient, and this is not enough: mark them in the optimizer's state, once, by
    :func:`jslices.optim.freeze_rows`. They then cannot move, by decay included, and need
    no mask.

    Args:
      slices: IndexedSlices with values ``[K, *D]``, or an array ``[V, *D]``.
      keep: which rows may move. bool ``[V]``, by row number; or a function that is given
        the indices ``[K]`` (``V`` in empty entries) and returns bool ``[K]``; or bool
        ``[K]``, entry by entry, where ``K`` is not ``V`` (where it is, or ``dense_shape``
        is None, an array goes by row number: pass a function).

    Returns:
      IndexedSlices with values ``[K, *D]`` and indices ``[K]``, in the order they came.
      For an array, the array with zeros in the frozen rows: their gradient is then zero,
      but an optimizer may still move them by momentum or decay.

    Raises:
      TypeError: for a tree of gradients, if ``keep`` is not bool, or if a foreign
        ``tree.map`` has changed the indices.
      ValueError: if ``keep`` has another length.

    Cost: reads and writes ``K * D`` elements, and reads K bools.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> grads = js.IndexedSlices(jnp.array([1., 2., 3.]), jnp.array([7, 2, 7]), (9,))
      >>> js.mask_rows(grads, lambda indices: indices >= 5).indices  # new tokens only
      Array([7, 9, 7], dtype=int32)

    Source: ours. The usual ways to train only the new tokens of a large vocabulary are to
    copy the old rows back after every step, or to zero their gradient, which leaves weight
    decay to move them.
    """
    if not is_slices(slices) and not hasattr(slices, "ndim"):
        raise TypeError(
            "mask_rows wants one gradient, IndexedSlices or an array, got a "
            f"{type(slices).__name__}; in a tree mask the leaf of each table: "
            '{**grads, "table": mask_rows(grads["table"], keep)}'
        )
    slices = as_leaf(slices)
    if not isinstance(slices, IndexedSlices):
        array = slices
        if array.ndim == 0:
            raise ValueError("mask_rows wants rows [V, *D], got a scalar")
        rows = jnp.arange(array.shape[0], dtype=jnp.int32)
        allowed = _allowed(keep, rows, array.shape[0])
        return _zeroed(array, allowed)
    check_slices(slices)
    num_rows = None if slices.dense_shape is None else slices.dense_shape[0]
    indices = canonical_indices(slices.indices, num_rows)
    empty = empty_index(num_rows, indices.dtype)
    allowed = _allowed(keep, indices, num_rows) & (indices != empty)
    return IndexedSlices.tree_unflatten(
        slices.dense_shape,
        (
            _zeroed(slices.values, allowed),
            jnp.where(allowed, indices, jnp.array(empty, indices.dtype)),
        ),
    )


def _allowed(keep: Keep, indices: jax.Array, num_rows: int | None) -> jax.Array:
    """bool, of the shape of ``indices``: whether the row of each entry may move."""
    by_entry = callable(keep)
    mask = jnp.asarray(keep(indices) if callable(keep) else keep)
    if mask.dtype != bool:
        raise TypeError(
            f"mask_rows wants keep to be bool, got {mask.dtype}{list(mask.shape)}; to keep "
            "rows by their numbers: keep=lambda indices: jnp.isin(indices, ids)"
        )
    if not by_entry and mask.ndim == 1 and num_rows in (None, mask.shape[0]):
        return take_rows(mask, indices, fill_value=False)
    if mask.shape != indices.shape:
        wanted = f"{list(indices.shape)} (one for each entry)"
        if not by_entry:
            wanted = f"[{num_rows}] (one for each row of the table) or {wanted}"
        raise ValueError(f"mask_rows wants keep of shape {wanted}, got {list(mask.shape)}")
    return mask


def _zeroed(rows: jax.Array, allowed: jax.Array) -> jax.Array:
    shape = allowed.shape + (1,) * (rows.ndim - allowed.ndim)
    return jnp.where(allowed.reshape(shape), rows, jnp.zeros((), rows.dtype))


def freeze_rows(state: Any, frozen: Any) -> Any:
    """Keeps rows from ever moving, whether by gradients, momentum or weight decay.

    For optimizers with ``untouched="exact"``, whose rows also move without a gradient. A
    lazy optimizer moves only rows that have one, and :func:`jslices.mask_rows` is enough.
    Call it once, after ``init``, or later for rows that are up to date.

    Args:
      state: the state of an exact optimizer, or of what holds one: a chain that ends with
        it, ``multi_steps``, ``partition``, ``masked``, ``optax.inject_hyperparams``.
      frozen: mirrors params: bools ``[V]`` for a table, None for what stays free.

    Returns:
      The state, with the frozen rows marked: ``catch_up`` and ``flush`` skip them, and
      their updates are zero.

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
    marked: set[str] = set()

    def mark(last: Any) -> Any:
        pairs, _ = jax.tree_util.tree_flatten_with_path(last, is_leaf=_is_masked)
        tree = flatten(last, is_leaf=_is_masked)[1]
        new = []
        for (path, x), bits in zip(pairs, tree.flatten_up_to(frozen), strict=True):
            if not _is_masked(x) and bits is not None:
                marked.add(jax.tree_util.keystr(path))
                x = _mark(x, bits)
            new.append(x)
        return tree.unflatten(new)

    new = _with_clocks(state, mark)
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(frozen)[0]]
    left = [key for key in map(jax.tree_util.keystr, paths) if key not in marked]
    if new is None or left:
        raise TypeError(
            'freeze_rows wants the state of an optimizer with untouched="exact", got a '
            f"{type(state).__name__} in which the rows{_listed(left)} do not move without "
            "a gradient; mask their gradients: jslices.mask_rows(slices, ~frozen)"
        )
    return new


def _with_clocks(state: Any, mark: Callable[[Any], Any]) -> Any:
    """The state with every ``clock.last`` in it as ``mark`` makes it; None without any."""
    if getattr(state, "clock", None) is not None:
        return state._replace(clock=state.clock._replace(last=mark(state.clock.last)))
    if hasattr(state, "inner_states"):
        parts = {key: _with_clocks(part, mark) for key, part in state.inner_states.items()}
        if not any(part is not None for part in parts.values()):
            return None
        kept = {key: state.inner_states[key] for key, new in parts.items() if new is None}
        return state._replace(inner_states={**parts, **kept})
    for name in ("inner_opt_state", "inner_state"):
        if hasattr(state, name):
            new = _with_clocks(getattr(state, name), mark)
            return None if new is None else state._replace(**{name: new})
    if isinstance(state, tuple) and not hasattr(state, "_fields") and state:
        last = _with_clocks(state[-1], mark)
        return None if last is None else (*state[:-1], last)
    return None


def _listed(paths: list[str]) -> str:
    named = ", ".join(filter(None, paths))
    return f" of {named}" if named else ""


def _is_masked(x: Any) -> bool:
    """True for the empty node that stands for a parameter of another optimizer."""
    return isinstance(x, tuple) and not x


def _mark(last: jax.Array, frozen: Any) -> jax.Array:
    frozen = jnp.asarray(frozen)
    if frozen.dtype != bool:
        raise TypeError(f"freeze_rows wants bools, got {frozen.dtype}{list(frozen.shape)}")
    if frozen.shape != last.shape:
        raise ValueError(
            f"freeze_rows got {frozen.shape} bools for a table of {last.shape} rows"
        )
    return jnp.where(frozen, FROZEN, last)


# --- Norms of rows --------------------------------------------------------------------


def project_rows(params: Any, touched: Any, max_norm: ArrayLike) -> Any:
    """Scales down the touched rows of tables whose norm exceeds a limit, in place.

    Call it after the step: ``params = js.project_rows(js.apply_updates(params, updates),
    updates, 1.0)``. As only touched rows can have grown, the whole table then stays
    within the limit if it starts so.

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


# --- Frequent rows --------------------------------------------------------------------


def combine_duplicates(combine: str) -> GradientTransformation:
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
    check_combine(combine, jnp.dtype("float32"))
    return each_leaf(lambda g: g.coalesce(combine=combine) if is_slices(g) else g)
