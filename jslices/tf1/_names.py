"""Names of variables and name scopes, made unique as in a graph of TensorFlow."""

import contextlib
import re
from collections.abc import Iterator

import jax

_WITHIN_A_SCOPE = re.compile(r"[A-Za-z0-9_.\\/>-]+")
_OUTERMOST = re.compile(r"[A-Za-z0-9.][A-Za-z0-9_.\\/>-]*")


def bare_name(name: str) -> str:
    """``"foo/v"`` for ``"foo/v"`` and for ``"foo/v:0"``."""
    return name.removesuffix(":0")


def check_name(name: object, caller: str, scope: str = "") -> str:
    """``name`` if it is a string that TensorFlow accepts within ``scope``."""
    if not isinstance(name, str):
        raise TypeError(f"{caller}: the name must be a string, got {name!r}")
    if not (_WITHIN_A_SCOPE if scope else _OUTERMOST).fullmatch(name):
        begin = "" if scope else ", beginning with a letter, a digit or a dot"
        raise ValueError(
            f"{caller}: {name!r} is not a valid name; use letters, digits and any of "
            rf"_ . - / \ >{begin}"
        )
    return name


def join(outer: str, inner: str) -> str:
    """``outer/inner``, or ``inner`` where nothing is outside."""
    return f"{outer}/{inner}" if outer else inner


class Names:
    """The names in use, made unique the way TensorFlow does within one graph.

    A name that is taken, in capitals or not, gets ``_1``, ``_2``, ... Scopes take names,
    too, which is why a scope that is opened twice is ``foo`` and ``foo_1``.
    """

    def __init__(self) -> None:
        self.prefix = ""
        self._times: dict[str, int] = {}

    def unique(self, name: str, caller: str) -> str:
        """The path of ``name`` in the current scope, made unique, and taken from now on.

        ``"foo/bar/"``, with a slash at its end, is exactly the path ``"foo/bar"``.
        """
        check_name(name, caller, self.prefix)
        if name.endswith("/"):
            return name[:-1]
        path = new = join(self.prefix, name)
        times = self._times.get(path.lower(), 0)
        self._times[path.lower()] = times + 1
        while times and new.lower() in self._times:
            new = f"{path}_{times}"
            times += 1
        self._times.setdefault(new.lower(), 1)
        return new

    @contextlib.contextmanager
    def released_on_error(self) -> Iterator[None]:
        """Free the names taken within this block if the block raises."""
        before = dict(self._times)
        try:
            yield
        except BaseException:
            self._times = before
            raise

    @contextlib.contextmanager
    def scope(self, name: str, caller: str = "name_scope") -> Iterator[str]:
        """Open a name scope; ``"foo/"`` enters that very one again, ``""`` leaves all."""
        outside = self.prefix
        self.prefix = self.unique(name, caller) if name else ""
        shown = jax.named_scope(name.strip("/")) if name else contextlib.nullcontext()
        try:
            with shown:
                yield self.opened
        finally:
            self.prefix = outside

    @property
    def opened(self) -> str:
        """The current name scope with a slash; ``""`` outside all."""
        return f"{self.prefix}/" if self.prefix else ""
