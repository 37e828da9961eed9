"""Running a planned call: with a cotangent slot for each lookup, or for its ids alone."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jslices import _jax
from jslices._devices.exchange import on_all_devices
from jslices._devices.explicit import restore_sharding
from jslices._grad.interpret import Site, run_lookups
from jslices._grad.plan import Planned
from jslices._grad.views import Table
from jslices._lookup.rows import without_dense_warning
from jslices._slices import Facts, IndexedSlices, slices_of


def run_planned(planned: Planned, primals: Sequence[Any], slots: Any) -> tuple[Any, Any]:
    """The outputs of the traced call, and the row numbers of its lookups."""
    operands = [
        x if planned.kind(i) == "dense" else Table(leaf.aval.shape, leaf.aval.dtype, i, x)
        for i, (x, leaf) in enumerate(zip(primals, planned.leaves, strict=True))
    ]
    return run_lookups(
        planned.program,
        operands,
        planned.outputs.num_results,
        {i: leaf.candidate for i, leaf in enumerate(planned.leaves)},
        planned.plan,
        slots,
        planned.eager,
    )


def slot_of(site: Site) -> IndexedSlices:
    """The cotangent slot of one lookup; see ``jslices/_lookup/rows.py``."""
    shape = (*site.loops, site.entries, *site.table_shape[1:])
    zeros = jnp.zeros(shape, site.dtype, out_sharding=site.split)
    values = _jax.as_varying(zeros, site.varying)
    return IndexedSlices.tree_unflatten(site.table_shape, (values, None))


def ids_read(planned: Planned, primals: Sequence[Any]) -> tuple[list[Any], list[bool]]:
    """The row numbers of every lookup, and whether each of the ``primals`` decides on some.

    Nothing else of the call is run; primals that are not needed for it may be described.
    """

    def run(*primals: Any) -> list[Any]:
        _, indices = run_planned(planned, primals, jax.tree.map(slot_of, planned.plan))
        return jax.tree.leaves(indices)

    with without_dense_warning():
        return _jax.needed(run, primals)


def of_site(site: Site, shape: Any, values: Any, indices: Any) -> IndexedSlices:
    """The gradient of one lookup, its executions joined."""
    values, indices = restore_sharding((values, indices), site.split)
    if site.route is not None:
        facts = Facts(placement=site.route.placement)
        return slices_of(values, indices, shape, facts)._flattened()
    values, indices = values.reshape(indices.size, *shape[1:]), indices.reshape(-1)
    return IndexedSlices(*on_all_devices(values, indices), shape)


def without_exchange(planned: Planned) -> Planned:
    """The same lookups, each on one device."""

    def alone(site: Site) -> Site:
        return dataclasses.replace(site, route=None, sharding=None)

    return planned._replace(plan=jax.tree.map(alone, planned.plan), eager=False)
