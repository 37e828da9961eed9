"""What stochastic rounding keeps: word vectors in float32 and in bfloat16.

    python benchmarks/rounding.py [--text PATH] [--learning-rate 3e-4] [--plot FILE]

The demo's skip-gram with negative sampling, trained three times from the same start on the
same batches: with tables in float32, in bfloat16 rounded to nearest, and in bfloat16
rounded stochastically. State and arithmetic are float32 in all three, so that they differ
in the rounding of the tables alone. Prints the loss of pairs that are drawn once, before
and while the vectors are trained.
"""

import argparse
import functools
import pathlib

import jax
import jax.numpy as jnp

import jslices as js
from jslices.demo.skipgram import count_of, draw, init_params, loss, make_data, read_corpus

KINDS = {
    "float32": ("float32", False),
    "bfloat16, nearest": ("bfloat16", False),
    "bfloat16, stochastic": ("bfloat16", True),
}
PAIRS, PARTS = 4096, 8  # of the loss that is printed


def curve(kind, corpus, data, optimizer, options):
    """The losses ``[lines + 1]`` of one way to keep the tables."""
    dtype, stochastic = KINDS[kind]
    tx = js.optim.with_state_dtype(optimizer, "float32")

    def wide(params):
        return {name: table.astype("float32") for name, table in params.items()}

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, data, key):
        key = jax.random.fold_in(key, count_of(state))
        pairs = draw(data, key, options.batch)
        grads = js.grad(lambda params: loss(wide(params), *pairs))(params)
        return tx.apply(grads, state, params, key if stochastic else None)

    @jax.jit
    def score(params, data):
        keys = jax.random.split(jax.random.key(options.seed + 2), PARTS)
        each = [loss(wide(params), *draw(data, key, PAIRS)) for key in keys]
        return jnp.stack(each).mean()

    start = init_params(len(corpus.words), options.dim, options.seed)
    params = {name: table.astype(dtype) for name, table in start.items()}
    state, key = tx.init(params), jax.random.key(options.seed + 1)
    losses = [float(score(params, data))]
    for _ in range(options.lines):
        for _ in range(options.steps // options.lines):
            params, state = step(params, state, data, key)
        losses.append(float(score(params, data)))
    return losses


def draw_curves(curves, steps, file):
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    for kind, losses in curves.items():
        axes.plot(steps, losses, label=kind)
    axes.set(xlabel="steps", ylabel="loss of a skip-gram")
    axes.legend()
    figure.savefig(file, dpi=120, bbox_inches="tight")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--text", type=pathlib.Path, help="instead of Python's standard library")
    add("--words", type=int, help="keep the most frequent ones (default: all)")
    add("--optimizer", default="adam", help="of jslices (default: adam)")
    add("--learning-rate", type=float, default=3e-4, help="(default: 3e-4)")
    add("--dim", type=int, default=64)
    add("--batch", type=int, default=1024)
    add("--steps", type=int, default=10_000)
    add("--lines", type=int, default=5, help="how often the loss is printed")
    add("--seed", type=int, default=0)
    add("--plot", type=pathlib.Path, metavar="FILE")
    options = parser.parse_args()
    corpus = read_corpus(options.text, options.words)
    data = make_data(corpus, options.seed)
    optimizer = getattr(js, options.optimizer)(options.learning_rate)
    print(
        f"{len(corpus.words):,} words, {corpus.tokens.size:,} tokens, {options.optimizer}, "
        f"learning rate {options.learning_rate:g}, {options.batch} windows a step\n"
    )
    curves = {kind: curve(kind, corpus, data, optimizer, options) for kind in KINDS}
    print(f"| steps | {' | '.join(curves)} |\n|---:|{'---:|' * len(curves)}")
    steps = [i * (options.steps // options.lines) for i in range(options.lines + 1)]
    for line in zip(steps, *curves.values(), strict=True):
        number, *losses = line
        print(f"| {number:,} | {' | '.join(f'{x:.3f}' for x in losses)} |")
    if options.plot:
        draw_curves(curves, steps, options.plot)


if __name__ == "__main__":
    main()
