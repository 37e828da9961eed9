"""Word vectors of the demo beside gensim's word2vec, on the same text, in turns.

    pip install ".[demo]" gensim
    python benchmarks/word_vectors.py

The text is the source of Python's standard library, and the question to which there is an
answer: of the five nearest neighbours of a name that mostly stands in one module, how many
are at home in the same one. Both see the text as often, with 64 numbers a word, a window of
three and five negatives; gensim has two workers. Each has the rate with the best neighbours
after two epochs among 1, 2, 4 and 8 hundredths (jslices) and 0.025, 0.05, 0.1, 0.2 and 0.4
(gensim). Compare ratios. gensim is optional.
"""

import argparse
import functools
import sysconfig
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from turns import Stopwatch, in_turns, medians

from jslices.demo import skipgram

DIM, BATCH = 64, 1024
RATE, GENSIM_RATE = 4e-2, 0.2
PAIRS = 4  # that word2vec takes of a word in the mean, of its six neighbours
OFTEN, MOSTLY, NEAREST = 30, 0.5, 5


def homes(corpus):
    """``(names that mostly stand in one module, that module)``, both ``[n]``."""
    number = {word: i for i, word in enumerate(corpus.words)}
    most, home = (np.zeros(len(corpus.words), np.int64) for _ in range(2))
    root = Path(sysconfig.get_paths()["stdlib"])
    for module, file in enumerate(sorted(root.rglob("*.py"))):
        if not skipgram.SKIPPED.isdisjoint(file.relative_to(root).parts):
            continue
        try:
            own = skipgram.read_corpus(file, None)
        except ValueError:  # without words
            continue
        numbers = np.array([number[word] for word in own.words])
        more = own.counts > most[numbers]
        most[numbers[more]], home[numbers[more]] = own.counts[more], module
    names = np.flatnonzero((corpus.counts >= OFTEN) & (most >= MOSTLY * corpus.counts))
    return names, home[names]


def precision(table, names, home):
    """The share of the nearest neighbours that are at home where the name is."""
    unit = table[names] / np.maximum(np.linalg.norm(table[names], axis=1), 1e-12)[:, None]
    cosine = unit @ unit.T
    np.fill_diagonal(cosine, -2)
    nearest = np.argpartition(-cosine, NEAREST, axis=1)[:, :NEAREST]
    return float((home[nearest] == home[:, None]).mean())


def train_jslices(corpus, data, epochs):
    """``(vectors, Seconds)``; compiling is left out, as the vocabulary is in gensim."""
    steps = epochs * data.tokens.shape[0] // BATCH

    def falling(count):
        return RATE * jnp.maximum(1 - count / steps, 0.02)

    tx, step = skipgram.sparse_step(falling, BATCH, "lazy")
    params = skipgram.init_params(len(corpus.words), DIM, 0)
    key = jax.random.key(1)
    params, state, _ = jax.block_until_ready(step(params, tx.init(params), data, key))
    with Stopwatch() as watch:
        for number in range(steps):
            params, state, value = step(params, state, data, key)
            if number % 100 == 99:
                float(value)
        jax.block_until_ready(params)
    return np.asarray(params["near"]), watch.seconds


def train_gensim(corpus, data, epochs):
    from gensim.models import Word2Vec

    words = [corpus.words[i] for i in corpus.tokens]
    text = [words[i : i + 1000] for i in range(0, len(words), 1000)]
    same = {"vector_size": DIM, "window": skipgram.WINDOW, "negative": skipgram.NEGATIVES}
    rest = {"sg": 1, "min_count": 1, "sample": skipgram.FREQUENT, "workers": 2, "seed": 1}
    model = Word2Vec(**same, **rest, alpha=GENSIM_RATE)
    model.build_vocab(text)
    with Stopwatch() as watch:
        model.train(text, total_examples=len(text), epochs=epochs)
    return np.stack([model.wv[word] for word in corpus.words]), watch.seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    contenders = {"jslices": train_jslices, "gensim": train_gensim}
    try:
        import gensim  # noqa: F401
    except ImportError:
        print("left out: gensim is not installed")
        del contenders["gensim"]
    corpus = skipgram.read_corpus(None, None)
    data = skipgram.make_data(corpus, 0)
    names, home = homes(corpus)
    words = options.epochs * data.tokens.shape[0]
    print(f"{words:,} words (frequent ones thinned out), {len(names)} names with a home")

    def turn(train):
        table, seconds = train(corpus, data, options.epochs)
        return *seconds, precision(table, names, home)

    runs = in_turns(
        {name: functools.partial(turn, train) for name, train in contenders.items()},
        options.turns,
    )
    for name, each in runs.items():
        wall, cores, right = medians(each)
        print(
            f"{name}: {words / wall:,.0f} words a second ({PAIRS * words / wall:,.0f} "
            f"pairs), {words / cores:,.0f} a second of a core; {right:.3f} of the "
            "neighbours are of the same module"
        )


if __name__ == "__main__":
    main()
