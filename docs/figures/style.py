"""How the pictures look: two palettes, shapes and words, and SVG files for both.

A picture is a function ``(axes, ink)`` that draws in units of 1/100 of its width's pixels;
``ink`` has the colours. The background stays transparent.
"""

import pathlib
import re
from types import SimpleNamespace

import matplotlib

matplotlib.use("svg")
from matplotlib import patches, pyplot

HERE = pathlib.Path(__file__).parent
FONTS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"
INKS = {
    "light": SimpleNamespace(
        text="#1f2328",
        muted="#59636e",
        line="#c4cbd3",
        empty="#f0f2f5",
        row="#e36a1e",
        pale="#f6b98d",
        blue="#2f6fb3",
        green="#1f8a6b",
        violet="#7d55b8",
    ),
    "dark": SimpleNamespace(
        text="#e6edf3",
        muted="#9aa4af",
        line="#4a525c",
        empty="#262c34",
        row="#f58a42",
        pale="#a9622f",
        blue="#6aa9e9",
        green="#4cc3a0",
        violet="#b392f0",
    ),
}
plain = {"svg.fonttype": "none", "svg.hashsalt": "jslices", "font.family": "DejaVu Sans"}


def draw(name, width, height, picture):
    """``name-light.svg`` and ``name-dark.svg`` of so many pixels."""
    for theme, ink in INKS.items():
        with pyplot.rc_context(plain):
            figure = pyplot.figure(figsize=(width / 72, height / 72))
            axes = figure.add_axes((0, 0, 1, 1))
            axes.set(xlim=(0, width / 100), ylim=(0, height / 100))
            axes.axis("off")
            picture(axes, ink)
            save(figure, HERE / f"{name}-{theme}.svg")


def plot(name, columns, size, picture):
    """The same of plots side by side, of so many inches; ``picture(axes, ink)``."""
    for theme, ink in INKS.items():
        colors = {
            "axes.edgecolor": ink.line,
            "axes.labelcolor": ink.muted,
            "axes.titlesize": 11,
            "xtick.color": ink.muted,
            "ytick.color": ink.muted,
        }
        with pyplot.rc_context({**plain, **colors}):
            figure, axes = pyplot.subplots(1, columns, figsize=size)
            for part in axes:
                part.set(facecolor="none")
                part.spines[["top", "right"]].set_visible(False)
            picture(axes, ink)
            for part in axes:
                part.minorticks_off()
            figure.tight_layout(w_pad=3)
            save(figure, HERE / f"{name}-{theme}.svg")


def between(page, mark, text):
    """The page with a text between the marks that name what makes it."""
    begin = f"<!-- made by docs/figures/{mark} -->\n"
    before, rest = page.split(begin)
    after = rest.partition("<!-- end -->")[2]
    return f"{before}{begin}\n{text}\n\n<!-- end -->{after}"


def save(figure, path):
    figure.savefig(path, transparent=True, metadata={"Date": None})
    pyplot.close(figure)
    text = path.read_text().replace("'DejaVu Sans Mono'", MONO)
    text = text.replace("'DejaVu Sans'", FONTS)
    path.write_text(re.sub(r" +$", "", text, flags=re.M))


def box(axes, x, y, width, height, fill, edge="none", radius=0.03, **more):
    style = f"round,pad=0,rounding_size={radius}"
    shape = patches.FancyBboxPatch(
        (x, y), width, height, style, facecolor=fill, edgecolor=edge, **more
    )
    axes.add_patch(shape)


def rows(axes, x, y, width, height, fills, gap=0.03, edges=None):
    """Rows of an array from the top at ``y`` down; returns the middle of each."""
    middles = []
    for number, fill in enumerate(fills):
        bottom = y - (number + 1) * height - number * gap
        edge = edges[number] if edges else "none"
        box(axes, x, bottom, width, height, fill, edge, linewidth=0.8)
        middles.append(bottom + height / 2)
    return middles


def say(axes, x, y, text, color, size=14, at="center", mono=False, **more):
    family = "DejaVu Sans Mono" if mono else "DejaVu Sans"
    axes.text(
        x, y, text, color=color, fontsize=size, ha=at, va="center", family=family, **more
    )


def arrow(axes, start, end, color, bend=0.0, width=1.4, **more):
    axes.add_patch(
        patches.FancyArrowPatch(
            start,
            end,
            connectionstyle=f"arc3,rad={bend}",
            arrowstyle="-|>,head_length=5,head_width=2.6",
            color=color,
            linewidth=width,
            shrinkA=0,
            shrinkB=0,
            **more,
        )
    )
