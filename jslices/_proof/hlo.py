"""A compiled program: what lies in whose memory, and what is copied.

XLA gives every value of a program memory of its own, but for a few operations that write
into the memory of an operand (a scatter) or only rename it (a tuple). So for each value
there is one instruction that made its memory: :meth:`Module.maker`.
"""

import re
from collections.abc import Iterable, Iterator

from jslices._densify import _HERE, _LIBRARIES, JAX_FOLDER, UserLine
from jslices._proof.text import Instruction, number_of, read

_RENAMES = {"bitcast", "copy-done", "optimization-barrier", "add-dependency"}
_WRITES = {"scatter", "dynamic-update-slice"}
_CALLED = re.compile(
    r"(?:calls|to_apply|body|true_computation|false_computation|"
    r"branch_computations)=(\{[^}]*\}|%[\w.-]+)"
)


#: One of the arrays that an instruction makes.
Value = tuple[Instruction, int]


class Module:
    """A compiled program.

    Attributes:
      computations: all of them by name.
      entry: the one that is run.
      aliases: which output lies in the memory of which parameter, as jit has declared it.
    """

    def __init__(self, text: str) -> None:
        self.computations, self.entry, self.aliases, self._tables = read(text)
        if not self.entry:
            raise NotImplementedError("this backend's compiled program cannot be read")
        self._callers: dict[str, tuple[Instruction, int]] = {}
        self._fused: set[str] = set()
        for each in [
            i for c in self.computations.values() for i in c.instructions.values()
        ]:
            called = self.called(each)
            for number, name in enumerate(called):
                self._callers.setdefault(name, (each, number))
            if each.opcode in ("while", "call", "conditional"):
                continue
            self._fused.update(called)

    def called(self, each: Instruction) -> list[str]:
        """The computations it runs, but for the condition of a loop."""
        return [
            name
            for group in _CALLED.findall(each.rest)
            for name in re.findall(r"%([\w.-]+)", group)
            if name in self.computations
        ]

    def caller(self, computation: str) -> Instruction | None:
        """What runs a computation; None for the program itself and conditions of loops."""
        return self._callers[computation][0] if computation in self._callers else None

    def operand(self, each: Instruction, number: int) -> Instruction:
        return self.computations[each.where].instructions[each.operands[number]]

    def result(self, computation: str) -> Instruction:
        found = self.computations[computation]
        return found.instructions[found.root]

    def parameters(self) -> dict[int, Instruction]:
        """Those of the program, by number."""
        return {
            number_of(each): each
            for each in self.computations[self.entry].instructions.values()
            if each.opcode == "parameter"
        }

    def outputs(self) -> list[Value]:
        """Those of the program, in order."""
        return self.elements(self.entry)

    def elements(self, computation: str) -> list[Value]:
        """The arrays that a computation returns."""
        root = self.result(computation)
        if root.opcode == "tuple":
            return [(self.operand(root, n), 0) for n in range(len(root.operands))]
        return [(root, n) for n in range(len(root.arrays))]

    def run(self) -> Iterator[Instruction]:
        """All instructions that are run by themselves, not as parts of a fusion."""
        for computation in self.computations.values():
            if computation.name not in self._fused:
                yield from computation.instructions.values()

    def maker(self, each: Instruction, index: int = 0) -> Value:
        """The instruction that made the memory in which a value lies."""
        step = self.into(each, index)
        while step is not None:
            (each, index), step = step, self.into(*step)
        return each, index

    def into(self, each: Instruction, index: int) -> Value | None:
        """The value whose memory this one is written into, if it has none of its own."""
        op = each.opcode
        if op in _RENAMES:
            return self.operand(each, 0), index
        if op == "get-tuple-element":
            found = re.search(r"index=(\d+)", each.rest)
            return self.operand(each, 0), 0 if found is None else int(found.group(1))
        if op == "tuple" or op in _WRITES:
            return self.operand(each, index), 0
        if op == "while":
            return self.operand(each, 0), index
        if op == "parameter" and each.where in self._callers:
            caller, number = self._callers[each.where]
            if caller.opcode == "while":
                return self.operand(caller, 0), index
            first = 1 + number if caller.opcode == "conditional" else number_of(each)
            return self.operand(caller, first), index
        if op in ("call", "conditional"):
            ways = [self.maker(self.result(name), index) for name in self.called(each)]
            inner = [
                way
                for way in ways
                if way[0].opcode != "parameter" and way[0].where != each.where
            ]
            return (inner or ways)[0]
        if op == "fusion":
            return self._into_fusion(each, index)
        return None

    def _into_fusion(self, each: Instruction, index: int) -> Value | None:
        (name,) = self.called(each)[:1] or [""]
        if not name:
            return None
        inner, _ = self.elements(name)[index]
        wrote = False
        while inner.opcode in _RENAMES | _WRITES:
            wrote = wrote or inner.opcode in _WRITES
            inner = self.operand(inner, 0)
        if inner.opcode == "parameter" and wrote:
            return self.operand(each, number_of(inner)), 0
        return None

    def copied(self, each: Instruction) -> Value | None:
        """The value that an instruction copies, if it does nothing else."""
        if each.opcode in ("copy", "copy-start"):
            return self.operand(each, 0), 0
        if each.opcode == "fusion" and (called := self.called(each)):
            inner = self.result(called[0])
            seen = set()
            while inner.opcode in ("copy", "bitcast"):
                seen.add(inner.opcode)
                inner = self.operand(inner, 0)
            if inner.opcode == "parameter" and "copy" in seen:
                return self.operand(each, number_of(inner)), 0
        return None

    def origin(self, each: Instruction, index: int = 0) -> Value:
        """:meth:`maker`, of copies that of the original."""
        each, index = self.maker(each, index)
        while (copied := self.copied(each)) is not None:
            each, index = self.maker(*copied)
        return each, index

    def frames(self, each: Instruction) -> list[tuple[str, str, int]]:
        """Where it comes from: (file, function, line), the innermost first."""
        found = re.search(r"stack_frame_id=(\d+)", each.rest)
        if found is None:
            place = re.search(r'source_file="([^"]*)"(?: source_line=(\d+))?', each.rest)
            return [] if place is None else [(place.group(1), "", int(place.group(2) or 0))]
        files, functions, places, parents = self._tables
        # Some versions write 1 + parent, so that the outermost is its own.
        shift = int(any(number == parent for number, (_, parent) in parents.items()))
        frames: list[tuple[str, str, int]] = []
        number = int(found.group(1))
        while number in parents and len(frames) < 100:
            place_id, parent = parents[number]
            file, function, line = places[place_id]
            frames.append((files[file], functions[function], line))
            number = parent - shift
        return frames

    def user_line(self, each: Instruction) -> UserLine | None:
        """The innermost line that is neither JAX's nor jslices'."""
        library = None
        for file, _, line in self.frames(each):
            if file.startswith((_HERE, JAX_FOLDER)):
                continue
            if not file.startswith(_LIBRARIES):
                return UserLine(file, line)
            library = library or UserLine(file, line)
        return library

    def before(self, each: Instruction) -> set[str]:
        """What an instruction needs, directly or not, in its own computation."""
        inside = self.computations[each.where].instructions
        seen: set[str] = set()
        left = list(each.operands)
        while left:
            name = left.pop()
            if name not in seen and name in inside:
                seen.add(name)
                left.extend(inside[name].operands)
        return seen

    def users(self, values: Iterable[Instruction]) -> Iterator[Instruction]:
        """What reads or writes any of these values, behind tuples and new names."""
        names = {each.name for each in values}
        for each in values:
            inside = self.computations[each.where].instructions.values()
            for user in inside:
                if names & set(user.operands):
                    yield user
            return
