"""A table of text."""

import math
from collections.abc import Sequence

from jslices.extend import human_bytes

NONE = "-"


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
