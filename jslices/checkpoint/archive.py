"""A checkpoint on disk: a set of files that appear at once, and what they hold.

Every file is a safetensors file whose metadata has the entry ``jslices``: the id of the
save, which piece of every array the file holds, and in the first file what the variables
were. A delta also names the checkpoint that it builds on.
"""

import contextlib
import dataclasses
import json
import operator
import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jslices._errors import DataLossError, InvalidArgumentError, NotFoundError
from jslices.checkpoint import files
from jslices.checkpoint.leaves import Index, Leaf, Spec
from jslices.checkpoint.tensors import (
    CODES,
    Tensor,
    TensorFile,
    dtype_named,
    empty_array,
    write_tensors,
)
from jslices.checkpoint.text_format import parse_text
from jslices.checkpoint.trees import check_names, matching

_INFO = "jslices"
_VERSION = 1

#: What goes into one file: a tensor for each name, and where it begins in the array.
Part = dict[str, tuple[Tensor, tuple[int, ...]]]


# --- writing --------------------------------------------------------------------------


def in_one_file(leaves: dict[str, Leaf]) -> list[Part]:
    """Everything in one file."""
    return [{n: (leaf.tensor(), (0,) * len(leaf.spec.shape)) for n, leaf in leaves.items()}]


def in_shards(leaves: dict[str, Leaf]) -> list[Part]:
    """A file for each shard; an array that is not sharded goes into the smallest."""
    count = max((len(leaf.pieces) for leaf in leaves.values()), default=1)
    parts: list[Part] = [{} for _ in range(count)]
    sizes = [0] * count
    for name, leaf in sorted(leaves.items(), key=lambda item: -len(item[1].pieces)):
        for number, piece in enumerate(leaf.pieces):
            if len(leaf.pieces) == 1:
                number = sizes.index(min(sizes))
            tensor = leaf.piece_tensor(piece)
            parts[number][name] = (tensor, piece.start)
            sizes[number] += tensor.num_bytes
    return parts


def write_checkpoint(
    prefix: str,
    parts: list[Part],
    info: dict[str, Any],
    sharded: bool,
    state: tuple[str, str] | None = None,
) -> str:
    """Writes the files of a checkpoint, which replaces an older one at once.

    Args:
      prefix: its path.
      parts: what goes into each file.
      info: what the first file tells about the variables.
      sharded: whether the files are shards.
      state: path and text of a state file that is replaced at the same time.

    Returns:
      The id of this save.

    Raises:
      OSError: if that cannot be done. It says whether the checkpoint was saved; if not,
        what was there before is as it was.
    """
    save_id, count = files.new_id(), len(parts)
    paths = [files.shard_path(prefix, i, count) for i in range(count)]
    paths = paths if sharded else [prefix]
    descriptors: list[int] = []
    waiting = {path: files.temporary_path(path, save_id) for path in paths}
    try:
        with files.directory_lock(os.path.dirname(prefix), exclusive=True):
            files.clean(os.path.dirname(prefix), is_published)  # it may hold all the room
        for number, (part, path) in enumerate(zip(parts, paths, strict=True)):
            mine = {"id": save_id, "version": _VERSION, "shard": number, "shards": count}
            mine |= info if number == 0 else {}
            mine["starts"] = {name: start for name, (_, start) in part.items()}
            tensors = {name: tensor for name, (tensor, _) in part.items()}
            descriptors.append(files.open_new(waiting[path]))
            write_tensors(descriptors[-1], tensors, {_INFO: json.dumps(mine)})
        if state is not None:
            path, text = state
            waiting[path] = files.temporary_path(path, save_id)
            descriptors.append(files.open_new(waiting[path]))
            files.write_and_flush(descriptors[-1], text)
        _publish(prefix, paths, waiting)
    except OSError as error:
        if saved_id(paths[0]) != save_id:
            outcome = "was not saved, and what was saved before is as it was"
        elif state is not None and os.path.exists(waiting[state[0]]):
            outcome = (
                f"was saved and can be restored, but {state[0]} was not written and does "
                "not name it; save once more, or call update_checkpoint_state"
            )
        else:
            outcome = "was saved and can be restored, but a power failure may undo that"
        raise OSError(
            error.errno,
            f"{error.strerror or error}; {prefix} {outcome}",
            error.filename or prefix,
        ) from error
    finally:
        is_first_waiting = os.path.exists(waiting[paths[0]])
        for path, temporary in waiting.items():
            # Once the first shard has its name the others are part of a checkpoint.
            if is_first_waiting or path not in paths:
                with contextlib.suppress(OSError):
                    files.remove(temporary)
        for descriptor in descriptors:  # their locks end here
            os.close(descriptor)
    return save_id


