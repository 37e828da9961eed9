"""The text of a compiled program, as XLA prints it."""

import re
from typing import NamedTuple


class Array(NamedTuple):
    """The type of an array."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        bits = re.search(r"\d+", self.dtype)
        size = 8 if bits is None else int(bits.group())  # pred has a byte
        for dim in self.dims:
            size *= dim
        return size // 8

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


class Instruction(NamedTuple):
    """One line of a program; ``arrays`` has more than one of them if it makes a tuple."""

    name: str
    arrays: tuple[Array, ...]
    opcode: str
    operands: tuple[str, ...]
    rest: str  #: the operands and all that follows
    where: str  #: the computation it stands in

    @property
    def op_name(self) -> str:
        """What JAX calls it: ``jit(step)/transpose(jvp())/scatter-add``."""
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.rest)
        return "" if found is None else found.group(1).replace("\\'", "'")


class Computation(NamedTuple):
    """Instructions, of which the last, or the one marked so, is the result."""

    name: str
    instructions: dict[str, Instruction]
    root: str


class Text(NamedTuple):
    """What the text holds.

    Attributes:
      computations: all of them by name.
      entry: the one that is run; empty if the text is of another kind.
      aliases: which output lies in the memory of which parameter, as jit has declared it.
      tables: of source lines, see :func:`_tables`.
    """

    computations: dict[str, Computation]
    entry: str
    aliases: dict[int, int]
    tables: "Tables"


#: Files; functions; places (file, function, line); frames (place, parent): all by number.
Tables = tuple[
    dict[int, str],
    dict[int, str],
    dict[int, tuple[int, int, int]],
    dict[int, tuple[int, int]],
]


def read(text: str) -> Text:
    """Reads what ``compiled.as_text()`` gives."""
    aliases = {
        int(out or 0): int(parameter)
        for out, parameter in re.findall(
            r"\{(\d*)\}: \((\d+), \{\}", text.split("\n", 1)[0]
        )
    }
    computations: dict[str, Computation] = {}
    inside: dict[str, Instruction] = {}
    name = root = entry = ""
    for line in text.splitlines():
        start = re.match(r"(ENTRY )?%?([\w.-]+) \(.*\{$", line)
        if start and not line.startswith("HloModule"):
            name, inside, root = start.group(2), {}, ""
            entry = name if start.group(1) else entry
        elif line.startswith("}") and name:
            computations[name] = Computation(name, inside, root)
            name = ""
        elif name and (each := _instruction(line, name)) is not None:
            inside[each.name] = each
            root = each.name if "ROOT " in line[:8] or not root else root
    return Text(computations, entry, aliases, _tables(text))


def _instruction(line: str, where: str) -> Instruction | None:
    found = re.match(r"\s+(?:ROOT )?%?([\w.-]+) = (.*)$", line)
    if found is None:
        return None
    name, rest = found.groups()
    end = _closing(rest) + 1 if rest.startswith("(") else rest.index(" ")
    arrays = tuple(
        Array(dtype, tuple(int(dim.strip("<=")) for dim in dims.split(",") if dim))
        for dtype, dims in re.findall(r"(\w+)\[([\d,<=]*)\]", rest[:end])
    )
    opcode, _, rest = rest[end:].strip().partition("(")
    operands = tuple(re.findall(r"%([\w.-]+)", rest[: _closing("(" + rest) - 1]))
    return Instruction(name, arrays, opcode, operands, rest, where)


def _closing(text: str) -> int:
    """Where the parenthesis closes that ``text`` begins with."""
    depth = 0
    for found in re.finditer(r"[()]", text):
        depth += 1 if found.group() == "(" else -1
        if not depth:
            return found.start()
    return len(text)


def number_of(parameter: Instruction) -> int:
    """Which parameter of its computation it is."""
    return int(parameter.rest.split(")", 1)[0])


def _tables(text: str) -> Tables:
    def part(name: str) -> str:
        found = re.search(rf"^{name}\n(.*?)\n\n", text, re.M | re.S)
        return "" if found is None else found.group(1)

    def names(name: str) -> dict[int, str]:
        return {int(n): s for n, s in re.findall(r'^(\d+) "(.*)"$', part(name), re.M)}

    places = {
        int(n): (int(file), int(function), int(line))
        for n, file, function, line in re.findall(
            r"^(\d+) \{file_name_id=(\d+) function_name_id=(\d+) line=(\d+)",
            part("FileLocations"),
            re.M,
        )
    }
    parents = {
        int(n): (int(place), int(parent))
        for n, place, parent in re.findall(
            r"^(\d+) \{file_location_id=(\d+) parent_frame_id=(\d+)",
            part("StackFrames"),
            re.M,
        )
    }
    return names("FileNames"), names("FunctionNames"), places, parents
