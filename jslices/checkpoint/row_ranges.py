"""Ranges of rows to restore, checked."""

import operator
from collections.abc import Mapping

from jslices import InvalidArgumentError
from jslices.checkpoint.archive import Archive
from jslices.checkpoint.leaves import Spec
from jslices.checkpoint.trees import matching


def narrow_to_rows(
    archive: Archive, rows: Mapping[str, slice], saved_as: Mapping[str, str]
) -> None:
    """Restrict tables of ``archive`` to ranges of their rows.

    ``rows`` are those that ``Saver.restore`` takes, ``saved_as`` the names of all variables
    and their names in the archive.
    """
    if not isinstance(rows, Mapping):
        raise TypeError(
            "rows must be a dict {name of a table: slice(start, stop)}, not "
            f"{type(rows).__name__}"
        )
    ranges: dict[str, slice] = {}
    for pattern, part in rows.items():
        for name in matching(str(pattern), saved_as, "rows"):
            part = _checked_range(name, part, archive.specs[saved_as[name]])
            if ranges.setdefault(name, part) != part:
                raise InvalidArgumentError(
                    f"rows asks for two ranges of {name!r}: {_shown(ranges[name])} and "
                    f"{_shown(part)}; restore one after the other"
                )
    for name, part in ranges.items():
        archive.narrow(saved_as[name], part)


def _checked_range(name: str, part: object, spec: Spec) -> slice:
    if not isinstance(part, slice):
        raise TypeError(
            f"rows[{name!r}] must be a slice(start, stop), not {part!r}; for single rows "
            "restore the range that holds them, and index that"
        )
    # The last axis of key data is within a key.
    if len(spec.shape) <= spec.is_key or spec.is_string:
        raise InvalidArgumentError(
            f"rows[{name!r}]: it was saved as a single value, without rows"
        )
    count = spec.shape[0]
    try:
        start = 0 if part.start is None else operator.index(part.start)
        stop = count if part.stop is None else operator.index(part.stop)
        step = 1 if part.step is None else operator.index(part.step)
    except TypeError as error:
        raise TypeError(f"rows[{name!r}] must hold integers: {error}") from error
    if step != 1 or not 0 <= start <= stop <= count:
        raise InvalidArgumentError(
            f"rows[{name!r}] is {_shown(part)}, but it was saved with {count} rows; "
            f"want 0 <= start <= stop <= {count} and no step (negative numbers do not "
            "count from the end)"
        )
    return slice(start, stop)


def _shown(part: slice) -> str:
    ends = (part.start, part.stop, part.step)[: 2 if part.step is None else 3]
    return f"slice({', '.join(map(str, ends))})"
