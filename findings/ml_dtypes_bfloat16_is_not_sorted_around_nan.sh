#!/usr/bin/env bash
# NumPy leaves an array of bfloat16 with a NaN unsorted, and unique finds one value twice.
#
# Versions: ml_dtypes 0.6.0, numpy 2.2.6 on a CPU (x86), Python 3.11.
# Guess: np.sort puts NaN last in every floating dtype, so that a search in the result
#   works.
# Seen (2026-11-29): bfloat16 of ml_dtypes is compared as it is: NaN stays where it is
#   and parts what stands on its sides. float16 and float32 are sorted.
#     float16: sorted [0.0, 1.0, 2.0, 3.0, 3.0, nan], the value 3 in unique 1 times
#     bfloat16: sorted [1.0, 3.0, nan, 0.0, 2.0, 3.0], the value 3 in unique 2 times
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "ml_dtypes==0.6.0" "numpy==2.2.6"
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import ml_dtypes
import numpy as np

values, found = [3, 1, np.nan, 2, 0, 3], {}
for dtype in (np.float16, ml_dtypes.bfloat16):
    array = np.array(values, dtype)
    numbers = np.sort(array).astype(np.float32)
    distinct = np.unique(array).astype(np.float32)
    numbers = numbers[~np.isnan(numbers)]
    found[dtype] = bool((np.diff(numbers) >= 0).all()), int((distinct == 3).sum())
    name = np.dtype(dtype).name
    print(f"{name}: sorted {np.sort(array).astype(np.float32).tolist()}, the value 3 in unique {found[dtype][1]} times")
assert found[np.float16] == (True, 1), "this has changed"
assert found[ml_dtypes.bfloat16] == (False, 2), "this has changed"
PYTHON
