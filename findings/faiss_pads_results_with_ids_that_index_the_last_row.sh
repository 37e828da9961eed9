#!/usr/bin/env bash
# faiss fills up missing neighbours with id -1, which reads the last item of a table.
#
# Versions: faiss-cpu 1.15.1, numpy 2.2.6, Python 3.11 (x86).
# Guess: a search for k neighbours in an index of more than k vectors returns k of them,
#   or a shorter row, or an id that no table has.
# Seen (2026-11-28): An inverted file that looks into few lists, and a flat index of
#   vectors with a NaN, return -1 with the score -3.4e38 (not -inf). items[ids] of NumPy
#   and JAX takes the last item for it, and a mean over candidates counts that one.
#     inverted file of 200 vectors, 100 wanted: 51 ids are -1, last score -3.4e+38
#     flat index of 4 vectors, one of them NaN, 4 wanted: [0, 1, 3, -1]
#     items[ids]: ['a', 'b', 'last', 'last']
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "faiss-cpu==1.15.1" "numpy==2.2.6"
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import faiss
import numpy as np

vectors = np.random.default_rng(0).normal(size=(200, 8)).astype("float32")
inverted = faiss.IndexIVFFlat(faiss.IndexFlatIP(8), 8, 4, faiss.METRIC_INNER_PRODUCT)
inverted.train(vectors)
inverted.add(vectors)
scores, ids = inverted.search(vectors[:1], 100)
missing = int((ids == -1).sum())
print(f"inverted file of 200 vectors, 100 wanted: {missing} ids are -1, last score {scores[0, -1]:.3g}")

broken = vectors[:4].copy()
broken[2] = np.nan
flat = faiss.IndexFlatIP(8)
flat.add(broken)
found = flat.search(vectors[:1], 4)[1][0].tolist()
print(f"flat index of 4 vectors, one of them NaN, 4 wanted: {found}")
items = np.array(["a", "b", "c", "last"])
print(f"items[ids]: {items[found].tolist()}")
assert missing and np.isfinite(scores[0, -1]) and found[-1] == -1, "this has changed"
PYTHON
