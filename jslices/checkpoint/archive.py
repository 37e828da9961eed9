"""A checkpoint open for reading: its shards, and the chain that a delta builds on."""

import dataclasses
import os
from typing import Any

import jax
import numpy as np

from jslices._errors import DataLossError, NotFoundError
from jslices.checkpoint import files
from jslices.checkpoint.leaves import Spec
from jslices.checkpoint.memory import CODES, dtype_named, empty
from jslices.checkpoint.names import check_names
from jslices.checkpoint.shards import read_info, saved_id
from jslices.checkpoint.tensor_file import TensorFile

Index = tuple[slice, ...]


class Archive:
    """The variables of one checkpoint.

    Attributes:
      prefix: its path.
      save_id: which save wrote it; empty for a file that another tool wrote.
      specs: of every variable; of the part of it that :meth:`narrow` left.
      structure: the tree they came in, described; None if it is not known.
      base: the checkpoint that this one builds on, if it is a delta.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        with files.directory_lock(_directory(prefix), exclusive=False):
            opened = _open_family(prefix)
        infos = [read_info(file) for file in opened]
        info = infos[0]
        self.save_id: str = info.get("id", "")
        self.structure = info.get("structure")
        self.has_structure = "structure" in info
        self.delta: dict[str, Any] = info.get("delta") or {}
        self._rows: dict[str, str] = self.delta.get("rows", {})
        self.specs = _specs(info, opened[0])
        self._whole = dict(self.specs)
        self._offsets: dict[str, int] = {}
        self._first = opened[0]
        self._pieces: dict[str, list[tuple[TensorFile, tuple[int, ...]]]] = {}
        for file, part in zip(opened, infos, strict=True):
            check_names(file.shapes, f"in {file.path} ")
            for name in file.shapes:
                start = part.get("starts", {}).get(name, [0] * len(file.shapes[name]))
                self._pieces.setdefault(name, []).append((file, tuple(start)))
        self.base = open_base(prefix, self.delta) if self.delta else None

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
        shape = array.shape[:-1]
        return array.reshape(-1).view(dtype_named(spec.dtype)).reshape(shape)

    def chain(self) -> list[str]:
        """The paths of this checkpoint and of all that it builds on."""
        return [self.prefix, *(self.base.chain() if self.base else [])]

    def _read(self, name: str, bounds: list[tuple[int, int]]) -> np.ndarray:
        if self.base is not None and name in self._rows:
            return self._replay(name, bounds, self.base)
        spec = self._whole[name]
        out = empty(tuple(b - a for a, b in bounds), dtype_named(spec.tensor_dtype))
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
        out = base._read(name, bounds)
        rows = self._first.view(self._rows[name])
        (start, stop), *others = bounds
        if len(rows) and not 0 <= rows.min() <= rows.max() < self._whole[name].shape[0]:
            raise DataLossError(f"{self.prefix} holds rows of {name!r} that there are not")
        inside = np.flatnonzero((rows >= start) & (rows < stop))
        if len(inside):  # in order, hence close to each other
            span = slice(int(inside[0]), int(inside[-1]) + 1)
            box: Any = (inside - span.start, *(slice(a, b) for a, b in others))
            out[rows[inside] - start] = self._first.view(name, span)[box]
        return out


def base_path(prefix: str, delta: dict[str, Any]) -> str:
    """The path of what a delta builds on, which is in the same directory."""
    name = delta["base"]
    if os.path.basename(name) != name or name in ("", ".", ".."):
        raise DataLossError(
            f"{prefix} is a delta that names {name!r} as its base; a base is in the same "
            "directory, so this is not followed"
        )
    return os.path.join(os.path.dirname(prefix), name)


def open_base(prefix: str, delta: dict[str, Any]) -> Archive:
    """What a delta builds on.

    Raises:
      NotFoundError: if it is not there.
      DataLossError: if it is damaged, or has been overwritten since.
    """
    path = base_path(prefix, delta)
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


def link(prefix: str) -> str | None:
    """The path of what a checkpoint builds on; None for a full or an unreadable one."""
    try:
        family = _newest(prefix)
        delta = read_info(TensorFile(family[0])).get("delta")
        return base_path(prefix, delta) if delta else None
    except (OSError, ValueError):
        return None


def _directory(prefix: str) -> str:
    directory = os.path.dirname(prefix)
    return directory if os.path.isdir(directory or ".") else "."


def _newest(prefix: str) -> list[str]:
    found = files.families(prefix)
    if not found:
        of_tensorflow = os.path.exists(prefix + ".index")
        hint = ": it is one of TensorFlow's own format" if of_tensorflow else ""
        raise ValueError(f"The passed save_path is not a valid checkpoint: {prefix}{hint}")
    return found[0] if len(found) == 1 else max(found, key=lambda f: saved_id(f[0]) or "")


def _open_family(prefix: str) -> list[TensorFile]:
    family = _newest(prefix)
    first = TensorFile(family[0])
    save_id = read_info(first).get("id", "")
    if len(family) > 1 and not save_id:
        raise DataLossError(f"{family[0]} is no shard that this package wrote")
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
    if read_info(file).get("id") != save_id:
        raise DataLossError(f"{path} is of another save than {family[0]}")
    return file


def _specs(info: dict[str, Any], file: TensorFile) -> dict[str, Spec]:
    if "variables" not in info:
        return {n: _foreign(file.dtypes[n], file.shapes[n]) for n in file.shapes}
    check_names(info["variables"], f"in {file.path} ")
    return {
        name: Spec(kind, dtype, tuple(shape))
        for name, (kind, dtype, shape) in info["variables"].items()
    }


def _foreign(dtype: str, shape: tuple[int, ...]) -> Spec:
    """Of another tool's file: an array of JAX's, unless JAX would make it narrower."""
    fits = dtype in CODES and jax.dtypes.canonicalize_dtype(dtype) == dtype_named(dtype)
    return Spec("jax" if fits else "numpy", dtype, shape)
