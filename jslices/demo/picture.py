"""The demo's ``--plot``: words as a map on which neighbours lie side by side."""

import argparse
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jslices._install import install_command

WORDS, GROUPS, LABELS = 1_000, 10, 100
refused = functools.partial(argparse.ArgumentError, None)


def check(file: Path) -> None:
    """``argparse.ArgumentError`` if no picture can be written there."""
    try:
        import sklearn  # noqa: F401
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise refused(
            f"--plot needs matplotlib and scikit-learn: {install_command('demo')}"
        ) from None
    suffixes = sorted(FigureCanvasBase.filetypes.keys() - {"pgf"})  # which needs LaTeX
    if file.suffix.lower().lstrip(".") not in suffixes:
        raise refused(f"--plot {file}: the name must end in .{', .'.join(suffixes)}")
    if not file.absolute().parent.is_dir():
        raise refused(f"--plot {file}: no such folder: {file.absolute().parent}")


def draw(vectors: np.ndarray, words: Sequence[str], file: Path) -> None:
    """Writes a picture of vectors ``[n, D]``, frequent words first.

    Directions count, not lengths: t-SNE of the normalized vectors, coloured by the clusters
    that k-means finds in all ``D`` dimensions.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from sklearn.cluster import KMeans
    from sklearn.manifold import TSNE

    vectors = vectors[:WORDS]
    unit = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    # Every word has at least one neighbour, in a text of a few words too.
    perplexity = min(30, max(1, (len(unit) - 1) // 3))
    places = TSNE(perplexity=perplexity, init="random", random_state=0).fit_transform(unit)
    groups = min(GROUPS, len(unit))
    cluster = KMeans(groups, n_init=4, random_state=0).fit_predict(unit)

    figure = Figure(figsize=(12, 9), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.scatter(
        places[:, 0], places[:, 1], s=9, c=cluster, cmap="tab10", alpha=0.55, linewidths=0
    )
    axes.set(xticks=[], yticks=[])
    axes.set_title(
        f"The {len(unit):,} most frequent words: those used alike lie together\n"
        f"(t-SNE of their vectors, {groups} colours by k-means)",
        fontsize=13,
    )
    canvas.draw()  # the layout, before texts are measured
    _label(axes, canvas.get_renderer(), places, words)
    figure.savefig(file, dpi=120)


def _label(axes: Any, renderer: Any, places: np.ndarray, words: Sequence[str]) -> None:
    """Names the most frequent words whose names cover no other name."""
    taken: list[Any] = []
    for place, word in zip(places, words, strict=False):
        text = axes.annotate(
            word, place, xytext=(0, 3), textcoords="offset points", ha="center", fontsize=9
        )
        box = text.get_window_extent(renderer).expanded(1.1, 1.2)
        if any(box.overlaps(each) for each in taken):
            text.remove()
            continue
        taken.append(box)
        if len(taken) == LABELS:
            return
