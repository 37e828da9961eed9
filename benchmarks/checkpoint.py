"""Saving and restoring one table, against plain ``cp`` of the same bytes in the same run.

    python benchmarks/checkpoint.py --mebibytes 2048

Prints the throughput of ``cp``, of ``cp`` followed by ``sync`` (a checkpoint is flushed to
the disk as well), of a save and of a restore, and the ratios. They take turns; the medians
count. Every copy is a new file. Also the memory that a restore adds to the process at its
peak, in tables.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import tempfile
import threading
import time

import jax
import jax.numpy as jnp

import jslices as js


def seconds(function):
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


def resident():
    """The bytes of this process that are in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class PeakMemory:
    """The most that a block of code adds to the process, sampled."""

    def __enter__(self):
        self.start = self.peak = resident()
        self.done = threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def watch(self):
        while not self.done.wait(0.005):
            self.peak = max(self.peak, resident())

    def __exit__(self, *_):
        self.done.set()
        self.thread.join()
        self.added = self.peak - self.start


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mebibytes", type=int, default=256, help="size of the table")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", help="where to write; None: a temporary one")
    options = parser.parse_args()
    size = options.mebibytes << 20
    table = jax.random.normal(jax.random.key(0), (size // 256, 64), jnp.float32)
    table.block_until_ready()
    times = {kind: [] for kind in ("cp", "cp and sync", "save", "restore")}
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        if shutil.disk_usage(directory).free < 4 * size:
            raise SystemExit(f"{directory} needs four times the table of free space")
        saver = js.Saver(max_to_keep=1)
        copy = os.path.join(directory, "copy")
        path = saver.save({"table": table}, os.path.join(directory, "first"))
        for number in range(options.rounds):
            for kind in ("cp", "cp and sync"):
                commands = [["cp", path, copy], ["sync", copy]][: 1 + (kind != "cp")]
                spent, _ = seconds(
                    lambda c=commands: [subprocess.run(a, check=True) for a in c]
                )
                times[kind].append(spent)
                os.unlink(copy)
            spent, path = seconds(
                lambda n=number: saver.save({"table": table}, f"{directory}/m", n)
            )
            times["save"].append(spent)
            with PeakMemory() as memory:
                spent, restored = seconds(
                    lambda p=path: jax.block_until_ready(saver.restore(p)["table"])
                )
            times["restore"].append(spent)
            same = bool((restored == table).all()) if number == 0 else True
            assert same, "what was restored is not what was saved"
            del restored
    rates = {kind: size / statistics.median(t) / (1 << 30) for kind, t in times.items()}
    for kind, rate in rates.items():
        ratios = [f"{rate / rates[base]:.2f} of {base}" for base in ("cp", "cp and sync")]
        print(f"{kind:12} {rate:6.2f} GiB/s   {', '.join(ratios)}")
    print(f"a restore added {memory.added / size:.2f} tables of memory at its peak")


if __name__ == "__main__":
    main()
