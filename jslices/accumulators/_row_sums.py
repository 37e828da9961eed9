"""Sums of rows on the host: what a sparse accumulator holds between two takes."""

import numpy as np

from jslices._errors import InvalidArgumentError


class RowSums:
    """The sum of every row seen so far, and how many gradients held it.

    A row keeps the slot it got when it first came, so that adding a gradient of K rows to
    U of them moves K rows and U integers, never U rows. Buffers grow by doubling.
    """

    def __init__(self, dtype: np.dtype) -> None:
        self.dtype = dtype
        self.rows = np.zeros(0, np.int64)  # [U], sorted
        self.slots = np.zeros(0, np.int64)  # [U], where each of them stands
        self.row_shape: tuple[int, ...] | None = None  # None until the first gradient
        self.sums = np.zeros(0, dtype)  # [room, *D]
        self.counts = np.zeros(0, np.int64)  # [room]

    def check(self, values: np.ndarray) -> None:
        """Refuses rows of another shape than those that are held."""
        held, came = self.row_shape, values.shape[1:]
        if held is None or came == held:
            return
        if len(came) != len(held):
            problem = f"expected values rank {len(held) + 1}, got {len(came) + 1}"
        else:
            axis = next(i for i, n in enumerate(held) if n != came[i])
            problem = f"expected values dim {axis + 1} to be {held[axis]}, got {came[axis]}"
        raise InvalidArgumentError(
            f"Shape mismatch: {problem}; the gradients since the last take have rows of "
            f"shape {held}, this one has rows of shape {came}"
        )

    def add(self, rows: np.ndarray, values: np.ndarray) -> None:
        """Adds ``values`` ``[K, *D]`` to ``rows`` ``[K]``, sorted and unique."""
        self.check(values)
        place = np.searchsorted(self.rows, rows)
        known = place < self.rows.size
        known[known] = self.rows[place[known]] == rows[known]
        new, used = ~known, self.rows.size
        slots = np.empty(rows.size, np.int64)
        slots[known] = self.slots[place[known]]
        slots[new] = np.arange(used, used + np.count_nonzero(new))
        all_rows = np.insert(self.rows, place[new], rows[new])
        all_slots = np.insert(self.slots, place[new], slots[new])
        sums, counts = self._with_room(all_rows.size, values.shape[1:])
        # Nothing above has changed anything, and nothing below can fail.
        self.row_shape = values.shape[1:]
        self.rows, self.slots, self.sums, self.counts = all_rows, all_slots, sums, counts
        with np.errstate(all="ignore"):
            sums[slots] += values
        counts[slots] += 1

    def _with_room(
        self, size: int, row_shape: tuple[int, ...]
    ) -> tuple[np.ndarray, np.ndarray]:
        room = self.counts.size
        if self.row_shape is not None and size <= room:
            return self.sums, self.counts
        room = max(size, 2 * room)
        sums = np.zeros((room, *row_shape), self.dtype)
        counts = np.zeros(room, np.int64)
        if used := self.rows.size:
            sums[:used], counts[:used] = self.sums[:used], self.counts[:used]
        return sums, counts

    def reduced(self, mean: bool) -> tuple[np.ndarray, np.ndarray]:
        """``(rows [U], values [U, *D])``, ascending; the mean divides row by row."""
        values = self.sums[self.slots]
        if not mean or not self.rows.size:
            return self.rows, values
        counts = self.counts[self.slots].reshape(-1, *[1] * (values.ndim - 1))
        return self.rows, divided(values, counts)


def divided(values: np.ndarray, counts: np.ndarray | int) -> np.ndarray:
    """``values / counts`` in the dtype of ``values``; 16-bit floats are rounded once."""
    wide = np.float32 if values.dtype.itemsize < 4 else values.dtype
    with np.errstate(all="ignore"):
        quotient = values.astype(wide) / np.asarray(counts, wide)
    return np.asarray(quotient, values.dtype)


def merged(indices: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``(rows, sums)``: rows sorted, each once; duplicates of one gradient are summed.

    16-bit floats are summed in float32 and rounded once.
    """
    if np.all(indices[1:] > indices[:-1]):
        return indices, values
    order = np.argsort(indices, kind="stable")
    ordered = indices[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    wide = values.astype(np.float32) if values.dtype.itemsize < 4 else values
    with np.errstate(all="ignore"):
        sums = np.add.reduceat(wide[order], starts, axis=0)
    return ordered[starts], sums.astype(values.dtype)
