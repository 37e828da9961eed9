"""What is measured: its sizes, its ids, and how many bytes they are."""

import dataclasses
import functools
import inspect
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jslices as js

LEARNING_RATE = 1e-3
ID_BYTES = 4
# As in benchmarks/step.py: of a larger table the same number of words is in use.
ZIPF_WORDS, ZIPF_EXPONENT = 100_000, 1.05


def optimizer_names() -> list[str]:
    """The optimizers of jslices: what it exports that begins with a learning rate."""
    return sorted(
        name
        for name, thing in vars(js.optim).items()
        if inspect.isfunction(thing)
        and "learning_rate" in inspect.signature(thing).parameters
    )


@dataclasses.dataclass(frozen=True)
class Sizes:
    """One step: ``ids`` ids are looked up in a table ``[rows, dim]``."""

    rows: int
    dim: int
    ids: int
    optimizer: str = "adam"
    dtype: str = "float32"
    distribution: str = "zipf"

    def but(self, **changes: Any) -> "Sizes":
        """These sizes with some of them changed."""
        return dataclasses.replace(self, **changes)

    def make_optimizer(self) -> js.optim.GradientTransformation:
        return getattr(js.optim, self.optimizer)(LEARNING_RATE)

    def table_shape(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.rows, self.dim), jnp.dtype(self.dtype))

    @property
    def row_bytes(self) -> int:
        """A row of the table, which is also one of its gradient."""
        return self.dim * jnp.dtype(self.dtype).itemsize

    @property
    def table_bytes(self) -> int:
        return self.rows * self.row_bytes

    @functools.cached_property
    def state_bytes(self) -> int:
        """The optimizer's state of the table."""
        state = jax.eval_shape(self.make_optimizer().init, self.table_shape())
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(state))

    @property
    def row_gradient_bytes(self) -> int:
        """The gradient as rows: a row and an id for each id."""
        return self.ids * (self.row_bytes + ID_BYTES)

    @property
    def words(self) -> int:
        """How many rows are drawn from."""
        return min(ZIPF_WORDS, self.rows) if self.distribution == "zipf" else self.rows

    def distinct(self) -> float:
        """How many distinct ids a step is expected to have."""
        if self.distribution == "zipf":
            return float(-np.expm1(self.ids * np.log1p(-_zipf(self.words))).sum())
        if self.rows == 1:
            return 1.0
        return -math.expm1(self.ids * math.log1p(-1 / self.rows)) * self.rows

    def moved_by_rows(self, distinct: float) -> float:
        """Bytes that a step with row gradients cannot do without moving.

        The gradient once, and each distinct row of the table and of the state read and
        written.
        """
        per_row = self.row_bytes + self.state_bytes / self.rows
        return self.ids * self.row_bytes + 2 * distinct * per_row

    def moved_by_dense(self) -> float:
        """The same with dense gradients: their writing and reading, and all rows."""
        return 2 * self.table_bytes + 2 * (self.table_bytes + self.state_bytes)

    def draw(self, count: int) -> list[np.ndarray]:
        """``count`` batches of ids, int32 ``[ids]``; always the same."""
        rng = np.random.default_rng(0)
        if self.distribution == "uniform":
            return [
                rng.integers(0, self.rows, self.ids, dtype=np.int32) for _ in range(count)
            ]
        edges = np.cumsum(_zipf(self.words))
        # At rows all over the table, as words are not stored by their frequency.
        row_of = np.random.default_rng(1).choice(self.rows, self.words, replace=False)
        ranks = [np.searchsorted(edges, rng.random(self.ids)) for _ in range(count)]
        return [row_of[np.minimum(r, self.words - 1)].astype(np.int32) for r in ranks]


def _zipf(words: int) -> np.ndarray:
    """The n-th most frequent word occurs about 1/n times as often as the first."""
    if words == 1:
        return np.array([1 - 1e-12])  # one word is drawn each time; log1p(-1) is infinite
    weights = 1.0 / np.arange(1, words + 1) ** ZIPF_EXPONENT
    return weights / weights.sum()
