"""A table of text."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jslices.extend import human_bytes

NONE = "-"


class Line(NamedTuple):
    """A line of a comparison.

    Attributes:
      name: of the figure.
      values: one for each column; None where there is none.
      form: their format; bytes without one.
      compared: whether the last value is a multiple of the first.
    """

    name: str
    values: Sequence[float | None]
    form: str | None = None
    compared: bool = True


def comparison(columns: Sequence[str], lines: Iterable[Line]) -> str:
    """A table of the costs of row gradients, in the first column, and dense ones."""
    rows = [["", *columns, "dense / rows"]]
    for name, values, form, compared in lines:
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
