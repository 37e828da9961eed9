"""Donated arrays that are not updated in place: causes and remedies."""

from collections.abc import Collection, Iterable, Iterator
from typing import Any

from jslices._densify import human_bytes
from jslices._proof.program import Instruction, Layout, Leaf, Module, Program, Value

#: Operations that only pass values on.
_SILENT = {"bitcast", "copy", "copy-start", "copy-done", "tuple", "get-tuple-element"}
_FAST = (
    "XLA moves it into fast memory on the chip and back, as it fits there. If that is "
    "meant, leave it out: a higher min_bytes"
)
_BODIES = {"while": "loop", "conditional": "conditional", "call": "function"}


def problems(program: Program, min_bytes: int, heights: Collection[int] = ()) -> list[str]:
    """A sentence for each array of ``min_bytes`` or more that is not updated in place.

    Donated ones whose first axis has one of the ``heights`` count if they are smaller, but
    XLA may move them into fast memory.
    """

    def counts(leaf: Leaf) -> bool:
        is_of_table = leaf.donated and len(leaf.shape) > 0 and leaf.shape[0] in heights
        return is_of_table or leaf.nbytes >= min_bytes

    large = [leaf for leaf in program.leaves if counts(leaf)]
    donated = [leaf for leaf in large if leaf.donated]
    missing = _missing(program, donated)
    sentences = [_not_aliased(program, leaf) for leaf in missing]
    sentences += _not_donated(program, [leaf for leaf in large if not leaf.donated])
    if not donated and not sentences:
        sentences.append(
            f"no array of at least {human_bytes(min_bytes)} is donated, so none can be "
            "updated in place. Donate parameters and state, jax.jit(step, "
            "donate_argnums=(0, 1)), or lower min_bytes"
        )
    aliased = program.module.aliases.values()
    rest = [x for x in donated if x not in missing and x.parameter in aliased]
    # If a result is missing, jit pairs the others crosswise, which makes copies.
    crossed = [x for x in rest if any(_alike(x, y) for y in missing)]
    return sentences + copied(program, rest, crossed, min_bytes)


def _missing(program: Program, donated: list[Leaf]) -> list[Leaf]:
    """Donated arrays that no result is written into.

    jit pairs arrays and results of equal shape and dtype in order, so the array left over
    need not be the one that the step does not return.
    """
    module = program.module
    written = {module.origin(*value)[0].name for value in module.outputs()}
    over: list[Leaf] = []
    for leaf in donated:
        if leaf.parameter in module.aliases.values():
            continue
        alike = [x for x in donated if _alike(x, leaf)]
        lost = [x for x in alike if program.name_of(x) not in written and x not in over]
        over.append((lost or [leaf])[0])
    return over


def _alike(a: Leaf, b: Leaf) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype


def _unaliased(program: Program) -> list[Leaf]:
    """Outputs in memory of their own."""
    aliases = program.module.aliases
    return [x for n, x in enumerate(program.outputs) if n not in aliases]


def _not_aliased(program: Program, leaf: Leaf) -> str:
    start = f"{leaf} is donated, but no result is written into its memory: "
    alike = [x for x in program.outputs if _alike(x, leaf)]
    if leaf.parameter is None and not alike:
        return start + (
            "the step does not use it. Return it, updated or as it is, or do not donate it"
        )
    if leaf.parameter is None:
        return start + (
            "the step does not read it, so jit does not pass it on, and results like it "
            "are new memory. Make them from it, or do not donate it"
        )
    cast = [x for x in program.outputs if x.shape == leaf.shape and x.dtype != leaf.dtype]
    out = _namesake(leaf, cast)
    if out is None and cast and not alike:
        out = cast[0]
    if out is not None:
        return start + (
            f"the dtype has changed, {out.path} is {out.dtype}. Cast it back before it is "
            f"returned: .astype({leaf.dtype})"
        )
    if not alike:
        return start + (
            "there is no result of its shape and dtype. Return the updated array, in the "
            "shape and dtype that it had, or do not donate it"
        )
    if all(x not in _unaliased(program) for x in alike):
        return start + (
            f"the step returns fewer arrays like it than it is given, {len(alike)}, and "
            "these are written into others. Return this one too, or do not donate it"
        )
    module = program.module
    layout = module.parameters()[leaf.parameter].layouts[0]
    made, index = module.outputs()[program.outputs.index(alike[0])]
    if (returned := made.layouts[index]).order != layout.order:
        return start + _other_layout(leaf, layout, f"{alike[0].path} as", returned)
    return start + (
        f"{alike[0].path} is like it, but jit has not paired them. Are they sharded or "
        "laid out differently over devices (in_shardings, out_shardings)?"
    )


