"""Files of word vectors: what is written comes back, other programs' forms are read."""

import gzip
import pickle
import tracemalloc

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import jslices as js

load, save = js.checkpoint.load_word_vectors, js.checkpoint.save_word_vectors
FORMS = ["word2vec", "word2vec_binary", "glove"]
letters = st.characters(codec="utf-8", exclude_categories=["Z", "C"])
tables = st.integers(1, 5).flatmap(
    lambda rows: st.tuples(
        st.lists(st.text(letters, min_size=1), min_size=rows, max_size=rows),
        hnp.arrays(
            np.float32,
            st.tuples(st.just(rows), st.integers(1, 4)),
            elements=st.floats(width=32, allow_nan=False),
        ),
    )
)


@pytest.mark.parametrize("form", FORMS)
@hypothesis.given(table=tables)
def test_what_is_written_comes_back(tmp_path_factory, form, table):
    words, vectors = table
    # Two numbers alone in a first line are sizes.
    hypothesis.assume(form != "glove" or not (words[0].isdigit() and vectors.shape[1] == 1))
    # Numbers of which every byte is a printed letter are taken for text.
    hypothesis.assume(form != "word2vec_binary" or vectors.shape[1] > 2)
    path = tmp_path_factory.mktemp("vectors") / "file"
    save(path, words, vectors, form=form)
    again = load(path)
    assert again.words == words and again.vectors.dtype == np.float32
    np.testing.assert_array_equal(again.vectors, vectors)
    first = load(path, limit=1)
    assert first.words == words[:1] and len(first.vectors) == 1


def test_forms_of_other_programs(tmp_path):
    path = tmp_path / "vectors"
    path.write_text("2 2 \nthe 1 2 \n, -3e-2 .5 \n")  # fastText ends lines by a space
    words, vectors = load(path)
    assert words == ["the", ","]
    np.testing.assert_array_equal(vectors, np.float32([[1, 2], [-0.03, 0.5]]))
    path.write_text("the 1 2\n. . 3 4\n")  # a word of GloVe's with a space
    assert load(path).words == ["the", ". ."]
    row = np.float32([1.5, -2]).tobytes()  # gensim writes no line ends
    path.write_bytes(b"2 2\n" + b"the " + row + b"caf\xc3 " + row)
    words, vectors = load(path)
    assert words == ["the", "caf\ufffd"] and vectors.tolist() == [[1.5, -2.0]] * 2
    path.write_bytes(
        b"\xef\xbb\xbfthe 1 2\n\n"
    )  # a byte order mark, a blank line at the end
    assert load(path).words == ["the"]
    packed = tmp_path / "vectors.gz"
    packed.write_bytes(gzip.compress(b"the 1 2\n"))
    assert load(packed).words == ["the"]
    # GloVe's -write-header 1 does not count its last row, of unknown words.
    path.write_text("2 2\nthe 1 2\nof 3 4\n<unk> 5 6\n")
    assert load(path).vectors.tolist() == [[1, 2], [3, 4], [5, 6]]
    assert load(path, limit=2).words == ["the", "of"]
    assert load(path, vocabulary=["the"]).words == ["the"]
    packed.write_bytes(gzip.compress(b"the 1 2\n" * 99)[:-9])
    with pytest.raises(js.errors.DataLossError, match=r"vectors\.gz cannot be decomp"):
        load(packed)


