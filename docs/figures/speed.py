"""The tables and the picture of docs/speed.md, from benchmarks/results.

python docs/figures/speed.py
"""

import csv
import itertools
import pathlib
import re
import statistics

from style import between, plot

ROOT = pathlib.Path(__file__).parents[2]
OURS, KEPT, DENSE = "jslices", "jslices, memory kept", "Optax dense"
EXACT = "jslices, exact"
NAMES = {"sgd": "SGD", "adagrad": "Adagrad", "adam": "Adam"}


def measured(name):
    """``{(optimizer, (rows, dim, ids), kind): {contender: ms}}`` of a file of results."""
    found = {}
    with open(ROOT / "benchmarks" / "results" / f"{name}.csv") as file:
        for row in csv.DictReader(file):
            sizes = tuple(int(row[key]) for key in ("rows", "dim", "ids"))
            cell = found.setdefault((row["optimizer"], sizes, row["kind"]), {})
            cell[row["contender"]] = float(row["ms"])
    return found


def cells():
    """``(optimizer, (rows, dim, ids), {contender: ms})`` of every cell on a CPU."""
    return [(optimizer, sizes, ms) for (optimizer, sizes, _), ms in measured("cpu").items()]


def against_dense():
    """Times as fast as dense JAX, with the ids of a step for each row of the table."""
    return [
        (ids / rows, ms[DENSE] / ms[OURS])
        for _, (rows, _, ids), ms in cells()
        if DENSE in ms and OURS in ms
    ]


def against_peers(name):
    """Times as fast as the faster of PyTorch and TensorFlow, with the gradient's MB."""
    found = []
    for _, (rows, dim, ids), ms in cells():
        peers = [ms[peer] for peer in {*ms} - {OURS, KEPT, DENSE}]
        if peers and rows >= 1e5 and ids <= rows:
            found.append((ids * dim * 4 / 1e6, min(peers) / ms[name]))
    return found


def spread(points, wanted):
    """How many cells, and the least, the median and the most of them."""
    times = [times for size, times in points if wanted(size)]
    least, most = min(times), max(times)
    return len(times), f"{least:.2f} | {statistics.median(times):.2f} | {most:.1f}"


def machine():
    about = (ROOT / "benchmarks" / "results" / "cpu.md").read_text()
    run, versions = re.findall(r"^- .*", about, re.M)[:2]
    return run.partition(", GLIBC_TUNABLES")[0] + "\n" + versions


def dense():
    lines = ["| ids a step | cells | least | median | most |", "|---|---:|---:|---:|---:|"]
    for label, wanted in (
        ("K < V / 50", lambda share: share < 1 / 50),
        ("V / 50 <= K < V / 2", lambda share: 1 / 50 <= share < 1 / 2),
        ("K >= V / 2", lambda share: share >= 1 / 2),
    ):
        count, times = spread(against_dense(), wanted)
        lines.append(f"| {label} | {count} | {times} |")
    return "\n".join(lines)


def peers():
    names = "default `malloc`: least | median | most | memory kept: least | median | most"
    lines = [f"| gradient, `K * D * 4` bytes | cells | {names} |", "|---|" + "---:|" * 7]
    for label, wanted in (
        ("all", lambda size: True),
        ("below 30 MB", lambda size: size < 30),
        ("30 MB or more", lambda size: size >= 30),
    ):
        count, plain_times = spread(against_peers(OURS), wanted)
        _, kept_times = spread(against_peers(KEPT), wanted)
        lines.append(f"| {label} | {count} | {plain_times} | {kept_times} |")
    return "\n".join(lines)


def unkept():
    """What a step takes without memory kept, in steps with it."""
    points = [(kind, k * d * 4 / 1e6, x[OURS] / x[KEPT]) for kind, (_, d, k), x in cells()]
    lines = ["| step | cells | least | median | most |", "|---|---:|---:|---:|---:|"]
    below = [(size, times) for _, size, times in points]
    rows = [("any, below 30 MB", spread(below, lambda size: size < 30))]
    for name, label in NAMES.items():
        own = [(size, times) for kind, size, times in points if kind == name]
        rows.append((f"{label}, 30 MB or more", spread(own, lambda size: size >= 30)))
    return "\n".join(lines + [f"| {label} | {n} | {times} |" for label, (n, times) in rows])


def h100():
    """Microseconds of a step on a GPU, with Zipf and with uniform ids."""
    others = {"Optax": DENSE, "PyTorch sparse": "PyTorch sparse", "dense": "PyTorch dense"}
    lines = ["| step, D, K | jslices | " + " | ".join(others) + " |", "|---|" + "---:|" * 4]
    found = measured("h100")
    for name, label in NAMES.items():
        for dim, ids in itertools.product((64, 128), (10_000, 100_000)):
            both = [found[name, (10**6, dim, ids), kind] for kind in ("zipf", "uniform")]
            for ours in (OURS, EXACT)[: 1 + (EXACT in both[0])]:
                times = [
                    " / ".join(f"{ms[who] * 1e3:,.0f}" for ms in both)
                    for who in (ours, *others.values())
                ]
                step = label + (", exact" if ours == EXACT else "")
                lines.append(f"| {step}, {dim}, {ids:,} | {' | '.join(times)} |")
    return "\n".join(lines)


def fill(page):
    """The page with the tables between its marks."""
    for table in (machine, dense, peers, unkept, h100):
        page = between(page, f"speed.py: {table.__name__}", table())
    return page


def picture(axes, ink):
    left, right = axes
    left.scatter(*zip(*against_dense(), strict=True), s=16, color=ink.row)
    left.set_title("Against dense JAX", color=ink.text)
    left.set_xlabel("ids in a step / rows of the table")
    left.set(xlim=(0.006, 1.7))
    left.set_xticks([0.01, 0.1, 1], ["0.01", "0.1", "1"])
    left.set_yticks([1, 10, 100], ["1 x", "10 x", "100 x"])
    kinds = (
        (OURS, ink.blue, "as it is", 0.95),
        (KEPT, ink.green, "with js.keep_memory()", 1.05),
    )
    for name, color, label, aside in kinds:
        points = [(size * aside, times) for size, times in against_peers(name)]
        right.scatter(*zip(*points, strict=True), s=12, color=color, label=label)
    right.set_title("Against PyTorch and TensorFlow", color=ink.text)
    right.set_xlabel("gradient, MB")
    right.set_xticks([0.1, 1, 10], ["0.1", "1", "10"])
    right.set(ylim=(0.65, 11))
    right.set_yticks([1, 2, 4, 8], ["1 x", "2 x", "4 x", "8 x"])
    right.legend(frameon=False, labelcolor=ink.text, loc="upper right", ncols=2)
    left.set_ylabel("times as fast")
    for part in axes:
        part.axhline(1, color=ink.muted, linewidth=0.8)


def main():
    page = ROOT / "docs" / "speed.md"
    page.write_text(fill(page.read_text()))

    def logarithmic(axes, ink):
        for part in axes:
            part.set(xscale="log", yscale="log")
        picture(axes, ink)

    plot("speed", 2, (8.6, 3.9), logarithmic)


if __name__ == "__main__":
    main()
