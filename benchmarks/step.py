"""One training step, row gradients against dense ones, side by side in one run.

    python benchmarks/step.py

Prints a line for every table size: the median time of a step with jslices and with plain
JAX and Optax, their ratio, and the gradient's bytes. Both steps are jitted and donated,
run in turns on the same ids, and differ in three names only.
"""

import argparse
import functools
import platform
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jslices as js

WARM, TIMED = 8, 10  # steps a turn


def make_step(value_and_grad, tx, apply_updates):
    def loss(params, ids, target):
        rows = params["table"][ids]
        return jnp.mean((rows @ params["w"] - target) ** 2)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, ids, target):
        value, grads = value_and_grad(loss)(params, ids, target)
        updates, state = tx.update(grads, state, params)
        return apply_updates(params, updates), state, value

    return step


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


def measure(num_rows, dim, count, steps, optimizer):
    """Median seconds a step: ``(sparse, dense)``."""
    rng = np.random.default_rng(0)
    batches = [zipf_ids(rng, num_rows, count) for _ in range(16)]
    target = jnp.ones(count)
    kinds = {
        "sparse": (js.value_and_grad, getattr(js, optimizer)(1e-3), js.apply_updates),
        "dense": (
            jax.value_and_grad,
            getattr(optax, optimizer)(1e-3),
            optax.apply_updates,
        ),
    }
    steps_of, carry, times = {}, {}, {kind: [] for kind in kinds}
    for kind, parts in kinds.items():
        steps_of[kind] = make_step(*parts)
        params = {"table": jnp.zeros((num_rows, dim)), "w": jnp.ones(dim)}
        carry[kind] = (params, parts[1].init(params))
    # In turn, but several steps at a time: a dense step empties the caches of the
    # processor, and a training loop does not run one between two sparse steps.
    number = 0
    while len(times["dense"]) < steps:
        for kind, step in steps_of.items():
            for position in range(WARM + TIMED):
                start = time.perf_counter()
                out = step(*carry[kind], batches[number % len(batches)], target)
                *carry[kind], _ = jax.block_until_ready(out)
                if position >= WARM:
                    times[kind].append(time.perf_counter() - start)
                number += 1
    return tuple(statistics.median(times[kind]) for kind in kinds)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=float, nargs="+", default=[1e4, 1e5, 1e6])
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--ids", type=float, default=1e4)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--optimizer", default="adam", choices=["sgd", "adagrad", "adam"])
    args = parser.parse_args()
    print(
        f"{args.optimizer}, D = {args.dim}, {args.ids:.0f} Zipf ids, jax "
        f"{jax.__version__} on {jax.devices()[0].device_kind}, {platform.machine()}, "
        f"Python {platform.python_version()}"
    )
    print(
        f"{'V':>10} {'jslices ms':>11} {'Optax ms':>9} {'faster':>7} {'gradient bytes':>24}"
    )
    for rows in map(int, args.rows):
        sparse, dense = measure(rows, args.dim, int(args.ids), args.steps, args.optimizer)
        small, big = args.ids * (4 * args.dim + 4), rows * args.dim * 4
        print(
            f"{rows:>10} {sparse * 1e3:>11.2f} {dense * 1e3:>9.2f} {dense / sparse:>6.1f}x"
            f" {small / 1e6:>8.1f} MB of {big / 1e6:>6.1f} MB"
        )


if __name__ == "__main__":
    main()
