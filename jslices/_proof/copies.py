"""Which donated arrays are copied inside of a program, and why."""

from collections.abc import Iterator
from typing import Any

from jslices._densify import UserLine
from jslices._proof.hlo import Module, Value
from jslices._proof.program import Leaf, Program
from jslices._proof.text import Instruction, number_of

#: Operations that only hand values on.
_SILENT = {"bitcast", "copy", "copy-start", "copy-done", "tuple", "get-tuple-element"}
_BODIES = {"while": "loop", "conditional": "conditional", "call": "function"}


def copied(program: Program, leaves: list[Leaf], crossed: list[Leaf]) -> list[str]:
    """A sentence or more for each of ``leaves`` that is copied.

    Of ``crossed`` ones only if the cause is in sight.
    """
    module = program.module
    parameters = module.parameters()
    by_parameter = {leaf.parameter: leaf for leaf in leaves}
    # What is made in the memory of a result is made in that of the argument under it.
    owners = {
        (parameters[leaf.parameter].name, 0): leaf
        for leaf in leaves
        if leaf.parameter is not None
    }
    outputs = module.outputs()
    for number, parameter in module.aliases.items():
        if parameter in by_parameter:
            maker = module.maker(*outputs[number])
            if module.copied(maker[0]) is None:
                owners.setdefault((maker[0].name, maker[1]), by_parameter[parameter])
    found: dict[Leaf, list[Instruction]] = {}
    for each in module.run():
        if module.copied(each) is None:
            continue
        origin, index = module.origin(each)
        # Of others nothing is to be said here, nor of parts of a donated array.
        leaf = owners.get((origin.name, index))
        if leaf is not None and each.arrays[0] == origin.arrays[index]:
            found.setdefault(leaf, []).append(each)
    return [
        f"{leaf} is copied{_times(each)}: " + "; and ".join(reasons)
        for leaf, each in found.items()
        if (reasons := _reasons(program, leaf, each, leaf not in crossed))
    ]


def _times(copies: list[Instruction]) -> str:
    return "" if len(copies) == 1 else f", {len(copies)} times"


def _reasons(
    program: Program, leaf: Leaf, copies: list[Instruction], guess: bool
) -> list[str]:
    module = program.module
    reasons = _returned(program, leaf)
    targets = {
        module.maker(*value)[0].name
        for number, value in enumerate(module.outputs())
        if module.aliases.get(number) == leaf.parameter
    }
    for copy in copies:
        reasons = reasons or list(dict.fromkeys(_reads(module, copy, targets)))
    if guess and not reasons:
        reasons = list(dict.fromkeys(_elsewhere(module, copy) for copy in copies))
    return reasons


def _returned(program: Program, leaf: Leaf) -> list[str]:
    """The results that are the old value itself."""
    module = program.module
    for number, value in enumerate(module.outputs()):
        each, index = value
        while (step := _same(module, each, index)) is not None:
            each, index = step
        if module.aliases.get(number) == leaf.parameter or each.where != module.entry:
            continue
        if each.opcode == "parameter" and each.name == program.name_of(leaf):
            return [
                f"its old value is returned as well, as {program.outputs[number].path}. "
                "Return only the new one, or keep a copy of what you need of it (some "
                "rows, a norm)"
            ]
    return []


def _same(module: Module, each: Instruction, index: int) -> Value | None:
    """The value that this one equals, one step back."""
    if (copied := module.copied(each)) is not None:
        return copied
    if each.opcode in ("bitcast", "copy-done", "tuple", "get-tuple-element"):
        return module.into(each, index)
    return None