def _other_layout(leaf: Leaf, layout: Layout, what: str, other: Layout) -> str:
    advice = ""
    if other.order == tuple(reversed(range(len(leaf.shape)))):
        advice = (
            ", row by row. Place parameters and state so before the first step: "
            "jslices.row_major(tree)"
        )
    return f"the device lays it out as {layout}, {what} {other}{advice}"


def _namesake(leaf: Leaf, results: Iterable[Leaf]) -> Leaf | None:
    """The result that has an argument's name in the tree."""
    tail = leaf.path[leaf.path.find("]") + 1 :]
    return next((x for x in results if tail and x.path.endswith(tail)), None)


def _not_donated(program: Program, leaves: Iterable[Leaf]) -> Iterator[str]:
    fresh = _unaliased(program)
    for leaf in leaves:
        alike = [x for x in fresh if _alike(x, leaf)]
        if not alike:
            continue
        out = _namesake(leaf, alike) or alike[0]
        fresh.remove(out)
        number = leaf.path.partition("[")[2].partition("]")[0]
        yield (
            f"{leaf} is not donated, and {out.path}, which is like it, is new memory. "
            f"Donate it: jax.jit({program.name}, donate_argnums={number})"
        )


# --- copies ------------------------------------------------------------------------


def copied(
    program: Program, leaves: list[Leaf], crossed: list[Leaf], min_bytes: int
) -> list[str]:
    """A sentence for each copied leaf; for crossed ones only if the cause is visible."""
    module = program.module
    parameters = module.parameters()
    by_parameter = {leaf.parameter: leaf for leaf in leaves}
    # The memory of an aliased result is that of its argument.
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
    copies: dict[Leaf, list[Instruction]] = {}
    for each in module.run():
        if module.copied(each) is None:
            continue
        origin, index = module.origin(each)
        # Copies of other arrays, or of a part of a donated one, do not matter here.
        leaf = owners.get((origin.name, index))
        if leaf is not None and each.arrays[0] == origin.arrays[index]:
            copies.setdefault(leaf, []).append(each)
    sentences = []
    for leaf, several in copies.items():
        reasons = _reasons(program, leaf, several, leaf not in crossed)
        if reasons and (leaf.nbytes >= min_bytes or reasons != [_FAST]):
            times = f", {len(several)} times" if len(several) > 1 else ""
            sentences.append(f"{leaf} is copied{times}: " + "; and ".join(reasons))
    return sentences


def _reasons(
    program: Program, leaf: Leaf, copies: list[Instruction], guess: bool
) -> list[str]:
    module = program.module
    reasons = _moved(program, leaf, copies) or _returned(program, leaf)
    targets = {
        module.maker(*value)[0].name
        for number, value in enumerate(module.outputs())
        if module.aliases.get(number) == leaf.parameter
    }
    for copy in copies:
        reasons = reasons or list(dict.fromkeys(_reads(module, copy, targets)))
    reasons = reasons or _crossed(program, leaf)
    if guess and not reasons:
        reasons = list(dict.fromkeys(_elsewhere(module, copy) for copy in copies))
    return reasons


