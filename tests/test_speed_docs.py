"""docs/speed.md is true: its table follows from the measurements beside it."""

import csv
import pathlib
import statistics

ROOT = pathlib.Path(__file__).parent.parent
OURS = ("jslices", "jslices, tx.apply", "jslices, memory kept")


def ratios(name, mine, wanted):
    cells = {}
    with open(ROOT / "benchmarks" / "results" / name) as file:
        for row in csv.DictReader(file):
            cell = (row["optimizer"], *(int(row[k]) for k in ("rows", "dim", "ids")))
            cells.setdefault((*cell, row["kind"]), {})[row["contender"]] = float(row["ms"])
    found = []
    for (_, rows, dim, ids, _), ms in cells.items():
        peers = [t for who, t in ms.items() if who not in (*OURS, "Optax dense")]
        if peers and mine in ms and rows >= 1e5 and ids <= rows and wanted(rows, dim, ids):
            found.append(min(peers) / ms[mine])
    return [len(found), min(found), statistics.median(found), max(found)]


def test_the_table_of_ratios():
    text = (ROOT / "docs" / "speed.md").read_text()
    table = text[text.index("| times faster than the best peer") :].split("\n\n")[0]
    said = [[float(x) for x in line.split("|")[2:6]] for line in table.splitlines()[2:]]
    small = lambda rows, dim, ids: ids * dim * 4 < 16e6  # noqa: E731
    large = lambda rows, dim, ids: ids * dim * 4 >= 16e6  # noqa: E731
    widest = lambda rows, dim, ids: (rows, dim) == (10**7, 16)  # noqa: E731
    measured = [
        ratios("cpu.csv", OURS[0], small),
        ratios("cpu.csv", OURS[0], large),
        ratios("cpu.csv", OURS[1], large),
        ratios("cpu.csv", OURS[2], large),
        ratios("cpu-hugepages.csv", OURS[0], large),
        ratios("cpu.csv", OURS[0], widest),
        ratios("cpu-16.csv", OURS[0], small),
        ratios("cpu-1e7.csv", OURS[0], widest),
    ]
    for line, wanted in zip(said, measured, strict=True):
        assert line[0] == wanted[0]
        for shown, value in zip(line[1:], wanted[1:], strict=True):
            assert abs(shown - value) <= 0.051, (line, wanted)
