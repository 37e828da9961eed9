"""Files of word vectors: word2vec's text and binary form, GloVe's, and fastText's ``.vec``.

All hold a word and D numbers a row, as text or as little-endian float32. word2vec and
fastText begin with a line of V and D; GloVe does not, and its words may contain spaces.
"""

import gzip
import io
import itertools
import os
import re
import string
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.typing import ArrayLike

import jslices
from jslices.checkpoint.boxes import row_blocks
from jslices.checkpoint.files import Path, other_kind, replacing
from jslices.errors import DataLossError, NotFoundError

_SIZES = re.compile(rb"\s*(\d{1,12})\s+([1-9]\d{0,5})\s*")
#: Bytes of a line of text, and of a word: in another file either may never end.
_LONGEST = 1 << 20
_FORMS = ("word2vec", "word2vec_binary", "glove")


class WordVectors(NamedTuple):
    """What :func:`load_word_vectors` returns."""

    words: list[str]  #: V words, in the order of the file, repetitions included.
    vectors: np.ndarray  #: float32 ``[V, D]``, row i for word i.


def load_word_vectors(
    path: Path, *, limit: int | None = None, vocabulary: Iterable[str] | None = None
) -> WordVectors:
    """Read word vectors of word2vec, GloVe or fastText, compressed by gzip or not.

    The beginning of the file tells the form. Files sort words by frequency, so that
    ``limit=100_000`` takes the most frequent ones, and reads no more of the file.

    Args:
      path: of the file.
      limit: how many words are read at most; None: all.
      vocabulary: which of these words are wanted; None: all.

    Returns:
      :class:`WordVectors`, words and their vectors in host memory. Bytes that are not UTF-8
      become ``\\ufffd``, as words of the published files are cut in the middle of letters.

    Raises:
      NotFoundError: if there is no such file.
      ValueError: for a limit below 1.
      TypeError: for a vocabulary that is one string.
      DataLossError: if it is none of these forms, holds more rows or fewer than it says, or
        a line has another number of columns; names the file and the line.

    Cost: one pass over the file, text at about 20 MB a second. No more memory than for the
    words and vectors that are returned.

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
    if isinstance(vocabulary, str):
        raise TypeError(f"vocabulary must hold words, got a string; try [{vocabulary!r}]")
    wanted = None if vocabulary is None else frozenset(vocabulary)
    words: list[str] = []
    data, count = bytearray(), 0  # grows where it is: large vectors are never there twice
    try:
        with open(path, "rb") as stored:
            is_packed = stored.peek(2)[:2] == b"\x1f\x8b"
            file: _File = gzip.GzipFile(fileobj=stored) if is_packed else stored
            first = file.readline(_LONGEST).removeprefix(b"\xef\xbb\xbf")  # of UTF-8
            begin, sizes = file.tell(), _SIZES.fullmatch(first)
            total, dim = map(int, sizes.groups()) if sizes else (0, len(first.split()) - 1)
            if sizes and not _is_text(file.read(_LONGEST), dim):
                rows = _binary_rows(file, path, total, dim)
            else:
                rows = _rows_of_text(file, path, [] if sizes else [first], max(dim, 0))
            file.seek(begin)
            for word, numbers in itertools.islice(rows, limit):
                count += 1
                text = word.decode(errors="replace")
                if wanted is None or text in wanted:
                    words.append(text)
                    data += numbers
    except FileNotFoundError as error:
        raise NotFoundError(f"{path}: no such file") from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataLossError(f"{path} cannot be decompressed: {error}") from error
    if sizes and count == total + 1 and word == b"<unk>":
        count = total  # GloVe's -write-header counts all words but this one
    if sizes and count != min(total, limit or total):
        raise DataLossError(f"{path} holds {count:,} rows, not {total:,}")
    vectors = np.frombuffer(data, "<f4").reshape(len(words), dim)
    return WordVectors(words, vectors.astype(np.float32, copy=False))


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
        Under ``untouched="exact"`` that of ``tx.now(params, state)``: rows may be behind.
        A :class:`jslices.HostTable` is read part by part.
      form: ``"word2vec"``, which is fastText's ``.vec`` as well; ``"word2vec_binary"``; or
        ``"glove"``, the first without its line of sizes. Text has enough digits to restore
        the same float32.

    Raises:
      ValueError: for another form, complex vectors, a word that cannot be written, or if
        there are not as many words as rows. Nothing is written.

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
    is_keyed = getattr(vectors, "ids", None) is not None
    if len(table.shape) != 2 or len(words) != table.shape[0] or is_keyed:
        raise ValueError(
            f"wanted vectors [V, D] with V = {len(words):,}, the number of words; got "
            f"{list(table.shape)}{'; type table.read(words)' if is_keyed else ''}"
        )
    if np.iscomplexobj(table):
        raise ValueError(
            f"vectors are {table.dtype}: save np.concatenate([W.real, W.imag], axis=1)"
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


_File = io.BufferedReader | gzip.GzipFile
_Row = tuple[bytes, memoryview]


def _are_numbers(fields: list[bytes]) -> bool:
    try:
        return np.array(fields, np.float32).size > 0
    except ValueError:
        return False


def _is_text(start: bytes, dim: int) -> bool:
    """True if D numbers follow a word, or bytes that can be printed, whatever they are."""
    fields = start.split(b"\n", 1)[0].split()[1:]
    numbers = start.partition(b" ")[2][: min(max(4 * dim, 24), 40)]
    line = numbers.split(b"\n")[0]
    sample = line if len(line) >= 12 else numbers
    is_printed = not sample.translate(None, string.printable.encode())
    return is_printed or (len(fields) == dim and _are_numbers(fields))


def _rows_of_text(file: _File, path: str, first: list[bytes], dim: int) -> Iterator[_Row]:
    lines = itertools.chain(first, iter(lambda: file.readline(_LONGEST), b""))
    for number, line in enumerate(lines, 2 - len(first)):
        word, *fields = line.rsplit(maxsplit=dim) or [b""]
        try:
            row, problem = np.array(fields, "<f4"), ""
        except ValueError as error:
            problem = f": {str(error)[:99]}"
        extra = [x for x in word.split()[1:] if not first or _are_numbers([x])]
        if not dim or len(fields) < dim or extra:
            if number > 1 and not line.strip() and not any(map(bytes.strip, lines)):
                return  # blank lines at the end
            problem = f" has {len(line.split()[1:])} numbers, not {dim or 'one or more'}"
        if problem:
            kind = other_kind(line) if number == 1 else ""
            problem += f"; it is {kind}" if kind else ""
            raise DataLossError(f"line {number} of {path}{problem}")
        yield word, row.data


def _binary_rows(file: _File, path: str, rows: int, dim: int) -> Iterator[_Row]:
    block, at, width = b"", 0, 4 * dim
    for number in range(rows):
        if len(block) - at < _LONGEST + width and (more := file.read(_LONGEST + width)):
            block, at = block[at:] + more, 0
        space = block.find(b" ", at, at + _LONGEST)
        end = space + 1 + width
        if space < 0 or end > len(block):
            raise DataLossError(f"{path} ends in row {number:,} of {rows:,}")
        yield block[at:space].lstrip(b"\n"), memoryview(block)[space + 1 : end]
        at = end
    if (block[at:] + file.read(_LONGEST)).strip():
        raise DataLossError(f"{path} goes on after {rows:,} rows of {dim:,} numbers")
