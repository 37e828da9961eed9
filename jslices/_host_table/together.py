"""Several host tables that are stored as one."""

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Generic, Protocol, TypeVar

from jslices import FailedPreconditionError, InvalidArgumentError
from jslices._host_table.journal import Coming, Journal
from jslices._host_table.rows import HostRows
from jslices.extend import PyTree


class _Table(Protocol):
    @property
    def steps(self) -> int: ...

    def fetch(self, ids: PyTree) -> tuple[HostRows, PyTree]: ...


_T = TypeVar("_T", bound=_Table)


class HostTables(Generic[_T]):
    """Host tables by name, made by :meth:`jslices.HostTable.together`.

    A step is in the files of all of them or in none, whatever kills the process. They lie
    together in one journal, that of the first file, to which the others have links.
    """

    def __init__(
        self,
        tables: Mapping[str, _T],
        takes: Mapping[str, Callable[[HostRows], Coming]],
        journal: Journal,
        at_once: bool,
    ) -> None:
        self._tables, self._takes = dict(tables), takes
        self._journal, self._at_once = journal, at_once

    def __getitem__(self, name: str) -> _T:
        return self._tables[name]

    @property
    def steps(self) -> int:
        """How many steps were stored.

        Raises:
          FailedPreconditionError: where the tables differ in that.
        """
        steps = {name: table.steps for name, table in self._tables.items()}
        if len({*steps.values()}) != 1:
            raise FailedPreconditionError(
                f"these tables have different numbers of steps, {steps}: restore copies of "
                "one step, or ask each table"
            )
        return next(iter(steps.values()))

    def fetch(
        self, ids: Mapping[str, PyTree]
    ) -> tuple[dict[str, HostRows], dict[str, PyTree]]:
        """Brings rows of all tables to the device.

        Args:
          ids: for each table what its ``fetch`` takes.

        Returns:
          ``(rows, places)``, dicts of what the tables give.

        Raises:
          InvalidArgumentError: for other names than those of the tables.
        """
        self._check("fetch", ids)
        with self._journal.lock:
            both = {name: table.fetch(ids[name]) for name, table in self._tables.items()}
        rows = {name: rows for name, (rows, _) in both.items()}
        return rows, {name: places for name, (_, places) in both.items()}

    def store(self, rows: Mapping[str, HostRows]) -> None:
        """Writes back the rows that were fetched last, to all tables or to none.

        Raises:
          InvalidArgumentError: for other names than those of the tables.
          FailedPreconditionError: for rows that are not those of the last ``fetch``.
        """
        self._check("store", rows)
        self._journal.check_usable(self)
        with self._journal.lock:
            self._journal.finish()
            coming = [take(rows[name]) for name, take in self._takes.items()]
            self._journal.store(coming, at_once=self._at_once)

    def flush(self) -> None:
        """Returns once all that was stored is written, and in files on the disk."""
        self._journal.check_usable(self)
        with self._journal.lock:
            self._journal.flush()

    def close(self) -> None:
        """Writes what was stored, and lets others open the files. Does nothing twice."""
        with self._journal.lock:
            self._journal.close()

    def __enter__(self) -> "HostTables[_T]":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"HostTables({self._tables})"

    def _check(self, call: str, values: Mapping[str, object]) -> None:
        if {*values} != {*self._tables}:
            raise InvalidArgumentError(
                f"HostTables.{call} got {sorted(values)}, and the tables are "
                f"{sorted(self._tables)}: give a dict with an entry for each"
            )
