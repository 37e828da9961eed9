"""Table-sized temporaries, and the lines of the program that make them."""

import math
from collections.abc import Iterator
from typing import Any

import jax.extend.core

from jslices._densify import human_bytes
from jslices._proof.program import Array, Instruction, Leaf, Module, Program

_NO_MEMORY = {"parameter", "constant", "copy-done"}
#: The function of ``optim.engine.step`` that steps all rows of a table.
_ALL_ROWS = "_all_rows"


def problems(program: Program, table_bytes: int | None, min_bytes: int) -> list[str]:
    """A line for each temporary as large as a table, and advice."""
    tables: list[Array] = []
    if table_bytes is None:
        size = "table_bytes=..., the size from which a temporary is too large"
        looked_up = list(tables_of(program, min_bytes, f"{size}, or ").values())
        stepped_whole = _stepped_whole(program.module)
        by_rows = [table for table in looked_up if _sides(table) not in stepped_whole]
        tables = by_rows or looked_up
        table_bytes = max(table.nbytes for table in tables)
    shapes = {_sides(table) for table in tables}
    large = [
        (each, array)
        for each, array in temporaries(program.module)
        if (_sides(array) in shapes or array.nbytes >= table_bytes)
        and array.nbytes <= program.memory.temp_bytes  # a larger one is not a temporary
    ]
    lines = [_line(program.module, each, array) for each, array in large]
    return list(dict.fromkeys(lines)) + _advice(program, [each for each, _ in large])


def temporaries(module: Module) -> Iterator[tuple[Instruction, Array]]:
    """Values in memory of their own, neither an argument's nor a result's."""
    results = {module.maker(*value) for value in module.outputs()}
    for name in module.computations:
        caller = module.caller(name)
        if caller is not None and caller.opcode == "while":
            # An iteration leaves its result where it found its input.
            makers = [module.maker(*value) for value in module.elements(name)]
            results.update(maker for maker in makers if maker[0].where == name)
    for each in module.run():
        if each.opcode in _NO_MEMORY:
            continue
        for index, array in enumerate(each.arrays):
            if module.maker(each, index) == (each, index) not in results:
                yield each, array


def _stepped_whole(module: Module) -> set[tuple[int, ...]]:
    """The sides of tables that an optimizer steps as a whole, by its plan."""
    return {
        _sides(array)
        for each in module.run()
        if _steps_all_rows(module, each)
        for array in each.arrays
    }


def _steps_all_rows(module: Module, each: Instruction) -> bool:
    return any(function == _ALL_ROWS for _, function, _ in module.frames(each))


def _sides(array: Array) -> tuple[int, ...]:
    return tuple(sorted(dim for dim in array.dims if dim != 1))


def _line(module: Module, each: Instruction, array: Array) -> str:
    source = _telling(module, each)
    what = f" ({source.op_name})" if source.op_name else ""
    line = module.user_line(source)
    place = "" if line is None else f" at {line}"
    return f"{array} ({human_bytes(array.nbytes)}) by {each.opcode}{what}{place}"


def _telling(module: Module, each: Instruction) -> Instruction:
    """The instruction, or the first user of its result that has a source line."""
    if module.user_line(each) is None and module.copied(each) is None:
        for user in module.users([each]):
            if module.user_line(user) is not None:
                return user
    return each


def _advice(program: Program, large: list[Instruction]) -> list[str]:
    if not large:
        return []
    large = [_telling(program.module, each) for each in large]
    gradient = [each for each in large if "transpose(" in each.op_name]
    advice = []
    ask = "print(jslices.explain(loss)(params, ...)) names the line and the remedy"
    if program.densified:
        warned = ". ".join(dict.fromkeys(program.densified))
        advice.append(f"jslices made a gradient dense: {warned}. {ask}")
    elif any(_steps_all_rows(program.module, each) for each in large):
        advice.append(
            "the gradient has so many rows that jslices steps all rows of the table at "
            "once, which is faster; with fewer ids a step it would not. If that is meant "
            "(print(tx.plan(grads, params)) says so), there is nothing to mend"
        )
    elif gradient and not any(_of_jslices(program.module, each) for each in gradient):
        advice.append(
            "this is a dense gradient: write jslices.value_and_grad or jslices.grad "
            "instead of JAX's; if it stays dense, " + ask
        )
    elif crowded := _crowded(program):
        advice += crowded
    elif gradient:
        advice.append(f"a gradient may need the whole table: {ask}")
    if any(_of_optax(program.module, each) for each in large):
        advice.append(
            "Optax works on whole arrays: use the optimizer of that name in jslices, or "
            "jslices.from_optax"
        )
    if any(program.module.copied(each) is not None for each in large):
        advice.append("jslices.testing.assert_in_place gives the cause of copies")
    return advice


