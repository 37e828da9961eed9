"""``python -m jslices bench``: a step of the user's own sizes, on their own machine."""

import argparse
import math

import jax

import jslices as js
from jslices._bench import report
from jslices._bench.measure import Side, copy_bandwidth, run_in_turns
from jslices._bench.memory import (
    COPY_BYTES,
    available,
    largest_rows,
    needed_by_dense,
    needed_by_rows,
)
from jslices._bench.sizes import Sizes, optimizer_names
from jslices._demo.corpus import UserError
from jslices._densify import human_bytes

LEAST_STEPS = 20  # fewer make no median
MOST = 2**31 - 1  # ids are 32-bit numbers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--rows", type=_count, default=10**6, help="of the table (default: 1e6)")
    add("--dim", type=_count, default=64, help="length of a row (default: 64)")
    add("--ids", type=_count, default=10**4, help="looked up a step (default: 1e4)")
    add("--optimizer", choices=optimizer_names(), default="adam", help="(default: adam)")
    add("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the table")
    add("--steps", type=_steps, default=LEAST_STEPS, help="timed steps (default: 20)")
    add(
        "--dense-seconds",
        type=_seconds,
        default=20.0,
        help="run no more dense steps after so long (default: 20)",
    )
    add(
        "--distribution",
        choices=["zipf", "uniform"],
        default="zipf",
        help="of the ids: as words occur, or all rows alike (default: zipf)",
    )
    add(
        "--keep-memory",
        action="store_true",
        help="call jslices.keep_memory() first, which speeds up large gradients on a CPU",
    )


def run(options: argparse.Namespace) -> None:
    """Measures and prints; see the module."""
    if options.keep_memory:
        try:
            js.keep_memory()
        except RuntimeError as error:
            raise UserError(f"--keep-memory: {error}") from error
    sizes = Sizes(
        *(options.rows, options.dim, options.ids),
        *(options.optimizer, options.dtype, options.distribution),
    )
    device = jax.devices()[0]
    platform, room = device.platform, available(device)
    small, with_dense = _what_fits(sizes, platform, room)
    print(report.heading(sizes, device, room))
    bandwidth = copy_bandwidth()
    sparse = Side(sizes, js.value_and_grad)
    smaller = None if small is None else Side(small, js.value_and_grad)
    dense = Side(sizes, jax.value_and_grad) if with_dense else None
    sides = [sparse] if smaller is None else [sparse, smaller]
    run_in_turns(sides, dense, options.steps, options.dense_seconds)
    print(report.measured(sparse, dense, bandwidth))
    if room is not None and not with_dense:
        print(
            f"dense gradients left out: with them it takes "
            f"{human_bytes(needed_by_rows(sizes, platform) + needed_by_dense(sizes))} of "
            f"memory, and {human_bytes(room)} are usable"
        )
    if dense is not None and len(dense.times) < options.steps:
        print(
            f"dense steps timed: only {len(dense.times)}, as they took "
            f"{options.dense_seconds:g} s (--dense-seconds)"
        )
    print(report.way(sizes, platform))
    if smaller is not None:
        print(report.tenth(sparse, smaller, platform))
    print()
    print(report.other_sizes(sizes, platform, room))


def _what_fits(sizes: Sizes, platform: str, room: int | None) -> tuple[Sizes | None, bool]:
    """``(a tenth of the sizes or None, whether dense gradients fit as well)``."""
    small = sizes.but(rows=sizes.rows // 10) if sizes.rows >= 10 else None
    if room is None:
        return small, True
    room -= 2 * COPY_BYTES
    alone = needed_by_rows(sizes, platform)
    if alone > room:
        most = largest_rows(sizes, platform, room)
        advice = f"--rows {most} would fit" if most else "lower --ids or --dim"
        raise UserError(
            f"a table of {sizes.rows:,} rows, its {sizes.optimizer} state and a step need "
            f"{human_bytes(alone)} of memory, and {human_bytes(max(room, 0))} are usable; "
            f"{advice}"
        )
    both = alone + needed_by_dense(sizes)
    tenth = 0 if small is None else needed_by_rows(small, platform)
    if both + tenth <= room:
        return small, True
    if both <= room:
        return None, True
    return (small if alone + tenth <= room else None), False


def _count(text: str) -> int:
    try:
        value = float(text)
    except ValueError:
        value = 0.5
    if not math.isfinite(value) or value != int(value) or value < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a positive whole number, such as 10000 or 1e4"
        )
    if value > MOST:
        raise argparse.ArgumentTypeError(
            f"{text!r} is more than {MOST:,}, the most that 32-bit ids can tell apart"
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
