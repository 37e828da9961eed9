"""``lookup_ids``: which rows a call is about to read."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from jslices import _jax
from jslices._grad.call import ExchangeSpec, UserCall, check_callable
from jslices._grad.plan import Planned, plan_call
from jslices._grad.run import gradients_of, run_planned, slots_for, without_dense_warning
from jslices._rows.access import is_below
from jslices._slices import Facts, IndexedSlices, concat_slices, sent_to_owners, slices_of

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
        call = UserCall(fun, argnums, args, kwargs, has_aux)
        planned = plan_call(call, None, exchange)
        rows, others = RowsRead(call, planned).at(call.primals)
        return call.mirror(map(leaf_ids, map(joined, rows, others)))

    return ids_fun


def leaf_ids(rows: Rows) -> jax.Array | IndexedSlices | None:
    """The result of :func:`lookup_ids` for a leaf."""
    if rows is None:
        return None
    alone = rows.row_axes == 1 and rows.facts.placement is None
    return rows.indices if alone else rows


class RowsRead:
    """What a call reads of its leaves.

    Args:
      call: the call; of its arrays only shapes and dtypes count.
      planned: its plan.

    Raises:
      ValueError: for rows that depend on the values of the array itself.
    """

    def __init__(self, call: UserCall, planned: Planned) -> None:
        self._planned, self._sites = planned, planned.sites
        self._program = _numbers_of_reads(planned, call.primals, every=True)
        #: The leaves that are read as a whole, and where if no gradient comes in there.
        self.whole = planned.read_whole
        self.whole_lines = {i: _jax.user_line(x.source) for i, x in planned.no_grad.items()}
        sites = self._sites
        by_rows = {site.leaf for site in sites} - self.whole
        # Rows without gradient whose numbers depend on rows may be any.
        for n, site in enumerate(sites):
            if site.graded or site.leaf not in by_rows:
                continue
            if not by_rows.isdisjoint(self._sources([n])) or self._are_many(site.leaf):
                self.whole.add(site.leaf)
                self.whole_lines[site.leaf] = _jax.user_line(site.source)
        self._known = [n for n, site in enumerate(sites) if site.leaf not in self.whole]
        #: The leaves whose values determine which rows are read.
        self.sources = self._sources(self._known)
        for n, site in ((n, sites[n]) for n in self._known):
            if site.leaf in self._sources([n]):
                raise ValueError(
                    f"the rows that are read of {planned.leaves[site.leaf]} depend on its "
                    f"own values ({_jax.user_line(site.source)}), so they are not known "
                    "before it has caught up: tx.flush(params, state) brings all rows up "
                    "to date"
                )

    def _are_many(self, leaf: int) -> bool:
        """Whether no fewer rows are read without gradient than the leaf has.

        Or several axes number rows that are exchanged between devices.
        """
        spec, sites = self._planned.leaves[leaf], self._planned.sites_of(leaf)
        count = sum(site.total for site in sites if not site.graded)
        exchanged = any(site.exchange for site in sites) and spec.row_axes > 1
        return exchanged or is_below(spec.table_shape[0] - 1, count)

    def _sources(self, numbers: Sequence[int]) -> set[int]:
        """The leaves that the row numbers of these reads follow from."""
        outputs = [n in numbers for n in range(len(self._sites))]
        used = _jax.inputs_used(self._program, outputs)
        return {i for i, is_used in enumerate(used) if is_used}

    def at(self, primals: Sequence[Any]) -> tuple[list[Rows], list[Rows]]:
        """For each leaf the rows that a gradient may come into, and those read besides.

        Slices without elements; those of the latter count as distinct, as ``tx.peek`` need
        not merge them. None for none, and for a leaf that is read as a whole.
        """
        outputs = [n in self._known for n in range(len(self._sites))]
        indices = _jax.eval_minimal(self._program, outputs, primals)
        reads = [(self._sites[n], x) for n, x in zip(self._known, indices, strict=True)]

        both: list[list[Rows]] = []
        for graded in (True, False):
            sites = [site for site, _ in reads if site.graded == graded]
            numbers = [x for site, x in reads if site.graded == graded]
            none = [jnp.zeros((*x.shape, 0)) for x in numbers]
            rows: list[Rows] = [None] * len(self._planned.leaves)
            for i, x in gradients_of(sites, none, numbers).items():
                leaf, facts = self._planned.leaves[i], x.facts._replace(distinct=not graded)
                x = x.numbered_as((*leaf.aval.shape[: leaf.row_axes], 0))
                rows[i] = x.with_facts(facts)
            both.append(rows)
        return both[0], both[1]


def joined(rows: Rows, others: Rows) -> Rows:
    """The rows of both, with duplicates."""
    if others is None:
        return rows
    others = others.with_facts(others.facts._replace(distinct=False))
    if rows is None:
        return others
    if rows.facts.placement is not None:
        shape = others.dense_shape
        assert shape is not None
        entries = sent_to_owners(rows.facts.placement, shape[0], others.indices)
        others = slices_of(*entries, shape, Facts(placement=rows.facts.placement))
    return concat_slices([rows, others])


def eval_ids(planned: Planned, primals: Sequence[Any]) -> tuple[list[jax.Array], bool]:
    """The row numbers of every gradient, and whether ``primals`` determine them.

    Nothing else of the call is run; other primals may be described.
    """
    program = _numbers_of_reads(planned, primals, every=False)
    every = [True] * len(program.jaxpr.outvars)
    used = _jax.inputs_used(program, every)
    return _jax.eval_minimal(program, every, primals), any(used)


def _numbers_of_reads(planned: Planned, primals: Sequence[Any], every: bool) -> Any:
    """The program from leaves to the row numbers of reads, as of :func:`run_planned`."""

    def row_numbers(*primals: Any) -> list[Any]:
        slots = slots_for(planned.plan, every=every)
        return jax.tree.leaves(run_planned(planned, primals, slots, every=every)[1])

    with without_dense_warning():
        return jax.make_jaxpr(row_numbers)(*primals)
