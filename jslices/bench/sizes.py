"""Sizes of a step, with its ids, bytes and plan."""

import bisect
import dataclasses
import functools
import inspect
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jslices as js
from jslices.optim import Plan

LEARNING_RATE = 1e-3
ID_BYTES = 4
BATCHES = 16
# As in benchmarks/step.py: a larger table does not have more words in use.
ZIPF_WORDS, ZIPF_EXPONENT = 100_000, 1.05
MEMINFO = Path("/proc/meminfo")
USABLE = 0.9  # of the available memory: other programs need some


def optimizer_names() -> list[str]:
    """The optimizers of jslices that need no more than a learning rate."""

    def suffices(parameters: Mapping[str, inspect.Parameter]) -> bool:
        needed = {name for name, p in parameters.items() if p.default is p.empty}
        return "learning_rate" in parameters and needed <= {"learning_rate"}

    functions = filter(inspect.isfunction, vars(js.optim).values())
    each = ((f.__name__, inspect.signature(f).parameters) for f in functions)
    return sorted(name for name, parameters in each if suffices(parameters))


@dataclasses.dataclass(frozen=True)
class Sizes:
    """One step: ``ids`` ids are looked up in a table ``[rows, dim]``."""

    rows: int
    dim: int
    ids: int
    optimizer: str = "adam"
    dtype: str = "float32"
    distribution: str = "zipf"
    untouched: str = "lazy"

    def __str__(self) -> str:
        exact = f" {self.untouched}" if self.untouched != "lazy" else ""
        return (
            f"{self.optimizer}{exact}, table {self.rows:,} x {self.dim} {self.dtype}, "
            f"{self.ids:,} ids a step"
        )

    def but(self, **changes: Any) -> "Sizes":
        """These sizes with some of them changed."""
        return dataclasses.replace(self, **changes)

    def dense(self) -> "Sizes":
        """These sizes where no row is untouched."""
        return self.but(untouched="lazy")

    def make_optimizer(self) -> js.optim.GradientTransformation:
        options = {} if self.untouched == "lazy" else {"untouched": self.untouched}
        return getattr(js.optim, self.optimizer)(LEARNING_RATE, **options)

    def table_shape(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.rows, self.dim), jnp.dtype(self.dtype))

    @property
    def row_bytes(self) -> int:
        """Of a row of the table, and of its gradient."""
        return self.dim * jnp.dtype(self.dtype).itemsize

    @property
    def table_bytes(self) -> int:
        return self.rows * self.row_bytes

    @functools.cached_property
    def state_bytes(self) -> int:
        """Of the optimizer's state for the table."""
        state = jax.eval_shape(self.make_optimizer().init, self.table_shape())
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(state))

    @property
    def row_gradient_bytes(self) -> int:
        """Of the gradient as rows: a row and an index for each id."""
        return self.ids * (self.row_bytes + ID_BYTES)

    @property
    def words(self) -> int:
        """How many rows the ids are drawn from."""
        return min(ZIPF_WORDS, self.rows) if self.distribution == "zipf" else self.rows

    def distinct(self) -> float:
        """The expected number of distinct ids in a step."""
        if self.distribution == "zipf":
            return float(-np.expm1(self.ids * np.log1p(-_zipf(self.words))).sum())
        if self.rows == 1:
            return 1.0
        return -math.expm1(self.ids * math.log1p(-1 / self.rows)) * self.rows

    def moved_by_rows(self, distinct: float) -> float:
        """The fewest bytes that a step with row gradients must move.

        The gradient is read once; each distinct row of table and state is read and written.
        """
        per_row = self.row_bytes + self.state_bytes / self.rows
        return self.ids * self.row_bytes + 2 * distinct * per_row

    def moved_by_dense(self) -> float:
        """The same with dense gradients: written and read, and so are all rows."""
        return 2 * self.table_bytes + 2 * (self.table_bytes + self.state_bytes)

    def needed_by_rows(self, platform: str) -> int:
        """Bytes in use at most by a step with row gradients, its table and its state."""
        resident = self.table_bytes + self.state_bytes + BATCHES * self.ids * ID_BYTES
        # The engine makes at most ten arrays [K, D], in float32 even if the table is not.
        temporaries = 10 * self.ids * (self.dim * 4 + ID_BYTES)
        if plan_of(self, platform).way == "all rows":
            temporaries += 4 * self.rows * (self.dim * 4 + ID_BYTES)
        elif platform == "cpu" and jnp.dtype(self.dtype).itemsize < 4:
            # Until some release after 0.10 XLA:CPU widens the whole array of a scatter.
            temporaries += 2 * (self.table_bytes + self.state_bytes)
        return resident + temporaries

    def needed_by_dense(self) -> int:
        """The same with dense gradients: a gradient and an update of the table's size."""
        resident = self.table_bytes + self.state_bytes
        return resident + 2 * self.rows * self.dim * 4 + 2 * self.ids * self.dim * 4

    def draw(self, count: int) -> list[np.ndarray]:
        """``count`` batches of ids, int32 ``[ids]``; always the same."""
        rng = np.random.default_rng(0)
        if self.distribution == "uniform":
            return [*rng.integers(0, self.rows, (count, self.ids), dtype=np.int32)]
        edges = np.cumsum(_zipf(self.words))
        # At rows all over the table: words are not stored in the order of frequency.
        row_of = np.random.default_rng(1).choice(self.rows, self.words, replace=False)
        ranks = [np.searchsorted(edges, rng.random(self.ids)) for _ in range(count)]
        return [row_of[np.minimum(r, self.words - 1)].astype(np.int32) for r in ranks]


def _zipf(words: int) -> np.ndarray:
    """The n-th most frequent word occurs about 1/n times as often as the first."""
    if words == 1:
        return np.array([1 - 1e-12])  # one word is drawn each time; log1p(-1) is infinite
    weights = 1.0 / np.arange(1, words + 1) ** ZIPF_EXPONENT
    return weights / weights.sum()


def plan_of(sizes: Sizes, platform: str) -> Plan:
    """How the optimizer steps the rows of the table."""
    table = sizes.table_shape()
    rows = jax.ShapeDtypeStruct((sizes.ids, sizes.dim), table.dtype)
    numbers = jax.ShapeDtypeStruct((sizes.ids,), jnp.int32)
    slices = functools.partial(js.IndexedSlices, dense_shape=table.shape)
    gradient = jax.eval_shape(slices, rows, numbers)
    return sizes.make_optimizer().plan(gradient, table, platform)  # type: ignore[no-any-return]


def available(device: jax.Device, meminfo: Path = MEMINFO) -> int | None:
    """Bytes of memory that are still available; None if unknown."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return int((stats["bytes_limit"] - stats.get("bytes_in_use", 0)) * USABLE)
    if device.platform != "cpu" or not meminfo.exists():
        return None
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(int(line.split()[1]) * 1024 * USABLE)
    return None


def largest_rows(sizes: Sizes, platform: str, room: int) -> int:
    """The largest number of rows that fit into ``room`` bytes with row gradients, or 0."""

    def needed(rows: int) -> int:
        return sizes.but(rows=rows).needed_by_rows(platform)

    # The plan may change with the rows, so formulas do not give it at once.
    return max(bisect.bisect_right(range(sizes.rows), room, lo=1, key=needed) - 1, 0)
