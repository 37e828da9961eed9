"""Traffic between devices in a compiled program."""

import collections
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from jslices._densify import UserLine, human_bytes
from jslices._proof.dense import tables_of
from jslices._proof.program import Array, Instruction, Module, Program

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)


class Collective(NamedTuple):
    """One exchange between devices; ``print`` it.

    Attributes:
      kind: ``all-gather``, ``all-reduce``, ...
      arrays: its results on each device, with ``dtype``, ``dims`` and ``nbytes``.
      devices: how many take part in it together; a program has many such groups.
      received: the bytes that a device receives each time, passed on round a ring; for
        ``ragged-all-to-all``, whose parts are known when it runs, the maximum.
      turns: how often the loops around it run it, 1 outside loops; None if unknown from the
        program.
      branch: the branches around it, the outermost first: ``("branch 1 of 2 of
        conditional.3",)``.
      op_name: JAX's name for it: ``jit(step)/scatter-add``.
      line: the line of the user's program.
    """

    kind: str
    arrays: tuple[Array, ...]
    devices: int
    received: int
    turns: int | None
    branch: tuple[str, ...]
    op_name: str
    line: UserLine | None

    @property
    def nbytes(self) -> int:
        """Bytes of its results on each device."""
        return sum(array.nbytes for array in self.arrays)

    def __str__(self) -> str:
        counts = collections.Counter(map(str, self.arrays)).items()
        arrays = ", ".join(f"{n} x {x}" if n > 1 else x for x, n in counts)
        turns = {1: "", None: " in each turn of a loop"}.get(
            self.turns, f" in each of {self.turns} turns"
        )
        what = f" ({self.op_name})" if self.op_name else ""
        branch = "".join(f", in {branch}" for branch in self.branch)
        place = "" if self.line is None else f" at {self.line}"
        return (
            f"{self.kind} of {arrays} among {self.devices} devices, "
            f"{human_bytes(self.received)} received{turns}{branch}{what}{place}"
        )


class Traffic(NamedTuple):
    """What each device receives in a run of a compiled step, in bytes; ``print`` it.

    A loop whose number of turns is unknown from the program counts once.

    Attributes:
      least: if every conditional takes the branch in which a device receives least.
      most: if every conditional takes the one in which it receives most.
      collectives: the exchanges.
    """

    least: int
    most: int
    collectives: tuple[Collective, ...]

    def __str__(self) -> str:
        more = ""
        if self.most > self.least:
            more = f" to {human_bytes(self.most)}, as branches are taken"
        lines = [f"each device receives {human_bytes(self.least)}{more}"]
        return "\n- ".join([*lines, *map(str, self.collectives)])


def traffic(module: Module) -> Traffic:
    """The collectives of a program, also those that run while something else does."""
    collectives: list[Collective] = []

    def received(
        names: Sequence[str], turns: int | None, branch: tuple[str, ...]
    ) -> tuple[int, int]:
        """The bytes a device receives in all turns of computations: least and most."""
        totals = [
            received_by(each, turns, branch)
            for name in names
            for each in module.computations[name].instructions.values()
        ]
        return sum(least for least, _ in totals), sum(most for _, most in totals)

    def received_by(
        each: Instruction, turns: int | None, branch: tuple[str, ...]
    ) -> tuple[int, int]:
        called = module.called(each)
        if each.opcode.removesuffix("-start") in COLLECTIVES:
            collectives.append(_collective(module, each, turns, branch))
            return (collectives[-1].received * (turns or 1),) * 2
        if each.opcode == "conditional":
            name = f"of {len(called)} of {each.name}"
            ways = [
                received([way], turns, (*branch, f"branch {n} {name}"))
                for n, way in enumerate(called, 1)
            ]
            return min(least for least, _ in ways), max(most for _, most in ways)
        if each.opcode == "while":
            trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', each.rest)
            if turns is not None:
                turns = None if trips is None else turns * int(trips.group(1))
            called += re.findall(r"condition=%?([\w.-]+)", each.rest)
        return received(called, turns, branch)

    return Traffic(*received([module.entry], 1, ()), tuple(collectives))


def _collective(
    module: Module, each: Instruction, turns: int | None, branch: tuple[str, ...]
) -> Collective:
    kind = each.opcode.removesuffix("-start")
    arrays, devices = _results(module, each), _group(module, each)
    received = _received(kind, sum(array.nbytes for array in arrays), devices)
    line = module.user_line(each)
    return Collective(kind, arrays, devices, received, turns, branch, each.op_name, line)


def _results(module: Module, each: Instruction) -> tuple[Array, ...]:
    """The arrays it makes; the start of one lists the operands as well."""
    if not each.opcode.endswith("-start"):
        return each.arrays
    if (done := module.done(each)) is not None:
        return done.arrays
    count = len(each.operands)  # it is done elsewhere, in the next turn of a loop
    return each.arrays[count : 2 * count] or each.arrays


def _received(kind: str, nbytes: int, devices: int) -> int:
    """Bytes that each of a group of devices receives, for results of ``nbytes`` on each."""
    others = devices - 1
    if kind == "all-reduce":  # reduced and scattered, and gathered
        return 2 * nbytes * others // devices
    if kind in ("all-gather", "all-to-all"):  # a part of the result is a device's own
        return nbytes * others // devices
    if kind == "reduce-scatter":
        return nbytes * others
    return nbytes if others else 0


def _group(module: Module, each: Instruction) -> int:
    """How many devices take part in a collective together."""
    pairs = re.search(r"source_target_pairs=\{(.*?)\}(?!,\{)", each.rest)
    if pairs is not None:
        moves = re.findall(r"(\d+),(\d+)", pairs.group(1))
        return 1 + any(source != to for source, to in moves)
    listed = re.search(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}", each.rest)
    if listed is not None:
        groups = re.findall(r"\{([\d,]*)\}", listed.group(1))
        return max((len(x.split(",")) for x in groups), default=module.devices)
    counted = re.search(r"replica_groups=\[[\d,]*?(\d+)\]<=", each.rest)
    if counted is not None:
        return int(counted.group(1))
    on_mesh = re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", each.rest)
    if on_mesh is not None:
        sides = dict(re.findall(r"'([^']*)'=(\d+)", on_mesh.group(1)))
        # 'x' is a whole axis; 'x':(2)4 a part of it, of 4.
        axes = re.findall(r"'([^']*)'(?::\(\d+\)(\d+))?", on_mesh.group(2))
        return math.prod(int(part or sides[name]) for name, part in axes)
    if "replica_groups=" in each.rest:
        raise NotImplementedError(f"these groups of devices cannot be read: {each.rest}")
    return module.devices


# --- tables on the wire -------------------------------------------------------------


def problems(program: Program, min_bytes: int) -> list[str]:
    """A line for each collective whose size depends on that of a table, and advice."""
    tables = tables_of(program, min_bytes)
    lines = []
    for each in traffic(program.module).collectives:
        sizes = {size for x in each.arrays for size in x.dims}
        for leaf, part in tables.items():
            if each.nbytes >= part.nbytes or sizes & {leaf.shape[0], part.dims[0]}:
                lines.append(f"{each}: as large as {leaf}, or has an axis as long")
                break
    if not lines:
        return []
    return [
        *lines,
        "row gradients (jslices.value_and_grad) do not send the table; for one that is "
        'split by rows, value_and_grad(loss, exchange={...: jslices.Exchange("axis")}) '
        "sends the rows that are looked up to those that ask for them",
    ]
