"""Rows of a host table on a device, and what is computed of them there."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jslices import InvalidArgumentError
from jslices._host_table.layout import Layout
from jslices.extend import State


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HostRows:
    """Rows of a :class:`jslices.HostTable` on a device, with their rows of the state.

    A pytree of arrays, for a jitted step, which may donate it. Its arrays have room for U
    rows; those that no id of the batch names are empty.

    Attributes:
      words: ``[U, words]``, the records.
      shared: the values that the optimizer keeps for all rows together.
      ticket: int32 ``[]``, the number of the call of ``fetch``.
      layout: the layout of a record.
    """

    words: Any  # like the next two of NumPy until they are put on a device
    shared: tuple[Any, ...]
    ticket: Any
    layout: Layout = dataclasses.field(metadata={"static": True})

    def unpack(self) -> tuple[jax.Array, State]:
        """The rows and the optimizer's state of them, as arrays; for use under ``jit``.

        Returns:
          ``(table, state)``: an array ``[U, *D]`` in which the ids that ``fetch`` returned
          number the rows, and what ``tx.init`` would keep for it. Rows of an optimizer with
          ``untouched="exact"`` have caught up.
        """
        table, state = self.layout.unpack(self.words, self.shared)
        if self.layout.tx.catches_up:
            table, state = self.layout.tx.flush(table, state)
        return table, state

    def pack(self, table: jax.Array, state: State) -> "HostRows":
        """The same rows with other contents, for ``store``.

        Args:
          table: ``[U, *D]``, of the dtype that it had.
          state: the optimizer's state of it.

        Raises:
          InvalidArgumentError: for arrays of other shapes or dtypes.
        """
        words, shared = self.layout.pack(table, state)
        if words.shape != self.words.shape:
            raise InvalidArgumentError(
                f"rows.pack(table, state) got {words.shape[0]} rows, and these are "
                f"{self.words.shape[0]}"
            )
        return dataclasses.replace(self, words=words, shared=tuple(shared))


@functools.partial(jax.jit, static_argnums=0)
def begun(layout: Layout, start: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
    """Records of rows ``[n, *D]`` that were never stepped, and the shared values."""
    return layout.pack(start, layout.tx.init(start))


@jax.jit
def caught_up(rows: HostRows) -> tuple[jax.Array, HostRows]:
    """Make up the steps that rows have missed; returns their parameters and the rows."""
    table, state = rows.unpack()
    return table, rows.pack(table, state)


def with_pending(
    rows: HostRows, numbers: np.ndarray, others: np.ndarray, pending: HostRows
) -> HostRows:
    """Update rows by those of a step that is not written yet.

    ``numbers`` ``[n]`` are those of the rows, ``others`` those of the step.
    """
    _, of_step, here = np.intersect1d(others, numbers, True, return_indices=True)
    source = np.full(len(rows.words), len(pending.words), np.int32)
    source[here] = of_step
    words, shared = _patched(rows.words, source, pending.words, pending.shared)
    return HostRows(words, shared, rows.ticket, rows.layout)


@jax.jit
def _patched(
    words: jax.Array, source: jax.Array, pending: jax.Array, shared: tuple[jax.Array, ...]
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Replace records that have a source; copies all, as a step may donate them."""
    changed = (source < pending.shape[0])[:, None]
    new = pending.at[source].get(mode="fill", fill_value=0)
    return jnp.where(changed, new, words), tuple(map(jnp.copy, shared))
