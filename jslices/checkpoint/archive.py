"""Checkpoints open for reading: their files, and those that a delta builds on.

Every file is a safetensors file whose metadata has the entry ``jslices``: the id of the
save, which piece of every array the file holds, and in the first file a description of the
variables. A delta also names the checkpoint that it builds on.
"""

import dataclasses
import functools
import itertools
import json
import math
import operator
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jslices import InvalidArgumentError
from jslices.checkpoint import boxes, files
from jslices.checkpoint.info import INFO_KEY, Delta, Info, parse_info
from jslices.checkpoint.leaves import Spec, check_values
from jslices.checkpoint.tensors import CODES, TensorFile, dtype_named, empty_array
from jslices.checkpoint.text_format import parse_text
from jslices.checkpoint.trees import brief, check_names, matching
from jslices.errors import DataLossError, NotFoundError


def is_published(temporary: str, path: str, save_id: str) -> bool:
    """True if a temporary file, a shard or a state file, belongs to a completed save.

    A save is complete once the first file of the checkpoint has its name.
    """
    first = files.first_shard(path)
    if first is not None:
        return saved_id(first) == save_id
    with open(temporary, "rb") as file:
        start = file.readline(1 << 16)
    try:
        [(_, newest)] = parse_text(start)  # a state file names the newest one first
        beside = os.path.dirname(path), os.path.basename(str(newest))  # wherever they are
        families = files.families(os.path.join(*beside))
    except ValueError:
        return False
    return save_id in [saved_id(family[0]) for family in families]


def read_info(file: TensorFile) -> Info | None:
    """The description of a file that this package wrote; None for one of another tool."""
    if INFO_KEY not in file.metadata:
        return None
    try:
        return parse_info(file.metadata[INFO_KEY])
    except (ValueError, RecursionError) as error:
        deep = isinstance(error, RecursionError)
        problem = "its description is nested too deeply" if deep else error
        raise DataLossError(f"{file.path} cannot be read: {problem}") from error


def saved_id(path: str) -> str | None:
    """The id of the save that wrote a file; None if it cannot be read."""
    try:
        info = read_info(TensorFile(path))
    except (OSError, ValueError):
        return None
    return None if info is None else info.save_id


# --- reading --------------------------------------------------------------------------


class Archive:
    """A checkpoint open for reading, with the ones that it builds on.

    Its ``specs`` are those of the variables, or of the rows that :meth:`narrow` selected.
    """

    def __init__(self, prefix: str) -> None:
        first = _Layer(prefix)
        self.prefix, self.info, self.specs = prefix, first.info, dict(first.info.specs)
        self._layers = [first]
        while self._layers[-1].info.delta is not None:
            self._layers.append(_open_base(self._layers[-1], self.chain()))
        self._offsets: dict[str, int] = {}

    def chain(self) -> list[str]:
        """The paths of this checkpoint and of all that it builds on."""
        return [layer.prefix for layer in self._layers]

    def narrow(self, rows: Mapping[str, slice], saved_as: Mapping[str, str]) -> None:
        """Restrict tables to ranges of their rows; the others are never read.

        ``rows`` are those that ``Saver.restore`` takes, ``saved_as`` the names of all
        variables and their names here.
        """
        if not isinstance(rows, Mapping):
            raise TypeError(
                "rows must be a dict {name of a table: slice(start, stop)}, not "
                f"{type(rows).__name__}"
            )
        ranges: dict[str, slice] = {}
        for pattern, part in rows.items():
            for name in matching(str(pattern), saved_as, "rows"):
                part = _checked_range(name, part, self.specs[saved_as[name]])
                if ranges.setdefault(name, part) != part:
                    raise InvalidArgumentError(
                        f"rows asks for two ranges of {name!r}: {ranges[name]} and "
                        f"{part}; restore one after the other"
                    )
        for name, part in ranges.items():
            spec = self.specs[saved_as[name]]
            shape = (part.stop - part.start, *spec.shape[1:])
            self.specs[saved_as[name]] = dataclasses.replace(spec, shape=shape)
            self._offsets[saved_as[name]] = part.start

    def read(self, name: str, box: boxes.Box | None = None) -> np.ndarray:
        """Read a variable, or a box of it, as a new array of the saved dtype."""
        spec = self.specs[name]
        if not self.info.save_id and spec.dtype not in CODES:
            raise TypeError(
                f"{name!r} in {self.prefix} has the dtype {spec.dtype}, which NumPy does "
                "not have"
            )
        parts = boxes.whole(spec.shape) if box is None else box
        pairs = zip(parts, spec.shape, strict=True)
        parts = tuple(slice(*part.indices(n)[:2]) for part, n in pairs)
        if name in self._offsets:
            first, *others = parts
            offset = self._offsets[name]
            parts = (slice(first.start + offset, first.stop + offset), *others)
        array = self._read(name, parts + boxes.whole(spec.in_file.shape[len(parts) :]))
        if spec.is_raw:
            flat = array.reshape(-1).view(dtype_named(spec.dtype))
            array = flat.reshape(array.shape[:-1])
        try:
            check_values(spec, array)
        except ValueError as error:
            raise DataLossError(
                f"{name!r} in {self.prefix} cannot be read: {error}"
            ) from error
        return array

    def _read(self, name: str, box: boxes.Box) -> np.ndarray:
        """Read the newest layer with all of a variable, and replay the deltas."""
        deltas = list(itertools.takewhile(lambda layer: name in layer.rows, self._layers))
        out = self._layers[len(deltas)].read(name, box)
        for layer in reversed(deltas):
            layer.replay(name, box, out)
        return out


