"""Plan how rows get from device to device, while a program is traced.

What moves is in ``_exchange/rows.py``.
"""

import dataclasses
import inspect
import math
from typing import Annotated, Literal, TypeAlias

import numpy as np
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from jslices._arguments import Number, OneOf, check_arguments
from jslices._place.boundary import mesh_of, split_along
from jslices._place.placement import Placement
from jslices._typing import Aval
from jslices.errors import InvalidArgumentError

Way = Literal["all_to_all", "gather"]
#: For each axis of an array the mesh axes along which it is split.
Axes: TypeAlias = tuple[tuple[str, ...], ...]


@dataclasses.dataclass(frozen=True)
class Exchange:
    """How rows of a table that is split over devices reach the devices that look them up.

    For ``exchange=`` of :func:`jslices.value_and_grad` and its relatives. The table
    ``[V, *D]`` is split by rows along ``axis``, V / N rows on each of its N devices, and
    the ids are split over the mesh, k on each device.

    * ``"all_to_all"``: each device sends its distinct ids to the devices that hold their
      rows, gets these, and sends the sums of their gradients back.
    * ``"gather"``: all devices get all ids; rows are summed and scattered to those that
      asked for them, and all get all gradients.

    Args:
      axis: the mesh axis along which the rows are split, or several, as in the table's
        PartitionSpec: ``"x"`` for ``P("x", None)``, ``("x", "y")`` for
        ``P(("x", "y"), None)``. For a table ``[L, V, *D]`` whose rows two axes number it
        may be a PartitionSpec: ``jax.P(None, "x")`` if V is split.
      plan: ``"all_to_all"``, ``"gather"``, or ``"auto"``: the one with fewer bytes, and the
        gather where a ``capacity`` of N or more has room for all ids.
      capacity: in the plan ``"all_to_all"`` each pair of devices has room for
        ``capacity * k / N`` distinct ids. :func:`jslices.spread_ids` evens out the pairs.
      overflow: what a step does if some pair has more: ``"gather"`` takes that plan for the
        step, so that nothing is lost; for that the gradient has room for all ids on every
        device, ``N * k`` entries instead of ``capacity * k``. ``"nan"``: ids that do not
        fit read NaN, which shows in the loss.

    Raises:
      InvalidArgumentError: for an unknown ``plan`` or ``overflow``, no axis, or a
        ``capacity`` that is not a positive, finite number.

    Cost: each device receives ``(N - 1) * C`` ids and twice as many rows, C being k for
    ``"gather"``, and ``capacity * k / N`` for ``"all_to_all"``. Where rows are repeated
    along the other axes of the mesh, it also receives the gradients of its repetitions.

    Example:
      >>> import jslices as js
      >>> js.Exchange("x")
      Exchange(axis='x', plan='auto', capacity=2.0, overflow='gather')

    Source: the all-to-all of TorchRec's row-wise sharding and of JAX's SparseCore tables,
    which have capacities as well, and drop what does not fit.
    """

    axis: str | tuple[str, ...] | PartitionSpec
    plan: Annotated[str, OneOf("auto", "all_to_all", "gather")] = "auto"
    capacity: Annotated[float, Number(above=0)] = 2.0
    overflow: Annotated[str, OneOf("gather", "nan")] = "gather"

    def __post_init__(self) -> None:
        check_arguments("Exchange", inspect.get_annotations(Exchange), vars(self))
        several = isinstance(self.axis, str | tuple | list | PartitionSpec)
        names = several and all(isinstance(name, str) and name for name in self.axes)
        if not names or not self.axes or len(set(self.axes)) < len(self.axes):
            raise InvalidArgumentError(
                f"Exchange(axis={self.axis!r}): it must be the name of a mesh axis, or "
                "several, each once, along which the rows of the table are split"
            )

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes along which rows are split."""
        return tuple(axis for axes in self.by_axis for axis in axes)

    @property
    def by_axis(self) -> tuple[tuple[str, ...], ...]:
        """The same for each of the first axes of the table."""
        if isinstance(self.axis, PartitionSpec):
            axes = split_along(self.axis)
            return axes[: max((n for n, some in enumerate(axes, 1) if some), default=0)]
        return ((self.axis,) if isinstance(self.axis, str) else tuple(self.axis),)


def plan_exchange(
    table: Aval, exchange: Exchange | None, name: str, count: int, row_axes: int = 1
) -> "ExchangePlan | None":
    """Plan the exchange of a lookup of ``count`` rows; None where it is left to XLA.

    ``table`` is the type of the array, and ``name`` what messages call it. Some ids may be
    added so that devices divide them.
    """
    placement = _placement_of(table, exchange, name, row_axes)
    if placement is None:
        return None
    exchange = exchange or Exchange(placement.rows or placement.batch)
    sizes, shards = tuple(table.shape[:row_axes]), placement.shards
    num_rows = math.prod(sizes)
    devices = math.prod(placement.mesh.shape[axis] for axis in placement.batch)
    ids = max(1, -(-count // devices))
    enough = min(ids, num_rows // shards)
    capacity = enough
    if shards > 1:
        capacity = min(enough, math.ceil(exchange.capacity * ids / shards))
    saves = exchange.plan == "auto" and capacity < ids
    swaps = shards == 1 or exchange.plan == "all_to_all" or saves
    way: Way = "all_to_all" if swaps else "gather"
    falls_back = swaps and capacity < enough and exchange.overflow == "gather"
    return ExchangePlan(placement, sizes, ids, capacity, way, falls_back)


def _placement_of(
    table: Aval, exchange: Exchange | None, name: str, row_axes: int
) -> Placement | None:
    """The placement of a table's rows, as far as its type or ``exchange`` tell."""
    mesh = mesh_of(table)
    if mesh is None and exchange is not None:
        raise InvalidArgumentError(
            f"exchange= wants {name} to be split over the devices of a mesh, and it is "
            "on no mesh: jax.device_put(table, jax.NamedSharding(mesh, "
            f"jax.P({exchange.axis!r}))), outside of shard_map"
        )
    if mesh is None or mesh.size == 1:
        return None
    split = explicit = None
    if AxisType.Explicit in mesh.axis_types:
        split = explicit = split_along(table.sharding.spec, table.ndim)
    if exchange is not None:
        split = _split_as_said(table, exchange, name, mesh, explicit)
    if split is None:
        return None
    columns = split[row_axes:] if explicit is not None or any(split[row_axes:]) else ()
    placement = Placement(mesh, split[:row_axes], columns)
    for number, parts in enumerate(placement.parts()):
        if table.shape[number] % parts:
            raise InvalidArgumentError(_indivisible(table, number, parts, name))
    # Otherwise only columns are split, and every device has all ids.
    return placement if placement.batch else None


