"""TensorFlow's state file ``checkpoint``, which names the checkpoints of a directory."""

import contextlib
import dataclasses
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jslices.checkpoint import files
from jslices.checkpoint.archive import is_published, saved_id
from jslices.checkpoint.files import Path
from jslices.checkpoint.text_format import dump_text, parse_text
from jslices.checkpoint.trees import brief
from jslices.errors import DataLossError, NotFoundError

_log = logging.getLogger("jslices.checkpoint")

_KINDS = {
    "model_checkpoint_path": str,
    "all_model_checkpoint_paths": str,
    "all_model_checkpoint_timestamps": float,
    "last_preserved_timestamp": float,
}


@dataclasses.dataclass(frozen=True)
class CheckpointState:
    """The contents of a state file.

    Attributes:
      model_checkpoint_path: the newest checkpoint.
      all_model_checkpoint_paths: all retained checkpoints, the oldest first.
      all_model_checkpoint_timestamps: when each was saved, in seconds since 1970; empty
        unless TensorFlow's ``CheckpointManager`` wrote the file.
      last_preserved_timestamp: as that class uses it; None if the file does not have it.
    """

    model_checkpoint_path: str
    all_model_checkpoint_paths: list[str]
    all_model_checkpoint_timestamps: list[float] = dataclasses.field(default_factory=list)
    last_preserved_timestamp: float | None = None


def get_checkpoint_state(
    checkpoint_dir: Path, latest_filename: str | None = None
) -> CheckpointState | None:
    """Read the state file of a directory, written by this package or TensorFlow.

    Args:
      checkpoint_dir: the directory.
      latest_filename: the name of the state file; None means ``"checkpoint"``.

    Returns:
      A :class:`CheckpointState`, relative paths joined to ``checkpoint_dir``, as names are
      of checkpoints that were moved with it. None when there is no such file.

    Raises:
      DataLossError: for a damaged file. TensorFlow returns None, from which many a program
        takes it that training has not begun.
      ValueError: if it names no checkpoint.

    Example:
      >>> import tempfile, jslices as js
      >>> print(js.checkpoint.get_checkpoint_state(tempfile.mkdtemp()))
      None

    Source: ``tf.train.get_checkpoint_state``.
    """
    directory = os.fspath(checkpoint_dir)
    filename = _state_path(directory, latest_filename)
    try:
        state = _state(parse_text(_contents(filename)))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise DataLossError(
            f"{filename} is damaged: {error}. Restore a checkpoint by its path, or write "
            "the file anew with update_checkpoint_state"
        ) from error
    if not state.model_checkpoint_path:
        raise ValueError(
            f"Invalid checkpoint state loaded from {filename}: it has no "
            "model_checkpoint_path. Remove the file, or write it anew with "
            "update_checkpoint_state"
        )
    newest = _located(state.model_checkpoint_path, directory)
    paths = [_located(path, directory) for path in state.all_model_checkpoint_paths]
    return dataclasses.replace(
        state, model_checkpoint_path=newest, all_model_checkpoint_paths=paths
    )


def latest_checkpoint(
    checkpoint_dir: Path, latest_filename: str | None = None
) -> str | None:
    """Return the newest checkpoint of a directory, for ``Saver.restore``.

    Takes the arguments of :func:`get_checkpoint_state`, and raises what it raises.

    Returns:
      The path that the state file names; None when there is no state file, or no checkpoint
      in a directory that has one (which is logged).

    Raises:
      DataLossError: if the checkpoint is not there, and others are. TensorFlow returns
        None, and training begins anew and overwrites them.

    Example:
      >>> import os, tempfile, jax.numpy as jnp, jslices as js
      >>> directory = tempfile.mkdtemp()
      >>> path = os.path.join(directory, "model")
      >>> path = js.Saver().save({"w": jnp.ones(2)}, path, global_step=7)
      >>> os.path.basename(js.checkpoint.latest_checkpoint(directory))
      'model-7'

    Source: ``tf.train.latest_checkpoint``.
    """
    state = get_checkpoint_state(checkpoint_dir, latest_filename)
    if state is None:
        return None
    directory, path = os.fspath(checkpoint_dir), state.model_checkpoint_path
    if _is_checkpoint(path):
        return path
    filename = _state_path(directory, latest_filename)
    names = sorted(os.listdir(directory or "."))
    ours = [x for x in names if saved_id(os.path.join(directory, x)) is not None]
    if others := [*ours, *(x for x in names if x.endswith(".index"))]:
        raise DataLossError(
            f"{filename} names the checkpoint {path!r}, which is not there, where there "
            f"are {brief(others)}: type update_checkpoint_state({directory!r}, path) for "
            f"the path of one of these; to begin anew, delete {filename}"
        )
    _log.error("%s names the checkpoint %r, which is not there", filename, path)
    return None


