"""Files of word vectors: word2vec's text and binary form, GloVe's, and fastText's ``.vec``.

All hold a word and D numbers a row, as text or as little-endian float32. word2vec and
fastText begin with a line of V and D; GloVe does not, and its words may contain spaces.
"""

import gzip
import io
import itertools
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.typing import ArrayLike

import jslices
from jslices import DataLossError, NotFoundError
from jslices.checkpoint.boxes import row_blocks
from jslices.checkpoint.files import Path, replacing

_SIZES = re.compile(rb"\s*(\d+)\s+(\d+)\s*")
#: Bytes of a line of text: one of a binary file may be all of it.
_LONGEST = 1 << 20
_FORMS = ("word2vec", "word2vec_binary", "glove")


class WordVectors(NamedTuple):
    """What :func:`load_word_vectors` returns."""

    words: list[str]  #: V words, in the order of the file, repetitions included.
    vectors: np.ndarray  #: float32 ``[V, D]``, row i for word i.


def load_word_vectors(path: Path, *, limit: int | None = None) -> WordVectors:
    """Read word vectors of word2vec, GloVe or fastText, compressed by gzip or not.

    The beginning of the file tells the form. Files sort words by frequency, so that
    ``limit=100_000`` takes the most frequent ones, and reads no more of the file.

    Args:
      path: of the file; with the suffix ``.gz`` it is decompressed while it is read.
      limit: how many words are read at most; None: all.

    Returns:
      :class:`WordVectors`, words and their vectors in host memory. Bytes that are not UTF-8
      become ``\\ufffd``, as words of the published files are cut in the middle of letters.

    Raises:
      NotFoundError: if there is no such file.
      ValueError: for a limit below 1.
      DataLossError: if it is none of these forms, is shorter than it says, or a line has
        another number of columns; names the file and the line.

    Cost: one pass over the file, text at about 20 MB a second.

    Example:
      >>> import tempfile
      >>> import jslices as js
      >>> path = f"{tempfile.mkdtemp()}/tiny.txt"
      >>> with open(path, "w") as file:
      ...     print("the 0.5 1", "of 2 -3.25", sep="\\n", file=file)
      >>> words, vectors = js.checkpoint.load_word_vectors(path)
      >>> words, vectors.tolist()
      (['the', 'of'], [[0.5, 1.0], [2.0, -3.25]])

    Source: ``KeyedVectors.load_word2vec_format`` of gensim, which needs to know the form.
    """
    path = os.fspath(path)
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be None or at least 1, got {limit}")
    try:
        with gzip.open(path) if path.endswith(".gz") else open(path, "rb") as file:
            first = file.readline(_LONGEST)
            sizes = _SIZES.fullmatch(first)
            if sizes is None:
                rows = _rows_of_text(file, path, first, None)
            elif _is_text(second := file.readline(_LONGEST), int(sizes[2])):
                rows = _rows_of_text(file, path, second, int(sizes[2]))
            else:
                file.seek(len(first))
                rows = _binary_rows(file, path, *map(int, sizes.groups()))
            read = list(itertools.islice(rows, limit))
    except FileNotFoundError as error:
        raise NotFoundError(f"{path}: no such file") from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataLossError(f"{path} cannot be decompressed: {error}") from error
    total = int(sizes[1]) if sizes else max(len(read), 1)
    if len(read) < (total if limit is None else min(total, limit)):
        raise DataLossError(f"{path} holds {len(read):,} rows, not {total:,}")
    words = [word.decode(errors="replace") for word, _ in read]
    return WordVectors(words, np.stack([row for _, row in read]).astype(np.float32))


