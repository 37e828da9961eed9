"""What a step of differentially private training costs, with noise for rows and for all.

    python benchmarks/private.py

Steps of ``js.optim.dp_sgd``, and dense ones that add noise to every row, in turns in one
run, on the same ids, drawn as words occur. Both clip the gradient of each example as rows:
with dense gradients of examples, a table for each, the ratio would be larger by far.
"""

import argparse
import functools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from step import zipf_ids

import jslices as js

CLIP, SIGMA, RATE = 1.0, 0.8, 0.1


def loss(params, ids, label):  # of one example
    score = params["table"][ids].sum(axis=0) @ params["w"]
    return jnp.logaddexp(0.0, score) - label * score


def of_batch(params, ids, labels):
    return jax.vmap(loss, in_axes=(None, 0, 0))(params, ids, labels).sum()


def clipped(params, ids, labels):
    grads = jax.vmap(js.grad(loss), in_axes=(None, 0, 0))(params, ids, labels)
    return js.per_example_global_norm_clip(grads, CLIP)[0]


def with_rows(size):
    tx = js.optim.dp_sgd(RATE, CLIP, SIGMA, size, jax.random.key(0))

    def step(params, state, ids, labels):
        rows = js.lookup_ids(of_batch)(params, ids, labels)
        params, state = tx.catch_up(params, state, rows)
        return tx.apply(clipped(params, ids, labels), state, params)

    return step, tx


def dense(size):
    def step(params, key, ids, labels):
        total = clipped(params, ids, labels)
        total = {"table": total["table"].to_dense(), "w": total["w"]}
        new = {}
        for name, p in params.items():
            key, own = jax.random.split(key)
            noisy = total[name] + SIGMA * CLIP * jax.random.normal(own, p.shape)
            new[name] = p - RATE / size * noisy
        return new, key

    return step


def seconds(run, carry, *batch):
    """The carry after a call in place, and how long it took."""
    began = time.perf_counter()
    carry = jax.block_until_ready(run(*carry, *batch))
    return carry, time.perf_counter() - began


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=float, default=1e6)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--batch", type=int, default=256, help="examples")
    parser.add_argument("--ids", type=int, default=4, help="of an example")
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    height, in_place = int(args.rows), functools.partial(jax.jit, donate_argnums=(0, 1))
    rows, tx = with_rows(args.batch)
    make = lambda: {"table": jnp.ones((height, args.dim)), "w": jnp.ones(args.dim)}  # noqa: E731
    ours, theirs = (make(), tx.init(make())), (make(), jax.random.key(1))
    rows, whole, flush = in_place(rows), in_place(dense(args.batch)), in_place(tx.flush)
    rng, times = np.random.default_rng(0), {"rows": [], "dense": [], "flush": []}
    for number in range(args.steps + 2):
        ids = zipf_ids(rng, height, args.batch * args.ids).reshape(args.batch, args.ids)
        labels = jnp.asarray(rng.integers(0, 2, args.batch), jnp.float32)
        ours, of_rows = seconds(rows, ours, ids, labels)
        theirs, of_all = seconds(whole, theirs, ids, labels)
        ours, of_flush = seconds(flush, ours)
        if number >= 2:
            for name, each in zip(times, (of_rows, of_all, of_flush), strict=True):
                times[name].append(each)
    median = {name: statistics.median(each) for name, each in times.items()}
    print(
        f"DP-SGD, V = {height}, D = {args.dim}, {args.batch} examples of {args.ids} ids, "
        f"jax {jax.__version__}, {jax.default_backend()}: {1e3 * median['rows']:.1f} ms a "
        f"step with rows, {1e3 * median['dense']:.0f} dense, "
        f"{median['dense'] / median['rows']:.0f} times; a flush "
        f"{1e3 * median['flush']:.0f} ms"
    )


if __name__ == "__main__":
    main()
