"""Saving and restoring one table, against plain ``cp`` of the same bytes in the same run.

    python benchmarks/checkpoint.py --mebibytes 2048

Prints the throughput of ``cp``, of ``cp`` followed by an fsync of the file (a checkpoint is
flushed to the disk as well), of a save and of a restore. They take turns, in another order
each round. The ratios are the medians of those within a round, and the smallest and the
largest: what else the machine does changes from round to round. Every copy is a new file,
and is deleted outside of the measurement. Also the memory that a restore adds to the
process at its peak, in tables, and the time to restore a thousand rows.

Before each measurement as much memory is touched and freed: virtual machines give free
memory back to their host, and to get it again costs more than all the rest. Without that
(``--untouched``) the first to run after a pause pays for it, be it ``cp`` or a save: both
need as much new memory, for the page cache.
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
import numpy as np

import jslices as js


def seconds(function, size):
    np.empty(size, np.uint8)[::4096] = 1  # nothing for a size of 0
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


def resident():
    """The bytes of this process that are in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def against(base, taken, name):
    """How many times as fast as the base: the median of the rounds, and their range."""
    ratios = sorted(b / t for b, t in zip(base, taken, strict=True))
    middle = statistics.median(ratios)
    return f"{middle:.2f} of {name} ({ratios[0]:.2f} to {ratios[-1]:.2f})"


class PeakMemory:
    """The most memory that a block of code adds to the process, sampled."""

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
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--directory", help="where to write; None: a temporary one")
    parser.add_argument("--untouched", action="store_true", help="see above")
    options = parser.parse_args()
    size = options.mebibytes << 20
    table = jax.random.normal(jax.random.key(0), (size // 256, 64), jnp.float32)
    table.block_until_ready()
    touched = 0 if options.untouched else size
    times = {kind: [] for kind in ("cp", "cp and fsync", "save", "restore")}
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        if shutil.disk_usage(directory).free < 4 * size:
            raise SystemExit(f"{directory} needs four times the table of free space")
        saver = js.Saver(max_to_keep=None)
        source = saver.save({"table": table}, os.path.join(directory, "first"))
        target = os.path.join(directory, "copy")
        copying = ["cp", source, target]

        def save():
            return saver.save({"table": table}, target)

        def restore():
            return jax.block_until_ready(saver.restore(source)["table"])

        def copy():
            subprocess.run(copying, check=True)

        def copy_and_fsync():
            copy()
            with open(target, "rb") as file:
                os.fsync(file.fileno())

        def restore_rows():
            rows = saver.restore(source, rows={"table": slice(5000, 6000)})["table"]
            assert bool((rows == table[5000:6000]).all())

        kinds = {
            "cp": copy,
            "cp and fsync": copy_and_fsync,
            "save": save,
            "restore": restore,
        }
        for number in range(options.rounds):
            order = list(kinds)[number % 4 :] + list(kinds)[: number % 4]
            for kind in order:
                times[kind].append(seconds(kinds[kind], touched)[0])
                if os.path.exists(target):
                    os.unlink(target)
        with PeakMemory() as memory:
            restored = restore()
        assert bool((restored[-1] == table[-1]).all())
        of_rows = statistics.median(seconds(restore_rows, 0)[0] for _ in range(9))
    for kind, taken in times.items():
        rate = size / statistics.median(taken) / (1 << 30)
        ratios = (against(times[base], taken, base) for base in ("cp", "cp and fsync"))
        print(f"{kind:12} {rate:6.2f} GiB/s   {',  '.join(ratios)}")
    print(f"a restore added {memory.added / size:.2f} tables of memory at its peak")
    print(f"a restore of 1000 rows of {len(table)} took {of_rows * 1000:.1f} ms")


if __name__ == "__main__":
    main()
