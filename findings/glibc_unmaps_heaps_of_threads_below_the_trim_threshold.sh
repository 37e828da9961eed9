#!/usr/bin/env bash
# A thread that frees an array gives its memory back below M_TRIM_THRESHOLD.
#
# Versions: glibc 2.36, numpy 2.2.6, Python 3.11 (x86).
# Guess: once M_MMAP_THRESHOLD is 128 MiB and M_TRIM_THRESHOLD 512 MiB, a thread that
#   allocates and frees an array of 52 MB in turn gets the same pages again, without faults.
# Seen (2026-11-29): only until something else takes room in its first heap, which ends at
#   64 MiB. The array is then alone in a second heap, and an empty heap is unmapped whatever
#   the trim threshold, unless the one before has less room than M_TOP_PAD: 12,696 page
#   faults in each turn. With M_TOP_PAD at 64 MiB there are none.
#     nothing else, M_TOP_PAD 0 MiB: 0 page faults a turn
#     20 MB kept, M_TOP_PAD 0 MiB: 12696 page faults a turn
#     20 MB kept, M_TOP_PAD 64 MiB: 0 page faults a turn
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "numpy==2.2.6"
cd "$folder"
NUMPY_MADVISE_HUGEPAGE=0 "$folder/venv/bin/python" - <<'PYTHON'
import ctypes
import resource
import threading

import numpy as np

TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = -1, -2, -3
mallopt = ctypes.CDLL(None).mallopt
assert mallopt(MMAP_THRESHOLD, 128 << 20) and mallopt(TRIM_THRESHOLD, 512 << 20)
found = []


def faults():
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


def turns(kept, pad):
    others = np.ones(kept * 10**6, np.uint8)
    counts = []
    for _ in range(20):
        before = faults()
        np.ones(52 * 10**6, np.uint8)
        counts.append(faults() - before)
    found.append(sorted(counts)[10])
    what = f"{len(others) // 10**6} MB kept" if kept else "nothing else"
    print(f"{what}, M_TOP_PAD {pad} MiB: {found[-1]} page faults a turn")


for kept, pad in ((0, 0), (20, 0), (20, 64)):
    assert not pad or mallopt(TOP_PAD, pad << 20)
    thread = threading.Thread(target=turns, args=(kept, pad))
    thread.start()
    thread.join()
assert [count > 12_000 for count in found] == [False, True, False], "this has changed"
PYTHON
