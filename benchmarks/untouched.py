"""What it costs an exact step how long its rows were not read.

    python benchmarks/untouched.py

Times exact steps of Adam whose rows have all missed 1, 100 or 10,000 steps, on the same
ids, in turns. What an exact step costs beside a lazy and a dense one: ``step.py``.
"""

import argparse
import functools
import os
import platform
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from step import contenders, start, zipf_ids

import jslices as js


@functools.partial(jax.jit, donate_argnums=(0, 1), static_argnums=(2, 3))
def left_behind(params, state, tx, missed):
    """Both after so many steps whose batches read no row of the table."""
    table, weights = params["table"], jnp.zeros_like(params["w"])
    none = js.IndexedSlices(table[:0], jnp.zeros(0, jnp.int32), table.shape)

    def step(_, carry):
        params, state = carry
        return tx.apply({"table": none, "w": weights}, state, params)

    return jax.lax.fori_loop(0, missed, step, (params, state))


def gaps(num_rows, dim, count, steps, missed):
    """Median seconds of an exact step whose rows have all missed so many steps.

    The ids are those of the step before, so that each touched row has missed just those.
    """
    step, tx = contenders("adam")["exact"]
    ids, target = zipf_ids(np.random.default_rng(0), num_rows, count), jnp.ones(count)
    carry, times = start(tx, num_rows, dim), {gap: [] for gap in missed}
    params, state, _ = step(*carry, ids, target)  # so that there is movement to catch up
    for number in range(steps + 2):
        for gap in missed:
            behind = left_behind(params, state, tx, gap)
            params, state = jax.block_until_ready(behind)
            began = time.perf_counter()
            params, state, value = jax.block_until_ready(step(params, state, ids, target))
            if number >= 2:
                times[gap].append(time.perf_counter() - began)
    if not np.isfinite(value):
        raise SystemExit("the loss is not finite")
    return {gap: statistics.median(each) for gap, each in times.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=float, default=1e5)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--ids", type=float, default=1e4)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--missed", type=int, nargs="+", default=[1, 100, 10_000])
    args = parser.parse_args()
    print(
        f"Adam, V = {args.rows:.0f}, D = {args.dim}, {args.ids:.0f} Zipf ids, jax "
        f"{jax.__version__} on {jax.devices()[0].device_kind}, {platform.machine()}, "
        f"Python {platform.python_version()}, load {os.getloadavg()[0]:.1f}"
    )
    seconds = gaps(int(args.rows), args.dim, int(args.ids), args.steps, args.missed)
    first = seconds[args.missed[0]]
    print(f"{'missed':>10} {'ms':>9} {'/ the first':>12}")
    for gap, each in seconds.items():
        print(f"{gap:>10} {each * 1e3:>9.2f} {each / first:>11.2f}x")


if __name__ == "__main__":
    main()
