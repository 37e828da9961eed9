"""How a dense gradient and a row gradient of one lookup differ."""

from style import arrow, draw, rows, say

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
    say(axes, 1.05, 3.45, "table[ids]", ink.text, mono=True)
    middles = column(axes, ink, 0.5)
    for number in LOOKED_UP:
        say(axes, 0.38, middles[number] - 0.01, str(number), ink.text, 12, "right")
    say(axes, 1.05, 0.33, "ids = [3, 9, 3]", ink.text, 12, mono=True)
    say(axes, 1.05, 0.12, "100,000 rows of 64", ink.muted, 12)

    arrow(axes, (1.85, 1.95), (2.6, 1.95), ink.muted)

    say(axes, 3.4, 3.45, "jax.grad", ink.text, mono=True)
    middles = column(axes, ink, 2.85)
    for number in range(V):
        if number not in LOOKED_UP:
            say(axes, 3.4, middles[number] - 0.012, "0", ink.muted, 10)
    say(axes, 3.4, 0.33, "25,600,000 bytes", ink.text, 14, weight="bold")
    say(axes, 3.4, 0.12, "nearly all of them zero", ink.muted, 12)

    say(axes, 4.6, 1.95, "or", ink.muted, 14)

    say(axes, 5.95, 3.45, "js.grad", ink.text, mono=True)
    say(axes, 5.3, 2.62, "indices", ink.muted, 12)
    say(axes, 6.2, 2.62, "values", ink.muted, 12)
    middles = rows(axes, 5.65, 2.5, 1.1, 0.17, [ink.row] * 3, 0.04)
    for middle, number in zip(middles, (3, 9, 3), strict=True):
        say(axes, 5.3, middle - 0.01, str(number), ink.text, 12)
    say(axes, 5.95, 1.55, "the rows that were looked up", ink.muted, 12)
    say(axes, 5.95, 0.33, "780 bytes", ink.row, 14, weight="bold")
    say(axes, 5.95, 0.12, "whatever the table's height", ink.muted, 12)


def main():
    draw("gradient", 720, 365, picture)


if __name__ == "__main__":
    main()
