"""The picture of docs/speed.md of what commits cost, from benchmarks/results/history.jsonl.

python docs/figures/history.py
"""

import json
import math
import pathlib

from style import plot

FILE = pathlib.Path(__file__).parents[2] / "benchmarks" / "results" / "history.jsonl"
DENSE = "dense"


def picture(axes, ink):
    lines = [json.loads(line) for line in FILE.read_text().splitlines()]
    steps, compiled, kernels = axes
    colors = {"exact": ink.row, "lazy": ink.blue, DENSE: ink.muted}

    def draw(part, kind, values):
        # A line without kernels leaves a gap.
        part.plot(range(len(lines)), values, "o-", color=colors[kind], label=kind)

    for kind in ("exact", "lazy"):
        times = [line["step_ms"]["1000000"] for line in lines]
        draw(steps, kind, [each[DENSE] / each[kind] for each in times])
        times = [line["compile_cpu_s"] for line in lines]
        draw(compiled, kind, [each[kind] / each[DENSE] for each in times])
    for kind in colors:
        draw(kernels, kind, [line["kernels"].get(kind, math.nan) for line in lines])
    titles = "Step, times as fast", "Compilation, times as long", "Kernels for an H100"
    labels = [f"{line['commit']}\n{line['committed'][5:]}" for line in lines]
    for part, title in zip(axes, titles, strict=True):
        part.set_title(title, color=ink.text)
        part.set_xticks(range(len(lines)), labels)
        part.set_xlim(-0.5, len(lines) - 0.5)
        part.set_ylim(0, 1.4 * part.get_ylim()[1])
    beside = dict(ncols=3, loc="upper center", handlelength=1, columnspacing=1)
    kernels.legend(frameon=False, labelcolor=ink.text, **beside)


def main():
    plot("history", 3, (8.6, 3.0), picture)


if __name__ == "__main__":
    main()
