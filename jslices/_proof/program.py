"""A compiled training step: its text, the memory of its values, the user's arrays.

From top to bottom: the text that XLA prints (:func:`read`), where its values lie
(:class:`Module`), and the step with the names of its arguments (:func:`compiled`).

XLA gives every value of a program memory of its own, except for the results of a few
operations that write into the memory of an operand (a scatter) or only rename it (a tuple).
So for each value there is one instruction that made its memory: :meth:`Module.maker`.
"""

import contextlib
import itertools
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from jslices import _densify
from jslices._proof.targets import target
from jslices.optim.transforms.compiled import Step

# --- the text ----------------------------------------------------------------------


class Array(NamedTuple):
    """The type of an array."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        bits = re.search(r"\d+", self.dtype)
        size = 8 if bits is None else int(bits.group())  # a pred takes a byte
        return size * math.prod(self.dims) // 8

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


class Layout(NamedTuple):
    """How an array lies in memory."""

    #: Its axes, the one along which neighbours lie first: ``(1, 0)`` is row by row.
    order: tuple[int, ...]
    #: On TPUs the sides are padded to multiples of it; the last number is for the first
    #: axis of ``order``.
    tile: tuple[int, ...]
    space: int  #: which memory; 0 is the large one, and on TPUs 1 a fast one on the chip.

    def __str__(self) -> str:
        return f"{{{','.join(map(str, self.order))}}}"


class Instruction(NamedTuple):
    """One line of a program; ``arrays`` has several elements if it makes a tuple."""

    name: str
    arrays: tuple[Array, ...]
    opcode: str
    operands: tuple[str, ...]
    rest: str  #: the operands and everything after them
    where: str  #: its computation
    layouts: tuple[Layout, ...]

    @property
    def op_name(self) -> str:
        """JAX's name for it: ``jit(step)/transpose(jvp())/scatter-add``."""
        name = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.rest)
        return "" if name is None else name.group(1).replace("\\'", "'")

    @property
    def joins_pieces(self) -> bool:
        """True if it only declares that pieces copied before are one array."""
        return self.opcode == "custom-call" and '"ConcatBitcast"' in self.rest


class Computation(NamedTuple):
    """Instructions by name; ``root`` names the one that is the result."""

    instructions: dict[str, Instruction]
    root: str


def read(text: str) -> tuple[dict[str, Computation], str]:
    """The computations of ``compiled.as_text()`` by name, and the name of the entry.

    That is empty if the text is not a compiled program.
    """
    computations: dict[str, Computation] = {}
    inside: dict[str, Instruction] = {}
    name = root = entry = ""
    for line in text.splitlines():
        start = re.match(r"(ENTRY )?%?([\w.-]+) \(.*\{$", line)
        if start and not line.startswith("HloModule"):
            name, inside, root = start.group(2), {}, ""
            entry = name if start.group(1) else entry
        elif line.startswith("}") and name:
            computations[name] = Computation(_joined(inside), root)
            name = ""
        elif name and (each := _instruction(line, name)) is not None:
            inside[each.name] = each
            root = each.name if "ROOT " in line[:8] or not root else root
    return computations, entry


def _instruction(line: str, where: str) -> Instruction | None:
    match = re.match(r"\s+(?:ROOT )?%?([\w.-]+) = (.*)$", line)
    if match is None:
        return None
    name, rest = match.groups()
    end = _closing(rest) + 1 if rest.startswith("(") else rest.index(" ")
    shapes = _SHAPE.findall(rest[:end])
    arrays = tuple(Array(dtype, _numbers(dims)) for dtype, dims, _, _ in shapes)
    layouts = tuple(_layout(order, more) for _, _, order, more in shapes)
    opcode, _, rest = rest[end:].strip().partition("(")
    operands = tuple(re.findall(r"%([\w.-]+)", rest[: _closing("(" + rest) - 1]))
    return Instruction(name, arrays, opcode, operands, rest, where, layouts)


#: ``f32[1000,64]{1,0:T(8,128)S(1)}``: dtype, sides, order of the axes, tile and space.
_SHAPE = re.compile(r"(\w+)\[([\d,<=]*)\](?:\{([\d,]*)(?::([^}]*))?\})?")


def _layout(order: str, more: str) -> Layout:
    tile = re.match(r"T\(([\d,]+)\)", more)
    space = re.search(r"S\((\d+)\)", more)
    return Layout(
        _numbers(order),
        () if tile is None else _numbers(tile.group(1)),
        0 if space is None else int(space.group(1)),
    )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number.strip("<=")) for number in text.split(",") if number)


