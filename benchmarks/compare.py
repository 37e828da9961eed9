"""jslices, dense JAX, PyTorch and TensorFlow on the same ids, in turns within one run.

    python benchmarks/compare.py                    everything: one to two hours
    python benchmarks/compare.py --quick            two sizes
    python benchmarks/compare.py --dense            dense steps in more of the cells
    python benchmarks/compare.py --before ../old    another checkout of jslices as well
    python benchmarks/compare.py --reads            rows read by other programs
    python benchmarks/compare.py --bags             sums of the rows of 20 ids each
    python benchmarks/compare.py --processes 8      of each contender, instead of two
    python benchmarks/compare.py --device gpu       on a GPU

Each contender has a process of its own, and they take turns of some hundredths of a second,
six each, in random order: what disturbs the machine for longer falls on all of them. All
cells of a table have their turns before the second round, so that a bad minute does not
fall on one cell. Then the processes end, and new ones do the same, as where memory lies in
a process can double a step, for any of the contenders. Those that do not fit into memory
together are loaded one after the other, three times over.

Steps of less than a millisecond are timed up to ten at a time, waiting for the last loss,
as a training loop does: waiting for each would time how a thread is woken. PyTorch,
TensorFlow and FBGEMM (``fbgemm-gpu-cpu``) are optional: what is not installed is left out,
and named. With ``--name`` a run
writes ``benchmarks/results/NAME.csv``, a table ``NAME.md`` and a plot ``NAME.png``.
"""

import argparse
import csv
import datetime
import itertools
import json
import os
import pathlib
import platform
import random
import statistics
import subprocess
import sys
import time

from contenders import (
    BAGS,
    DEVICES,
    ON_GPU,
    OPTIMIZERS,
    OTHER_READS,
    STATE_ARRAYS,
    USUAL,
)
from contenders.ids import batches
from contenders.process import Contender
from contenders.report import lines, plot, summary, table

HERE = pathlib.Path(__file__).parent
ROUNDS = 2  # in each process
PROCESSES, APART = 2, 3  # of each contender; if they do not fit together
SHIFTS = 6  # of each contender in a round
WARM, TIMED = 5e-3, 1e-2  # seconds of steps in a shift; at least one is timed
SHORT = 1e-3  # seconds: steps that take less are timed some at a time
CALM, LARGE = 0.3, 4e8  # seconds of steps before one with a table of so many bytes is timed


class Machine:
    """What a contender runs on.

    ``name``; ``memory``, in bytes; ``bandwidth``, the bytes a second that a copy reads and
    writes with all threads.
    """

    def __init__(self, device):
        code = (
            "import jax, json; from jslices.bench.measure import copy_bandwidth\n"
            "device = jax.devices()[0]\n"
            "limit = (device.memory_stats() or {}).get('bytes_limit')\n"
            "print(json.dumps([copy_bandwidth(), limit, device.device_kind]))\n"
        )
        self.bandwidth, self.memory, self.name = json.loads(
            subprocess.run(
                [sys.executable, "-c", code],
                stdout=subprocess.PIPE,
                env=os.environ | DEVICES[device],
                check=True,
            ).stdout
        )
        if device == "cpu":
            self.memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            self.name = f"{processor()}, {os.cpu_count()} cores"


def groups(everyone, state_bytes, memory):
    """Which are in memory together: all, those with row gradients, or each alone."""
    need = {one: state_bytes * (2 if one.whole else 1) for one in everyone}
    together = []
    for some in (everyone, [one for one in everyone if not one.whole]):
        if sum(need[one] for one in some) < 0.55 * memory:
            together = some
            break
    alone = [one for one in everyone if one not in together]
    apart = [[one] for one in alone if need[one] < 0.7 * memory]
    return [together, *apart] if together else apart


def takes_part(contender, rows, dim, count, kind, dense):
    """Passes over a whole table are long, and hardly depend on the ids."""
    if not contender.whole or rows <= 1e5:
        return True
    if rows > (1e9 / (dim * 4) if dense else 1e6):  # a step takes a second from there on
        return False
    return (dense and rows <= 1e6) or (count, kind) == (10_000, "zipf")


