"""Arrays that go with a table, on the devices where its rows are."""

import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jslices._devices.exchange import mesh_of
from jslices._devices.explicit import explicit_part, restore_sharding, split_along
from jslices._errors import InvalidArgumentError
from jslices._jax import split_alike


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
      devices: among how many they are divided, an int, or a mesh. A checkpoint can later go
        to any number of devices that divides the rows: 4096 leaves room for that.
      axis: of a mesh, the axis along which rows are split, or several; None means all.

    Returns:
      The smallest multiple of the number of devices that is at least V, an int.

    Raises:
      InvalidArgumentError: for a negative V, a number of devices below 1, an axis that the
        mesh does not have, and an axis of a mere number.
      TypeError: if V is no integer, or ``devices`` neither an integer nor a mesh.

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


def _count(devices: Any, axis: str | Sequence[str] | None) -> int:
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


def filled_like(
    p: Any, value: Any, dtype: DTypeLike | None = None, axes: Sequence[int] | None = None
) -> jax.Array:
    """An array of ``value`` with some axes of ``p``, split over devices as these are.

    No device makes more than its own part. ``axes=None`` means all axes, ``dtype=None``
    the dtype of ``p``.
    """
    if axes is None:
        return placed_as(p, jnp.full_like(p, value, dtype=dtype))
    p, axes = jnp.asarray(p), tuple(axes)
    shape, dtype = tuple(p.shape[n] for n in axes), p.dtype if dtype is None else dtype
    if isinstance(p, jax.core.Tracer):
        return placed_as(p, jnp.full(shape, value, dtype), axes)
    where = None
    if p.committed:
        named = isinstance(p.sharding, NamedSharding)
        where = _of_axes(p.sharding, p.ndim, axes) if named else _first(p, axes).sharding
    return jnp.full(shape, value, dtype, device=where)


def split_as_told(p: Any, tree: Any, spec: PartitionSpec) -> Any:
    """Arrays on the mesh of ``p``, split over its devices as ``spec`` says."""
    if isinstance(p, jax.core.Tracer):
        mesh = mesh_of(jax.typeof(p))
        if mesh is None:
            return tree
        if AxisType.Explicit in mesh.axis_types:
            return restore_sharding(tree, explicit_part(mesh, spec))
        return jax.lax.with_sharding_constraint(tree, NamedSharding(mesh, spec))
    if not isinstance(p.sharding, NamedSharding):
        return tree
    return jax.device_put(tree, NamedSharding(p.sharding.mesh, spec))


def placed_as(p: Any, x: jax.Array, axes: Sequence[int] | None = None) -> jax.Array:
    """``x``, which has some axes of ``p``, split over devices as these are.

    Only where ``p`` is traced: ``jit`` would give each device the whole of ``x``.
    """
    mesh = mesh_of(jax.typeof(p)) if isinstance(p, jax.core.Tracer) else None
    if mesh is None or mesh.size == 1 or AxisType.Manual in mesh.axis_types:
        return x
    axes = range(p.ndim) if axes is None else axes
    if AxisType.Explicit in mesh.axis_types:
        x = restore_sharding(x, _of_axes(jax.typeof(p).sharding, p.ndim, axes))
        return split_alike(p, x)
    return split_alike(_first(p, axes) if p.size else x, x)


def _first(p: jax.Array, axes: Sequence[int]) -> jax.Array:
    """What ``p`` has first along all axes but ``axes``."""
    return p[tuple(slice(None) if n in axes else 0 for n in range(p.ndim))]


def _of_axes(sharding: NamedSharding, ndim: int, axes: Sequence[int]) -> NamedSharding:
    split = split_along(sharding.spec, ndim)
    spec = PartitionSpec(*(split[n] or None for n in axes))
    return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
