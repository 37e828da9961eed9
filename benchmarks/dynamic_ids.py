"""What tables keyed by ids cost: a step beside one with hashed ids, a map beside a dict.

    python benchmarks/dynamic_ids.py

The first table has a line for every number of ids: the median time of a step of Adam on
ids taken modulo V, of the same with a map that has seen all of them, with a map to which
every tenth id is new (their rows begin anew), and the ratios. The second has the times of
``admit`` and ``find`` alone, of ``numpy.searchsorted`` in sorted ids, and of a dict. Steps
are jitted and donated, and run in turns in one process.
"""

import argparse
import functools
import os
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

import jslices as js
from jslices import dynamic

WARM, TIMED = 3, 5  # steps a turn
TX = js.adam(1e-3)


def loss(params, rows):
    return jnp.mean((params["table"][rows] @ params["w"] - 1.0) ** 2)


def train(params, state, rows):
    return TX.apply(js.grad(loss)(params, rows), state, params)


@functools.partial(jax.jit, donate_argnums=(0, 1))
def hashed_step(params, state, batch):
    height = jnp.uint32(params["table"].shape[0])
    return train(params, state, (batch.low % height).astype(jnp.int32))


@functools.partial(jax.jit, donate_argnums=(0, 1, 2))
def keyed_step(ids, params, state, batch):
    ids, out = ids.admit(batch)
    rows, values = {"table": out.fresh, "w": None}, {"table": 0.0, "w": None}
    params, state = js.checkpoint.reset_rows(TX, params, state, rows, values)
    return ids, *train(params, state, out.rows)


def on_device(ids):
    return jax.tree.map(jnp.asarray, dynamic.wide_ids(ids))


class Ids:
    """Known ids, as many as half of the rows, and others that nobody has seen."""

    def __init__(self, num_rows):
        self.rng = np.random.default_rng(0)
        self.known = self.rng.integers(0, 2**62, num_rows // 2)

    def batch(self, count, new):
        ids = self.rng.choice(self.known, count)
        others = self.rng.integers(0, 2**62, count)
        return np.where(self.rng.random(count) < new, others, ids)

    def full_map(self, num_rows):
        ids = dynamic.id_map(num_rows)
        for part in np.array_split(self.known, 8):
            ids, _ = jax.jit(lambda ids, batch: ids.admit(batch))(ids, on_device(part))
        return ids


def start(num_rows, dim):
    params = {"table": jnp.zeros((num_rows, dim)), "w": jnp.ones(dim)}
    return params, TX.init(params)


def steps(num_rows, dim, count, repeats):
    """Median seconds a step: hashed, keyed, keyed with new ids."""
    ids = Ids(num_rows)
    full = ids.full_map(num_rows)
    carries = {
        "hashed": (hashed_step, 0.0, start(num_rows, dim)),
        "known": (keyed_step, 0.0, (full, *start(full.num_rows, dim))),
        "new": (
            keyed_step,
            0.1,
            (jax.tree.map(jnp.copy, full), *start(full.num_rows, dim)),
        ),
    }
    batches = {
        name: [on_device(ids.batch(count, new)) for _ in range(16)]
        for name, (_, new, _) in carries.items()
    }
    times = {name: [] for name in carries}
    for turn in range(repeats):
        for name, (step, new, carry) in carries.items():
            for position in range(WARM + TIMED):
                batch = batches[name][(turn * TIMED + position) % 16]
                if new:  # never seen before
                    batch = on_device(ids.batch(count, new))
                began = time.perf_counter()
                carry = jax.block_until_ready(step(*carry, batch))
                if position >= WARM:
                    times[name].append(time.perf_counter() - began)
            carries[name] = step, new, carry
    return [statistics.median(each) for each in times.values()]


def maps(num_rows, count, repeats):
    """Median seconds of admit, find, searchsorted, a dict."""
    ids = Ids(num_rows)
    held = [ids.full_map(num_rows)]
    batches = [ids.batch(count, 0.0) for _ in range(repeats + 2)]
    placed = [on_device(batch) for batch in batches]
    ordered = np.sort(ids.known)
    by_id = dict(zip(ids.known.tolist(), range(len(ids.known)), strict=True))
    admit = jax.jit(lambda ids, batch: ids.admit(batch), donate_argnums=0)
    find = jax.jit(lambda ids, batch: ids.find(batch))

    def admitted(number):
        held[0], out = admit(held[0], placed[number])
        return out

    calls = {
        "admit": admitted,
        "find": lambda number: find(held[0], placed[number]),
        "searchsorted": lambda number: np.searchsorted(ordered, batches[number]),
        "dict": lambda number: [by_id.get(each) for each in batches[number].tolist()],
    }
    times = {name: [] for name in calls}
    for number in range(repeats + 2):
        for name, call in calls.items():
            began = time.perf_counter()
            jax.block_until_ready(call(number))
            times[name].append(time.perf_counter() - began)
    return [statistics.median(each[2:]) for each in times.values()]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=float, default=1e6)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--ids", type=float, nargs="+", default=[1e3, 1e4, 1e5])
    parser.add_argument("--repeats", type=int, default=6)
    args = parser.parse_args()
    js.keep_memory()
    num_rows, counts = int(args.rows), [int(each) for each in args.ids]
    print(
        f"V = {num_rows}, D = {args.dim}, Adam, jax {jax.__version__} on "
        f"{jax.devices()[0].device_kind}, load {os.getloadavg()[0]:.1f} on "
        f"{os.cpu_count()} cores"
    )
    print(f"{'K':>8} {'hashed ms':>10} {'known':>8} {'new':>8} {'known /':>8} {'new /':>8}")
    for count in counts:
        hashed, known, new = steps(num_rows, args.dim, count, args.repeats)
        print(
            f"{count:>8} {hashed * 1e3:>10.2f} {known * 1e3:>8.2f} {new * 1e3:>8.2f} "
            f"{known / hashed:>7.2f}x {new / hashed:>7.2f}x",
            flush=True,
        )
    print(f"\n{'K':>8} {'admit ms':>9} {'find':>8} {'searchsorted':>13} {'dict':>8}")
    for count in counts:
        seconds = [1e3 * each for each in maps(num_rows, count, args.repeats)]
        print("{:>8} {:>9.2f} {:>8.2f} {:>13.2f} {:>8.2f}".format(count, *seconds))


if __name__ == "__main__":
    main()
