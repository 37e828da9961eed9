"""``python -m jslices bench``: its figures, the ways it names, and every bad request."""

import contextlib
import functools
import re
import subprocess
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jslices as js
from jslices.__main__ import main
from jslices._bench import command, measure, memory, ways
from jslices._bench.sizes import Sizes, optimizer_names
from jslices.optim import large, leaf, step, whole
from jslices.optim._engine.in_place import WIDENS_BFLOAT16

TINY = ("--rows", "2e3", "--dim", "8", "--ids", "1e2")


@pytest.fixture
def bench(capsys, monkeypatch):
    for module in (memory, measure, command):
        monkeypatch.setattr(module, "COPY_BYTES", 1 << 16)

    def run(*arguments):
        try:
            code = main(["bench", *arguments])
        except SystemExit as stop:
            code = stop.code
        out = capsys.readouterr()
        return code, out.out, out.err

    return run


def figures(out):
    """``{name: [row gradients, dense gradients, ratio]}`` of the first table."""
    lines = out.split("\n\n")[0].splitlines()[3:15]
    return {cells[0]: cells[1:] for cells in (re.split(r"  +", line) for line in lines)}


def number(text):
    return float(text.replace(",", ""))


def test_all_figures(bench):
    code, out, err = bench(*TINY, "--steps", "23")
    assert code == 0, err
    assert "adam, table 2,000 x 8 float32, 100 ids a step" in out
    assert f"jax {jax.__version__}, cpu" in out
    table = figures(out)
    row_ms, dense_ms = map(number, table["median ms of a step"][:2])
    assert 0 < row_ms < 1e3 and 0 < dense_ms < 1e3

    # Printed are milliseconds with three decimals, of steps of some hundredths.
    slow, quick = row_ms + 0.00051, row_ms - 0.00051
    dense_slow, dense_quick = dense_ms + 0.00051, dense_ms - 0.00051
    ratio = number(table["median ms of a step"][2])
    assert dense_quick / slow - 0.0051 <= ratio <= dense_slow / quick + 0.0051
    assert table["timed steps"] == ["23", "23", "-"]
    ids_a_second = number(table["ids a second"][0])
    assert 1e5 / slow - 1 <= ids_a_second <= 1e5 / quick + 1
    assert all(number(x) > 0 for x in table["compile seconds"])
    # 2,000 * 8 * 4 bytes; two moments and a count; 100 * (8 * 4 + 4) bytes.
    assert table["table"] == ["62.5 KB", "62.5 KB", "-"]
    assert table["optimizer state"] == ["125.0 KB", "125.0 KB", "-"]
    assert table["gradient"] == ["3.5 KB", "62.5 KB", "17.78"]
    for name in ("temporaries of the step", "updated in place"):
        assert all(re.fullmatch(r"[\d.]+ [KM]?B", x) for x in table[name][:2])
    # Table and state of both, and the small rest.
    assert all(187 < number(x.split()[0]) < 190 for x in table["updated in place"][:2])
    distinct = number(re.search(r"([\d.,]+) distinct ids a step;", out)[1])
    moved = 4 * 8 * (100 + 2 * distinct * 3) / 1024
    assert table["bytes that must move"][0] == f"{moved:.1f} KB"
    # A gradient written and read, three arrays read and written.
    assert table["bytes that must move"][1] == "500.0 KB"
    floors = [number(x) for x in table["ms to move them"][:2]]
    assert all(0 < floor < 10 for floor in floors)
    assert "goes: few rows at once" in out
    assert re.search(
        r"with a tenth of the rows \(200\): [\d.]+ ms, .* few rows at once", out
    )