def _crowded(program: Program) -> list[str]:
    """A line for each table with at most as many rows as are looked up."""
    tables: dict[tuple[int, ...], str] = {}
    for leaf, (rows, height) in _looked_up(program).items():
        if len(leaf.shape) > 1 and rows >= height:  # state arrays come later
            tables.setdefault(
                leaf.shape,
                f"{leaf.path} has {height:,} rows, and {rows:,} are looked up in a "
                "step: the rows of its gradient alone are as large as the table. If that "
                "is meant, leave the table out: a higher min_bytes",
            )
    return list(tables.values())


def _of_optax(module: Module, each: Instruction) -> bool:
    """True if Optax made it from a whole array, not from rows of jslices."""
    files = [file.replace("\\", "/") for file, _, _ in module.frames(each)]
    ours = [n for n, file in enumerate(files) if "jslices/optim/" in file]
    theirs = [n for n, file in enumerate(files) if "/optax/" in file]
    lifted = any(file.endswith("/from_optax.py") for file in files)
    return bool(theirs) and not lifted and min(theirs) < min(ours, default=len(files))


def _of_jslices(module: Module, each: Instruction) -> bool:
    files = [file.replace("\\", "/") for file, _, _ in module.frames(each)]
    return any("jslices/_grad/" in file for file in files)


# --- tables ------------------------------------------------------------------------


def tables_of(program: Program, min_bytes: int, instead: str = "") -> dict[Leaf, Array]:
    """The arguments that are tables, and each device's part of them.

    Raises:
      ValueError: if there are none; says to pass a lower min_bytes, or ``instead``.
    """
    tables = _tables(program, min_bytes)
    if not tables:
        raise ValueError(
            f"{program.name} looks up rows of no argument with at least two axes and "
            f"{min_bytes} bytes; pass {instead}a lower min_bytes"
        )
    return tables


def heights(program: Program, min_bytes: int) -> set[int]:
    """The first axes of tables of ``min_bytes`` of which not all rows are stepped."""
    whole, tables = _stepped_whole(program.module), _tables(program, min_bytes)
    return {x.shape[0] for x, part in tables.items() if _sides(part) not in whole}


def _tables(program: Program, min_bytes: int) -> dict[Leaf, Array]:
    parameters = program.module.parameters()
    return {
        leaf: parameters[leaf.parameter].arrays[0]
        for leaf in _looked_up(program)
        if leaf.parameter is not None and len(leaf.shape) > 1 and leaf.nbytes >= min_bytes
    }


def _looked_up(program: Program) -> dict[Leaf, tuple[int, int]]:
    """The arguments whose rows are gathered: how many at a time, of how many."""
    jaxpr = program.jaxpr.jaxpr
    rows: dict[int, tuple[int, int]] = {}
    _walk(jaxpr, list(range(len(jaxpr.invars))), rows)
    return {program.leaves[number]: rows[number] for number in sorted(rows)}


def _walk(
    jaxpr: Any, numbers: list[int | None], most: dict[int, tuple[int, int]]
) -> list[int | None]:
    """Follows arguments, by number, to gathers; returns the numbers of the results."""
    of = {id(v): n for v, n in zip(jaxpr.invars, numbers, strict=True)}
    for eqn in jaxpr.eqns:
        sources = [of.get(id(v)) for v in eqn.invars]
        if eqn.primitive.name in ("gather", "dynamic_slice") and sources[0] is not None:
            # An array with several axes that number rows is gathered from as it is.
            row = max(math.prod(eqn.params["slice_sizes"]), 1)
            if eqn.primitive.name == "dynamic_slice":
                row = max(math.prod(eqn.invars[0].aval.shape[1:]), 1)
            rows, height = (x.aval.size // row for x in (eqn.outvars[0], eqn.invars[0]))
            most[sources[0]] = max(most.get(sources[0], (0, 1)), (rows, height))
        results: list[int | None] = [None] * len(eqn.outvars)
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            # Loops and conditionals have additional operands, before those of the body.
            count = len(inner.invars)
            operands = [*[None] * count, *sources][-count:] if count else []
            returned = _walk(inner, operands, most)
            if len(returned) == len(results):
                results = returned
        for out, number in zip(eqn.outvars, results, strict=True):
            if number is None:
                # A result of the same shape is the table cast, scaled or updated; rows
                # that several axes number are numbered by one to be read.
                reshapes = eqn.primitive.name == "reshape"
                same = (
                    n
                    for v, n in zip(eqn.invars, sources, strict=True)
                    if n is not None and (reshapes or v.aval.shape == out.aval.shape)
                )
                number = next(same, None)
            of[id(out)] = number
    return [of.get(id(v)) for v in jaxpr.outvars]