def _moved(program: Program, leaf: Leaf, copies: list[Instruction]) -> list[str]:
    """A sentence if the copies change the layout or the memory space."""
    module = program.module
    assert leaf.parameter is not None
    layout = module.parameters()[leaf.parameter].layouts[0]
    layouts = []
    for copy in copies:
        copied = module.copied(copy)
        assert copied is not None
        layouts += [copied[0].layouts[copied[1]], copy.layouts[0]]
    for other in layouts:
        if other.order != layout.order:
            return [_other_layout(leaf, layout, "the step as", other)]
    if any(other.space != layout.space for other in layouts):
        return [_FAST]
    return []


def _returned(program: Program, leaf: Leaf) -> list[str]:
    """A sentence if the old value itself is returned."""
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


def _crossed(program: Program, leaf: Leaf) -> list[str]:
    """A sentence if another result than its namesake is written into its memory."""
    numbers = program.module.aliases.items()
    paired = [program.outputs[n] for n, parameter in numbers if parameter == leaf.parameter]
    own = _namesake(leaf, program.outputs)
    if own is None or not paired or own in paired:
        return []
    return [
        f"{paired[0].path} is written into its memory, as JAX pairs donated arguments with "
        "results of their shape as they come. Let donated arguments come in the order of "
        "the results: def step(params, state, *batch), and return params, state, ..."
    ]


def _same(module: Module, each: Instruction, index: int) -> Value | None:
    """The value that this one is a copy or a renaming of."""
    if (copied := module.copied(each)) is not None:
        return copied
    if each.opcode in ("bitcast", "copy-done", "tuple", "get-tuple-element"):
        return module.into(each, index)
    return None


def _reads(module: Module, copy: Instruction, targets: set[str]) -> Iterator[str]:
    """Uses of the old value that may come after it is overwritten.

    ``targets`` names the makers of the new value, if it is not written row by row.
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
    """The part of a fusion that uses one of the values."""
    if user.opcode != "fusion" or not module.called(user):
        return user
    parameters = module.inside(user, old)
    parts = [x for p in parameters for x in module.users([p]) if module.user_line(x)]
    return (parts or [user])[0]


def _instead(reader: Instruction) -> str:
    if "select_n" in reader.op_name:
        return "Choose between old and new by jax.lax.cond around the update, or by rows"
    return (
        "Return what you need of the old one from the loss, as an auxiliary result "
        "(has_aux=True of js.train_step and js.value_and_grad), which is read before rows "
        "are written; or read the new value"
    )


def _equals(module: Module, copy: Instruction) -> list[Instruction]:
    """The instructions of its computation that have the value ``copy`` copies."""
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
        if step is not None and step[0].name in names:
            if not _returned_as_is(module, user, index):
                return True
    return False


def _returned_as_is(module: Module, user: Instruction, index: int) -> bool:
    """True if a loop returns the element unchanged."""
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
    """Advice for a copy whose cause the program does not show."""
    users = list(module.users([copy]))
    for each in list(users):
        users += module.users([each]) if each.opcode == "tuple" else ()
    around = (user for user in users if user.opcode in _BODIES)
    outer = next(around, module.caller(copy.where))
    if outer is not None:
        return (
            f"the {_BODIES.get(outer.opcode, outer.opcode)} {_place(module, outer)} keeps "
            "its old value beside the new one. Let each turn or branch read rows of it "
            "before it writes them, write with .at[rows].set or .add, and choose rows "
            "instead of whole arrays"
        )
    return (
        f"the program does not show why; the copy is made {_place(module, copy)}. Look for "
        "uses of the old value beside the update, and whether donated arguments come in "
        "the order of the results: JAX pairs them as they come"
    )


def _place(module: Module, each: Instruction) -> str:
    line = module.user_line(each)
    return f"by {each.op_name or each.name}" + (f" at {line}" if line else "")
