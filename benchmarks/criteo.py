"""A recommender of the shape of MLCommons' Criteo 1TB workload: dense, exact and lazy.

    python benchmarks/criteo.py

One table of 4,194,304 rows, which the ids of 26 categories share, 13 counts, products of
all pairs, and AdamW with a warm-up, clipping by the global norm, shardings over a mesh and
donated buffers, as in MLCommons' algorithmic-efficiency benchmark. Its rows of 128 and wide
layers are 16 and small ones here, and ids are drawn, not read from a file. The contenders
are ``optax.adamw``, ``js.adamw(untouched="exact")`` and ``js.adamw``; they begin with the
same parameters and see the same batches. Prints the losses of the first steps, which dense
and exact must have in common, and the time of a step, taken in turns: compare ratios.
"""

import argparse
import functools
import os
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from step import dense_step
from turns import report, time_steps

import jslices as js

sys.path.append(str(pathlib.Path(__file__).parent.parent / "examples"))
import dlrm

COMPARED = 10  # first steps, whose losses are compared
EXACT = "jslices, exact"


def loss(params, counts, ids, clicked):
    rows = params["tables"][ids]  # [B, 26, D]
    return dlrm.entropy(dlrm.interact(params, counts, rows, jnp.float32), clicked)


def contenders(rate):
    """``{name: (step, tx)}``."""
    clip, ours = js.optim.clip_by_global_norm(1.0), js.optim.chain
    exact = ours(clip, js.adamw(rate, untouched="exact"))
    lazy = ours(clip, js.adamw(rate))
    dense = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate))
    return {
        "dense Optax": (dense_step(loss, dense), dense),
        EXACT: (js.train_step(loss, exact), exact),
        "jslices, lazy": (js.train_step(loss, lazy), lazy),
    }


class Contender:
    """A step on a mesh of all devices: parameters on each of them, batches split."""

    def __init__(self, step, tx, params, batches):
        mesh = jax.sharding.Mesh(jax.devices(), ("batch",))
        everywhere, split = (jax.NamedSharding(mesh, x) for x in (jax.P(), jax.P("batch")))
        self.step = jax.jit(
            step,
            in_shardings=(everywhere, everywhere, split, split, split),
            out_shardings=everywhere,
            donate_argnums=(0, 1),
        )
        self.params = jax.tree.map(jnp.copy, jax.device_put(params, everywhere))
        self.state = jax.device_put(tx.init(self.params), everywhere)
        self.batches, self.count = jax.device_put(batches, split), 0

    def __call__(self):
        batch = self.batches[self.count % len(self.batches)]
        self.count += 1
        self.params, self.state, value = self.step(self.params, self.state, *batch)
        return float(value)


def make_batches(rows, size, count):
    """``(counts [B, 13], ids [B, 26], clicked [B])`` each: all categories in one table."""
    categories = dlrm.of_criteo(10**9, 1)  # all that there are
    draw = dlrm.synthetic(categories, 0, longest=1)

    def batch(number):
        clicks = draw(size, number)
        ids = (clicks.ids[..., 0] + categories.offsets) % rows
        return clicks.counts, ids.astype("int32"), clicks.clicked

    return [batch(number) for number in range(count)]


def make_params(rows, dim):
    params = dlrm.init(jax.random.key(0), dlrm.of_criteo(1, dim), (64, 32), (128, 64))
    table = jax.random.uniform(jax.random.key(1), (rows, dim), minval=-1) / np.sqrt(rows)
    return {**params, "tables": table}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=float, default=2**22)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--timed", type=int, default=5, help="steps in each turn")
    options = parser.parse_args()
    rows = int(options.rows)
    batches = make_batches(rows, options.batch, 16)
    rate = optax.warmup_cosine_decay_schedule(0.0, 2e-3, 5, 10_000)
    params = make_params(rows, options.dim)
    make = functools.partial(Contender, params=params, batches=batches)
    steps = {name: make(*each) for name, each in contenders(rate).items()}
    distinct = np.mean([len(np.unique(ids)) for _, ids, _ in batches])
    print(
        f"{rows:,} rows of {options.dim}, batches of {options.batch:,}: "
        f"{26 * options.batch:,} ids, {distinct:,.0f} distinct; jax {jax.__version__}, "
        f"{jax.device_count()} device, load {os.getloadavg()[0]:.1f}"
    )
    losses = {name: [step() for _ in range(COMPARED)] for name, step in steps.items()}
    for name, values in losses.items():
        print(f"{name}: losses {' '.join(f'{x:.6f}' for x in values)}")
    np.testing.assert_allclose(losses[EXACT], losses["dense Optax"], rtol=1e-5)
    seconds = time_steps(steps, options.turns, options.timed, warm=2)
    print("\n".join(report(seconds, EXACT)))


if __name__ == "__main__":
    main()
