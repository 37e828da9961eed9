"""How a dense gradient and a row gradient of one lookup differ."""

from style import draw, rows, say

V, LOOKED_UP = 12, (3, 9)


def column(axes, ink, x):
    """The first rows of an array ``[V, D]``, and dots for the others."""
    fills = [ink.row if n in LOOKED_UP else ink.empty for n in range(V)]
    edges = ["none" if n in LOOKED_UP else ink.line for n in range(V)]
    middles = rows(axes, x, 3.2, 1.1, 0.17, fills, 0.04, edges)
    for number in range(3):
        say(axes, x + 0.55, 0.64 - 0.06 * number, "·", ink.muted, 12)
    return middles


def picture(axes, ink):
    """Narrow enough for a phone, whose screen shows it whole."""
    say(axes, 0.85, 3.45, "table[ids]", ink.text, mono=True)
    middles = column(axes, ink, 0.3)
    for number in LOOKED_UP:
        say(axes, 0.2, middles[number] - 0.01, str(number), ink.text, 13, "right")
    say(axes, 0.85, 0.33, "ids = [3, 9, 3]", ink.text, 12, mono=True)
    say(axes, 0.85, 0.12, "100,000 rows of 64", ink.muted, 12)

    say(axes, 2.5, 3.45, "jax.grad", ink.text, mono=True)
    middles = column(axes, ink, 1.95)
    for number in range(V):
        if number not in LOOKED_UP:
            say(axes, 2.5, middles[number] - 0.012, "0", ink.muted, 10)
    say(axes, 2.5, 0.33, "25,600,000 bytes", ink.text, 14, weight="bold")
    say(axes, 2.5, 0.12, "nearly all of them zero", ink.muted, 12)

    say(axes, 3.3, 1.95, "or", ink.muted)

    say(axes, 4.2, 3.45, "js.grad", ink.text, mono=True)
    say(axes, 3.65, 2.62, "indices", ink.muted, 12)
    say(axes, 4.5, 2.62, "values", ink.muted, 12)
    middles = rows(axes, 3.95, 2.5, 1.1, 0.17, [ink.row] * 3, 0.04)
    for middle, number in zip(middles, (3, 9, 3), strict=True):
        say(axes, 3.65, middle - 0.01, str(number), ink.text, 13)
    say(axes, 4.25, 1.6, "the rows that were", ink.muted, 12)
    say(axes, 4.25, 1.4, "looked up", ink.muted, 12)
    say(axes, 4.2, 0.33, "780 bytes", ink.row, weight="bold")
    say(axes, 4.2, 0.12, "at any height of the table", ink.muted, 12)


def main():
    draw("gradient", 510, 365, picture)


if __name__ == "__main__":
    main()
