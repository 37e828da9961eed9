"""The ids that all contenders are given."""

import functools

import numpy as np


@functools.cache
def _words(num_rows):
    """Row of the n-th most frequent word, and how often words up to it occur."""
    num_words = min(num_rows, 100_000)
    weights = 1.0 / np.arange(1, num_words + 1) ** 1.05
    rows = np.random.default_rng(1).permutation(num_rows)[:num_words]
    return rows.astype(np.int32), np.cumsum(weights / weights.sum())


def batches(num_rows, count, kind, number=8):
    """``number`` arrays of ids: ``"zipf"``, as words occur, or ``"uniform"``."""
    rng = np.random.default_rng(0)
    if kind == "uniform":
        return [rng.integers(0, num_rows, count, np.int32) for _ in range(number)]
    rows, edges = _words(num_rows)
    ranks = [np.searchsorted(edges, rng.random(count)) for _ in range(number)]
    return [rows[np.minimum(rank, len(rows) - 1)] for rank in ranks]
