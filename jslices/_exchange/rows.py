"""Look up rows of a table that is split over devices: rows are sent, the table stays.

The ids are exchanged first, as integers that have no derivative (:func:`locate`). Then the
rows are, and on the way back the sums of their gradients (:func:`exchanged_rows`). Between
``jax.shard_map`` and its function everything is what one device has; ``number`` ``[1]``
tells which part of the rows that is.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jslices._exchange.plan import ExchangePlan
from jslices._place.boundary import on_one_mesh
from jslices._place.placement import Placement, on_each_device
from jslices._rows.access import canonical_indices, missing_value, take_rows, where_rows
from jslices._rows.sums import add_rows, number_rows, widened


class Located(NamedTuple):
    """Where the rows of some ids are, and which device requests which rows.

    Every array but the last has a part on each device; k, N and C are those of the
    :class:`ExchangePlan`.
    """

    #: ``[k]``: the position of a row among the ``N * C`` that arrive; ``N * C`` if it does
    #: not come, or comes by the other way.
    places: jax.Array
    has_grad: jax.Array  #: ``[k]`` bool, which ids get a gradient.
    #: ``[*devices, entries]``, rows, ``-1 - row`` where no gradient will come back, and
    #: ``-1 - V`` for none: ``[N * C]`` rows of this device, or all ``[N * k]``, on
    #: whichever device.
    requested: jax.Array
    overflowed: jax.Array  #: bool, whether some pair of devices had more ids than room.


def _split(placement: Placement) -> Any:
    """How the located rows are split over devices."""
    batch, devices = jax.P(placement.batch), jax.P(*placement.batch)
    specs: list[Any] = [batch, batch, devices, jax.P()]
    return Located(*specs)


def rows_from_elsewhere(
    plan: ExchangePlan,
    table: jax.Array,
    read: jax.Array,
    record: jax.Array,
    slot: jax.Array,
    mode: str | lax.GatherScatterMode | None,
    fill_value: ArrayLike | None,
) -> tuple[jax.Array, jax.Array]:
    """The rows ``[n, *D]`` of a lookup, and the indices of its gradient.

    ``table`` is ``[V, *D]``, or has more axes that number rows. ``read`` ``[n]`` are the
    rows to read, of which those out of range become what ``mode`` and ``fill_value`` say;
    ``record`` ``[n]`` are the indices of the gradient, out of range for none. For the
    cotangent slot see ``_grad/run.py``.
    """
    count, height = read.shape[0], plan.num_rows
    table, read, record = on_one_mesh((table, read, record))
    fills = lax.GatherScatterMode.from_any(mode) == lax.GatherScatterMode.FILL_OR_DROP
    good = (read >= 0) & (read < height)
    near = read if fills else jnp.clip(read, 0, height - 1)
    located, indices = locate(plan, near, record)
    rows = exchanged_rows(table, located, slot, plan)[:count]
    if fills:
        missing = missing_value(rows.dtype) if fill_value is None else fill_value
        rows = where_rows(good, rows, missing)
    return rows, indices


def locate(
    plan: ExchangePlan, read: jax.Array, record: jax.Array
) -> tuple[Located, jax.Array]:
    """Tell every device which of its rows are requested; and the gradient's indices.

    Of the arguments of :func:`rows_from_elsewhere`; what is out of range is not read.
    """
    placement, height = plan.placement, plan.num_rows
    total = plan.devices * plan.ids
    ids, record = (canonical_indices(x, height) for x in (read, record))
    beyond = (0, total - ids.shape[0])
    ids = jnp.pad(ids, beyond, constant_values=height)
    has_grad = jnp.pad(record, beyond, constant_values=height) < height
    ids = placement.by_device(ids, plan.sizes)
    find = functools.partial(_locate, plan)
    specs = placement.by_rows, jax.P(placement.batch), jax.P(placement.batch)
    out = _split(placement), placement.by_rows
    run = on_each_device(placement, find, specs, out, whole_rows=False)
    return run(placement.numbers(), ids, has_grad)  # type: ignore[no-any-return]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def exchanged_rows(
    table: jax.Array, located: Located, slot: jax.Array, plan: ExchangePlan
) -> jax.Array:
    """Rows ``[n, *D]`` of ``table`` ``[V, *D]``, some perhaps at the end for no id.

    In the exchange rows are numbered device by device: :meth:`Placement.by_device`.

    The gradient goes to the cotangent slot: its entries are on the devices that hold
    their rows. Ids that did not fit read NaN.
    """
    placement, room = plan.placement, plan.placement.shards * plan.capacity
    batch, columns = placement.batch, placement.columns
    # Each reads its own rows where columns are left to XLA, and has them whole only then.
    known = jax.P(*(x if x in placement.known else None for x in batch))
    specs = placement.by_rows, jax.P(*placement.by_axis), known
    read = on_each_device(placement, functools.partial(_read, plan), specs, known)
    # Rows ``[*devices, n, *D]``.
    spec = jax.P(*batch, None, *columns)

    def sent(send: Callable[..., jax.Array], requested: jax.Array) -> jax.Array:
        def to_others(rows: jax.Array, places: jax.Array) -> jax.Array:
            return send(rows.reshape(rows.shape[len(batch) :]), places)

        specs, out = (spec, jax.P(batch)), jax.P(batch, *columns)
        run = on_each_device(placement, to_others, specs, out, whole_rows=False)
        rows = read(placement.numbers(), table, requested)
        return run(rows, located.places)  # type: ignore[no-any-return]

    def swapped() -> jax.Array:
        send = lambda rows, places: take_rows(_swapped(placement, rows), places)  # noqa: E731
        return sent(send, located.requested[..., :room])

    def summed() -> jax.Array:
        send = lambda rows, _: lax.psum_scatter(rows, placement.rows, tiled=True)  # noqa: E731
        return sent(send, located.requested)

    return _either_way(plan, located.overflowed, swapped, summed)


def _forward(
    table: jax.Array, located: Located, slot: jax.Array, plan: ExchangePlan
) -> Any:
    return exchanged_rows.fun(table, located, slot, plan), located


def _backward(plan: ExchangePlan, located: Located, rows: jax.Array) -> Any:
    placement, columns = plan.placement, plan.placement.columns
    back = functools.partial(_send_back, plan)
    specs = placement.by_rows, jax.P(placement.batch, *columns), _split(placement)
    out = jax.P(placement.rows, *columns)
    send = on_each_device(placement, back, specs, out, whole_rows=False)
    return None, None, send(placement.numbers(), rows, located)


exchanged_rows.defvjp(_forward, _backward)


# --- on each device ---------------------------------------------------------------------


def _locate(
    plan: ExchangePlan, number: jax.Array, ids: jax.Array, has_grad: jax.Array
) -> tuple[Located, jax.Array]:
    placement, capacity = plan.placement, plan.capacity
    shards, height, room = placement.shards, plan.num_rows, placement.shards * capacity
    unique, numbers, _ = number_rows(ids, height, plan.ids)
    starts = jnp.arange(shards + 1, dtype=ids.dtype) * plan.shard_rows
    start = jnp.searchsorted(unique, starts).astype(jnp.int32)
    owner = jnp.minimum(ids // plan.shard_rows, shards - 1).astype(jnp.int32)
    column = numbers - start[owner]
    places = owner * capacity + column
    places = jnp.where((ids < height) & (column < capacity), places, room)
    overflowed = jnp.zeros((), bool)
    if plan.falls_back:
        most = lax.pmax(jnp.max(start[1:] - start[:-1]), placement.batch)
        overflowed = most > capacity

    def swapped() -> jax.Array:
        at = start[:-1, None] + jnp.arange(capacity, dtype=jnp.int32)[None]
        requested = unique.at[jnp.minimum(at, plan.ids - 1)].get(mode="promise_in_bounds")
        requested = jnp.where(at < start[1:, None], requested, height).reshape(room)
        named = jnp.zeros((room,), bool)
        named = named.at[jnp.where(has_grad, places, room)].set(True, mode="drop")
        requested = _swapped(placement, jnp.where(named, requested, -1 - requested))
        return _lengthened(requested, plan.entries, -1 - height)

    def gathered() -> jax.Array:
        return _gathered(placement.rows, jnp.where(has_grad, ids, -1 - ids))

    requested = _either_way(plan, overflowed, swapped, gathered)
    indices = jnp.where(_own(plan, number, requested), requested, height)
    indices = placement.in_whole(indices, plan.sizes)
    requested = requested.reshape((*(1,) * len(placement.batch), -1))
    located = Located(places, has_grad, requested, overflowed)
    return located, _gathered(placement.repeated, indices)


def _read(
    plan: ExchangePlan, number: jax.Array, table: jax.Array, requested: jax.Array
) -> jax.Array:
    """The rows ``[*devices, n, *D]`` that this device has, zeros for others."""
    requested = jnp.where(requested < 0, -1 - requested, requested)
    first = number[0].astype(requested.dtype) * plan.shard_rows
    return take_rows(table, requested - first, fill_value=0, row_axes=len(plan.sizes))


def _send_back(
    plan: ExchangePlan, number: jax.Array, rows: jax.Array, located: Located
) -> jax.Array:
    """The gradient's values on this device, from the cotangents ``[k, *D]`` of its rows."""
    placement = plan.placement
    room = placement.shards * plan.capacity

    def swapped() -> jax.Array:
        sums = jnp.zeros((room, *rows.shape[1:]), widened(rows).dtype)
        places = jnp.where(located.has_grad, located.places, room)
        sums = add_rows(sums, places, widened(rows)).astype(rows.dtype)
        return _lengthened(_swapped(placement, sums), plan.entries)

    def gathered() -> jax.Array:
        every = _gathered(placement.rows, rows)
        own = _own(plan, number, located.requested.reshape(-1))
        return where_rows(own, every)

    values = _either_way(plan, located.overflowed, swapped, gathered)
    return _gathered(placement.repeated, values)


