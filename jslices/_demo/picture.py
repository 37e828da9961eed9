"""A picture of word vectors."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg


def supported_suffixes() -> list[str]:
    """The kinds of picture that can be written."""
    return sorted(FigureCanvasAgg.filetypes)


def draw_words(vectors: np.ndarray, words: Sequence[str], file: Path) -> None:
    """Writes the words at the two main directions of their vectors ``[n, D]``."""
    unit = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    centred = unit - unit.mean(axis=0)
    left, scale, _ = np.linalg.svd(centred, full_matrices=False)
    places = left[:, :2] * scale[:2]
    figure, axes = plt.subplots(figsize=(14, 10), layout="constrained")
    axes.scatter(places[:, 0], places[:, 1], s=4, color="tab:blue")
    for place, word in zip(places, words, strict=False):
        axes.annotate(word, place, fontsize=7, alpha=0.8)
    axes.set(
        title=f"the {len(vectors)} most frequent words",
        xlabel="first principal direction",
        ylabel="second principal direction",
    )
    figure.savefig(file, dpi=120)
    plt.close(figure)
