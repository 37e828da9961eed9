"""``python -m jslices bench``: a step of the user's own sizes.

It is measured on the user's machine, or with ``--device`` compiled for another.
"""

import argparse
import dataclasses
import math
import platform as machine
from collections.abc import Sequence

import jax
import numpy as np

import jslices as js
from jslices._densify import human_bytes
from jslices.bench import compiled, measure
from jslices.bench.measure import KeptSide, Side
from jslices.bench.sizes import Sizes, available, largest_rows, optimizer_names, plan_of
from jslices.bench.table import Line, aligned, comparison

LEAST_STEPS = 20  # fewer make no median
MOST_ROWS = 2**31 - 1  # ids are 32-bit numbers
ROWS, KEPT, DENSE = "row gradients", "memory kept", "dense gradients"
TENTH = "a tenth of the rows"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--rows", type=_count, default=10**6, help="of the table (default: 1e6)")
    add("--dim", type=_count, default=64, help="length of a row (default: 64)")
    add("--ids", type=_count, default=10**4, help="looked up a step (default: 1e4)")
    add("--optimizer", choices=optimizer_names(), default="adam", help="(default: adam)")
    dtypes = ["float32", "bfloat16"]
    add("--dtype", choices=dtypes, default="float32", help="(default: float32)")
    add(
        "--untouched",
        choices=["lazy", "exact"],
        default="lazy",
        help="what becomes of rows that a step does not touch (default: lazy)",
    )
    add(
        "--device",
        help="compile for a device that need not be here, and run nothing: v5e, h100, "
        "v5e:16x16, h100:8, ...",
    )
    add("--steps", type=_steps, default=LEAST_STEPS, help="timed steps (default: 20)")
    add(
        "--dense-seconds",
        type=_seconds,
        default=20.0,
        help="time limit for dense steps (default: 20)",
    )
    add(
        "--distribution",
        choices=["zipf", "uniform"],
        default="zipf",
        help="of ids: as words occur, in 100,000 rows, or all rows alike (default: zipf)",
    )


