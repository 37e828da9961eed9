"""Boxes: a range along each axis of an array."""

import math
from collections.abc import Iterator, Sequence

import numpy as np

#: As an index of the array.
Box = tuple[slice, ...]

BLOCK_BYTES = 1 << 26  #: of an array that are copied at a time


def box_at(start: Sequence[int], sizes: Sequence[int]) -> Box:
    """The box of these sizes that begins there."""
    return tuple(slice(a, a + n) for a, n in zip(start, sizes, strict=True))


def whole(shape: Sequence[int]) -> Box:
    """All of an array."""
    return tuple(slice(0, n) for n in shape)


def shape_of(box: Box) -> tuple[int, ...]:
    """The sizes of a box."""
    return tuple(part.stop - part.start for part in box)


def overlap(a: Box, b: Box) -> tuple[Box, Box] | None:
    """The intersection of two boxes, as a box within each; None if it is empty."""
    within_a, within_b = [], []
    for x, y in zip(a, b, strict=True):
        start, stop = max(x.start, y.start), min(x.stop, y.stop)
        if stop <= start:
            return None
        within_a.append(slice(start - x.start, stop - x.start))
        within_b.append(slice(start - y.start, stop - y.start))
    return tuple(within_a), tuple(within_b)


def rows_within(
    at: Sequence[np.ndarray], box: Box
) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """Which of the rows at these coordinates lie in a box, and where in it."""
    pairs = list(zip(at, box, strict=True))
    fits = [(n >= part.start) & (n < part.stop) for n, part in pairs]
    inside = np.flatnonzero(np.all(fits, axis=0))
    return inside, tuple(n[inside] - part.start for n, part in pairs)


def row_blocks(
    shape: Sequence[int], itemsize: int, block_bytes: int = BLOCK_BYTES
) -> Iterator[slice]:
    """Divide rows into blocks of at most so many bytes."""
    size = max(1, block_bytes // max(1, math.prod(shape[1:]) * itemsize))
    for start in range(0, shape[0], size):
        yield slice(start, min(start + size, shape[0]))


def is_partition(boxes: Sequence[Box], shape: Sequence[int]) -> bool:
    """True if boxes hold every element of an array of this shape once."""
    if any(part.stop > n for box in boxes for part, n in zip(box, shape, strict=True)):
        return False
    sizes = [math.prod(shape_of(box)) for box in boxes]
    solid = [box for box, size in zip(boxes, sizes, strict=True) if size]
    ends = np.array([[(part.start, part.stop) for part in box] for box in solid])
    for i in range(1, len(ends) if shape else 0):
        starts, stops = ends[:i, :, 0], ends[:i, :, 1]
        meet = (starts < ends[i, :, 1]) & (ends[i, :, 0] < stops)
        if meet.all(axis=1).any():
            return False
    return sum(sizes) == math.prod(shape)
