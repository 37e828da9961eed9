"""``python -m jslices bench``: its figures, what fits into memory, every bad request."""

import argparse
import re
import subprocess
import sys
from unittest import mock

import jax
import numpy as np
import pytest

import jslices as js
from jslices.__main__ import main
from jslices.bench.command import DENSE, KEPT, ROWS, TENTH, heading, what_fits
from jslices.bench.measure import COPY_BYTES, PROCESS_BYTES, Side, compile_step
from jslices.bench.sizes import Sizes, available, optimizer_names, plan_of

HALF = "ms of half of the steps, from"
TINY = ("--rows", "2e3", "--dim", "8", "--ids", "1e2")


@pytest.fixture
def bench(capsys):
    def run(*arguments):
        try:
            code = main(["bench", *arguments])
        except SystemExit as stop:
            code = stop.code
        out = capsys.readouterr()
        return code, out.out, out.err

    return run


def figures(out):
    """``{name: [row gradients, memory kept, dense gradients, ratio]}``."""
    lines = out.split("\n\n")[0].splitlines()[3:17]
    return {cells[0]: cells[1:] for cells in (re.split(r"  +", line) for line in lines)}


def number(text):
    return float(text.replace(",", ""))


@pytest.mark.slow
def test_all_figures(bench):
    code, out, err = bench(*TINY, "--steps", "23")
    assert code == 0, err
    assert "adam, table 2,000 x 8 float32, 100 ids a step" in out
    assert f"jax {jax.__version__}, cpu" in out
    table = figures(out)
    row_ms, kept_ms, dense_ms = map(number, table["median ms of a step"][:3])
    assert 0 < row_ms < 1e3 and 0 < kept_ms < 1e3 and 0 < dense_ms < 1e3

    # Milliseconds are printed with three decimals, and steps take some hundredths.
    slow, quick = row_ms + 0.00051, row_ms - 0.00051
    dense_slow, dense_quick = dense_ms + 0.00051, dense_ms - 0.00051
    ratio = number(table["median ms of a step"][3])
    assert dense_quick / slow - 0.0051 <= ratio <= dense_slow / quick + 0.0051
    if kept_ms > row_ms:  # the hint is for sizes at which it helps
        assert "keep_memory" not in out
    if kept_ms < 0.8 * row_ms:
        assert "begin the program with: import jslices; jslices.keep_memory()" in out
    from_ms, to_ms = (number(table[name][0]) for name in (HALF, "to"))
    assert from_ms <= row_ms <= to_ms
    assert table["timed steps"] == ["23", "23", "23", "-"]
    ids_a_second = number(table["ids a second"][0])
    assert 1e5 / slow - 1 <= ids_a_second <= 1e5 / quick + 1
    assert all(number(x) > 0 for x in table["compile seconds"])
    # 2,000 * 8 * 4 bytes; two moments and a count; 100 * (8 * 4 + 4) bytes.
    assert table["table"] == ["64.0 KB"] * 3 + ["-"]
    assert table["optimizer state"] == ["128.0 KB"] * 3 + ["-"]
    assert table["gradient"] == ["3.6 KB", "3.6 KB", "64.0 KB", "17.78"]
    for name in ("temporaries of the step", "updated in place"):
        assert all(re.fullmatch(r"[\d.]+ [KM]?B", x) for x in table[name][:3])
        assert table[name][0] == table[name][1]
    # Table and state of each, and the small rest.
    assert all(192 <= number(x.split()[0]) < 195 for x in table["updated in place"][:3])
    distinct = number(re.search(r"([\d.,]+) distinct ids a step;", out)[1])
    moved = 4 * 8 * (100 + 2 * distinct * 3) / 1000
    assert table["bytes that must move"][:2] == [f"{moved:.1f} KB"] * 2
    # A gradient written and read, three arrays read and written.
    assert table["bytes that must move"][2] == "512.0 KB"
    floors = [number(x) for x in table["ms to move them"][:3]]
    assert 0 <= floors[0] == floors[1] < floors[2] < 10
    assert f"plan of the step: {plan_of(Sizes(2000, 8, 100), 'cpu')}\n" in out
    assert re.search(r"with a tenth of the rows \(200\): [\d.]+ ms, .* as long\n", out)

    rows = out.split("\n\n")[1].splitlines()[3:]
    smaller, tenfold, _, more_ids = (re.split(r"  +", row.strip()) for row in rows)
    assert [smaller[0], tenfold[0], more_ids[1]] == ["200", "20,000", "1,000"]
    # Ten times the rows: the same gradient as rows, ten times as much that is dense.
    assert tenfold[3] == smaller[3] == "3.6 KB" and more_ids[3] == "36.0 KB"
    assert (smaller[4], tenfold[4]) == ("6.4 KB", "640.0 KB")
    assert (smaller[6], tenfold[6]) == ("51.2 KB", "5.1 MB")
    assert tenfold[-1] == plan_of(Sizes(20_000, 8, 100), "cpu").way


