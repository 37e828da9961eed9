"""What exact treatment of untouched rows costs: lazy Adam, exact Adam, dense Adam.

    python benchmarks/untouched.py

Two tables. The first has a line for every table size: the median time of a step that is
lazy, exact (``js.optim.exact_step``) and dense (``optax.adam``), and the ratios. The
second times exact steps whose rows have all missed 1, 100 or 100,000 steps, same ids. All
steps are jitted and donated, and run in turns in one process.
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
import optax
from step import zipf_ids

import jslices as js

WARM, TIMED = 8, 10  # steps a turn
KINDS = {
    "lazy": (js.value_and_grad, js.adam(1e-3)),
    "exact": (js.value_and_grad, js.adam(1e-3, untouched="exact")),
    "dense": (jax.value_and_grad, js.GradientTransformation(*optax.adam(1e-3))),
}


def make_step(value_and_grad, tx):
    def loss(params, ids, target):
        return jnp.mean((params["table"][ids] @ params["w"] - target) ** 2)

    def step(params, state, ids, target):
        value, grads = value_and_grad(loss)(params, ids, target)
        updates, state = tx.update(grads, state, params)
        return js.apply_updates(params, updates), state, value

    step = js.optim.exact_step(loss, tx) if tx.catches_up else step
    return jax.jit(step, donate_argnums=(0, 1))


def start(tx, num_rows, dim):
    params = {"table": jnp.zeros((num_rows, dim)), "w": jnp.ones(dim)}
    return params, tx.init(params)


def sizes(num_rows, dim, count, steps):
    """Median seconds a step of each kind."""
    rng = np.random.default_rng(0)
    batches = [zipf_ids(rng, num_rows, count) for _ in range(16)]
    target = jnp.ones(count)
    step_of = {kind: make_step(*parts) for kind, parts in KINDS.items()}
    carry = {kind: start(tx, num_rows, dim) for kind, (_, tx) in KINDS.items()}
    times = {kind: [] for kind in KINDS}
    number = 0
    while len(times["dense"]) < steps:  # in turn, several at a time: see step.py
        for kind, step in step_of.items():
            for position in range(WARM + TIMED):
                began = time.perf_counter()
                out = step(*carry[kind], batches[number % len(batches)], target)
                *carry[kind], _ = jax.block_until_ready(out)
                if position >= WARM:
                    times[kind].append(time.perf_counter() - began)
                number += 1
    return {kind: statistics.median(each) for kind, each in times.items()}


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
    step, tx = make_step(*KINDS["exact"]), KINDS["exact"][1]
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
    parser.add_argument("--rows", type=float, nargs="+", default=[1e4, 1e5, 1e6])
    parser.add_argument(
        "--huge",
        action="store_true",
        help="10,000,000 rows as well (D = 64: nine arrays of 2.6 GB)",
    )
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--ids", type=float, default=1e4)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--missed", type=int, nargs="+", default=[1, 100, 100_000])
    args = parser.parse_args()
    rows = [int(each) for each in args.rows] + [10_000_000] * args.huge
    shape = args.dim, int(args.ids), args.steps
    print(
        f"Adam, D = {args.dim}, {args.ids:.0f} Zipf ids, jax {jax.__version__} on "
        f"{jax.devices()[0].device_kind}, {platform.machine()}, Python "
        f"{platform.python_version()}, load {os.getloadavg()[0]:.1f} on "
        f"{os.cpu_count()} cores"
    )
    print(
        f"{'V':>10} {'lazy ms':>9} {'exact ms':>9} {'dense ms':>9} {'exact / lazy':>13} "
        f"{'dense / exact':>14}"
    )
    for each in rows:
        seconds = sizes(each, *shape)
        lazy, exact, dense = (seconds[kind] for kind in KINDS)
        print(
            f"{each:>10} {lazy * 1e3:>9.2f} {exact * 1e3:>9.2f} {dense * 1e3:>9.2f} "
            f"{exact / lazy:>12.1f}x {dense / exact:>13.1f}x"
        )
    middle = rows[len(rows) // 2]
    print(f"\nAn exact step, V = {middle}, whose rows have all missed so many steps:")
    seconds = gaps(middle, *shape, args.missed)
    first = seconds[args.missed[0]]
    print(f"{'missed':>10} {'ms':>9} {'/ the first':>12}")
    for gap, each in seconds.items():
        print(f"{gap:>10} {each * 1e3:>9.2f} {each / first:>11.2f}x")
    print(f"load at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
