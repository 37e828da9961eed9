"""Page faults of steps with large gradients, with malloc as it is and keeping its memory.

    python benchmarks/page_faults.py

XLA:CPU allocates the temporaries of a program anew at each execution (docs/speed.md). Each
line is a process of its own: by hand, that is the gradient of the rows added with
``.at[]``; or an optimizer of jslices, in three calls or in one.
"""

import argparse
import functools
import json
import resource
import statistics
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
from contenders import OPTIMIZERS, RATE
from contenders.ids import batches
from contenders.with_jslices import make, runner, wait

import jslices as js

BY_HAND, IN_ONE_CALL = "sgd by hand", ", tx.apply"
STEPS, WARM = 30, 10


def step_by_hand(rows, dim):
    class Nothing:
        init = staticmethod(lambda table: ())

    def loss(read):
        return 0.5 / read.shape[0] * jnp.sum(read**2)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(table, state, ids):
        value, g = jax.value_and_grad(loss)(table[ids])
        return table.at[ids].add(-RATE * g), state, value

    return runner(step, Nothing, rows, dim)


def measure(name, rows, dim, count, keep):
    if keep:
        js.keep_memory()
    by_hand = name == BY_HAND
    optimizer, in_one_call = name.removesuffix(IN_ONE_CALL), name.endswith(IN_ONE_CALL)
    run, convert = (
        step_by_hand(rows, dim)
        if by_hand
        else make(optimizer, rows, dim, RATE, in_one_call=in_one_call)
    )
    ids = [convert(x) for x in batches(rows, count, "zipf")]
    faults, seconds = [], []
    for number in range(STEPS):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        start = time.perf_counter()
        wait(run(ids[number % len(ids)]))
        seconds.append(time.perf_counter() - start)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return {
        "faults": statistics.median(faults[WARM:]),
        "ms": statistics.median(seconds[WARM:]) * 1e3,
        "arrays": run.temporaries(ids[0]) / (count * dim * 4),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=float, default=1e6)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--ids", type=float, default=1e5)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)  # (step, whether to keep)
    options = parser.parse_args()
    rows, count = int(options.rows), int(options.ids)
    if options.one:
        name, keep = options.one
        print(json.dumps(measure(name, rows, options.dim, count, keep == "True")))
        return
    print(f"V = {rows}, D = {options.dim}, {count} Zipf ids\n")
    print("| step | temporaries / (K D 4) | page faults | ms | kept: page faults | ms |")
    print("|---|---:|---:|---:|---:|---:|")
    ours = [name + call for name in OPTIMIZERS for call in ("", IN_ONE_CALL)]
    for name in (BY_HAND, *ours):
        plain, kept = (
            json.loads(
                subprocess.run(
                    [sys.executable, *sys.argv, "--one", name, str(keep)],
                    stdout=subprocess.PIPE,
                    check=True,
                ).stdout
            )
            for keep in (False, True)
        )
        figures = f"{plain['arrays']:.2f} | {plain['faults']:.0f} | {plain['ms']:.1f}"
        print(
            f"| {name} | {figures} | {kept['faults']:.0f} | {kept['ms']:.1f} |", flush=True
        )


if __name__ == "__main__":
    main()
