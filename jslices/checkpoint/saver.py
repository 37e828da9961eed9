"""Saver: checkpoints of any pytree, with TensorFlow's names, retention and state file."""

import copy
import dataclasses
import itertools
import operator
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike

from jslices import InvalidArgumentError
from jslices._densify import warn_at_line
from jslices._slices.held import held_where, unheld
from jslices._typing import PyTree
from jslices.checkpoint import files, state_file, trees, writing
from jslices.checkpoint.archive import Archive
from jslices.checkpoint.deltas import delta_part, open_base
from jslices.checkpoint.files import Path
from jslices.checkpoint.leaves import Leaf, as_leaf, misfit, restore, restore_like
from jslices.checkpoint.processes import ALONE, Processes, processes_of
from jslices.checkpoint.retention import Retention
from jslices.errors import DataLossError, NotFoundError
from jslices.optim.engine.clock import OLD_CLOCK, OTHER_NUMBERS


@dataclasses.dataclass(frozen=True)
class SaverDef:
    """The options of a ``Saver``, under the names of TensorFlow's ``SaverDef``.

    There is no graph, and so no names of its tensors.
    """

    max_to_keep: int = 5
    sharded: bool = False
    keep_checkpoint_every_n_hours: float = 10000.0

    LEGACY, V1, V2 = range(3)  #: of ``write_version``; there is one format of files


_PATHS = (str, os.PathLike)
#: Of tables in boxes.
_HELD_ALONE = (
    "rows of {} may be behind, and the state by which they catch up is not among what is "
    'saved: save {{"params": params, "state": state}}, or tx.now(params, state) alone'
)
#: Advice for arguments that only TensorFlow's Saver has.
_INSTEAD = {
    "builder": "arrays are written as they lie on the devices: sharded=True",
    "defer_build": "there is no graph to build, so leave it out",
    "filename": "give the path to save and restore",
    "write_version": "there is one format of files, so leave it out",
}


