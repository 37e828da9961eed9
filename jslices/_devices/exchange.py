"""Which device holds which rows of a table, and how rows get from device to device.

All of it is known while a program is traced; what moves is in ``_lookup/exchange.py``.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jslices._devices.explicit import split_along
from jslices._errors import InvalidArgumentError
from jslices._jax import flatten

Way = Literal["all_to_all", "gather"]

PLANS = ("auto", "all_to_all", "gather")
OVERFLOWS = ("gather", "nan")


@dataclasses.dataclass(frozen=True)
class Exchange:
    """How the rows of a table that is split over devices reach those that look them up.

    For ``exchange=`` of :func:`jslices.value_and_grad` and its relatives. The table
    ``[V, *D]`` is split by rows along ``axis``, V / N rows on each of its N devices, and
    the ids are split over the mesh, k on each device.

    * ``"all_to_all"``: each device sends its distinct ids to the devices that hold their
      rows, gets these, and sends the sums of their gradients back.
    * ``"gather"``: all devices get all ids; rows are summed and scattered to those that
      asked for them, and all get all gradients.

    Args:
      axis: the mesh axis along which the rows are split, or several, as they stand in the
        table's PartitionSpec: ``"x"`` for ``P("x", None)``, ``("x", "y")`` for
        ``P(("x", "y"), None)``.
      plan: ``"all_to_all"``, ``"gather"``, or ``"auto"``: the one with fewer bytes.
      capacity: in the plan ``"all_to_all"`` each pair of devices has room for
        ``capacity * k / N`` distinct ids. :func:`jslices.spread_ids` evens out the pairs.
      overflow: what happens in a step in which some pair has more: ``"gather"`` takes that
        plan in this step, so that nothing is lost; for that the gradient has room for all
        ids on every device, ``N * k`` entries instead of ``capacity * k``. ``"nan"``: what
        does not fit reads NaN, which shows in the loss.

    Raises:
      InvalidArgumentError: for an unknown ``plan`` or ``overflow``, no axis, or a
        ``capacity`` that is not positive.

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

    axis: str | tuple[str, ...]
    plan: str = "auto"
    capacity: float = 2.0
    overflow: str = "gather"

    def __post_init__(self) -> None:
        if not self.axes or not all(isinstance(name, str) for name in self.axes):
            raise InvalidArgumentError(
                f"Exchange(axis={self.axis!r}): it must be the name of a mesh axis, or "
                "several, along which the rows of the table are split"
            )
        if self.plan not in PLANS:
            raise InvalidArgumentError(
                f"Exchange(plan={self.plan!r}): it must be one of {PLANS}"
            )
        if self.overflow not in OVERFLOWS:
            raise InvalidArgumentError(
                f"Exchange(overflow={self.overflow!r}): it must be one of {OVERFLOWS}"
            )
        if not self.capacity > 0:
            raise InvalidArgumentError(
                f"Exchange(capacity={self.capacity!r}): it must be positive; 2 is room for "
                "twice the ids that each pair of devices has in the mean"
            )

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes along which rows are split."""
        return (self.axis,) if isinstance(self.axis, str) else tuple(self.axis)


@dataclasses.dataclass(frozen=True)
class Placement:
    """On which devices of a mesh the rows of a table ``[V, *D]`` stand.

    Attributes:
      mesh: the mesh.
      rows: the axes along which rows are split, V / N to each of N devices in this order.
      columns: for each other axis of the table the axes along which that is split, as far
        as is known.
    """

    mesh: AbstractMesh
    rows: tuple[str, ...]
    columns: tuple[tuple[str, ...], ...] = ()

    @property
    def shards(self) -> int:
        """N, into how many parts rows are split."""
        return math.prod(self.mesh.shape[axis] for axis in self.rows)

    @property
    def batch(self) -> tuple[str, ...]:
        """The axes along which ids are split: all that do not split a row."""
        within = {axis for axes in self.columns for axis in axes}
        return tuple(x for x in self.mesh.axis_names if x not in within)

    @property
    def repeated(self) -> tuple[str, ...]:
        """The axes along which rows are repeated (or, if Auto, columns may be split)."""
        return tuple(x for x in self.batch if x not in self.rows)

    @property
    def known(self) -> tuple[str, ...]:
        """The axes of which it is known that they split no row.

        What an Auto axis does to columns is left to XLA, which leaves them where they are.
        """
        explicit = self.mesh.explicit_axes
        return tuple(x for x in self.batch if x in self.rows or x in explicit)

    @property
    def apart(self) -> PartitionSpec:
        """Of arrays that have an axis for each one of the batch: ``[*devices, ...]``."""
        return PartitionSpec(*self.batch)

    @property
    def apart_as_known(self) -> PartitionSpec:
        """Of the same arrays where only :attr:`known` axes are told apart."""
        return PartitionSpec(*(x if x in self.known else None for x in self.batch))

    @property
    def apart_with_columns(self) -> PartitionSpec:
        """Of rows ``[*devices, n, *D]``."""
        columns = (axes or None for axes in self.columns)
        return PartitionSpec(*self.batch, None, *columns)

    def numbers(self) -> jax.Array:
        """``[N]``, of which each device gets the number of the part that it holds.

        ``lax.axis_index`` is refused by XLA in a loop if some axes are Auto
        ("PartitionId instruction is not supported").
        """
        return jnp.arange(self.shards, dtype=jnp.int32)

    @property
    def by_rows(self) -> PartitionSpec:
        """Of arrays whose first axis is split as the rows of the table."""
        return PartitionSpec(self.rows or None)

    @property
    def by_rows_and_columns(self) -> PartitionSpec:
        """Of the values of the gradient."""
        return PartitionSpec(self.rows or None, *(axes or None for axes in self.columns))

    @property
    def by_batch_and_columns(self) -> PartitionSpec:
        """Of rows that were looked up."""
        return PartitionSpec(self.batch, *(axes or None for axes in self.columns))

    @property
    def by_batch(self) -> PartitionSpec:
        """Of arrays whose first axis is split over all devices that hold different ids."""
        return PartitionSpec(self.batch)


def on_each_device(
    placement: Placement,
    fun: Callable[..., Any],
    in_specs: Any,
    out_specs: Any,
    whole_rows: bool = True,
) -> Callable[..., Any]:
    """``jax.shard_map`` on the mesh of a table.

    ``whole_rows``: whether ``fun`` gets whole rows also of a table whose columns are split
    over devices, or may be; that is then left to XLA.
    """
    names = placement.known if whole_rows else placement.mesh.axis_names

    def run(*args: Any) -> Any:
        args = on_one_mesh(args)
        if not names:
            return fun(*args)
        around = jax.sharding.get_abstract_mesh()
        mapped = jax.shard_map(
            fun,
            mesh=placement.mesh if around.empty else around,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=set(names),
            check_vma=False,
        )
        return mapped(*args)

    return run


def on_one_mesh(arrays: Any) -> Any:
    """The same arrays, all of them on the mesh that one of them is on.

    Outside of ``jax.jit`` what a program computes from constants, ids say, may be on a
    single device, and JAX does not spread it by itself.
    """

    def is_placed(x: Any) -> bool:
        return isinstance(x, jax.core.Tracer) or isinstance(
            getattr(x, "sharding", None), NamedSharding
        )

    leaves, tree = flatten(arrays)
    known = [x for x in leaves if is_placed(x) and not isinstance(x, jax.core.Tracer)]
    if not known or all(map(is_placed, leaves)):
        return arrays
    everywhere = NamedSharding(known[0].sharding.mesh, PartitionSpec())
    placed = [x if is_placed(x) else jax.device_put(x, everywhere) for x in leaves]
    return tree.unflatten(placed)


def placement_at_hand(x: Any) -> Placement | None:
    """Where the rows of an array stand, as its type or the array itself tells."""
    mesh = mesh_of(jax.typeof(x))
    if mesh is None or mesh.size == 1:
        return None
    known = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
    sharding = x.sharding if known else jax.typeof(x).sharding
    if not (known or mesh.are_all_axes_explicit):
        return None
    if not isinstance(sharding, NamedSharding):
        return None
    rows, *columns = split_along(sharding.spec, x.ndim)
    placement = Placement(mesh, rows, tuple(columns))
    return placement if placement.batch and not x.shape[0] % placement.shards else None


def on_all_devices(values: jax.Array, indices: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Entries ``[K, *D]`` and ``[K]`` that every device of a mesh gets to see.

    Where the table is on several devices, each then steps the rows that it holds. Left to
    itself, XLA would sum over devices what each would have written, arrays of V rows.
    """
    mesh = mesh_of(jax.typeof(values))
    if mesh is None or mesh.size == 1 or not mesh.are_all_axes_auto:
        return values, indices
    any_columns = (PartitionSpec.UNCONSTRAINED,) * (values.ndim - 1)
    specs = PartitionSpec(None, *any_columns), PartitionSpec(None)
    values, indices = on_one_mesh((values, indices))
    values, indices = (
        lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
        for x, spec in zip((values, indices), specs, strict=True)
    )
    return values, indices


