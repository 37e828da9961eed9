"""Writing a checkpoint: the contents of its files, which appear all at once."""

import contextlib
import dataclasses
import hashlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

from jslices import InvalidArgumentError
from jslices.checkpoint import files
from jslices.checkpoint.archive import is_published, saved_id
from jslices.checkpoint.info import INFO_KEY, dump_info
from jslices.checkpoint.leaves import Leaf, Piece
from jslices.checkpoint.processes import ALONE, Processes
from jslices.checkpoint.tensors import Tensor, write_tensors

#: The contents of one file: a tensor of each variable, by name.
Part = dict[str, Tensor]


# --- what each file holds -------------------------------------------------------------


def in_shards(leaves: dict[str, Leaf], processes: Processes = ALONE) -> list[Part | None]:
    """Plan one file for each shard; None for the files of other processes.

    An array that is not sharded goes into the smallest file. Values that every process has
    on its own, an array on its devices or a string, may differ: the first's are written.
    """
    spread = {name: leaf for name, leaf in leaves.items() if leaf.is_spread}
    share = _shares(spread, processes.count)[processes.index]
    if processes.is_first:
        share |= {n: leaf.pieces for n, leaf in leaves.items() if n not in spread}
    count = max(map(len, share.values()), default=int(processes.is_first))
    parts: list[Part | None] = []
    for number, its_count in enumerate(processes.allgather_text(str(count))):
        own = number == processes.index
        parts += _files(leaves, share, count) if own else [None] * int(its_count)
    return parts


def check_equal(leaves: dict[str, Leaf], processes: Processes) -> None:
    """Refuse variables that differ, except in values that each process has on its own."""
    description = [
        (name, leaf.is_spread and (leaf.spec, [(p.start, p.holders) for p in leaf.pieces]))
        for name, leaf in leaves.items()
    ]
    digest = hashlib.sha256(repr(description).encode()).hexdigest()
    processes.check_agreement(
        f"{len(leaves)} variables to save (digest {digest[:12]})",
        "give all processes the same names, and arrays that are spread over them with the "
        "same shape, dtype and sharding",
    )


def _shares(leaves: dict[str, Leaf], count: int) -> list[dict[str, list[Piece]]]:
    """Divide pieces among processes: each goes to its holder with the fewest bytes."""
    shares: list[dict[str, list[Piece]]] = [{} for _ in range(count)]
    sizes = [0] * count
    pieces = [(name, piece) for name, leaf in leaves.items() for piece in leaf.pieces]
    for name, piece in sorted(pieces, key=lambda item: len(item[1].holders)):
        writer = min(piece.holders, key=sizes.__getitem__)
        shares[writer].setdefault(name, []).append(piece)
        sizes[writer] += leaves[name].piece_tensor(piece).num_bytes
    return shares


def _files(
    leaves: dict[str, Leaf], share: dict[str, list[Piece]], count: int
) -> list[Part]:
    parts: list[Part] = [{} for _ in range(count)]
    sizes = [0] * count
    for name, pieces in sorted(share.items(), key=lambda item: -len(item[1])):
        for number, piece in enumerate(pieces):
            if len(pieces) == 1:
                number = sizes.index(min(sizes))
            tensor = leaves[name].piece_tensor(piece)
            parts[number][name] = tensor
            sizes[number] += tensor.num_bytes
    return parts


# --- files that appear at once --------------------------------------------------------


