"""Skip-gram word vectors with negative sampling: a text, two tables, one jitted step.

Each word learns to tell the words near it from words drawn at random (Mikolov et al.,
2013). A step takes spans of running text. A word is read once as itself and once as
context, for all windows that contain it, and all pairs share the words drawn at random: for
the 6 pairs of a window a step reads 2.4 rows of two tables of V rows.
"""

import functools
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jslices as js

Params = dict[str, jax.Array]

WINDOW = 3
SPAN = 16  # words of a span whose window is inside it
NEGATIVES = 5  # for each pair
SHARED = 64  # words that a step draws as negatives of all its pairs
FREQUENT = 1e-3  # words more frequent than this share of the text are thinned out
NOISE_DRAWS = 1 << 20
WORD = re.compile(r"[A-Za-z_]\w*")
# Test suites repeat themselves, and installed packages are not the standard library.
SKIPPED = frozenset({"__pycache__", "site-packages", "dist-packages", "test", "tests"})

# --- the text ----------------------------------------------------------------------


class Corpus(NamedTuple):
    """A text as numbers of words."""

    words: list[str]  #: the V distinct ones, most frequent first.
    counts: np.ndarray  #: ``[V]`` int64, how often each occurs.
    tokens: np.ndarray  #: ``[N]`` int32, numbers of words; other words are left out.


def read_corpus(path: Path | None, num_words: int | None) -> Corpus:
    """Reads a file or a folder, and keeps its ``num_words`` most frequent words.

    Without a path it reads the standard library of this Python, and without a number it
    keeps all words. Raises FileNotFoundError without such a path, and ValueError without
    so many words.
    """
    files = _library_files() if path is None else _files(path)
    words: list[str] = []
    for file in files:
        words.extend(WORD.findall(_text(file)))
    place = "the standard library" if path is None else str(path)
    if len(words) < 2:
        raise ValueError(f"no text found in {place}")
    ranking = Counter(words).most_common()
    if num_words is not None and len(ranking) < num_words:
        raise ValueError(
            f"{place} has only {len(ranking)} distinct words, not the {num_words} asked for"
        )
    most_frequent = ranking[:num_words]
    number = {word: i for i, (word, _) in enumerate(most_frequent)}
    tokens = np.fromiter((number[w] for w in words if w in number), np.int32)
    counts = np.array([count for _, count in most_frequent], np.int64)
    return Corpus([word for word, _ in most_frequent], counts, tokens)


