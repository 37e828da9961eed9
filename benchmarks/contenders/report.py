"""Measurements as lines, as a table in Markdown, and as a plot."""

import statistics

LARGE = 16e6  # bytes of gradient


def cells(results):
    """``{cell: {contender: row}}``, in order."""
    found = {}
    for row in results:
        cell = tuple(row[key] for key in ("optimizer", "rows", "dim", "ids", "kind"))
        found.setdefault(cell, {})[row["contender"]] = row
    return found


DENSE = "Optax dense"


def best_peer(by_name, ours):
    """The fastest of the other frameworks: its name and milliseconds, or None."""
    apart = (*ours, DENSE)
    others = {name: row["ms"] for name, row in by_name.items() if name not in apart}
    return min(others.items(), key=lambda x: x[1]) if others else None


def shown_ms(ms):
    """Steps on a GPU take less than a tenth of one."""
    return f"{ms:.2f}" if ms >= 1 else f"{ms:.3f}"


def lines(results, ours):
    """A line for each cell, with the ratios of the first of ours."""
    for (optimizer, rows, dim, ids, kind), by_name in cells(results).items():
        mine, best = by_name.get(ours[0]), best_peer(by_name, ours)
        text = f"{optimizer}, V {rows:.0e}, D {dim}, {ids:.0e} {kind} ids:"
        if mine and best:
            text += f" {best[1] / mine['ms']:.2f} x {best[0]},"
        if mine and DENSE in by_name:
            text += f" {by_name[DENSE]['ms'] / mine['ms']:.2f} x dense JAX,"
        times = ", ".join(
            f"{name} {shown_ms(row['ms'])} ms" for name, row in by_name.items()
        )
        yield f"{text} {times}"


def ratios(results, ours, name, wanted):
    """How many times as fast as the best peer ``name`` is, and as dense JAX, by cell."""
    found, dense = [], []
    for cell, by_name in cells(results).items():
        best = best_peer(by_name, ours)
        if name in by_name and best and wanted(*cell):
            found.append(best[1] / by_name[name]["ms"])
            if DENSE in by_name:
                dense.append(by_name[DENSE]["ms"] / by_name[name]["ms"])
    return found, dense


def summary(results, ours):
    """A table of the cells that matter: V >= 1e5 and K <= V."""

    def in_grid(optimizer, rows, dim, ids, kind):
        return rows >= 1e5 and ids <= rows

    def small(*cell):
        return in_grid(*cell) and cell[3] * cell[2] * 4 < LARGE

    def large(*cell):
        return in_grid(*cell) and not small(*cell)

    about = "times as fast as the best peer, V >= 1e5, K <= V"
    yield f"| {about} | cells | least | median | most | least, dense JAX |"
    yield "|---|---:|---:|---:|---:|---:|"
    for name in ours:
        for about, wanted in (
            ("all", in_grid),
            ("gradient below 16 MB", small),
            ("gradient of 16 MB or more", large),
        ):
            found, dense = ratios(results, ours, name, wanted)
            if found:
                yield (
                    f"| {name}: {about} | {len(found)} | {min(found):.2f} | "
                    f"{statistics.median(found):.2f} | {max(found):.2f} | "
                    f"{f'{min(dense):.2f}' if dense else '-'} |"
                )


