"""A map whose buckets are split over the devices of a mesh: ids travel to their buckets."""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jslices import Exchange, InvalidArgumentError
from jslices.dynamic.ids import NOBODY, WideIds

M = TypeVar("M")


def exchange_of(array: jax.Array, ways: int, exchange: Exchange | None) -> Exchange | None:
    """How ids travel: as is said, or as the type of a map's array says on Explicit axes.

    None on one device. Buckets have so many ``ways``.
    """
    sharding: Any = jax.typeof(array).sharding
    mesh = sharding.mesh
    is_split = not mesh.empty and not mesh.are_all_axes_manual
    if exchange is None:
        axes = sharding.spec[0] if is_split and sharding.spec else None
        return axes and Exchange(axes)
    parts = [mesh.shape.get(axis, 0) for axis in exchange.axes] if is_split else [0]
    if 0 in parts or array.shape[0] % (ways * math.prod(parts)):
        where = dict(mesh.shape) if is_split else "no mesh"
        raise InvalidArgumentError(
            f"{exchange} of a map with {array.shape[0]} rows on {where}: each device must "
            f"have whole buckets of {ways} rows; make it with id_map(..., "
            "devices=jax.device_count(), "
            f"sharding=jax.NamedSharding(mesh, jax.P({exchange.axis!r})))"
        )
    return exchange


def on_each_part(
    run: Callable[[M, Any, int, WideIds], tuple[M, jax.Array, Any]],
    owner: Callable[[M, int, WideIds], jax.Array],
    whole: M,
    ids: WideIds,
    exchange: Exchange,
) -> Any:
    """``run(part, number, parts, ids)`` on each device, with the ids of its buckets.

    Args:
      run: returns the part, the rows ``[n]`` that ids own or -1, and changes: arrays of n
        integers, in which the largest means none, and counts.
      owner: ``owner(part, parts, ids)``, the number of the part to which ids belong.
      whole: the map, a pytree of arrays that are split, and scalars.
      ids: ``[K]``, split over devices or not.

    Returns:
      ``(whole, rows, changes)``: rows ``[K]`` where the ids are, changes where the map is,
      counts summed.
    """
    mesh, axes = jax.typeof(jax.tree.leaves(whole)[0]).sharding.mesh, exchange.axes
    parts, count = math.prod(mesh.shape[axis] for axis in axes), ids.low.shape[0]
    each = -(-count // parts)
    ids = WideIds(
        *(jnp.pad(x, (0, each * parts - count), constant_values=NOBODY) for x in ids)
    )
    capacity = min(each, math.ceil(exchange.capacity * each / parts))

    def gathered(part: M, number: Any, ids: WideIds, place: jax.Array) -> Any:
        """All ids on every device."""
        del place
        every = WideIds(*(lax.all_gather(x, axes, tiled=True) for x in ids))
        part, rows, changes = run(part, number, parts, every)
        # One part has the row, the others -1.
        return part, lax.psum_scatter(rows + 1, axes, tiled=True) - 1, changes

    def swapped(part: M, number: Any, ids: WideIds, place: jax.Array) -> Any:
        """To each device the ids of its buckets."""
        swap = lambda x: lax.all_to_all(x, axes, 0, 0, tiled=True)  # noqa: E731
        room = jnp.full(parts * capacity, NOBODY)
        sent = (swap(room.at[place].set(x, mode="drop")) for x in ids)
        part, rows, changes = run(part, number, parts, WideIds(*sent))
        rows = swap(rows).at[place].get(mode="fill", fill_value=-1)
        return part, rows, jax.tree.map(as_long, changes)

    def as_long(x: jax.Array) -> jax.Array:
        none = x.dtype.type(jnp.iinfo(x.dtype).max)
        return lax.pad(x, none, [(0, each * parts - n, 0) for n in x.shape])

    def local(part: M, ids: WideIds) -> Any:
        to = owner(part, parts, ids)
        order = jnp.argsort(to, stable=True)  # in a bucket ids keep their order
        to, ids = to[order], WideIds(*(x[order] for x in ids))
        start = jnp.searchsorted(to, jnp.arange(parts + 1, dtype=to.dtype)).astype(to.dtype)
        column = jnp.arange(each, dtype=to.dtype) - start.at[to].get(mode="clip")
        fits = (to < parts) & (column < capacity)
        place = jnp.where(fits, to * capacity + column, each * parts)
        arguments = part, lax.axis_index(axes), ids, place
        if exchange.plan != "gather" and capacity < each:
            most = lax.pmax(jnp.max(start[1:] - start[:-1]), axes)
            part, rows, changes = lax.cond(most > capacity, gathered, swapped, *arguments)
        else:
            part, rows, changes = gathered(*arguments)
        rows = jnp.zeros_like(rows).at[order].set(rows)
        return (
            part,
            rows,
            jax.tree.map(lambda x: x if x.ndim else lax.psum(x, axes), changes),
        )

    def split(tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.P(axes) if jnp.ndim(x) else jax.P(), tree)

    changes = jax.eval_shape(lambda whole, ids: run(whole, 0, parts, ids)[2], whole, ids)
    everywhere = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=split((whole, ids)),
        out_specs=(split(whole), jax.P(axes), split(changes)),
        check_vma=False,  # along other axes every device does the same
    )
    part, rows, changes = everywhere(whole, ids)
    return part, rows[:count], changes
