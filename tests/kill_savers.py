"""Kills processes that save, again and again, and looks at what they leave behind.

    python tests/kill_savers.py DIRECTORY KIND KILLS

The children are forked before JAX has started any thread. KIND is ``steps`` (a full
checkpoint a step), ``shards`` (three shards, always at the same path) or ``deltas``; two of
them joined by ``+`` are two processes at a time in one directory.
"""

import os
import random
import signal
import sys
import time
import warnings

import numpy as np

import jslices as js
from jslices.checkpoint import files
from jslices.checkpoint.leaves import Leaf, Piece, as_leaf
from jslices.checkpoint.writing import Save, in_shards

ROWS = 3000


def variables(step):
    return {"a": np.full((ROWS, 8), step), "b": np.full(ROWS, step), "step": np.array(step)}


def spread(name, value, count):
    """A leaf as if it lay on so many devices."""
    spec, rows = as_leaf(name, value).spec, len(value) // count
    zeros = (0,) * (value.ndim - 1)
    starts = range(0, len(value), rows)
    return Leaf(spec, [Piece((i, *zeros), value[i : i + rows]) for i in starts])


def write_shards(prefix, variables, count, whole=()):
    """What ``Saver(sharded=True)`` writes, without devices."""
    leaves = {
        name: as_leaf(name, value) if name in whole else spread(name, value, count)
        for name, value in variables.items()
    }
    specs = {n: (s.spec.kind, s.spec.dtype, s.spec.shape) for n, s in leaves.items()}
    info = {"variables": specs}
    Save(str(prefix), files.new_id(), in_shards(leaves), info, True).run()


def save_forever(directory, kind, first):
    saver = recovered(directory, 3)
    path = f"{directory}/m{os.getpid()}"  # what a killed process saved is not overwritten
    for step in range(first, first + 10**9):
        if kind == "shards":
            write_shards(f"{directory}/m", variables(step), 3, whole=["step"])
            js.checkpoint.update_checkpoint_state(directory, f"{directory}/m")
        elif kind == "steps" or (step - first) % 4 == 0:
            saver.save(variables(step), path, step)
        else:
            saver.save_delta(variables(step), path, step)


def newest_step(directory):
    """What the newest checkpoint holds, every number of it looked at."""
    path = js.checkpoint.latest_checkpoint(directory)
    if path is None:
        return -1
    restored = js.Saver().restore(path, variables(0))
    step = int(restored["step"])
    for array in restored.values():
        assert (array == step).all(), (path, step)
    return step


def recovered(directory, max_to_keep):
    """A Saver that goes on where an earlier process stopped."""
    saver = js.Saver(max_to_keep=max_to_keep)
    state = js.checkpoint.get_checkpoint_state(directory)
    if state is not None:
        saver.recover_last_checkpoints(state.all_model_checkpoint_paths)
    return saver


def assert_nothing_is_left(directory, kinds, step):
    """Three more saves, after which only they are there, as if nobody had been killed."""
    saver = recovered(directory, 3)
    for i in range(1, 4):
        saver.save(variables(step + i), f"{directory}/last", i)
    left = set(os.listdir(directory)) - {"checkpoint", "last-1", "last-2", "last-3"}
    if kinds[0] not in ("steps", "deltas") or len(kinds) > 1:
        # Two Savers with one state file forget what the other has saved, as in TensorFlow.
        left = {name for name in left if name.endswith(".tmp")}
    assert not left, left


def start(directory, kind, first):
    child = os.fork()
    if child == 0:
        try:
            save_forever(directory, kind, first)
        finally:
            os._exit(1)
    return child


def main(directory, kind, kills):
    rng, step, seen, kinds = random.Random(0), -1, 0, kind.split("+")
    shortest = longest = 0.08 if "shards" in kinds else 0.03
    for _ in range(kills):
        children = [start(directory, k, step + 1) for k in kinds]
        time.sleep(rng.uniform(0.002, longest))
        for child in children:
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            assert os.WIFSIGNALED(status), "a child ended by itself"
        found = newest_step(directory)
        # Of two processes each one has steps of its own.
        assert found >= (step if len(kinds) == 1 else min(step, 0)), (step, found)
        # On a busy machine it takes longer to save anything.
        longest = max(longest / 2, shortest) if found > step else min(longest * 1.5, 2.0)
        seen += found > step
        step = found
    assert_nothing_is_left(directory, kinds, step)
    print(kills, "kills", seen, "with a new checkpoint", step, "steps")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
