"""Which arrays are not updated in place: no result is written into their memory."""

from collections.abc import Iterable, Iterator

from jslices._densify import human_bytes
from jslices._proof.copies import copied
from jslices._proof.program import Leaf, Program


def problems(program: Program, min_bytes: int) -> list[str]:
    """One sentence or more for each array of ``min_bytes`` that is not in place."""
    large = [leaf for leaf in program.leaves if leaf.nbytes >= min_bytes]
    donated = [leaf for leaf in large if leaf.donated]
    missing = _missing(program, donated)
    found = [_not_aliased(program, leaf) for leaf in missing]
    found.extend(_not_donated(program, [leaf for leaf in large if not leaf.donated]))
    if not donated and not found:
        found.append(
            f"no array of at least {human_bytes(min_bytes)} is donated, and so none can be "
            "updated in place. Donate parameters and state, jax.jit(step, "
            "donate_argnums=(0, 1)), or lower min_bytes"
        )
    rest = [x for x in donated if x not in missing and _is_aliased(program, x)]
    # Where a result is missing jit pairs the others crosswise, and copies follow from that.
    crossed = [x for x in rest if any(_alike(x, y) for y in missing)]
    return found + copied(program, rest, crossed)


def _missing(program: Program, donated: list[Leaf]) -> list[Leaf]:
    """Those that no result is written into.

    jit pairs arrays with results like them in order, so the one that it leaves over need
    not be the one that is not returned.
    """
    module = program.module
    written = {module.origin(*value)[0].name for value in module.outputs()}
    over: list[Leaf] = []
    for leaf in donated:
        if _is_aliased(program, leaf):
            continue
        alike = [x for x in donated if _alike(x, leaf)]
        lost = [x for x in alike if program.name_of(x) not in written and x not in over]
        over.append((lost or [leaf])[0])
    return over


def _is_aliased(program: Program, leaf: Leaf) -> bool:
    return leaf.parameter in program.module.aliases.values()


def _alike(a: Leaf, b: Leaf) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype


def _unaliased(program: Program) -> list[Leaf]:
    """Outputs that are new memory."""
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
    # The one of the same name in the tree, if there is one.
    tail = leaf.path[leaf.path.find("]") + 1 :]
    same = [x for x in cast if tail and x.path.endswith(tail)]
    if same or (cast and not alike):
        out = (same or cast)[0]
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
    return start + (
        f"{alike[0].path} is like it, but jit has not paired them. Are they sharded or "
        "laid out differently over devices (in_shardings, out_shardings)?"
    )


def _not_donated(program: Program, leaves: Iterable[Leaf]) -> Iterator[str]:
    fresh = _unaliased(program)
    for leaf in leaves:
        alike = [x for x in fresh if _alike(x, leaf)]
        if not alike:
            continue
        # Of several the one of the same name in the tree.
        tail = leaf.path[leaf.path.find("]") + 1 :]
        out = next((x for x in alike if tail and x.path.endswith(tail)), alike[0])
        fresh.remove(out)
        number = leaf.path.partition("[")[2].partition("]")[0]
        yield (
            f"{leaf} is not donated, and {out.path}, which is like it, is new memory. "
            f"Donate it: jax.jit({program.name}, donate_argnums={number})"
        )
