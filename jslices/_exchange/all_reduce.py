"""Summing row gradients over devices without ever sending the table."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jslices._arguments import Number, OneOf
from jslices._jax import varying_axes
from jslices._rows.sums import sum_dtype
from jslices._slices import IndexedSlices, check_slices, is_slices
from jslices._typing import Leaf, PyTree
from jslices.errors import InvalidArgumentError

AxisName = str | Sequence[str]


def all_reduce_slices(
    slices: PyTree,
    axis_name: AxisName,
    reduction: str = "mean",
    *,
    capacity: int | None = None,
) -> Any:
    """The **mean** (or ``"sum"``) over devices of gradients, the same on all of them.

    Like ``lax.pmean`` and ``lax.psum`` of arrays, inside ``shard_map`` (or ``vmap`` with an
    ``axis_name``). The default is a mean, as in Horovod. Every device sums its duplicates
    into U entries, gathers the rows and row numbers of all N devices, and sums them. If
    that would move more bytes than an all-reduce of ``[V, *D]``, which the shapes alone
    decide, it does the all-reduce; the result is the same, in V entries.

    If parameters are the same on all devices (``in_specs=P()``), JAX has summed their
    gradients already, and they are dense. Let them differ first,
    ``params = jax.lax.pcast(params, axis_name, to="varying")``, to get each device's own.

    Args:
      slices: this device's IndexedSlices, ``values`` ``[K, *D]``, ``indices`` ``[K]``, or a
        pytree of them, arrays and None. A device without any rows passes empty entries.
      axis_name: name of the mesh axis, or several.
      reduction: "mean" divides by N, the number of devices, as a mean over the whole
        batch does (an accumulator's "MEAN" divides by those that held the row); "sum"
        does not, as ``lax.psum``.
      capacity: U, the distinct rows of one device; None means ``min(K, V)``, which always
        suffices. If a device has more, the floating values it sends become NaN.

    Returns:
      The tree, in which slices have unique ``indices``: ``min(N * U, V)`` entries,
      ascending and then the empty ones; after an all-reduce V entries, empty where no
      device had the row. Optimizers touch only the rows that some device had.
      Arrays are those of ``lax.pmean`` or ``lax.psum``.

    Raises:
      TypeError: for a leaf that is neither slices nor an array.
      InvalidArgumentError: for an unknown ``reduction``, a ``capacity`` below 1, and for
        gradients that are the same on all devices already.

    Cost: each device receives ``(N - 1) * U`` rows and integers, or, where that is less,
    ``2 (N - 1) / N * V`` rows. Two sorts, of K and of ``N * U`` integers.

    Example:
      >>> import jax, jax.numpy as jnp, jslices as js
      >>> def mean(values, indices):
      ...     rows = js.IndexedSlices(values, indices, (100, 1))
      ...     return js.all_reduce_slices(rows, "devices")
      >>> values, indices = jnp.ones((2, 2, 1)), jnp.array([[3, 3], [3, 7]])
      >>> out = jax.vmap(mean, axis_name="devices")(values, indices)
      >>> out.indices[0], out.values[0].ravel()
      (Array([  3,   7, 100, 100], dtype=int32), Array([1.5, 0.5, 0. , 0. ], dtype=float32))

    Source: Horovod's all-gather of ``tf.IndexedSlices``, which merges nothing and gets
    larger with every device; the choice of the dense way is Horovod's ``sparse_as_dense``,
    made here by counting bytes.
    """
    OneOf("mean", "sum").check("all_reduce_slices", "reduction", reduction)
    if capacity is not None:
        Number(at_least=1, integer=True).check("all_reduce_slices", "capacity", capacity)
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)

    def reduced(path: tuple[Any, ...], x: Leaf) -> Any:
        if is_slices(x):
            check_slices(x)
            if not x.indices.size:
                return x  # no rows on any device, as shapes are the same
            _refuse_summed(path, x.values, axes)
            return _reduced_rows(x, axes, reduction, capacity)
        if not isinstance(x, jax.Array | np.ndarray | np.number | float | int | complex):
            raise TypeError(
                "all_reduce_slices wants IndexedSlices and arrays, got a "
                f"{type(x).__name__} at {jax.tree_util.keystr(path) or 'the top'}"
            )
        _refuse_summed(path, x, axes)
        return lax.pmean(x, axes) if reduction == "mean" else lax.psum(x, axes)

    return jax.tree_util.tree_map_with_path(reduced, slices, is_leaf=is_slices)


def _refuse_summed(path: tuple[Any, ...], x: ArrayLike, axes: tuple[str, ...]) -> None:
    """Refuses gradients that ``shard_map`` knows to be the same on all devices."""
    tracked = varying_axes(jax.typeof(lax.axis_index(axes)))
    same = sorted(tracked.intersection(axes) - varying_axes(jax.typeof(x)))
    if same:
        axis = axes[0] if len(axes) == 1 else axes
        raise InvalidArgumentError(
            f"all_reduce_slices: the gradient at {jax.tree_util.keystr(path) or 'the top'} "
            f"is the same along {', '.join(map(repr, same))} already: where parameters are "
            "the same, JAX has summed their gradients. Let parameters differ before you "
            "differentiate: params = jax.lax.pcast(params, "
            f"{axis!r}, to='varying')"
        )


def _reduced_rows(
    slices: IndexedSlices, axes: tuple[str, ...], reduction: str, capacity: int | None
) -> IndexedSlices:
    num_devices = math.prod(lax.axis_size(axis) for axis in axes)
    local = slices.flat.coalesce(capacity)
    dtype, wide = local.dtype, sum_dtype(local.dtype)
    if _gathering_is_cheaper(local, wide, num_devices):
        total = _gathered(local, axes).astype(wide).coalesce()
    else:
        total = _summed_densely(local, axes, wide)
    if reduction == "mean":
        total = total / num_devices
    total = total.numbered_as(slices.dense_shape)
    return total.astype(dtype) if jnp.issubdtype(dtype, jnp.inexact) else total


def _gathering_is_cheaper(local: IndexedSlices, wide: np.dtype, num_devices: int) -> bool:
    """Whether gathering rows moves at most the bytes of a ring all-reduce of the array."""
    if local.dense_shape is None:
        return True
    num_rows, row = local.dense_shape[0], math.prod(local.dense_shape[1:])
    entry = row * local.dtype.itemsize + local.indices.dtype.itemsize
    whole = row * wide.itemsize + 1  # and one byte for "some device had it"
    return num_devices * local.indices.shape[0] * entry <= 2 * num_rows * whole


def _gathered(local: IndexedSlices, axes: tuple[str, ...]) -> IndexedSlices:
    # Inside shard_map, tell JAX that all devices now hold the same (out_specs may then be
    # replicated).
    mesh_axes = jax.sharding.get_abstract_mesh().manual_axes
    to = "invarying" if set(axes) <= set(mesh_axes) else "varying"
    entries = local.values, local.indices
    values, indices = lax.all_gather(entries, axes, tiled=True, to=to)
    return IndexedSlices(values, indices, local.dense_shape)


def _summed_densely(
    local: IndexedSlices, axes: tuple[str, ...], wide: np.dtype
) -> IndexedSlices:
    assert local.dense_shape is not None
    num_rows = local.dense_shape[0]
    total = lax.psum(local.astype(wide).to_dense(), axes)
    had = jnp.zeros(num_rows, jnp.int8).at[local.indices].set(1, mode="drop")
    rows = jnp.arange(num_rows, dtype=local.indices.dtype)
    empty = jnp.array(num_rows, rows.dtype)
    indices = jnp.where(lax.pmax(had, axes) > 0, rows, empty)
    return IndexedSlices(total, indices, local.dense_shape)
