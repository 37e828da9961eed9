"""docs/speed.md is true: its tables follow from the measurements beside it."""

import csv
import pathlib
import re
import statistics

ROOT = pathlib.Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "speed.md").read_text()
README = " ".join((ROOT / "README.md").read_text().split())
OURS = {"jslices", "jslices, memory kept"}
DENSE = "Optax dense"
OPTIMIZERS = ["sgd", "adagrad", "adam"]


def cells(name):
    """``(optimizer, (rows, dim, ids), {contender: ms})`` of each cell."""
    found = {}
    with open(ROOT / "benchmarks" / "results" / f"{name}.csv") as file:
        for row in csv.DictReader(file):
            sizes = tuple(int(row[key]) for key in ("rows", "dim", "ids"))
            cell = found.setdefault((row["optimizer"], sizes, row["kind"]), {})
            cell[row["contender"]] = float(row["ms"])
    return [(optimizer, sizes, ms) for (optimizer, sizes, _), ms in found.items()]


CELLS = cells("cpu")


def of(ratios):
    return [min(ratios), statistics.median(ratios), max(ratios)]


def against_peers(name, wanted):
    ratios = []
    for _, (rows, dim, ids), ms in CELLS:
        peers = [ms[peer] for peer in {*ms} - OURS - {DENSE}]
        if peers and rows >= 1e5 and ids <= rows and wanted(ids * dim * 4):
            ratios.append(min(peers) / ms[name])
    return ratios


def against_dense(wanted):
    return [
        ms[DENSE] / ms["jslices"]
        for _, (rows, _, ids), ms in CELLS
        if DENSE in ms and wanted(ids / rows)
    ]


def table(heading):
    """The numbers, as text, of the table that begins with ``heading``."""
    lines = PAGE[PAGE.index(heading) :].split("\n\n")[0].splitlines()[2:]
    return [line.strip("| ").split("|")[1:] for line in lines]


def assert_said(line, wanted):
    assert len(line) == len(wanted)
    for shown, value in zip(line, wanted, strict=True):
        digits = len(shown.strip().partition(".")[2])
        assert abs(float(shown) - value) <= 0.51 * 10**-digits, (shown, value)


def test_the_table_of_peers():
    everything = lambda num_bytes: True  # noqa: E731
    small = lambda num_bytes: num_bytes < 30e6  # noqa: E731
    large = lambda num_bytes: num_bytes >= 30e6  # noqa: E731
    said = table("| gradient, `K * D * 4` bytes |")
    for line, wanted in zip(said, (everything, small, large), strict=True):
        plain = against_peers("jslices", wanted)
        kept = against_peers("jslices, memory kept", wanted)
        assert_said(line, [len(plain), *of(plain), *of(kept)])


def test_the_table_of_dense_gradients():
    few = lambda ids_a_row: ids_a_row < 1 / 50  # noqa: E731
    some = lambda ids_a_row: 1 / 50 <= ids_a_row < 1 / 2  # noqa: E731
    many = lambda ids_a_row: ids_a_row >= 1 / 2  # noqa: E731
    for line, wanted in zip(table("| ids a step |"), (few, some, many), strict=True):
        ratios = against_dense(wanted)
        assert_said(line, [len(ratios), *of(ratios)])


def test_the_table_of_what_is_lost_without_memory_kept():
    lost = [
        (name, dim * ids * 4 >= 30e6, ms["jslices"] / ms["jslices, memory kept"])
        for name, (_, dim, ids), ms in CELLS
    ]
    small = [times for _, large, times in lost if not large]
    large = [[t for n, big, t in lost if big and n == name] for name in OPTIMIZERS]
    for line, times in zip(table("| step | cells |"), [small, *large], strict=True):
        assert_said(line, [len(times), *of(times)])
    hint = (ROOT / "jslices" / "_place" / "hints.py").read_text()
    every = of([times for some in large for times in some])
    assert "{:.1f} to {:.1f} times)".format(*every[::2]) in hint
    assert f"{every[1]:.1f} times as long" in hint


def test_what_the_readme_says():
    said = README.split("Beside the faster of")[1]
    shown = re.findall(r"\b\d\.\d\d\b", said.split("([how")[0])
    small = against_peers("jslices", lambda num_bytes: num_bytes < 30e6)
    large, kept = (
        against_peers(name, lambda num_bytes: num_bytes >= 30e6)
        for name in ("jslices", "jslices, memory kept")
    )
    wanted = [f(x) for x in (small, kept, large) for f in (statistics.median, min)]
    assert_said(shown, wanted)


def test_the_table_of_a_gpu():
    names = {"SGD": "sgd", "Adagrad": "adagrad", "Adam": "adam"}
    found = {}
    for optimizer, sizes, ms in cells("h100"):
        found.setdefault((optimizer, sizes), []).append(ms)
    begin = PAGE.index("| step, D, K |")
    for line in PAGE[begin:].split("\n\n")[0].splitlines()[2:]:
        step, *shown = (cell.strip() for cell in line.strip("|").split("|"))
        label, *exact, dim, ids = step.replace("0,000", "0000").split(", ")
        others = [DENSE, "PyTorch sparse", "PyTorch dense"]
        for text, who in zip(shown, [", ".join(["jslices", *exact]), *others], strict=True):
            both = found[names[label], (10**6, int(dim), int(ids))]
            assert text == " / ".join(f"{ms[who] * 1e3:,.0f}" for ms in both)


def test_what_is_said_of_a_gpu():
    ms = [ms for _, (rows, *_), ms in cells("h100") if rows == 10**6]
    torch, dense = ("PyTorch sparse", "PyTorch dense"), (DENSE,)
    page = " ".join(PAGE.split())
    for text, peers, words in (
        (page, torch, "{} to {} times as fast as PyTorch"),
        (page, dense, "{} to {} times as fast as Optax"),
        (README, torch, "{} to {} times as fast as PyTorch"),
    ):
        least, _, most = of([min(x[who] for who in peers) / x["jslices"] for x in ms])
        assert words.format(f"{least:.1f}", f"{most:.0f}") in text


def test_where_a_gpu_has_no_use_for_rows():
    cells_of = [ms for _, sizes, ms in cells("h100") if sizes == (10**5, 64, 10**5)]
    ratios = [x[DENSE] / x[who] for x in cells_of for who in ("jslices", "jslices, exact")]
    least, _, most = of(ratios)
    assert f"{least:.2f} to {most:.2f} times (Adam, exact and lazy" in " ".join(
        PAGE.split()
    )
