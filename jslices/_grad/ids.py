"""``lookup_ids``: which rows a call is about to read."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from jslices import _jax
from jslices._grad.call import ExchangeSpec, UserCall, check_callable
from jslices._grad.plan import Planned, plan_call
from jslices._grad.run import gradients_of, run_planned, slots_for, without_dense_warning
from jslices._slices import Facts, IndexedSlices, concat_slices, sent_to_owners, slices_of
from jslices._slices.held import unheld

#: Row numbers of a leaf, as slices without elements; None for none.
Rows: TypeAlias = IndexedSlices | None


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
      only looked up, the row numbers, int32 ``[K]`` with duplicates: those that a gradient
      may come into in the order of the program, then those that are read without one. An
      id out of range has the number of the row that it reads (plain ``table[ids]``: the
      nearest), or stays out of range. None for every other array.
      (``tx.catch_up`` needs True for one that is read whole, if another loss leaves it
      without gradient: :func:`jslices.train_step` handles that.) With ``exchange``,
      for an array that is split over devices, IndexedSlices without elements whose
      ``indices`` are on the devices that hold the rows. An array whose rows several axes
      number also gets IndexedSlices without elements.

    Raises:
      ValueError: if the rows that are read depend on the values of the array itself, as
        these change when it catches up. (An array on whose values those of another depend
        has to catch up before this call.)

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
        args, kwargs = unheld((args, kwargs))
        call = UserCall(fun, argnums, args, kwargs, has_aux)
        planned = plan_call(call, None, exchange)
        by_rows = set(range(len(planned.leaves))) - planned.read_whole
        rows = rows_read(call, planned, by_rows, may_follow=False)
        return call.mirror(map(leaf_ids, rows))

    return ids_fun


def leaf_ids(rows: Rows) -> jax.Array | IndexedSlices | None:
    """The result of :func:`lookup_ids` for a leaf."""
    if rows is None:
        return None
    alone = rows.row_axes == 1 and rows.facts.placement is None
    return rows.indices if alone else rows


def rows_read(
    call: UserCall, planned: Planned, leaves: set[int], may_follow: bool = True
) -> list[Rows]:
    """For each leaf the rows that a call reads, if it is one of these ``leaves``.

    Slices without elements: the rows that a gradient may come into, then others. Rows that
    depend on values of the leaf are refused, unless they ``may_follow``.
    """
    operands = [*call.primals, *call.inputs]
    program = numbers_of_reads(planned, operands, every=True)
    sites = planned.sites
    wanted = [site.leaf in leaves for site in sites]
    for i in () if may_follow else sorted(leaves):
        own = [site.leaf == i for site in sites]
        if any(own) and _jax.inputs_used(program, own)[i]:
            line = next(_jax.user_line(site.source) for site in sites if site.leaf == i)
            raise ValueError(
                f"the rows that are read of {planned.leaves[i]} depend on its own values "
                f"({line}), so they are not known before it has caught up: "
                "jslices.train_step reads them, and tx.now(params, state); or "
                "tx.flush(params, state) brings all rows up to date"
            )
    indices = _jax.eval_minimal(program, wanted, operands)
    reads = list(zip((site for site in sites if site.leaf in leaves), indices, strict=True))

    def of(graded: bool) -> list[Rows]:
        chosen = [(site, x) for site, x in reads if site.graded == graded]
        none = [jnp.zeros((*x.shape, 0)) for _, x in chosen]
        by_leaf = gradients_of([x for x, _ in chosen], none, [x for _, x in chosen])
        rows: list[Rows] = [None] * len(planned.leaves)
        for i, x in by_leaf.items():
            leaf = planned.leaves[i]
            rows[i] = x.numbered_as((*leaf.aval.shape[: leaf.row_axes], 0))
        return rows

    return list(map(joined, of(graded=True), of(graded=False)))


def joined(rows: Rows, others: Rows) -> Rows:
    """The rows of both, with duplicates."""
    if others is None:
        return rows
    if rows is None:
        return others
    placement, shape = rows.facts.placement, others.dense_shape
    if placement is not None and shape is not None:
        sizes = shape[: others.row_axes]
        ids = placement.by_device(others.indices, sizes)
        none, ids = sent_to_owners(placement, math.prod(sizes), ids)
        ids = placement.in_whole(ids, sizes)
        others = slices_of(none, ids, shape, Facts(placement=placement))
    return concat_slices([rows, others])


def numbers_of_reads(planned: Planned, primals: Sequence[Any], every: bool) -> Any:
    """The program from leaves to the row numbers of reads, as of :func:`run_planned`."""

    def row_numbers(*primals: Any) -> list[Any]:
        slots = slots_for(planned.plan, every=every)
        return jax.tree.leaves(run_planned(planned, primals, slots, every=every)[1])

    with without_dense_warning():
        return jax.make_jaxpr(row_numbers)(*primals)
