"""Which checkpoints are kept, as TensorFlow's Saver decides it."""

import logging
import math
import os
import time
from collections.abc import Iterable, Sequence

from jslices.checkpoint import files
from jslices.checkpoint.archive import link
from jslices.checkpoint.shards import saved_id

_log = logging.getLogger("jslices.checkpoint")


class Retention:
    """The last checkpoints in the order in which they were saved.

    What a kept delta builds on is kept for as long as the delta is.
    """

    def __init__(self, max_to_keep: int | None, every_n_hours: float) -> None:
        self.max_to_keep = max(max_to_keep or 0, 0)
        self._interval = every_n_hours * 3600
        self._next_keep_time = time.time() + self._interval
        self.last: list[tuple[str, float]] = []
        self._evicted: list[tuple[str, float]] = []
        self._kept_for_good: list[str] = []
        self._needed_by_others: list[str] = []
        #: The id of the save that a path held when it was noted.
        self._ids: dict[str, str | None] = {}

    @property
    def paths(self) -> list[str]:
        """The paths of the last checkpoints, the oldest first."""
        return [path for path, _ in self.last]

    def record(self, path: str, save_id: str | None = None) -> None:
        """Notes a save; one that is kept no longer will go with :meth:`delete_old`."""
        self._ids[path] = save_id
        self._needed_by_others = [p for p in self._needed_by_others if p != path]
        if not self.max_to_keep:
            return
        self.last = [entry for entry in self.last if entry[0] != path]
        self.last.append((path, time.time()))
        if len(self.last) > self.max_to_keep:
            self._evicted.append(self.last.pop(0))

    def note_unlisted(self, path: str) -> None:
        """Keeps what a delta builds on that is not in the list."""
        self._kept_for_good.append(path)

    def delete_old(self) -> None:
        """Deletes what is kept no longer; call it once the state file does not name it."""
        evicted, self._evicted = self._evicted, []
        for path, saved_at in evicted:
            if saved_at > self._next_keep_time:
                self._next_keep_time += self._interval
                self._kept_for_good.append(path)
            elif saved_at < math.inf:
                self._needed_by_others.append(path)
        needed = self.needed_bases() if self._needed_by_others else set()
        for path in list(self._needed_by_others):
            if os.path.abspath(path) not in needed:
                self._needed_by_others.remove(path)
                try:
                    self._remove(path)
                except OSError as error:
                    _log.warning("%s could not be deleted: %s", path, error)

    def _remove(self, path: str) -> None:
        """Deletes a checkpoint, unless another process has saved to its path since."""
        known = self._ids.pop(path, None)
        with files.directory_lock(os.path.dirname(path), exclusive=True):
            found = files.families(path)
            if found and known is not None and saved_id(found[0][0]) != known:
                return
            files.remove_checkpoint(path)

    def needed_bases(self) -> set[str]:
        """The absolute paths of what the kept deltas build on, however indirectly."""
        needed: set[str] = set()
        for path in [*self.paths, *self._kept_for_good]:
            base = link(path)
            while base is not None and os.path.abspath(base) not in needed:
                needed.add(os.path.abspath(base))
                base = link(base)
        return needed

    def set(self, paths: Iterable[str]) -> None:
        """Takes over a list; its entries will not be deleted."""
        self.last = [(path, math.inf) for path in paths]

    def recover(self, paths: Iterable[str]) -> None:
        """Takes over the checkpoints that are there, with the times of their files."""
        self.last = []
        for path in paths:
            found = files.families(path)
            if found:
                self.last.append((path, os.path.getmtime(found[0][0])))
                self._ids[path] = saved_id(found[0][0])


class RetentionMethods:
    """What a Saver tells of the checkpoints that it keeps, and is told."""

    _retention: Retention

    @property
    def last_checkpoints(self) -> list[str]:
        """The paths of the checkpoints that are kept, the oldest first; a new list."""
        return self._retention.paths

    def set_last_checkpoints(self, last_checkpoints: list[str]) -> None:
        """Takes over a list of paths. They will not be deleted; see
        :meth:`recover_last_checkpoints`.

        Raises:
          TypeError: if it is not a list. (TensorFlow: AssertionError.)
        """
        if not isinstance(last_checkpoints, list):
            raise _NotAList(
                f"last_checkpoints must be a list, not {type(last_checkpoints).__name__}"
            )
        self._retention.set(last_checkpoints)

    def recover_last_checkpoints(self, checkpoint_paths: Sequence[str]) -> None:
        """Takes over the checkpoints of an earlier run, to be deleted in their turn.

        Args:
          checkpoint_paths: the oldest first, for example
            ``get_checkpoint_state(directory).all_model_checkpoint_paths``. Those that
            are not there are left out.
        """
        self._retention.recover(os.fspath(path) for path in checkpoint_paths)


class _NotAList(TypeError, AssertionError):
    """TensorFlow's AssertionError, which is a TypeError."""
