"""Which checkpoints are kept, as TensorFlow's Saver decides it."""

import contextlib
import logging
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping

from jslices.checkpoint import files
from jslices.checkpoint.archive import base_of, saved_id

_log = logging.getLogger("jslices.checkpoint")


class Retention:
    """The last checkpoints in the order in which they were saved.

    What a delta builds on is kept for as long as the delta is.
    """

    def __init__(self, max_to_keep: int | None, every_n_hours: float) -> None:
        self.max_to_keep = max(max_to_keep or 0, 0)
        self.every_n_hours = every_n_hours
        self._next_keep_time = time.time() + every_n_hours * 3600
        self._last: list[tuple[str, float]] = []  # path, and when it was saved
        self._kept_for_good: list[str] = []
        self._doomed: list[str] = []  # kept no longer, unless a delta needs it
        self._ids: dict[str, str | None] = {}  # of the save that a path held when noted

    @property
    def paths(self) -> list[str]:
        """The paths of the last checkpoints, the oldest first."""
        return [path for path, _ in self._last]

    def record(self, path: str) -> None:
        """Puts a path at the end of the list; the first may have to go."""
        self._keep_again(path)
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
        """Keeps a path for good, unless its turn will come as it is in the list."""
        self._keep_again(path)
        if path not in [*self.paths, *self._kept_for_good]:
            self._kept_for_good.append(path)

    def _keep_again(self, path: str) -> None:
        self._doomed = [other for other in self._doomed if other != path]

    def note(self, path: str, save_id: str | None) -> None:
        """Notes which save wrote what is at a path, if that will be deleted one day."""
        if path in [*self.paths, *self._doomed]:
            self._ids[path] = save_id

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
                self.note(path, saved_id(found[0][0]))

    def needed_bases(self) -> set[str]:
        """The absolute paths of what the kept deltas build on, however indirectly."""
        return _bases([*self.paths, *self._kept_for_good])

    # --- what is kept no longer -------------------------------------------------------

    def doomed_in(self, directory: str) -> dict[str, str]:
        """The names of what waits for deletion in a directory, and the ids of the saves."""
        ids = {path: self._ids.get(path) for path in self._doomed}
        here = os.path.abspath(directory)
        return {
            os.path.basename(path): save_id
            for path, save_id in ids.items()
            if save_id and os.path.dirname(os.path.abspath(path)) == here
        }

    def take_over_doomed(self, directory: str, doomed: Mapping[str, str]) -> None:
        """Takes over what waits for deletion since an earlier run."""
        known = {os.path.abspath(path) for path in [*self.paths, *self._kept_for_good]}
        for name, save_id in doomed.items():
            path = os.path.join(directory, name)
            if os.path.abspath(path) not in known and path not in self._doomed:
                self._doomed.append(path)
                self.note(path, save_id)

    def delete_old(self) -> None:
        """Deletes what is kept no longer; call it once the state file does not name it.

        What cannot be deleted goes on waiting, which is logged.
        """
        for directory in {os.path.dirname(path) for path in self._doomed}:
            with (
                _logged("the old checkpoints in", directory),
                files.directory_lock(directory, exclusive=True),
            ):
                needed = _bases(set(files.unsharded_in(directory)) - set(self._doomed))
                here = [p for p in self._doomed if os.path.dirname(p) == directory]
                for path in here:
                    if os.path.abspath(path) not in needed:
                        with _logged("the old checkpoint", path):
                            self._delete(path)

    def leave_old(self) -> None:
        """Leaves to another process what is kept no longer."""
        self._doomed.clear()

    def _delete(self, path: str) -> None:
        found, known = files.families(path), self._ids.get(path)
        # It may be no checkpoint, or what another process has saved since.
        if found and known is not None and known == saved_id(found[0][0]):
            for family in found:
                files.remove_family(family)
        self._doomed.remove(path)
        self._ids.pop(path, None)


@contextlib.contextmanager
def _logged(what: str, path: str) -> Iterator[None]:
    """Logs what keeps something from being deleted."""
    try:
        yield
    except OSError as error:
        _log.warning("%s %r could not be deleted: %s", what, path, error)


def _bases(paths: Iterable[str]) -> set[str]:
    """The absolute paths of what checkpoints build on, however indirectly."""
    found: set[str] = set()
    for path in paths:
        base = base_of(path)
        while base is not None and os.path.abspath(base) not in found:
            found.add(os.path.abspath(base))
            base = base_of(base)
    return found
