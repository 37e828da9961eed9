"""HostTables: several host tables, fetched and stored as one."""

from collections.abc import Mapping

from jslices import FailedPreconditionError, InvalidArgumentError
from jslices._host_table.journal import Journal, Journaled, one_at_a_time
from jslices._host_table.rows import HostRows
from jslices._host_table.table import HostTable
from jslices.extend import PyTree


class HostTables(Journaled):
    """Host tables by name, made by :meth:`jslices.HostTable.together`.

    A step is in the files of all of them or in none, whatever kills the process. They share
    one journal, that of the first file; the others link to it.
    """

    def __init__(self, tables: Mapping[str, HostTable]) -> None:
        members = list(tables.values())
        for table in members:
            if not isinstance(table, HostTable):
                raise TypeError(f"HostTable.together wants HostTables, got {table!r:.80}")
            table._journal.check_usable(table)
            if len(table._journal.members) > 1 or members.count(table) > 1:
                raise InvalidArgumentError(
                    f"{table!r} is together with other tables already, or twice in these"
                )
        before = [table._seat for table in members]
        for journal, _ in before:
            journal.end()
        self._tables = dict(tables)
        self._shared_journal = Journal([table._records for table in members])
        try:
            for index, table in enumerate(members):
                before[index][0].closed = True
                table._seat = self._shared_journal, index
        except BaseException:
            self._shared_journal.closed = True
            for table, seat in zip(members, before, strict=True):
                table._seat, seat[0].closed = seat, False
            raise

    @property
    def _journal(self) -> Journal:
        return self._shared_journal

    def __getitem__(self, name: str) -> HostTable:
        return self._tables[name]

    @property
    def steps(self) -> int:
        """How many steps were stored.

        Raises:
          FailedPreconditionError: if the tables differ in that.
        """
        steps = {name: table.steps for name, table in self._tables.items()}
        if len({*steps.values()}) != 1:
            raise FailedPreconditionError(
                f"these tables have different numbers of steps, {steps}: restore copies of "
                "one step, or ask each table"
            )
        return next(iter(steps.values()))

    @one_at_a_time
    def fetch(
        self, ids: Mapping[str, PyTree]
    ) -> tuple[dict[str, HostRows], dict[str, PyTree]]:
        """Brings rows of all tables to the device: takes and gives dicts by their names.

        Raises:
          InvalidArgumentError: for other names, and as :meth:`HostTable.fetch`.
        """
        self._check("fetch", ids)
        both = {name: table.fetch(ids[name]) for name, table in self._tables.items()}
        rows = {name: rows for name, (rows, _) in both.items()}
        return rows, {name: places for name, (_, places) in both.items()}

    @one_at_a_time
    def store(self, rows: Mapping[str, HostRows]) -> None:
        """Writes back the rows that were fetched last, to all tables or to none.

        Raises:
          InvalidArgumentError: for other names, and as :meth:`HostTable.store`.
        """
        self._check("store", rows)
        self._journal.finish()
        pending = [table._take(rows[name]) for name, table in self._tables.items()]
        overlaps = all(table._overlap for table in self._tables.values())
        self._journal.store(pending, at_once=not overlaps)

    def __repr__(self) -> str:
        return f"HostTables({self._tables})"

    def _check(self, call: str, values: Mapping[str, object]) -> None:
        if {*values} != {*self._tables}:
            raise InvalidArgumentError(
                f"HostTables.{call} got {sorted(values)}, and the tables are "
                f"{sorted(self._tables)}: give a dict with an entry for each"
            )
