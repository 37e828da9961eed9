"""Views whose rows are those of other arrays, under other numbers.

Each may hold an array for every example of a batch (see :class:`views.Repeated`): ``E``
arrays one below the other, and row ``i`` of example ``e`` has the number ``e * V + i``. One
table alone is ``E = 1``.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jslices._grad.views import Ids, Reader, View, whole
from jslices._rows.bounds import take_rows


@dataclasses.dataclass(frozen=True, eq=False)
class Stacked(View):
    """Several arrays, one below the other: ``concatenate`` on the axis of rows.

    ``heights`` are the rows of each part, for one example.
    """

    parts: tuple[Any, ...]
    heights: tuple[int, ...]

    def _rows(self, ids: Ids, reader: Reader) -> Any:
        out, above, total = None, 0, sum(self.heights)
        for part, height in zip(self.parts, self.heights, strict=True):
            if height:
                rows = self._part(part, self._below(ids, above, height), reader)
                if reader.runs:
                    row = ids.read % total
                    here = (row >= above) & (row < above + height)
                    here = here.reshape((-1,) + (1,) * (len(self.shape) - 1))
                    out = rows if out is None else jnp.where(here, rows, out)
            above += height
        return out

    def _below(self, ids: Ids, above: int, height: int) -> Ids:
        """The row numbers in the part that begins ``above``; others are empty slots."""
        total = sum(self.heights)

        def inside(read: jax.Array, record: jax.Array) -> tuple[jax.Array, jax.Array]:
            row = record % total - above
            good = (record >= 0) & (record < self.shape[0]) & (row >= 0) & (row < height)
            mine = jnp.where(good, record // total * height + row, part_rows)
            near = jnp.clip(read % total - above, 0, height - 1)
            return read // total * height + near, mine

        part_rows = self.shape[0] // total * height
        return ids.renumbered(("below", above, height, total), inside)

    def _part(self, part: Any, ids: Ids, reader: Reader) -> Any:
        if isinstance(part, View):
            return part.rows(ids, reader)
        return take_rows(part, ids.read, mode="clip") if reader.runs else None

    def whole(self) -> jax.Array:
        rest = self.shape[1:]
        examples = self.shape[0] // sum(self.heights)
        parts = [
            whole(part).reshape(examples, height, *rest)
            for part, height in zip(self.parts, self.heights, strict=True)
        ]
        return jnp.concatenate(parts, axis=1).reshape(self.shape)


@dataclasses.dataclass(frozen=True, eq=False)
class Window(View):
    """Consecutive rows of a view, from row ``above`` on: ``table[1:]``.

    ``height`` rows out of ``inner_height``, for one example.
    """

    inner: View
    above: int
    height: int
    inner_height: int

    def _number(self, x: jax.Array) -> jax.Array:
        return x // self.height * self.inner_height + x % self.height + self.above

    def _rows(self, ids: Ids, reader: Reader) -> Any:
        def inside(read: jax.Array, record: jax.Array) -> tuple[jax.Array, jax.Array]:
            good = (record >= 0) & (record < self.shape[0])
            mine = jnp.where(good, self._number(record), self.inner.shape[0])
            return self._number(read), mine

        how = ("window", self.above, self.height, self.inner_height)
        return self.inner.rows(ids.renumbered(how, inside), reader)

    def whole(self) -> jax.Array:
        rest = self.shape[1:]
        tables = self.inner.whole().reshape(-1, self.inner_height, *rest)
        return tables[:, self.above : self.above + self.height].reshape(self.shape)


@dataclasses.dataclass(frozen=True, eq=False)
class Copied(View):
    """The rows of a view once more for every example of a further batch.

    ``lead`` are the sizes ``[*B, V]`` that the row numbers count through, and ``axes``
    those of them that the view inside has.
    """

    inner: View
    lead: tuple[int, ...]
    axes: tuple[int, ...]

    def _number(self, x: jax.Array) -> jax.Array:
        number = jnp.zeros_like(x)
        for axis in self.axes:
            below = 1
            for size in self.lead[axis + 1 :]:
                below *= size
            number = number * self.lead[axis] + x // below % self.lead[axis]
        return number

    def _rows(self, ids: Ids, reader: Reader) -> Any:
        def inside(read: jax.Array, record: jax.Array) -> tuple[jax.Array, jax.Array]:
            good = (record >= 0) & (record < self.shape[0])
            mine = jnp.where(good, self._number(record), self.inner.shape[0])
            return self._number(read), mine

        how = ("copied", self.lead, self.axes)
        return self.inner.rows(ids.renumbered(how, inside), reader)

    def whole(self) -> jax.Array:
        rest = self.shape[1:]
        sizes = [self.lead[axis] for axis in self.axes]
        table = self.inner.whole().reshape(*sizes, *rest)
        trailing = range(len(self.lead), len(self.lead) + len(rest))
        copies = jax.lax.broadcast_in_dim(
            table, (*self.lead, *rest), (*self.axes, *trailing)
        )
        return copies.reshape(self.shape)