def mesh_of(aval: Any) -> AbstractMesh | None:
    """The mesh that an array is known to be on; None without one.

    Inside a ``shard_map`` there is none: arrays are those of one device.
    """
    mesh = getattr(getattr(aval, "sharding", None), "mesh", None)
    if mesh is None or mesh.empty or mesh.are_all_axes_manual:
        return None
    return mesh


class Home(NamedTuple):
    """Where the rows of a table stand, and how they get to those that look them up."""

    placement: Placement
    exchange: Exchange

    def route(self, num_rows: int, count: int) -> "Route":
        """The route of a lookup of ``count`` ids, some perhaps added to divide them."""
        placement, exchange = self
        shards, mesh = placement.shards, placement.mesh
        devices = math.prod(mesh.shape[axis] for axis in placement.batch)
        ids = max(1, -(-count // devices))
        enough = min(ids, num_rows // shards)
        capacity = enough
        if shards > 1:
            capacity = min(enough, math.ceil(exchange.capacity * ids / shards))
        way: Way = "gather"
        if shards == 1 or exchange.plan == "all_to_all":
            way = "all_to_all"
        elif exchange.plan == "auto" and capacity < ids:
            way = "all_to_all"
        crowds = way == "all_to_all" and capacity < enough
        falls_back = crowds and exchange.overflow == "gather"
        return Route(placement, num_rows, ids, capacity, way, falls_back)


def home_of(aval: Any, exchange: Exchange | None, name: str) -> Home | None:
    """The home of an array ``[V, *D]``, as far as its type or ``exchange`` tell.

    Raises:
      ValueError: for an axis that the mesh does not have, rows that it does not divide, and
        an ``exchange`` that contradicts the type.
    """
    mesh = mesh_of(aval)
    if mesh is not None and mesh.size == 1:
        return None
    if mesh is None:
        if exchange is not None:
            raise InvalidArgumentError(
                f"exchange= wants {name} to be split over the devices of a mesh, and it is "
                "on no mesh: jax.device_put(table, jax.NamedSharding(mesh, "
                f"jax.P({exchange.axis!r}))), outside of shard_map"
            )
        return None
    typed = None
    if AxisType.Explicit in mesh.axis_types:
        typed = split_along(aval.sharding.spec, aval.ndim)
    if exchange is None:
        if typed is None:
            return None
        placement = Placement(mesh, typed[0], typed[1:])
    else:
        unknown = [axis for axis in exchange.axes if axis not in mesh.axis_names]
        if unknown:
            raise InvalidArgumentError(
                f"{exchange} of {name}: its mesh has the axes {mesh.axis_names}, and not "
                f"{unknown[0]!r}"
            )
        if typed is not None and any(typed) and typed[0] != exchange.axes:
            raise InvalidArgumentError(
                f"{exchange} of {name}: its type {aval.str_short()} says that rows are "
                f"split along {typed[0] or 'no axis'}"
            )
        placement = Placement(mesh, exchange.axes, (typed or ())[1:])
    if aval.shape[0] % placement.shards:
        raise InvalidArgumentError(
            f"{name} has {aval.shape[0]} rows, which {placement.shards} devices do not "
            f"divide; give it jslices.padded_rows({aval.shape[0]}, {placement.shards}) rows"
        )
    if not placement.batch:  # only columns are split, and every device has all ids
        return None
    return Home(placement, exchange or Exchange(placement.rows or placement.batch))


@dataclasses.dataclass(frozen=True)
class Route:
    """The exchange of one lookup, in sizes.

    Attributes:
      placement: where the rows stand.
      num_rows: V.
      ids: k, how many each device looks up; those added to divide them count.
      capacity: C, for how many distinct ids of a pair of devices there is room.
      way: how rows travel.
      falls_back: whether a step with more ids for some pair takes the other way.
    """

    placement: Placement
    num_rows: int
    ids: int
    capacity: int
    way: Way
    falls_back: bool

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
            load += np.bincount(rows // self.shard_rows, minlength=shards)
        return loads

    @property
    def entries(self) -> int:
        """Entries of the gradient on each device, before repetitions are gathered."""
        if self.way == "gather" or self.falls_back:
            return self.placement.shards * self.ids
        return self.placement.shards * self.capacity

    @property
    def all_entries(self) -> int:
        """Entries of the gradient: on each device those of all its repetitions."""
        return self.entries * self.devices
