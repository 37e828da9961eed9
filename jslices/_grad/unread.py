"""Lookups that are not read as rows: what to warn of.

``tables[field, ids]`` of several tables in one array, ``table[rows, columns]``, and a
lookup inside a ``while`` loop or a solver take few elements of an array, but the gradient
is dense. They are looked for in the program alone: the elements of an array are followed
through steps that move or scale them, and into what is called, until ids pick some.
"""

import weakref
from collections.abc import Sequence
from typing import Any

from jslices import _jax
from jslices._grad.rules import is_elementwise

# They put the elements of their first operand elsewhere.
_MOVES = frozenset(
    "dynamic_update_slice jslices_table layout_constraint pad reshape rev scatter "
    "scatter-add scatter-mul sharding_constraint slice split squeeze transpose".split()
)

#: The numbers of the leaves whose elements a variable holds.
Held = frozenset[int]
#: What the outputs of a program hold, and where which leaf is looked up.
Result = tuple[list[Held], list[tuple[int, _jax.Source]]]

_NOTHING: Held = frozenset()
#: By program, and by what its inputs hold.
_known: weakref.WeakKeyDictionary[Any, dict[Any, Result]] = weakref.WeakKeyDictionary()


_CUSTOM = ("custom_jvp_call", "custom_vjp_call")


def unread_lookups(
    program: _jax.Program, leaves: Sequence[int], through: Sequence[bool]
) -> dict[int, list[_jax.Source]]:
    """For each of these leaves where it is looked up by ids.

    Args:
      program: the traced function; its first inputs are the leaves.
      leaves: their numbers.
      through: for each output whether a gradient comes in there.
    """
    held = [frozenset({i} & {*leaves}) for i in range(len(program.invars))]
    found: dict[int, list[_jax.Source]] = {i: [] for i in leaves}
    for leaf, source in _search(program, held, through)[1]:
        found[leaf].append(source)
    return found


def _search(program: _jax.Program, held: Sequence[Held], through: Sequence[bool]) -> Result:
    """What becomes of the elements that the inputs of a program hold.

    Programs that JAX keeps, such as jitted functions, are searched once.
    """
    results = _known.setdefault(program, {})
    key = (tuple(held), tuple(through))
    if key not in results:
        results[key] = _walk(program, held, through)
    return results[key]


def _walk(program: _jax.Program, held: Sequence[Held], through: Sequence[bool]) -> Result:
    found: list[tuple[int, _jax.Source]] = []
    reached = _jax.gradient_variables(program, through)
    origins = _jax.Origins(program)
    env = dict(zip(program.invars, held, strict=True))

    def read(atom: Any) -> Held:
        return _NOTHING if isinstance(atom, _jax.Literal) else env.get(atom, _NOTHING)

    for eqn in _jax.live_equations(program):
        given = [read(atom) for atom in eqn.invars]
        if not any(given) or not _jax.is_reached(eqn, reached):
            continue
        if eqn.primitive.name in ("gather", "dynamic_slice"):
            if _picks_by_ids(eqn, origins):
                found += [(leaf, eqn.source_info) for leaf in given[0]]
            continue
        outputs = _moved(eqn, given, origins)
        if outputs is None:
            outputs, more = _inside(eqn, given, [v in reached for v in eqn.outvars])
            found += more
        env.update(zip(eqn.outvars, outputs, strict=True))
    return [read(atom) for atom in program.outvars], found


def _moved(
    eqn: _jax.Equation, given: Sequence[Held], origins: _jax.Origins
) -> Sequence[Held] | None:
    """What the outputs of a step hold; None if it does not move or scale elements."""
    name, shape = eqn.primitive.name, _jax.shape_of(eqn.outvars[0])
    if name == "optimization_barrier":
        return given
    if is_elementwise(eqn):  # with numbers, or with elements of other tables
        operands = list(zip(eqn.invars, given, strict=True))
        numbers = not any(origins.axes(x) for x, held in operands if not held)
        full = all(_jax.shape_of(x) == shape for x, held in operands if held)
        return [_NOTHING.union(*given)] if numbers and full else [_NOTHING]
    if name == "concatenate":
        return [_NOTHING.union(*given) if all(given) else _NOTHING]
    if name in _MOVES or (name == "broadcast_in_dim" and _repeats_whole(eqn)):
        return [given[0]] * len(eqn.outvars)
    return None


def _repeats_whole(eqn: _jax.Equation) -> bool:
    """True for a table for each example, not for one row for many."""
    shape, dims = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    return tuple(shape[d] for d in dims) == _jax.shape_of(eqn.invars[0])


def _inside(eqn: _jax.Equation, given: Sequence[Held], through: Sequence[bool]) -> Result:
    """What becomes of them in a call, a loop, a branch or a solver."""
    outputs: list[Held] = [_NOTHING] * len(eqn.outvars)
    if _jax.kind(eqn) in _CUSTOM and _jax.is_call_of_ours(eqn):
        return outputs, []  # a scatter
    found: list[tuple[int, _jax.Source]] = []
    for program, held, same_outputs in _jax.programs_inside(eqn, given):
        wanted = through if same_outputs else [True] * len(program.outvars)
        kept, more = _search(program, held, wanted)
        outputs = kept if same_outputs else outputs
        found += more
    if eqn.primitive.name in ("jit", "pjit") and _jax.is_library_call(eqn):
        found = [(leaf, eqn.source_info) for leaf, _ in found]
    return outputs, found


def _picks_by_ids(eqn: _jax.Equation, origins: _jax.Origins) -> bool:
    """True if numbers that the program is given pick single elements along some axis."""
    shape, sizes = _jax.shape_of(eqn.invars[0]), eqn.params["slice_sizes"]
    if eqn.primitive.name == "gather":
        axes = eqn.params["dimension_numbers"].start_index_map
        ids = [eqn.invars[1]] * len(axes)
    else:
        axes, ids = range(len(shape)), eqn.invars[1:]
    return any(
        sizes[axis] == 1 != shape[axis] and not origins.is_fixed(atom)
        for axis, atom in zip(axes, ids, strict=True)
    )