def _checked_range(name: str, part: object, spec: Spec) -> slice:
    if not isinstance(part, slice):
        raise TypeError(
            f"rows[{name!r}] must be a slice(start, stop), not {part!r}; for single rows "
            "restore the range that holds them, and index that"
        )
    # The last axis of key data is within a key.
    if len(spec.shape) <= spec.is_key or spec.is_string:
        raise InvalidArgumentError(
            f"rows[{name!r}]: it was saved as a single value, without rows"
        )
    count = spec.shape[0]
    try:
        start = 0 if part.start is None else operator.index(part.start)
        stop = count if part.stop is None else operator.index(part.stop)
        step = 1 if part.step is None else operator.index(part.step)
    except TypeError as error:
        raise TypeError(f"rows[{name!r}] must hold integers: {error}") from error
    if step != 1 or not 0 <= start <= stop <= count:
        raise InvalidArgumentError(
            f"rows[{name!r}] is {part}, but it was saved with {count} rows; "
            f"want 0 <= start <= stop <= {count} and no step (negative numbers do not "
            "count from the end)"
        )
    return slice(start, stop)


class _StoredPiece(NamedTuple):
    """A tensor that is a piece of a variable, and its start in that."""

    file: TensorFile
    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def box(self) -> boxes.Box:
        return boxes.box_at(self.start, self.shape)


