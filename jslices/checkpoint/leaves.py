"""Leaves of trees, and their form on disk: an array, and the kind of value it was."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jslices import InvalidArgumentError
from jslices.checkpoint import boxes
from jslices.checkpoint.processes import is_spread
from jslices.checkpoint.tensors import CODES, Tensor, dtype_named
from jslices.optim.engine.clock import OTHER_NUMBERS

#: Reads a saved array, or a box of it.
Read = Callable[[boxes.Box | None], np.ndarray]
#: An array in memory.
Array: TypeAlias = np.ndarray | jax.Array

_NUMBERS = {"bool": "b", "int": "iu", "float": "f", "complex": "c"}


@dataclasses.dataclass(frozen=True)
class Spec:
    """Kind, dtype and shape of a saved variable.

    Its kind says as what the array is restored: ``"jax"``, ``"numpy"``, ``"key:"`` and the
    name of a generator, or the name of one of Python's types.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]  #: that of the key data for keys.

    @property
    def is_key(self) -> bool:
        return self.kind.startswith("key:")

    @property
    def is_string(self) -> bool:
        return self.kind in ("str", "bytes")

    @property
    def is_raw(self) -> bool:
        """True if bytes are stored, as safetensors does not have the dtype."""
        return self.dtype not in CODES

    @property
    def in_file(self) -> "Spec":
        """The tensor in the file, where raw bytes are a last axis."""
        if not self.is_raw:
            return Spec("numpy", self.dtype, self.shape)
        width = dtype_named(self.dtype).itemsize
        return Spec("numpy", "uint8", (*self.shape, width))

    def is_like(self, other: "Spec | None") -> bool:
        """True if arrays of both have one dtype and shape."""
        array = (self.dtype, self.shape)
        return other is not None and array == (other.dtype, other.shape)

    def __str__(self) -> str:
        if self.is_key:
            return f"random keys ({self.kind.removeprefix('key:') or 'of any kind'})"
        if self.is_string:
            return f"a Python {self.kind}"
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


@functools.lru_cache(4096)  # many variables are alike
def check_spec(spec: Spec) -> None:
    """Raise ValueError for a spec that describes no leaf."""
    dtype, shape = dtype_named(spec.dtype), spec.shape
    np.broadcast_to(np.zeros((), dtype), shape)  # fails if there are no such arrays
    if spec.is_key:
        generator = spec.kind.removeprefix("key:")
        wrap = functools.partial(jax.random.wrap_key_data, impl=generator)
        try:
            jax.eval_shape(wrap, jax.ShapeDtypeStruct(shape, dtype))
        except TypeError as error:
            raise ValueError(str(error)) from error
    elif spec.kind == "jax":
        try:
            jax.device_put(np.zeros(0, dtype))
        except (TypeError, RuntimeError) as error:
            raise ValueError(f"JAX has no arrays of {spec.dtype}") from error
    elif spec.is_string:
        if dtype != np.uint8 or len(shape) != 1:
            raise ValueError("a string is an array of bytes")
    elif spec.kind in _NUMBERS:
        if dtype.kind not in _NUMBERS[spec.kind] or shape:
            raise ValueError("that is not a single number of this kind")
    elif spec.kind != "numpy":
        raise ValueError(f"there is no kind {spec.kind!r}")


def check_values(spec: Spec, array: np.ndarray) -> None:
    """Raise ValueError for bytes that encode no value."""
    flat: Any = array.reshape(-1)
    if array.dtype == bool and (flat.view(np.uint8) > 1).any():
        raise ValueError("it holds bools that are neither 0 nor 1")
    is_text = array.dtype.kind == "U"
    if is_text and (flat.view(f"{array.dtype.byteorder}u4") > 0x10FFFF).any():
        raise ValueError("it holds characters that Unicode does not have")
    if spec.kind == "str":
        array.tobytes().decode()


# --- saving ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Piece:
    """A box of an array, held by one device."""

    start: tuple[int, ...]  #: the index of its first element along each axis.
    data: Any  #: of NumPy, or on one device; a ShapeDtypeStruct if other processes hold it.
    #: The processes that hold it; the first if each process has its own.
    holders: tuple[int, ...] = (0,)

    @property
    def box(self) -> boxes.Box:
        return boxes.box_at(self.start, self.data.shape)


