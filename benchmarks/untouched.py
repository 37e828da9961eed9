"""What it costs an exact step how long its rows were not read.

    python benchmarks/untouched.py

Times exact steps of Adam whose rows have all missed 1, 100 or 100,000 steps, on the same
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


@functools.partial(jax.jit, donate_argnums=0, static_argnums=1)
def left_behind(state, missed):
    """The state as if so many steps had gone by that touched no row of the table."""
    ahead = state.count + missed
    last = {**state.clock.last, "w": jnp.full_like(state.clock.last["w"], ahead)}
    return state._replace(count=ahead, clock=state.clock._replace(last=last))


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
            state = jax.block_until_ready(left_behind(state, gap))
            began = time.perf_counter()
            params, state, value = jax.block_until_ready(step(params, state, ids, target))
            if number >= 2:
                times[gap].append(time.perf_counter() - began)
    if not np.isfinite(value):
        raise SystemExit("the loss is not finite: the prepared state is wrong")
    return {gap: statistics.median(each) for gap, each in times.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=float, default=1e5)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--ids", type=float, default=1e4)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--missed", type=int, nargs="+", default=[1, 100, 100_000])
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