def measure(everyone, optimizer, rows, dim, options, machine):
    """Rows of results, one for each contender and kind of ids."""
    results, order = {}, random.Random(0)
    everyone = [c for c in everyone if optimizer in c.optimizers]
    joins = lambda c, cell: takes_part(c, rows, dim, *cell, options.dense)  # noqa: E731
    cells = list(itertools.product(map(int, options.ids), options.kind))
    others = [c for c in everyone if not c.ours]
    if others:  # a cell without any of them compares nothing
        cells = [cell for cell in cells if any(joins(c, cell) for c in others)]
    everyone = [c for c in everyone if any(joins(c, cell) for cell in cells)]
    state_bytes = rows * dim * 4 * (1 + STATE_ARRAYS[optimizer])
    visits = groups(everyone, state_bytes, machine.memory)
    visits *= options.processes or (PROCESSES if len(visits) == 1 else APART)
    for visit, at_work in enumerate(visits):
        for contender in at_work:
            contender.start()
        together(at_work, "load", optimizer, rows, dim)
        for turn, (count, kind) in itertools.product(range(ROUNDS), cells):
            here = [c for c in at_work if joins(c, (count, kind))]
            # The first time one after the other, as the time to compile is reported.
            ask = together if visit or turn else in_turns
            firsts = ask(here, "ids", count, kind)
            if rows * dim * 4 > LARGE and turn == 0:
                for contender in here:
                    settle(contender)
            for contender, seconds in time_steps(here, order).items():
                cell = (contender.name, count, kind)
                if cell not in results:
                    results[cell] = firsts[contender] | {
                        "seconds": [],
                        "peak": contender("peak")["bytes"],
                        "temporaries": contender("temporaries")["bytes"],
                        "interleaved": len(at_work) > 1,
                    }
                results[cell]["seconds"] += seconds
        for contender in at_work:
            contender.end()
    return [
        {
            "optimizer": optimizer,
            "rows": rows,
            "dim": dim,
            "ids": count,
            "kind": kind,
            "contender": contender.name,
            **figures(results[contender.name, count, kind]),
        }
        for contender, (count, kind) in itertools.product(everyone, cells)
        if (contender.name, count, kind) in results
    ]


def in_turns(contenders, *order):
    return {contender: contender(*order) for contender in contenders}


def together(contenders, *order):
    for contender in contenders:
        contender.send(*order)
    return {contender: contender.answer() for contender in contenders}


def time_steps(contenders, order):
    """The seconds of each contender's steps; ``order`` is a random number generator."""
    shifts = {contender: shift(contender) for contender in contenders}
    seconds = {contender: [] for contender in contenders}
    for _ in range(SHIFTS):
        # Not always after the same one, whose threads may still be awake.
        for contender in order.sample(contenders, len(contenders)):
            seconds[contender] += contender("run", *shifts[contender])["seconds"]
    return seconds


def shift(contender):
    """How often it runs to warm up, how often timed, and how many steps each time."""
    once = statistics.median(contender("run", 1, 2, 1)["seconds"])
    several = max(1, min(10, int(SHORT / once)))
    runs = lambda seconds: int(seconds / once / several)  # noqa: E731
    return min(runs(WARM), 5), max(1, min(runs(TIMED), 10)), several


def figures(result):
    median = statistics.median(result["seconds"])
    return {
        "ms": round(median * 1e3, 4),
        "steps": len(result["seconds"]),
        "interleaved": result["interleaved"],
        "compile_s": round(max(0.0, result["first"] - median), 2),
        "peak_bytes": result["peak"],
        "temporary_bytes": result["temporaries"],
    }


def settle(contender):
    end = time.monotonic() + CALM
    while time.monotonic() < end:
        contender("run", 1, 0, 1)


def floor_ms(row, speed):
    """The rows read forward, and each distinct one of the arrays read and written."""
    sets = batches(row["rows"], row["ids"], row["kind"])
    unique = statistics.mean(len(set(ids.tolist())) for ids in sets)
    moved = (
        4 * row["dim"] * (row["ids"] + 2 * unique * (1 + STATE_ARRAYS[row["optimizer"]]))
    )
    return round(moved / speed * 1e3, 4)


