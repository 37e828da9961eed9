"""Which way a step takes, in words."""

import bisect
import math

import jax.numpy as jnp

from jslices._bench.sizes import Sizes
from jslices._devices.memory import MAPPED, is_large
from jslices.optim._engine.in_place import CHUNK, WIDENS_BFLOAT16, are_few
from jslices.optim._engine.step import SMALL, covers, covers_by_slot

AT_ONCE = "few rows at once"
QUARTERS = "few rows, a quarter at a time"
ALL_AT_ONCE = "its rows at once"
CHUNKS = "its rows in chunks"
FOLDED = "in the gradient's own memory"
ALL_ROWS = "all rows"
EACH_SLOT = "each id by itself"

ABOUT = {
    AT_ONCE: "duplicates are summed, then the distinct rows are stepped together",
    QUARTERS: "duplicates are summed, then the distinct rows are stepped a quarter at a "
    "time, as this optimizer would need much memory for all of them",
    ALL_AT_ONCE: "duplicates are summed, then the distinct rows are stepped together",
    CHUNKS: "duplicates are summed, then the distinct rows are stepped some at a time, "
    "while they are in the cache",
    FOLDED: "sums and update overwrite the gradient, as a second array of its size "
    "would be slower",
    ALL_ROWS: "so many ids name much of the table that one pass over all of it is faster",
    EACH_SLOT: "without state there is nothing to sum for; each id's update is added",
}

#: The optimizers whose ``Rule.quarters`` is set by default, and whose ``Rule.held`` is.
IN_QUARTERS = ("adadelta", "amsgrad", "ftrl")
HELD = {"adadelta": 3, "ftrl": 3, "lamb": 1.2}


def way_of(sizes: Sizes, platform: str) -> str:
    """One of the names above, for ``jslices.value_and_grad`` and the optimizer."""
    whole = platform != "cpu" or (WIDENS_BFLOAT16 and sizes.dtype == "bfloat16")
    many = ALL_AT_ONCE if whole else CHUNKS
    full = jnp.dtype(sizes.dtype).itemsize >= 4
    if sizes.optimizer == "sgd":  # which has no state
        if full and _covers(sizes):
            return ALL_ROWS
        by_slot = platform == "cpu" and full and sizes.ids >= SMALL
        return EACH_SLOT if by_slot else ALL_AT_ONCE
    # adafactor does its rows by itself.
    if sizes.optimizer != "adafactor":
        if _covers(sizes):
            return ALL_ROWS
        large = is_large(sizes.ids, sizes.row_bytes) and sizes.ids > CHUNK
        if large and full and platform == "cpu":
            return FOLDED
    if not are_few(sizes.ids, sizes.row_bytes):
        return many
    quarters = sizes.optimizer in IN_QUARTERS and sizes.ids > 1 and not whole
    return QUARTERS if quarters else AT_ONCE


def ids_for_all_rows(sizes: Sizes, platform: str) -> int | None:
    """From how many ids on a step goes over all rows; None if it never does."""
    if way_of(sizes.but(ids=4 * sizes.rows + SMALL), platform) != ALL_ROWS:
        return None
    counts = range(1, 4 * sizes.rows + SMALL + 1)
    goes = lambda ids: _covers(sizes.but(ids=ids))  # noqa: E731
    return counts[bisect.bisect_left(counts, True, key=goes)]


def _covers(sizes: Sizes) -> bool:
    shape = (sizes.ids, sizes.row_bytes, sizes.rows)
    if sizes.optimizer == "sgd":
        return covers_by_slot(*shape)
    return covers(*shape, HELD.get(sizes.optimizer, 1))


def ids_for_large_gradient(sizes: Sizes) -> int:
    """From how many ids on two arrays of the gradient's size are mapped at each step."""
    return math.ceil(MAPPED / 2 / sizes.row_bytes)