def _publish(prefix: str, paths: list[str], waiting: dict[str, str]) -> None:
    """Gives written files their names. The first one decides."""
    directory = os.path.dirname(prefix)
    with files.directory_lock(directory, exclusive=True):
        for path, temporary in waiting.items():
            os.replace(temporary, path)
        for family in files.families(prefix):
            if family != paths:
                files.remove_family(family)
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


def _read_info(file: TensorFile) -> dict[str, Any]:
    """What this package wrote about a file; empty for a file of another tool."""
    info: dict[str, Any] = json.loads(file.metadata.get(_INFO, "{}"))
    if info.get("version", _VERSION) > _VERSION:
        raise ValueError(
            f"{file.path} was written by a later version of jslices; update jslices"
        )
    return info


def saved_id(path: str) -> str | None:
    """The id of the save that wrote a file; None if it cannot be read."""
    try:
        return _read_info(TensorFile(path)).get("id")
    except (OSError, ValueError):
        return None


# --- reading --------------------------------------------------------------------------


class Archive:
    """A checkpoint open for reading.

    Attributes:
      prefix: its path.
      save_id: which save wrote it; empty for a file that another tool wrote.
      specs: of every variable; of the rows of it that :meth:`narrow` left.
      has_structure: whether the tree in which the variables came is known.
      structure: its description.
      base: the checkpoint that this one builds on, if it is a delta.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        directory = os.path.dirname(prefix)
        lockable = directory if os.path.isdir(directory or ".") else "."
        with files.directory_lock(lockable, exclusive=False):
            opened = _open_family(prefix)
        infos = [_read_info(file) for file in opened]
        info, self._first = infos[0], opened[0]
        self.save_id: str = info.get("id", "")
        self.structure, self.has_structure = info.get("structure"), "structure" in info
        self.specs = _specs(info, opened[0])
        self._whole = dict(self.specs)
        self._offsets: dict[str, int] = {}
        self._pieces: dict[str, list[tuple[TensorFile, tuple[int, ...]]]] = {}
        for file, part in zip(opened, infos, strict=True):
            check_names(file.shapes, f"in {file.path} ")
            for name in file.shapes:
                start = part.get("starts", {}).get(name, [0] * len(file.shapes[name]))
                self._pieces.setdefault(name, []).append((file, tuple(start)))
        delta: dict[str, Any] = info.get("delta") or {}
        self._rows: dict[str, str] = delta.get("rows", {})
        self.base = _open_base(prefix, delta) if delta else None

    def chain(self) -> list[str]:
        """The paths of this checkpoint and of all that it builds on."""
        return [self.prefix, *(self.base.chain() if self.base else [])]

    def narrow(self, name: str, rows: slice) -> None:
        """From now on a variable is only these rows of it; the others are never read."""
        spec = self._whole[name]
        shape = (rows.stop - rows.start, *spec.shape[1:])
        self.specs[name] = dataclasses.replace(spec, shape=shape)
        self._offsets[name] = rows.start

    def read(self, name: str, index: Index | None = None) -> np.ndarray:
        """A variable or a box of it as a new array of the saved dtype, checked."""
        spec = self.specs[name]
        if index is None:
            index = (slice(None),) * len(spec.shape)
        bounds = [part.indices(n)[:2] for part, n in zip(index, spec.shape, strict=True)]
        bounds += [(0, n) for n in spec.tensor_shape[len(bounds) :]]
        if name in self._offsets:
            (start, stop), *others = bounds
            bounds = [(start + self._offsets[name], stop + self._offsets[name]), *others]
        array = self._read(name, bounds)
        if not spec.is_raw:
            return array
        return array.reshape(-1).view(dtype_named(spec.dtype)).reshape(array.shape[:-1])

    def _read(self, name: str, bounds: list[tuple[int, int]]) -> np.ndarray:
        if self.base is not None and name in self._rows:
            return self._replay(name, bounds, self.base)
        out = empty_array(
            tuple(b - a for a, b in bounds), dtype_named(self._whole[name].tensor_dtype)
        )
        filled = 0
        for file, start in self._pieces.get(name, ()):
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
            filled += out[into].size
        if filled != out.size:
            raise DataLossError(f"{self.prefix} holds only a part of {name!r}")
        return out

    def _replay(
        self, name: str, bounds: list[tuple[int, int]], base: "Archive"
    ) -> np.ndarray:
        """What the base holds, and over it the rows of this delta."""
        out = base._read(name, bounds)
        rows = self._first.view(self._rows[name])
        (start, stop), *others = bounds
        if len(rows) and not 0 <= rows.min() <= rows.max() < self._whole[name].shape[0]:
            raise DataLossError(f"{self.prefix} holds rows of {name!r} beyond its end")
        inside = np.flatnonzero((rows >= start) & (rows < stop))
        if len(inside):  # in order, hence close to each other
            span = slice(int(inside[0]), int(inside[-1]) + 1)
            box: Any = (inside - span.start, *(slice(a, b) for a, b in others))
            out[rows[inside] - start] = self._first.view(name, span)[box]
        return out


def base_of(prefix: str) -> str | None:
    """The path of what a checkpoint builds on; None for a full or an unreadable one."""
    try:
        delta = _read_info(TensorFile(_newest_family(prefix)[0])).get("delta")
        return _base_path(prefix, delta) if delta else None
    except (OSError, ValueError):
        return None


def _base_path(prefix: str, delta: dict[str, Any]) -> str:
    name = delta["base"]
    if os.path.basename(name) != name or name in ("", ".", ".."):
        raise DataLossError(
            f"{prefix} is a delta that names {name!r} as its base; a base is in the same "
            "directory, so this is not followed"
        )
    return os.path.join(os.path.dirname(prefix), name)


def _open_base(prefix: str, delta: dict[str, Any]) -> Archive:
    path = _base_path(prefix, delta)
    chain = f"{prefix} is a delta that builds on {path}, "
    if not files.checkpoint_exists(path):
        raise NotFoundError(f"{chain}which is not there")
    try:
        base = Archive(path)
    except NotFoundError as error:
        raise NotFoundError(f"{chain}of which something is missing: {error}") from error
    except DataLossError as error:
        raise DataLossError(f"{chain}which is damaged: {error}") from error
    if base.save_id != delta["base_id"]:
        raise DataLossError(f"{chain}which was overwritten after the delta was saved")
    return base


def _newest_family(prefix: str) -> list[str]:
    found = files.families(prefix)
    if not found:
        is_tensorflow = os.path.exists(prefix + ".index")
        hint = ": it has TensorFlow's own format" if is_tensorflow else ""
        raise ValueError(f"The passed save_path is not a valid checkpoint: {prefix}{hint}")
    return found[0] if len(found) == 1 else max(found, key=lambda f: saved_id(f[0]) or "")


def _open_family(prefix: str) -> list[TensorFile]:
    family = _newest_family(prefix)
    first = TensorFile(family[0])
    save_id = _read_info(first).get("id", "")
    if len(family) > 1 and not save_id:
        raise DataLossError(f"{family[0]} is not a shard that this package wrote")
    return [first, *(_open_shard(path, save_id, family) for path in family[1:])]


def _open_shard(path: str, save_id: str, family: list[str]) -> TensorFile:
    # A process that was killed between two renames left shards that only wait for
    # their names; the first shard tells to which save they must belong.
    waiting = files.temporary_path(path, save_id)
    if os.path.exists(waiting):
        return TensorFile(waiting)
    if not os.path.exists(path):
        raise NotFoundError(f"{path}, one of {len(family)} shards, is not there")
    file = TensorFile(path)
    if _read_info(file).get("id") != save_id:
        raise DataLossError(f"{path} belongs to another save than {family[0]}")
    return file


def _specs(info: dict[str, Any], file: TensorFile) -> dict[str, Spec]:
    if "variables" in info:
        check_names(info["variables"], f"in {file.path} ")
        return {
            name: Spec(kind, dtype, tuple(shape))
            for name, (kind, dtype, shape) in info["variables"].items()
        }
    # Another tool's file: arrays of JAX, except for those that JAX would make narrower.
    specs = {}
    for name, dtype in file.dtypes.items():
        fits = dtype in CODES and jax.dtypes.canonicalize_dtype(dtype) == dtype_named(dtype)
        specs[name] = Spec("jax" if fits else "numpy", dtype, file.shapes[name])
    return specs


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
