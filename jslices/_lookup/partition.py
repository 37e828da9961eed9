"""A table in several shards: which shard holds an id, and at which row."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

STRATEGIES = ("mod", "div")


def as_tables(params: Any, who: str) -> list[jax.Array]:
    """The shards of a table, checked; one array is one shard."""
    if params is None or (isinstance(params, list | tuple) and not params):
        raise ValueError(f"{who} wants a table or a list of shards, got {params!r}")
    if isinstance(params, dict | str):
        raise TypeError(
            f"{who} wants a table or a list of shards, got a {type(params).__name__}"
        )
    shards = params if isinstance(params, list | tuple) else [params]
    tables = [jnp.asarray(shard) for shard in shards]
    if any(table.ndim < 1 for table in tables):
        raise ValueError(f"{who} wants a table [V, *D], got a scalar")
    kinds = {(table.dtype, table.shape[1:]) for table in tables}
    if len(kinds) > 1:
        given = ", ".join(f"{t.dtype}{list(t.shape)}" for t in tables)
        raise ValueError(f"{who} wants shards of one row shape and dtype, got {given}")
    return tables


def check_strategy(strategy: str, who: str) -> None:
    if strategy not in STRATEGIES:
        raise ValueError(
            f"{who} got partition_strategy={strategy!r}; it must be one of {STRATEGIES}"
        )


def num_ids(heights: Sequence[int], strategy: str, who: str, mode: str) -> int:
    """The number of ids that a table in shards of so many rows has."""
    count, total = len(heights), sum(heights)
    if strategy == "div" or count == 1:
        return total
    regular = [(total - shard + count - 1) // count for shard in range(count)]
    if list(heights) == regular:
        return total
    if mode == "check":
        raise ValueError(
            f"{who} got shards of {list(heights)} rows: under partition_strategy='mod' "
            f"not every id below the largest has a row, so mode='check' cannot name a "
            f"range; make them {regular}"
        )
    return max((count * (h - 1) + i + 1 for i, h in enumerate(heights) if h), default=0)


def local_rows(
    ids: jax.Array, heights: Sequence[int], strategy: str
) -> Iterator[tuple[jax.Array, jax.Array]]:
    """For every shard, in order: which ids are its own, and their rows in it.

    Args:
      ids: ``[*B]``, none negative.
      heights: the rows of each shard.
      strategy: ``"mod"``: id ``i`` is row ``i // n`` of shard ``i % n``. ``"div"``: the
        shards follow one another.

    Yields:
      ``(own, rows)``, bool and integers ``[*B]``; a foreign id has the empty slot, the
      height of the shard.
    """
    first = 0
    for shard, height in enumerate(heights):
        if strategy == "mod":
            rows = ids // len(heights)
            own = (ids % len(heights) == shard) & (rows < height)
        else:
            rows = ids - first
            own = (rows >= 0) & (rows < height)
            first += height
        yield own, jnp.where(own, rows, height)
