"""Steps compiled for TPUs and GPUs that are not here: the table of docs/devices.md.

    pip install ".[tpu,gpu]"
    python benchmarks/devices.py --update docs/devices.md

A line for every device, optimizer and length of a row, V = 1e6 rows, K = 1e4 ids: what the
compiled step with row gradients costs, and what a dense one does.
Nothing is run. Two minutes.
"""

import argparse
import pathlib

import jax

from jslices._proof.cost import cost_of
from jslices._proof.targets import target
from jslices.bench.compiled import DENSE, ROWS, sides
from jslices.bench.sizes import Sizes
from jslices.bench.table import NONE

DEVICES = ["v5e", "v6e", "h100"]
OPTIMIZERS = ["sgd", "adagrad", "adam", "adam exact"]
DIMS = [16, 64, 128]
BEGIN, END = "<!-- made by benchmarks/devices.py -->\n", "<!-- end -->\n"
COLUMNS = {
    "temporaries, MB": lambda cost: megabytes(cost.temp_bytes),
    "table-sized copies": lambda cost: str(cost.copies),
    "bytes accessed, MB": lambda cost: megabytes(cost.accessed_bytes),
    "by XLA's count, MB": lambda cost: megabytes(cost.xla_accessed_bytes),
    "kernels": lambda cost: str(sum(cost.kernels.values())),
    "estimate, ms": lambda cost: (
        NONE if cost.seconds is None else f"{cost.seconds * 1e3:.2f}"
    ),
}


def costs_of(device, optimizer, dim, rows, ids):
    """What a step costs with row gradients, and with dense ones."""
    name, _, exact = optimizer.partition(" ")
    sizes = Sizes(rows, dim, ids, name, untouched=exact or "lazy")
    return {key: cost_of(side(target(device))) for key, side in sides(sizes).items()}


def line(device, optimizer, dim, rows, ids):
    """The cells of a line."""
    costs = costs_of(device, optimizer, dim, rows, ids)
    cells = [f"{shown(costs[ROWS])} / {shown(costs[DENSE])}" for shown in COLUMNS.values()]
    ratio = costs[DENSE].accessed_bytes / costs[ROWS].accessed_bytes
    return [device, optimizer, str(dim), f"{ratio:.1f}", *cells]


def megabytes(count):
    if count is None:
        return NONE
    return f"{count / 1e6:,.1f}" if count < 1e8 else f"{count / 1e6:,.0f}"


def milliseconds(seconds):
    return NONE if seconds is None else f"{seconds * 1e3:.2f}"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--devices", nargs="+", default=DEVICES)
    add("--optimizers", nargs="+", default=OPTIMIZERS)
    add("--dims", nargs="+", type=int, default=DIMS)
    add("--rows", type=float, default=1e6)
    add("--ids", type=float, default=1e4)
    add("--update", type=pathlib.Path, help="the page whose table is replaced")
    options = parser.parse_args()
    heading = ["device", "optimizer", "D", "dense accesses, times", *COLUMNS]
    ruler = ["---" if n < 2 else "---:" for n in range(len(heading))]
    lines = [f"| {' | '.join(heading)} |", f"|{'|'.join(ruler)}|"]
    print(*lines, sep="\n")
    for device in options.devices:
        for optimizer in options.optimizers:
            for dim in options.dims:
                sizes = int(options.rows), int(options.ids)
                lines.append(f"| {' | '.join(line(device, optimizer, dim, *sizes))} |")
                print(lines[-1], flush=True)
    if options.update is not None:
        replace(options.update, "\n".join(lines))


def replace(page, table):
    text = page.read_text()
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    note = f"jax {jax.__version__}:"
    page.write_text(f"{before}{BEGIN}\n{note}\n\n{table}\n\n{END}{after}")


if __name__ == "__main__":
    main()
