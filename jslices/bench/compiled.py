"""The cost of a step on a device that need not exist here, by its compiled program."""

import argparse
import collections
from collections.abc import Callable, Mapping

import jax

import jslices as js
from jslices._densify import human_bytes
from jslices._proof.cost import Cost, cost_of
from jslices._proof.targets import AXIS, Target, target
from jslices.bench.measure import compile_step
from jslices.bench.sizes import Sizes
from jslices.bench.table import Line, comparison

ROWS, DENSE = "row gradients", "dense gradients"


LINES: dict[Line, Callable[[Cost], float | None]] = {
    Line("arguments"): lambda cost: cost.argument_bytes,
    Line("temporaries"): lambda cost: cost.temp_bytes,
    Line("table-sized copies", "d"): lambda cost: cost.copies,
    Line("bytes accessed"): lambda cost: cost.accessed_bytes,
    Line("by XLA's count"): lambda cost: cost.xla_accessed_bytes,
    Line("kernels", "d"): lambda cost: sum(cost.kernels.values()),
    Line("sent to SparseCores", "d"): lambda cost: sum(cost.offloads.values()),
    Line("loops", "d"): lambda cost: len(cost.loops),
    Line("collectives", "d"): lambda cost: len(cost.collectives),
    Line("a device receives"): lambda cost: cost.traffic.most,
    Line("ms by XLA's estimate", ".3f"): lambda cost: cost.seconds and cost.seconds * 1e3,
}
LEGEND = """\
arguments: what a device holds of table, state, weights and batch, padded: on a TPU rows
of fewer than 128 numbers lie by columns, or as 128 numbers each (jslices.row_major)
temporaries: what it needs besides while the step runs"""


def run(sizes: Sizes, device: str) -> None:
    """Compiles and prints; ``argparse.ArgumentError`` for an unavailable device."""
    try:
        devices = target(device)
    except (ModuleNotFoundError, ValueError) as error:
        raise argparse.ArgumentError(None, str(error)) from None
    sizes = whole(sizes, devices)
    print(heading(sizes, devices), flush=True)
    costs = {}
    for name, side in sides(sizes).items():
        try:
            costs[name] = cost_of(side(devices))
        except jax.errors.JaxRuntimeError as error:
            reason = str(error).partition("\n")[0]
            print(f"{name}: cannot be compiled: {reason}")
    if costs:
        print(table(costs))
        print(LEGEND)
        for name, cost in costs.items():
            print(details(name, cost))


def whole(sizes: Sizes, device: Target) -> Sizes:
    """The sizes with rows and ids added until they can be divided among devices."""
    rows, ids = (js.padded_rows(n, len(device.devices)) for n in (sizes.rows, sizes.ids))
    return sizes.but(rows=rows, ids=ids)


def sides(sizes: Sizes) -> Mapping[str, Callable[[Target], jax.stages.Compiled]]:
    """The functions that compile the step with row gradients and the dense one."""
    return {
        ROWS: lambda device: compile_step(sizes, js.value_and_grad, device),
        DENSE: lambda device: compile_step(sizes.dense(), jax.value_and_grad, device),
    }


def heading(sizes: Sizes, device: Target) -> str:
    """What is compiled, and for which device."""
    count = len(device.devices)
    kind = device.devices[0].device_kind
    several = f"{count} x {kind}" if count > 1 else kind
    lines = [
        str(sizes),
        f"jslices {js.__version__}, jax {jax.__version__}, compiled for {device.name} "
        f"({several}); nothing was run",
    ]
    if count > 1:
        lines += [
            f"on each of {count} devices {sizes.rows // count:,} rows of table and state, "
            f"and {sizes.ids // count:,} of the ids; the rest is replicated",
            f'row gradients with exchange={{"table": jslices.Exchange("{AXIS}", '
            'overflow="nan")}',
        ]
    return "\n".join(lines)


def table(costs: Mapping[str, Cost]) -> str:
    """A column for each side, and one for dense gradients as a multiple."""
    columns = {
        name: [figure(costs[name]) for figure in LINES.values()] if name in costs else None
        for name in (ROWS, DENSE)
    }
    return comparison([*LINES], columns)


def details(name: str, cost: Cost) -> str:
    """The kernels, loops and collectives by kind."""
    kinds = ", ".join(f"{count} {kind}" for kind, count in cost.kernels.items())
    lines = [f"{name}: kernels: {kinds}"]
    if cost.offloads:
        sent = ", ".join(f"{count} {kind}" for kind, count in cost.offloads.items())
        lines.append(f"{name}: sent to SparseCores: {sent}")
    if cost.loops:
        lines.append(f"{name}: loops, whose kernels count once: {', '.join(cost.loops)}")
    if cost.collectives:
        shown = (f"{x.kind} of {human_bytes(x.nbytes)}" for x in cost.collectives)
        counts = collections.Counter(shown).most_common()
        each = ", ".join(f"{count} {kind}" for kind, count in counts)
        lines.append(f"{name}: collectives: {each}")
    return "\n".join(lines)