def table(results, about, ours):
    """All cells, milliseconds of a step, the best peer in bold."""
    names = list(dict.fromkeys(row["contender"] for row in results))
    out = ["# Steps compared", "", *(f"- {line}" for line in about), ""]
    out += [*summary(results, ours), ""]
    out += [
        "Medians in milliseconds of a whole step: rows are read, half their mean square "
        "sum is the loss, the gradient is taken, the update applied. `floor`: the bytes "
        "that must move, over the copy bandwidth of this run. `ratio`: the best peer over "
        "jslices, and `dense` dense JAX over jslices. `temp`: temporaries of the compiled "
        "step of jslices, in multiples of K * D * 4 bytes; `peak`: memory of its process "
        "in these steps beyond that before and the state, in MB. `compile`: the first "
        "call of jslices, in seconds. "
        "`*`: the contenders did not fit into memory together and ran in turns of all "
        "cells, loaded anew each time.",
        "",
        f"| step | floor | {' | '.join(names)} | ratio | dense | temp | peak | compile |",
        "|---|" + "---:|" * (len(names) + 6),
    ]
    for (optimizer, rows, dim, ids, kind), by_name in cells(results).items():
        best, row = best_peer(by_name, ours), by_name.get(ours[0])
        some = next(iter(by_name.values()))
        shown = []
        for name in names:
            text = shown_ms(by_name[name]["ms"]) if name in by_name else "-"
            shown.append(f"**{text}**" if best and name == best[0] else text)
        ratio = f"{best[1] / row['ms']:.2f}" if best and row else "-"
        dense = by_name.get(DENSE)
        dense = f"{dense['ms'] / row['ms']:.2f}" if dense and row else "-"
        temporaries = peak = "-"
        if row and row["temporary_bytes"] is not None:
            temporaries = f"{row['temporary_bytes'] / (ids * dim * 4):.1f}"
        if row and row["peak_bytes"] is not None:
            peak = f"{max(0, row['peak_bytes']) / 1e6:.0f}"
        compiled = f"{row['compile_s']:.1f}" if row else "-"
        mark = "" if some["interleaved"] else " *"
        step = f"{optimizer} V={rows:.0e} D={dim} K={ids:.0e} {kind}{mark}"
        columns = [
            step,
            shown_ms(some["floor_ms"]),
            *shown,
            ratio,
            dense,
            temporaries,
            peak,
            compiled,
        ]
        out.append(f"| {' | '.join(columns)} |")
    return "\n".join(out) + "\n"


PEER_COLOURS = {"PyTorch": "#d55e00", "TensorFlow": "#0072b2", "Keras": "#009e73"}


def plot(results, path, ours):
    """How many times as fast as the best peer, a row of panels for each of ours."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
    except ImportError:
        return
    optimizers = ("sgd", "adagrad", "adam")
    figure = Figure(figsize=(12, 1 + 3.6 * len(ours)), layout="constrained")
    grid = figure.subplots(len(ours), 3, sharex=True, sharey=True, squeeze=False)
    for name, row in zip(ours, grid, strict=True):
        for optimizer, axis in zip(optimizers, row, strict=True):
            for peer, colour in PEER_COLOURS.items():
                points = [
                    (ids * dim * 4 / 1e6, best[1] / by_name[name]["ms"])
                    for (kind, rows, dim, ids, _), by_name in cells(results).items()
                    if kind == optimizer and name in by_name and rows >= 1e5
                    for best in [best_peer(by_name, ours)]
                    if best and best[0].startswith(peer)
                ]
                if points:
                    axis.scatter(*zip(*points, strict=True), s=28, color=colour, alpha=0.75)
            axis.axhline(1, color="black", linewidth=0.8)
            axis.axvline(LARGE / 1e6, color="gray", linewidth=0.8, linestyle=":")
            axis.set(xscale="log", yscale="log", title=f"{optimizer}, {name}")
            axis.grid(alpha=0.3)
            axis.xaxis.set_major_locator(FixedLocator([0.1, 1, 10, 100]))
            axis.yaxis.set_major_locator(FixedLocator([0.5, 1, 2, 3, 4, 6, 10]))
            for each in (axis.xaxis, axis.yaxis):
                each.set_minor_locator(NullLocator())
                each.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        row[0].set_ylabel("times as fast")
    for axis in grid[-1]:
        axis.set_xlabel("size of the gradient's rows in MB (dotted: 16)")
    figure.suptitle(
        "A step of jslices beside the fastest of PyTorch and TensorFlow on the same CPU:\n"
        "a dot is one size of table, row and batch; above the line jslices is faster",
        fontsize=12,
    )
    legend = grid[-1][0]
    for peer, colour in PEER_COLOURS.items():
        label = f"fastest peer: {peer}{' (TensorFlow)' if peer == 'Keras' else ''}"
        legend.scatter([], [], color=colour, label=label)
    legend.legend(loc="lower left")
    figure.savefig(path, dpi=110)