class _Layer:
    """One full checkpoint or delta, its files open and checked against their description.

    Its ``rows`` name the tensors with the row numbers of variables that it holds in part.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        directory = os.path.dirname(prefix)
        lockable = directory if os.path.isdir(directory or ".") else "."
        with files.directory_lock(lockable, exclusive=False):
            opened = _open_family(prefix)
        self._first, self.info = opened[0]
        self.rows = {} if self.info.delta is None else self.info.delta.rows
        self._pieces: dict[str, list[_StoredPiece]] = {}
        for file, its_info in opened:
            if set(its_info.starts) != set(file.shapes):
                raise DataLossError(f"{file.path} does not hold the tensors that it names")
            for name, start in its_info.starts.items():
                if name in self.info.specs and self.info.specs[name].dtype == "complex64":
                    file.take_bytes_as(name, "complex64")
                # The last axis of raw bytes, and that of keys, is held whole.
                shape = file.shapes[name]
                start += (0,) * (len(shape) - len(start))
                self._pieces.setdefault(name, []).append(_StoredPiece(file, start, shape))
        if self.info.save_id:
            self._check_pieces()

    def _check_pieces(self) -> None:
        """Refuses files that do not hold every element of every variable once."""
        specs = {name: spec.in_file for name, spec in self.info.specs.items()}
        for name, row_name in self.rows.items():
            count = next(iter(self._first.shapes.get(row_name, ())), 0)
            shape = (count, *specs[name].shape[self._row_axes(name) :])
            specs[name] = dataclasses.replace(specs[name], shape=shape)
            specs[row_name] = Spec("numpy", "int64", (count,))
        if set(self._pieces) != set(specs):
            raise DataLossError(
                f"{self.prefix} does not hold the variables that it describes: "
                f"{brief(set(self._pieces) ^ set(specs))}"
            )
        for name, spec in specs.items():
            for file, start, shape in self._pieces[name]:
                stored = Spec("numpy", file.dtypes[name], shape)
                ranks = {len(start), len(shape), len(spec.shape)}
                if stored.dtype != spec.dtype or len(ranks) > 1:
                    raise DataLossError(
                        f"{file.path} holds {stored} at {start} of {name!r}, which is "
                        f"described as {spec}"
                    )
            parts = [piece.box for piece in self._pieces[name]]
            if not boxes.is_partition(parts, spec.shape):
                raise DataLossError(
                    f"{self.prefix} does not hold every element of {name!r}, which is "
                    f"described as {spec}, once"
                )

    def read(self, name: str, box: boxes.Box) -> np.ndarray:
        """Read a box of a variable as a new array of the dtype in the file."""
        dtype = dtype_named(self.info.specs[name].in_file.dtype)
        out = empty_array(boxes.shape_of(box), dtype)
        for piece in self._pieces[name]:
            if both := boxes.overlap(box, piece.box):
                target, source = both
                others: Any = (..., *source[1:])
                out[target] = piece.file.view(name, *source[:1])[others]
                piece.file.release(name)
        return out

    def replay(self, name: str, box: boxes.Box, out: np.ndarray) -> None:
        """Write the rows of a delta over those of its base."""
        rows, axes = self._first.view(self.rows[name]), self._row_axes(name)
        shape = self.info.specs[name].shape[:axes]
        in_order = (np.diff(rows) > 0).all()
        if len(rows) and not (in_order and 0 <= rows[0] <= rows[-1] < math.prod(shape)):
            raise DataLossError(
                f"{self.prefix} holds rows of {name!r} out of order or beyond its end"
            )
        inside, local = boxes.rows_within(np.unravel_index(rows, shape), box[:axes])
        if len(inside):  # in order, hence close to each other
            span = slice(int(inside[0]), int(inside[-1]) + 1)
            held: Any = (inside - span.start, *box[axes:])
            out[local] = self._first.view(name, span)[held]

    def _row_axes(self, name: str) -> int:
        """How many axes of a variable number the rows of it that a delta holds."""
        spec, axes = self.info.specs[name], len(self._first.shapes.get(name, ()))
        return min(max(len(spec.in_file.shape) - axes + 1, 1), len(spec.shape))


def base_of(prefix: str) -> str | None:
    """The path of a checkpoint's base; None for a full or an unreadable one."""
    try:
        first = _newest_family(prefix)[0]
        version = os.stat(first)
        delta = _delta_in(first, version.st_ino, version.st_mtime_ns)
        return None if delta is None else _base_path(prefix, delta)
    except (OSError, ValueError):
        return None


# Without, saves took 1.4 times as long (medians of 20, 30 or 300 variables, 5 checkpoints).
@functools.lru_cache(1024)
def _delta_in(path: str, inode: int, changed_at: int) -> Delta | None:
    """Read the base of a delta, once for each version of the file."""
    info = read_info(TensorFile(path))
    return None if info is None else info.delta


def _base_path(prefix: str, delta: Delta) -> str:
    name = delta.base
    if os.path.basename(name) != name or name in ("", ".", "..") or "\0" in name:
        raise DataLossError(
            f"{prefix} is a delta that names {name!r} as its base; a base is in the same "
            "directory, so this is not followed"
        )
    return os.path.join(os.path.dirname(prefix), name)


def _open_base(layer: _Layer, chain: list[str]) -> _Layer:
    delta = layer.info.delta
    assert delta is not None
    path = _base_path(layer.prefix, delta)
    link = f"{layer.prefix} is a delta that builds on {path}, "
    if path in chain:
        raise DataLossError(f"{link}which builds on it")
    if not files.checkpoint_exists(path):
        raise NotFoundError(f"{link}which is not there")
    try:
        base = _Layer(path)
    except NotFoundError as error:
        raise NotFoundError(f"{link}of which something is missing: {error}") from error
    except DataLossError as error:
        raise DataLossError(f"{link}which is damaged: {error}") from error
    if base.info.save_id != delta.base_id:
        raise DataLossError(f"{link}which was overwritten after the delta was saved")
    for name in layer.rows:
        spec, old = layer.info.specs[name], base.info.specs.get(name)
        if not spec.is_like(old):
            raise DataLossError(f"{link}but {name!r} is {spec} here and {old} there")
    return base


