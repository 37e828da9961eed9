"""Retention of checkpoints, by the rules of TensorFlow's Saver."""

import contextlib
import logging
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from jslices.checkpoint import files
from jslices.checkpoint.archive import base_of, saved_id

_log = logging.getLogger("jslices.checkpoint")


class _Saved(NamedTuple):
    """A checkpoint; without the id of its save it is never deleted."""

    path: str
    time: float
    save_id: str | None


class Retention:
    """The last checkpoints in the order of their saves.

    The base of a delta is retained for as long as the delta is.
    """

    def __init__(self, max_to_keep: int | None, every_n_hours: float) -> None:
        self.max_to_keep = max(max_to_keep or 0, 0)
        self.every_n_hours = every_n_hours
        self._next_keep_time = time.time() + every_n_hours * 3600
        self._last: list[_Saved] = []
        self._permanent: list[str] = []
        #: To be deleted, unless a delta needs it: the id of the save by path.
        self._doomed: dict[str, str] = {}

    @property
    def paths(self) -> list[str]:
        """The paths of the last checkpoints, the oldest first."""
        return [each.path for each in self._last]

    def record(self, path: str, save_id: str) -> None:
        """Append a checkpoint to the list; its first one may have to be deleted."""
        self._doomed.pop(path, None)
        if not self.max_to_keep:
            return
        self._last = [each for each in self._last if each.path != path]
        self._last.append(_Saved(path, time.time(), save_id))
        if len(self._last) <= self.max_to_keep:
            return
        oldest = self._last.pop(0)
        if oldest.time > self._next_keep_time:
            self._next_keep_time += self.every_n_hours * 3600
            self._permanent.append(oldest.path)
        elif oldest.save_id is not None:
            self._doomed[oldest.path] = oldest.save_id

    def keep(self, path: str, save_id: str) -> None:
        """Retain a checkpoint permanently, unless it is in the list."""
        self._doomed.pop(path, None)
        if path not in [*self.paths, *self._permanent]:
            self._permanent.append(path)
        self._last = [
            each._replace(save_id=save_id) if each.path == path else each
            for each in self._last
        ]

    def replace(self, paths: Iterable[str]) -> None:
        """Take over a list; its entries will not be deleted."""
        self._last = [_Saved(path, math.inf, None) for path in paths]

    def recover(self, paths: Iterable[str]) -> None:
        """Take over those checkpoints that exist, with the times of their files."""
        self._last = [
            _Saved(path, os.path.getmtime(first), saved_id(first))
            for path in paths
            for first, *_ in files.families(path)[:1]
        ]

    def needed_bases(self) -> set[str]:
        """The absolute paths of all checkpoints on which the retained deltas build."""
        return _bases([*self.paths, *self._permanent])

    # --- deletion ---------------------------------------------------------------------

    def doomed_in(self, directory: str) -> dict[str, str]:
        """The names of checkpoints to be deleted in a directory, and their saves' ids."""
        here = os.path.abspath(directory)
        return {
            os.path.basename(path): save_id
            for path, save_id in self._doomed.items()
            if os.path.dirname(os.path.abspath(path)) == here
        }

    def take_over_doomed(self, directory: str, doomed: Mapping[str, str]) -> None:
        """Take over checkpoints that an earlier run was to delete."""
        retained = {os.path.abspath(path) for path in [*self.paths, *self._permanent]}
        for name, save_id in doomed.items():
            path = os.path.join(directory, name)
            if os.path.abspath(path) not in retained:
                self._doomed.setdefault(path, save_id)

    def delete_old(self) -> None:
        """Delete old checkpoints; call it once the state file does not name them.

        Those that cannot be deleted now are logged, and deleted later.
        """
        for directory in {os.path.dirname(path) for path in self._doomed}:
            with (
                _logged("the old checkpoints in", directory),
                files.directory_lock(directory, exclusive=True),
            ):
                needed = _bases(set(files.unsharded_in(directory)) - {*self._doomed})
                here = [p for p in self._doomed if os.path.dirname(p) == directory]
                for path in here:
                    if os.path.abspath(path) not in needed:
                        with _logged("the old checkpoint", path):
                            self._delete(path)

    def leave_old(self) -> None:
        """Leave the deletion of old checkpoints to another process."""
        self._doomed.clear()

    def _delete(self, path: str) -> None:
        families = files.families(path)
        # It may not be a checkpoint, or be one that another process has saved since.
        if families and self._doomed[path] == saved_id(families[0][0]):
            for family in families:
                files.remove_family(family)
        del self._doomed[path]


@contextlib.contextmanager
def _logged(what: str, path: str) -> Iterator[None]:
    """Log an error that keeps a checkpoint from being deleted."""
    try:
        yield
    except OSError as error:
        _log.warning("%s %r could not be deleted: %s", what, path, error)


def _bases(paths: Iterable[str]) -> set[str]:
    """The absolute paths of all checkpoints on which some build."""
    bases: set[str] = set()
    for path in paths:
        base = base_of(path)
        while base is not None and os.path.abspath(base) not in bases:
            bases.add(os.path.abspath(base))
            base = base_of(base)
    return bases
