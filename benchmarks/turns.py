"""Taking turns within one run: what disturbs the machine falls on all contenders."""

import functools
import statistics
import time
from typing import NamedTuple

import numpy as np


class Seconds(NamedTuple):
    """Of the clock, and of all cores together."""

    wall: float
    cores: float


class Stopwatch:
    """``with Stopwatch() as watch: ...``, then ``watch.seconds``."""

    def __enter__(self):
        self._start = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_):
        wall, cores = self._start
        self.seconds = Seconds(time.perf_counter() - wall, time.process_time() - cores)


def in_turns(contenders, turns):
    """``{name: [what each call returned]}``: each is called once in every turn."""
    runs = {name: [] for name in contenders}
    for _ in range(turns):
        for name, run in contenders.items():
            runs[name].append(run())
    return runs


def medians(runs):
    """Of tuples of numbers, column by column."""
    return [statistics.median(each) for each in zip(*runs, strict=True)]


def time_steps(steps, turns, timed, warm=1):
    """``{name: Seconds}`` of one step each, the medians of all turns.

    A step is a function without arguments that waits for its loss, and returns it. The
    first ones of a turn are not timed: threads of the one before may still be awake.
    """

    def turn(step):
        for _ in range(warm):
            step()
        with Stopwatch() as watch:
            for _ in range(timed):
                step()
        return [each / timed for each in watch.seconds]

    runs = in_turns(
        {name: functools.partial(turn, step) for name, step in steps.items()}, turns
    )
    return {name: Seconds(*medians(each)) for name, each in runs.items()}


def report(seconds, mine):
    """A line for each, in milliseconds of a step."""
    for name, each in seconds.items():
        line = f"{name}: {each.wall * 1e3:.2f} ms a step, {each.cores * 1e3:.2f} of a core"
        if name != mine:
            wall, cores = (x / y for x, y in zip(each, seconds[mine], strict=True))
            line += f": {wall:.2f} and {cores:.2f} times those of {mine}"
        yield line


def compare(title, makers, options, mine="jslices"):
    """Prints the steps that are made beside those of ``mine``; first losses are equal.

    What is not installed is left out, and named.
    """
    steps = {}
    for name, make in makers.items():
        try:
            steps[name] = make()
        except ImportError as error:
            print(f"left out: {name} ({error})")
    losses = {name: step() for name, step in steps.items()}
    np.testing.assert_allclose(list(losses.values()), losses[mine], rtol=1e-4)
    print(f"{title}, first loss {losses[mine]:.4f}")
    print("\n".join(report(time_steps(steps, options.turns, options.timed), mine)))
