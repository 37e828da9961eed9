#!/usr/bin/env bash
# h5py writes 127 for 300 into an int8 dataset, and 0 for -1 into an unsigned one.
#
# Versions: h5py 3.16.0, numpy 2.2.6 on a CPU (x86), Python 3.11.
# Guess: integers that do not fit the dtype of a dataset wrap, as in an assignment of
#   NumPy or Zarr, so that -1 becomes the largest id; or they are refused.
# Seen (2026-11-29): HDF5 converts and takes the nearest number that there is. Padding
#   of -1 becomes id 0.
#     [300, -200, -1, 1099511627776] in int8: h5py [127, -128, -1, 127], NumPy [44, 56, -1, 0]
#     [300, -200, -1, 1099511627776] in uint32: h5py [300, 0, 0, 4294967295], NumPy [300, 4294967096, 4294967295, 0]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "h5py==3.16.0" "numpy==2.2.6"
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import h5py
import numpy as np

file = h5py.File("ids.h5", "w")
found = {}
for dtype in ("int8", "uint32"):
    ids = np.array([300, -200, -1, 2**40])
    dataset = file.create_dataset(dtype, (4,), dtype)
    dataset[:] = ids
    array = np.zeros(4, dtype)
    array[:] = ids
    found[dtype] = dataset[:].tolist(), array.tolist()
    print(f"{ids.tolist()} in {dtype}: h5py {found[dtype][0]}, NumPy {found[dtype][1]}")
assert found["int8"] == ([127, -128, -1, 127], [44, 56, -1, 0]), "this has changed"
assert found["uint32"][0] == [300, 0, 0, 2**32 - 1], "this has changed"
PYTHON
