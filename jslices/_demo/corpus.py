"""Words of a text: the Python standard library's own source, or what the user names."""

import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

WORD = re.compile(r"[A-Za-z_]\w*")
# Test suites repeat themselves, and installed packages are not the standard library.
_SKIPPED = frozenset({"__pycache__", "site-packages", "dist-packages", "test", "tests"})


class UserError(Exception):
    """What the user asked for cannot be done; the message is one line for them."""


class Corpus(NamedTuple):
    """A text as word numbers.

    Attributes:
      words: the V distinct words, most frequent first.
      counts: ``[V]`` int64, how often each occurs.
      tokens: ``[N]`` int32, the text as numbers of words; other words are left out.
    """

    words: list[str]
    counts: np.ndarray
    tokens: np.ndarray


def read_corpus(path: Path | None, num_words: int | None) -> Corpus:
    """Reads a text and keeps its ``num_words`` most frequent words (None: all).

    Args:
      path: a file or a folder; None means the running Python's standard library.
      num_words: V.

    Raises:
      UserError: for a missing path, a text without words, or fewer than ``num_words``.
    """
    files = _library_files() if path is None else _files(path)
    found: list[str] = []
    for file in files:
        found.extend(WORD.findall(_text(file)))
    place = "the standard library" if path is None else str(path)
    if len(found) < 2:
        raise UserError(f"no text found in {place}")
    ranking = Counter(found).most_common()
    if num_words is not None and len(ranking) < num_words:
        raise UserError(
            f"{place} has only {len(ranking)} distinct words, not the {num_words} asked for"
        )
    kept = ranking[:num_words]
    number = {word: i for i, (word, _) in enumerate(kept)}
    tokens = np.fromiter((number[w] for w in found if w in number), np.int32)
    counts = np.array([count for _, count in kept], np.int64)
    return Corpus([word for word, _ in kept], counts, tokens)


def _library_files() -> Iterator[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(root.rglob("*.py")):
        if _SKIPPED.isdisjoint(file.relative_to(root).parts):
            yield file


def _files(path: Path) -> Iterator[Path]:
    if not path.exists():
        raise UserError(f"no such file or folder: {path}")
    if path.is_file():
        yield path
        return
    for file in sorted(path.rglob("*")):
        hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
        if file.is_file() and not hidden:
            yield file


def _text(file: Path) -> str:
    try:
        data = file.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from error
    # A NUL byte means that this is no text.
    return "" if b"\0" in data else data.decode("utf-8", errors="ignore")
