"""Slices on a mesh, whose devices hold the entries of their own rows."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jslices._place.boundary import (
    drop_sharding,
    explicit_part,
    on_any_mesh,
    restore_sharding,
    shardings_of,
    with_auto_axes,
)
from jslices._place.placement import Placement, on_each_device
from jslices._rows.access import canonical_indices
from jslices._slices.carry import carried, carry_facts
from jslices._slices.entries import Entries, rows_numbered
from jslices._typing import Leaf, PyTree

S = TypeVar("S", bound=Entries)


def join_entries(
    placement: Placement,
    parts: Sequence[tuple[jax.Array, jax.Array]],
) -> tuple[jax.Array, jax.Array]:
    """Entries ``[..., n, *D]`` and ``[..., n]`` of several lookups, as those of one.

    Only ``n`` is split over devices; each device joins what it has.
    """

    def local(parts: Sequence[tuple[jax.Array, jax.Array]]) -> list[jax.Array]:
        values = [v.reshape(i.size, *v.shape[i.ndim :]) for v, i in parts]
        indices = [i.reshape(-1) for _, i in parts]
        widest = max((i.dtype for i in indices), key=lambda dtype: dtype.itemsize)
        return [
            jnp.concatenate(values),
            jnp.concatenate([i.astype(widest) for i in indices]),
        ]

    if len(parts) == 1 and parts[0][1].ndim == 1:
        return parts[0]
    specs = [
        (PartitionSpec(*(None,) * (i.ndim - 1), placement.rows or None),) * 2
        for _, i in parts
    ]
    run = on_each_device(placement, local, (specs,), placement.by_rows)
    values, indices = run(parts)
    return values, indices


def sent_to_owners(
    placement: Placement, num_rows: int, ids: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Entries without elements for ``ids`` ``[K]``, each on the device that has its row."""

    def own(number: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        height = num_rows // placement.shards
        first = number[0].astype(ids.dtype) * height
        mine = (ids >= first) & (ids < first + height)
        return jnp.zeros((*ids.shape, 0)), jnp.where(mine, ids, num_rows)

    mesh = placement.mesh if placement.mesh.explicit_axes else None
    with with_auto_axes(mesh):
        specs = placement.by_rows, PartitionSpec()
        run = on_each_device(placement, own, specs, placement.by_rows)
        entries = run(placement.numbers(), canonical_indices(drop_sharding(ids), num_rows))
    if mesh is not None:
        entries = restore_sharding(entries, explicit_part(mesh, placement.by_rows))
    none, indices = entries
    return none, indices


def each_shard(
    fun: Callable[..., Any], slices: Entries, *arrays: PyTree, shared: PyTree = ()
) -> Any:
    """``fun(slices, *arrays)``, each device for its own rows, without communication.

    Args:
      fun: gets slices of this device's rows, numbered from 0, and its rows of the arrays.
        Returns a pytree of slices and arrays whose first axis goes by rows or by entries.
      slices: with a placement.
      *arrays: pytrees of arrays ``[V, ...]``, placed as the table.
      shared: arrays that ``fun`` gets whole, after the others.
    """
    placement, dense_shape = slices.facts.placement, slices.dense_shape
    row_axes = slices.row_axes
    here = slices.facts._replace(placement=None)
    if placement is None or dense_shape is None or not slices.is_placed:
        plain = slices.of(slices.values, slices.indices, dense_shape, here, row_axes)
        return fun(plain, *arrays, *shared)
    shape = (dense_shape[0] // placement.shards, *dense_shape[1:])
    height = rows_numbered(shape, row_axes)

    def local(
        shared: PyTree,
        number: jax.Array,
        values: jax.Array,
        indices: jax.Array,
        *arrays: PyTree,
    ) -> Any:
        first = number[0].astype(indices.dtype) * height
        mine = slices.of(values, indices - first, shape, here, row_axes)
        result = fun(mine, *arrays, *shared)

        def of_all(x: Leaf) -> Any:
            return _of_all_shards(placement, x, first) if is_entries(x) else x

        return carry_facts(jax.tree.map(of_all, result, is_leaf=is_entries))

    operands = placement.numbers(), slices.values, slices.indices, *arrays
    specs = PartitionSpec(), *(placement.by_rows for _ in operands)
    run = on_each_device(placement, local, specs, placement.by_rows)
    run = on_any_mesh(lambda shared, numbers, values, *rest: shardings_of(values))(run)
    return carried(run(shared, *operands))


def _of_all_shards(placement: Placement, x: S, first: jax.Array) -> S:
    """Slices of the rows from ``first`` on as slices of the whole table."""
    assert x.dense_shape is not None
    longest, *rest = x.dense_shape
    height = rows_numbered(x.dense_shape, x.row_axes)
    shape = (longest * placement.shards, *rest)
    indices = canonical_indices(x.indices, height)
    beyond = rows_numbered(shape, x.row_axes)
    indices = jnp.where(indices < height, indices + first, beyond)
    facts = x.facts._replace(placement=placement)
    return x.of(x.values, indices, shape, facts, x.row_axes)


def is_entries(x: object) -> bool:
    return isinstance(x, Entries)
