"""The part of Saver that restores: a checkpoint read into a tree."""

import os
from collections.abc import Mapping
from typing import Any

import jax

from jslices._errors import InvalidArgumentError, NotFoundError
from jslices.checkpoint.archive import Archive
from jslices.checkpoint.names import brief, choose, named_leaves, plain
from jslices.checkpoint.paths import Path
from jslices.checkpoint.place import misfit, original, place
from jslices.checkpoint.ranges import narrow_to_rows
from jslices.checkpoint.structure import rebuild


class RestoringMethods:
    """``restore``, with the options and the memory of a Saver."""

    _var_list: Any
    _reshape: bool
    _previous: tuple[str, str] | None  #: path and id, for the next delta

    def restore(
        self,
        path: Path,
        variables: Any = None,
        rows: Mapping[str, slice] | None = None,
    ) -> Any:
        """Reads a checkpoint, checking every tensor it reads.

        Args:
          path: what :meth:`save` returned, or ``latest_checkpoint(directory)``. Also any
            safetensors file.
          variables: a pytree that says what is wanted: only its variables are read, as
            the kind of thing each is (an array of JAX's or NumPy's, a number), onto its
            sharding. A ``jax.ShapeDtypeStruct``, with its ``sharding=``, will do. None:
            everything, as it was saved; nodes other than dicts, lists, tuples and
            IndexedSlices come back as dicts.
          rows: ``{name or pattern: slice(start, stop)}``, the rows that are wanted of a
            table ``[V, *D]`` (``{"*/table": ...}``: of its slots as well). It comes back
            as ``[stop - start, *D]``, the shape that it must have in ``variables``. Of
            other variables everything is restored.

        Returns:
          A tree like ``variables``; where ``var_list`` leaves something out, its leaves
          as they were given.

        Raises:
          ValueError: if there is no checkpoint at ``path``.
          NotFoundError: if variables, a shard, or what a delta builds on, are not there.
          InvalidArgumentError: if shapes or dtypes differ, or a range of rows is not
            within the table.
          DataLossError: if a file is damaged.

        Cost: one table more than the variables hold at the end, at most. Of a sharded
        array only the shards are read, and of ``rows`` only those, in chunks of 4 MiB.

        Example:
          >>> import tempfile, jax, jax.numpy as jnp, jslices as js
          >>> tree = {"table": jnp.arange(12.0).reshape(6, 2), "step": 3}
          >>> path = js.Saver().save(tree, f"{tempfile.mkdtemp()}/model")
          >>> js.Saver().restore(path, rows={"table": slice(2, 4)})["table"]
          Array([[4., 5.],
                 [6., 7.]], dtype=float32)
          >>> struct = jax.ShapeDtypeStruct((1, 2), jnp.float32)
          >>> js.Saver().restore(path, {"table": struct}, rows={"table": slice(5, 6)})
          {'table': Array([[10., 11.]], dtype=float32)}

        Source: ``tf.train.Saver.restore``; ``rows`` is the slice of a partitioned
        variable, which TensorFlow writes as ``"6 2 2,2:0,2"``.
        """
        if path is None:
            raise ValueError("Can't load save_path when it is None.")
        archive = Archive(os.fspath(path))
        if variables is None:
            restored = restore_all(archive, self._var_list, rows)
        else:
            restored = restore_into(
                archive, plain(variables), self._var_list, self._reshape, rows
            )
        self._previous = (archive.prefix, archive.save_id)
        return restored


def restore_all(archive: Archive, var_list: Any, rows: Any = None) -> Any:
    """Everything, as it was saved, or of some tables some rows."""
    if var_list is None:
        if rows is not None:
            narrow_to_rows(archive, rows, {name: name for name in archive.specs})
        leaves = {name: original(archive, name) for name in archive.specs}
        return rebuild(archive.structure, leaves) if archive.has_structure else leaves
    inverse = var_list
    if isinstance(inverse, Mapping):
        inverse = {name: saved for saved, name in inverse.items()}
    chosen = choose(list(archive.specs), inverse, f"{archive.prefix} holds")
    if rows is not None:
        narrow_to_rows(archive, rows, chosen)
    return {name: original(archive, saved) for name, saved in chosen.items()}


def restore_into(
    archive: Archive, variables: Any, var_list: Any, reshape: bool, rows: Any = None
) -> Any:
    """What ``variables`` holds, as the kind of thing that each leaf is."""
    names, templates, structure = named_leaves(variables)
    chosen = choose(names, var_list, "the variables hold")
    saved_as = {name: saved for saved, name in chosen.items()}
    missing = sorted(saved for saved in chosen if saved not in archive.specs)
    if missing:
        raise NotFoundError(
            f"Restoring from checkpoint failed: {archive.prefix} holds no {missing}; "
            f"it holds {brief(archive.specs)}"
        )
    if rows is not None:
        narrow_to_rows(archive, rows, saved_as)
    problems = []
    for name, template in zip(names, templates, strict=True):
        if name in saved_as:
            spec = archive.specs[saved_as[name]]
            problems.append(misfit(name, spec, template, reshape))
    if any(problems):
        raise InvalidArgumentError(
            f"Restoring from checkpoint failed: in {archive.prefix} "
            + "; ".join(problem for problem in problems if problem)
        )
    leaves = [
        place(archive, saved_as[name], template) if name in saved_as else template
        for name, template in zip(names, templates, strict=True)
    ]
    return jax.tree.unflatten(structure, leaves)
