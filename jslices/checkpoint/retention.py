"""Which checkpoints are kept, as TensorFlow's Saver decides it."""

import logging
import math
import os
import time
from collections.abc import Iterable

from jslices.checkpoint import files
from jslices.checkpoint.archive import base_of, saved_id

_log = logging.getLogger("jslices.checkpoint")


class Retention:
    """The last checkpoints in the order in which they were saved.

    What a kept delta builds on is kept for as long as the delta is.
    """

    def __init__(self, max_to_keep: int | None, every_n_hours: float) -> None:
        self.max_to_keep = max(max_to_keep or 0, 0)
        self.every_n_hours = every_n_hours
        self._next_keep_time = time.time() + every_n_hours * 3600
        self._last: list[tuple[str, float]] = []  # path, and when it was saved
        self._kept_for_good: list[str] = []
        self._doomed: list[str] = []  # kept no longer, unless a kept delta needs it
        self._ids: dict[str, str | None] = {}  # of the save that a path held when noted

    @property
    def paths(self) -> list[str]:
        """The paths of the last checkpoints, the oldest first."""
        return [path for path, _ in self._last]

    def record(self, path: str, save_id: str) -> None:
        """Notes a save; what is kept no longer will go with :meth:`delete_old`."""
        self._ids[path] = save_id
        self._doomed = [other for other in self._doomed if other != path]
        if not self.max_to_keep:
            return
        self._last = [entry for entry in self._last if entry[0] != path]
        self._last.append((path, time.time()))
        if len(self._last) <= self.max_to_keep:
            return
        oldest, saved_at = self._last.pop(0)
        if saved_at > self._next_keep_time:
            self._next_keep_time += self.every_n_hours * 3600
            self._kept_for_good.append(oldest)
        elif saved_at < math.inf:
            self._doomed.append(oldest)

    def keep(self, path: str) -> None:
        """Keeps a checkpoint that is not in the list, with all that it builds on."""
        self._kept_for_good.append(path)

    def replace(self, paths: Iterable[str]) -> None:
        """Takes over a list; its entries will not be deleted."""
        self._last = [(path, math.inf) for path in paths]

    def recover(self, paths: Iterable[str]) -> None:
        """Takes over those checkpoints that exist, with the times of their files."""
        self._last = []
        for path in paths:
            found = files.families(path)
            if found:
                self._last.append((path, os.path.getmtime(found[0][0])))
                self._ids[path] = saved_id(found[0][0])

    def needed_bases(self) -> set[str]:
        """The absolute paths of what the kept deltas build on, however indirectly."""
        needed: set[str] = set()
        for path in [*self.paths, *self._kept_for_good]:
            base = base_of(path)
            while base is not None and os.path.abspath(base) not in needed:
                needed.add(os.path.abspath(base))
                base = base_of(base)
        return needed

    def delete_old(self) -> None:
        """Deletes what is kept no longer; call it once the state file does not name it."""
        needed = self.needed_bases() if self._doomed else set()
        for path in list(self._doomed):
            if os.path.abspath(path) not in needed:
                self._doomed.remove(path)
                try:
                    self._delete(path)
                except OSError as error:
                    _log.warning("%s could not be deleted: %s", path, error)

    def _delete(self, path: str) -> None:
        """Deletes a checkpoint, unless another process has saved to its path since."""
        known = self._ids.pop(path, None)
        with files.directory_lock(os.path.dirname(path), exclusive=True):
            found = files.families(path)
            if found and known is not None and saved_id(found[0][0]) != known:
                return
            for family in found:
                for file in family:
                    files.remove(file)
