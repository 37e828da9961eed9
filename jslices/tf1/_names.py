"""Unique names, as TensorFlow gives them to what is created in one graph."""

import contextlib
import re
from collections.abc import Iterator

_VALID = re.compile(r"[A-Za-z0-9.][A-Za-z0-9_.\-/]*")


def check_name(name: object, what: str) -> str:
    """``name`` if it is a string that TensorFlow too would take."""
    if not isinstance(name, str):
        raise TypeError(f"{what}: the name must be a string, got {name!r}")
    if not _VALID.fullmatch(name):
        raise ValueError(
            f"{what}: {name!r} is not a valid name; use letters, digits and any of _ . - /"
            ", beginning with a letter, a digit or a dot"
        )
    return name


def bare_name(name: str) -> str:
    """``"foo/v"`` for ``"foo/v"`` and for ``"foo/v:0"``."""
    return name.removesuffix(":0")


class Names:
    """Which names are taken, and under which name scope one is.

    A name that is taken gets ``_1``, ``_2``, ... A scope takes its name too, which is why
    a scope opened twice is ``foo`` and ``foo_1``, as in TensorFlow.
    """

    def __init__(self) -> None:
        self.prefix = ""
        self._times: dict[str, int] = {}

    def unique(self, name: str) -> str:
        """``name`` under the present name scope, made unique, and taken from now on."""
        path = f"{self.prefix}/{name}" if self.prefix else name
        return self.unique_path(path)

    def unique_path(self, path: str) -> str:
        """The same for a whole path, wherever one is."""
        times = self._times.get(path, 0)
        self._times[path] = times + 1
        new = path
        while times and new in self._times:
            new = f"{path}_{times}"
            times += 1
        self._times.setdefault(new, 1)
        return new

    @contextlib.contextmanager
    def given_back_on_error(self) -> Iterator[None]:
        """Forgets the names taken within, if what they were for was refused."""
        before = dict(self._times)
        try:
            yield
        except BaseException:
            self._times = before
            raise

    @contextlib.contextmanager
    def scope(self, name: str) -> Iterator[str]:
        """Opens a name scope; ``"foo/"`` re-enters one by its whole path, ``""`` none."""
        outside = self.prefix
        if name.endswith("/"):
            self.prefix = name[:-1]
        else:
            self.prefix = self.unique(name) if name else ""
        try:
            yield f"{self.prefix}/" if self.prefix else ""
        finally:
            self.prefix = outside