def processor():
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
        return text.split("model name")[1].split(":")[1].split("\n")[0].strip()
    except (OSError, IndexError):
        return platform.processor()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=float, nargs="+", default=[1e4, 1e5, 1e6, 1e7])
    parser.add_argument("--dim", type=int, nargs="+", default=[16, 64, 128])
    parser.add_argument("--ids", type=float, nargs="+", default=[1e3, 1e4, 1e5])
    parser.add_argument("--kind", nargs="+", default=["zipf", "uniform"])
    parser.add_argument("--optimizer", nargs="+", default=OPTIMIZERS, choices=STATE_ARRAYS)
    parser.add_argument("--contender", nargs="+", help="which take part")
    parser.add_argument("--device", choices=DEVICES, default="cpu")
    parser.add_argument("--reads", action="store_true", help="rows read by other programs")
    parser.add_argument("--bags", action="store_true", help="sums of the rows of bags")
    parser.add_argument("--dense", action="store_true", help="dense steps in more cells")
    parser.add_argument(
        "--processes", type=int, help="of each contender, one after another"
    )
    parser.add_argument("--before", metavar="CHECKOUT", type=pathlib.Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--name", help="of the files in benchmarks/results")
    parser.add_argument("--redraw", metavar="NAME", help="draw these results anew")
    options = parser.parse_args()
    if options.redraw:
        return redraw(HERE / "results" / options.redraw)
    if options.quick:
        options.rows, options.dim, options.kind = [1e4, 1e6], [64], ["zipf"]
        options.ids, options.optimizer = [1e4], ["adam"]
    if options.reads:
        options.contender = ["jslices", *OTHER_READS]
    if options.bags:
        options.contender = BAGS
    device = options.device
    names = options.contender or (ON_GPU if device == "gpu" else USUAL)
    everyone = [Contender(name, device=device) for name in names]
    if options.before:
        if not (options.before / "jslices").is_dir():
            parser.error(f"--before {options.before}: no checkout of jslices")
        ours = [contender.name for contender in everyone if contender.ours]
        everyone += [Contender(name, options.before, device) for name in ours]
    missing = [f"{c.name} ({c.missing})" for c in everyone if c.missing]
    everyone = [c for c in everyone if not c.missing]
    if not everyone:
        sys.exit("nothing to compare: " + "; ".join(missing))
    machine = Machine(device)
    about = [
        f"{datetime.date.today()}, {machine.name}, "
        f"{machine.memory / 2**30:.0f} GiB, Python {platform.python_version()}, "
        f"GLIBC_TUNABLES={os.environ.get('GLIBC_TUNABLES', '')!r}"
        + (f", {options.processes} processes of each" if options.processes else ""),
        "; ".join(dict.fromkeys(c.version for c in everyone)),
        f"copy bandwidth in this run: {machine.bandwidth / 1e9:.1f} GB/s read and written",
    ] + [f"left out: {name}" for name in missing]
    print("\n".join(about))
    ours, results = [c.name for c in everyone if c.ours], []
    for optimizer, rows, dim in itertools.product(
        options.optimizer, map(int, options.rows), options.dim
    ):
        new = measure(everyone, optimizer, rows, dim, options, machine)
        for row in new:
            row["floor_ms"] = floor_ms(row, machine.bandwidth)
        results += new
        print("\n".join(lines(new, ours)), flush=True)
        if options.name:
            write(results, about, ours, HERE / "results" / options.name)
    compared = list(summary(results, ours))
    if len(compared) > 2:  # more than the heading
        print("\n".join(compared))


def write(results, about, ours, path):
    """The measurements as they are, the table, and the plot."""
    with open(f"{path}.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, results[0])
        writer.writeheader()
        writer.writerows(results)
    pathlib.Path(f"{path}.md").write_text(table(results, about, ours))
    plot(results, f"{path}.png", ours)


def redraw(path):
    """The plot anew, from measurements that are there."""
    with open(f"{path}.csv", newline="") as file:
        results = list(csv.DictReader(file))
    for row in results:
        row.update({key: int(row[key]) for key in ("rows", "dim", "ids")})
        row["ms"] = float(row["ms"])
    ours = dict.fromkeys(x["contender"] for x in results if "jslices" in x["contender"])
    plot(results, f"{path}.png", list(ours))


if __name__ == "__main__":
    main()
