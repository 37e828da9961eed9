"""Rows that a CPU reads from the table a second time, instead of keeping them.

Where a gradient is computed from the looked-up rows element by element (a squared error, a
penalty of the rows), XLA keeps the rows ``[K, D]`` from the loss to the step backward, and
cannot write their cotangents over them, as the optimizer updates those in place. Read a
second time, after the loss, the rows need no memory at all: both reads become part of what
they feed, and only the cotangents are left. With large gradients that is worth more than
the read costs, as XLA:CPU takes its memory anew from the operating system at each step.

Only a table's own rows are read again, for its own gradient: its update then waits for them
as it waits for the gradient. For a read that nothing orders before the write XLA would copy
the table. On other platforms the two reads are the same, and XLA makes them one.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from jslices._after import after
from jslices._grad import compat
from jslices._grad.rules import ELEMENTWISE
from jslices._slices import IndexedSlices
from jslices._trees import flatten

#: From so many bytes of rows on: two such arrays are what ``malloc`` maps anew each time.
LARGE = 16 * 10**6

# What XLA computes together with what it feeds.
_FUSED = ELEMENTWISE.union(
    "add_any after broadcast_in_dim concatenate reshape row_loop".split()
)

_Values = dict[Any, Any]


def reading_again(run: Callable[..., Any], primals: Sequence[Any]) -> Any:
    """``run(*primals)``, with large gradients computed from rows that are read again.

    Args:
      run: a function of arrays that returns ``(value, aux, grads)``: a scalar, a pytree of
        arrays, and a pytree of one gradient for each of ``primals``.
      primals: arrays.
    """
    structures: list[Any] = []

    def flat(*primals: Any) -> list[Any]:
        leaves, structure = flatten(run(*primals))
        structures.append(structure)
        return leaves

    program = jax.make_jaxpr(flat)(*primals)
    values: _Values = dict(zip(program.invars, primals, strict=True))
    values.update(zip(program.constvars, compat.constants(program), strict=True))
    _compute(program.eqns, values)

    loss, _, grads = structures[0].unflatten(program.outvars)
    gradients, _ = flatten(grads, lambda x: isinstance(x, IndexedSlices))
    ways = {
        gradient.values: _way(program, table, gradient.values)
        for table, gradient in zip(program.invars, gradients, strict=True)
        if isinstance(gradient, IndexedSlices)
    }
    if sum(_num_bytes(rows) for rows, way in ways.items() if way) >= LARGE:
        loss = _read(loss, values)
        again = [_compute(way, dict(values), loss)[rows] for rows, way in ways.items()]
        values.update(zip(ways, again, strict=True))
    return structures[0].unflatten(_read(out, values) for out in program.outvars)


def _compute(
    equations: Iterable[compat.Equation], values: _Values, earlier: Any = None
) -> _Values:
    """Adds what the equations give to ``values``, gathers read after ``earlier``."""
    for eqn in equations:
        given = [_read(atom, values) for atom in eqn.invars]
        if earlier is not None and eqn.primitive.name == "gather":
            given[1] = after(given[1], earlier)
        values.update(zip(eqn.outvars, compat.bind(eqn, given), strict=True))
    return values


def _read(atom: Any, values: _Values) -> Any:
    return atom.val if isinstance(atom, compat.Literal) else values[atom]


def _way(program: compat.Program, table: Any, rows: Any) -> list[compat.Equation]:
    """From lookups in ``table`` to ``rows``, element by element; empty if there is none."""
    wanted, met = {rows}, []
    for eqn in reversed(program.eqns):
        name = eqn.primitive.name
        if wanted.isdisjoint(eqn.outvars):
            continue
        if name in _FUSED:
            wanted.update(v for v in eqn.invars if not isinstance(v, compat.Literal))
            met.append(eqn)
        elif name == "gather" and eqn.invars[0] is table:
            met.append(eqn)
    way, reached = [], {table}
    for eqn in reversed(met):
        if not reached.isdisjoint(
            v for v in eqn.invars if not isinstance(v, compat.Literal)
        ):
            reached.update(eqn.outvars)
            way.append(eqn)
    return way if rows in reached else []


def _num_bytes(variable: Any) -> int:
    return math.prod(variable.aval.shape) * int(variable.aval.dtype.itemsize)