def _library_files() -> Iterator[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(root.rglob("*.py")):
        if SKIPPED.isdisjoint(file.relative_to(root).parts):
            yield file


def _files(path: Path) -> Iterator[Path]:
    if not path.exists():
        raise FileNotFoundError(f"no such file or folder: {path}")
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
        raise OSError(f"cannot read {file}: {error.strerror}") from error
    # A NUL byte means that this is no text.
    return "" if b"\0" in data else data.decode("utf-8", errors="ignore")


# --- the model ---------------------------------------------------------------------


class Data(NamedTuple):
    """The data that batches are drawn from, in device memory."""

    tokens: jax.Array  #: ``[N]`` int32, the text, frequent words thinned out.
    noise: jax.Array  #: ``[NOISE_DRAWS]`` int32, words as often as they are negatives.


def make_data(corpus: Corpus, seed: int) -> Data:
    """Thins out frequent words and tabulates the noise distribution."""
    rng = np.random.default_rng(seed)
    share = corpus.counts / corpus.counts.sum()
    keep = np.minimum(1.0, np.sqrt(FREQUENT / share) + FREQUENT / share)
    tokens = corpus.tokens[rng.random(corpus.tokens.size) < keep[corpus.tokens]]
    if tokens.size < SPAN + 2 * WINDOW:
        tokens = np.resize(corpus.tokens, max(corpus.tokens.size, SPAN + 2 * WINDOW))
    weights = corpus.counts**0.75
    edges = np.cumsum(weights / weights.sum())
    places = (np.arange(NOISE_DRAWS) + 0.5) / NOISE_DRAWS
    noise = np.minimum(np.searchsorted(edges, places), len(corpus.words) - 1)
    return Data(jnp.asarray(tokens, jnp.int32), jnp.asarray(noise, jnp.int32))


def init_params(num_words: int, dim: int, seed: int) -> Params:
    """``near`` and ``far``, both ``[V, D]`` float32: a word as itself, as context."""
    near = jax.random.uniform(
        jax.random.key(seed), (num_words, dim), minval=-0.5 / dim, maxval=0.5 / dim
    )
    return {"near": near, "far": jnp.zeros((num_words, dim))}


#: The positions of a word's neighbours, and their weights: how often word2vec takes each,
#: as it draws the size of a window.
OFFSETS = [n for n in range(-WINDOW, WINDOW + 1) if n]
WEIGHTS = 1 - (np.abs(OFFSETS) - 1) / WINDOW


def num_spans(batch: int) -> int:
    """How many spans a step takes for so many windows, or a few more."""
    return -(-batch // SPAN)


def draw(data: Data, key: jax.Array, batch: int) -> tuple[jax.Array, jax.Array]:
    """``(spans [num_spans(batch), SPAN + 2 * WINDOW], noise [SHARED])``."""
    place_key, noise_key = jax.random.split(key)
    length = SPAN + 2 * WINDOW
    last = data.tokens.shape[0] - length
    place = jax.random.randint(place_key, (num_spans(batch),), 0, last + 1)
    drawn = jax.random.randint(noise_key, (SHARED,), 0, NOISE_DRAWS)
    spans = data.tokens[place[:, None] + jnp.arange(length)[None]]
    return spans, data.noise[drawn]


def loss(params: Params, spans: jax.Array, noise: jax.Array) -> jax.Array:
    """The loss of telling neighbours from the noise: the mean over pairs.

    ``spans`` ``[S, L + 2 * WINDOW]`` are consecutive words, L windows in each; ``noise``
    ``[N]`` are the negatives of all pairs.
    """
    length = spans.shape[1] - 2 * WINDOW
    near = params["near"][spans[:, WINDOW : WINDOW + length]]
    far, false = params["far"][spans], near @ params["far"][noise].T
    shifted = (far[:, WINDOW + n : WINDOW + n + length] for n in OFFSETS)
    real = jnp.stack([(near * context).sum(axis=-1) for context in shifted], axis=-1)
    weights = (WEIGHTS / WEIGHTS.sum()).astype(np.float32)
    told = jax.nn.log_sigmoid(real) @ weights
    return -(told + NEGATIVES * jax.nn.log_sigmoid(-false).mean(axis=-1)).mean()


def make_step(whole: Callable[..., Any], batch: int) -> Callable[..., Any]:
    """One training step, jitted, the tables and the optimizer state updated in place.

    ``whole(params, state, spans, noise)`` is that step on a batch, as by ``js.train_step``.
    """

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Params, state: Any, data: Data, key: jax.Array) -> Any:
        count = next(x for x in jax.tree.leaves(state) if x.ndim == 0)  # of steps
        drawn = draw(data, jax.random.fold_in(key, count), batch)
        return whole(params, state, *drawn)

    return step


def sparse_step(
    learning_rate: Any, batch: int, untouched: Any = "exact"
) -> tuple[Any, Callable[..., Any]]:
    """``(optimizer, step)`` with row gradients."""
    tx = js.adam(learning_rate, untouched=untouched)
    return tx, make_step(js.train_step(loss, tx), batch)


def dense_step(learning_rate: Any, batch: int) -> tuple[Any, Callable[..., Any]]:
    """``(optimizer, step)`` with gradients as large as tables, of Optax if there."""
    try:
        import optax
    except ImportError:
        tx = js.adam(learning_rate)
        return tx, make_step(js.train_step(loss, tx, sparse=False), batch)
    dense = optax.adam(learning_rate)

    def whole(params: Params, state: Any, *drawn: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(params, *drawn)
        updates, state = dense.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return dense, make_step(whole, batch)


def nearest(
    table: np.ndarray, word: int, among: np.ndarray, count: int
) -> list[tuple[int, float]]:
    """The words whose vectors point most nearly the same way, and the cosine."""
    unit = table / np.maximum(np.linalg.norm(table, axis=1, keepdims=True), 1e-12)
    cosine = unit[among] @ unit[word]
    order = [int(i) for i in np.argsort(-cosine) if among[i] != word]
    return [(int(among[i]), float(cosine[i])) for i in order[:count]]
