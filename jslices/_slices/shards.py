"""Slices on a mesh, whose devices hold the entries of their own rows."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jslices._place import boundary
from jslices._place.placement import Placement, on_each_device
from jslices._rows.access import canonical_indices
from jslices._slices.entries import Entries, Facts
from jslices._typing import PyTree

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
        widest = max((i.dtype for _, i in parts), key=lambda dtype: dtype.itemsize)
        indices = [i.reshape(-1).astype(widest) for _, i in parts]
        return [jnp.concatenate(values), jnp.concatenate(indices)]

    if len(parts) == 1 and parts[0][1].ndim == 1:
        return parts[0]
    specs = [
        (PartitionSpec(*(None,) * (i.ndim - 1), placement.rows),) * 2 for _, i in parts
    ]
    run = on_each_device(placement, local, (specs,), placement.by_rows)
    values, indices = run(parts)
    return values, indices


def sent_to_owners(
    placement: Placement, num_rows: int, ids: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Entries without elements for ``ids`` ``[K]``, each on the device that has its row.

    One axis numbers the rows.
    """

    def own(number: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        height = num_rows // placement.shards
        first = number[0].astype(ids.dtype) * height
        mine = (ids >= first) & (ids < first + height)
        return jnp.zeros((*ids.shape, 0)), jnp.where(mine, ids, num_rows)

    mesh = placement.mesh if placement.mesh.explicit_axes else None
    with boundary.with_auto_axes(mesh):
        specs = placement.by_rows, PartitionSpec()
        run = on_each_device(placement, own, specs, placement.by_rows)
        ids = canonical_indices(boundary.drop_sharding(ids), num_rows)
        entries = run(placement.numbers(), ids)
    if mesh is not None:
        split = boundary.explicit_part(mesh, placement.by_rows)
        entries = boundary.restore_sharding(entries, split)
    none, indices = entries
    return none, indices


def each_shard(
    fun: Callable[..., Any],
    slices: Entries,
    *arrays: PyTree,
    shared: PyTree = (),
    with_numbers: bool = False,
) -> Any:
    """``fun(slices, *arrays)``, each device for its own rows, without communication.

    Args:
      fun: gets slices of this device's rows, numbered from 0, and its rows of the arrays.
        Returns a pytree of slices, and of arrays ``[V, ...]`` of these rows.
      slices: with a placement.
      *arrays: pytrees of arrays ``[V, ...]``, placed as the table.
      shared: arrays that ``fun`` gets whole, after the others.
      with_numbers: whether ``fun`` gets another argument, the last: a function from numbers
        of this device's rows to those of the same rows in the table.
    """
    placement, dense_shape = slices.facts.placement, slices.dense_shape
    row_axes = slices.row_axes
    structure: list[tuple[jax.tree_util.PyTreeDef, list[Facts | None]]] = []
    here = slices.facts._replace(placement=None)
    if placement is None or dense_shape is None or not slices.is_placed:
        plain = slices.of(slices.values, slices.indices, dense_shape, here)
        return fun(plain, *arrays, *shared, *[lambda numbers: numbers] * with_numbers)
    sizes, row = dense_shape[:row_axes], dense_shape[row_axes:]
    own = placement.part_of(sizes)
    height, beyond = math.prod(own), math.prod(sizes)

    def local(
        shared: PyTree,
        number: jax.Array,
        values: jax.Array,
        indices: jax.Array,
        *arrays: PyTree,
    ) -> Any:
        first = number[0].astype(indices.dtype) * height
        numbers = placement.by_device(canonical_indices(indices, beyond), sizes) - first
        mine = slices.of(values, canonical_indices(numbers, height), (*own, *row), here)

        def in_whole(numbers: jax.Array) -> jax.Array:
            return placement.in_whole(numbers + first.astype(numbers.dtype), sizes)

        def of_all(x: S) -> S:
            """Slices of this device's rows as slices of the whole table."""
            assert x.dense_shape is not None
            numbers = canonical_indices(x.indices, height)
            numbers = jnp.where(numbers < height, in_whole(numbers), beyond)
            shape = (*sizes, *x.dense_shape[row_axes:])
            facts = x.facts._replace(placement=placement)
            return x.of(x.values, numbers, shape, facts)

        result = fun(mine, *arrays, *shared, *[in_whole] * with_numbers)
        leaves, tree = jax.tree.flatten(result, is_leaf=is_entries)
        entries = [of_all(x) if is_entries(x) else x for x in leaves]
        facts = [x.facts if is_entries(x) else None for x in entries]
        structure[:] = [(tree, facts)]  # which does not pass a shard_map
        placed = [x for x in entries if is_entries(x)]
        return placed, [x for x in leaves if not is_entries(x)]

    operands = placement.numbers(), slices.values, slices.indices, *arrays
    split = placement.by_rows, jax.P(*placement.by_axis)
    specs = PartitionSpec(), *(split[0],) * 3, *(split[1] for _ in arrays)
    run = on_each_device(placement, local, specs, split)
    run = boundary.on_any_mesh(functools.partial(_shardings, placement))(run)
    entries, others = run(shared, *operands)
    # JAX looks for the layouts of results in its own equations alone, not inside of these.
    entries, others = iter(entries), map(boundary.row_major_array, others)
    ((tree, every),) = structure
    return tree.unflatten(
        next(others) if facts is None else next(entries).with_facts(facts)
        for facts in every
    )


def _shardings(
    placement: Placement, shared: PyTree, numbers: jax.Array, values: jax.Array, *rest: Any
) -> tuple[Any, Any]:
    """How entries are split over devices, and arrays placed as the table."""
    of_values = boundary.shardings_of(values)
    if of_values is None:
        return None, None
    spec = PartitionSpec(*placement.by_axis, *of_values.spec[1:])
    return of_values, boundary.explicit_part(of_values.mesh, spec)


def is_entries(x: object) -> bool:
    return isinstance(x, Entries)