LINES = b"".join(b"\n%c" % word + b" 0.5 1.25" * 10 for word in b"abcd")
MISFITS = {
    (4, 21): "line 2 of .* has 20 numbers, not 21",
    (4, 19): "line 2 of .* has 20 numbers, not 19",
    (4, 40): "line 2 of .* has 20 numbers, not 40",
    (3, 20): "holds 4 rows, not 3",
}
BINARY = b"".join(word + np.float32([1.5, -2]).tobytes() for word in (b"a ", b"b "))
COUNTS = {1: "goes on after 1 rows of 2 numbers", 3: "ends in row 2 of 3"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "line 1 of .* has 0 numbers|holds 0 rows"),
        (b"3 2\na 1 2\nb 3 4\n", "holds 2 rows, not 3"),
        (b"1 2\na 1 2\nb 3 4\n", "holds 2 rows, not 1"),
        (b"1 2\na 1 2\n<unk> 3 4\n<unk> 3 4\n", "holds 3 rows, not 1"),
        (b"a 1 2\nb 3\n", "line 2 of .* has 1 numbers, not 2"),
        (b"2 2\na 1 2\nb 3 x\n", "line 3 of .* could not convert"),
        (b"2 2\na \x00\x00\x00\x80\x00\x00\x00\x00b \x00", "ends in row 1 of 2"),
        (b"word\n", "line 1 of .* has 0 numbers, not one or more"),
        *((b"%d %d" % sizes + LINES, message) for sizes, message in MISFITS.items()),
        (b"4 20\n" + LINES, "line 2 of .* has 0 numbers, not 20"),
        (b"4 20" + LINES.replace(b".", b","), "line 2 of .* could not convert .* b'0,5'"),
        (LINES[1:].replace(b"c ", b"\nc "), "line 3 of .* has 0 numbers, not 20"),
        (LINES[1:].replace(b"c ", b"c 0.5 "), "line 3 of .* has 21 numbers, not 20"),
        (b"4 20" + LINES.replace(b"c ", b"c c "), "line 4 of .* has 21 numbers, not 20"),
        ("1 3\nя 0,5 1,5 -2,5\n".encode(), "line 2 of .* could not convert .* b'0,5'"),
        *((b"%d 2\n" % rows + BINARY, message) for rows, message in COUNTS.items()),
        (b"2 3\n" + BINARY, "ends in row 1 of 2"),
        (b"2 1\n" + BINARY, "goes on after 2 rows of 1 numbers"),
        (gzip.compress(b"2 9\n" + b"a" * 10**7, 1), "line 2 of .* has 0 numbers, not 9"),
        (gzip.compress(b"3 2\n" + BINARY + b"a" * 10**7, 1), "ends in row 2 of 3"),
        (b"\xba\x16\x4f\x2f\x0c\0\0\0", "line 1 of .*it is a model of fastText; .* .vec"),
        (b"PK\x03\x04\x14\0 \0", "line 1 of .*it is a zip archive, as .npz, .pt"),
        (pickle.dumps([0.5]), "line 1 of .*it is a pickle of Python"),
        (b'{"weight_map": {"table": "1.safetensors"}}', "it is JSON; .* jslices.Saver"),
    ],
)
def test_broken_files_are_refused(tmp_path, text, message):
    (tmp_path / "broken").write_bytes(text)
    with pytest.raises(js.errors.DataLossError, match=message):
        load(tmp_path / "broken")


@pytest.mark.parametrize("form", FORMS)
def test_a_vocabulary_selects(tmp_path, form):
    table = np.arange(8, dtype=np.float32).reshape(4, 2)
    save(tmp_path / "file", ["d", "a", "b", "a"], table, form=form)
    words, vectors = load(tmp_path / "file", vocabulary=("a", "c", "d"))
    assert words == ["d", "a", "a"] and vectors.tolist() == [[0, 1], [2, 3], [6, 7]]
    assert load(tmp_path / "file", vocabulary=["a"], limit=2).vectors.tolist() == [[2, 3]]
    assert load(tmp_path / "file", vocabulary=["c"]).vectors.shape == (0, 2)
    with pytest.raises(TypeError, match=r"must hold words, got a string; try \['a'\]"):
        load(tmp_path / "file", vocabulary="a")


@pytest.mark.slow
def test_vectors_are_in_memory_once(tmp_path):
    path, table = tmp_path / "file", np.ones((10_000, 500), np.float32)
    save(path, ["word"] * len(table), table, form="word2vec_binary")
    peaks = {}
    for vocabulary in (None, ["other"]):
        tracemalloc.start()
        load(path, vocabulary=vocabulary)
        peaks[vocabulary is None] = tracemalloc.get_traced_memory()[1] / table.nbytes
        tracemalloc.stop()
    assert peaks[True] < 1.5 and peaks[False] < 0.5


def test_bad_arguments_write_nothing(tmp_path):
    path, good = tmp_path / "out", np.ones((2, 3))
    with pytest.raises(js.errors.NotFoundError, match="out: no such file"):
        load(path)
    for words, form, message in [
        (["a", "b c"], "glove", "word 1 is 'b c'"),
        (["a"], "glove", r"V = 1, the number of words; got \[2, 3\]"),
        (["a", "b"], "text", "form must be one of word2vec, "),
    ]:
        with pytest.raises(ValueError, match=message):
            save(path, words, good, form=form)
    with pytest.raises(ValueError, match=r"complex128: save .*W\.real, W\.imag"):
        save(path, ["a", "b"], 1j * good)
    with pytest.raises(ValueError, match="limit must be None or at least 1, got 0"):
        load(path, limit=0)
    assert not list(tmp_path.iterdir())
