"""A table of text."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jslices._densify import human_bytes

NONE = "-"


class Line(NamedTuple):
    """A line of a comparison."""

    name: str  #: of the figure.
    form: str | None = None  #: its format; bytes without one.
    compared: bool = True  #: whether the last value is a multiple of the first.


def comparison(
    lines: Sequence[Line], sides: Mapping[str, Sequence[float | None] | None]
) -> str:
    """A table of the costs of row gradients, in the first column, and dense ones.

    Each side has a figure for each line, None where there is none, or is None as a whole.
    """
    columns = [figures or [None] * len(lines) for figures in sides.values()]
    rows = [["", *sides, "dense / rows"]]
    for (name, form, compared), *values in zip(lines, *columns, strict=True):
        first, last = values[0], values[-1]
        ratio = f"{last / first:.2f}" if compared and first and last else NONE
        rows.append([name, *(cell(value, form) for value in values), ratio])
    return aligned(rows)


def cell(value: float | None, form: str | None) -> str:
    """A number by a format; without one, bytes."""
    if value is None or not math.isfinite(value):
        return NONE
    return human_bytes(value) if form is None else format(value, form)


def aligned(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """The rows in columns, those in ``left`` flush left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            text.ljust(width) if i in left else text.rjust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
