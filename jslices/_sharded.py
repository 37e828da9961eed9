"""Slices whose entries stand on the devices that hold their rows."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jslices._devices.exchange import Placement, mesh_of, on_each_device
from jslices._devices.explicit import (
    drop_sharding,
    explicit_part,
    restore_sharding,
    running_with_auto_axes,
    shardings_of,
    with_auto_axes,
)
from jslices._jax import flatten
from jslices._rows.bounds import canonical_indices
from jslices._slices import IndexedSlices, deduplicated, is_slices, known_distinct


@jax.tree_util.register_pytree_with_keys_class
class ShardedSlices(IndexedSlices):
    """IndexedSlices of a table that is split over devices, each row with its owner.

    ``indices`` are row numbers of the whole table, as ever; ``placement`` says that each
    device holds entries of its own rows alone. What reads or writes rows of the table then
    needs nothing from other devices (:func:`each_shard`).
    """

    placement: Placement

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        children, shape = super().tree_flatten_with_keys()
        return children, (shape, self.placement)

    def tree_flatten(self) -> tuple[Any, Any]:
        children, shape = super().tree_flatten()
        return children, (shape, self.placement)

    @classmethod
    def tree_unflatten(cls, known: Any, children: Sequence[Any]) -> "ShardedSlices":
        shape, placement = known
        new: Any = super().tree_unflatten(shape, children)
        object.__setattr__(new, "placement", placement)
        return new

    def _with_values(self, values: jax.Array) -> "ShardedSlices":
        shape, distinct = self.dense_shape, self._distinct
        return sharded(self.placement, shape, values, self.indices, distinct)

    @property
    def is_placed(self) -> bool:
        """Whether each device has its entries: not on the host, nor in a ``shard_map``."""
        return mesh_of(jax.typeof(self.values)) is not None

    def __radd__(self, other: Any) -> Any:
        fits = jnp.shape(other) == self.dense_shape and self.indices.ndim == 1
        if not (fits and self.is_placed):
            return super().__radd__(other)
        return each_shard(lambda rows, array: array + rows, self, jnp.asarray(other))

    def to_dense(self) -> jax.Array:
        if self.indices.ndim > 1:
            return super().to_dense()
        dense: jax.Array = each_shard(IndexedSlices.to_dense, self)
        return dense

    def coalesce(self, size: int | None = None, combine: str = "sum") -> IndexedSlices:
        if self.indices.ndim > 1 or size is not None:
            return super().coalesce(size, combine)
        unique: IndexedSlices = each_shard(lambda s: s.coalesce(combine=combine), self)
        return unique

    def _deduplicated(self) -> IndexedSlices:
        if self.indices.ndim > 1:
            return super()._deduplicated()
        unique: IndexedSlices = each_shard(deduplicated, self)
        return unique

    def _flattened(self) -> IndexedSlices:
        if not self.is_placed:
            return super()._flattened()
        return join_entries(self.placement, self.dense_shape, [(self.values, self.indices)])

    def _joined(
        self, others: Sequence[IndexedSlices], values: Any, indices: Any, shape: Any
    ) -> IndexedSlices:
        alike = all(
            isinstance(x, ShardedSlices) and x.placement == self.placement for x in others
        )
        if self.indices.ndim > 1 or not (alike and self.is_placed):
            return super()._joined(others, values, indices, shape)
        parts = list(zip(values, indices, strict=True))
        return join_entries(self.placement, shape, parts)


def sharded(
    placement: Placement, shape: Any, values: Any, indices: Any, distinct: bool = False
) -> ShardedSlices:
    new = ShardedSlices.tree_unflatten((shape, placement), (values, indices))
    return known_distinct(new) if distinct else new  # type: ignore[no-any-return]


def join_entries(
    placement: Placement, shape: Any, parts: Sequence[tuple[jax.Array, jax.Array]]
) -> ShardedSlices:
    """Entries ``[..., n, *D]`` and ``[..., n]`` of several lookups, as those of one.

    Only ``n`` is split over devices; each device joins what it has.
    """
    row = len(shape) - 1

    def local(parts: Any) -> list[jax.Array]:
        values = [v.reshape(i.size, *v.shape[v.ndim - row :]) for v, i in parts]
        indices = [i.reshape(-1) for _, i in parts]
        widest = max((i.dtype for i in indices), key=lambda dtype: dtype.itemsize)
        return [
            jnp.concatenate(values),
            jnp.concatenate([i.astype(widest) for i in indices]),
        ]

    if len(parts) == 1 and parts[0][1].ndim == 1:
        return sharded(placement, shape, *parts[0])
    specs = [
        (PartitionSpec(*(None,) * (i.ndim - 1), placement.rows or None),) * 2
        for _, i in parts
    ]
    run = on_each_device(placement, local, (specs,), placement.by_rows)
    return sharded(placement, shape, *run(parts))


def told_to_owners(placement: Placement, num_rows: int, ids: jax.Array) -> ShardedSlices:
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
    return sharded(placement, (num_rows, 0), *entries)


def each_shard(fun: Callable[..., Any], slices: Any, *arrays: Any, shared: Any = ()) -> Any:
    """``fun(slices, *arrays)``, each device for its own rows, without a word between them.

    Args:
      fun: gets slices of this device's rows, numbered from 0, and its rows of the arrays.
        Returns a pytree of slices and arrays whose first axis goes by rows or by entries.
      slices: :class:`ShardedSlices`.
      *arrays: pytrees of arrays ``[V, ...]``, placed as the table.
      shared: arrays that ``fun`` gets whole, after the others.
    """
    if not slices.is_placed:
        plain = IndexedSlices.tree_unflatten(
            slices.dense_shape, (slices.values, slices.indices)
        )
        return fun(known_distinct(plain) if slices._distinct else plain, *arrays, *shared)
    placement, height = slices.placement, slices.dense_shape[0] // slices.placement.shards
    shape = (height, *slices.dense_shape[1:])
    distinct: list[bool] = []

    def local(shared: Any, number: Any, values: Any, indices: Any, *arrays: Any) -> Any:
        first = number[0].astype(indices.dtype) * height
        mine = IndexedSlices.tree_unflatten(shape, (values, indices - first))
        mine = known_distinct(mine) if slices._distinct else mine
        leaves, tree = flatten(fun(mine, *arrays, *shared), is_leaf=is_slices)
        distinct.extend(x._distinct for x in leaves if is_slices(x))
        return tree.unflatten(
            [_of_all(placement, x, first) if is_slices(x) else x for x in leaves]
        )

    given = placement.numbers(), slices.values, slices.indices, *arrays
    specs = PartitionSpec(), *(placement.by_rows for _ in given)
    run = running_with_auto_axes(
        on_each_device(placement, local, specs, placement.by_rows),
        lambda shared, numbers, values, *rest: shardings_of(values),
    )
    leaves, tree = flatten(run(shared, *given), is_leaf=is_slices)
    for x, known in zip(filter(is_slices, leaves), distinct, strict=True):
        if known:
            known_distinct(x)
    return tree.unflatten(leaves)


def _of_all(placement: Placement, x: IndexedSlices, first: jax.Array) -> IndexedSlices:
    """Slices of the rows from ``first`` on as slices of the whole table."""
    assert x.dense_shape is not None
    height, *row = x.dense_shape
    indices = canonical_indices(x.indices, height)
    shape = (height * placement.shards, *row)
    indices = jnp.where(indices < height, indices + first, shape[0])
    if type(x) is IndexedSlices:
        return sharded(placement, shape, x.values, indices)
    return type(x).tree_unflatten(shape, (x.values, indices))
