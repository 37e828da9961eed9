"""How a step from row gradients is run: chosen in one place, as a value that can be read.

Every threshold of the engine stands here, with the measurement that it rests on. Times are
ratios of steps that took turns in one run, on two x86 cores with jax 0.10.2.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jslices import _jax
from jslices._rows.access import room_for_distinct

Way = Literal["together", "in chunks", "all rows"]

#: Rows in a chunk: those of Adam's three arrays, 64 elements each, fill 1.5 MB and are
#: still in the cache, and in the table of pages, when they are written back. A fifth off a
#: step of 10,000 Zipf ids in a million rows of 64.
CHUNK_ROWS = 2048
#: So many entries, or entries of so many bytes, are stepped together: in chunks they take
#: 0.74 to 1.7 times as long, 1.2 in the median with uniform ids, 1.04 with Zipf ids (136
#: cells, rows of 1 to 64, 1e5 to 1e7 rows).
TOGETHER_ROWS, TOGETHER_BYTES = 2 * CHUNK_ROWS, 1.5e6
#: All rows are stepped from so many entries for each row of the table on. Below it the pass
#: takes longer than the rows named, and its sums take about four arrays ``[K, D]``.
ENTRIES_PER_ROW = 0.27
#: Rows of fewer bytes cost less in a pass than an entry does in a jump: in proportion,
#: fewer entries suffice.
SHORT_ROW_BYTES = 32
#: In tables of so many bytes, which no cache holds, the pass takes as long as its bytes,
#: and an entry as long as so many bytes of it, up to two entries a row.
LARGE_TABLE_BYTES, ENTRY_BYTES, MOST_ENTRIES_PER_ROW = 16 * 10**6, 192, 2
#: On a TPU a row is read and written with the 8 rows of its tile, a number of a vector with
#: 1,023 others. By the bytes that XLA counts for a v5e (compiled, not timed; V = 1e6), the
#: pass is the cheaper way from so many entries for each row on.
TPU_ENTRIES_PER_ROW, TPU_VECTOR_ENTRIES_PER_ROW, ONE_NUMBER_BYTES = 0.2, 0.002, 4
#: With fewer entries nothing is won by any way but the first.
FEW_ENTRIES = 512
#: A linear rule without state adds each entry by itself, unless rows are shorter than this
#: and each is named more than once: telling empty entries apart then takes as long as they.
SHORT_LINEAR_BYTES, LINEAR_ENTRIES_PER_ROW = 128, 2


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one table is stepped; ``str(plan)`` says it in words.

    Attributes:
      way: ``"together"``, ``"in chunks"`` or ``"all rows"``.
      entries: K, the entries of the gradient, duplicates counted.
      capacity: U, the entries of the update.
      sums: whether the entries of a row are summed first.
      chunk: the rows stepped at a time; for the way in chunks alone.
      why: the reason, in words.
    """

    way: Way
    entries: int
    capacity: int
    sums: bool = True
    chunk: int | None = None
    why: str = dataclasses.field(default="", compare=False)

    def __str__(self) -> str:
        how = {
            "together": "all together",
            "in chunks": f"in chunks of {self.chunk} distinct rows",
            "all rows": "as one pass over all rows of the table",
        }[self.way]
        duplicates = "duplicates summed first" if self.sums else "each entry by itself"
        return (
            f"{_count(self.entries)} entries are stepped {how}, {duplicates}, with room "
            f"for {_count(self.capacity)} rows: {self.why}"
        )