@dataclasses.dataclass
class Save:
    """One save of a checkpoint, which replaces an older one at once.

    All processes write their files under temporary names before the first one renames
    those of all. If one fails, the first deletes them before any process raises.
    """

    prefix: str  #: the path of the checkpoint.
    save_id: str  #: the same in all processes.
    parts: Sequence[Part | None]  #: of each file; None for those of other processes.
    info: dict[str, Any]  #: what the first file says about the variables.
    sharded: bool  #: whether the files are shards.
    #: Path and text of a state file that is replaced at the same time.
    state: tuple[str, str] | None = None
    processes: Processes = ALONE  #: those that write the checkpoint.

    def __post_init__(self) -> None:
        self.directory, count = os.path.dirname(self.prefix), len(self.parts)
        shards = [files.shard_path(self.prefix, i, count) for i in range(count)]
        self.paths = shards if self.sharded else [self.prefix]
        published = self.paths if self.state is None else [*self.paths, self.state[0]]
        self.temporaries = {p: files.temporary_path(p, self.save_id) for p in published}
        self.descriptors: dict[str, int] = {}  # of open files, which hold their locks

    def run(self) -> None:
        """Write the files, and give them their names.

        Raises:
          OSError: if they cannot be written. It says whether the checkpoint was saved; if
            not, the old files are unchanged.
          InvalidArgumentError: if the processes have other paths than the first.
        """
        self.processes.check_agreement(
            f"{os.path.basename(self.prefix)!r} to save",
            "give all processes one path and global_step",
        )
        try:
            for action in (self.make_room, self.write, self.publish):
                with self.stage():
                    action()
        finally:
            self.tidy()
            for descriptor in self.descriptors.values():
                os.close(descriptor)

    @contextlib.contextmanager
    def stage(self) -> Iterator[None]:
        """One step of all processes; an error says what happened to the checkpoint."""
        with self.processes.barrier(undo=self.tidy):
            try:
                yield
            except OSError as error:
                if error.errno is None:  # of a handler of signals, whose caller knows it
                    error.add_note(f"{self.prefix} {self._outcome()}")
                    raise
                raise OSError(
                    error.errno,
                    f"{error.strerror}; {self.prefix} {self._outcome()}",
                    error.filename or self.prefix,
                ) from error

    def make_room(self) -> None:
        """Clean up after killed processes, and open the first file."""
        if self.processes.is_first:
            with files.directory_lock(self.directory, exclusive=True):
                files.clean(self.directory, is_published)
            self._open(self.paths[0])

    def write(self) -> None:
        """Write the files of this process, and the state file."""
        if not os.path.exists(self.temporaries[self.paths[0]]):
            raise InvalidArgumentError(
                f"process {self.processes.index} does not find in "
                f"{self.directory or '.'!r} what process 0 has written there; give all a "
                "directory that they share"
            )
        for number, (part, path) in enumerate(zip(self.parts, self.paths, strict=True)):
            if part is None:
                continue
            starts = {name: tensor.start for name, tensor in part.items()}
            extra = {} if number else self.info
            metadata = dump_info(self.save_id, number, len(self.parts), starts, extra)
            write_tensors(self._open(path), part, {INFO_KEY: metadata})
        if self.state is not None and self.processes.is_first:
            path, text = self.state
            files.write_and_flush(self._open(path), text)

    def publish(self) -> None:
        """Give the written files their names. The first one decides."""
        if not self.processes.is_first:
            return
        with files.directory_lock(self.directory, exclusive=True):
            for path in self.paths:
                os.stat(self.temporaries[path])  # files of other processes may be gone
            first, *others = self.paths
            if others:  # they count under any name once the first one has its own
                files.sync_directory(self.directory)
            os.replace(self.temporaries[first], first)
            files.sync_directory(self.directory)  # before older files may go
            for path in others:
                os.replace(self.temporaries[path], path)
            for family in files.families(self.prefix):
                if family != self.paths:
                    files.remove_family(family)
            if self.state is not None:
                os.replace(self.temporaries[self.state[0]], self.state[0])
            files.sync_directory(self.directory)

    def tidy(self) -> None:
        """Delete the files that are still temporary."""
        if not self.processes.is_first:
            return
        is_published = not os.path.exists(self.temporaries[self.paths[0]])
        for path, temporary in self.temporaries.items():
            # Once the first shard has its name the others are part of a checkpoint.
            if not (is_published and path in self.paths):
                with contextlib.suppress(OSError):
                    files.remove(temporary)

    def _open(self, path: str) -> int:
        if path not in self.descriptors:
            self.descriptors[path] = files.open_new(self.temporaries[path])
        return self.descriptors[path]

    def _outcome(self) -> str:
        if saved_id(self.paths[0]) != self.save_id:
            return "was not saved, and what was saved before is as it was"
        if self.state is not None and os.path.exists(self.temporaries[self.state[0]]):
            return (
                f"was saved and can be restored, but {self.state[0]} was not written and "
                "does not name it; save once more, or call update_checkpoint_state"
            )
        return "was saved and can be restored, but a power failure may undo that"
