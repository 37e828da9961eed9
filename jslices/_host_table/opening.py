"""Opening the file of a host table: locked, and restored to a whole step."""

import contextlib
import functools
import os
import struct
import warnings

from jslices._host_table import records as storage
from jslices._host_table.journal import FilePart, Head, read_body, read_head, this_boot
from jslices._host_table.records import File, FileForm, FileRecords, Offsets
from jslices.checkpoint import files
from jslices.errors import DataLossError, FailedPreconditionError, NotFoundError


def open_file(path: str, form: FileForm, *, make: bool) -> FileRecords:
    """Open a file at an absolute path without links, whole, and lock it.

    Without ``make`` it is only read, and so is its journal.

    Raises:
      NotFoundError: if there is none, and ``make`` is False.
      InvalidArgumentError: for a file of another table, or of another kind.
      FailedPreconditionError: for one that is open, or to be read and lacks a step.
      DataLossError: for a file, or a journal beside it, that is damaged or another's.
    """
    while (lock := storage.locked(path, "r+" if make else "r")) is None:
        if not make:
            raise NotFoundError(f"{path} is not there; give what save(path) wrote")
        _refuse_orphan(path)
        new = storage.make(path, form)
        with storage.closed_on_error(new):
            new.flush()  # a power failure leaves all of it, or no file of this name
            with files.directory_lock(os.path.dirname(path), exclusive=True):
                if not os.path.lexists(path):
                    files.remove(storage.journal_of(path))
                    new.publish(path)
                    return new
        new.close()  # another process was faster
    with storage.closed_on_error(lock):
        if make:
            storage.clean(path)
        form.check(lock)
        settle(lock, form)
        records = FileRecords(path, lock, form)
        before = records.id[8:].tobytes()
        if any(before) and any(form.optimizer) and before != form.optimizer:
            warnings.warn(
                f"{path} was last open with another optimizer than {form.tx}: if that is "
                "not meant, or rows have missed steps of the former (untouched='exact'), "
                "open it with that one, and call table.catch_up()",
                stacklevel=4,
            )
    if make:
        records.renew()
    return records


def _refuse_orphan(path: str) -> None:
    """Refuse to begin a file beside the journal of a write to another."""
    journal = storage.journal_of(path)
    head = read_head(journal)
    if head is not None and head.started:
        raise DataLossError(
            f"{journal} has a step that was to be written to {path}, which is not there: "
            f"put the file back beside it, or delete {journal} to begin a new table"
        )


def settle(file: File, form: FileForm) -> None:
    """Restore a locked file to a whole step by the journal beside it, which is deleted.

    One that is only read must be whole.
    """
    path, journal = file.path, storage.journal_of(file.path)
    head = read_head(journal)
    if head is not None and head.unflushed and head.boot != this_boot():
        raise DataLossError(
            f"{path} was open when its machine failed or was shut down, after steps that "
            "no flush() had brought to the disk: rows of several steps may be mixed. Put a "
            f"copy that save(path) made in its place and delete {journal}; or delete only "
            "that, to take the rows as they are"
        )
    if head is not None and head.started and not file.writable():
        raise FailedPreconditionError(
            f"{journal} has a step that may not be in {path}: open that as a HostTable, "
            "which writes it, and close it first"
        )
    replayed = head is not None and head.started and _replay(file, form, head)
    done, in_progress = _numbers(file, form.at)
    if in_progress != done or done < 0:
        raise DataLossError(
            f"{path} was left in the middle of write {in_progress}, with {done} that are "
            f"whole, and {journal} does not have it: put that journal back beside it, or a "
            "copy that save(path) made in its place"
        )
    if not file.writable():
        return
    if head is not None and head.tables > 1:
        os.sync()  # the files of the other tables of this journal, too
    elif head is not None:
        file.sync()
    if replayed:
        storage.remove_journal(os.path.realpath(journal))
    storage.remove_journal(journal)


def _replay(file: File, form: FileForm, head: Head) -> bool:
    """Write the step in a journal to all of its files; False if it is not of this file."""
    path, journal = file.path, storage.journal_of(file.path)
    parts = read_body(path, journal, head)
    paths = [part.file for part in parts]
    own = file.read_at(form.at.mark, 16).hex()
    if own not in [part.id for part in parts]:
        if path not in paths and os.path.islink(journal):
            return False
        raise DataLossError(
            f"{journal} has a step of {', '.join(paths)}, and {path} is another table (a "
            f"copy that was put back, a new one, or one that was moved): delete {journal} "
            "to take it as it is, or put back the one that the step is of"
        )
    with contextlib.ExitStack() as stack:
        todo = []
        for part in parts:
            other = file if part.id == own else storage.locked(part.file)
            if other is None:
                raise DataLossError(
                    f"{journal} has a step of {path} and {part.file}, which is not there: "
                    "put it back, as the step is written to both or to none"
                )
            if other is not file:
                stack.enter_context(other)
            at = form.at if other is file else _offsets(other, journal)
            if at is None or not _is_of(other, at, part):
                raise DataLossError(
                    f"{journal} has a step of a table that was at {part.file}, and "
                    f"{part.file} is another now (a copy that was put back, or a new one): "
                    f"delete {journal} to take that one as it is, or put the first table "
                    "back"
                )
            if _lacks(other, at, part, journal):
                todo.append(functools.partial(_write_part, other, at, part))
        for write in todo:
            write()
    return True


def _offsets(other: File, journal: str) -> Offsets | None:
    """The offsets in another file that a journal names; None if that is not its journal.

    A crafted one could name any file.
    """
    beside = storage.journal_of(other.path)
    if os.path.realpath(beside) != os.path.realpath(journal):
        return None
    return storage.offsets_of(other)


def _is_of(file: File, at: Offsets, part: FilePart) -> bool:
    """True if a part is of this file."""
    fits = (at.record + at.entry, at.shared) == (part.record, part.shared)
    inside = bool(((part.rows >= 0) & (part.rows < at.rows)).all())
    return fits and inside and file.read_at(at.mark, 16).hex() == part.id


def _lacks(file: File, at: Offsets, part: FilePart, journal: str) -> bool:
    """True if a file lacks a part of its own."""
    done, in_progress = _numbers(file, at)
    if part.number <= done == in_progress:
        return False
    if part.number != done + 1 or in_progress not in (done, part.number):
        raise DataLossError(
            f"{journal} has write {part.number} of {file.path}, which has only {done}: it "
            f"was replaced by an older copy. Delete {journal} to take that one as it is"
        )
    return True


def _write_part(file: File, at: Offsets, part: FilePart) -> None:
    number = struct.pack("<q", part.number)
    file.write_at(at.mark + 16, number)
    for row, record in zip(part.rows.tolist(), part.words, strict=True):
        file.write_at(at.first + row * at.record, record[: at.record])
        file.write_at(at.entries + row * at.entry, record[at.record :])
    file.write_at(at.state + 8, part.values)
    file.write_at(at.state, number)


def _numbers(file: File, at: Offsets) -> tuple[int, int]:
    """``done`` and ``in_progress`` of a file."""
    (done,) = struct.unpack("<q", file.read_at(at.state, 8))
    (in_progress,) = struct.unpack("<q", file.read_at(at.mark + 16, 8))
    return done, in_progress
