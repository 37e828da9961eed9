"""The same ids in a small and in a large table: what a step owes to the table's rows.

    python benchmarks/same_ids.py

Both tables take turns in one process, steps of less than a millisecond ten at a time.
"""

import argparse
import statistics
import time

from contenders import OPTIMIZERS, RATE
from contenders.ids import batches
from contenders.with_jslices import make, wait

ROUNDS, SHORT = 60, 1e-3


def timed(step, ids, several):
    start = time.perf_counter()
    for number in range(several):
        loss = step(ids[number % len(ids)])
    wait(loss)
    return (time.perf_counter() - start) / several


def in_turns(steps, ids):
    """The median of each step's seconds; another one begins each round."""
    several = [10 if timed(step, ids, 10) < SHORT else 1 for step in steps]
    seconds = [[] for _ in steps]
    for number in range(ROUNDS):
        for turn in range(len(steps)):
            at = (number + turn) % len(steps)
            seconds[at].append(timed(steps[at], ids, several[at]))
    return [statistics.median(each[ROUNDS // 6 :]) for each in seconds]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=float, nargs=2, default=[1e5, 1e7])
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--ids", type=float, nargs="+", default=[1e3, 1e4])
    options = parser.parse_args()
    rows = [int(x) for x in options.rows]
    for optimizer in OPTIMIZERS:
        (small, convert), (large, _) = (make(optimizer, n, options.dim, RATE) for n in rows)
        for count in map(int, options.ids):
            for kind in ("zipf", "uniform"):
                ids = [convert(x) for x in batches(rows[0], count, kind)]
                a, b = in_turns([small, large], ids)
                print(
                    f"{optimizer}, D {options.dim}, {count:.0e} {kind} ids: "
                    f"V {rows[0]:.0e} {a * 1e3:.2f} ms, V {rows[1]:.0e} {b * 1e3:.2f} ms, "
                    f"{b / a:.2f} times",
                    flush=True,
                )


if __name__ == "__main__":
    main()