@pytest.mark.slow
def test_dense_stops_in_time_and_nothing_tells_or_keeps_the_memory(bench, monkeypatch):
    monkeypatch.setattr("jslices.bench.measure.can_keep_memory", lambda device: False)
    monkeypatch.setattr(jax.stages.Compiled, "memory_analysis", lambda self: None)
    options = ["--optimizer", "sgd", "--dtype", "bfloat16", "--distribution", "uniform"]
    code, out, err = bench(*TINY, *options, "--dense-seconds", "1e-9")
    assert code == 0, err
    table = figures(out)
    assert table["timed steps"] == ["20", "-", "1", "-"]
    assert "to keep memory" not in out
    assert "dense steps timed: only 1, as they took 1e-09 s" in out
    assert "100 ids a step (uniform, 2,000 rows used)" in out
    assert table["table"][0] == "32.0 KB"
    assert table["temporaries of the step"][::2] == ["-", "-"]


def test_steps_of_an_accelerator_are_timed_together(monkeypatch):
    side = Side(Sizes(200, 4, 50, "sgd"), js.value_and_grad)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    side.burst(1, 0)
    assert not side.times
    side.burst(0, 4)
    assert side.times == [side.median] * 4 and side.median > 0


def test_what_does_not_fit_is_left_out():
    sizes = Sizes(2000, 8, 100)
    rows, dense = sizes.needed_by_rows("cpu"), sizes.needed_by_dense()
    room = rows + dense + PROCESS_BYTES // 2 + 2 * COPY_BYTES
    fits, (left_out,) = what_fits(sizes, "cpu", room, keeps=True)
    assert fits == {ROWS, DENSE, TENTH}
    assert left_out.startswith("memory kept left out: with it the measurement takes 4")
    room = rows + dense // 2 + 2 * COPY_BYTES
    fits, (left_out,) = what_fits(sizes, "cpu", room, keeps=False)
    assert fits == {ROWS, TENTH} and left_out.startswith("dense gradients left out: ")
    assert what_fits(sizes, "cpu", None, keeps=True) == ({ROWS, KEPT, DENSE, TENTH}, [])
    assert what_fits(Sizes(9, 8, 10), "gpu", None, keeps=False)[0] == {ROWS, DENSE}


def test_too_much_memory_names_what_fits():
    room = 10_000_000
    with pytest.raises(argparse.ArgumentError) as caught:
        what_fits(Sizes(10**9, 64, 10), "cpu", room + 2 * COPY_BYTES, keeps=True)
    error = str(caught.value)
    assert "a table of 1,000,000,000 rows, its adam state and a step need 768.0 GB" in error
    most = int(re.search(r"--rows (\d+) would fit", error)[1])
    fits = lambda n: Sizes(n, 64, 10).needed_by_rows("cpu") <= room  # noqa: E731
    assert fits(most) and not fits(most + 1)
    with pytest.raises(argparse.ArgumentError, match="; lower --ids or --dim"):
        what_fits(Sizes(10**9, 64, 10**9), "cpu", room, keeps=True)


