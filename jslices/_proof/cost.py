"""Cost of a compiled program, by its text and XLA's figures, without running it."""

import collections
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from jslices._proof.program import Array, Instruction, Layout, Module
from jslices._proof.wire import COLLECTIVES, Collective, Traffic, traffic

#: Instructions that move nothing, or are counted by what they run.
_FREE = {
    "add-dependency",
    "after-all",
    "bitcast",
    "call",
    "conditional",
    "constant",
    "get-tuple-element",
    "optimization-barrier",
    "parameter",
    "partition-id",
    "replica-id",
    "tuple",
    "while",
}
#: Other instructions on single numbers cost nothing.
_LAUNCHED = {"copy", "fusion"}
#: Each of their elements comes from one of every operand of the same shape.
_BY_ELEMENT = set(
    "abs add and compare convert divide exponential logistic maximum minimum multiply "
    "negate or power rsqrt select sign sqrt subtract tanh".split()
)
_READ_BY_ROWS = {"dynamic-slice", "gather", "slice"}
#: The position of the rows among the operands of instructions that write them in place.
_WRITTEN_BY_ROWS = {"dynamic-update-slice": 1, "scatter": 2}


class Cost(NamedTuple):
    """What a compiled program costs each device.

    The body of a loop (except in ``traffic``) and every branch of a conditional count once.
    """

    argument_bytes: int  #: the memory of the arguments, with what the layout pads.
    temp_bytes: int  #: the memory it needs besides arguments and results.
    copies: int  #: how many arrays as large as the largest argument are copied.
    accessed_bytes: int  #: what is read and written, see :func:`accessed`.
    #: The same by XLA's count, which GPUs lack. It counts a gather or scatter on
    #: the SparseCores of a TPU as reading and writing the whole table.
    xla_accessed_bytes: int | None
    kernels: dict[str, int]  #: how many instructions do something, by what they do.
    #: How many pieces of work the SparseCores of a TPU do, by kind: ``gather``,
    #: ``scatter``, or else what it consists of.
    offloads: dict[str, int]
    loops: list[str]  #: JAX's names of the loops.
    traffic: Traffic  #: the exchanges between devices, which ``kernels`` leaves out.
    #: XLA's estimate of the time, if it has one. Instructions that it cannot estimate,
    #: such as custom calls, take no time.
    seconds: float | None

    @property
    def collectives(self) -> tuple[Collective, ...]:
        return self.traffic.collectives


def cost_of(compiled: Any) -> Cost:
    """The cost of what ``jax.jit(f).lower(...).compile()`` returns."""
    module = Module(compiled.as_text())
    memory = compiled.memory_analysis()
    figures = compiled.cost_analysis() or {}
    return Cost(
        memory.argument_size_in_bytes,
        memory.temp_size_in_bytes,
        table_copies(module),
        accessed(module),
        int(figures.get("bytes accessed", 0)) or None,
        kernels(module),
        offloads(module),
        [each.op_name or each.name for each in module.run() if each.opcode == "while"],
        traffic(module),
        _seconds(figures),
    )


def _seconds(figures: dict[str, float]) -> float | None:
    if "optimal_seconds" not in figures:
        return None
    # A sum with -1 for every instruction of unknown time.
    total = figures["optimal_seconds"]
    return total + max(math.ceil(-total), 0)


def table_copies(module: Module) -> int:
    """How many arrays with as many elements as the largest argument are copied."""
    sizes = [math.prod(each.arrays[0].dims) for each in module.parameters().values()]
    largest = max(sizes, default=0)
    copies = (each for each in module.run() if module.copied(each) is not None)
    return sum(math.prod(each.arrays[0].dims) >= largest > 1 for each in copies)


def kernels(module: Module) -> dict[str, int]:
    """How many instructions do something, by opcode, the most frequent first."""
    counts = collections.Counter(each.opcode for each in _working(module))
    return dict(counts.most_common())


def _working(module: Module) -> Iterator[Instruction]:
    for each in module.run():
        if each.opcode in _FREE or each.opcode.endswith("-done") or each.joins_pieces:
            continue
        if each.opcode.removesuffix("-start") in COLLECTIVES:
            continue
        if each.opcode in _LAUNCHED or any(array.dims for array in each.arrays):
            yield each


