"""Saving and restoring one table, against plain ``cp`` of the same bytes in the same run.

    python benchmarks/checkpoint.py --mebibytes 2048

Prints the throughput of ``cp``, of ``cp`` followed by ``sync`` (a checkpoint is flushed to
the disk as well), of a save and of a restore, and the ratios. They take turns, in another
order each time; the medians count. Every copy is a new file, and is deleted outside of the
measurement. Also the memory that a restore adds to the process at its peak, in tables, and
the time to restore a thousand rows.

Before each measurement as much memory is touched and freed: virtual machines give free
memory back to their host, and to get it again costs more than all the rest. Without that
(``--untouched``) whoever comes first after a pause pays for it, be it ``cp`` or a save:
both need as much new memory, for the page cache.
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
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--directory", help="where to write; None: a temporary one")
    parser.add_argument("--untouched", action="store_true", help="see above")
    options = parser.parse_args()
    size = options.mebibytes << 20
    table = jax.random.normal(jax.random.key(0), (size // 256, 64), jnp.float32)
    table.block_until_ready()
    touched = 0 if options.untouched else size
    times = {kind: [] for kind in ("cp", "cp and sync", "save", "restore")}
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

        def copy_and_sync():
            copy()
            subprocess.run(["sync", target], check=True)

        def restore_rows():
            rows = saver.restore(source, rows={"table": slice(5000, 6000)})["table"]
            assert bool((rows == table[5000:6000]).all())

        kinds = {
            "cp": copy,
            "cp and sync": copy_and_sync,
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
    rates = {kind: size / statistics.median(t) / (1 << 30) for kind, t in times.items()}
    for kind, rate in rates.items():
        ratios = [f"{rate / rates[base]:.2f} of {base}" for base in ("cp", "cp and sync")]
        print(f"{kind:12} {rate:6.2f} GiB/s   {', '.join(ratios)}")
    print(f"a restore added {memory.added / size:.2f} tables of memory at its peak")
    print(f"a restore of 1000 rows of {len(table)} took {of_rows * 1000:.1f} ms")


if __name__ == "__main__":
    main()