class Saver:
    """Saves and restores variables: any pytree, optimizer states and random keys included.

    A checkpoint is one safetensors file at ``path``, or one for each shard at
    ``path-00000-of-00004`` and so on. Every tensor and the header carry a checksum. A file
    is written under another name, flushed to the disk, and renamed, the state file
    together with the checkpoint: whatever happens in between, the last checkpoint can be
    restored and the state file names it. Opening a file checks the description in it.

    If variables are spread over several processes, all of them call :meth:`save` and
    :meth:`restore`, with one path in a directory that they share. Values that each process
    has on its own, a number or an array on its devices, are saved from process 0. If one
    fails, all raise.

    The name of a variable is its path in the tree: ``"params/table"``, ``"state/0/mu"``.
    Keys that contain slashes are names already: ``{"params/table": ...}``.

    Args:
      var_list: the names of the variables to save and restore, where a name includes all
        variables below it; or a dict ``{name in the checkpoint: name in the variables}``;
        None for all. A handle, and ``"v:0"``, mean the name ``"v"``.
      reshape: allows :meth:`restore` to give an array another shape of as many elements.
      sharded: writes one file for each shard of the variables, straight from its device.
        Without it there is one file, into which a sharded array is written by blocks of
        rows. Neither gathers a table. Variables that are spread over several processes are
        always sharded, and each process writes what its devices hold.
      max_to_keep: the number of checkpoints to keep; the oldest is deleted first. None or
        0 keeps all, and then ``last_checkpoints`` stays empty. Checkpoints that cannot be
        deleted yet are named in comments of the state file and deleted with a later save,
        also by another process.
      keep_checkpoint_every_n_hours: of those that would be deleted, one is kept for every
        period of this length, counted from now.
      name: changes nothing: there is no graph, in which it would name operations.
      restore_sequentially: changes nothing: arrays are read one after another anyway.
      saver_def: takes ``sharded``, ``max_to_keep`` and ``keep_checkpoint_every_n_hours``
        from another Saver's ``as_saver_def()``.
      allow_empty: True allows a checkpoint without variables.
      pad_step_number: the step is written with at least eight digits.
      save_relative_paths: the state file holds relative paths: its directory can be moved.

    Raises:
      TypeError: if ``var_list`` contains anything but names and handles, or for an
        argument that only TensorFlow's has, saying what to do instead.
      ValueError: if ``var_list`` is empty or names a variable twice.

    Example:
      >>> import os, tempfile, jax.numpy as jnp, jslices as js
      >>> directory = tempfile.mkdtemp()
      >>> variables = {"table": jnp.zeros((4, 2)), "step": 3}
      >>> saver = js.Saver(max_to_keep=3)
      >>> path = saver.save(variables, f"{directory}/model", global_step=3)
      >>> sorted(os.listdir(directory))
      ['checkpoint', 'model-3']
      >>> saver.restore(js.checkpoint.latest_checkpoint(directory))["step"]
      3

    Source: ``tf.train.Saver``. There variables belong to a session; here they are given
    to ``save`` and returned by ``restore``. The names of the files are those of
    TensorFlow's first format.
    """

    def __init__(
        self,
        var_list: Sequence[str] | Mapping[str, str] | None = None,
        reshape: bool = False,
        sharded: bool = False,
        max_to_keep: int | None = 5,
        keep_checkpoint_every_n_hours: float = 10000.0,
        name: str | None = None,
        restore_sequentially: bool = False,
        saver_def: SaverDef | None = None,
        allow_empty: bool = False,
        pad_step_number: bool = False,
        save_relative_paths: bool = True,
        **theirs: None,
    ) -> None:
        for argument in theirs:
            instead = _INSTEAD.get(argument, "see help(Saver)")
            raise TypeError(f"Saver has no argument {argument!r}: {instead}")
        if saver_def is not None:
            sharded, max_to_keep = saver_def.sharded, saver_def.max_to_keep
            keep_checkpoint_every_n_hours = saver_def.keep_checkpoint_every_n_hours
        self._var_list = trees.check_var_list(var_list, allow_empty)
        self._reshape, self._sharded = reshape, sharded
        self._allow_empty, self._pad = allow_empty, pad_step_number
        self._save_relative_paths = save_relative_paths
        self._retention = Retention(max_to_keep, keep_checkpoint_every_n_hours)
        #: Path and id of the last save or restore, on which a delta builds.
        self._previous: tuple[str, str] | None = None

    def as_saver_def(self) -> SaverDef:
        """The options, for ``Saver(saver_def=...)``."""
        retention = self._retention
        limits = retention.max_to_keep, self._sharded, retention.every_n_hours
        return SaverDef(*limits)

    # --- saving -----------------------------------------------------------------------

    def save(
        self,
        variables: PyTree,
        path: Path,
        global_step: str | ArrayLike | None = None,
        latest_filename: str | None = None,
        write_state: bool = True,
    ) -> str:
        """Saves variables, updates the state file, and deletes old checkpoints.

        Args:
          variables: a pytree of arrays of any dtype, numbers, strings and random keys.
            They are saved as they are: of an optimizer with ``untouched="exact"``
            parameters and state together, or ``tx.now(params, state)`` alone.
          path: the path of the checkpoint; its directory must exist.
          global_step: an integer, or the name of a variable that holds one, to be
            appended: ``path-7``.
          latest_filename: the name of the state file; None means ``"checkpoint"``.
          write_state: False leaves the state file and ``last_checkpoints`` alone.

        Returns:
          The path of the checkpoint, for :meth:`restore`.

        Raises:
          ValueError: if the directory does not exist, there is nothing to save, or the
            path is taken by something else.
          TypeError: if something cannot be saved, or the step is not an integer.
          OSError: if the files cannot be written. It says whether the checkpoint is on the
            disk nevertheless; if not, what was there before is unchanged. Also if another
            process has failed, or has died (``ConnectionError``).
          InvalidArgumentError: if several processes give other names, spread arrays, paths
            or directories than the first.

        Cost: reads every element once; 64 MiB of additional memory for variables that are
        sharded or not on the host.
        """
        if isinstance(variables, _PATHS) and not isinstance(path, _PATHS):
            raise TypeError("save wants the variables first: save(variables, path)")
        variables = trees.without_handles(variables)
        processes = processes_of(variables)
        sharded = self._sharded or processes.count > 1
        with processes.barrier():
            leaves, info = self._leaves(variables)
            step = _step_number(global_step, variables)
            prefix = files.checkpoint_path(path, step, latest_filename, self._pad, sharded)
            if files.checkpoint_exists(prefix):
                if os.path.abspath(prefix) in self._retention.needed_bases():
                    raise InvalidArgumentError(
                        f"saved deltas build on {prefix}, so it cannot be overwritten; "
                        "give another path or global_step"
                    )
        writing.check_equal(leaves, processes)
        parts: list[writing.Part | None]
        if sharded:
            parts = writing.in_shards(leaves, processes)
        else:
            parts = [{name: leaf.tensor() for name, leaf in leaves.items()}]
        how = sharded, latest_filename, write_state, processes
        return self._commit(prefix, parts, info, *how)

    def save_delta(
        self,
        variables: PyTree,
        path: Path,
        global_step: str | ArrayLike | None = None,
        *,
        touched: PyTree = None,
        latest_filename: str | None = None,
        write_state: bool = True,
    ) -> str:
        """Saves only those rows of tables that changed since the last checkpoint.

        A delta builds on the checkpoint that this Saver saved or restored last, a full one
        or another delta, which must be in the same directory. To restore the delta is to
        restore that base first and then to replay the rows. A base is kept for as long as
        its deltas are. Two processes that save deltas need paths of their own.

        Args:
          variables: like the other arguments that are not mentioned, as for :meth:`save`.
          path: the path of the delta, other than that of its base.
          touched: ids of the rows that changed since then, in all steps. A dict whose keys
            are names of tables or patterns (``{"*/table": ids}``), or a tree like
            ``variables`` with None for the others. Ids are integers (duplicates, and those
            out of range, are ignored), a mask ``[V]`` of bools, or IndexedSlices. Ids
            number the first axis of a table; slices and :func:`jslices.lookup_ids` as many
            as their ``row_axes``, and a mask ``[L, V]`` the first two. Rows that an exact
            optimizer has moved besides are added, if its state is among the variables.
            Variables that are not mentioned are saved whole, and such whose rows and their
            numbers would take no fewer bytes. None compares all variables with the base.

        Returns:
          The path of the delta, for :meth:`restore`.

        Raises:
          ValueError: if there is no base, and as :meth:`save`; for slices of tables of
            other sizes; for ``touched`` without a row that changed, if it is among 1,024
            that are compared.
          NotFoundError: if the base is gone, or ``touched`` names an unknown variable.
          DataLossError: if the base is damaged or has been overwritten.

        Cost: reads and writes the touched rows, and the variables that are saved whole;
        reads 1,024 other rows of each table, here and in the base, and of an exact
        optimizer its log and a number a row; with ``touched=None`` reads everything, and
        the base. A delta is always one file.
        """
        variables = trees.without_handles(variables)
        if processes_of(variables).count > 1:
            raise InvalidArgumentError(
                "these variables are spread over several processes, and a delta is one "
                "file of one process; call save in all of them"
            )
        leaves, info = self._leaves(variables)
        step, sharded = _step_number(global_step, variables), self._sharded
        prefix = files.checkpoint_path(path, step, latest_filename, self._pad, sharded)
        base = open_base(prefix, self._previous)
        part, row_names = delta_part(leaves, touched, base)
        name = os.path.basename(base.prefix)
        info["delta"] = {"base": name, "base_id": base.info.save_id, "rows": row_names}
        return self._commit(prefix, [part], info, False, latest_filename, write_state)

    def _leaves(self, variables: PyTree) -> tuple[dict[str, Leaf], dict[str, Any]]:
        """The leaves to save, by name, and their description in the checkpoint."""
        names, values, _ = trees.named_leaves(variables)
        chosen = trees.choose(names, self._var_list, "the variables hold")
        if not chosen and not self._allow_empty:
            raise ValueError("No variables to save: the tree has no leaves")
        by_name = dict(zip(names, values, strict=True))
        leaves = {saved: as_leaf(name, by_name[name]) for saved, name in chosen.items()}
        specs = {n: dataclasses.astuple(leaf.spec) for n, leaf in leaves.items()}
        info: dict[str, Any] = {"variables": specs}
        if self._var_list is None:
            info["structure"] = trees.describe(unheld(variables))
        in_boxes = set(itertools.compress(names, trees.held_leaves(variables)))
        if held := [saved for saved, name in chosen.items() if name in in_boxes]:
            info["held"] = held
            if not any(trees.clocks_in(leaves)):
                warn_at_line(_HELD_ALONE.format(trees.brief(held)), category=UserWarning)
        return leaves, info

    def _commit(
        self,
        prefix: str,
        parts: Sequence[writing.Part | None],
        info: dict[str, Any],
        sharded: bool,
        latest_filename: str | None,
        write_state: bool,
        processes: Processes = ALONE,
    ) -> str:
        retention = copy.deepcopy(self._retention)  # a save that fails changes nothing
        directory, state = os.path.dirname(prefix), None
        save_id = processes.allgather_text(files.new_id())[0]
        with processes.barrier():
            if write_state:
                doomed = state_file.doomed_in(directory, latest_filename)
                retention.take_over_doomed(directory, doomed)
                retention.record(prefix, save_id)
                state_path, text = self._new_state(prefix, retention.paths, latest_filename)
                notes = state_file.doomed_text(retention.doomed_in(directory))
                state = state_path, text + notes
            else:
                retention.keep(prefix, save_id)
        writing.Save(prefix, save_id, parts, info, sharded, state, processes).run()
        self._previous, self._retention = (prefix, save_id), retention
        with processes.barrier():  # then the directory is the same for all of them
            if not processes.is_first:
                retention.leave_old()
            elif write_state:
                retention.delete_old()
                if notes and not retention.doomed_in(directory):
                    files.shorten(state_path, text, notes)
        return prefix

    def _new_state(
        self, prefix: str, paths: list[str], latest_filename: str | None
    ) -> tuple[str, str]:
        directory, newest = os.path.dirname(prefix), prefix
        if self._save_relative_paths:
            # To an absolute directory, or TensorFlow's rule would apply once more.
            directory = os.path.abspath(directory)
            newest, *paths = (os.path.relpath(p, directory) for p in (newest, *paths))
        named = state_file.CheckpointState(newest, paths)
        return state_file.new_state(directory, named, latest_filename)

    # --- restoring --------------------------------------------------------------------

    def restore(
        self,
        path: Path,
        variables: PyTree = None,
        rows: Mapping[str, slice] | None = None,
    ) -> PyTree:
        """Reads a checkpoint, checking every tensor it reads.

        Args:
          path: a path that :meth:`save` or ``latest_checkpoint(directory)`` returned, or
            that of any safetensors file, or of ``model.safetensors.index.json``.
          variables: a pytree to restore into: only its variables are read, each as the same
            kind of leaf (a JAX or NumPy array, a number), onto its sharding. A
            ``jax.ShapeDtypeStruct``, with its ``sharding=``, is enough. None restores all,
            as it was saved; nodes other than dicts, lists, tuples and IndexedSlices come
            back as dicts.
          rows: ``{name or pattern: slice(start, stop)}``, ranges of the rows of tables
            ``[V, *D]`` (``{"*/table": ...}``: of its state arrays as well). A table comes
            back as ``[stop - start, *D]``; it must have that shape in ``variables``.
            Other variables are restored whole.

        Returns:
          A tree like ``variables``; leaves that ``var_list`` leaves out are unchanged.

        Raises:
          ValueError: if there is no checkpoint at ``path``.
          NotFoundError: if variables, a shard, or the base of a delta are missing.
          InvalidArgumentError: if shapes or dtypes differ, or a range of rows is not
            within the table; for rows that are behind by other numbers (momentum, ``b1``).
          DataLossError: if a file is damaged, or is not what a Saver writes.
          OSError: if another process has failed, or has died (``ConnectionError``).

        Warns of parameters, or the state of an exact optimizer, that are restored without
        the clock of rows that have not caught up.

        Cost: at most the memory of one more table than is returned. Only the shards of a
        sharded array are read, and only these ``rows``, in chunks of 4 MiB.

        Example:
          >>> import tempfile, jax.numpy as jnp, jslices as js
          >>> tree = {"table": jnp.arange(12.0).reshape(6, 2), "step": 3}
          >>> path = js.Saver().save(tree, f"{tempfile.mkdtemp()}/model")
          >>> js.Saver().restore(path, rows={"table": slice(2, 4)})["table"]
          Array([[4., 5.],
                 [6., 7.]], dtype=float32)

        Source: ``tf.train.Saver.restore``; ``rows`` is the slice of a partitioned
        variable, which TensorFlow writes as ``"6 2 2,2:0,2"``.
        """
        if isinstance(variables, _PATHS) and not isinstance(path, _PATHS):
            raise TypeError(
                "restore wants the path first: restore(path, variables); the order of "
                "TensorFlow is that of jslices.tf1.train.Saver"
            )
        variables = trees.without_handles(variables)
        processes = processes_of(variables)
        with processes.barrier():
            if path is None:
                raise ValueError(
                    "Can't load save_path when it is None. The folder has no checkpoint yet"
                )
            archive = Archive(os.fspath(path))
            if variables is None:
                restored = self._restore_all(archive, rows)
            else:
                restored = self._restore_into(archive, variables, rows)
        processes.check_agreement(
            f"{os.path.basename(archive.prefix)!r} of the save {archive.info.save_id!r}",
            "give all processes the path of one checkpoint in a directory that they share",
        )
        self._previous = (archive.prefix, archive.info.save_id)
        return restored

    def _restore_all(self, archive: Archive, rows: Mapping[str, slice] | None) -> PyTree:
        inverse = self._var_list
        if isinstance(inverse, Mapping):
            inverse = {name: saved for saved, name in inverse.items()}
        saved_as = trees.choose(list(archive.specs), inverse, f"{archive.prefix} holds")
        if rows is not None:
            archive.narrow(rows, saved_as)
        leaves = {
            name: restore(saved, archive.specs[saved], partial(archive.read, saved))
            for name, saved in saved_as.items()
        }
        whole = self._var_list is None and archive.info.has_structure
        try:
            tree = trees.rebuild(archive.info.structure, leaves) if whole else leaves
            names, *_ = trees.named_leaves(tree) if whole else (list(leaves),)
            return held_where(tree, [n in archive.info.held for n in names])
        except RecursionError as error:
            raise DataLossError(
                f"{archive.prefix} cannot be read: its structure is nested too deeply; "
                "give variables to restore into"
            ) from error

    def _restore_into(
        self, archive: Archive, variables: PyTree, rows: Mapping[str, slice] | None
    ) -> PyTree:
        names, templates, structure = trees.named_leaves(variables)
        chosen = trees.choose(names, self._var_list, "the variables hold")
        missing = sorted(saved for saved in chosen if saved not in archive.specs)
        if missing:
            has_clock = next(trees.clocks_in(archive.specs), None)
            old = has_clock and any(re.search("(?:^|/)clock/", x) for x in missing)
            hint = f". {OLD_CLOCK}" if old else ""
            raise NotFoundError(
                f"Restoring from checkpoint failed: {archive.prefix} holds no {missing}; "
                f"it holds {trees.brief(archive.specs)}{hint}"
            )
        saved_as = {name: saved for saved, name in chosen.items()}
        if rows is not None:
            archive.narrow(rows, saved_as)
        targets = [
            (name, saved_as[name], archive.specs[saved_as[name]], template)
            for name, template in zip(names, templates, strict=True)
            if name in saved_as
        ]
        problems = [misfit(n, spec, x, self._reshape) for n, _, spec, x in targets]
        if bad := list(filter(None, problems)):
            raise InvalidArgumentError(
                f"Restoring from checkpoint failed: in {archive.prefix} {trees.listed(bad)}"
            )
        _check_clocks(archive, {saved: x for _, saved, _, x in targets})
        restored = {
            name: restore_like(saved, spec, partial(archive.read, saved), template)
            for name, saved, spec, template in targets
        }
        leaves = [restored.get(n, x) for n, x in zip(names, templates, strict=True)]
        held = [
            is_held or saved_as.get(name) in archive.info.held
            for name, is_held in zip(names, trees.held_leaves(variables), strict=True)
        ]
        return held_where(jax.tree.unflatten(structure, leaves), held)

    # --- retained checkpoints ---------------------------------------------------------

    @property
    def last_checkpoints(self) -> list[str]:
        """The paths of the retained checkpoints, the oldest first; a new list."""
        return self._retention.paths

    def set_last_checkpoints(self, last_checkpoints: list[str]) -> None:
        """Takes over a list of paths, which will not be deleted.

        See :meth:`recover_last_checkpoints` for paths to be deleted in turn.

        Raises:
          TypeError: if it is not a list. (TensorFlow: AssertionError.)
        """
        if not isinstance(last_checkpoints, list):
            raise _NotAList(
                f"last_checkpoints must be a list, not {type(last_checkpoints).__name__}"
            )
        self._retention.replace(last_checkpoints)

    def recover_last_checkpoints(self, checkpoint_paths: Sequence[str]) -> None:
        """Takes over the checkpoints of an earlier run, to be deleted in their turn.

        Args:
          checkpoint_paths: the oldest first, for example
            ``get_checkpoint_state(directory).all_model_checkpoint_paths``. Those that
            no longer exist are left out, and files that no Saver wrote are never deleted.
        """
        self._retention.recover(os.fspath(path) for path in checkpoint_paths)