def offloads(module: Module) -> dict[str, int]:
    """How many pieces of work XLA sends to SparseCores, by opcode, the most frequent first.

    A piece that contains others is one.
    """
    starts = [each for each in module.run() if _SPARSE_CORE in each.rest]
    inside = {each.name: _all_inside(module, each) for each in starts}
    nested = {name for names in inside.values() for name in names}
    counts = collections.Counter(
        _work(module, inside[each.name]) for each in starts if each.where not in nested
    )
    return dict(counts.most_common())


_SPARSE_CORE = 'async_execution_thread="sparsecore"'
_KINDS = ("scatter", "gather", "copy")  # a scatter may gather what it writes


def _all_inside(module: Module, each: Instruction) -> set[str]:
    """The computations that an instruction runs, and those that these run, by name."""
    names, left = set[str](), module.called(each)
    while left:
        name = left.pop()
        if name not in names:
            names.add(name)
            for inner in module.computations[name].instructions.values():
                left.extend(module.called(inner))
    return names


def _work(module: Module, names: set[str]) -> str:
    opcodes = {
        each.opcode
        for name in names
        for each in module.computations[name].instructions.values()
    }
    return next((kind for kind in _KINDS if kind in opcodes), "other")


# --- bytes -------------------------------------------------------------------------


def accessed(module: Module) -> int:
    """Bytes that are read and written; of an array used by rows, those of the rows.

    On TPUs with the padding of layouts.
    """
    return sum(_bytes(module, each) for each in _working(module))


def _bytes(module: Module, each: Instruction) -> int:
    if each.opcode.endswith("-start") and (done := module.done(each)) is not None:
        return 2 * _size(done)
    operands = [module.operand(each, n) for n in range(len(each.operands))]
    called = module.called(each)
    if each.opcode == "fusion" and called:
        read = sum(_read(module, x) for x in module.parameters(called[0]).values())
        results = [maker for maker, _ in module.elements(called[0])]
        return read + sum(_written(module, x) for x in results)
    if each.opcode in _READ_BY_ROWS:
        return 2 * _size(each) + sum(map(_size, operands[1:2]))
    if each.opcode in _WRITTEN_BY_ROWS:
        return 3 * _size(operands[_WRITTEN_BY_ROWS[each.opcode]]) + _size(operands[1])
    return _size(each) + sum(map(_size, operands))


def _read(module: Module, value: Instruction) -> int:
    """What a fusion reads of a value; of what it makes of it by element, what it uses."""
    size, total, values, made = _size(value), 0, [value], set[str]()
    for x in values:
        for user in module.users([x]):
            first = user.operands[0] == x.name
            alike = user.opcode in _BY_ELEMENT and user.arrays[0].dims == x.arrays[0].dims
            if alike or user.opcode == "bitcast":
                values += [user] if user not in values else []
                made |= {user.name} if alike or x.name in made else set()
            elif first and user.opcode in _READ_BY_ROWS:
                total += _size(user) * size // (_size(x) or 1)
            elif first and user.opcode in _WRITTEN_BY_ROWS and x.name not in made:
                total += _rows_written(module, user)
            elif user.opcode == "fusion" and x.name not in made:  # one inside another
                total += sum(_read(module, x) for x in module.inside(user, [x]))
            else:
                return size
    return size if module.computations[value.where].root in made else min(total, size)


def _written(module: Module, result: Instruction) -> int:
    while result.opcode == "bitcast":
        result = module.operand(result, 0)
    if result.opcode in _WRITTEN_BY_ROWS:
        return _rows_written(module, result)
    if result.opcode == "fusion" and len(result.arrays) == 1:
        (inner,) = module.elements(module.called(result)[0])
        return _written(module, inner[0])
    return _size(result)


def _rows_written(module: Module, write: Instruction) -> int:
    return _size(module.operand(write, _WRITTEN_BY_ROWS[write.opcode]))


def _size(each: Instruction) -> int:
    return sum(map(_padded, each.arrays, each.layouts))


def _padded(array: Array, layout: Layout) -> int:
    sides = list(array.dims)
    for axis, side in zip(layout.order, reversed(layout.tile), strict=False):
        sides[axis] += -sides[axis] % side
    return array._replace(dims=tuple(sides)).nbytes
