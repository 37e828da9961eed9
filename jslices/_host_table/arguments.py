"""Checks of the arguments of host tables: ids, shapes, paths and options."""

import operator
import os
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jslices import InvalidArgumentError


def numbered(ids: np.ndarray, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Number distinct rows: their ids int64 ``[n]``, sorted, and each id's number or -1.

    The numbers are int32 ``[K]``.
    """
    inside = (ids >= 0) & (ids < num_rows)
    distinct, inverse = np.unique(ids[inside], return_inverse=True)
    numbers = np.full(ids.shape, -1, np.int32)
    numbers[inside] = inverse
    return distinct.astype(np.int64), numbers


def checked_ids(ids: ArrayLike) -> np.ndarray:
    if isinstance(ids, jax.core.Tracer):
        raise TypeError(
            "a HostTable is read outside of jit: fetch the rows of a batch first, and pass "
            "them to the jitted step"
        )
    array = np.asarray(ids)
    if not array.size and not isinstance(ids, np.ndarray | jax.Array):
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(
            f"a HostTable wants ids that are integers, got {array.dtype}{list(array.shape)}"
        )
    return array


def is_list(x: object) -> bool:
    """True for nested lists of numbers, which are one array."""
    return isinstance(x, list) and all(isinstance(y, int | list) for y in x)


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


def check_options(size: object, device: object, overlap: object) -> None:
    is_int = isinstance(size, int | np.integer) and not isinstance(size, bool)
    if size is not None and (not is_int or size < 1):  # type: ignore[operator]
        raise InvalidArgumentError(
            f"HostTable(size={size!r}): wanted room for the distinct rows of a batch, an "
            "integer of 1 at least, or None"
        )
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
