"""The table and the picture of docs/keyed_tables.md, from benchmarks/results.

python docs/figures/keyed.py
"""

import json
import pathlib

from style import between, plot

ROOT = pathlib.Path(__file__).parents[2]
PAGE = ROOT / "docs" / "keyed_tables.md"
FOUND = json.loads((ROOT / "benchmarks" / "results" / "keyed_streams.json").read_text())
ABOUT = {
    "fixed": "always the same favourites",
    "news": "20 new ids a step",
    "noise": "half never come again",
}


def table():
    names = [name for name in FOUND["news"] if isinstance(FOUND["news"][name], dict)]
    lines = ["| | " + " | ".join(ABOUT.values()) + " |", "|---|" + "---:|" * len(ABOUT)]
    for name in names:
        late = " | ".join(f"{FOUND[kind][name]['late']:.3f}" for kind in ABOUT)
        lines.append(f"| {name} | {late} |")
    best = " | ".join(f"{FOUND[kind]['best']:.3f}" for kind in ABOUT)
    return "\n".join([*lines, f"| the best possible | {best} |"])


def picture(axes, ink):
    loss, in_use, evicted = axes
    news, colors = FOUND["news"], {"a row for each id": ink.muted, "hashed": ink.row}
    colors |= {"lru": ink.blue, "tinylfu, second sighting": ink.green}
    for name, color in colors.items():
        shown = news[name]
        steps = [news["every"] * (number + 1) for number in range(len(shown["loss"]))]
        loss.plot(steps, shown["loss"], color=color, label=name)
        if "in_use" in shown:
            in_use.plot(steps, [100 * x for x in shown["in_use"]], color=color)
            evicted.plot(steps, shown["evicted"], color=color)
    loss.legend(frameon=False, labelcolor=ink.text, loc="upper right", fontsize=7.5)
    loss.set_ylim(0.58, 0.82)
    loss.set_ylabel("loss")
    titles = {
        loss: "A stream of news",
        in_use: "Rows in use, %",
        evicted: "Evictions a step",
    }
    for part, title in titles.items():
        part.set_title(title, color=ink.text)
        part.set_xlabel("step of 512 ids")
    in_use.set_ylim(0, 105)
    evicted.set_ylim(0, None)


def main():
    PAGE.write_text(between(PAGE.read_text(), "keyed.py: table", table()))
    plot("keyed", 3, (9.6, 3.2), picture)


if __name__ == "__main__":
    main()