def update_checkpoint_state(
    save_dir: Path,
    model_checkpoint_path: Path,
    all_model_checkpoint_paths: Sequence[str] | None = None,
    latest_filename: str | None = None,
    all_model_checkpoint_timestamps: Sequence[float] | None = None,
    last_preserved_timestamp: float | None = None,
) -> None:
    """Write the state file of a directory, all of it or nothing.

    Args:
      save_dir: the directory. If it is relative, relative paths become relative to it.
      model_checkpoint_path: like the next ones of :class:`CheckpointState`.
      all_model_checkpoint_paths: the newest is appended to them unless it is the last.
      latest_filename: the name of the state file; None means ``"checkpoint"``.
      all_model_checkpoint_timestamps: one for each path, or none.
      last_preserved_timestamp: written as it is.

    Raises:
      RuntimeError: if the checkpoint's path is that of the state file.
      ValueError: if there are timestamps, but not one for each path.
      NotFoundError: (a ``FileNotFoundError``) if the directory does not exist.

    Example:
      >>> import tempfile, jslices as js
      >>> directory = tempfile.mkdtemp()
      >>> js.checkpoint.update_checkpoint_state(directory, "m-2", ["m-1"])
      >>> print(open(f"{directory}/checkpoint").read(), end="")
      model_checkpoint_path: "m-2"
      all_model_checkpoint_paths: "m-1"
      all_model_checkpoint_paths: "m-2"

    Source: ``tf.train.update_checkpoint_state``, which also appends to the caller's list.
    """
    state = CheckpointState(
        os.fspath(model_checkpoint_path),
        list(all_model_checkpoint_paths or ()),
        list(all_model_checkpoint_timestamps or ()),
        last_preserved_timestamp,
    )
    filename, text = new_state(os.fspath(save_dir), state, latest_filename)
    directory = os.path.dirname(filename)
    with files.directory_lock(directory, exclusive=True):
        files.clean(directory, is_published)
    notes = doomed_text(doomed_in(directory, latest_filename))
    with files.replacing(filename) as descriptor:
        files.write_and_flush(descriptor, text + notes)
    files.sync_directory(directory)


def new_state(
    directory: str, state: CheckpointState, latest_filename: str | None
) -> tuple[str, str]:
    """The path and the text of the file that :func:`update_checkpoint_state` writes."""
    newest, times = state.model_checkpoint_path, state.all_model_checkpoint_timestamps
    paths = [os.fspath(path) for path in state.all_model_checkpoint_paths]
    if not paths or paths[-1] != newest:
        paths.append(newest)
    if times and len(times) != len(paths):
        raise ValueError(
            f"there are {len(times)} timestamps for {len(paths)} checkpoints: {paths}"
        )
    if not os.path.isabs(directory):
        newest = _relative(newest, directory)
        paths = [_relative(path, directory) for path in paths]
    filename = _state_path(directory, latest_filename)
    if filename in (newest, os.path.join(directory, newest)):
        raise RuntimeError(
            f"Save path {newest!r} conflicts with path used for checkpoint state. "
            "Please use a different save path."
        )
    if not os.path.isdir(directory or "."):
        raise NotFoundError(f"the directory {directory!r} does not exist; create it first")
    state = CheckpointState(newest, paths, times, state.last_preserved_timestamp)
    return filename, dump_text(_fields(state))


def _contents(filename: str) -> bytes:
    """Read a state file, or the newer one that a killed save was about to put there."""
    with files.directory_lock(os.path.dirname(filename), exclusive=False):
        for temporary, save_id in files.temporaries_of(filename):
            if is_published(temporary, filename, save_id):
                filename = temporary
                break
        with open(filename, "rb") as file:
            return file.read()


# --- checkpoints to be deleted --------------------------------------------------------

# They are named in comments at the end of a state file, which TensorFlow skips.
_DOOMED, _SAVED_AS = "to_be_deleted", "saved_as"


def doomed_text(doomed: Mapping[str, str]) -> str:
    """Comments that name checkpoints to be deleted, and the ids of their saves."""
    notes = (dump_text([(_DOOMED, n), (_SAVED_AS, i)]) for n, i in doomed.items())
    return "".join(f"# {' '.join(note.splitlines())}\n" for note in notes)


def doomed_in(checkpoint_dir: str, latest_filename: str | None) -> dict[str, str]:
    """Read what :func:`doomed_text` wrote at the end of a state file."""
    doomed = {}
    with contextlib.suppress(OSError):
        for line in _contents(_state_path(checkpoint_dir, latest_filename)).splitlines():
            if line.startswith(f"# {_DOOMED}: ".encode()):
                with contextlib.suppress(ValueError):
                    (_, name), (_, save_id) = parse_text(line.removeprefix(b"# "))
                    if os.path.basename(str(name)) == name:  # nothing in other directories
                        doomed[name] = str(save_id)
    return doomed


def _is_checkpoint(path: str) -> bool:
    return files.checkpoint_exists(path) or os.path.exists(path + ".index")  # TensorFlow's


def _located(path: str, directory: str) -> str:
    """Where a checkpoint is; beside the state file, if both were moved together."""
    beside = os.path.join(directory, os.path.basename(path))
    if os.path.isabs(path) and not _is_checkpoint(path) and _is_checkpoint(beside):
        return beside
    return os.path.join(directory, path)


def _state_path(directory: str, latest_filename: str | None) -> str:
    return os.path.join(directory, latest_filename or "checkpoint")


def _relative(path: str, directory: str) -> str:
    """A relative path as seen from ``directory``; an absolute one as it is."""
    return path if os.path.isabs(path) else os.path.relpath(path, directory or ".")


def _fields(state: CheckpointState) -> Iterable[tuple[str, str | float]]:
    for name, value in dataclasses.asdict(state).items():
        values = value if isinstance(value, list) else [value]
        yield from ((name, each) for each in values if each is not None)


def _state(fields: list[tuple[str, str | float]]) -> CheckpointState:
    values: dict[str, list[Any]] = {name: [] for name in _KINDS}
    for name, value in fields:
        if not isinstance(value, _KINDS.get(name, ())):
            raise ValueError(f"it has the unexpected field {name}: {value!r}")
        values[name].append(value)
    newest, paths, times, preserved = values.values()
    if any("\0" in path for path in [*newest, *paths]):
        raise ValueError("a path has a NUL in it")
    if len(newest) > 1 or len(preserved) > 1:
        raise ValueError("a field that may occur once occurs twice")
    return CheckpointState(
        next(iter(newest), ""), paths, times, next(iter(preserved), None)
    )