def _joined(inside: dict[str, Instruction]) -> dict[str, Instruction]:
    """Each asynchronous call as one call, at the place where it is done."""
    joined = {}
    for each in inside.values():
        kind, _, part = each.opcode.rpartition("-")
        if kind not in ("async", "call", "custom-call", "fusion"):
            joined[each.name] = each
        elif part == "done":
            start = inside[each.operands[0]]
            operands: tuple[str, ...] = ()
            while start.opcode == f"{kind}-update":  # has the operands that the start lacks
                operands = start.operands[1:] or operands
                start = inside[start.operands[0]]
            calls = kind == "async" or "called_computations=" in start.rest
            joined[each.name] = each._replace(
                opcode="call" if calls else kind,
                operands=start.operands or operands,
                rest=f"{start.rest} {each.rest}",
            )
    return joined


def _closing(text: str) -> int:
    """The position of the parenthesis that closes the one ``text`` begins with."""
    depth = 0
    for parenthesis in re.finditer(r"[()]", text):
        depth += 1 if parenthesis.group() == "(" else -1
        if not depth:
            return parenthesis.start()
    return len(text)


def number_of(parameter: Instruction) -> int:
    """The position of a parameter in its computation."""
    return int(parameter.rest.split(")", 1)[0])


def _source_table(text: str, name: str) -> dict[int, Any]:
    """One of the tables before a program: names, or the numbers in each entry."""
    table = re.search(rf"^{name}\n(.*?)\n\n", text, re.M | re.S)
    entries = re.findall(r"^(\d+) (.*)$", table.group(1), re.M) if table else []
    return {
        int(n): x[1:-1] if x[0] == '"' else [int(y) for y in re.findall(r"=(\d+)", x)]
        for n, x in entries
    }


# --- the memory of values ----------------------------------------------------------

_RENAMES = {"bitcast", "copy-done", "optimization-barrier", "add-dependency"}
_WRITES = {"scatter", "dynamic-update-slice"}
_CALLED = re.compile(
    r"(?:calls|called_computations|to_apply|body|true_computation|false_computation|"
    r"branch_computations)=(\{[^}]*\}|%[\w.-]+)"
)


#: One of the arrays that an instruction makes.
Value = tuple[Instruction, int]


