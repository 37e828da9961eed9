#!/usr/bin/env bash
# pyarrow's min and max step over NaN, as they do over null.
#
# Versions: pyarrow 26.0.1, numpy 2.2.6 on a CPU (x86), Python 3.11.
# Guess: the largest of 1, NaN and 3 is NaN, as in NumPy, so that a bad value is seen;
#   null alone is stepped over.
# Seen (2026-11-29): pc.min_max gives 1 and 3. pc.sum and pc.mean are NaN. 0.0 and -0.0
#   are two distinct values of pc.unique, two NaN are one.
#     min_max of 1, NaN, 3: 1.0 and 3.0; NumPy's max: nan
#     their sum: nan
#     distinct values of 0.0 and -0.0: 2; of two NaN: 1
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "pyarrow==26.0.1" "numpy==2.2.6"
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

values = [1.0, float("nan"), 3.0]
ends, total = pc.min_max(pa.array(values)).as_py(), pc.sum(pa.array(values)).as_py()
print(f"min_max of 1, NaN, 3: {ends['min']} and {ends['max']}; NumPy's max: {np.max(values)}")
print(f"their sum: {total}")
zeros, nans = (len(pc.unique(pa.array(x))) for x in ([0.0, -0.0], [float("nan")] * 2))
print(f"distinct values of 0.0 and -0.0: {zeros}; of two NaN: {nans}")
assert (ends["min"], ends["max"]) == (1.0, 3.0) and total != total, "this has changed"
assert (zeros, nans) == (2, 1), "this has changed"
PYTHON
