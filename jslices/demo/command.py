"""``python -m jslices demo``: train, show neighbours, compare with dense gradients."""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jslices as js
from jslices._densify import human_bytes
from jslices._install import install_command
from jslices.demo import picture, skipgram
from jslices.demo.picture import refused
from jslices.demo.skipgram import Corpus, read_corpus

SHOWN = ("append", "width", "open", "int", "lock", "socket", "month", "encode")
RARE = 50  # words seen less often are hardly trained
TIMED_STEPS = 20

#: An optimizer and its step.
Contender = tuple[Any, Callable[..., Any]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--text",
        type=Path,
        metavar="PATH",
        help="a file or folder to read instead of the running Python's standard library",
    )
    add(
        "--words",
        type=_positive,
        metavar="N",
        help="keep the N most frequent words (default: all)",
    )
    add("--dim", type=_positive, default=64, help="length of a vector (default: 64)")
    add("--steps", type=_positive, default=20_000, help="(default: 20000)")
    add(
        "--batch",
        type=_positive,
        default=1024,
        help="words a step, up to a multiple of 16 (default: 1024)",
    )
    add("--learning-rate", type=float, default=1e-2, help="falls to 2%% (default: 0.01)")
    add("--seed", type=int, default=0, help="(default: 0)")
    add("--plot", type=Path, metavar="FILE", help="write a picture of the vectors")
    add("--show", nargs="+", metavar="WORD", help="words whose neighbours to print")


def run(options: argparse.Namespace) -> None:
    """Trains and prints; ``argparse.ArgumentError`` for impossible requests."""
    if options.plot is not None:
        picture.check(options.plot)
    try:
        corpus = read_corpus(options.text, options.words)
    except (OSError, ValueError) as error:
        raise refused(str(error)) from error
    shown = _words_to_show(corpus, options.show)
    print(
        f"{corpus.tokens.size:,} words of text, {len(corpus.words):,} distinct; two "
        f"tables of {len(corpus.words):,} x {options.dim} float32"
    )
    data = skipgram.make_data(corpus, options.seed)

    def falling(count: jax.Array) -> Any:
        return options.learning_rate * jax.numpy.maximum(1 - count / options.steps, 0.02)

    contender = skipgram.sparse_step(falling, options.batch)
    params, spent = _train(contender, corpus, data, options)
    windows = skipgram.num_spans(options.batch) * skipgram.SPAN
    pairs = options.steps * windows * len(skipgram.OFFSETS)
    print(
        f"{options.steps:,} steps in {spent:.0f} s: {pairs / spent:,.0f} pairs of words a "
        f"second, each with {skipgram.NEGATIVES} negatives"
    )
    near = np.asarray(params["near"])
    among = np.flatnonzero(corpus.counts >= RARE)
    for number in shown:
        neighbours = skipgram.nearest(near, number, among, 5)
        listed = ", ".join(f"{corpus.words[i]} {cosine:.2f}" for i, cosine in neighbours)
        print(f"  {corpus.words[number]:>10}: {listed or '(no frequent words)'}")
    print(_comparison(falling, corpus, data, options))
    if options.plot is not None:
        picture.draw(near, corpus.words, options.plot)
        print(f"picture: {options.plot}")


def _train(
    contender: Contender, corpus: Corpus, data: skipgram.Data, options: argparse.Namespace
) -> tuple[skipgram.Params, float]:
    """``(the parameters, the seconds it took)``."""
    (tx, step), total = contender, options.steps
    params = skipgram.init_params(len(corpus.words), options.dim, options.seed)
    state = tx.init(params)
    key = jax.random.key(options.seed + 1)
    start = time.perf_counter()
    with _progress(total) as bar:
        for number in range(total):
            params, state, value = step(params, state, data, key)
            if number % 100 == 99 or number == total - 1:
                bar.set_postfix(loss=f"{float(value):.3f}", refresh=False)
                bar.update(number + 1 - bar.n)
    if tx.catches_up:
        params, state = tx.flush(params, state)
    if not np.isfinite(params["near"]).all() or not math.isfinite(float(value)):
        raise refused("the vectors grew beyond all bounds; lower --learning-rate")
    return params, time.perf_counter() - start


def _progress(total: int) -> Any:
    try:
        from tqdm import tqdm
    except ImportError:
        raise refused(f"the demo needs tqdm: {install_command('demo')}") from None
    return tqdm(total=total, unit="step", desc="training")


def _words_to_show(corpus: Corpus, asked: list[str] | None) -> list[int]:
    number = {word: i for i, word in enumerate(corpus.words)}
    if asked:
        missing = [word for word in asked if word not in number]
        if missing:
            raise refused(f"not among the words of the text: {', '.join(missing)}")
        return [number[word] for word in asked]
    usual = [number[w] for w in SHOWN if w in number and corpus.counts[number[w]] >= RARE]
    # In another text: some frequent words, past the very most frequent.
    return usual or list(range(len(corpus.words)))[20:28] or [0]


def _comparison(
    rate: Any, corpus: Corpus, data: skipgram.Data, options: argparse.Namespace
) -> str:
    """The step with dense gradients and Optax beside those with rows, exact and lazy."""
    batch, key = options.batch, jax.random.key(options.seed)
    contenders = [
        skipgram.dense_step(rate, batch),
        skipgram.sparse_step(rate, batch),
        skipgram.sparse_step(rate, batch, "lazy"),
    ]
    times: list[list[float]] = [[] for _ in contenders]
    ready = []
    for tx, step in contenders:
        params = skipgram.init_params(len(corpus.words), options.dim, 0)
        ready.append(step(params, tx.init(params), data, key))
    for _ in range(TIMED_STEPS):  # in turn: what disturbs the machine falls on all
        for i, (_, step) in enumerate(contenders):
            params, state, _ = ready[i]
            start = time.perf_counter()
            ready[i] = jax.block_until_ready(step(params, state, data, key))
            times[i].append(time.perf_counter() - start)
    dense, *sparse = (statistics.median(each) * 1e3 for each in times)
    losses = [f"loss {float(value):.4f} after {TIMED_STEPS + 1}" for *_, value in ready]
    sparse_bytes, dense_bytes = gradient_bytes(params, data, batch)
    less = f"{human_bytes(sparse_bytes)}, {dense_bytes / sparse_bytes:.1f} times less"
    label = "Optax" if "optax" in sys.modules else "JAX"
    lines = [
        f"a step with dense {label} Adam: {dense:.1f} ms, gradients of "
        f"{human_bytes(dense_bytes)}; {losses[0]}"
    ]
    for name, spent, loss in zip(("", ", lazy"), sparse, losses[1:], strict=True):
        lines.append(
            f"a step with row gradients{name}: {spent:.1f} ms, {dense / spent:.1f} times "
            f"as fast, {less}; {loss}"
        )
    return "\n".join(lines)


def gradient_bytes(
    params: skipgram.Params, data: skipgram.Data, batch: int
) -> tuple[int, int]:
    """``(sparse, dense)``: the size of all gradients of one step, without running it."""
    key = jax.random.key(0)
    drawn = jax.eval_shape(lambda: skipgram.draw(data, key, batch))

    def total(grad: Any) -> int:
        leaves = jax.tree.leaves(jax.eval_shape(grad, params, *drawn))
        return sum(x.size * x.dtype.itemsize for x in leaves)

    return total(js.grad(skipgram.loss)), total(jax.grad(skipgram.loss))


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return value