class _NotAList(TypeError, AssertionError):
    """TensorFlow's AssertionError, which is a TypeError."""


def _step_number(step: Any, variables: PyTree) -> int | None:
    """The step as an integer; it may be the value of a variable."""
    if step is None:
        return None
    if isinstance(step, str):
        names, values, _ = trees.named_leaves(variables)
        name = trees.resolve_name(step, names)
        if name not in names:
            raise NotFoundError(
                f"global_step={step!r} is not a variable; there are {trees.brief(names)}"
            )
        step = values[names.index(name)]
    try:
        if isinstance(step, bool | np.bool_) or np.ndim(step):
            raise TypeError
        return operator.index(step.item() if hasattr(step, "item") else step)
    except TypeError:
        raise TypeError(
            "global_step must be an integer, an array of one, or the name of a variable, "
            f"not {step!r}"
        ) from None


def _check_clocks(archive: Archive, restored: Mapping[str, Any]) -> None:
    """Refuse states of other numbers whose rows are behind; warn where a part is left out.

    ``restored`` has the variables that take what was saved, by its names.
    """
    for at in trees.clocks_in(archive.specs):
        clock, table, _ = at
        state, numbers = clock.removesuffix("clock/"), f"{clock}numbers"
        mine, other = restored.get(numbers), False
        if mine is not None and not isinstance(mine, jax.ShapeDtypeStruct):
            other = archive.read(numbers)[0] != np.asarray(mine)[0]
        specs = archive.specs.items()  # of earlier versions also arrays without elements
        held = (x for x, spec in specs if x.startswith(clock) and 0 not in spec.shape)
        unread = any(x not in restored for x in held)
        its = (x for x in restored if state and not x.startswith(state))
        goes_on = f"{state}count" in restored or any(f"/{x}".endswith(table) for x in its)
        if not (other or (unread and goes_on and f"{state}count" in archive.specs)):
            continue
        if trees.row_clock(at, archive.specs, archive.read).is_late.any():
            if other:
                raise InvalidArgumentError(f"{archive.prefix}: {OTHER_NUMBERS}")
            warnings.warn(
                f"{archive.prefix}: rows are behind in {clock[:-1]}, of which not all is "
                "restored: the steps that they missed are lost. Restore it into the "
                "state of the same optimizer, then params, state = tx.flush(params, state)",
                stacklevel=4,
            )
