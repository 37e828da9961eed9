"""A checkpoint on disk: a set of files that appear at once, and what they hold.

Every file is a safetensors file whose metadata has the entry ``jslices``: the id of the
save, which piece of every array the file holds, and in the first file what the variables
were. A delta also names the checkpoint that it builds on.
"""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import math
import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jslices import DataLossError, InvalidArgumentError, NotFoundError
from jslices.checkpoint import files
from jslices.checkpoint.info import Delta, Info, dump_info, parse_info
from jslices.checkpoint.leaves import Index, Leaf, Piece, Spec, check_values
from jslices.checkpoint.processes import ALONE, Processes
from jslices.checkpoint.tensors import (
    CODES,
    Tensor,
    TensorFile,
    dtype_named,
    empty_array,
    write_tensors,
)
from jslices.checkpoint.text_format import parse_text
from jslices.checkpoint.trees import bad_names, brief, matching

_INFO = "jslices"

#: What goes into one file: a tensor for each name, and where it begins in the array.
Part = dict[str, tuple[Tensor, tuple[int, ...]]]

#: A box of an array: start and stop along each axis.
Box = list[tuple[int, int]]


# --- writing --------------------------------------------------------------------------


def in_one_file(leaves: dict[str, Leaf]) -> list[Part]:
    """Everything in one file."""
    return [{n: (leaf.tensor(), (0,) * len(leaf.spec.shape)) for n, leaf in leaves.items()}]


def in_shards(leaves: dict[str, Leaf], processes: Processes = ALONE) -> list[Part | None]:
    """A file for each shard that a process writes; None for those of other processes.

    An array that is not sharded goes into the smallest file. What every process has on its
    own, an array on its devices or a string, may differ, and the first writes its own.

    Raises:
      InvalidArgumentError: if the processes have other variables than the first.
    """
    spread = {name: leaf for name, leaf in leaves.items() if leaf.is_spread}
    share = _shares(spread, processes.count)[processes.own]
    if processes.is_first:
        share |= {n: leaf.pieces for n, leaf in leaves.items() if n not in spread}
    count = max(map(len, share.values()), default=int(processes.is_first))
    parts: list[Part | None] = []
    for number, told in enumerate(processes.told(str(count))):
        own = number == processes.own
        parts += _files(leaves, share, count) if own else [None] * int(told)
    return parts


def check_equal(leaves: dict[str, Leaf], processes: Processes) -> None:
    """Refuses variables of which the processes would not write every piece once.

    Raises:
      InvalidArgumentError: if they differ in more than what a process has on its own.
    """
    told = [
        (name, leaf.is_spread and (leaf.spec, [(p.start, p.holders) for p in leaf.pieces]))
        for name, leaf in leaves.items()
    ]
    digest = hashlib.sha256(repr(told).encode()).hexdigest()
    processes.agree(
        f"{len(leaves)} variables to save (digest {digest[:12]})",
        "give all processes the same names, and arrays that are spread over them with the "
        "same shape, dtype and sharding",
    )


def _shares(leaves: dict[str, Leaf], count: int) -> list[dict[str, list[Piece]]]:
    """What each process writes: of those that hold a piece the one with the least does."""
    shares: list[dict[str, list[Piece]]] = [{} for _ in range(count)]
    sizes = [0] * count
    pieces = [(name, piece) for name, leaf in leaves.items() for piece in leaf.pieces]
    for name, piece in sorted(pieces, key=lambda item: len(item[1].holders)):
        writer = min(piece.holders, key=sizes.__getitem__)
        shares[writer].setdefault(name, []).append(piece)
        sizes[writer] += leaves[name].piece_tensor(piece).num_bytes
    return shares


def _files(
    leaves: dict[str, Leaf], share: dict[str, list[Piece]], count: int
) -> list[Part]:
    parts: list[Part] = [{} for _ in range(count)]
    sizes = [0] * count
    for name, pieces in sorted(share.items(), key=lambda item: -len(item[1])):
        for number, piece in enumerate(pieces):
            if len(pieces) == 1:
                number = sizes.index(min(sizes))
            tensor = leaves[name].piece_tensor(piece)
            parts[number][name] = (tensor, piece.start)
            sizes[number] += tensor.num_bytes
    return parts


