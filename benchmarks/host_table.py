"""A table in host memory or in a file, against the same table in the device's memory.

    python benchmarks/host_table.py
    python benchmarks/host_table.py --folder /disk --large 20

All are trained in turns, by the same batches and the same optimizer, in one run. Throughput
is that of the table in memory over it. ``--large`` also trains a file of so many GiB, of
which few pages are ever written, and prints what memory that took.
"""

import argparse
import functools
import os
import statistics
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
from step import zipf_ids

import jslices as js

STEPS = 16  # a turn, whose batches all have their own ids


def loss(table, w, ids, wanted):
    return jnp.mean((table[ids] @ w - wanted) ** 2)


def in_memory(shape, tx, wanted):
    """Trains on some batches; its table is in the device's memory."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(table, state, w, ids):
        value, (grads, dw) = js.value_and_grad(loss, (0, 1))(table, w, ids, wanted)
        table, state = tx.apply(grads, state, table)
        return table, state, w - 0.001 * dw, value

    table, w = jnp.zeros(shape), jnp.ones(shape[1])
    carry = [table, tx.init(table), w]

    def train(batches):
        for ids in batches:
            *carry[:], value = step(*carry, ids)
        jax.block_until_ready((carry, value))

    return train


def on_the_host(shape, tx, wanted, **options):
    """The same with a HostTable."""

    @functools.partial(jax.jit, donate_argnums=0)
    def step(rows, w, ids, key):
        table, state = rows.unpack()
        value, (grads, dw) = js.value_and_grad(loss, (0, 1))(table, w, ids, wanted)
        table, state = tx.apply(grads, state, table)
        key = key if "stored" in options else None
        return rows.pack(table, state, key), w - 0.001 * dw, value

    table, w = js.HostTable(shape, tx, **options), [jnp.ones(shape[1])]
    key = jax.random.key(0)

    def train(batches):
        for ids in batches:
            rows, places = table.fetch(ids)
            rows, w[0], _ = step(rows, w[0], places, key)
            table.store(rows)
        assert table.steps  # everything is written

    return train


def measure(shape, count, tx, folder, turns):
    """``{name: seconds of each turn}``."""
    rng, wanted = np.random.default_rng(0), jnp.ones(count)
    batches = [np.asarray(zipf_ids(rng, shape[0], count)) for _ in range(STEPS)]
    host = functools.partial(on_the_host, shape, tx, wanted)
    runs = {
        "in memory": in_memory(shape, tx, wanted),
        "RAM": host(overlap=False),
        "RAM, overlapping": host(overlap=True),
        "RAM, bfloat16": host(overlap=False, stored="bfloat16"),
        "RAM, float8": host(overlap=False, stored="float8_e4m3fn"),
        "file": host(path=f"{folder}/a", overlap=False),
        "file, overlapping": host(path=f"{folder}/b", overlap=True),
    }
    times = {name: [] for name in runs}
    for turn in range(2 + turns):
        for name, train in runs.items():
            train(batches[:2])  # a turn begins with what it needs in the caches
            start = time.perf_counter()
            train(batches)
            if turn >= 2:
                times[name].append(time.perf_counter() - start)
    distinct = statistics.mean(len(np.unique(x)) for x in batches)
    return times, distinct


def train_large(gibibytes, dim, count, tx, folder):
    """Trains a file of so many GiB, and prints what memory that takes."""
    rng, wanted = np.random.default_rng(0), jnp.ones(count)
    rows = int(gibibytes * 2**30) // (12 * dim + 4)
    train = on_the_host((rows, dim), tx, wanted, path=f"{folder}/large")
    print("\n| steps | ms a step | anonymous memory | of the file on the disk |")
    print(f"{'|---' * 4}|")
    for _ in range(5):
        batches = [rng.integers(0, rows, count) for _ in range(STEPS)]
        start = time.perf_counter()
        train(batches)
        took = (time.perf_counter() - start) / STEPS * 1e3
        written = os.stat(f"{folder}/large").st_blocks * 512 / 2**20
        print(f"| {STEPS} | {took:.1f} | {anonymous():.0f} MB | {written:.0f} MB |")
    size = os.path.getsize(f"{folder}/large") / 2**30
    print(f"\n{rows} rows, a file of {size:.1f} GiB")


def anonymous():
    """MB of memory that is no file's."""
    with open("/proc/self/status") as status:
        (line,) = (x for x in status if x.startswith("RssAnon"))
    return int(line.split()[1]) / 1024


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=float, default=1e6)
    parser.add_argument("--dim", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--ids", type=float, default=16384)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--folder", help="for the files; a temporary one")
    parser.add_argument("--large", type=float, help="GiB of a file to train as well")
    options = parser.parse_args()
    tx, count = js.adam(1e-3), int(options.ids)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for dim in options.dim:
            shape = int(options.rows), dim
            times, distinct = measure(shape, count, tx, folder, options.turns)
            print(
                f"\nadam, V = {shape[0]}, D = {dim}, {count} Zipf ids, {distinct:.0f} of "
                f"them distinct, jax {jax.__version__}\n\n"
                "| table | ms a step | throughput |\n|---|---:|---:|"
            )
            # Of each turn, as what else the machine does changes between turns.
            for name, mine in times.items():
                pairs = zip(times["in memory"], mine, strict=True)
                ratio = statistics.median(memory / other for memory, other in pairs)
                took = statistics.median(mine) / STEPS * 1e3
                print(f"| {name} | {took:.2f} | {ratio:.2f} |", flush=True)
            for name in "ab":
                os.unlink(f"{folder}/{name}")
        if options.large:
            train_large(options.large, options.dim[0], count, tx, folder)


if __name__ == "__main__":
    main()