def test_a_table_that_cannot_fit_is_refused(bench):
    code, out, err = bench("--rows", "2e9", "--dim", "1e6")
    assert code == 2 and out == "" and err.startswith("error: a table of 2,000,000,000")


def test_the_memory_that_is_usable(tmp_path):
    cpu, meminfo = jax.devices("cpu")[0], tmp_path / "meminfo"
    assert available(cpu, meminfo) is None
    assert "memory of unknown size" in heading(Sizes(9, 8, 10), cpu, None)
    meminfo.write_text("MemTotal: 1 kB\nMemAvailable:   1000 kB\n")
    assert available(cpu, meminfo) == 921_600
    # Accelerators tell their own.
    device = mock.Mock(platform="gpu")
    device.memory_stats.return_value = {"bytes_limit": 1000, "bytes_in_use": 200}
    assert available(device) == 720
    device.memory_stats.return_value = None
    assert available(device) is None


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--rows", "0"], "--rows: '0' is not a positive whole number, such as 10000"),
        (["--rows", "1.5"], "--rows: '1.5' is not a positive whole number"),
        (["--ids", "inf"], "--ids: 'inf' is not a positive whole number"),
        (["--dim", "wide"], "--dim: 'wide' is not a positive whole number"),
        (["--rows", "1e10"], "--rows: '1e10' is more than 2,147,483,647, the most that"),
        (["--steps", "5"], "--steps: '5' is too few for a median; at least 20"),
        (["--dense-seconds", "-1"], "'-1' is not a positive number of seconds"),
        (["--optimizer", "adm"], "invalid choice: 'adm' (choose from"),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
        (["--distribution", "normal"], "invalid choice: 'normal'"),
    ],
)
def test_bad_requests(bench, arguments, message):
    code, out, err = bench(*arguments)
    assert code == 2 and out == "" and message in err


def test_every_optimizer_is_offered():
    assert {"adafactor", "adam", "ftrl", "partial_rowwise_adam", "sgd"} < {
        *optimizer_names()
    }
    assert len(optimizer_names()) == 14


@pytest.mark.parametrize("name", optimizer_names())
def test_the_plan_of_every_optimizer(name):
    few, many = (plan_of(Sizes(5000, 32, ids, name), "cpu") for ids in (10, 50_000))
    assert (few.way, many.way) == ("together", "all rows")


@pytest.mark.parametrize("distribution", ["zipf", "uniform"])
@pytest.mark.parametrize("height", [1, 30, 300_000])
def test_ids(distribution, height):
    sizes = Sizes(height, 1, 5000, distribution=distribution)
    batches = sizes.draw(8)
    assert all(x.dtype == np.int32 and x.min() >= 0 and x.max() < height for x in batches)
    found = np.mean([len(np.unique(x)) for x in batches])
    assert found == pytest.approx(sizes.distinct(), rel=0.03)
    again = sizes.draw(8)
    assert all((x == y).all() for x, y in zip(batches, again, strict=True))


@pytest.mark.parametrize(
    "optimizer, dtype, ids",
    [
        ("adam", "float32", 100),
        ("adam", "float32", 20_000),
        ("sgd", "bfloat16", 2000),
    ],
)
def test_memory_is_not_underestimated(optimizer, dtype, ids):
    sizes = Sizes(3000, 16, ids, optimizer, dtype)
    for grad, need in (
        (js.value_and_grad, sizes.needed_by_rows("cpu")),
        (jax.value_and_grad, sizes.needed_by_dense()),
    ):
        found = compile_step(sizes, grad).memory_analysis()
        used = found.argument_size_in_bytes + found.temp_size_in_bytes
        used += found.output_size_in_bytes - found.alias_size_in_bytes
        assert used <= 1.05 * need + 2**16


@pytest.mark.slow
def test_a_reader_that_has_read_enough_is_no_error():
    command = [sys.executable, "-m", "jslices", "bench", *TINY]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        process.stdout.close()  # before the heading is printed
        errors = process.stderr.read()
    assert process.returncode == 1
    assert errors == ""
