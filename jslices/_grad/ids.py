"""``lookup_ids``: which rows a call is about to read."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jslices import _jax
from jslices._grad.call import ExchangeSpec, UserCall, check_callable
from jslices._grad.plan import Planned, plan_call
from jslices._grad.run import gradients_of, run_planned, slots_for, without_dense_warning
from jslices._slices import IndexedSlices


def lookup_ids(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    exchange: ExchangeSpec = None,
) -> Callable[..., Any]:
    """The rows that a call of ``fun`` reads, for ``tx.catch_up`` before that call.

    Args:
      fun: a function as :func:`value_and_grad` takes it.
      argnums: which positional argument or arguments to report.
      has_aux: whether ``fun`` returns ``(result, aux)``.
      exchange: as in :func:`value_and_grad`.

    Returns:
      A function of the same arguments that mirrors the chosen ones: for an array that is
      only looked up, the row numbers, int32 ``[K]`` in the order of the program, with
      duplicates and those out of range (no row is read); None for every other array.
      (``tx.catch_up`` needs True for one that is read whole, if another loss leaves it
      without gradient: :func:`jslices.train_step` handles that.) With ``exchange``,
      for an array that is split over devices, IndexedSlices without elements whose
      ``indices`` are on the devices that hold the rows. An array whose rows several axes
      number also gets IndexedSlices without elements.

    Raises:
      ValueError: if the rows that are read depend on the values of the array itself, as
        these change when it catches up.

    Cost: that of computing the ids; nothing else of ``fun`` is run.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> def loss(params, ids):
      ...     return (params["table"][ids] @ params["w"]).sum()
      >>> params = {"table": jnp.ones((9, 2)), "w": jnp.ones(2)}
      >>> js.lookup_ids(loss)(params, jnp.array([3, 8, 3]))
      {'table': Array([3, 8, 3], dtype=int32), 'w': None}
      >>> tx = js.adam(0.1, untouched="exact")
      >>> state, batch = tx.init(params), jnp.array([3, 8, 3])
      >>> rows = js.lookup_ids(loss)(params, batch)
      >>> params, state = tx.catch_up(params, state, rows)

    Source: ours; PyTorch's and FBGEMM's users pass these ids by hand.
    """
    check_callable(fun)

    @functools.wraps(fun)
    def ids_fun(*args: Any, **kwargs: Any) -> Any:
        call = UserCall(fun, argnums, args, kwargs, has_aux)
        rows, _ = rows_read(call, plan_call(call, None, exchange))
        return call.mirror(map(leaf_ids, rows))

    return ids_fun


def leaf_ids(rows: IndexedSlices | bool | None) -> jax.Array | IndexedSlices | None:
    """The result of :func:`lookup_ids` for a leaf."""
    if not isinstance(rows, IndexedSlices):
        return None
    alone = rows.row_axes == 1 and rows.facts.placement is None
    return rows.indices if alone else rows


def rows_read(
    call: UserCall, planned: Planned
) -> tuple[list[IndexedSlices | bool | None], list[bool]]:
    """For each leaf the rows that are read, as slices without elements.

    True if it is read whole, or also where no gradient reaches it; None if not at all. And
    for each leaf whether its values determine the numbers of these rows.

    Raises:
      ValueError: for rows that depend on the values of the array itself.
    """
    sites = jax.tree.leaves(planned.plan)
    indices, needed = eval_ids(planned, call.primals)
    for site in sites:
        if needed[site.leaf]:
            raise ValueError(
                f"the rows that are read of {planned.leaves[site.leaf]} depend on its "
                f"own values ({_jax.user_line(site.source)}), so they are not known "
                "before it has caught up: tx.flush(params, state) brings all rows up "
                "to date"
            )
    slices = gradients_of(sites, [jnp.zeros((*x.shape, 0)) for x in indices], indices)
    whole = planned.read_whole | planned.no_grad.keys()
    by_leaf: list[IndexedSlices | bool | None] = [
        True if leaf.has_rows and i in whole else None
        for i, leaf in enumerate(planned.leaves)
    ]
    for i in slices.keys() - planned.no_grad.keys():
        shape, axes = planned.leaves[i].aval.shape, planned.leaves[i].row_axes
        by_leaf[i] = slices[i].numbered_as((*shape[:axes], 0))
    return by_leaf, needed


def eval_ids(
    planned: Planned, primals: Sequence[Any]
) -> tuple[list[jax.Array], list[bool]]:
    """The row numbers of every read, and which of the ``primals`` they depend on.

    Nothing else of the call is run; other primals may be described.
    """

    def run(*primals: Any) -> list[Any]:
        _, indices = run_planned(planned, primals, slots_for(planned.plan))
        return jax.tree.leaves(indices)

    with without_dense_warning():
        return _jax.eval_minimal(run, primals)