def test_other_sizes_are_computed(bench):
    _, out, _ = bench(*TINY)
    text = out.split("\n\n")[1].splitlines()
    rows = [re.split(r"  +", line.strip()) for line in text[3:] if "  " in line]
    assert [row[0] for row in rows[:4]] == ["200", "2,000", "20,000", "200,000"]
    here, tenfold = rows[1], rows[2]
    # Ten times the rows: rows' gradient and traffic hardly change, dense ones do tenfold.
    assert tenfold[3] == here[3] == "3.5 KB"
    assert (here[4], tenfold[4]) == ("62.5 KB", "625.0 KB")
    assert (here[6], tenfold[6]) == ("500.0 KB", "4.9 MB")
    assert "from --ids 540 on a step goes over all 2,000 rows" in out
    assert "from --ids 524,288 on the gradient has 16 MB or more" in out
    assert {row[-1] for row in rows} == {"few rows at once", "all rows"}


def test_without_state_and_narrow(bench):
    code, out, err = bench(*TINY, "--optimizer", "sgd", "--dtype", "bfloat16")
    assert code == 0, err
    assert number(figures(out)["median ms of a step"][1]) > 0
    assert figures(out)["table"][0] == "31.2 KB"
    assert "a step goes over all" not in out


def test_dense_stops_in_time(bench):
    code, out, _ = bench(*TINY, "--dense-seconds", "1e-9", "--distribution", "uniform")
    assert code == 0 and figures(out)["timed steps"] == ["20", "1", "-"]
    assert "dense steps timed: only 1, as they took 1e-09 s" in out
    assert "100 ids a step (uniform)" in out


def available(monkeypatch, tmp_path, room):
    file = tmp_path / "meminfo"
    file.write_text(f"MemTotal: 1 kB\nMemAvailable:   {room / 0.9 / 1024:.0f} kB\n")
    monkeypatch.setattr(memory, "MEMINFO", file)


def test_dense_is_left_out_where_it_does_not_fit(bench, monkeypatch, tmp_path):
    sizes = Sizes(2000, 8, 100)
    room = memory.needed_by_rows(sizes, "cpu") + memory.needed_by_dense(sizes) // 2
    available(monkeypatch, tmp_path, room + (2 << 16))
    code, out, err = bench(*TINY)
    assert code == 0, err
    assert figures(out)["median ms of a step"][1:] == ["-", "-"]
    assert "dense gradients left out: with them it takes" in out
    assert number(figures(out)["median ms of a step"][0]) > 0


def test_too_much_memory_names_what_fits(bench, monkeypatch, tmp_path):
    available(monkeypatch, tmp_path, 10_000_000)
    with mock.patch.object(command, "Side") as made:
        code, out, err = bench("--rows", "1e9", "--ids", "10")
    assert code == 2 and out == "" and not made.called
    assert "a table of 1,000,000,000 rows, its adam state and a step need 715.3 GB" in err
    most = int(re.search(r"--rows (\d+) would fit", err)[1])
    room = memory.available(jax.devices()[0]) - (2 << 16)
    fits = lambda n: memory.needed_by_rows(Sizes(n, 64, 10), "cpu") <= room  # noqa: E731
    assert fits(most) and not fits(most + 1)
    code, _, err = bench("--rows", "1e9", "--ids", "1e9")
    assert code == 2 and err.rstrip().endswith("; lower --ids or --dim")


def test_accelerators_tell_their_own_memory():
    device = mock.Mock(platform="gpu")
    device.memory_stats.return_value = {"bytes_limit": 1000, "bytes_in_use": 200}
    assert memory.available(device) == 720
    device.memory_stats.return_value = None
    assert memory.available(device) is None


def test_runs_where_nothing_tells_the_memory(bench, monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "missing")
    monkeypatch.setattr(jax.stages.Compiled, "memory_analysis", lambda self: None)
    code, out, err = bench(*TINY, "--optimizer", "adafactor")
    assert code == 0, err
    assert "memory of unknown size" in out
    assert figures(out)["temporaries of the step"] == ["-", "-", "-"]


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
        ([*TINY, "--keep-memory"], "error: --keep-memory: keep_memory() came after JAX"),
    ],
)
def test_bad_requests(bench, arguments, message):
    jnp.ones(1)
    code, out, err = bench(*arguments)
    assert code == 2 and out == "" and message in err