def _reads(module: Module, copy: Instruction, targets: set[str]) -> Iterator[str]:
    """Uses of the old value that do not have to come before it is overwritten.

    ``targets`` are names of what makes the new value, if it is not written row by row.
    """
    old = _equals(module, copy)
    users = [
        user
        for user in module.users(old)
        if user.opcode not in _SILENT and module.copied(user) is None
    ]
    writers = [user for user in users if _overwrites(module, user, old)]
    writers = writers or [user for user in users if user.name in targets]
    before: set[str] = set().union(*(module.before(user) for user in writers))
    late = [user for user in users if user not in writers and user.name not in before]
    if writers and late:
        reader = _inside(module, late[0], old)
        yield (
            f"its old value is still read {_place(module, reader)} after it is "
            f"overwritten, or may be. {_instead(reader)}"
        )
    elif len(writers) > 1:
        yield (
            f"it is updated twice from the same old value, {_place(module, writers[0])} "
            f"and {_place(module, writers[1])}. Update the result of the first"
        )


def _inside(module: Module, user: Instruction, old: list[Instruction]) -> Instruction:
    """Of a fusion the part that uses one of the values."""
    if user.opcode != "fusion" or not (called := module.called(user)):
        return user
    names = {each.name for each in old}
    wanted = {n for n, name in enumerate(user.operands) if name in names}
    inside = module.computations[called[0]].instructions.values()
    parameters = [x for x in inside if x.opcode == "parameter" and number_of(x) in wanted]
    parts = [x for p in parameters for x in module.users([p]) if module.user_line(x)]
    return (parts or [user])[0]


def _instead(reader: Instruction) -> str:
    if "select_n" in reader.op_name:
        return "Choose between old and new by jax.lax.cond around the update, or by rows"
    return (
        "Read what you need of it before the update, and let the update depend on that "
        "(jax.lax.optimization_barrier), or read the new value"
    )


def _equals(module: Module, copy: Instruction) -> list[Instruction]:
    """All that has the value that ``copy`` copies, in its computation."""
    inside = module.computations[copy.where].instructions.values()

    def start(each: Instruction) -> tuple[str, int]:
        index = 0
        while (step := _same(module, each, index)) is not None:
            if step[0].where != copy.where:
                break
            each, index = step
        return each.name, index

    value = start(copy)
    return [x for x in inside if x.opcode != "tuple" and x.arrays and start(x) == value]


def _overwrites(module: Module, user: Instruction, old: list[Instruction]) -> bool:
    names = {each.name for each in old}
    for index in range(len(user.arrays)):
        step = module.into(user, index)
        while step is not None and step[0].opcode in _SILENT and step[0].name not in names:
            step = module.into(*step)
        if step is not None and step[0].name in names and not _kept(module, user, index):
            return True
    return False


def _kept(module: Module, user: Instruction, index: int) -> bool:
    """Whether a loop returns an element as it got it."""
    if user.opcode != "while":
        return False
    each, at = module.elements(module.called(user)[0])[index]
    while each.opcode in ("get-tuple-element", "bitcast"):
        step: Any = module.into(each, at)
        if step[0].opcode == "parameter" or step[0].where != each.where:
            return True
        each, at = step
    return each.opcode == "parameter"


def _elsewhere(module: Module, copy: Instruction) -> str:
    """What can be said of a copy whose cause is not in sight."""
    around = [x for x in module.users([copy]) if x.opcode in _BODIES]
    around += [
        user
        for each in module.users([copy])
        if each.opcode == "tuple"
        for user in module.users([each])
        if user.opcode in _BODIES
    ]
    inside = module.caller(copy.where)
    if around or inside is not None:
        outer = around[0] if around else inside
        assert outer is not None
        return (
            f"the {_BODIES.get(outer.opcode, outer.opcode)} {_place(module, outer)} keeps "
            "its old value beside the new one. Let each turn or branch read rows of it "
            "before it writes them, write with .at[rows].set or .add, and choose rows "
            "instead of whole arrays"
        )
    return (
        f"why is not to be seen in the program; it happens {_place(module, copy)}. Look "
        "for uses of the old value beside the update"
    )


def _place(module: Module, each: Instruction) -> str:
    line: UserLine | None = module.user_line(each)
    what = each.op_name or each.name
    return f"by {what}" if line is None else f"by {what} at {line}"
