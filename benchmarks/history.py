"""The figures of a commit, for benchmarks/results/history.jsonl: one line a commit.

    python benchmarks/history.py                          of this checkout
    python benchmarks/history.py --before ../old ../older   of others too, in turns

For a release, or a commit that changes speed. ``python docs/figures/history.py`` then draws
the picture of docs/speed.md. A line has

* ``compile_cpu_s``: seconds of the processor to trace and compile a step of AdamW with a
  cosine and clipping, of one table (``tracing.py``);
* ``step_ms``: of Adam, D = 64, 10,000 Zipf-distributed ids, by the rows of the table
  (``step.py``);
* ``kernels``: of that step compiled for an H100, V = 1e6 (``devices.py``); none without
  the extra ``gpu``.

All beside JAX with Optax, medians of processes that take turns: compare ratios. The commit
is the last one that changed the package. ``load`` is that of the machine before and after.
"""

import argparse
import collections
import datetime
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys

import jax
import numpy as np
from compare import processor

HERE = pathlib.Path(__file__).parent
FILE = HERE / "results" / "history.jsonl"
DIM, IDS = 64, 10_000
DENSE = "dense"


def compile_seconds():
    from tracing import measure

    seconds = measure(tables=1, layers=0, schedule=True, repeats=2)
    return {kind.replace("JAX + Optax", DENSE): sum(x) for kind, x in seconds.items()}


def step_ms(heights, steps):
    from step import contenders, measure, zipf_ids

    found = {}
    for rows in map(int, heights):
        rng = np.random.default_rng(0)
        batches = [zipf_ids(rng, rows, IDS) for _ in range(16)]
        seconds = measure(contenders("adam"), batches, (rows, DIM), steps)
        found[str(rows)] = {kind: 1e3 * x for kind, x in seconds.items()}
    return found


def kernels(rows):
    from devices import costs_of

    from jslices.bench import compiled

    found = {}
    try:
        for kind, optimizer in (("lazy", "adam"), ("exact", "adam exact")):
            costs = costs_of("h100", optimizer, DIM, rows, IDS)
            found[kind] = sum(costs[compiled.ROWS].kernels.values())
            found[DENSE] = sum(costs[compiled.DENSE].kernels.values())
    except ModuleNotFoundError as error:
        print(f"no kernels: {error}", file=sys.stderr)
    return found


def figures(heights, steps):
    """Of the package that is imported here."""
    return {
        "compile_cpu_s": compile_seconds(),
        "step_ms": step_ms(heights, steps),
        "kernels": kernels(1_000_000),
    }


def figures_of(checkout):
    """The same in a process of its own, of the package in a checkout."""
    command = [sys.executable, __file__, "--here"]
    paths = {"PYTHONPATH": str(checkout.resolve()), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        command, env=os.environ | paths, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def git(checkout, *command):
    command = ["git", "-C", str(checkout), *command]
    return subprocess.check_output(command, text=True).strip()


def commit_of(checkout):
    """The last commit that changed the package, and its date."""
    if git(checkout, "status", "--porcelain", "--", "jslices"):
        sys.exit(f"{checkout}: jslices has changes without a commit. Commit them first")
    log = git(checkout, "log", "-1", "--format=%h %cs", "--abbrev=7", "--", "jslices")
    return dict(zip(("commit", "committed"), log.split(), strict=True))


def median(turns):
    """Of numbers, or of all numbers in dicts of the same keys, to four digits."""
    if isinstance(turns[0], dict):
        return {key: median([turn[key] for turn in turns]) for key in turns[0]}
    value = statistics.median(turns)
    return value if isinstance(value, int) else float(f"{value:.4g}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--before", nargs="+", default=[], metavar="CHECKOUT", type=pathlib.Path
    )
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--here", action="store_true", help="print this process's figures")
    parser.add_argument("--rows", type=float, nargs="+", default=[1e5, 1e6], help="with it")
    parser.add_argument("--steps", type=int, default=30, help="with it")
    options = parser.parse_args()
    if options.here:
        return print(json.dumps(figures(options.rows, options.steps)))
    checkouts = {path: commit_of(path) for path in (*options.before, HERE.parent)}
    about = {
        "measured": str(datetime.date.today()),
        "machine": f"{processor()}, {os.cpu_count()} cores, {platform.machine()}",
        "load": [round(os.getloadavg()[0], 1)],
        "jax": jax.__version__,
    }
    turns = collections.defaultdict(list)
    for _ in range(options.turns):
        for path in checkouts:
            turns[path].append(figures_of(path))
    about["load"].append(round(os.getloadavg()[0], 1))
    lines = FILE.read_text().splitlines() if FILE.exists() else []
    kept = {(line["commit"], line["jax"]): line for line in map(json.loads, lines)}
    for path, commit in checkouts.items():
        line = commit | about | median(turns[path])
        kept[line["commit"], line["jax"]] = line
        print(json.dumps(line))
    ordered = sorted(kept.values(), key=lambda line: (line["committed"], line["commit"]))
    FILE.write_text("".join(f"{json.dumps(line)}\n" for line in ordered))


if __name__ == "__main__":
    main()
