"""Rows that catch up, are read and stepped in one program, which does each thing once."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jslices._place.boundary import platform_at_hand
from jslices._rows.access import rows_numbered, set_rows, take_rows
from jslices._rows.sums import number_by_runs
from jslices._slices import IndexedSlices
from jslices._typing import Leaf
from jslices.optim.engine.rule import Kernel
from jslices.optim.engine.step import choose_plan, read_rows, step_slices


class RowsOfStep:
    """Rows of a table that catch up, are read and then stepped.

    What catching up leaves to the step of gradients of these rows, and no others:

    *   The state catches up as it is stepped, and so is read and written once.
    *   So does the table on a TPU: the rows that the loss reads are computed aside
        (:meth:`read`), and written when their update is added. Short rows that are written
        twice XLA:TPU lays out by columns, and copies the table for that (libtpu 0.0.50).
        Elsewhere it does not pay: on a CPU rows are still in the cache when they are
        written again, on a GPU it takes three kernels more to access a tenth less.
    *   Where the rows are so many that a pass over the table is the faster way, all of its
        rows are up to date and all of them do the step, so that none is late in the next.

    The arrays are traced as if they had caught up: whatever else may read them finds them
    so, and XLA drops what is never read. It also sees that a row is gathered and moved in
    several places, and does it once.

    Attributes:
      rows: which rows, as slices without elements.
      param: the table, caught up; None before that.
    """

    def __init__(self, rows: IndexedSlices) -> None:
        self.rows = rows
        self.param: jax.Array | None = None
        self._state: Sequence[jax.Array] = ()  # caught up
        self._old: Sequence[jax.Array] = ()  # the table and its state, as they came
        self._catch_up: Kernel
        self._every_row = self._aside = False
        self._updated: jax.Array | None = None  # the row numbers of the update

    # --- catching up ----------------------------------------------------------------------

    def are_enough(self, arrays: Sequence[jax.Array]) -> bool:
        """Whether a step of these rows is a pass over all rows of these arrays."""
        axes, platform = self.rows.row_axes, platform_at_hand()
        num_rows = rows_numbered(arrays[0].shape, axes)
        plan = choose_plan(self.rows.values, arrays, num_rows, platform, row_axes=axes)
        return plan.is_pass

    def among_all(self, arrays: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """The arrays, of which all rows have caught up."""
        self._every_row = True
        self.param, *self._state = arrays
        return self.param, *self._state

    def run(self, kernel: Kernel, arrays: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """The arrays after the missed steps of these rows, which ``kernel`` does."""
        self._catch_up, self._old = kernel, arrays
        self._aside = platform_at_hand() == "tpu" and not self.are_enough(arrays)
        param, *state = arrays

        def moved(nothing: jax.Array, *rest: jax.Array) -> tuple[jax.Array, ...]:
            return kernel(nothing, rest[-1], *rest[:-1])[:2]

        self.param = step_slices(moved, self.rows, state, [param])[1]
        self._state = step_slices(kernel, self.rows, (), arrays)[2:]
        return self.param, *self._state

    # --- reading --------------------------------------------------------------------------

    def read(self) -> jax.Array | None:
        """The rows ``[K, *D]`` of all entries, caught up.

        Of one out of range it may be anything. None if they are to be read from ``param``.
        """
        if not self._aside or self.rows.indices.shape == (0,):
            return None
        num_rows = rows_numbered(self._old[0].shape, self.rows.row_axes)
        distinct, numbers = number_by_runs(self.rows.indices, num_rows)
        return take_rows(self._moved(distinct), numbers, mode="promise_in_bounds")

    def _moved(self, indices: jax.Array) -> jax.Array:
        """Rows ``[U, *D]`` of the table, caught up."""
        rows = (read_rows(x, indices, self.rows.row_axes) for x in self._old)
        nothing = jnp.zeros((indices.shape[0], 0))
        return self._catch_up(nothing, *rows)[1]

    # --- the step -------------------------------------------------------------------------

    def have(self, state: Sequence[jax.Array]) -> bool:
        """Whether this is the state of these rows, caught up."""
        return [id(x) for x in state] == [id(x) for x in self._state]

    def in_step(
        self, kernel: Kernel, read: Sequence[jax.Array]
    ) -> tuple[Kernel, Sequence[jax.Array], Sequence[jax.Array], bool]:
        """``(kernel, read, state, every_row)`` of the step of a gradient of these rows.

        The kernel lets the arrays catch up first, which are those that came. With
        ``every_row`` all rows do the step.
        """
        if self._every_row:
            return kernel, read, self._state, True
        catch_up, (param, *state) = self._catch_up, self._old
        reads_old = self._aside and bool(read) and read[0] is self.param
        width = len(state)

        def stepped(g: jax.Array, *rest: jax.Array) -> tuple[jax.Array, ...]:
            read, state = rest[:-width], rest[-width:]
            # What becomes of the state follows from the state alone.
            row = read[0] if reads_old else jnp.zeros_like(g)
            _, row, *now = catch_up(jnp.zeros((g.shape[0], 0)), row, *state)
            return kernel(g, *((row,) if reads_old else read), *now)

        return stepped, (param,) if reads_old else read, state, False

    def updated(self, update: Leaf) -> Leaf:
        """The update of these rows by that step, noted for :meth:`added`."""
        if not (self._aside and update.facts.distinct):
            return update
        self._updated = update.indices
        facts = update.facts._replace(note=self)
        return update.of(update.values, update.indices, update.dense_shape, facts)

    def added(self, update: Leaf, param: jax.Array) -> jax.Array | None:
        """``param`` plus an update; None unless it is the one that was noted."""
        indices = self._updated
        if indices is None or update.indices is not indices or param is not self.param:
            return None
        rows = self._moved(indices) + update.values.astype(param.dtype)
        return set_rows(self._old[0], indices, rows)
