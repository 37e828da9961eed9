#!/usr/bin/env bash
# A slice of a TensorStore keeps the row numbers of the whole: part[0] of store[4:6] is an error.
#
# Versions: tensorstore 0.1.86, numpy 2.2.6 on a CPU (x86), Python 3.11.
# Guess: store[4:6][0] is row 4 and store[-1] the last row, as with arrays of NumPy,
#   Zarr and h5py.
# Seen (2026-11-29): The slice begins at 4: its first row is part[4], and 0 and -1 are
#   out of range. A step renumbers: store[::2][1] is row 2.
#     store[4:6][0] of the rows 0 to 5: out of range
#     store[4:6][4] of the rows 0 to 5: 4.0
#     store[-1] of the rows 0 to 5: out of range
#     store[::2][1] of the rows 0 to 5: 2.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "tensorstore==0.1.86" "numpy==2.2.6"
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import numpy as np
import tensorstore as ts

spec = {"driver": "zarr", "kvstore": {"driver": "memory"}}
store = ts.open(spec, create=True, dtype="float32", shape=[6, 1]).result()
store.write(np.arange(6, dtype=np.float32)[:, None]).result()


def row(part, index):
    try:
        return float(part[index].read().result()[0])
    except (IndexError, ValueError):
        return "out of range"


found = [row(store[4:6], 0), row(store[4:6], 4), row(store, -1), row(store[::2], 1)]
for code, value in zip(["[4:6][0]", "[4:6][4]", "[-1]", "[::2][1]"], found):
    print(f"store{code} of the rows 0 to 5: {value}")
assert found == ["out of range", 4.0, "out of range", 2.0], "this has changed"
PYTHON