class Module:
    """A compiled program, and the memory of each of its values."""

    def __init__(self, text: str) -> None:
        head = text.split("\n", 1)[0]
        pairs = re.findall(r"\{(\d*)\}: \((\d+), \{\}", head)
        #: For each output in the memory of a parameter, that parameter, as jit declares it.
        self.aliases = {int(out or 0): int(parameter) for out, parameter in pairs}
        counts = re.findall(r"(?:num_partitions|replica_count)=(\d+)", head)
        self.devices = math.prod(map(int, counts))  #: how many run it together.
        #: All computations by name, and the name of the one that is run.
        self.computations, self.entry = read(text)
        names = "FileNames", "FunctionNames", "FileLocations", "StackFrames"
        self._source_tables = [_source_table(text, name) for name in names]
        if not self.entry:
            raise NotImplementedError("this backend's compiled program cannot be read")
        self._callers: dict[str, tuple[Instruction, int]] = {}
        self._fused: set[str] = set()
        for computation in self.computations.values():
            for each in computation.instructions.values():
                called = self.called(each)
                for number, name in enumerate(called):
                    self._callers.setdefault(name, (each, number))
                if each.opcode not in ("while", "call", "conditional"):
                    self._fused.update(called)

    def called(self, each: Instruction) -> list[str]:
        """The computations that an instruction runs, except the condition of a loop."""
        return [
            name
            for group in _CALLED.findall(each.rest)
            for name in re.findall(r"%([\w.-]+)", group)
            if name in self.computations
        ]

    def caller(self, computation: str) -> Instruction | None:
        """The instruction that runs a computation; None for the entry and conditions."""
        return self._callers.get(computation, (None, 0))[0]

    def operand(self, each: Instruction, number: int) -> Instruction:
        return self.computations[each.where].instructions[each.operands[number]]

    def result(self, computation: str) -> Instruction:
        instructions, root = self.computations[computation]
        return instructions[root]

    def parameters(self, computation: str | None = None) -> dict[int, Instruction]:
        """The parameters of a computation, or of the program, by number."""
        name = self.entry if computation is None else computation
        return {
            number_of(each): each
            for each in self.computations[name].instructions.values()
            if each.opcode == "parameter"
        }

    def inside(
        self, fusion: Instruction, values: Iterable[Instruction]
    ) -> list[Instruction]:
        """The parameters of a fusion that have some of its operands as values."""
        names = {each.name for each in values}
        parameters = self.parameters(self.called(fusion)[0])
        return [x for n, x in parameters.items() if fusion.operands[n] in names]

    def done(self, start: Instruction) -> Instruction | None:
        """The end of an operation that begins at ``start``, if in its computation."""
        opcode = start.opcode.removesuffix("start") + "done"
        return next((x for x in self.users([start]) if x.opcode == opcode), None)

    def outputs(self) -> list[Value]:
        """The outputs of the program, in order."""
        return self.elements(self.entry)

    def elements(self, computation: str) -> list[Value]:
        """The arrays that a computation returns."""
        root = self.result(computation)
        makers = [root]
        if root.opcode == "tuple":
            makers = [self.operand(root, n) for n in range(len(root.operands))]
        # An element of a tuple may be a tuple, in the fusions of a GPU.
        return [(each, n) for each in makers for n in range(len(each.arrays))]

    def run(self) -> Iterator[Instruction]:
        """All instructions that are not part of a fusion."""
        for name, computation in self.computations.items():
            if name not in self._fused:
                yield from computation.instructions.values()

    def maker(self, each: Instruction, index: int = 0) -> Value:
        """The instruction that made the memory in which a value lies."""
        step = self.into(each, index)
        while step is not None:
            (each, index), step = step, self.into(*step)
        return each, index

    def into(self, each: Instruction, index: int) -> Value | None:
        """The value whose memory this one shares; None if it has memory of its own."""
        op = each.opcode
        if op in _RENAMES or op == "while":
            return self.operand(each, 0), index
        if op == "get-tuple-element":
            at = re.search(r"index=(\d+)", each.rest)
            return self.operand(each, 0), 0 if at is None else int(at.group(1))
        if op == "tuple" or op in _WRITES:
            return self.operand(each, index), 0
        if op == "parameter" and each.where in self._callers:
            caller, number = self._callers[each.where]
            if caller.opcode == "while":
                return self.operand(caller, 0), index
            first = 1 + number if caller.opcode == "conditional" else number_of(each)
            return self.operand(caller, first), index
        if op in ("call", "conditional"):
            ways = [self.maker(self.result(name), index) for name in self.called(each)]
            made = [x for x in ways if x[0].opcode != "parameter"]
            own = [x for x in made if x[0].where != each.where]
            return (own or ways)[0]
        return self._through_fusion(each, index, _RENAMES, _WRITES)

    def _through_fusion(
        self, each: Instruction, index: int, silent: set[str], needed: set[str]
    ) -> Value | None:
        """The operand that some operations, among them a needed one, make an element of."""
        called = self.called(each) if each.opcode == "fusion" else ()
        if not called:
            return None
        inner, _ = self.elements(called[0])[index]
        opcodes = set()
        while inner.opcode in silent | needed:
            opcodes.add(inner.opcode)
            inner = self.operand(inner, 0)
        if inner.opcode == "parameter" and opcodes & needed:
            return self.operand(each, number_of(inner)), 0
        return None

    def copied(self, each: Instruction) -> Value | None:
        """The value that an instruction copies; None if it does anything else."""
        if each.opcode in ("copy", "copy-start"):
            return self.operand(each, 0), 0
        if each.joins_pieces:
            piece = self.operand(each, 0)
            if piece.opcode == "slice-done":
                piece = self.operand(piece, 0)
                whole = self.operand(piece, 0)
                if whole.arrays[0] == each.arrays[0]:
                    return whole, 0
        if len(each.arrays) == 1:
            return self._through_fusion(each, 0, {"bitcast"}, {"copy"})
        return None

    def origin(self, each: Instruction, index: int = 0) -> Value:
        """Like :meth:`maker`, but looks through copies."""
        each, index = self.maker(each, index)
        while (copied := self.copied(each)) is not None:
            each, index = self.maker(*copied)
        return each, index

    def frames(self, each: Instruction) -> list[tuple[str, str, int]]:
        """The stack that made it: (file, function, line), innermost first."""
        frame = re.search(r"stack_frame_id=(\d+)", each.rest)
        if frame is None:
            place = re.search(r'source_file="([^"]*)"(?: source_line=(\d+))?', each.rest)
            return [] if place is None else [(place.group(1), "", int(place.group(2) or 0))]
        files, functions, places, parents = self._source_tables
        # Some releases of XLA write 1 + parent, so the outermost frame is its own parent.
        shift = int(any(number == parent for number, (_, parent) in parents.items()))
        frames: list[tuple[str, str, int]] = []
        number = int(frame.group(1))
        while number in parents and len(frames) < 100:
            place_id, parent = parents[number]
            file, function, line = places[place_id][:3]
            frames.append((files[file], functions[function], line))
            number = parent - shift
        return frames

    def user_line(self, each: Instruction) -> _densify.UserLine | None:
        """The innermost line outside JAX and jslices."""
        frames = self.frames(each)
        line = _densify.pick_user_line((file, line) for file, _, line in frames)
        return None if line is _densify.UNKNOWN_LINE else line

    def before(self, each: Instruction) -> set[str]:
        """The names of all that an instruction depends on within its computation."""
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
        """Instructions that have one of these values of one computation as an operand."""
        values = list(values)
        names = {each.name for each in values}
        if values:
            for user in self.computations[values[0].where].instructions.values():
                if names & set(user.operands):
                    yield user


