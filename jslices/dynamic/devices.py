"""A map whose buckets are split over the devices of a mesh: ids travel to their buckets."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jslices import Exchange, InvalidArgumentError
from jslices.dynamic.buckets import WAYS, Part, buckets_of
from jslices.dynamic.ids import NOBODY, WideIds, is_padding


def exchange_of(array: jax.Array, exchange: Exchange | None) -> Exchange | None:
    """How ids travel: as is said, or as the type of a map's array tells; or not (None)."""
    sharding: Any = jax.typeof(array).sharding
    mesh = sharding.mesh
    is_split = not mesh.empty and not mesh.are_all_axes_manual
    if exchange is None:
        axes = sharding.spec[0] if is_split and sharding.spec else None
        if not axes:
            return None
        exchange = Exchange(axes)
    parts = [mesh.shape.get(axis, 0) for axis in exchange.axes] if is_split else [0]
    if 0 in parts or array.shape[0] % (WAYS * math.prod(parts)):
        where = dict(mesh.shape) if is_split else "no mesh"
        raise InvalidArgumentError(
            f"{exchange} of a map with {array.shape[0]} rows on {where}: each device must "
            f"have whole buckets of {WAYS} rows; make it with id_map(..., "
            "devices=jax.device_count(), "
            f"sharding=jax.NamedSharding(mesh, jax.P({exchange.axis!r})))"
        )
    return exchange


def on_each_part(
    call: Callable[[Part], Any], whole: Any, ids: WideIds, exchange: Exchange
) -> Any:
    """A method of :class:`Part` on each device, with the ids of its buckets.

    Returns:
      What ``call`` does: rows ``[K]`` where the ids are; where the map is, integers of
      which the largest means none; counts, summed.
    """
    mesh, axes = jax.typeof(whole.low).sharding.mesh, exchange.axes
    parts, count = math.prod(mesh.shape[axis] for axis in axes), ids.low.shape[0]
    each, buckets = -(-count // parts), whole.low.shape[0] // WAYS
    room = each * parts
    ids = WideIds(*(jnp.pad(x, (0, room - count), constant_values=NOBODY) for x in ids))

    def as_long(x: jax.Array) -> jax.Array:
        none = x.dtype.type(jnp.iinfo(x.dtype).max)
        return lax.pad(x, none, [(0, room - n, 0) for n in x.shape])

    def swapped(capacity: int, part: Any, to: jax.Array, column: Any, ids: WideIds) -> Any:
        """To each device so many of the ids of its buckets, and their rows back."""
        swap = lambda x: lax.all_to_all(x, axes, 0, 0, tiled=True)  # noqa: E731
        fits = (to < parts) & (column < capacity)
        place = jnp.where(fits, to * capacity + column, room)
        empty = jnp.full(parts * capacity, NOBODY)
        sent = WideIds(*(swap(empty.at[place].set(x, mode="drop")) for x in ids))
        part, rows, others = call(Part.of(part, sent, lax.axis_index(axes), parts))
        rows = swap(rows).at[place].get(mode="fill", fill_value=-1)
        return part, rows, jax.tree.map(as_long, others)

    def local(part: Any, ids: WideIds) -> Any:
        to = buckets_of(ids, whole.name, buckets) // (buckets // parts)
        to = jnp.where(is_padding(ids), parts, to)
        here = jnp.arange(each, dtype=to.dtype)
        # In a bucket ids keep their order.
        to, order, *sorted_ids = lax.sort((to, here, *ids), num_keys=1, is_stable=True)
        start = jnp.searchsorted(to, jnp.arange(parts + 1, dtype=to.dtype)).astype(to.dtype)
        arguments = part, to, here - start.at[to].get(mode="clip"), WideIds(*sorted_ids)
        capacity = min(each, math.ceil(exchange.capacity * each / parts))
        result = [functools.partial(swapped, n) for n in (each, capacity)]
        if exchange.plan != "gather" and capacity < each:
            most = lax.pmax(jnp.max(start[1:] - start[:-1]), axes)
            part, rows, others = lax.cond(most > capacity, *result, *arguments)
        else:
            part, rows, others = result[0](*arguments)
        rows = jnp.zeros_like(rows).at[order].set(rows)
        summed = jax.tree.map(lambda x: x if x.ndim else lax.psum(x, axes), others)
        return part, rows, summed

    def split(tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.P(axes) if jnp.ndim(x) else jax.P(), tree)

    others = jax.eval_shape(lambda *args: call(Part.of(*args))[2], whole, ids)
    part, rows, others = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=split((whole, ids)),
        out_specs=(split(whole), jax.P(axes), split(others)),
        check_vma=False,  # along other axes every device does the same
    )(whole, ids)
    return part, rows[:count], others
