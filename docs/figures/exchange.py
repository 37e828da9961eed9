"""How rows travel between devices in a step with ``js.Exchange``."""

from style import arrow, box, draw, rows, say

# Of which device each looked-up row is, by the device that looks it up.
LOOKUPS = ((0, 1, 2), (1, 2, 2), (0, 0, 1))
TOPS = (2.55, 1.65, 0.75)


def panel(axes, ink, x, number, title, words, backwards, kind):
    colors = (ink.blue, ink.green, ink.violet)
    say(axes, x + 1.3, 3.6, number, ink.row, 15, weight="bold")
    say(axes, x + 1.3, 3.36, title, ink.text, 13)
    for device, top in enumerate(TOPS):
        for left, edge in ((0.12, ink.line), (1.76, colors[device])):
            box(axes, x + left, top - 0.6, 0.72, 0.72, "none", edge, 0.05, linewidth=1)
        fills = [colors[owner] for owner in LOOKUPS[device]]
        if kind == "ids":
            for place, fill in enumerate(fills):
                left = x + 0.22 + 0.19 * place
                box(axes, left, top - 0.31, 0.14, 0.14, fill, radius=0.07)
        else:
            rows(axes, x + 0.22, top + 0.02, 0.52, 0.13, fills, 0.06)
        held = [colors[device], colors[device], ink.empty]
        edges = [ink.line if fill == ink.empty else "none" for fill in held]
        rows(axes, x + 1.86, top + 0.02, 0.52, 0.13, held, 0.06, edges)
        for owner in sorted(set(LOOKUPS[device])):
            start = (x + 0.9, top - 0.24 + 0.1 * (1 - owner))
            end = (x + 1.7, TOPS[owner] - 0.24 + 0.1 * (1 - device))
            if backwards:
                start, end = end, start
            arrow(axes, start, end, colors[owner], 0, 1.2)
    say(axes, x + 1.3, -0.04, words, ink.muted, 12)


def picture(axes, ink):
    axes.set_ylim(-0.35, 3.75)
    panel(axes, ink, 0.0, "1", "ids go to their rows", "4 bytes for each id", False, "ids")
    panel(axes, ink, 2.85, "2", "rows come back", "4 D bytes for each", True, "rows")
    panel(
        axes, ink, 5.7, "3", "gradients go to the rows", "4 D bytes for each", False, "rows"
    )
    for x in (0.0, 2.85, 5.7):
        say(axes, x + 0.48, 2.95, "looks up", ink.muted, 11)
        say(axes, x + 2.12, 2.95, "holds rows", ink.muted, 11)


def main():
    draw("exchange", 840, 410, picture)


if __name__ == "__main__":
    main()