def write_checkpoint(
    prefix: str,
    parts: Sequence[Part | None],
    info: dict[str, Any],
    sharded: bool,
    state: tuple[str, str] | None = None,
    processes: Processes = ALONE,
) -> str:
    """Writes the files of a checkpoint, which replaces an older one at once.

    Args:
      prefix: its path.
      parts: what goes into each file; None for those that other processes write.
      info: what the first file tells about the variables.
      sharded: whether the files are shards.
      state: path and text of a state file that is replaced at the same time.
      processes: those that write the checkpoint. All write their files before the first
        one gives the files of all their names. If one fails, the first deletes the files
        of all before any process raises.

    Returns:
      The id of this save.

    Raises:
      OSError: if that cannot be done. It says whether the checkpoint was saved; if not,
        what was there before is as it was.
      InvalidArgumentError: if the processes have other paths than the first.
    """
    directory, count = os.path.dirname(prefix), len(parts)
    save_id = _agreed_id(prefix, processes)
    paths = [files.shard_path(prefix, i, count) for i in range(count)]
    paths = paths if sharded else [prefix]
    descriptors: dict[str, int] = {}
    waiting = {path: files.temporary_path(path, save_id) for path in paths}
    if state is not None:
        waiting[state[0]] = files.temporary_path(state[0], save_id)

    def make_room() -> None:
        if processes.is_first:
            with files.directory_lock(directory, exclusive=True):
                files.clean(directory, is_published)
            descriptors[paths[0]] = files.open_new(waiting[paths[0]])

    def write() -> None:
        if not os.path.exists(waiting[paths[0]]):
            raise InvalidArgumentError(
                f"process {processes.own} does not find in {directory or '.'!r} what "
                "process 0 has written there; give all a directory that they share"
            )
        for number, (part, path) in enumerate(zip(parts, paths, strict=True)):
            if part is None:
                continue
            starts = {name: start for name, (_, start) in part.items()}
            told = dump_info(save_id, number, count, starts, {} if number else info)
            tensors = {name: tensor for name, (tensor, _) in part.items()}
            if path not in descriptors:
                descriptors[path] = files.open_new(waiting[path])
            write_tensors(descriptors[path], tensors, {_INFO: told})
        if state is not None and processes.is_first:
            descriptors[state[0]] = files.open_new(waiting[state[0]])
            files.write_and_flush(descriptors[state[0]], state[1])

    def publish() -> None:
        if processes.is_first:
            _publish(prefix, paths, waiting)

    def outcome() -> str:
        if saved_id(paths[0]) != save_id:
            return "was not saved, and what was saved before is as it was"
        if state is not None and os.path.exists(waiting[state[0]]):
            return (
                f"was saved and can be restored, but {state[0]} was not written and does "
                "not name it; save once more, or call update_checkpoint_state"
            )
        return "was saved and can be restored, but a power failure may undo that"

    def tidy() -> None:
        if processes.is_first:
            is_first_waiting = os.path.exists(waiting[paths[0]])
            for path, temporary in waiting.items():
                # Once the first shard has its name the others are part of a checkpoint.
                if is_first_waiting or path not in paths:
                    with contextlib.suppress(OSError):
                        files.remove(temporary)

    try:
        for stage in (make_room, write, publish):
            with processes.together(undo=tidy), _telling(outcome, prefix):
                stage()
    finally:
        tidy()
        for descriptor in descriptors.values():  # their locks end here
            os.close(descriptor)
    return save_id


def _agreed_id(prefix: str, processes: Processes) -> str:
    """The id that the first process gives to a save."""
    processes.agree(
        f"{os.path.basename(prefix)!r} to save",
        "give all processes one path and global_step",
    )
    return processes.told(files.new_id())[0]


@contextlib.contextmanager
def _telling(outcome: Callable[[], str], prefix: str) -> Iterator[None]:
    """Adds to an error what has become of the checkpoint."""
    try:
        yield
    except OSError as error:
        raise OSError(
            error.errno,
            f"{error.strerror or error}; {prefix} {outcome()}",
            error.filename or prefix,
        ) from error


