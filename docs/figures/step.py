"""How a step of an optimizer runs: only rows with a gradient are read and written."""

from style import arrow, box, draw, rows, say

HEIGHT, GAP = 0.17, 0.04
TOUCHED = (2, 6)
V = 9


def array(axes, ink, x, name):
    """An array ``[V, D]`` with the touched rows; returns the middles of all."""
    fills = [ink.row if n in TOUCHED else ink.empty for n in range(V)]
    edges = ["none" if n in TOUCHED else ink.line for n in range(V)]
    middles = rows(axes, x, 2.35, 0.62, HEIGHT, fills, GAP, edges)
    say(axes, x + 0.31, 2.52, name, ink.text, 12, mono=True)
    return middles


def picture(axes, ink):
    titles = (
        (0.75, "1", "gradient"),
        (2.35, "2", "sum duplicates"),
        (4.5, "3", "rule, on these rows"),
        (7.25, "4", "write these rows"),
    )
    for x, number, words in titles:
        say(axes, x, 3.1, number, ink.row, 15, weight="bold")
        say(axes, x, 2.87, words, ink.text, 13)

    middles = rows(axes, 0.6, 1.82, 0.62, HEIGHT, [ink.pale, ink.row, ink.pale], GAP)
    for middle, index in zip(middles, (2, 6, 2), strict=True):
        say(axes, 0.45, middle - 0.01, str(index), ink.text, 12)
    say(axes, 0.91, 1.0, "K rows", ink.muted, 12)
    arrow(axes, (1.4, 1.51), (1.85, 1.51), ink.muted)

    middles = rows(axes, 2.2, 1.7, 0.62, HEIGHT, [ink.row, ink.row], GAP)
    for middle, index in zip(middles, (2, 6), strict=True):
        say(axes, 2.05, middle - 0.01, str(index), ink.text, 12)
    say(axes, 2.51, 1.0, "U rows", ink.muted, 12)
    arrow(axes, (3.0, 1.51), (3.4, 1.51), ink.muted)

    box(axes, 3.5, 0.75, 2.0, 1.5, "none", ink.line, 0.06, linewidth=1)
    formulas = ("mu = b1 mu + (1 - b1) g", "nu = b2 nu + (1 - b2) g²", "p -= lr mu / √nu")
    for y, formula in zip((1.88, 1.5, 1.12), formulas, strict=True):
        say(axes, 4.5, y, formula, ink.text, 11, mono=True)
    say(axes, 4.5, 0.52, "Adam, for example", ink.muted, 12)
    arrow(axes, (6.1, 1.72), (5.6, 1.72), ink.muted)
    say(axes, 5.85, 1.86, "read", ink.muted, 11)
    arrow(axes, (5.6, 1.3), (6.1, 1.3), ink.muted)
    say(axes, 5.85, 1.14, "write", ink.muted, 11)

    for x, name in ((6.25, "p"), (6.95, "mu"), (7.65, "nu")):
        array(axes, ink, x, name)
    say(axes, 7.25, 0.17, "the others: neither read nor written", ink.muted, 12)


def main():
    draw("step", 860, 330, picture)


if __name__ == "__main__":
    main()
