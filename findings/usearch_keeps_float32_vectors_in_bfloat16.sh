#!/usr/bin/env bash
# An index of USearch keeps vectors of float32 in bfloat16 unless it is told otherwise.
#
# Versions: usearch 2.26.6, numpy 2.2.6 on a CPU (x86), Python 3.11.
# Guess: Index(ndim=8, metric="ip") keeps float32 vectors as they come, and its
#   distances are 1 - x.y to float32.
# Seen (2026-11-29): Its dtype is BF16 here: vectors come back rounded to eight bits,
#   and distances are off in the third digit. dtype="f32" keeps them.
#     dtype default: a vector is off by 2e-03, a distance by 1e-02
#     dtype f32: a vector is off by 0e+00, a distance by 0e+00
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "usearch==2.26.6" "numpy==2.2.6"
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import numpy as np
from usearch.index import Index

rows = np.random.default_rng(0).normal(size=(50, 8)).astype(np.float32)
found = {}
for dtype in (None, "f32"):
    index = Index(ndim=8, metric="ip") if dtype is None else Index(ndim=8, metric="ip", dtype=dtype)
    index.add(np.arange(50), rows)
    match = index.search(rows[0], 1)
    exact = 1 - rows[int(match.keys[0])] @ rows[0]
    found[dtype] = np.abs(index[3] - rows[3]).max(), abs(match.distances[0] - exact)
    name = "default" if dtype is None else dtype
    print(f"dtype {name}: a vector is off by {found[dtype][0]:.0e}, a distance by {found[dtype][1]:.0e}")
assert min(found[None]) > 1e-4, "this has changed"
assert max(found["f32"]) < 1e-5, "this has changed"
PYTHON
