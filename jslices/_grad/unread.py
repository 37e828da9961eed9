"""Lookups that are not read as rows: what to warn of.

``tables[field, ids]`` of several tables in one array, ``table[rows, columns]``, and a
lookup inside a ``while`` loop or a solver take few elements of an array, but the gradient
is dense. They are looked for in the program alone: the elements of an array are followed
through steps that move or scale them, and into what is called, until ids pick some.
"""

import math
from collections.abc import Sequence
from typing import Any

from jslices import _jax
from jslices._grad.rules import is_elementwise

# They put the elements of their first operand elsewhere.
_MOVES = frozenset(
    "jslices_table pad reshape rev scatter scatter-mul sharding_constraint slice split "
    "squeeze transpose".split()
)


def unread_lookups(
    program: _jax.Program, leaves: Sequence[int], through: Sequence[bool]
) -> dict[int, list[_jax.Source]]:
    """For each of these leaves the equations, or library calls, that look it up by ids.

    Args:
      program: the traced function; its first inputs are the leaves.
      leaves: their numbers.
      through: for each output whether a gradient comes in there.
    """
    search = _Search(leaves)
    held = [frozenset({i} & {*leaves}) for i in range(len(program.invars))]
    search.program(program, held, through)
    return search.found


class _Search:
    def __init__(self, leaves: Sequence[int]) -> None:
        self.found: dict[int, list[_jax.Source]] = {i: [] for i in leaves}
        self._caller: _jax.Source | None = None

    def program(
        self, program: _jax.Program, held: Sequence[frozenset[int]], through: Sequence[bool]
    ) -> list[frozenset[int]]:
        """The leaves whose elements the outputs hold, from those that the inputs hold."""
        nothing: frozenset[int] = frozenset()
        reached = _jax.gradient_variables(program, through)
        origins = _jax.Origins(program)
        env = dict(zip(program.invars, held, strict=True))

        def read(atom: Any) -> frozenset[int]:
            return nothing if isinstance(atom, _jax.Literal) else env.get(atom, nothing)

        for eqn in _jax.live_equations(program):
            given = [read(atom) for atom in eqn.invars]
            if any(given) and _jax.is_reached(eqn, reached):
                outputs = self._equation(
                    eqn, given, [v in reached for v in eqn.outvars], origins
                )
                env.update(zip(eqn.outvars, outputs, strict=True))
        return [read(atom) for atom in program.outvars]

    def _equation(
        self,
        eqn: _jax.Equation,
        given: list[frozenset[int]],
        through: list[bool],
        origins: _jax.Origins,
    ) -> list[frozenset[int]]:
        nothing: list[frozenset[int]] = [frozenset()] * len(eqn.outvars)
        name, first = eqn.primitive.name, given[0]
        if name == "gather" or name == "dynamic_slice":
            if _picks_by_ids(eqn, origins):
                for leaf in first:
                    self.found[leaf].append(self._caller or eqn.source_info)
            return nothing
        if name == "optimization_barrier":
            return given
        everything = [frozenset[int]().union(*given)]
        shape = _jax.shape_of(eqn.outvars[0])
        if is_elementwise(eqn):  # with numbers, or with elements of other tables
            others = [x for x, held in zip(eqn.invars, given, strict=True) if not held]
            held_ones = [x for x, held in zip(eqn.invars, given, strict=True) if held]
            numbers = not any(map(_jax.shape_of, others))
            full = all(_jax.shape_of(x) == shape for x in held_ones)
            return everything if numbers and full else nothing
        if name == "concatenate":
            return everything if all(given) else nothing
        same_size = math.prod(shape) == math.prod(_jax.shape_of(eqn.invars[0]))
        if name in _MOVES or (name == "broadcast_in_dim" and same_size):
            return [first] * len(eqn.outvars)
        return self._inside(eqn, given, through) or nothing

    def _inside(
        self, eqn: _jax.Equation, given: list[frozenset[int]], through: list[bool]
    ) -> list[frozenset[int]] | None:
        """The outputs of a call, loop, branch or solver; None if nothing is held."""
        outer, outputs = self._caller, None
        if (
            outer is None
            and eqn.primitive.name in ("jit", "pjit")
            and _jax.is_library_call(eqn)
        ):
            self._caller = eqn.source_info
        for program, operands, same_outputs in _jax.programs_inside(eqn, given):
            wanted = through if same_outputs else [True] * len(program.outvars)
            held = self.program(program, operands, wanted)
            outputs = held if same_outputs else outputs
        self._caller = outer
        return outputs


def _picks_by_ids(eqn: _jax.Equation, origins: _jax.Origins) -> bool:
    """True if numbers that the program is given pick single elements along some axis."""
    shape, sizes = _jax.shape_of(eqn.invars[0]), eqn.params["slice_sizes"]
    if eqn.primitive.name == "gather":
        axes = eqn.params["dimension_numbers"].start_index_map
        ids = [eqn.invars[1]] * len(axes)
    else:
        axes, ids = range(len(shape)), eqn.invars[1:]
    return any(
        sizes[axis] == 1 < shape[axis] and not origins.is_fixed(atom)
        for axis, atom in zip(axes, ids, strict=True)
    )
