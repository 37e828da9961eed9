"""Deltas: their base, and the rows of tables that changed since."""

import math
import os
import re
from collections.abc import Sequence
from typing import TypeAlias

import jax
import numpy as np

from jslices import IndexedSlices, InvalidArgumentError, is_slices
from jslices._typing import PyTree
from jslices.checkpoint import files
from jslices.checkpoint.archive import Archive
from jslices.checkpoint.boxes import box_at, row_blocks, whole
from jslices.checkpoint.leaves import Array, Leaf, Rows, as_leaf
from jslices.checkpoint.trees import clocks_in, matching, named_leaves
from jslices.checkpoint.writing import Part
from jslices.errors import NotFoundError

#: Ids of rows, a mask of them, or the slices of a gradient.
Ids: TypeAlias = Array | IndexedSlices | Sequence[int]

#: Beside the touched rows of a table so many runs of so many rows are compared.
_RUNS, _RUN = 4, 256


def open_base(prefix: str, previous: tuple[str, str] | None) -> Archive:
    """Open the checkpoint on which a delta at ``prefix`` builds, if it may.

    ``previous`` is the path and the id of the last save or restore.
    """
    if previous is None:
        raise ValueError(
            "a delta builds on a full checkpoint, and this Saver has saved and "
            "restored none; call save (or restore) first"
        )
    path, save_id = previous
    folder, base_folder = (os.path.dirname(p) or "." for p in (prefix, path))
    exists = os.path.isdir(base_folder)
    if folder != base_folder and not (exists and os.path.samefile(folder, base_folder)):
        raise InvalidArgumentError(
            f"a delta must be in the directory of what it builds on, {path}; got {prefix}"
        )
    if not files.checkpoint_exists(path):
        raise NotFoundError(f"{path}, on which a delta would build, is not there")
    base = Archive(path)
    if base.info.save_id != save_id or not save_id:
        raise InvalidArgumentError(
            f"{path} is not what this Saver saved or restored; call save once more"
        )
    if os.path.abspath(prefix) in {os.path.abspath(p) for p in base.chain()}:
        raise InvalidArgumentError(
            f"a delta at {prefix} would overwrite a checkpoint that it builds on; give "
            "another path or global_step"
        )
    return base


def delta_part(
    leaves: dict[str, Leaf], touched: PyTree, base: Archive
) -> tuple[Part, dict[str, str]]:
    """The contents of a delta, and the names of the tensors with row numbers, by table.

    A variable whose changed rows are not known, or take no fewer bytes than it, or which
    the base does not hold with this dtype and shape, is held whole.
    """
    if touched is None:
        changed = {n: _changed_rows(n, leaf, base) for n, leaf in leaves.items()}
    else:
        changed = _with_moved_rows(_touched_rows(leaves, touched), leaves, base)
        logs = {n: leaf for n, leaf in leaves.items() if _is_log(n)}
        changed |= {n: _changed_rows(n, leaf, base) for n, leaf in logs.items()}
    part: Part = {}
    row_names: dict[str, str] = {}
    for name, leaf in leaves.items():
        part[name], rows = leaf.tensor(), changed.get(name)
        if rows is None or not leaf.spec.is_like(base.specs.get(name)):
            continue
        values, numbers = leaf.rows_tensor(rows), as_leaf("rows", rows.numbers).tensor()
        if values.num_bytes + numbers.num_bytes >= part[name].num_bytes:
            continue
        if touched is not None:
            _look_at_others(name, leaf, rows, base)
        row_name = f"{name}@rows"
        while row_name in leaves:
            row_name += "_"
        row_names[name] = row_name
        part[name], part[row_name] = values, numbers
    return part, row_names


# --- rows that changed, from ids ------------------------------------------------------


def _touched_rows(leaves: dict[str, Leaf], touched: PyTree) -> dict[str, Rows | None]:
    rows_of: dict[str, Rows | None] = {}
    names, values, _ = named_leaves(touched, is_leaf=_is_ids)
    for pattern, ids in zip(names, values, strict=True):
        covered = matching(pattern, leaves, "touched")
        shapes = {n: leaves[n].spec.shape for n in covered if leaves[n].spec.shape}
        axes = _row_axes(ids)
        tables = {n: shape[:axes] for n, shape in shapes.items()}
        if len(set(tables.values())) > 1:
            raise InvalidArgumentError(
                f"touched[{pattern!r}] covers tables of different numbers of rows: "
                f"{tables}; give each its own ids"
            )
        for name, shape in shapes.items():
            numbers, others = _numbers(pattern, ids, shape[:axes]), rows_of.get(name)
            if numbers is not None:
                rows = Rows(numbers, axes)
                rows_of[name] = rows if others is None else _union(rows, others, shape)
    return rows_of


def _with_moved_rows(
    changed: dict[str, Rows | None], leaves: dict[str, Leaf], base: Archive
) -> dict[str, Rows | None]:
    """``changed``, and the rows that have caught up since, as the clocks of rows tell."""
    for clock, table, number in clocks_in(leaves):
        last, whole = leaves[f"{clock}last{table}"], f"{clock}whole"
        moved, sizes = _changed_rows(f"{clock}last{table}", last, base), last.spec.shape
        if whole in leaves:
            stepped = _changed_rows(whole, leaves[whole], base)
            moved = None if stepped is None or number in stepped.numbers else moved
        for other, rows in changed.items():
            shape = leaves[other].spec.shape
            is_its = f"/{other}".endswith(table)
            if rows is not None and is_its and shape[: len(sizes)] == sizes:
                changed[other] = None if moved is None else _union(rows, moved, shape)
    return changed


def _is_ids(node: object) -> bool:
    """True for slices and plain sequences of ids."""
    if isinstance(node, tuple) and not node:
        return False
    if isinstance(node, list | tuple | range):
        return all(isinstance(i, int | np.integer) for i in node)
    return is_slices(node)