def _newest_family(prefix: str) -> list[str]:
    families = files.families(prefix)
    if not families:
        hint = ""
        if os.path.isdir(prefix):
            hint = f" (a folder): type jslices.checkpoint.latest_checkpoint({prefix!r})"
        elif os.path.exists(prefix + ".index"):
            hint = ": it has TensorFlow's own format. Where TensorFlow runs, read it by "
            hint += "tf.train.load_checkpoint, and write its arrays by numpy.savez"
        raise ValueError(f"The passed save_path is not a valid checkpoint: {prefix}{hint}")
    if len(families) == 1:
        return families[0]
    return max(families, key=lambda family: saved_id(family[0]) or "")


def _open_family(prefix: str) -> list[tuple[TensorFile, Info]]:
    family = _newest_family(prefix)
    if prefix.endswith(".safetensors.index.json"):
        return _open_index(prefix)
    first = TensorFile(family[0])
    info = read_info(first)
    if info is None and len(family) > 1:
        raise DataLossError(f"{family[0]} is not a shard that this package wrote")
    if info is None:
        return [(first, _info_of_another_tool(first))]
    _check_number(first, info, 0, len(family))
    return [(first, info), *(_open_shard(path, info, family) for path in family[1:])]


def _open_index(path: str) -> list[tuple[TensorFile, Info]]:
    """The files in an index of Hugging Face's, ``{"weight_map": {tensor: file}}``."""
    try:
        with open(path, "rb") as index:
            file_of = json.load(index)["weight_map"]
        names = sorted({*map(os.path.basename, file_of.values())})
    except Exception as error:
        raise DataLossError(f"{path} is no index of safetensors files") from error
    try:
        held = [TensorFile(os.path.join(os.path.dirname(path), name)) for name in names]
    except FileNotFoundError as error:
        raise NotFoundError(f"{path} names a file that is not there: {error}") from error
    if not held or sorted(file_of) != sorted(x for file in held for x in file.shapes):
        raise DataLossError(f"{path} does not name the tensors that its files hold")
    infos = list(map(_info_of_another_tool, held))
    specs = {name: spec for info in infos for name, spec in info.specs.items()}
    return [(held[i], dataclasses.replace(x, specs=specs)) for i, x in enumerate(infos)]


def _open_shard(path: str, first: Info, family: list[str]) -> tuple[TensorFile, Info]:
    # A process that was killed between two renames left shards with temporary names;
    # the first shard names the save to which they must belong.
    temporary = files.temporary_path(path, first.save_id)
    if not os.path.exists(temporary) and not os.path.exists(path):
        raise NotFoundError(f"{path}, one of {len(family)} shards, is not there")
    file = TensorFile(temporary if os.path.exists(temporary) else path)
    info = read_info(file)
    if info is None or info.save_id != first.save_id:
        raise DataLossError(f"{path} belongs to another save than {family[0]}")
    _check_number(file, info, family.index(path), len(family))
    return file, info


def _check_number(file: TensorFile, info: Info, shard: int, shards: int) -> None:
    if (info.shard, info.shards) != (shard, shards):
        raise DataLossError(
            f"{file.path} calls itself shard {info.shard} of {info.shards}, and is shard "
            f"{shard} of {shards} by its name"
        )


def _info_of_another_tool(file: TensorFile) -> Info:
    """Describe all tensors as arrays of JAX, except for those that JAX would narrow."""
    check_names(file.shapes, f"in {file.path} ", DataLossError)
    specs = {}
    for name, dtype in file.dtypes.items():
        fits = dtype in CODES and jax.dtypes.canonicalize_dtype(dtype) == dtype_named(dtype)
        specs[name] = Spec("jax" if fits else "numpy", dtype, file.shapes[name])
    starts = {name: (0,) * len(shape) for name, shape in file.shapes.items()}
    return Info("", 0, 1, starts, specs, None, False, None, frozenset())
