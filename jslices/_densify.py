"""Warnings and errors where row gradients become dense, at the user's line."""

import linecache
import os
import re
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Iterable
from typing import Any, NamedTuple, NoReturn

import jax

OUR_FOLDER = os.path.dirname(os.path.abspath(__file__)) + os.sep
JAX_FOLDER = os.path.dirname(os.path.abspath(jax.__file__)) + os.sep
_FOLDERS = "stdlib", "platstdlib", "purelib", "platlib"
_LIBRARIES = tuple({os.path.abspath(sysconfig.get_paths()[x]) + os.sep for x in _FOLDERS})
# Python's own "once per line" memory for the warnings issued here, by file; the cell of a
# notebook is a file.
_registry: dict[str, dict[Any, Any]] = {}


class DensificationWarning(UserWarning):
    """Row gradients were turned into an array as large as the whole table.

    Silence it with ``warnings.simplefilter("ignore", jslices.DensificationWarning)``,
    or make it fatal with ``"error"``.

    It is issued while a program is traced. JAX remembers the traces of its own functions: a
    second ``jnp.sum`` of slices of the same shapes neither traces nor warns again.
    """


class DenseUseError(ValueError):
    """A leaf that was forced sparse is used in a way that needs the whole table."""


class UserLine(NamedTuple):
    """A line of the user's program."""

    file: str
    line: int

    @property
    def text(self) -> str:
        return linecache.getline(self.file, self.line).strip()

    @property
    def place(self) -> str:
        """File and line. A cell of a notebook goes by its number, not by its file's."""
        of_old = re.match(r"<ipython-input-(\d+)-", self.file)  # IPython 7, as on Colab
        shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
        named = getattr(getattr(shell, "compile", None), "format_code_name", None)
        if of_old:
            cell: Any = "Cell", f"In[{of_old[1]}]"
        else:
            cell = named and named(self.file)  # ("Cell", "In[3]")
        return f"{' '.join(cell)}, line {self.line}" if cell else f"{self.file}:{self.line}"

    def __str__(self) -> str:
        text = self.text
        return self.place + (f" ({text})" if text else "")


UNKNOWN_LINE = UserLine("<unknown>", 0)


def pick_user_line(frames: Iterable[tuple[str, int]]) -> UserLine:
    """The innermost frame of the user's own program, as file and line.

    Frames of jslices and JAX never count. Frames of installed libraries count only when
    nothing else is on the stack: "your line that called ``nn.Embed``" helps, the line
    inside Flax does not.
    """
    library = None
    for file, line in frames:
        if file.startswith((OUR_FOLDER, JAX_FOLDER)) or file.startswith("<frozen"):
            continue
        if not file.startswith(_LIBRARIES):
            return UserLine(file, line)
        library = library or UserLine(file, line)
    return library or UNKNOWN_LINE


def current_user_line() -> UserLine:
    """The user's line that led here, read from the running stack."""
    frames = traceback.walk_stack(sys._getframe(1))
    return pick_user_line((frame.f_code.co_filename, line) for frame, line in frames)


def warn_at_line(
    message: str,
    line: UserLine | None = None,
    category: type[UserWarning] = DensificationWarning,
) -> None:
    """Issues a warning that Python attributes to the user's line."""
    line = line or current_user_line()
    try:
        registry = _registry.setdefault(line.file, {})
        warnings.warn_explicit(message, category, line.file, line.line, registry=registry)
    except category as warning:
        raise_at(line, warning)


def raise_at(line: UserLine, error: Exception) -> NoReturn:
    """Raises ``error`` so that its traceback ends at the user's line.

    That line is no longer running (or not yet: a program is traced first and judged later),
    so compiling a ``raise`` for its place makes a frame that looks like it.
    """
    source = "\n" * (line.line - 1) + "raise error"
    code = compile(source, line.file, "exec")
    error.__traceback__ = None
    exec(code, {"error": error})
    raise AssertionError("unreachable")


def human_bytes(count: float) -> str:
    """``1536`` as ``'1.5 KB'``: powers of 1000, to be checked in the head."""
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if abs(count) < 1000 or unit == "TB":
            break
        count /= 1000
    return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
