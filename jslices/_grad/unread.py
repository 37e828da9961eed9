"""The search for lookups that are not read as rows, to warn of them.

``tables[field, ids]`` of several tables in one array, ``table[rows, columns]``, a lookup
inside a ``while`` loop or a solver, and a product with a weighted one-hot array take few
elements of an array, but the gradient is dense. The search follows the elements of an array
through steps that move or scale them, or compare them with numbers of the same array
(``log_softmax``), and into called programs, until ids pick some; and what was computed from
one array and constants alone, in any way but products (loops, sorts of pairs).
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jslices import _jax
from jslices._grad.origins import Origins
from jslices._grad.products import picks_rows
from jslices._grad.rules import is_elementwise
from jslices._grad.views import Values
from jslices._grad.walk import CUSTOM, ProgramWalk, Scope
from jslices._jax import Equation, Program, Source
from jslices._rows.access import is_below

# These move the elements of their first operand, or those before them come with each.
_MOVES = frozenset(
    "copy cumlogsumexp cummax cummin cumprod cumsum device_put dynamic_update_slice "
    "jslices_changed jslices_row_major jslices_table layout_constraint new_ref pad pcast "
    "pvary reshape rev scatter scatter-add scatter-mul sharding_constraint slice sort "
    "split squeeze tile transpose xla_metadata_value".split()
)


class Provenance(NamedTuple):
    """Which leaves a variable comes from, by their numbers."""

    elements: frozenset[int] = frozenset()  # the leaves whose elements it holds
    #: It is computed from these and constants alone.
    depends_on: frozenset[int] = frozenset()

    @property
    def looked_up(self) -> frozenset[int]:
        """The leaves that ids look up in it, or in what was made of one as a whole."""
        alone = self.depends_on if len(self.depends_on) == 1 else frozenset()
        return self.elements or alone


_UNRELATED = Provenance()


def unread_lookups(
    program: Program, leaves: Sequence[int], output_needs_grad: Sequence[bool]
) -> dict[int, list[Source]]:
    """Sources of the lookups by ids in these leaves, which are among the first inputs."""
    search = _UnreadSearch(leaves)
    sets = [frozenset({i} & {*leaves}) for i in range(len(program.invars))]
    search.program(program, [Provenance(x, x) for x in sets], output_needs_grad)
    return search.lookups


class _UnreadSearch(ProgramWalk):
    """Follows the elements of leaves."""

    def __init__(self, leaves: Sequence[int]) -> None:
        #: For each leaf the sources of the equations in which ids pick elements of it.
        self.lookups: dict[int, list[Source]] = {leaf: [] for leaf in leaves}

    def constant(self, value: Any) -> Provenance:
        return _UNRELATED

    def equation(self, eqn: Equation, operands: Values, scope: Scope) -> Values:
        unfollowed = Provenance(depends_on=_depends_on(eqn, operands, scope.origins))
        if not any(x.looked_up for x in operands) or not scope.passes_gradient(eqn):
            return [unfollowed] * len(eqn.outvars)
        outputs = super().equation(eqn, operands, scope)
        return [unfollowed if x is _UNRELATED else x for x in outputs]

    def step(self, eqn: Equation, operands: Values, scope: Scope) -> Values:
        name, origins = eqn.primitive.name, scope.origins
        if name == "get" and all(map(origins.is_fixed, eqn.invars[1:])):
            return [operands[0]]  # of a mutable array, which may be all of it
        if name in ("gather", "dynamic_slice", "get"):
            if name == "get" or _picks_by_ids(eqn, origins):
                self._note(eqn, operands[:1])
            return [_UNRELATED]
        held = [bool(x.elements) for x in operands]
        if name == "dot_general" and picks_rows(eqn, held, origins):
            self._note(eqn, operands)
        followed = _follow_elements(eqn, operands, origins)
        return followed or self._inside(eqn, operands, scope)

    def _note(self, eqn: Equation, operands: Values) -> None:
        for leaf in frozenset().union(*(x.looked_up for x in operands)):
            self.lookups[leaf].append(self.source(eqn))

    def _inside(self, eqn: Equation, operands: Values, scope: Scope) -> Values:
        """The outputs of a loop, a branch or a solver."""
        outputs: Values = [_UNRELATED] * len(eqn.outvars)
        if _jax.kind(eqn) in CUSTOM and _jax.is_call_of_ours(eqn):
            return outputs  # a scatter
        for program, inputs, same_outputs in _programs_inside(eqn, operands):
            every = [True] * len(program.outvars)
            needs_grad = scope.outputs_need_grad(eqn) if same_outputs else every
            inside = self.program(program, inputs, needs_grad)
            outputs = inside if same_outputs else outputs
        return outputs


def _programs_inside(
    eqn: Equation, operands: Values
) -> Iterator[tuple[Program, Values, bool]]:
    """The sub-programs of any equation whose inputs are known, with the inputs of each.

    And True if its outputs are those of the equation.
    """
    name, params = eqn.primitive.name, eqn.params
    if name == "shard_map":
        yield params["jaxpr"], operands, True
    elif name == "while":
        yield params["body_jaxpr"], operands[params["cond_nconsts"] :], False
    elif name == "cond":
        for branch in params["branches"]:
            yield branch, operands[1:], True
    elif name == "custom_linear_solve":
        first = 0
        functions = zip(params["const_lengths"], params["jaxprs"], strict=True)
        for count, program in functions:
            consts, first = operands[first : first + count], first + count
            more = len(program.invars) - count if program is not None else 0
            if program is not None and more <= len(operands[first:]):
                yield program, [*consts, *operands[len(operands) - more :]], False
    else:
        shapes = lambda variables: list(map(_jax.shape_of, variables))  # noqa: E731
        for program in _jax.programs_among(eqn):
            takes = shapes(program.invars) == shapes(eqn.invars[: len(program.invars)])
            if takes or (name == "scan" and program is _jax.body(eqn)):
                outputs = len(program.outvars) == len(eqn.outvars) and name != "scan"
                yield program, operands[: len(program.invars)], outputs


def _follow_elements(eqn: Equation, operands: Values, origins: Origins) -> Values | None:
    """The outputs of a step that moves or scales elements; None for other steps."""
    name, shape = eqn.primitive.name, _jax.shape_of(eqn.outvars[0])
    pairs = list(zip(eqn.invars, operands, strict=True))
    union = Provenance(
        frozenset().union(*(x.elements for x in operands)),
        _depends_on(eqn, operands, origins),
    )
    if name == "optimization_barrier":
        return operands
    if name == "select_n" and all(x.depends_on for x in operands[1:]):
        return [union]  # a branch for each example
    if is_elementwise(eqn):  # with numbers, or with what is made of the same tables
        alone = all(x.depends_on or not origins.axes(atom) for atom, x in pairs)
        full = all(_jax.shape_of(atom) == shape for atom, x in pairs if x.elements)
        return [union if alone and full else _UNRELATED]
    if name == "concatenate":
        return [union if all(x.elements for x in operands) else _UNRELATED]
    if name in _MOVES or (name == "broadcast_in_dim" and _repeats_whole(eqn)):
        return [Provenance(operands[0].elements, union.depends_on)] * len(eqn.outvars)
    return None


def _depends_on(eqn: Equation, operands: Values, origins: Origins) -> frozenset[int]:
    """The leaves that the outputs are computed from, if from these alone."""
    pairs = zip(eqn.invars, operands, strict=True)
    if not all(
        x.depends_on or not origins.axes(atom) or origins.is_fixed(atom)
        for atom, x in pairs
    ):
        return frozenset()
    return frozenset().union(*(x.depends_on for x in operands))


def _repeats_whole(eqn: Equation) -> bool:
    """True if a whole table is repeated for each example, not a row."""
    shape, dims = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    return tuple(shape[d] for d in dims) == _jax.shape_of(eqn.invars[0])


def _picks_by_ids(eqn: Equation, origins: Origins) -> bool:
    """True if input numbers pick single elements along some axis, or several of axis 0."""
    shape, sizes = _jax.shape_of(eqn.invars[0]), eqn.params["slice_sizes"]
    if eqn.primitive.name == "gather":
        axes = eqn.params["dimension_numbers"].start_index_map
        ids = [eqn.invars[1]] * len(axes)
    else:
        axes, ids = range(len(shape)), eqn.invars[1:]
    return any(
        (axis == 0 or sizes[axis] == 1)
        and is_below(sizes[axis], shape[axis])
        and not origins.is_fixed(atom)
        for axis, atom in zip(axes, ids, strict=True)
    )
