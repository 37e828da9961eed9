"""Checks of the arguments of host tables: ids, shapes, paths and options."""

import operator
import os
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jslices import InvalidArgumentError
from jslices._arguments import Number
from jslices.dynamic import IdMap, WideIds, wide_ids


def numbered(ids: np.ndarray, num_rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Number distinct rows, int64 ``[n]``, ascending: ``(rows, places, counts)``.

    Places int32 ``[K]`` say which is that of each id: n for one that is too large, and a
    negative one is its own, so that it stays padding. Counts are int32 ``[n]``.
    """
    inside, negative = (ids >= 0) & (ids < num_rows), ids < 0
    rows, inverse, counts = np.unique(ids[inside], return_inverse=True, return_counts=True)
    places = np.full(ids.shape, len(rows), np.int32)
    places[negative] = np.maximum(ids[negative].astype(np.int64), np.iinfo(np.int32).min)
    places[inside] = inverse
    return rows.astype(np.int64), places, counts.astype(np.int32)


def checked_rows(call: str, ids: ArrayLike, num_rows: int) -> np.ndarray:
    """Row numbers int64 ``[n]`` of a call that wants no others."""
    rows = checked_ids(ids).reshape(-1)
    wrong = rows[(rows < 0) | (rows >= num_rows)]
    if len(wrong):
        raise InvalidArgumentError(f"{call} got row {wrong[0]} of rows 0 to {num_rows - 1}")
    return rows.astype(np.int64)


def checked_ids(ids: Any, keyed: object = None) -> np.ndarray:
    """Integers ``[*K]``; where a map keys the rows int64, of ids of any kind."""
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(ids)):
        raise TypeError(
            "a HostTable is read outside of jit: fetch the rows of a batch first, and pass "
            "them to the jitted step"
        )
    if keyed is not None:
        return wide_ids(ids).to_int64()
    array = np.asarray(ids)
    if not array.size and not isinstance(ids, np.ndarray | jax.Array):
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(
            f"a HostTable wants ids that are integers, got {array.dtype}"
            f"{list(array.shape)}; for strings type keyed=dynamic.id_map(rows)"
        )
    return array


def is_leaf(x: object) -> bool:
    """True for nested lists of numbers or strings, which are one array, and wide ids."""
    is_list = isinstance(x, list) and all(isinstance(y, int | str | list) for y in x)
    return is_list or isinstance(x, WideIds)


def real(path: str | bytes | os.PathLike[Any]) -> str:
    """An absolute path without links, as the process may change its directory."""
    return os.path.realpath(os.fsdecode(path))


def checked_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    try:
        sizes = tuple(operator.index(x) for x in shape)
    except TypeError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise InvalidArgumentError(
            f"HostTable(shape={shape}): wanted (V, *D), so many rows of such a shape"
        )
    return sizes


#: Dtypes of rows that a step has as float32.
_NARROW = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


def check_stored(stored: DTypeLike | None, dtype: np.dtype[Any]) -> None:
    """Refuse dtypes to which rows cannot be rounded."""
    if stored is None:
        return
    name = np.dtype(stored).name
    if name not in _NARROW or dtype != np.float32:
        raise InvalidArgumentError(
            f"HostTable(dtype={dtype}, stored={name}): wanted rows of float32 stored as one"
            f" of {', '.join(_NARROW)}; leave stored out to keep the dtype"
        )


def check_keyed(keyed: object, num_rows: int) -> None:
    if not isinstance(keyed, IdMap):
        raise TypeError(
            f"HostTable(keyed=...) wants a map of ids, got {type(keyed).__name__}; type "
            "keyed=dynamic.id_map(rows)"
        )
    if keyed.num_rows != num_rows or int(keyed.step):
        raise InvalidArgumentError(
            f"HostTable(keyed=...) of {num_rows} rows wants an empty map of as many, not "
            f"of {keyed.num_rows}, at step {keyed.step}; type ids = dynamic.id_map(rows), "
            "and HostTable((ids.num_rows, D), ..., keyed=ids)"
        )


def check_options(init: Any, size: object, device: object, overlap: object) -> None:
    if not callable(init) and np.ndim(init):
        raise InvalidArgumentError(
            f"HostTable(init=array{list(np.shape(init))}): type init=lambda ids: W[ids]"
        )
    if size is not None:
        Number(at_least=1, integer=True).check("HostTable", "size", size)
    if device is not None and not isinstance(device, jax.Device | jax.sharding.Sharding):
        raise TypeError(
            f"HostTable(device={device!r}): wanted a device or a sharding; type "
            "device=jax.devices('cpu')[0]"
        )
    if overlap is not None and not isinstance(overlap, bool | np.bool_):
        raise TypeError(f"HostTable(overlap={overlap!r}): wanted True, False or None")


def power_of_two(count: int) -> int:
    """The next power of two, as each size is compiled."""
    return 1 << max(0, count - 1).bit_length()


def has_own_memory(device: jax.Device | jax.sharding.Sharding) -> bool:
    """True if a device, or one of a sharding, has memory of its own."""
    is_sharding = isinstance(device, jax.sharding.Sharding)
    devices: set[jax.Device] = device.device_set if is_sharding else {device}
    return any(x.platform != "cpu" for x in devices)
