"""The measurement as text."""

import math
import platform as machine
from collections.abc import Sequence

import jax

import jslices as js
from jslices._bench.measure import Side
from jslices._bench.memory import needed_by_dense, needed_by_rows
from jslices._bench.sizes import Sizes
from jslices._bench.ways import (
    ABOUT,
    ids_for_all_rows,
    ids_for_large_gradient,
    way_of,
)
from jslices._densify import human_bytes

NONE = "-"
# The lines of which dense gradients' figure is given as a multiple of row gradients'.
COMPARED = (
    "median ms of a step",
    "compile seconds",
    "gradient",
    "temporaries of the step",
    "bytes that must move",
)


def heading(sizes: Sizes, device: jax.Device, room: int | None) -> str:
    """What is run, and where."""
    known = "of unknown size" if room is None else f"{human_bytes(room)} usable"
    drawn = f"Zipf over {sizes.words:,} rows" if sizes.distribution == "zipf" else "uniform"
    return "\n".join(
        [
            f"{sizes.optimizer}, table {sizes.rows:,} x {sizes.dim} {sizes.dtype}, "
            f"{sizes.ids:,} ids a step ({drawn})",
            f"jslices {js.__version__}, jax {jax.__version__}, {device.platform} "
            f"({device.device_kind}), {machine.system()} {machine.machine()}, "
            f"Python {machine.python_version()}, memory {known}",
        ]
    )


def measured(sparse: Side, dense: Side | None, bandwidth: float) -> str:
    """The times and the bytes, row gradients beside dense ones."""
    sides = [sparse] if dense is None else [sparse, dense]
    sizes = sparse.sizes
    moved = [sizes.moved_by_rows(sparse.distinct), sizes.moved_by_dense()][: len(sides)]
    gradients = [sizes.row_gradient_bytes, sizes.table_bytes][: len(sides)]
    rows = [
        ["", "row gradients", "dense gradients"[: 15 * (len(sides) - 1)], "dense / rows"]
    ]

    def add(name: str, values: Sequence[float | None], form: str | None = None) -> None:
        cells = [_cell(value, form) for value in values]
        ratio = NONE
        if len(values) == 2 and name in COMPARED and all(values):
            ratio = f"{values[1] / values[0]:.2f}"  # type: ignore[operator]
        rows.append([name, *cells, *[NONE] * (2 - len(cells)), ratio])

    add("median ms of a step", [s.median * 1e3 for s in sides], ".3f")
    add("timed steps", [len(s.times) for s in sides], ",.0f")
    add("ids a second", [sizes.ids / s.median for s in sides], ",.0f")
    add("compile seconds", [s.compile_seconds for s in sides], ".2f")
    add("table", [sizes.table_bytes] * len(sides))
    add("optimizer state", [sizes.state_bytes] * len(sides))
    add("gradient", gradients)
    add("temporaries of the step", [_analysed(s, "temp_size_in_bytes") for s in sides])
    add("updated in place", [_analysed(s, "alias_size_in_bytes") for s in sides])
    add("bytes that must move", moved)
    add("ms to move them", [x / bandwidth * 1e3 for x in moved], ".3f")
    add(
        "step / that",
        [s.median / (x / bandwidth) for s, x in zip(sides, moved, strict=True)],
        ".1f",
    )
    return _aligned(rows) + (
        f"\n{sparse.distinct:,.0f} distinct ids a step; a copy of a large array moves "
        f"{bandwidth / 1e9:.1f} GB/s on this machine"
    )


def way(sizes: Sizes, platform: str) -> str:
    name = way_of(sizes, platform)
    return f"the step with row gradients goes: {name} ({ABOUT[name]})"


def tenth(sparse: Side, small: Side, platform: str) -> str:
    """How the step depends on the table's height, measured."""
    name = way_of(small.sizes, platform)
    return (
        f"with a tenth of the rows ({small.sizes.rows:,}): {small.median * 1e3:.3f} ms, "
        f"{small.distinct:,.0f} distinct ids, {name}; this table takes "
        f"{sparse.median / small.median:.2f} times as long"
    )


def other_sizes(sizes: Sizes, platform: str, room: int | None) -> str:
    """What formulas tell of larger and smaller sizes."""
    rows, ids = sizes.rows, sizes.ids
    everything = ids_for_all_rows(sizes, platform)
    large = ids_for_large_gradient(sizes)
    shown = [sizes, sizes.but(rows=rows * 10), sizes.but(rows=rows * 100)]
    if rows >= 10:
        shown.insert(0, sizes.but(rows=rows // 10))
    more = {ids * 10, large}
    if everything is not None:
        more.add(everything)
    shown += [sizes.but(ids=n) for n in sorted(more - {ids})]
    lines = [
        ["", "", "", "gradient", "", "must move", "", "at most in use", "", "", ""],
        [*("rows", "ids", "distinct"), *["as rows", "dense"] * 3, "fits", "way"],
    ]
    for other in shown:
        distinct = other.distinct()
        needs = [needed_by_rows(other, platform), needed_by_dense(other)]
        gradients = [other.row_gradient_bytes, other.table_bytes]
        moved = [other.moved_by_rows(distinct), other.moved_by_dense()]
        lines.append(
            [
                *(f"{n:,.0f}" for n in (other.rows, other.ids, distinct)),
                *map(human_bytes, [*gradients, *moved, *needs]),
                _fits(needs, room),
                way_of(other, platform),
            ]
        )
    text = "what would change with other sizes (computed, not measured):\n"
    text += _aligned(lines, left=(10,))
    if everything is not None:
        text += (
            f"\nfrom --ids {everything:,} on a step goes over all {rows:,} rows, as one "
            "with dense gradients does"
        )
    if platform == "cpu":
        text += (
            f"\nfrom --ids {large:,} on the gradient has 16 MB or more, and under "
            "Linux jslices.keep_memory() saves page faults: try --keep-memory"
        )
    return text


def _fits(needs: Sequence[int], room: int | None) -> str:
    if room is None:
        return "?"
    rows, dense = (need <= room for need in needs)
    return "both" if rows and dense else "rows" if rows else "dense" if dense else "none"


def _analysed(side: Side, name: str) -> int | None:
    return getattr(side.analysis, name, None)


def _cell(value: float | None, form: str | None) -> str:
    if value is None or not math.isfinite(value):
        return NONE
    return human_bytes(value) if form is None else format(value, form)


def _aligned(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            text.ljust(width) if i in left else text.rjust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
