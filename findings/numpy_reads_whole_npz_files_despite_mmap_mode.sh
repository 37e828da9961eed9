#!/usr/bin/env bash
# np.load("tables.npz", mmap_mode="r") reads whole arrays into memory.
#
# Versions: numpy 2.2.6, Python 3.11 (x86).
# Guess: with mmap_mode a table in an uncompressed .npz stays in the file, as one in a
#   .npy does, and a lookup of some rows reads these; or else it is an error.
# Seen (2026-11-28): mmap_mode is ignored for .npz, without a warning: each access by
#   name reads the array as a whole, every time anew.
#     table.npy: memmap, 0.0 MB of memory for two rows of 6.4 MB
#     tables.npz: ndarray, 6.9 MB of memory for two rows of 6.4 MB
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "numpy==2.2.6"
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import tracemalloc

import numpy as np

table = np.ones((100_000, 16), np.float32)
np.save("table.npy", table)
np.savez("tables.npz", table=table)
found = {}
tracemalloc.start()
for file in ("table.npy", "tables.npz"):
    loaded = np.load(file, mmap_mode="r")
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    opened = loaded["table"] if file == "tables.npz" else loaded
    rows = opened[[3, 9]]
    peak = (tracemalloc.get_traced_memory()[1] - before) / 1e6
    found[file] = type(opened).__name__, peak > 6
    print(f"{file}: {found[file][0]}, {peak:.1f} MB of memory for two rows of {table.nbytes / 1e6} MB")
assert found == {"table.npy": ("memmap", False), "tables.npz": ("ndarray", True)}, "this has changed"
PYTHON