def _publish(prefix: str, paths: list[str], waiting: dict[str, str]) -> None:
    """Gives written files their names. The first one decides."""
    directory = os.path.dirname(prefix)
    with files.directory_lock(directory, exclusive=True):
        for path in paths:
            os.stat(waiting[path])  # those of other processes may be gone
        for path in paths:
            os.replace(waiting[path], path)
        for family in files.families(prefix):
            if family != paths:
                files.remove_family(family)
        files.sync_directory(directory)
        for path in waiting.keys() - paths:  # the state file, of what will not be undone
            os.replace(waiting[path], path)
            files.sync_directory(directory)


def is_published(temporary: str, path: str, save_id: str) -> bool:
    """True if a file that waits for its path belongs to a save that has happened.

    A shard or a state file: the first file of the checkpoint has got its name.
    """
    first = files.first_shard(path)
    if first is not None:
        return saved_id(first) == save_id
    with open(temporary, "rb") as file:
        start = file.readline(1 << 16)
    try:
        [(_, newest)] = parse_text(start)  # a state file names the newest one first
        found = files.families(os.path.join(os.path.dirname(path), str(newest)))
    except ValueError:
        return False
    return save_id in [saved_id(family[0]) for family in found]


def read_info(file: TensorFile) -> Info | None:
    """What this package wrote about a file; None for a file of another tool.

    Raises:
      DataLossError: if this package cannot have written it.
    """
    if _INFO not in file.metadata:
        return None
    try:
        return parse_info(file.metadata[_INFO])
    except ValueError as error:
        raise DataLossError(f"{file.path} cannot be read: {error}") from error


def saved_id(path: str) -> str | None:
    """The id of the save that wrote a file; None if it cannot be read."""
    try:
        info = read_info(TensorFile(path))
    except (OSError, ValueError):
        return None
    return None if info is None else info.save_id


# --- reading --------------------------------------------------------------------------


class Archive:
    """A checkpoint open for reading, with all that it builds on.

    Attributes:
      prefix: its path.
      save_id: which save wrote it; empty for a file that another tool wrote.
      specs: of every variable; of the rows of it that :meth:`narrow` left.
      has_structure: whether the tree in which the variables came is known.
      structure: its description.
    """

    def __init__(self, prefix: str) -> None:
        first = _Layer(prefix)
        self.prefix, self.save_id, self.specs = prefix, first.save_id, dict(first.specs)
        self.structure, self.has_structure = first.structure, first.has_structure
        self._layers = [first]
        while self._layers[-1].delta is not None:
            self._layers.append(_open_base(self._layers[-1], self.chain()))
        self._offsets: dict[str, int] = {}

    def chain(self) -> list[str]:
        """The paths of this checkpoint and of all that it builds on."""
        return [layer.prefix for layer in self._layers]

    def narrow(self, name: str, rows: slice) -> None:
        """From now on a variable is only these rows of it; the others are never read."""
        spec = self._layers[0].specs[name]
        shape = (rows.stop - rows.start, *spec.shape[1:])
        self.specs[name] = dataclasses.replace(spec, shape=shape)
        self._offsets[name] = rows.start

    def read(self, name: str, index: Index | None = None) -> np.ndarray:
        """A variable or a box of it as a new array of the saved dtype, checked."""
        spec = self.specs[name]
        if not self.save_id and spec.dtype not in CODES:
            raise TypeError(
                f"{name!r} in {self.prefix} has the dtype {spec.dtype}, which NumPy does "
                "not have"
            )
        if index is None:
            index = (slice(None),) * len(spec.shape)
        bounds = [part.indices(n)[:2] for part, n in zip(index, spec.shape, strict=True)]
        bounds += [(0, n) for n in spec.tensor_shape[len(bounds) :]]
        if name in self._offsets:
            (start, stop), *others = bounds
            bounds = [(start + self._offsets[name], stop + self._offsets[name]), *others]
        array = self._read(name, bounds)
        if spec.is_raw:
            whole = array.reshape(-1).view(dtype_named(spec.dtype))
            array = whole.reshape(array.shape[:-1])
        try:
            check_values(spec, array)
        except ValueError as error:
            raise DataLossError(
                f"{name!r} in {self.prefix} cannot be read: {error}"
            ) from error
        return array

    def _read(self, name: str, bounds: Box) -> np.ndarray:
        """What the last layer that holds it whole says, and over it the rows of deltas."""
        deltas = list(itertools.takewhile(lambda layer: name in layer.rows, self._layers))
        out = self._layers[len(deltas)].read(name, bounds)
        for layer in reversed(deltas):
            layer.replay(name, bounds, out)
        return out