def test_every_optimizer_is_offered():
    assert {"adafactor", "adam", "ftrl", "partial_rowwise_adam", "sgd"} < {
        *optimizer_names()
    }
    assert len(optimizer_names()) == 14


def test_keeps_memory_in_a_process_of_its_own():
    # JAX must not have been started by the command line itself.
    out = subprocess.run(
        [sys.executable, "-m", "jslices", "bench", *TINY, "--keep-memory"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert number(figures(out)["median ms of a step"][0]) > 0


WAYS = [
    (Sizes(5000, 64, 100), ways.AT_ONCE),
    (Sizes(10**6, 64, 5859), ways.AT_ONCE),  # up to 1.5 MB
    (Sizes(10**6, 64, 5860), ways.CHUNKS),
    *((Sizes(10**6, 64, 5859, name), ways.QUARTERS) for name in ways.IN_QUARTERS),
    (Sizes(10**6, 64, 5860, "ftrl"), ways.CHUNKS),
    *((Sizes(10**6, 64, 5859, name), ways.AT_ONCE) for name in ("rmsprop", "lamb", "lion")),
    (Sizes(10**6, 128, 4096), ways.AT_ONCE),  # up to 4,096 of any length
    (Sizes(10**6, 128, 4097), ways.CHUNKS),
    (Sizes(10**6, 64, 15_624), ways.CHUNKS),
    (Sizes(10**6, 64, 15_625), ways.FOLDED),
    (Sizes(10**6, 16, 300_000), ways.CHUNKS),
    (
        Sizes(10**6, 64, 200_000, dtype="bfloat16"),
        ways.ALL_AT_ONCE if WIDENS_BFLOAT16 else ways.CHUNKS,
    ),
    (Sizes(25_000, 64, 6749), ways.CHUNKS),
    (Sizes(25_000, 64, 6750), ways.ALL_ROWS),
    (Sizes(25_000, 64, 6750, "ftrl"), ways.CHUNKS),
    (Sizes(25_000, 64, 15_000, "ftrl"), ways.CHUNKS),
    (Sizes(30_000, 64, 16_000, "adadelta"), ways.FOLDED),
    (Sizes(10**6, 64, 2_000_000), ways.ALL_ROWS),
    (Sizes(5000, 64, 2500, "sgd"), ways.EACH_SLOT),
    (Sizes(5000, 64, 20_000, "sgd"), ways.EACH_SLOT),
    (Sizes(5000, 32, 9_999, "sgd"), ways.EACH_SLOT),
    (Sizes(5000, 32, 10_000, "sgd"), ways.ALL_ROWS),
    (Sizes(5000, 64, 100, "sgd"), ways.ALL_AT_ONCE),
    (Sizes(5000, 64, 2500, "sgd", "bfloat16"), ways.ALL_AT_ONCE),
    (Sizes(10_000, 64, 6000, "adafactor"), ways.CHUNKS),
    (Sizes(5000, 64, 2500, "rowwise_adagrad"), ways.ALL_ROWS),
    (Sizes(10**6, 64, 100_000, "rowwise_adagrad"), ways.FOLDED),
]


@pytest.mark.parametrize("sizes, way", WAYS)
def test_the_way_named_is_the_way_taken(sizes, way):
    assert ways.way_of(sizes, "cpu") == way
    tx, table = sizes.make_optimizer(), sizes.table_shape()
    values = jax.ShapeDtypeStruct((sizes.ids, sizes.dim), table.dtype)
    ids = jax.ShapeDtypeStruct((sizes.ids,), jnp.int32)
    grad = functools.partial(js.IndexedSlices, dense_shape=table.shape)
    taken = {}
    with contextlib.ExitStack() as stack:
        for module, name in (
            (step, "step_whole"),
            (large, "step_folded"),
            (leaf, "_each_slot"),
        ):
            stack.enter_context(mock.patch.multiple(module, **spies(taken, module, name)))
        text = jax.jit(lambda v, i, s, p: tx.update(grad(v, i), s, p)[0]).lower(
            values, ids, jax.eval_shape(tx.init, table), table
        )
    names = {ways.ALL_ROWS: "step_whole", ways.FOLDED: "step_folded"}
    names[ways.EACH_SLOT] = "_each_slot"
    assert set(taken) == {names[way]} & set(names.values()) if way in names else not taken
    # Loops of chunks: only a step in chunks slices so many of the gradient's rows.
    loops = {ways.AT_ONCE: 0, ways.CHUNKS: ways.CHUNK, ways.QUARTERS: -(-sizes.ids // 4)}
    if way in loops and sizes.dtype == "float32":
        for rows in {*loops.values()} - {0}:
            chunk = f"tensor<{rows}x{sizes.dim}xf32>"
            assert (chunk in text.as_text()) == (loops[way] == rows)


def spies(taken, module, *names):
    def spy(name, real):
        def call(*args, **kwargs):
            taken[name] = True
            return real(*args, **kwargs)

        return call

    return {name: spy(name, getattr(module, name)) for name in names}


def test_the_ids_from_which_the_way_changes():
    for sizes in (Sizes(5000, 64, 1), Sizes(10**6, 64, 1), Sizes(1, 1, 1)):
        first = ways.ids_for_all_rows(sizes, "cpu")
        assert ways.way_of(sizes.but(ids=first), "cpu") == ways.ALL_ROWS
        assert ways.way_of(sizes.but(ids=first - 1), "cpu") != ways.ALL_ROWS
    assert ways.ids_for_all_rows(Sizes(5000, 64, 1, "sgd"), "cpu") is None
    assert ways.way_of(Sizes(10**6, 64, 10**5), "gpu") == ways.ALL_AT_ONCE


@pytest.mark.parametrize("name", sorted({*optimizer_names()} - {"sgd", "adafactor"}))
def test_every_optimizer_goes_over_all_rows_from_so_many_ids_on(name):
    sizes = Sizes(5000, 16, 1, name)
    tx, table = sizes.make_optimizer(), sizes.table_shape()

    def updates(count):
        values = jax.ShapeDtypeStruct((count, sizes.dim), table.dtype)
        ids = jax.ShapeDtypeStruct((count,), jnp.int32)
        grads = js.IndexedSlices(values, ids, table.shape)
        return jax.eval_shape(tx.update, grads, jax.eval_shape(tx.init, table), table)[0]

    first = ways.ids_for_all_rows(sizes, "cpu")
    assert type(updates(first)) is whole.EveryRow
    assert type(updates(first - 1)) is js.IndexedSlices


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
        ("adam", "float32", 2000),
        ("adam", "bfloat16", 100),
        ("sgd", "bfloat16", 2000),
    ],
)
def test_memory_is_not_underestimated(optimizer, dtype, ids):
    sizes = Sizes(3000, 16, ids, optimizer, dtype)
    for grad, need in (
        (js.value_and_grad, memory.needed_by_rows(sizes, "cpu")),
        (jax.value_and_grad, memory.needed_by_dense(sizes)),
    ):
        found = measure.Side(sizes, grad).analysis
        used = found.argument_size_in_bytes + found.temp_size_in_bytes
        used += found.output_size_in_bytes - found.alias_size_in_bytes
        assert used <= 1.05 * need + 2**16


def test_a_reader_that_has_read_enough_is_no_error():
    command = [sys.executable, "-m", "jslices", "bench", *TINY, "--optimizer", "sgd"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        process.stdout.close()
        errors = process.stderr.read()
    assert process.returncode == 1
    assert errors == ""
