"""One training step: dense Optax, and exact and lazy rows, side by side in one run.

    python benchmarks/step.py
    python benchmarks/step.py --rows 1e4 1e5 1e6 1e7 --uniform

Prints a line for every table size: the median time of a step with ``jax.value_and_grad``
and Optax, of ``js.train_step`` with ``untouched="exact"`` and without, their ratios, and
the bytes of the gradient. All steps are jitted and donated, and run in turns on the same
ids.
"""

import argparse
import os
import platform
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jslices as js

WARM, TIMED = 8, 10  # steps a turn


def loss(params, ids, target):
    return jnp.mean((params["table"][ids] @ params["w"] - target) ** 2)


def dense_step(loss, tx):
    """What ``js.train_step`` replaces."""

    def step(params, state, *batch):
        value, grads = jax.value_and_grad(loss)(params, *batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def contenders(optimizer):
    """``{kind: (step, optimizer)}``."""
    ours, theirs = (getattr(library, optimizer) for library in (js, optax))
    exact, lazy, dense = ours(1e-3, untouched="exact"), ours(1e-3), theirs(1e-3)
    steps = {
        "dense": (dense_step(loss, dense), dense),
        "exact": (js.train_step(loss, exact), exact),
        "lazy": (js.train_step(loss, lazy), lazy),
    }
    return {
        kind: (jax.jit(step, donate_argnums=(0, 1)), tx)
        for kind, (step, tx) in steps.items()
    }


def start(tx, num_rows, dim):
    params = {"table": jnp.zeros((num_rows, dim)), "w": jnp.ones(dim)}
    return params, tx.init(params)


def zipf_ids(rng, num_rows, count, num_words=100_000):
    """Ids as words occur: the n-th most frequent one about 1/n times as often.

    Of a larger table the same number of words is in use, at rows all over it: so that two
    sizes differ in the table and not in the number of distinct ids.
    """
    num_words = min(num_words, num_rows)
    weights = 1.0 / np.arange(1, num_words + 1) ** 1.05
    edges = np.cumsum(weights / weights.sum())
    ranks = np.minimum(np.searchsorted(edges, rng.random(count)), num_words - 1)
    row_of_word = np.random.default_rng(1).permutation(num_rows)
    return jnp.asarray(row_of_word[ranks], jnp.int32)


def uniform_ids(rng, num_rows, count):
    return jnp.asarray(rng.integers(0, num_rows, count), jnp.int32)


def measure(steps, batches, shape, number_of_steps):
    """Median seconds a step of each kind."""
    target = jnp.ones(len(batches[0]))
    carry = {kind: start(tx, *shape) for kind, (_, tx) in steps.items()}
    times, number = {kind: [] for kind in steps}, 0
    # In turn, but several steps at a time: a dense step empties the caches of the
    # processor, and a training loop does not run one between two sparse steps.
    while len(times["dense"]) < number_of_steps:
        for kind, (step, _) in steps.items():
            for position in range(WARM + TIMED):
                began = time.perf_counter()
                out = step(*carry[kind], batches[number % len(batches)], target)
                *carry[kind], _ = jax.block_until_ready(out)
                if position >= WARM:
                    times[kind].append(time.perf_counter() - began)
                number += 1
    return {kind: statistics.median(each) for kind, each in times.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=float, nargs="+", default=[1e4, 1e5, 1e6])
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--ids", type=float, default=1e4)
    parser.add_argument("--uniform", action="store_true", help="ids (default: Zipf)")
    parser.add_argument("--steps", type=int, default=30)
    kinds = ["adam", "adamw", "lion", "rmsprop"]
    parser.add_argument("--optimizer", default="adam", choices=kinds)
    args = parser.parse_args()
    draw, count = uniform_ids if args.uniform else zipf_ids, int(args.ids)
    print(
        f"{args.optimizer}, D = {args.dim}, {count:,} {draw.__name__.replace('_', ' ')}, "
        f"jax {jax.__version__} on {jax.devices()[0].device_kind}, {platform.machine()}, "
        f"Python {platform.python_version()}, load {os.getloadavg()[0]:.1f}"
    )
    print(
        f"{'V':>10} {'Optax ms':>9} {'exact ms':>9} {'faster':>7} {'lazy ms':>9} "
        f"{'faster':>7} {'exact / lazy':>13} {'gradient bytes':>21}"
    )
    steps = contenders(args.optimizer)
    for rows in map(int, args.rows):
        rng = np.random.default_rng(0)
        batches = [draw(rng, rows, count) for _ in range(16)]
        seconds = measure(steps, batches, (rows, args.dim), args.steps)
        dense, exact, lazy = (seconds[kind] for kind in ("dense", "exact", "lazy"))
        small, big = count * (4 * args.dim + 4), rows * args.dim * 4
        print(
            f"{rows:>10} {dense * 1e3:>9.2f} {exact * 1e3:>9.2f} {dense / exact:>6.1f}x "
            f"{lazy * 1e3:>9.2f} {dense / lazy:>6.1f}x {exact / lazy:>12.2f}x "
            f"{small / 1e6:>6.1f} of {big / 1e6:>8.1f} MB",
            flush=True,
        )


if __name__ == "__main__":
    main()
