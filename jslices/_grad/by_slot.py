"""What a traced program computes for some slots of a lookup, from their rows alone.

Where everything that is made of the looked-up rows treats each slot by itself, it can be
computed for a few of them at a time, and no array ``[K, D]`` is ever made.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jslices import _jax
from jslices._grad.rules import ELEMENTWISE

#: Bytes of rows that are summed at a time.
CHUNK_BYTES = 2**20
#: ``take(x)``: of ``x`` ``[K, ...]`` what belongs to some slots, ``[C, ...]``.
Take = Callable[[jax.Array], jax.Array]

#: What computes each element from one of each operand.
BY_ELEMENT = ELEMENTWISE.union(["add_any", "after", "row_loop"])


class BySlot:
    """The part of a program that is computed for each slot of one lookup by itself.

    Args:
      program: a traced program.
      lookup: its ``gather`` of rows ``[K, *D]``.
      values: what its variables stand for.
    """

    def __init__(
        self, program: _jax.Program, lookup: _jax.Equation, values: Mapping[Any, Any]
    ) -> None:
        self._values = values
        self._lookup = lookup
        (self.rows,) = lookup.outvars
        self.count = _jax.shape_of(self.rows)[0]
        self._makers = {var: eqn for eqn in program.eqns for var in eqn.outvars}

    def same_slots(self, indices: Any) -> bool:
        """Whether slot k of the lookup is that of ``indices[k]``, a variable ``[K]``."""
        made = self._makers.get(self._lookup.invars[1])
        if made is None or made.primitive.name != "broadcast_in_dim":
            return False
        return made.invars[0] is indices and self._numbers_slots(indices)

    def contains(self, equations: Iterable[_jax.Equation]) -> bool:
        """Whether all of these equations, which the rows go into, are of that part."""
        return all(self._by_slot(eqn) for eqn in equations)

    def sums(self, equations: Iterable[_jax.Equation]) -> list[_jax.Equation]:
        """The sums that are all that these equations need of more slots than one.

        Empty if they need something else of them: the rows are then better read at once.
        """
        reached, sums = set(self._lookup.outvars), []
        for eqn in equations:
            if eqn is self._lookup or not any(
                not isinstance(atom, _jax.Literal) and atom in reached
                for atom in eqn.invars
            ):
                continue
            if self._by_slot(eqn):
                reached.update(eqn.outvars)
            elif eqn.primitive.name == "reduce_sum":
                sums.append(eqn)
            else:
                return []
        return sums

    def summed(self, eqn: _jax.Equation) -> jax.Array:
        """What a sum gives, on a CPU from rows that are looked up some at a time."""
        (atom,) = eqn.invars
        total: jax.Array = lax.platform_dependent(
            cpu=lambda: self._sum_in_parts(eqn),
            default=lambda: _jax.bind(eqn, [self._values[atom]])[0],
        )
        return total

    def _sum_in_parts(self, eqn: _jax.Equation) -> jax.Array:
        table, ids = (self._values[var] for var in self._lookup.invars)
        aval = self.rows.aval
        num_bytes = aval.size * aval.dtype.itemsize
        whole = max(1, min(-(-num_bytes // CHUNK_BYTES), self.count))
        chunk, rest = divmod(self.count, whole)

        def some(start: Any, size: int) -> jax.Array:
            take = lambda x: lax.dynamic_slice_in_dim(x, start, size)  # noqa: E731
            (rows,) = _jax.bind(self._lookup, [table, take(ids)])
            (part,) = _jax.bind(eqn, [self.of(eqn.invars[0], rows, take)])
            return part

        # Fewer than there are chunks.
        last = [some(whole * chunk, rest)] if rest else []
        if 0 in eqn.params["axes"]:
            add = lambda i, total: total + some(i * chunk, chunk)  # noqa: E731
            return sum(last, lax.fori_loop(1, whole, add, some(0, chunk)))
        parts = lax.map(lambda i: some(i * chunk, chunk), jnp.arange(whole))
        return jnp.concatenate([parts.reshape(-1, *parts.shape[2:]), *last])

    def of(self, atom: Any, rows: jax.Array, take: Take) -> jax.Array:
        """``[C, ...]``, what belongs to the slots of ``rows`` ``[C, *D]``."""
        known = {self.rows: rows}

        def part(atom: Any) -> Any:
            if isinstance(atom, _jax.Literal) or not self._numbers_slots(atom):
                return _jax.read(atom, self._values)
            if atom not in known:
                eqn = self._makers.get(atom)
                if eqn is not None and self._by_slot(eqn):
                    shape = self._fewer(eqn, len(rows))
                    (known[atom],) = _jax.bind(eqn, [*map(part, eqn.invars)], **shape)
                else:
                    known[atom] = take(self._values[atom])
            return known[atom]

        result: jax.Array = part(atom)
        return result

    def _by_slot(self, eqn: _jax.Equation) -> bool:
        name, out = eqn.primitive.name, eqn.outvars[0]
        if name in BY_ELEMENT:
            return self._numbers_slots(out)
        if name != "broadcast_in_dim" or len(eqn.invars) > 1:
            return False
        # What a slot has is spread within its row, or all slots get the same.
        first = tuple(eqn.params["broadcast_dimensions"])[:1] == (0,)
        return self._numbers_slots(out) and first == self._numbers_slots(eqn.invars[0])

    def _numbers_slots(self, atom: Any) -> bool:
        """Whether the first axis, the way it is used here, is that of the slots."""
        return _jax.shape_of(atom)[:1] == (self.count,)

    def _fewer(self, eqn: _jax.Equation, count: int) -> dict[str, Any]:
        if eqn.primitive.name != "broadcast_in_dim":
            return {}
        return {"shape": (count, *eqn.params["shape"][1:])}
