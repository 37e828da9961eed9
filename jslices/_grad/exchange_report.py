"""The report on the exchange of rows between devices."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jslices import _jax
from jslices._densify import human_bytes
from jslices._exchange.plan import Way
from jslices._grad.call import UserCall
from jslices._grad.ids import numbers_of_reads
from jslices._grad.plan import Planned, Site
from jslices._place.boundary import split_along
from jslices._place.hints import hint_once
from jslices._typing import Params, PyTree

#: Rows of fewer bytes in a step are not worth a hint.
_FEW = 10**6


class ExchangeReport(NamedTuple):
    """How the rows of one table are exchanged in one run.

    Attributes:
      way: ``"all_to_all"`` or ``"gather"``.
      all_to_all_bytes: what each device receives in an all-to-all.
      gather_bytes: what it receives in a gather.
      capacity: how many distinct ids of a pair of devices the all-to-all has room for, in
        the lookup with the least.
      fullest: how many the fullest pair has, in the lookup with the most; None where the
        ids are not known.
      overflowing: how many ids have no room, in all lookups together.
      falls_back: whether a lookup with such ids is gathered instead; if not, they read NaN.
    """

    way: Way
    all_to_all_bytes: int
    gather_bytes: int
    capacity: int
    fullest: int | None
    overflowing: int | None
    falls_back: bool

    def __str__(self) -> str:
        first, second = human_bytes(self.all_to_all_bytes), human_bytes(self.gather_bytes)
        if self.way == "gather":
            return f"{second} to each device, gathered; all to all: {first}"
        room = f"room for {self.capacity:,} ids of each pair of devices"
        if self.fullest is not None:
            room += f", of which the fullest has {self.fullest:,}"
        if self.overflowing:
            then = "that lookup gathers" if self.falls_back else "they read NaN"
            room += f": {self.overflowing:,} ids too many, {then}"
        return f"{first} to each device, all to all; gathered: {second}; {room}"


def exchange_reports(planned: Planned, call: UserCall) -> dict[int, ExchangeReport]:
    """Reports for the leaves whose rows are exchanged, by number."""
    sites = [site for site in planned.sites if site.graded]
    if not any(site.exchange for site in sites):
        return {}
    ids = _concrete_ids(planned, call, len(sites))
    by_leaf: dict[int, list[tuple[Site, Any]]] = {}
    for site, numbers in zip(sites, ids, strict=True):
        if site.exchange is not None:
            by_leaf.setdefault(site.leaf, []).append((site, numbers))
    return {leaf: _exchange_report(lookups) for leaf, lookups in by_leaf.items()}


def _concrete_ids(planned: Planned, call: UserCall, count: int) -> Sequence[Any]:
    """The ids of every lookup; None where they are described or traced."""
    unknown = [None] * count
    if call.is_described:
        return unknown

    def on_one_device(site: Site) -> Site:
        return dataclasses.replace(site, exchange=None, sharding=None)

    alone = planned._replace(plan=jax.tree.map(on_one_device, planned.plan), eager=False)
    program = numbers_of_reads(alone, call.primals, every=False)
    every = [True] * count
    if any(_jax.inputs_used(program, every)):  # they depend on values of the leaves
        return unknown
    ids = _jax.eval_minimal(program, every, call.primals)
    traced = any(isinstance(x, jax.core.Tracer) for x in ids)
    return unknown if traced else [np.asarray(x) for x in ids]


def _exchange_report(lookups: Sequence[tuple[Site, Any]]) -> ExchangeReport:
    plans = [site.exchange for site, _ in lookups if site.exchange is not None]
    way: Way = "all_to_all" if any(r.way == "all_to_all" for r in plans) else "gather"
    loads = [
        (plan.loads(run), plan.capacity)
        for plan, (site, ids) in zip(plans, lookups, strict=True)
        if ids is not None
        for run in ids.reshape(-1, site.count)
    ]
    overflows = [int(np.maximum(load - room, 0).sum()) for load, room in loads]
    return ExchangeReport(
        way,
        sum(_received_bytes(site, "all_to_all") for site, _ in lookups),
        sum(_received_bytes(site, "gather") for site, _ in lookups),
        min(plan.capacity for plan in plans),
        max(int(load.max()) for load, _ in loads) if loads else None,
        sum(overflows) if loads else None,
        any(plan.falls_back for plan in plans),
    )


def _received_bytes(site: Site, way: Way) -> int:
    assert site.exchange is not None
    plan = dataclasses.replace(site.exchange, way=way, falls_back=False)
    row_bytes = math.prod(site.table_shape[1:]) * site.dtype.itemsize
    return math.prod(site.loops) * plan.received(row_bytes, site.index_dtype.itemsize)


def hint_exchange(planned: Planned, params: Params, batch: PyTree) -> None:
    """Hint, once for a table, at rows that devices reduce for want of an ``exchange=``.

    The arrays are those of a call: on Auto axes no type says how they are split.
    """
    tables = [_row_split(x) for x in jax.tree.leaves(params)]
    is_ids = lambda x: getattr(getattr(x, "dtype", None), "kind", "f") in "iu"  # noqa: E731
    of_ids = {axis for x in jax.tree.leaves(batch) if is_ids(x) for axis in _row_split(x)}
    for site in planned.sites:
        leaf, axes = planned.leaves[site.leaf], tables[site.leaf]
        size, is_sent = site.total * leaf.row_bytes, site.exchange or site.varying
        looks_up = site.graded and site.by_ids and not is_sent
        if looks_up and size >= _FEW and of_ids.intersection(axes):
            hint_once(
                ("exchange", leaf.name, leaf.aval.shape),
                f"rows of {leaf} are split over devices, and ids too: without an exchange "
                f"every device reduces the rows of all, {human_bytes(size)} in each step, "
                "and of each array of the state. Type js.train_step(fun, tx, exchange=...) "
                f"with js.Exchange({(axes if axes[1:] else axes[0])!r}) for this table",
            )


def _row_split(x: Any) -> tuple[str, ...]:
    """The axes of a mesh along which the first axis of an array is split."""
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, jax.NamedSharding):
        return ()
    return tuple(a for a in split_along(sharding.spec, 1)[0] if sharding.mesh.shape[a] > 1)
