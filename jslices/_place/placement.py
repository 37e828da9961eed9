"""Which devices of a mesh hold which rows of a table."""

import dataclasses
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from jslices._place.boundary import mesh_of, on_one_mesh, split_along
from jslices._typing import PyTree
from jslices.errors import InvalidArgumentError

Numbers = TypeVar("Numbers", jax.Array, np.ndarray)


def padded_rows(
    num_rows: int,
    devices: int | Mesh | AbstractMesh,
    axis: str | Sequence[str] | None = None,
) -> int:
    """How many rows to give a table so that devices can divide them evenly.

    JAX splits an axis of an array over devices only if their number divides it, and
    refuses others with ``IndivisibleError``. The rows that are added are never looked up,
    so no optimizer steps them.

    Args:
      num_rows: V, the rows that the table needs.
      devices: the number of devices that divide them, an int, or a mesh. A checkpoint can
        later go to any number of devices that divides the rows: 4096 leaves room for that.
      axis: of a mesh, the axis along which rows are split, or several; None means all.

    Returns:
      The smallest multiple of the number of devices that is at least V, an int.

    Raises:
      InvalidArgumentError: for a negative V, a number of devices below 1, an axis that the
        mesh does not have, and an axis without a mesh.
      TypeError: if V is not an integer, or ``devices`` neither an integer nor a mesh.

    Cost: none.

    Example:
      >>> import jslices as js
      >>> js.padded_rows(1_000_001, 8)
      1000008
      >>> mesh = jax.sharding.AbstractMesh((2, 4), ("data", "rows"))
      >>> js.padded_rows(1_000_001, mesh, "rows")
      1000004

    Source: none; the parts of a variable that TensorFlow partitions differ in size instead.
    """
    num_rows = operator.index(num_rows)
    if num_rows < 0:
        raise InvalidArgumentError(f"padded_rows wants at least 0 rows, got {num_rows}")
    count = _count(devices, axis)
    return -(-num_rows // count) * count


def _count(devices: int | Mesh | AbstractMesh, axis: str | Sequence[str] | None) -> int:
    if isinstance(devices, Mesh | AbstractMesh):
        axes = devices.axis_names if axis is None else axis
        axes = (axes,) if isinstance(axes, str) else tuple(axes)
        for name in axes:
            if name not in devices.axis_names:
                raise InvalidArgumentError(
                    f"padded_rows(axis={axis!r}): the mesh has the axes "
                    f"{devices.axis_names}, and not {name!r}"
                )
        return math.prod(devices.shape[name] for name in axes)
    try:
        count = operator.index(devices)
    except TypeError:
        raise TypeError(
            "padded_rows wants a number of devices or a mesh, got "
            f"{type(devices).__name__}; type jax.device_count() for all devices"
        ) from None
    if axis is not None:
        raise InvalidArgumentError(
            f"padded_rows(axis={axis!r}) wants a mesh with this axis, got {count} devices; "
            "leave out axis"
        )
    if count < 1:
        raise InvalidArgumentError(f"padded_rows wants at least 1 device, got {count}")
    return count


@dataclasses.dataclass(frozen=True)
class Placement:
    """Which devices of a mesh hold which rows of a table ``[V, *D]``."""

    mesh: AbstractMesh
    #: For each axis of the table that numbers rows, mostly one, the axes of the mesh along
    #: which it is split.
    by_axis: tuple[tuple[str, ...], ...]
    #: The same for the other axes of the table, as far as is known.
    columns: tuple[tuple[str, ...], ...] = ()

    @property
    def rows(self) -> tuple[str, ...]:
        """The axes along which rows are split, V / N to each of N devices in this order."""
        return tuple(axis for axes in self.by_axis for axis in axes)

    @property
    def shards(self) -> int:
        """N, into how many parts rows are split."""
        return math.prod(self.mesh.shape[axis] for axis in self.rows)

    def parts(self) -> tuple[int, ...]:
        """Into how many parts each axis that numbers rows is split."""
        size = self.mesh.shape
        return tuple(math.prod(size[axis] for axis in axes) for axes in self.by_axis)

    def part_of(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """What each device has of axes that number rows, ``(V,)`` or ``(L, V)``."""
        return tuple(n // parts for n, parts in zip(sizes, self.parts(), strict=True))

    def by_device(self, numbers: Numbers, sizes: Sequence[int]) -> Numbers:
        """Row numbers in ``[0, V]`` if those of one device came after those of another.

        They are others where ``sizes``, ``(L, V)``, number the rows, and V is split.
        """
        return self._reordered(numbers, sizes, back=False)

    def in_whole(self, numbers: Numbers, sizes: Sequence[int]) -> Numbers:
        """The inverse of :meth:`by_device`."""
        return self._reordered(numbers, sizes, back=True)

    def _reordered(self, numbers: Numbers, sizes: Sequence[int], back: bool) -> Numbers:
        if not any(self.by_axis[1:]):
            return numbers
        # A row number has two digits for each axis, part and place. All the parts go first.
        # The first digit stays first, and so does the first number that is too large.
        pairs = zip(self.parts(), self.part_of(sizes), strict=True)
        radices: list[int] = [radix for pair in pairs for radix in pair]
        order = [*range(0, len(radices), 2), *range(1, len(radices), 2)]
        if back:
            radices = [radices[i] for i in order]
            order = [order.index(i) for i in range(len(order))]
        digits: list[Any] = []
        for radix in radices[:0:-1]:
            digits, numbers = [numbers % radix, *digits], numbers // radix
        digits = [numbers, *digits]
        result = digits[0]
        for i in order[1:]:
            result = result * radices[i] + digits[i]
        return result  # type: ignore[no-any-return]

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
        """The axes that are known to split no row.

        How an Auto axis splits columns is left to XLA, which leaves them where they are.
        """
        explicit = self.mesh.explicit_axes
        return tuple(x for x in self.batch if x in self.rows or x in explicit)

    def numbers(self) -> jax.Array:
        """``[N]``: each device gets the number of the part that it holds.

        XLA refuses ``lax.axis_index`` in a loop if some axes are Auto
        ("PartitionId instruction is not supported").
        """
        return jnp.arange(self.shards, dtype=jnp.int32)

    @property
    def by_rows(self) -> jax.P:
        """Of entries, whose only axis is split as the rows of the table."""
        return jax.P(self.rows)


def on_each_device(
    placement: Placement,
    fun: Callable[..., Any],
    in_specs: PyTree,
    out_specs: PyTree,
    whole_rows: bool = True,
) -> Callable[..., Any]:
    """``jax.shard_map`` on the mesh of a table.

    ``whole_rows``: whether ``fun`` gets whole rows even if the table's columns are, or may
    be, split over devices; that is then left to XLA.
    """
    names = placement.known if whole_rows else placement.mesh.axis_names

    def mapped_over_devices(*args: PyTree) -> Any:
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

    return mapped_over_devices


def placement_at_hand(x: jax.Array) -> Placement | None:
    """Where the rows of an array are, if its type or the array itself tells."""
    mesh = mesh_of(jax.typeof(x))
    if mesh is None or mesh.size == 1:
        return None
    is_concrete = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
    sharding = x.sharding if is_concrete else jax.typeof(x).sharding
    if not (is_concrete or mesh.are_all_axes_explicit):
        return None
    if not isinstance(sharding, jax.NamedSharding):
        return None
    rows, *columns = split_along(sharding.spec, x.ndim)
    placement = Placement(mesh, (rows,), tuple(columns))
    return placement if placement.batch and not x.shape[0] % placement.shards else None
