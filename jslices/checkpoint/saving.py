"""The part of Saver that saves, whole checkpoints and deltas."""

import dataclasses
import os
from typing import Any

from jslices._errors import InvalidArgumentError
from jslices.checkpoint import files
from jslices.checkpoint.delta import base_for_delta, part_of_delta
from jslices.checkpoint.leaves import Leaf, as_leaf
from jslices.checkpoint.names import choose, named_leaves, plain
from jslices.checkpoint.paths import Path, checkpoint_path, step_number
from jslices.checkpoint.retention import Retention
from jslices.checkpoint.shards import Part, by_device, whole, write_checkpoint
from jslices.checkpoint.state_file import update_checkpoint_state
from jslices.checkpoint.structure import describe


class SavingMethods:
    """``save`` and ``save_delta``, with the options and the memory of a Saver."""

    _var_list: Any
    _sharded: bool
    _allow_empty: bool
    _pad: bool
    _save_relative_paths: bool
    _retention: Retention
    _previous: tuple[str, str] | None  #: path and id, for the next delta

    def save(
        self,
        variables: Any,
        path: Path,
        global_step: Any = None,
        latest_filename: str | None = None,
        write_state: bool = True,
    ) -> str:
        """Saves variables, notes that in the state file, and deletes old checkpoints.

        Args:
          variables: a pytree of arrays of any dtype, numbers, strings and random keys.
          path: where; its directory must be there.
          global_step: is appended: ``path-7``. An integer, or the name of a variable that
            holds one.
          latest_filename: the name of the state file; None means ``"checkpoint"``.
          write_state: False leaves the state file and ``last_checkpoints`` alone.

        Returns:
          The path of the checkpoint, for :meth:`restore`.

        Raises:
          ValueError: if the directory is not there, there is nothing to save, or the path
            is that of something else.
          TypeError: if something cannot be saved, or the step is no integer.
          OSError: if the files cannot be written; nothing has changed then.

        Cost: reads every element once. Beyond the variables themselves, 64 MiB of memory
        for those that are sharded or not on the host.
        """
        leaves, info = self._leaves(variables)
        prefix = self._path(variables, path, global_step, latest_filename)
        if files.checkpoint_exists(prefix):
            if os.path.abspath(prefix) in self._retention.needed_bases():
                raise InvalidArgumentError(
                    f"{prefix} is what saved deltas build on, so it cannot be overwritten; "
                    "give another path or global_step"
                )
        parts = by_device(leaves) if self._sharded else whole(leaves)
        return self._commit(
            prefix, parts, info, self._sharded, latest_filename, write_state
        )

    def save_delta(
        self,
        variables: Any,
        path: Path,
        global_step: Any = None,
        *,
        touched: Any = None,
        latest_filename: str | None = None,
        write_state: bool = True,
    ) -> str:
        """Saves of tables only the rows that changed since the last checkpoint.

        It builds on what this Saver saved or restored last, full or itself a delta, which
        must be in the same directory. Restoring it restores that first and then replays
        the rows. What it builds on is not deleted while it is kept. Two processes that
        save deltas need paths of their own.

        Args:
          variables: as for :meth:`save`.
          path: where; not the path of the checkpoint that it builds on.
          global_step: as for :meth:`save`.
          touched: ids of the rows that changed since then. A dict whose keys are names of
            tables or patterns (``{"*/table": ids}``), or a tree like ``variables`` with
            None where nothing is said. Ids are integers (duplicates, and those out of
            range, do not matter), a mask ``[V]`` of bools, or IndexedSlices. Variables
            of which nothing is said are saved whole. None compares all with what was
            saved.
          latest_filename: as for :meth:`save`.
          write_state: as for :meth:`save`.

        Returns:
          The path of the delta, for :meth:`restore`.

        Raises:
          ValueError: if there is nothing to build on, and as :meth:`save`.
          NotFoundError: if that is gone, or ``touched`` names no variable.
          DataLossError: if that is damaged, or has been overwritten.

        Cost: reads and writes the touched rows, and the variables that are saved whole;
        with ``touched=None`` reads everything, and what it builds on. It is always one
        file.
        """
        leaves, info = self._leaves(variables)
        prefix = self._path(variables, path, global_step, latest_filename)
        base = base_for_delta(prefix, self._previous)
        part, row_names = part_of_delta(leaves, touched, base)
        name = os.path.basename(base.prefix)
        info["delta"] = {"base": name, "base_id": base.save_id, "rows": row_names}
        return self._commit(prefix, [part], info, False, latest_filename, write_state)

    def _commit(
        self,
        prefix: str,
        parts: list[Part],
        info: dict[str, Any],
        sharded: bool,
        latest_filename: str | None,
        write_state: bool,
    ) -> str:
        save_id = write_checkpoint(prefix, parts, info, sharded)
        self._previous = (prefix, save_id)
        if write_state:
            self._retention.record(prefix, save_id)
            directory = os.path.dirname(prefix)
            newest, paths = prefix, self._retention.paths
            if self._save_relative_paths:
                # To an absolute directory, or TensorFlow's rule would apply once more.
                directory = os.path.abspath(directory)
                newest, *paths = (os.path.relpath(p, directory) for p in (newest, *paths))
            update_checkpoint_state(directory, newest, paths, latest_filename)
            self._retention.delete_old()
        else:
            self._retention.note_unlisted(prefix)
        return prefix

    def _leaves(self, variables: Any) -> tuple[dict[str, Leaf], dict[str, Any]]:
        variables = plain(variables)
        names, values, _ = named_leaves(variables)
        chosen = choose(names, self._var_list, "the variables hold")
        if not chosen and not self._allow_empty:
            raise ValueError("No variables to save: the tree has no leaves")
        by_name = dict(zip(names, values, strict=True))
        leaves = {saved: as_leaf(name, by_name[name]) for saved, name in chosen.items()}
        specs = {n: dataclasses.astuple(leaf.spec) for n, leaf in leaves.items()}
        info: dict[str, Any] = {"variables": specs}
        if self._var_list is None:
            info["structure"] = describe(variables)
        return leaves, info

    def _path(
        self, variables: Any, path: Path, global_step: Any, latest_filename: str | None
    ) -> str:
        step = step_number(global_step, variables)
        return checkpoint_path(path, step, latest_filename, self._pad, self._sharded)