def save_word_vectors(
    path: Path,
    words: Sequence[str],
    vectors: "ArrayLike | jslices.HostTable",
    *,
    form: str = "word2vec",
) -> None:
    """Write word vectors for word2vec, gensim, fastText, spaCy or readers of GloVe's files.

    The file appears whole or not at all; one that was there is replaced.

    Args:
      path: of the file.
      words: V of them, not empty and without white space, which would end them.
      vectors: ``[V, D]`` of floats, a table of parameters for example; written as float32.
        A :class:`jslices.HostTable` is read part by part.
      form: ``"word2vec"``, which is fastText's ``.vec`` as well; ``"word2vec_binary"``; or
        ``"glove"``, the first without its line of sizes. Text has enough digits to restore
        the same float32.

    Raises:
      ValueError: for another form, a word that cannot be written, or if there are not as
        many words as rows. Nothing is written.

    Cost: one pass, text at about 10 MB a second.

    Example:
      >>> import pathlib, tempfile, jax.numpy as jnp, jslices as js
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     file = pathlib.Path(folder, "all.vec")
      ...     js.checkpoint.save_word_vectors(file, ["the", "of"], jnp.array([[0.5], [1]]))
      ...     print(file.read_text(), end="")
      2 1
      the 0.5
      of 1

    Source: ``KeyedVectors.save_word2vec_format`` of gensim.
    """
    path, read = os.fspath(path), getattr(vectors, "read", None)
    table: Any = vectors if read else np.asarray(vectors)
    if form not in _FORMS:
        raise ValueError(f"form must be one of {', '.join(_FORMS)}, got {form!r}")
    if len(table.shape) != 2 or len(words) != table.shape[0]:
        raise ValueError(
            f"wanted vectors [V, D] with V = {len(words):,}, the number of words; got "
            f"{list(table.shape)}"
        )
    for row, word in enumerate(words):
        if not word or word.split() != [word]:
            raise ValueError(f"word {row} is {word!r}: words hold no white space in files")
    with replacing(path) as descriptor, open(descriptor, "wb", closefd=False) as file:
        if form != "glove":
            file.write(b"%d %d\n" % table.shape)
        text, parts = " %.9g" * table.shape[1], row_blocks(table.shape, 4, 1 << 20)
        blocks = (read(np.arange(x.start, x.stop)) if read else table[x] for x in parts)
        rows = (row.astype("<f4") for block in blocks for row in block)
        for word, row in zip(words, rows, strict=True):
            numbers = (text % tuple(row.tolist())).encode()
            if form == "word2vec_binary":
                numbers = b" " + row.tobytes()
            file.write(word.encode() + numbers + b"\n")


_File = io.BufferedIOBase
_Row = tuple[bytes, np.ndarray]


def _is_text(line: bytes, dim: int) -> bool:
    try:
        return len(np.array(line.split()[-dim:], np.float32)) == dim
    except ValueError:
        return False


def _rows_of_text(file: _File, path: str, first: bytes, dim: int | None) -> Iterator[_Row]:
    number, line = 1 if dim is None else 2, first
    dim = len(first.split()) - 1 if dim is None else dim
    while line.strip():
        fields = line.rstrip().rsplit(maxsplit=dim)
        try:
            row = np.array(fields[1:], np.float32)
        except ValueError as error:
            raise DataLossError(f"line {number} of {path}: {error}") from error
        if len(fields) != dim + 1 or not dim:
            raise DataLossError(
                f"line {number} of {path} has {max(len(fields) - 1, 0)} numbers, not "
                f"{dim or 'one or more'}"
            )
        yield fields[0], row
        number, line = number + 1, file.readline(_LONGEST)


def _binary_rows(file: _File, path: str, rows: int, dim: int) -> Iterator[_Row]:
    for number in range(rows):
        word = bytearray()
        while (letter := file.read(1)) not in (b" ", b""):
            word += letter
        numbers = file.read(4 * dim)
        if len(numbers) < 4 * dim:
            raise DataLossError(f"{path} ends in row {number:,} of {rows:,}")
        yield bytes(word.lstrip(b"\n")), np.frombuffer(numbers, "<f4")