def run(options: argparse.Namespace) -> None:
    """Measures and prints; ``argparse.ArgumentError`` for impossible requests."""
    sizes = Sizes(**{x.name: getattr(options, x.name) for x in dataclasses.fields(Sizes)})
    try:
        sizes.make_optimizer()
    except ValueError as error:
        raise argparse.ArgumentError(None, str(error)) from None
    if options.device is not None:
        compiled.run(sizes, options.device)
        return
    device = jax.devices()[0]
    platform, room = device.platform, available(device)
    fits, left_out = what_fits(sizes, platform, room, measure.can_keep_memory(device))
    print(heading(sizes, device, room), flush=True)
    bandwidth = measure.copy_bandwidth()
    sparse = Side(sizes, js.value_and_grad)
    kept = KeptSide(sizes) if KEPT in fits else None
    tenth = sizes.but(rows=max(sizes.rows // 10, 1))
    smaller = Side(tenth, js.value_and_grad) if TENTH in fits else None
    dense = Side(sizes.dense(), jax.value_and_grad) if DENSE in fits else None
    sides = [side for side in (sparse, kept, smaller) if side is not None]
    measure.run_in_turns(sides, dense, options.steps, options.dense_seconds)
    if kept is not None:
        kept.close()
    columns = {
        name: None if side is None else figures(sizes, side, bandwidth, name == DENSE)
        for name, side in {ROWS: sparse, KEPT: kept, DENSE: dense}.items()
    }
    print(comparison(LINES, columns))
    print(
        f"{sparse.facts.distinct:,.0f} distinct ids a step; a copy of a large array moves "
        f"{bandwidth / 1e9:.1f} GB/s on this machine"
    )
    for line in left_out:
        print(line)
    if dense is not None and len(dense.times) < options.steps:
        print(
            f"dense steps timed: only {len(dense.times)}, as they took "
            f"{options.dense_seconds:g} s (--dense-seconds)"
        )
    if kept is not None and kept.median < 0.9 * sparse.median:
        print(
            "to keep memory, begin the program with: import jslices; jslices.keep_memory()"
            f"\na step then takes {kept.median / sparse.median:.2f} times as long"
        )
    print(f"plan of the step: {plan_of(sizes, platform)}")
    if smaller is not None:
        print(
            f"with a tenth of the rows ({tenth.rows:,}): {smaller.median * 1e3:.3f} ms, "
            f"{smaller.facts.distinct:,.0f} distinct ids; this table takes "
            f"{sparse.median / smaller.median:.2f} times as long"
        )
    print()
    print(other_sizes(sizes, platform, room))


def what_fits(
    sizes: Sizes, platform: str, room: int | None, keeps: bool
) -> tuple[set[str], list[str]]:
    """``(the measurements that fit into memory together, a note about the others)``."""
    needs = {ROWS: sizes.needed_by_rows(platform), DENSE: sizes.needed_by_dense()}
    if keeps:
        needs[KEPT] = needs[ROWS] + measure.PROCESS_BYTES
    if sizes.rows >= 10:
        needs[TENTH] = sizes.but(rows=sizes.rows // 10).needed_by_rows(platform)
    if room is None:
        return {*needs}, []
    room = max(room - 2 * measure.COPY_BYTES, 0)
    if needs[ROWS] > room:
        most = largest_rows(sizes, platform, room)
        advice = f"--rows {most} would fit" if most else "lower --ids or --dim"
        raise argparse.ArgumentError(
            None,
            f"a table of {sizes.rows:,} rows, its {sizes.optimizer} state and a step need "
            f"{human_bytes(needs[ROWS])} of memory, and {human_bytes(room)} are usable; "
            f"{advice}",
        )
    taken, fits, left_out = 0, set(), []
    for name, need in needs.items():
        if taken + need <= room:
            fits.add(name)
            taken += need
        else:
            left_out.append(
                f"{name} left out: with it the measurement takes "
                f"{human_bytes(taken + need)} of memory, and {human_bytes(room)} are usable"
            )
    return fits, left_out


def heading(sizes: Sizes, device: jax.Device, room: int | None) -> str:
    """What is run, and where."""
    memory = "of unknown size" if room is None else f"{human_bytes(room)} usable"
    drawn = f"{sizes.distribution}, {sizes.words:,} rows used"
    return (
        f"{sizes} ({drawn})\n"
        f"jslices {js.__version__}, jax {jax.__version__}, {device.platform} "
        f"({device.device_kind}), {machine.system()} {machine.machine()}, "
        f"Python {machine.python_version()}, memory {memory}"
    )


#: The lines of :func:`figures`.
LINES = [
    Line("median ms of a step", ".3f"),
    Line("ms of half of the steps, from", ".3f", compared=False),
    Line("to", ".3f", compared=False),
    Line("timed steps", ",.0f", compared=False),
    Line("ids a second", ",.0f", compared=False),
    Line("compile seconds", ".2f"),
    Line("table", compared=False),
    Line("optimizer state", compared=False),
    Line("gradient"),
    Line("temporaries of the step"),
    Line("updated in place", compared=False),
    Line("bytes that must move"),
    Line("ms to move them", ".3f", compared=False),
    Line("step / that", ".1f", compared=False),
]


def figures(
    sizes: Sizes, side: Side, bandwidth: float, dense: bool = False
) -> list[float | None]:
    """The times and the bytes of one side."""
    median, facts = side.median, side.facts
    gradient = sizes.table_bytes if dense else sizes.row_gradient_bytes
    moved = sizes.moved_by_dense() if dense else sizes.moved_by_rows(facts.distinct)
    moves = [moved, moved / bandwidth * 1e3, median * bandwidth / moved]
    spread = np.quantile(side.times, [0.5, 0.25, 0.75]) * 1e3
    times = [*spread, len(side.times), sizes.ids / median, facts.compile_seconds]
    arrays = [sizes.table_bytes, sizes.state_bytes, gradient]
    return [*times, *arrays, facts.temp_bytes, facts.alias_bytes, *moves]


def other_sizes(sizes: Sizes, platform: str, room: int | None) -> str:
    """Estimates for larger and smaller sizes, by formulas and the engine's plan."""
    heights = [10 * sizes.rows, 100 * sizes.rows]
    if sizes.rows >= 10:
        heights.insert(0, sizes.rows // 10)
    shown = [sizes.but(rows=n) for n in heights] + [sizes.but(ids=10 * sizes.ids)]
    lines = [
        ["", "", "", "gradient", "", "must move", "", "at most in use", "", "", ""],
        [*("rows", "ids", "distinct"), *["as rows", "dense"] * 3, "fits", "plan"],
    ]
    for other in shown:
        distinct = other.distinct()
        needs = [other.needed_by_rows(platform), other.needed_by_dense()]
        gradients = [other.row_gradient_bytes, other.table_bytes]
        moved = [other.moved_by_rows(distinct), other.moved_by_dense()]
        lines.append(
            [
                *(f"{n:,.0f}" for n in (other.rows, other.ids, distinct)),
                *map(human_bytes, [*gradients, *moved, *needs]),
                _fits(needs, room),
                plan_of(other, platform).way,
            ]
        )
    title = "with other sizes (computed, not measured):\n"
    return title + aligned(lines, left=(10,))


def _fits(needs: Sequence[int], room: int | None) -> str:
    if room is None:
        return "?"
    rows, dense = (need <= room for need in needs)
    return "both" if rows and dense else "rows" if rows else "dense" if dense else "none"


def _count(text: str) -> int:
    try:
        value = float(text)
    except ValueError:
        value = 0.5
    if not math.isfinite(value) or value != int(value) or value < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a positive whole number, such as 10000 or 1e4"
        )
    if value > MOST_ROWS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is more than {MOST_ROWS:,}, the most that 32-bit ids can tell apart"
        )
    return int(value)


def _steps(text: str) -> int:
    value = _count(text)
    if value < LEAST_STEPS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is too few for a median; at least {LEAST_STEPS}"
        )
    return value


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return value