def choose_plan(
    gradient: jax.ShapeDtypeStruct | jax.Array,
    arrays: Sequence[jax.ShapeDtypeStruct | jax.Array],
    num_rows: int | None,
    platform: str = "cpu",
    *,
    linear: bool = False,
    unique: bool = False,
    at_hand: str | None = None,
) -> Plan:
    """The way a step takes, the first line that holds:

    ====================================================  ====================
    a table with enough entries for its rows              all rows
    a linear rule without state                           together, not summed
    not on a CPU (a loop would only launch kernels)       together
    few entries, or of few bytes, or no array to step     together
    bfloat16 state that XLA:CPU would widen for writing   together
    else                                                  in chunks
    ====================================================  ====================

    The shape of the update follows from the first line, and a program may be compiled for
    several platforms: there the platform at hand decides for all. Sizes that ``jax.export``
    leaves open are stepped together.

    Args:
      gradient: shape and dtype ``[K, *D]`` of the values.
      arrays: shapes and dtypes ``[V, ...]`` of what a step reads and writes by rows.
      num_rows: V; None where the gradient does not tell.
      platform: what the program is compiled for: ``"cpu"`` or another.
      linear: whether the rule is (:attr:`Rule.linear`).
      unique: whether no row is named twice, so that there is nothing to sum.
      at_hand: the platform of the process; None: ``platform``.
    """
    entries, sums = gradient.shape[0], not unique
    if _jax.is_symbolic(entries) or _jax.is_symbolic(num_rows):
        why = "how many there are is not known yet"
        return Plan("together", entries, entries, sums, why=why)
    enough = room_for_distinct(entries, num_rows)
    capacity = entries if unique else enough
    sizes = [_row_bytes(x) for x in (gradient, *arrays)]
    adds_up = linear and not arrays and gradient.dtype.itemsize >= 4
    if num_rows is not None and not unique:
        limit = _enough_for_all_rows(num_rows, max(sizes), adds_up, at_hand or platform)
        if entries >= limit:
            why = f"from {limit:,} entries on a pass over {num_rows:,} rows is faster"
            return Plan("all rows", entries, num_rows, why=why)
    if adds_up and entries >= FEW_ENTRIES:
        why = "the update of a sum is the sum of the updates, and there is no state"
        return Plan("together", entries, entries, sums=False, why=why)
    if platform != "cpu":
        why = "one kernel for each operation is fastest but on a CPU"
        return Plan("together", entries, capacity, sums, why=why)
    if not arrays:
        why = "there is no array whose rows a chunk could keep in the cache"
        return Plan("together", entries, capacity, sums, why=why)
    if capacity <= TOGETHER_ROWS or capacity * max(sizes) <= TOGETHER_BYTES:
        why = f"at most {TOGETHER_ROWS:,} rows, or {TOGETHER_BYTES / 1e6:g} MB of them"
        return Plan("together", entries, capacity, sums, why=why)
    if _jax.WIDENS_BFLOAT16 and any(x.dtype == jnp.bfloat16 for x in arrays):
        why = "this XLA makes bfloat16 arrays float32 to write, once a step at best"
        return Plan("together", entries, capacity, sums, why=why)
    why = "a chunk's rows are still in the cache when they are written back"
    return Plan("in chunks", entries, capacity, sums, CHUNK_ROWS, why)


def _enough_for_all_rows(
    num_rows: int, row_bytes: int, adds_up: bool, platform: str
) -> float:
    """From how many entries on all rows are stepped."""
    if platform == "tpu":
        one_number = row_bytes <= ONE_NUMBER_BYTES
        per_row = TPU_VECTOR_ENTRIES_PER_ROW if one_number else TPU_ENTRIES_PER_ROW
        return np.inf if adds_up else max(FEW_ENTRIES, math.ceil(num_rows * per_row))
    if adds_up:
        short = row_bytes <= SHORT_LINEAR_BYTES
        return max(FEW_ENTRIES, LINEAR_ENTRIES_PER_ROW * num_rows) if short else np.inf
    per_row = ENTRIES_PER_ROW * min(row_bytes / SHORT_ROW_BYTES, 1)
    if num_rows * row_bytes >= LARGE_TABLE_BYTES:
        per_row = min(max(per_row, row_bytes / ENTRY_BYTES), MOST_ENTRIES_PER_ROW)
    return max(FEW_ENTRIES, math.ceil(num_rows * per_row))


def _count(n: Any) -> str:
    return str(n) if _jax.is_symbolic(n) else f"{n:,}"


def _row_bytes(x: jax.ShapeDtypeStruct | jax.Array) -> int:
    return math.prod(x.shape[1:]) * x.dtype.itemsize