def _row_axes(ids: Ids) -> int:
    """How many axes of a table number the rows that ids, a mask, or slices name."""
    if isinstance(ids, IndexedSlices):
        return ids.row_axes
    mask = isinstance(ids, jax.Array | np.ndarray) and ids.dtype.kind == "b"
    return max(1, np.ndim(ids)) if mask else 1


def _numbers(pattern: str, ids: Ids, shape: tuple[int, ...]) -> np.ndarray | None:
    """The numbers of these rows, numbered by axes of this shape; None for all."""
    if isinstance(ids, IndexedSlices):
        table = shape if ids.dense_shape is None else ids.dense_shape[: ids.row_axes]
        if table != shape:
            raise InvalidArgumentError(
                f"touched[{pattern!r}] are slices whose rows axes {table} number, for a "
                f"table whose first axes are {shape}"
            )
        ids = ids.indices
    elif isinstance(ids, jax.Array | np.ndarray) and ids.dtype.kind in "fcV":
        return None  # a dense gradient
    ids = np.asarray(ids)
    if ids.size == 0:
        return np.zeros(0, np.int64)
    if ids.dtype == bool:
        if ids.shape != shape:
            raise InvalidArgumentError(
                f"touched[{pattern!r}] is a mask of rows {ids.shape} for a table of {shape}"
            )
        return np.flatnonzero(ids)
    if ids.dtype.kind not in "iu":
        raise InvalidArgumentError(
            f"touched[{pattern!r}] has the dtype {ids.dtype}; ids are integers, and a mask "
            "is of bools"
        )
    return np.unique(ids[(ids >= 0) & (ids < math.prod(shape))]).astype(np.int64)


def _union(a: Rows, b: Rows, shape: tuple[int, ...]) -> Rows:
    """The rows of both, numbered by the axes of the finer ones."""
    axes = max(a.row_axes, b.row_axes)

    def finer(rows: Rows) -> np.ndarray:
        per = math.prod(shape[rows.row_axes : axes])
        return (rows.numbers[:, None] * per + np.arange(per)).reshape(-1)

    return Rows(np.union1d(finer(a), finer(b)), axes)


def _look_at_others(name: str, leaf: Leaf, rows: Rows, base: Archive) -> None:
    """Refuse ``rows`` that are not all that changed, where some of the others tell."""
    shape, row = leaf.spec.shape[: rows.row_axes], leaf.spec.shape[rows.row_axes :]
    sizes: tuple[int, ...] = ()
    for n in reversed(shape):  # of a run
        sizes = min(n, max(1, _RUN // math.prod(sizes))), *sizes
    ends = zip(shape, sizes, strict=True)
    starts = [np.linspace(0, n - size, _RUNS, dtype=np.int64) for n, size in ends]
    runs = [box_at(start, sizes) for start in np.transpose(starts)]
    numbers = [np.ravel_multi_index(np.mgrid[run], shape).reshape(-1) for run in runs]
    old = [base.read(name, run + whole(row)).reshape(-1, *row) for run in runs]
    others = Rows(np.concatenate(numbers), rows.row_axes)
    (new,) = leaf.rows_tensor(others).blocks()
    differ = _differs(np.concatenate(old), new, 1)
    if (lost := np.setdiff1d(others.numbers[differ], rows.numbers)).size:
        raise InvalidArgumentError(
            f"touched names {len(rows.numbers)} rows of {name!r}, and others have changed "
            f"since {base.prefix}, such as row {lost[0]}. Name the rows of all steps since "
            "then (a gradient has those of one), or leave touched out to compare all rows"
        )


# --- rows that changed, by comparison -------------------------------------------------


def _changed_rows(name: str, leaf: Leaf, base: Archive) -> Rows | None:
    """The rows of the fewest bytes that hold all that changed; of a log its numbers."""
    shape = leaf.spec.shape
    if not leaf.spec.is_like(base.specs.get(name)) or not shape or not shape[0]:
        return None
    finest = max(1, len(shape) - (not _is_log(name)))
    changed = np.zeros(shape[:finest], bool)
    for piece in leaf.pieces:
        first, *others = piece.box
        for rows in row_blocks(piece.data.shape, piece.data.dtype.itemsize):
            at = (slice(first.start + rows.start, first.start + rows.stop), *others)
            new = np.ascontiguousarray(np.asarray(piece.data[rows]))
            changed[at[:finest]] |= _differs(base.read(name, at), new, finest)
    itemsize = leaf.pieces[0].data.dtype.itemsize
    numbers = [
        np.flatnonzero(changed.any(axis=tuple(range(axes, finest))))
        for axes in range(1, finest + 1)
    ]
    num_bytes = [
        len(rows) * (rows.itemsize + math.prod(shape[axes:]) * itemsize)
        for axes, rows in enumerate(numbers, 1)
    ]
    best = int(np.argmin(num_bytes))
    return Rows(numbers[best], best + 1)


def _is_log(name: str) -> bool:
    """Whether it is a log of steps, of which each step changes a few columns."""
    return re.search(r"(?:^|/)clock/log/\d+$", name) is not None


def _differs(old: np.ndarray, new: np.ndarray, axes: int) -> np.ndarray:
    """Where blocks differ, for each of the rows that so many axes number.

    Bytes are compared, so NaN equals itself and -0.0 is not 0.0.
    """
    width = math.prod(old.shape[axes:]) * old.itemsize
    count = math.prod(old.shape[:axes])
    as_bytes = [x.reshape(-1).view(np.uint8).reshape(count, width) for x in (old, new)]
    return (as_bytes[0] != as_bytes[1]).any(axis=1).reshape(old.shape[:axes])