# --- the step ----------------------------------------------------------------------


class Leaf(NamedTuple):
    """An array among the arguments or the results."""

    path: str  #: ``args[0]['table']``
    shape: tuple[int, ...]
    dtype: Any
    donated: bool = False
    parameter: int | None = None  #: its number in the program; None if jit dropped it

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * int(self.dtype.itemsize)

    def __str__(self) -> str:
        kind = f"{self.dtype}[{','.join(map(str, self.shape))}]"
        return f"{self.path} {kind} ({_densify.human_bytes(self.nbytes)})"


class Memory(NamedTuple):
    """The bytes that a compiled step takes on each device; ``print`` it.

    Attributes:
      argument_bytes: the arguments.
      output_bytes: the results.
      alias_bytes: the results that share the memory of donated arguments.
      temp_bytes: everything else that it needs while it runs.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int

    def __str__(self) -> str:
        arguments, outputs, in_place, temporaries = map(_densify.human_bytes, self)
        return (
            f"arguments {arguments}, outputs {outputs}, of these in place {in_place}, "
            f"temporaries {temporaries}"
        )


class Program(NamedTuple):
    """A compiled step."""

    name: str
    jaxpr: Any
    module: Module
    leaves: list[Leaf]
    outputs: list[Leaf]
    memory: Memory
    densified: list[str]  #: the DensificationWarnings of its tracing

    def name_of(self, leaf: Leaf) -> str:
        """The name of an argument's instruction; empty if jit dropped it."""
        parameters = self.module.parameters()
        return "" if leaf.parameter is None else parameters[leaf.parameter].name


def compiled(
    step: Callable[..., Any],
    args: Sequence[Any],
    donate_argnums: int | Sequence[int],
    device: str | None = None,
) -> Program:
    """Compiles a step for ``args``, on a named device if one is given, and runs nothing."""
    there = None if device is None else target(device)
    args = args if there is None else there.place(tuple(args))
    name = getattr(step, "__name__", "the step")
    jitted: Any = step
    donates = isinstance(donate_argnums, int) or bool(tuple(donate_argnums))
    if not callable(getattr(step, "trace", None)) or (donates and isinstance(step, Step)):
        jitted = jax.jit(step, donate_argnums=donate_argnums)
    elif donates:
        raise ValueError(
            f"{name} is jitted already, and donates what its own jax.jit says; leave out "
            f"donate_argnums={donate_argnums} here, or pass the function that is not jitted"
        )
    with contextlib.ExitStack() as here, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if there is not None:
            here.enter_context(jax.default_device(there.devices[0]))
        traced = jitted.trace(*args)
        lowered = traced.lower()
        executable = lowered.compile()
    densified = []
    for warning in caught:
        if issubclass(warning.category, _densify.DensificationWarning):
            densified.append(str(warning.message))
        # The proofs themselves say that donation did not work, with the reason.
        elif "donated buffers were not usable" not in str(warning.message):
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )
    module, sizes = Module(executable.as_text()), executable.memory_analysis()
    kinds = "argument", "output", "alias", "temp"
    memory = Memory(*(getattr(sizes, f"{kind}_size_in_bytes") for kind in kinds))
    leaves = _leaves(lowered.args_info, executable.input_formats)
    outputs = [
        Leaf(f"result{jax.tree_util.keystr(path)}", x.shape, x.dtype)
        for path, x in jax.tree_util.tree_leaves_with_path(traced.out_info)
    ]
    return Program(name, traced.jaxpr, module, leaves, outputs, memory, densified)


def _leaves(args_info: Any, formats: Any) -> list[Leaf]:
    infos = jax.tree_util.tree_leaves_with_path(args_info)
    is_format = lambda x: hasattr(x, "layout")  # noqa: E731
    forms = jax.tree.leaves(formats, is_leaf=is_format)
    leaves, numbers = [], itertools.count()
    for (path, info), form in zip(infos, forms, strict=True):
        number = None if form.layout is None else next(numbers)  # unused: not passed on
        name = ("args" if path[0].idx == 0 else "kwargs") + jax.tree_util.keystr(path[1:])
        leaves.append(Leaf(name, info.shape, info.dtype, info.donated, number))
    return leaves