class _Layer:
    """One checkpoint, its files open and checked against what they tell about themselves.

    Attributes:
      prefix: its path.
      save_id: which save wrote it; empty for a file that another tool wrote.
      specs: of every variable.
      structure: the tree in which they came.
      has_structure: whether that is known.
      delta: what it builds on, if it is a delta.
      rows: the variables of which it only holds some rows, and the tensors with their
        numbers.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        directory = os.path.dirname(prefix)
        lockable = directory if os.path.isdir(directory or ".") else "."
        with files.directory_lock(lockable, exclusive=False):
            opened = _open_family(prefix)
        self._first, info = opened[0]
        self.save_id, self.specs, self.delta = info.save_id, info.specs, info.delta
        self.structure, self.has_structure = info.structure, info.has_structure
        self.rows = {} if info.delta is None else info.delta.rows
        self._pieces: dict[str, list[tuple[TensorFile, tuple[int, ...]]]] = {}
        for file, told in opened:
            if set(told.starts) != set(file.shapes):
                raise DataLossError(f"{file.path} does not hold the tensors that it names")
            for name, start in told.starts.items():
                self._pieces.setdefault(name, []).append((file, start))
        if self.save_id:
            self._check_pieces()

    def _check_pieces(self) -> None:
        """Every variable has its dtype and shape, and every element of it is held once."""
        wanted = {name: spec.in_file for name, spec in self.specs.items()}
        for name, row_name in self.rows.items():
            count = next(iter(self._first.shapes.get(row_name, ())), 0)
            shape = (count, *wanted[name].shape[1:])
            wanted[name] = dataclasses.replace(wanted[name], shape=shape)
            wanted[row_name] = Spec("numpy", "int64", (count,))
        if set(self._pieces) != set(wanted):
            raise DataLossError(
                f"{self.prefix} does not hold the variables that it describes: "
                f"{brief(set(self._pieces) ^ set(wanted))}"
            )
        for name, spec in wanted.items():
            boxes = []
            for file, start in self._pieces[name]:
                found = Spec("numpy", file.dtypes[name], file.shapes[name])
                start = (*start, *([0] * (len(spec.shape) - len(start))))
                sizes = {len(start), len(found.shape), len(spec.shape)}
                if found.dtype != spec.dtype or len(sizes) > 1:
                    raise DataLossError(
                        f"{file.path} holds {found} at {start} of {name!r}, which is "
                        f"described as {spec}"
                    )
                boxes.append([(a, a + n) for a, n in zip(start, found.shape, strict=True)])
            if not is_partition(boxes, spec.shape):
                raise DataLossError(
                    f"{self.prefix} does not hold every element of {name!r}, which is "
                    f"described as {spec}, once"
                )

    def read(self, name: str, bounds: Box) -> np.ndarray:
        """A box of a variable as a new array of the dtype in the file."""
        dtype = dtype_named(self.specs[name].tensor_dtype)
        out = empty_array(tuple(b - a for a, b in bounds), dtype)
        for file, start in self._pieces[name]:
            shape = file.shapes[name]
            start = (*start, *([0] * (len(shape) - len(start))))
            boxes = [
                (max(a, s), min(b, s + n))
                for (a, b), s, n in zip(bounds, start, shape, strict=True)
            ]
            if any(b <= a for a, b in boxes):
                continue
            into = tuple(
                slice(a - first, b - first)
                for (a, b), (first, _) in zip(boxes, bounds, strict=True)
            )
            part = [slice(a - s, b - s) for (a, b), s in zip(boxes, start, strict=True)]
            rows, others = part[0] if part else None, part[1:]
            if all(p.stop - p.start == n for p, n in zip(others, shape[1:], strict=True)):
                file.read(name, out[into] if into else out, rows)
            else:
                out[into] = file.view(name, rows)[(slice(None), *others)]
        return out

    def replay(self, name: str, bounds: Box, out: np.ndarray) -> None:
        """Puts the rows of a delta over what it builds on."""
        rows = self._first.view(self.rows[name])
        (start, stop), *others = bounds
        in_order = (np.diff(rows) > 0).all()
        if len(rows) and not (in_order and 0 <= rows[0] <= rows[-1] < self._num_rows(name)):
            raise DataLossError(
                f"{self.prefix} holds rows of {name!r} out of order or beyond its end"
            )
        inside = np.flatnonzero((rows >= start) & (rows < stop))
        if len(inside):  # in order, hence close to each other
            span = slice(int(inside[0]), int(inside[-1]) + 1)
            box: Any = (inside - span.start, *(slice(a, b) for a, b in others))
            out[rows[inside] - start] = self._first.view(name, span)[box]

    def _num_rows(self, name: str) -> int:
        return self.specs[name].shape[0]


def is_partition(boxes: list[Box], shape: tuple[int, ...]) -> bool:
    """True if boxes hold every element of a shape once."""
    if any(b > n for box in boxes for (_, b), n in zip(box, shape, strict=True)):
        return False
    sizes = [math.prod(b - a for a, b in box) for box in boxes]
    solid = np.array([box for box, size in zip(boxes, sizes, strict=True) if size])
    for i in range(1, len(solid) if shape else 0):
        starts, stops = solid[:i, :, 0], solid[:i, :, 1]
        meet = (starts < solid[i, :, 1]) & (solid[i, :, 0] < stops)
        if meet.all(axis=1).any():
            return False
    return sum(sizes) == math.prod(shape)


def base_of(prefix: str) -> str | None:
    """The path of what a checkpoint builds on; None for a full or an unreadable one."""
    try:
        first = _newest_family(prefix)[0]
        version = os.stat(first)
        delta = _delta_in(first, version.st_ino, version.st_mtime_ns)
        return None if delta is None else _base_path(prefix, delta)
    except (OSError, ValueError):
        return None


@functools.lru_cache(1024)
def _delta_in(path: str, inode: int, changed_at: int) -> Delta | None:
    """What makes a file a delta; each version of it is read once."""
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
    assert layer.delta is not None
    path = _base_path(layer.prefix, layer.delta)
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
    if base.save_id != layer.delta.base_id:
        raise DataLossError(f"{link}which was overwritten after the delta was saved")
    for name in layer.rows:
        spec, old = layer.specs[name], base.specs.get(name)
        if old is None or (old.dtype, old.shape) != (spec.dtype, spec.shape):
            raise DataLossError(f"{link}but {name!r} is {spec} here and {old} there")
    return base


def _newest_family(prefix: str) -> list[str]:
    found = files.families(prefix)
    if not found:
        is_tensorflow = os.path.exists(prefix + ".index")
        hint = ": it has TensorFlow's own format" if is_tensorflow else ""
        raise ValueError(f"The passed save_path is not a valid checkpoint: {prefix}{hint}")
    return found[0] if len(found) == 1 else max(found, key=lambda f: saved_id(f[0]) or "")


def _open_family(prefix: str) -> list[tuple[TensorFile, Info]]:
    family = _newest_family(prefix)
    first = TensorFile(family[0])
    info = read_info(first)
    if info is None and len(family) > 1:
        raise DataLossError(f"{family[0]} is not a shard that this package wrote")
    if info is None:
        return [(first, _info_of_another_tool(first))]
    _check_place(first, info, 0, len(family))
    return [(first, info), *(_open_shard(path, info, family) for path in family[1:])]


def _open_shard(path: str, first: Info, family: list[str]) -> tuple[TensorFile, Info]:
    # A process that was killed between two renames left shards that only wait for
    # their names; the first shard tells to which save they must belong.
    waiting = files.temporary_path(path, first.save_id)
    if not os.path.exists(waiting) and not os.path.exists(path):
        raise NotFoundError(f"{path}, one of {len(family)} shards, is not there")
    file = TensorFile(waiting if os.path.exists(waiting) else path)
    info = read_info(file)
    if info is None or info.save_id != first.save_id:
        raise DataLossError(f"{path} belongs to another save than {family[0]}")
    _check_place(file, info, family.index(path), len(family))
    return file, info


def _check_place(file: TensorFile, info: Info, shard: int, shards: int) -> None:
    if (info.shard, info.shards) != (shard, shards):
        raise DataLossError(
            f"{file.path} calls itself shard {info.shard} of {info.shards}, and is shard "
            f"{shard} of {shards} by its name"
        )


def _info_of_another_tool(file: TensorFile) -> Info:
    """Arrays of JAX, except for those that JAX would make narrower."""
    problem = bad_names(file.shapes)
    if problem:
        raise DataLossError(f"in {file.path} {problem}")
    specs = {}
    for name, dtype in file.dtypes.items():
        fits = dtype in CODES and jax.dtypes.canonicalize_dtype(dtype) == dtype_named(dtype)
        specs[name] = Spec("jax" if fits else "numpy", dtype, file.shapes[name])
    starts = {name: (0,) * len(shape) for name, shape in file.shapes.items()}
    return Info("", 0, 1, starts, specs, None, False, None)


# --- ranges of rows -------------------------------------------------------------------


def narrow_to_rows(archive: Archive, rows: Any, saved_as: Mapping[str, str]) -> None:
    """Leaves of the tables in ``archive`` only the rows that are asked for.

    Args:
      archive: will hold those rows.
      rows: ``{name or pattern: slice(start, stop)}``.
      saved_as: the names of all variables, and their names in the archive.

    Raises:
      TypeError: if ``rows`` is not such a dict.
      NotFoundError: if there is no such variable.
      InvalidArgumentError: for a range that is not in the table, a variable without rows,
        or two ranges for one.
    """
    if not isinstance(rows, Mapping):
        raise TypeError(
            "rows must be a dict {name of a table: slice(start, stop)}, not "
            f"{type(rows).__name__}"
        )
    chosen: dict[str, slice] = {}
    for pattern, wanted in rows.items():
        for name in matching(str(pattern), saved_as, "rows"):
            part = _range(name, wanted, archive.specs[saved_as[name]])
            if chosen.setdefault(name, part) != part:
                raise InvalidArgumentError(
                    f"rows asks for two ranges of {name!r}: {_shown(chosen[name])} and "
                    f"{_shown(part)}; restore one after the other"
                )
    for name, part in chosen.items():
        archive.narrow(saved_as[name], part)


def _range(name: str, wanted: Any, spec: Spec) -> slice:
    if not isinstance(wanted, slice):
        raise TypeError(
            f"rows[{name!r}] must be a slice(start, stop), not {wanted!r}; for single rows "
            "restore the range that holds them, and index that"
        )
    # The last axis of key data is the inside of a key.
    if len(spec.shape) <= spec.is_key or spec.is_string:
        raise InvalidArgumentError(
            f"rows[{name!r}]: it was saved as a single value, without rows"
        )
    count = spec.shape[0]
    try:
        start = 0 if wanted.start is None else operator.index(wanted.start)
        stop = count if wanted.stop is None else operator.index(wanted.stop)
        step = 1 if wanted.step is None else operator.index(wanted.step)
    except TypeError as error:
        raise TypeError(f"rows[{name!r}] must hold integers: {error}") from error
    if step != 1 or not 0 <= start <= stop <= count:
        raise InvalidArgumentError(
            f"rows[{name!r}] is {_shown(wanted)}, but it was saved with {count} rows; "
            f"want 0 <= start <= stop <= {count} and no step (negative numbers do not "
            "count from the end)"
        )
    return slice(start, stop)


def _shown(part: slice) -> str:
    ends = (part.start, part.stop, part.step)[: 2 if part.step is None else 3]
    return f"slice({', '.join(map(str, ends))})"
