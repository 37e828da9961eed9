"""Deltas: their base, and the rows of tables that changed since."""

import os
from collections.abc import Sequence
from typing import TypeAlias

import jax
import numpy as np

from jslices import IndexedSlices, InvalidArgumentError, NotFoundError, is_slices
from jslices.checkpoint import files
from jslices.checkpoint.archive import Archive
from jslices.checkpoint.leaves import Array, Leaf, as_leaf, row_blocks
from jslices.checkpoint.trees import matching, named_leaves
from jslices.checkpoint.writing import Part
from jslices.extend import PyTree

#: Ids of rows, a mask of them, or the slices of a gradient.
Ids: TypeAlias = Array | IndexedSlices | Sequence[int]


def open_base(prefix: str, previous: tuple[str, str] | None) -> Archive:
    """Open the checkpoint on which a delta at ``prefix`` builds.

    Args:
      prefix: the path of the delta.
      previous: path and id of what was saved or restored last.

    Raises:
      ValueError: if there is none, or none that it may build on.
      NotFoundError: if that is gone.
    """
    if previous is None:
        raise ValueError(
            "a delta builds on a full checkpoint, and this Saver has saved and "
            "restored none; call save (or restore) first"
        )
    path, save_id = previous
    if os.path.abspath(path) == os.path.abspath(prefix):
        raise InvalidArgumentError(
            f"a delta at {prefix} would overwrite the checkpoint that it builds on; "
            "give another path or global_step"
        )
    here, there = os.path.dirname(prefix) or ".", os.path.dirname(path) or "."
    if not os.path.samefile(here, there) if os.path.isdir(there) else here != there:
        raise InvalidArgumentError(
            f"a delta must be in the directory of what it builds on, {path}; got {prefix}"
        )
    if not files.checkpoint_exists(path):
        raise NotFoundError(f"{path}, on which a delta would build, is not there")
    base = Archive(path)
    if base.save_id != save_id or not save_id:
        raise InvalidArgumentError(
            f"{path} is not what this Saver saved or restored; call save once more"
        )
    if os.path.abspath(prefix) in {os.path.abspath(p) for p in base.chain()}:
        raise InvalidArgumentError(
            f"{prefix} is one of the checkpoints that a delta would build on; give "
            "another path or global_step"
        )
    return base


def delta_part(
    leaves: dict[str, Leaf], touched: PyTree, base: Archive
) -> tuple[Part, dict[str, str]]:
    """The contents of a delta, and the names of the tensors with row numbers, by table.

    A variable whose changed rows are not known, or which the base does not hold with this
    dtype and shape, is held whole.
    """
    if touched is None:
        changed = {n: _changed_rows(n, leaf, base) for n, leaf in leaves.items()}
    else:
        changed = _touched_rows(leaves, touched)
    part: Part = {}
    row_names: dict[str, str] = {}
    for name, leaf in leaves.items():
        rows, start = changed.get(name), (0,) * len(leaf.spec.shape)
        if rows is None or not _fits(name, leaf, base):
            part[name] = leaf.tensor(), start
            continue
        row_name = f"{name}@rows"
        while row_name in leaves:
            row_name += "_"
        row_names[name] = row_name
        part[name] = leaf.rows_tensor(rows), start
        part[row_name] = as_leaf("rows", rows).tensor(), (0,)
    return part, row_names


def _fits(name: str, leaf: Leaf, base: Archive) -> bool:
    spec = base.specs.get(name)
    return spec is not None and (spec.dtype, spec.shape) == (
        leaf.spec.dtype,
        leaf.spec.shape,
    )


# --- rows that changed, from ids ------------------------------------------------------


def _touched_rows(leaves: dict[str, Leaf], touched: PyTree) -> dict[str, np.ndarray | None]:
    rows_of: dict[str, np.ndarray | None] = {}
    names, values, _ = named_leaves(touched, is_leaf=_is_ids)
    for pattern, ids in zip(names, values, strict=True):
        covered = matching(pattern, leaves, "touched")
        tables = {n: leaves[n].spec.shape[0] for n in covered if leaves[n].spec.shape}
        if len(set(tables.values())) > 1:
            raise InvalidArgumentError(
                f"touched[{pattern!r}] covers tables of different numbers of rows: "
                f"{tables}; give each its own ids"
            )
        for name, num_rows in tables.items():
            rows, others = _rows(pattern, ids, num_rows), rows_of.get(name)
            if rows is not None:
                rows_of[name] = rows if others is None else np.union1d(others, rows)
    return rows_of


def _is_ids(node: object) -> bool:
    """True for slices and plain sequences of ids."""
    if isinstance(node, tuple) and not node:
        return False
    if isinstance(node, list | tuple | range):
        return all(isinstance(i, int | np.integer) for i in node)
    return is_slices(node)


def _rows(pattern: str, ids: Ids, num_rows: int) -> np.ndarray | None:
    """The rows that ids, a mask, or the slices of a gradient name; None for all."""
    if isinstance(ids, IndexedSlices):
        ids = ids.indices
    elif isinstance(ids, jax.Array | np.ndarray) and ids.dtype.kind in "fcV":
        return None  # a dense gradient
    ids = np.asarray(ids).reshape(-1)
    if ids.size == 0:
        return np.zeros(0, np.int64)
    if ids.dtype == bool:
        if ids.shape != (num_rows,):
            raise InvalidArgumentError(
                f"touched[{pattern!r}] is a mask of {ids.size} rows for a table of "
                f"{num_rows}"
            )
        return np.flatnonzero(ids)
    if ids.dtype.kind not in "iu":
        raise InvalidArgumentError(
            f"touched[{pattern!r}] has the dtype {ids.dtype}; ids are integers, and a mask "
            "is of bools"
        )
    return np.unique(ids[(ids >= 0) & (ids < num_rows)]).astype(np.int64)


# --- rows that changed, by comparison -------------------------------------------------


def _changed_rows(name: str, leaf: Leaf, base: Archive) -> np.ndarray | None:
    shape = leaf.spec.shape
    if not _fits(name, leaf, base) or not shape or not shape[0]:
        return None
    changed = np.zeros(shape[0], bool)
    for piece in leaf.pieces:
        first, *others = piece.index()
        for rows in row_blocks(piece.data.shape, piece.data.dtype.itemsize):
            at = slice(first.start + rows.start, first.start + rows.stop)
            old = base.read(name, (at, *others))
            new = np.ascontiguousarray(np.asarray(piece.data[rows]))
            # Bytes, so that NaN equals itself and -0.0 is not 0.0.
            changed[at] |= (_bytes_of_rows(old) != _bytes_of_rows(new)).any(axis=1)
    return np.flatnonzero(changed)


def _bytes_of_rows(block: np.ndarray) -> np.ndarray:
    return block.reshape(-1).view(np.uint8).reshape(len(block), -1)