def _own(plan: ExchangePlan, number: jax.Array, requested: jax.Array) -> jax.Array:
    """Which of the requested rows are of this device, and get a gradient."""
    first = number[0].astype(requested.dtype) * plan.shard_rows
    return (requested >= first) & (requested < first + plan.shard_rows)


def _either_way(
    plan: ExchangePlan,
    overflowed: jax.Array,
    swapped: Callable[[], jax.Array],
    gathered: Callable[[], jax.Array],
) -> jax.Array:
    if plan.falls_back:
        return lax.cond(overflowed, gathered, swapped)  # type: ignore[no-any-return]
    return swapped() if plan.way == "all_to_all" else gathered()


def _swapped(placement: Placement, x: jax.Array) -> jax.Array:
    """Part j of what device i had, ``[N * C, ...]``, as part i of what device j has."""
    if placement.shards == 1:
        return x
    parts = x.reshape(placement.shards, -1, *x.shape[1:])
    return lax.all_to_all(parts, placement.rows, 0, 0, tiled=True).reshape(x.shape)


def _gathered(axes: tuple[str, ...], x: jax.Array) -> jax.Array:
    return lax.all_gather(x, axes, tiled=True) if axes else x


def _lengthened(x: jax.Array, length: int, value: int = 0) -> jax.Array:
    beyond = length - x.shape[0]
    return jnp.pad(x, ((0, beyond), *((0, 0),) * (x.ndim - 1)), constant_values=value)
