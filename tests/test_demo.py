"""The command line: the demonstration on a small text, and every bad request."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jslices.__main__ import main
from jslices.demo import skipgram

# Two kinds of sentence that share no word.
TEXT = "sun sky cloud rain " * 300 + "fork knife spoon plate " * 300


@pytest.fixture
def text(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "binary").write_bytes(b"\x00\x01 words words")
    return tmp_path


def run(capsys, *arguments):
    try:
        code = main(["demo", *map(str, arguments)])
    except SystemExit as stop:
        code = stop.code
    out = capsys.readouterr()
    return code, out.out, out.err


@pytest.mark.slow
def test_trains_shows_and_compares(capsys, text):
    picture = text / "words.png"
    options = ("--steps", 300, "--batch", 64, "--dim", 8, "--learning-rate", 2e-2)
    code, out, err = run(
        capsys, "--text", text, *options, "--show", "rain", "--plot", picture
    )
    assert code == 0, err
    assert f"{len(TEXT.split()):,} words of text, 8 distinct" in out
    assert "loss=" in err and "step/s" in err
    assert re.search(r"300 steps in \d+ s: [\d,]+ pairs of words a second", out)
    # Each word's neighbours are of its own kind of sentence.
    nearest = re.search(r"rain: (.*)", out).group(1)
    first_three = [item.split()[0] for item in nearest.split(", ")[:3]]
    assert set(first_three) == {"sun", "sky", "cloud"}
    steps = r"dense Optax Adam: .* ms.*\n.* gradients: .* ms.* as fast.*\n.*, lazy: .* ms"
    assert re.search(steps, out)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_loss_is_that_of_word2vec_over_all_pairs():
    """A pair counts as often as word2vec takes it, and each has five negatives."""
    rng = np.random.default_rng(0)
    params = {name: rng.normal(size=(9, 4)).astype(np.float32) for name in ("near", "far")}
    spans, noise = rng.integers(0, 9, (2, 10)), np.array([1, 4])  # four windows in each
    log_sigmoid = lambda x: -np.log1p(np.exp(-x))  # noqa: E731
    total = 0.0
    for span, centre in itertools.product(spans, range(3, 7)):
        near = params["near"][span[centre]]
        for away in (-3, -2, -1, 1, 2, 3):
            pair = log_sigmoid(near @ params["far"][span[centre + away]])
            pair += 5 * log_sigmoid(-(params["far"][noise] @ near)).mean()
            total -= pair * (4 - abs(away)) / 3
    value = skipgram.loss(params, spans, noise)
    np.testing.assert_allclose(value, total / (2 * 4 * 4), rtol=1e-5)


@pytest.mark.slow
def test_the_losses_are_those_of_optax():
    rng = np.random.default_rng(0)
    words = 300
    tokens = (rng.zipf(1.3, 5_000) % words).astype(np.int32)
    counts = np.bincount(tokens, minlength=words) + 1
    data = skipgram.make_data(skipgram.Corpus(list(map(str, counts)), counts, tokens), 0)

    def losses(contender):
        (tx, step), key = contender, jax.random.key(0)
        params = skipgram.init_params(words, 8, 0)
        state, values = tx.init(params), []
        for _ in range(40):
            params, state, value = step(params, state, data, key)
            values.append(float(value))
        return np.array(values)

    dense = losses(skipgram.dense_step(0.05, 32))
    np.testing.assert_allclose(losses(skipgram.sparse_step(0.05, 32)), dense, rtol=1e-4)
    lazy = losses(skipgram.sparse_step(0.05, 32, "lazy"))
    assert abs(lazy - dense).max() > 3e-3


def test_spans_are_running_text():
    text = np.arange(100)
    data = skipgram.make_data(
        skipgram.Corpus([str(i) for i in text], np.ones(100, np.int64), text), seed=0
    )
    data = data._replace(tokens=jnp.arange(23))  # two spans of 22 words fit
    starts = set()
    for seed in range(8):
        spans, noise = skipgram.draw(data, jax.random.key(seed), 17)
        assert spans.shape == (2, 22) and noise.shape == (skipgram.SHARED,)
        np.testing.assert_array_equal(spans - spans[:, :1], [range(22)] * 2)
        starts |= set(np.asarray(spans[:, 0]).tolist())
    assert starts == {0, 1}


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--text", "/no/such/place"], "no such file or folder: /no/such/place"),
        (["--text", "EMPTY"], "no text found in"),
        (
            ["--text", "TEXT", "--words", "99"],
            "only 8 distinct words, not the 99 asked",
        ),
        (
            ["--text", "TEXT", "--show", "zebra"],
            "not among the words of the text: zebra",
        ),
        pytest.param(
            ["--text", "TEXT", "--plot", "/no/such/place/x.png"],
            "no such folder",
            marks=pytest.mark.slow,  # it imports what draws
        ),
        pytest.param(
            ["--text", "TEXT", "--plot", "x.words"],
            "the name must end in",
            marks=pytest.mark.slow,
        ),
        (["--words", "0"], "'0' is not a positive whole number"),
        (["--steps", "many"], "'many' is not a positive whole number"),
    ],
)
def test_bad_requests_get_one_line_and_exit_code_2(
    capsys, text, tmp_path, arguments, message
):
    (tmp_path / "empty").mkdir()
    places = {"TEXT": str(text / "a.txt"), "EMPTY": str(tmp_path / "empty")}
    code, out, err = run(capsys, *[places.get(a, a) for a in arguments])
    assert code == 2 and out == ""
    assert message in err and "Traceback" not in err
    assert len([line for line in err.splitlines() if "error:" in line]) == 1


def test_vectors_that_run_away_are_reported(capsys, text):
    options = ("--steps", 10, "--batch", 64, "--dim", 8, "--learning-rate", "1e38")
    code, _, err = run(capsys, "--text", text, *options)
    assert code == 2 and "lower --learning-rate" in err