def _split_as_said(
    table: Aval, exchange: Exchange, name: str, mesh: AbstractMesh, explicit: Axes | None
) -> Axes:
    """How ``exchange`` says that a table is split, if its type agrees."""
    unknown = [axis for axis in exchange.axes if axis not in mesh.axis_names]
    if unknown:
        raise InvalidArgumentError(
            f"{exchange} of {name}: its mesh has the axes {mesh.axis_names}, and not "
            f"{unknown[0]!r}"
        )
    last = max(1, table.ndim - 1)  # no row is a single element, but of a vector
    if len(exchange.by_axis) > last:
        raise InvalidArgumentError(
            f"{exchange} of {name}: at most {last} axes of {table.str_short()} number rows"
        )
    if explicit is None or not any(explicit):
        return (*exchange.by_axis, *((),) * table.ndim)[: table.ndim]
    rows = [sum(explicit[:n], ()) for n in range(1, last + 1)]
    if exchange.axes not in rows:
        raise InvalidArgumentError(
            f"{exchange} of {name}: its type {table.str_short()} says that rows are split "
            f"along {rows[-1] or 'no axis'}"
        )
    return explicit


def _indivisible(table: Aval, number: int, parts: int, name: str) -> str:
    size = table.shape[number]
    what = f"{size} rows" if table.ndim < 3 else f"{size} along axis {number}"
    message = (
        f"{name} has {what}, which {parts} devices do not divide; give it "
        f"jslices.padded_rows({size}, {parts})"
    )
    if number or table.ndim < 3:
        return message + " rows" * (table.ndim < 3)
    return message + "; or, if axis 1 is split, type Exchange(jax.P(None, axis))"


@dataclasses.dataclass(frozen=True)
class ExchangePlan:
    """The sizes of the exchange of one lookup."""

    placement: Placement  #: which devices hold which rows.
    sizes: tuple[int, ...]  #: ``(V,)``, of the axes that number rows.
    ids: int  #: k, how many each device looks up; those added to divide them count.
    capacity: int  #: C, for how many distinct ids of a pair of devices there is room.
    way: Way  #: how rows are sent.
    falls_back: bool  #: whether a step with more ids for some pair takes the other way.

    @property
    def num_rows(self) -> int:
        """V, of all axes that number rows."""
        return math.prod(self.sizes)

    @property
    def shard_rows(self) -> int:
        """Rows on each device."""
        return self.num_rows // self.placement.shards

    @property
    def devices(self) -> int:
        """How many devices look up ids of their own."""
        return math.prod(self.placement.mesh.shape[axis] for axis in self.placement.batch)

    def received(self, row_bytes: int, index_bytes: int = 4) -> int:
        """Bytes that each device receives: the ids, their rows, and the gradients of these.

        Those of a step that does not fall back.
        """
        others = self.placement.shards - 1
        each = self.capacity if self.way == "all_to_all" else self.ids
        exchanged = others * each * (index_bytes + 2 * row_bytes)
        repetitions = self.devices // self.placement.shards - 1
        return exchanged + repetitions * self.entries * (index_bytes + row_bytes)

    def loads(self, ids: np.ndarray) -> np.ndarray:
        """How many distinct rows each device asks each shard for: ``[devices, N]``.

        ``ids`` ``[n]`` are those of one lookup; those out of range ask for nothing.
        """
        shards, per_device = self.placement.shards, np.full(self.devices * self.ids, -1)
        per_device[: ids.size] = ids
        loads = np.zeros((self.devices, shards), np.int64)
        for load, mine in zip(loads, per_device.reshape(self.devices, -1), strict=True):
            rows = np.unique(mine[(mine >= 0) & (mine < self.num_rows)])
            rows = self.placement.by_device(rows, self.sizes)
            load += np.bincount(rows // self.shard_rows, minlength=shards)
        return loads

    @property
    def entries(self) -> int:
        """Entries of the gradient on each device, before repetitions are gathered."""
        if self.way == "gather" or self.falls_back:
            return self.placement.shards * self.ids
        return self.placement.shards * self.capacity
