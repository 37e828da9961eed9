"""What a leaf of a pytree is on disk: an array, and what it was before."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jslices._errors import InvalidArgumentError
from jslices.checkpoint.memory import CODES, dtype_named
from jslices.checkpoint.tensor_writer import Tensor

_BLOCK = 1 << 26  # bytes of a table that are gathered at a time


@dataclasses.dataclass(frozen=True)
class Spec:
    """A variable as it was saved.

    Attributes:
      kind: what to make of the array: ``"jax"``, ``"numpy"``, ``"key:"`` and the name of
        a generator, or the name of a type of Python's.
      dtype: the name of the array's dtype.
      shape: the array's shape; that of the key data for keys.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def is_raw(self) -> bool:
        """True if safetensors does not know the dtype, so that its bytes are stored."""
        return self.dtype not in CODES

    @property
    def tensor_dtype(self) -> str:
        """The dtype in the file."""
        return "uint8" if self.is_raw else self.dtype

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """The shape in the file: bytes are a last axis."""
        return (
            (*self.shape, dtype_named(self.dtype).itemsize) if self.is_raw else self.shape
        )


@dataclasses.dataclass(frozen=True)
class Piece:
    """A box of an array, held by one device.

    Attributes:
      start: where it begins along each axis.
      data: a NumPy array, or a JAX array on one device.
    """

    start: tuple[int, ...]
    data: Any

    def inside(self, shape: tuple[int, ...]) -> tuple[slice, ...]:
        """The box as an index of the array."""
        sizes = self.data.shape
        return tuple(slice(a, a + n) for a, n in zip(self.start, sizes, strict=True))


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A variable that is to be saved."""

    spec: Spec
    pieces: list[Piece]

    def tensor(self) -> Tensor:
        """The whole array; what is spread over devices is gathered block by block."""
        return self._tensor(self.spec.shape, lambda: _merged(self.pieces, self.spec.shape))

    def piece_tensor(self, piece: Piece) -> Tensor:
        """One piece of it."""
        return self._tensor(piece.data.shape, lambda: host_blocks(piece.data))

    def rows_tensor(self, rows: np.ndarray) -> Tensor:
        """Some rows of it, given in order."""
        shape = (len(rows), *self.spec.shape[1:])
        return self._tensor(shape, lambda: [_rows(self.pieces, rows, shape)])

    def _tensor(self, shape: tuple[int, ...], blocks: Callable[[], Any]) -> Tensor:
        spec = dataclasses.replace(self.spec, shape=shape)
        return Tensor(spec.tensor_dtype, spec.tensor_shape, blocks)


def as_leaf(name: str, value: Any) -> Leaf:
    """A value as it will be saved.

    Raises:
      TypeError: if it cannot be saved.
      InvalidArgumentError: if its contents are gone, or are on other machines.
    """
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"{name!r} is being traced: save outside of jit, the values that it returns"
        )
    kind, array = _kind_and_array(name, value)
    if isinstance(array, np.ndarray):
        array = array.astype(array.dtype.newbyteorder("="), copy=False)
        pieces = [Piece((0,) * array.ndim, array)]
    else:
        pieces = _device_pieces(name, array)
    return Leaf(Spec(kind, _dtype_name(name, array.dtype), tuple(array.shape)), pieces)


def _kind_and_array(name: str, value: Any) -> tuple[str, Any]:
    if isinstance(value, jax.Array):
        if value.is_deleted():
            raise InvalidArgumentError(
                f"{name!r} was donated to a jitted function and holds nothing any more; "
                "save what that function returned"
            )
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            return f"key:{jax.random.key_impl(value)}", jax.random.key_data(value)
        return "jax", value
    if isinstance(value, np.ndarray | np.generic):
        return "numpy", np.asarray(value)
    if isinstance(value, str | bytes):
        data = value.encode() if isinstance(value, str) else value
        return type(value).__name__, np.frombuffer(data, np.uint8)
    if isinstance(value, bool | int | float | complex):
        return _python_type(value).__name__, np.asarray(value)
    raise TypeError(
        f"{name!r} is of the type {type(value).__name__}, which cannot be saved; a "
        "variable is an array, a number, a string, or a pytree of them"
    )


def _python_type(value: Any) -> type:
    return next(t for t in (bool, int, float, complex) if isinstance(value, t))


def _dtype_name(name: str, dtype: np.dtype[Any]) -> str:
    if dtype.hasobject or dtype.names:
        raise TypeError(
            f"{name!r} is of the dtype {dtype}, which is not one of plain numbers or "
            "strings, and cannot be saved"
        )
    return dtype.str if dtype.kind in "SUMm" else dtype.name


def _device_pieces(name: str, array: Any) -> list[Piece]:
    if not array.is_fully_addressable:
        raise InvalidArgumentError(
            f"{name!r} is spread over several processes, and this one holds only a part; "
            "Saver is for one process: use Orbax, or gather it with "
            "jax.experimental.multihost_utils.process_allgather"
        )
    found: dict[tuple[int, ...], Piece] = {}
    for shard in array.addressable_shards:
        start = tuple(part.start or 0 for part in shard.index)
        found.setdefault(start, Piece(start, shard.data))
    return [found[start] for start in sorted(found)]


def host_blocks(data: Any) -> Iterator[np.ndarray]:
    """The elements of one piece in order; no more than a block is copied at a time."""
    on_host = isinstance(data, np.ndarray)
    if not on_host and next(iter(data.devices())).platform == "cpu":
        data, on_host = np.asarray(data), True  # a view
    if data.ndim == 0 or (on_host and data.flags.c_contiguous):
        yield np.asarray(data)
        return
    for rows in row_blocks(data.shape, data.dtype.itemsize):
        yield np.ascontiguousarray(np.asarray(data[rows]))


def row_blocks(shape: tuple[int, ...], itemsize: int) -> Iterator[slice]:
    """Ranges of rows that are a block each."""
    size = max(1, _BLOCK // max(1, math.prod(shape[1:]) * itemsize))
    for start in range(0, shape[0], size):
        yield slice(start, min(start + size, shape[0]))


def _merged(pieces: list[Piece], shape: tuple[int, ...]) -> Iterator[np.ndarray]:
    if len(pieces) == 1:
        yield from host_blocks(pieces[0].data)
        return
    dtype = pieces[0].data.dtype
    for rows in row_blocks(shape, dtype.itemsize):
        block = np.empty((rows.stop - rows.start, *shape[1:]), dtype)
        for piece in pieces:
            first, *others = piece.inside(shape)
            start, stop = max(rows.start, first.start), min(rows.stop, first.stop)
            if start < stop:
                part = piece.data[start - first.start : stop - first.start]
                target = slice(start - rows.start, stop - rows.start)
                block[(target, *others)] = np.asarray(part)
        yield block


def _rows(pieces: list[Piece], rows: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    out: Any = np.empty(shape, pieces[0].data.dtype)
    for piece in pieces:
        first, *others = piece.inside(shape)
        inside = np.flatnonzero((rows >= first.start) & (rows < first.stop))
        if len(inside):
            out[(inside, *others)] = _take(piece.data, rows[inside] - first.start)
    return out


def _take(data: Any, rows: np.ndarray) -> np.ndarray:
    if isinstance(data, np.ndarray) or next(iter(data.devices())).platform == "cpu":
        return np.asarray(data)[rows]
    # A power of two at a time: few programs are compiled for many numbers of rows.
    padded = np.zeros(1 << (len(rows) - 1).bit_length(), rows.dtype)
    padded[: len(rows)] = rows
    return np.asarray(data[padded])[: len(rows)]
