"""Which rows of which tables are to be restored."""

import fnmatch
import operator
from collections.abc import Mapping
from typing import Any

from jslices._errors import InvalidArgumentError, NotFoundError
from jslices.checkpoint.archive import Archive
from jslices.checkpoint.leaves import Spec
from jslices.checkpoint.names import brief, found_name


def narrow_to_rows(archive: Archive, rows: Any, saved_as: Mapping[str, str]) -> None:
    """Leaves of the tables in ``archive`` only the rows that are asked for.

    Args:
      archive: will hold those rows.
      rows: ``{name or pattern: slice(start, stop)}``.
      saved_as: the names of all variables, and their names in the archive.

    Raises:
      TypeError: if ``rows`` is not such a dict.
      NotFoundError: if there is no such variable.
      InvalidArgumentError: for a range that is not in the table, a variable without rows,
        or two ranges for one.
    """
    if not isinstance(rows, Mapping):
        raise TypeError(
            "rows must be a dict {name of a table: slice(start, stop)}, not "
            f"{type(rows).__name__}"
        )
    chosen: dict[str, slice] = {}
    for pattern, wanted in rows.items():
        exact = found_name(str(pattern), saved_as)
        covered = [n for n in saved_as if n == exact or fnmatch.fnmatchcase(n, pattern)]
        if not covered:
            raise NotFoundError(
                f"rows names no variable with {pattern!r}; there are {brief(saved_as)}, "
                "and patterns such as '*/table' are allowed"
            )
        for name in covered:
            part = _part(name, wanted, archive.specs[saved_as[name]])
            if chosen.setdefault(name, part) != part:
                raise InvalidArgumentError(
                    f"rows asks for two ranges of {name!r}: {_shown(chosen[name])} and "
                    f"{_shown(part)}; restore one after the other"
                )
    for name, part in chosen.items():
        archive.narrow(saved_as[name], part)


def _part(name: str, wanted: Any, spec: Spec) -> slice:
    if not isinstance(wanted, slice):
        raise TypeError(
            f"rows[{name!r}] must be a slice(start, stop), not {wanted!r}; for single rows "
            "restore the range that holds them, and index that"
        )
    keys = spec.kind.startswith("key:")  # the last axis is the inside of a key
    if len(spec.shape) <= keys or spec.kind in ("str", "bytes"):
        raise InvalidArgumentError(f"rows[{name!r}]: this was saved as one value, no rows")
    count = spec.shape[0]
    try:
        start = 0 if wanted.start is None else operator.index(wanted.start)
        stop = count if wanted.stop is None else operator.index(wanted.stop)
        step = 1 if wanted.step is None else operator.index(wanted.step)
    except TypeError as error:
        raise TypeError(f"rows[{name!r}] must hold integers: {error}") from error
    if step != 1 or not 0 <= start <= stop <= count:
        raise InvalidArgumentError(
            f"rows[{name!r}] is {_shown(wanted)}, but it was saved with {count} rows; "
            f"want 0 <= start <= stop <= {count} and no step (negative numbers do not "
            "count from the end)"
        )
    return slice(start, stop)


def _shown(part: slice) -> str:
    ends = (
        (part.start, part.stop) if part.step is None else (part.start, part.stop, part.step)
    )
    return f"slice({', '.join(map(str, ends))})"
