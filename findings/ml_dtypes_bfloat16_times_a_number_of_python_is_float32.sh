#!/usr/bin/env bash
# In NumPy a bfloat16 array times a float of Python is float32, a float16 array stays float16.
#
# Versions: ml_dtypes 0.6.0, numpy 2.2.6 on a CPU (x86), Python 3.11.
# Guess: a number of Python takes the dtype of the array, by NumPy 2's rules and JAX's:
#   0.5 * table of bfloat16 is bfloat16.
# Seen (2026-11-29): It is float32, twice the memory of the table; with an int, or a
#   bfloat16 scalar, it stays bfloat16.
#     float16 times 0.5, 2 and its own 0.5: ['float16', 'float16', 'float16']
#     bfloat16 times 0.5, 2 and its own 0.5: ['float32', 'bfloat16', 'bfloat16']
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "ml_dtypes==0.6.0" "numpy==2.2.6"
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import ml_dtypes
import numpy as np

found = {}
for dtype in (np.float16, ml_dtypes.bfloat16):
    table = np.ones(2, dtype)
    kinds = [(table * x).dtype.name for x in (0.5, 2, dtype(0.5))]
    found[np.dtype(dtype).name] = kinds
    print(f"{np.dtype(dtype).name} times 0.5, 2 and its own 0.5: {kinds}")
assert found["float16"] == ["float16"] * 3, "this has changed"
assert found["bfloat16"][0] == "float32" and found["bfloat16"][2] == "bfloat16", "this has changed"
PYTHON