class Rows(NamedTuple):
    """Rows of a table."""

    numbers: np.ndarray  #: int64 ``[n]``, ascending.
    row_axes: int  #: how many leading axes of the table they number.


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A variable to be saved."""

    spec: Spec
    pieces: list[Piece]

    @property
    def is_spread(self) -> bool:
        """True if processes other than the first hold a piece of it."""
        return any(piece.holders != (0,) for piece in self.pieces)

    def tensor(self, block_bytes: int = boxes.BLOCK_BYTES) -> Tensor:
        """The whole array; one on several devices is gathered block by block."""
        if len(self.pieces) == 1:
            return self.piece_tensor(self.pieces[0], block_bytes)
        return self._tensor(self.spec.shape, lambda: self._merged(block_bytes))

    def piece_tensor(self, piece: Piece, block_bytes: int = boxes.BLOCK_BYTES) -> Tensor:
        return self._tensor(
            piece.data.shape, lambda: _host_blocks(piece.data, block_bytes), piece.start
        )

    def rows_tensor(self, rows: Rows) -> Tensor:
        shape = (len(rows.numbers), *self.spec.shape[rows.row_axes :])
        return self._tensor(shape, lambda: [self._rows(rows, shape)])

    def _tensor(
        self,
        shape: tuple[int, ...],
        blocks: Callable[[], Iterable[np.ndarray]],
        start: tuple[int, ...] = (),
    ) -> Tensor:
        tensor = dataclasses.replace(self.spec, shape=shape).in_file
        return Tensor(tensor.dtype, tensor.shape, blocks, start or (0,) * len(shape))

    def _merged(self, block_bytes: int) -> Iterator[np.ndarray]:
        shape, dtype = self.spec.shape, self.pieces[0].data.dtype
        for rows in boxes.row_blocks(shape, dtype.itemsize, block_bytes):
            box = (rows, *boxes.whole(shape[1:]))
            block = np.empty((rows.stop - rows.start, *shape[1:]), dtype)
            for piece in self.pieces:
                if both := boxes.overlap(box, piece.box):
                    target, (first, *_) = both
                    block[target] = np.asarray(piece.data[first])
            yield block

    def _rows(self, rows: Rows, shape: tuple[int, ...]) -> np.ndarray:
        axes = rows.row_axes
        at = np.unravel_index(rows.numbers, self.spec.shape[:axes])
        out: Any = np.empty(shape, self.pieces[0].data.dtype)
        for piece in self.pieces:
            inside, local = boxes.rows_within(at, piece.box[:axes])
            if len(inside):
                out[(inside, *piece.box[axes:])] = _take(piece.data, local)
        return out


def _host_blocks(data: Array, block_bytes: int) -> Iterator[np.ndarray]:
    if _is_on_host(data):
        data = np.asarray(data)  # a view
        if data.flags.c_contiguous:
            yield data
            return
    if data.ndim == 0:
        yield np.asarray(data)
        return
    for rows in boxes.row_blocks(data.shape, data.dtype.itemsize, block_bytes):
        yield np.ascontiguousarray(np.asarray(data[rows]))


def _take(data: Array, at: tuple[np.ndarray, ...]) -> np.ndarray:
    if _is_on_host(data):
        return np.asarray(data)[at]
    # A power of two at a time: few programs are compiled for many numbers of rows.
    count = len(at[0])
    more = (1 << (count - 1).bit_length()) - count
    return np.asarray(data[tuple(np.pad(numbers, (0, more)) for numbers in at)])[:count]


def _is_on_host(data: Array) -> bool:
    return isinstance(data, np.ndarray) or next(iter(data.devices())).platform == "cpu"


def as_leaf(name: str, value: object) -> Leaf:
    """Prepare a value for saving; refuse one that cannot be saved, or was donated."""
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"{name!r} is being traced: save outside of jit, the values that it returns"
        )
    kind, array = _kind_and_array(name, value)
    pieces: list[Piece]
    if isinstance(array, np.ndarray):
        array = array.astype(array.dtype.newbyteorder("="), copy=False)
        pieces = [Piece((0,) * array.ndim, array)]
    else:
        pieces = _device_pieces(array)
    dtype = array.dtype
    dtype_name = dtype.str if dtype.kind in "SUMm" else dtype.name
    try:
        dtype_named(dtype_name)
    except ValueError:
        raise TypeError(
            f"{name!r} has the dtype {dtype}, which is not one of plain numbers or "
            "strings, and cannot be saved"
        ) from None
    return Leaf(Spec(kind, dtype_name, tuple(array.shape)), pieces)


def _kind_and_array(name: str, value: object) -> tuple[str, Array]:
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
    for python_type in (bool, int, float, complex):
        if isinstance(value, python_type):
            return python_type.__name__, np.asarray(value)
    raise TypeError(
        f"{name!r} is of the type {type(value).__name__}, which cannot be saved; a "
        "variable is an array, a number, a string, or a pytree of them. A HostTable "
        "saves itself: table.save(path)"
    )


def _device_pieces(array: jax.Array) -> list[Piece]:
    copies: dict[tuple[int, ...], list[jax.Shard]] = {}
    for shard in array.global_shards:
        start = tuple(part.start or 0 for part in shard.index)
        copies.setdefault(start, []).append(shard)
    elsewhere = jax.ShapeDtypeStruct(array.sharding.shard_shape(array.shape), array.dtype)
    pieces, spread = [], is_spread(array)
    for start in sorted(copies):
        data = next((s.data for s in copies[start] if s.data is not None), elsewhere)
        holders = {s.device.process_index for s in copies[start]} if spread else {0}
        pieces.append(Piece(start, data, tuple(sorted(holders))))
    return pieces


# --- restoring ------------------------------------------------------------------------


def restore(name: str, spec: Spec, read: Read) -> Any:
    """Restore a saved variable as the kind of value that was saved."""
    array = read(None)
    if spec.kind == "numpy":
        return array
    if spec.is_key:
        implementation = spec.kind.removeprefix("key:")
        return jax.random.wrap_key_data(jax.device_put(array), impl=implementation)
    if spec.is_string:
        return array.tobytes().decode() if spec.kind == "str" else array.tobytes()
    if spec.kind in _NUMBERS:
        return array.item()
    _check_width(name, spec)
    return jax.device_put(array)


def restore_like(name: str, spec: Spec, read: Read, template: Any) -> Any:
    """Restore a saved variable as the kind of value of ``template``, on its devices.

    A template is an array, a ShapeDtypeStruct, a number or a string.
    """
    is_number = spec.kind in _NUMBERS

    def array() -> np.ndarray:
        saved = read(None)
        if is_number:  # NumPy refuses numbers that do not fit
            saved = np.asarray(saved.item(), template.dtype)
        return saved.reshape(template.shape)

    if isinstance(template, np.ndarray | np.generic):  # some are numbers of Python, too
        return array()
    if isinstance(template, bool | int | float | complex):
        return type(template)(read(None).item())
    if isinstance(template, str | bytes):
        return restore(name, spec, read)
    shape = tuple(template.shape)
    if not spec.is_key and not is_number:
        _check_width(name, spec)
    sharding: Any = getattr(template, "sharding", None)
    if sharding is None or (sharding.is_fully_addressable and sharding.num_devices == 1):
        is_free = isinstance(template, jax.Array) and not template.committed
        value = restore(name, spec, read).reshape(shape) if spec.is_key else array()
        return jax.device_put(value, None if is_free else sharding)
    if spec.is_key:
        box = restore(name, spec, read).reshape(shape).__getitem__
    elif shape != spec.shape or is_number:
        box = array().__getitem__
    else:
        box = _reading_once(read)
    return jax.make_array_from_callback(shape, sharding, box)


def _reading_once(read: Read) -> Read:
    """Read each box of a replicated array once."""
    arrays: dict[str, np.ndarray] = {}

    def read_once(box: boxes.Box | None) -> np.ndarray:
        key = str(box)  # slices are not hashable
        if key not in arrays:
            arrays[key] = read(box)
        return arrays[key]

    return read_once


def _check_width(name: str, spec: Spec) -> None:
    dtype = dtype_named(spec.dtype)
    if dtype.kind not in "biufcV":
        raise InvalidArgumentError(
            f"{name!r} was saved as NumPy's {dtype}; JAX has no such arrays. Give a NumPy "
            "array in its place in `variables`"
        )
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise InvalidArgumentError(
            f"{name!r} was saved as {dtype}, which JAX would make narrower; set "
            "jax.config.update('jax_enable_x64', True), or give a NumPy array in its "
            "place in `variables`"
        )


def misfit(name: str, spec: Spec, template: Any, reshape: bool) -> str | None:
    """The reason why ``template`` cannot take a saved variable; None if it can."""
    target = _template_spec(name, template)
    saved = f"{name!r} was saved as {spec}"
    special = any(s.is_key or s.is_string for s in (spec, target))
    same_kind = spec.kind == target.kind or (target.kind == "key:" and spec.is_key)
    if special and not same_kind:
        return f"{saved}, but {target} is wanted"
    if spec.dtype != target.dtype and not _is_number_for(spec, target):
        return f"{saved}, but the dtype {target.dtype} is wanted; convert it afterwards"
    if spec.is_string or spec.shape == target.shape:
        return None
    if "/clock/log/" in f"/{name}":
        advice = f"{OTHER_NUMBERS}. Saver().restore(path) restores it without variables"
    elif len(spec.shape) == len(target.shape) > 0 and spec.shape[1:] == target.shape[1:]:
        advice = (
            "for a table of more rows or fewer restore(path) without variables, and then "
            "js.checkpoint.resize_rows(tx, params, state, fresh)"
        )
    elif not reshape:
        advice = "Saver(reshape=True) allows another shape of as many elements"
    elif math.prod(spec.shape) != math.prod(target.shape):
        advice = "the number of elements differs"
    else:
        return None
    return f"{saved}, but the shape {target.shape} is wanted; {advice}"


def _template_spec(name: str, template: Any) -> Spec:
    if isinstance(template, jax.Array) and template.is_deleted():  # donated: still a shape
        template = jax.ShapeDtypeStruct(template.shape, template.dtype)
    if not isinstance(template, jax.ShapeDtypeStruct):
        return as_leaf(name, template).spec
    if not jnp.issubdtype(template.dtype, jax.dtypes.prng_key):
        return Spec("jax", np.dtype(template.dtype).name, tuple(template.shape))
    data = jax.eval_shape(jax.random.key_data, template)
    return Spec("key:", "uint32", tuple(data.shape))


def _is_number_for(spec: Spec, target: Spec) -> bool:
    """True if one is a number of Python, which has no width, and the other fits it."""
    for one, other in ((spec, target), (target, spec)):
        if one.kind in _NUMBERS:
            return dtype_named(other.dtype).kind in _NUMBERS[one.kind]
    return False
