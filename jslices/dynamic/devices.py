"""A map whose buckets are split over the devices of a mesh: ids travel to their buckets."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType

from jslices import Exchange, InvalidArgumentError
from jslices.dynamic.ids import NOBODY, WideIds

M = TypeVar("M")


class Split(NamedTuple):
    """How a map is split: its buckets along axes of a mesh, and ids as well."""

    mesh: Any
    axes: tuple[str, ...]
    exchange: Exchange

    @property
    def parts(self) -> int:
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    def specs(self, tree: Any) -> Any:
        """The part of each array that a device has: all of a scalar."""
        return jax.tree.map(lambda x: jax.P(self.axes) if jnp.ndim(x) else jax.P(), tree)


def split_of(array: jax.Array, exchange: Exchange | None) -> Split | None:
    """How a map of this array is split; None on one device, or inside ``shard_map``."""
    sharding: Any = jax.typeof(array).sharding
    mesh = sharding.mesh
    on_mesh = not mesh.empty and not mesh.are_all_axes_manual
    if exchange is not None and not on_mesh:
        raise InvalidArgumentError(
            f"exchange={exchange} wants a map that is split over the devices of a mesh, "
            "and this one is on no mesh: make it with "
            f"id_map(..., sharding=jax.NamedSharding(mesh, jax.P({exchange.axis!r})))"
        )
    if not on_mesh:
        return None
    if exchange is None:
        axes = sharding.spec[0] if sharding.spec else None
        if axes is None:
            return None
        exchange = Exchange(axes)
    auto = mesh.update_axis_types(dict.fromkeys(mesh.axis_names, AxisType.Auto))
    split = Split(auto, exchange.axes, exchange)
    unknown = [axis for axis in split.axes if axis not in mesh.axis_names]
    if unknown or array.shape[0] % (8 * split.parts):
        raise InvalidArgumentError(
            f"{exchange} of a map with {array.shape[0]} rows: its mesh is "
            f"{dict(mesh.shape)}, and each device has whole buckets of 8 rows; "
            "make it with id_map(..., devices=number of devices)"
        )
    return split


def on_each_part(
    run: Callable[[M, Any, WideIds], tuple[M, jax.Array, Any]],
    owner: Callable[[M, WideIds], jax.Array],
    whole: M,
    ids: WideIds,
    split: Split,
) -> Any:
    """``run(part, number, ids)`` on each device, with the ids ``[n]`` of its buckets.

    Args:
      run: returns the part, the rows ``[n]`` that ids own or -1, and changes: arrays of n
        integers, in which the largest means none, and counts.
      owner: ``owner(part, ids)``, the number of the part to which ids belong.
      whole: the map.
      ids: ``[K]``, split over devices or not.

    Returns:
      ``(whole, rows, changes)``: rows ``[K]`` where the ids are, changes where the rows
      are, counts summed.
    """
    count, parts = ids.low.shape[0], split.parts
    each = -(-count // parts)
    padding = (0, each * parts - count)
    ids = WideIds(*(jnp.pad(x, padding, constant_values=NOBODY) for x in ids))
    capacity = min(each, math.ceil(split.exchange.capacity * each / parts))
    swaps = split.exchange.plan != "gather" and capacity < each

    def gathered(part: M, number: jax.Array, ids: WideIds, place: jax.Array) -> Any:
        """All ids on every device."""
        del place
        every = WideIds(*(lax.all_gather(x, split.axes, tiled=True) for x in ids))
        part, rows, changes = run(part, number, every)
        # One part has the row, the others -1.
        rows = lax.psum_scatter(rows + 1, split.axes, tiled=True) - 1
        return part, rows, changes

    def swapped(part: M, number: jax.Array, ids: WideIds, place: jax.Array) -> Any:
        """To each device the ids of its buckets."""
        swap = lambda x: lax.all_to_all(x, split.axes, 0, 0, tiled=True)  # noqa: E731
        room = jnp.full(parts * capacity, NOBODY)
        sent = (swap(room.at[place].set(x, mode="drop")) for x in ids)
        part, rows, changes = run(part, number, WideIds(*sent))
        rows = swap(rows).at[place].get(mode="fill", fill_value=-1)
        return part, rows, jax.tree.map(as_long, changes)

    def as_long(x: jax.Array) -> jax.Array:
        none = x.dtype.type(jnp.iinfo(x.dtype).max)
        return lax.pad(x, none, [(0, each * parts - n, 0) for n in x.shape])

    def local(part: M, ids: WideIds) -> Any:
        number = lax.axis_index(split.axes)
        to = owner(part, ids)
        order = jnp.argsort(to, stable=True)
        start = jnp.searchsorted(to[order], jnp.arange(parts + 1, dtype=jnp.int32))
        start = start.astype(jnp.int32)
        rank = jnp.zeros_like(to).at[order].set(jnp.arange(each, dtype=jnp.int32))
        column = rank - start.at[to].get(mode="clip")
        place = jnp.where(
            (to < parts) & (column < capacity), to * capacity + column, each * parts
        )
        arguments = part, number, ids, place
        if swaps:
            most = lax.pmax(jnp.max(start[1:] - start[:-1]), split.axes)
            part, rows, changes = lax.cond(most > capacity, gathered, swapped, *arguments)
        else:
            part, rows, changes = gathered(*arguments)
        summed = lambda x: x if x.ndim else lax.psum(x, split.axes)  # noqa: E731
        return part, rows, jax.tree.map(summed, changes)

    specs, batch = split.specs(whole), jax.P(split.axes)
    changes = split.specs(
        jax.eval_shape(lambda whole, ids: run(whole, 0, ids)[2], whole, ids)
    )
    everywhere = jax.shard_map(
        local,
        mesh=split.mesh,
        in_specs=(specs, batch),
        out_specs=(specs, batch, changes),
        check_vma=False,  # along other axes every device does the same
    )
    part, rows, changes = everywhere(whole, ids)
    return part, rows[:count], changes
