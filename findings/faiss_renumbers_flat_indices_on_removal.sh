#!/usr/bin/env bash
# Removing a vector from a flat index of faiss gives all later vectors other ids.
#
# Versions: faiss-cpu 1.15.1, numpy 2.2.6, Python 3.11 (x86).
# Guess: after index.remove_ids([0]) a search for the third vector still finds id 2,
#   whatever the kind of index; the ids are row numbers of a table.
# Seen (2026-11-28): In IndexFlat the vectors close up, so that the third is now 1, and
#   a table of items is off by one. In IndexIVFFlat, by the same call, it stays 2.
#     IndexFlatIP: the third vector is 2, after removal of the first 1
#     IndexIVFFlat: the third vector is 2, after removal of the first 2
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "faiss-cpu==1.15.1" "numpy==2.2.6"
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import faiss
import numpy as np

vectors = np.eye(4, 8, dtype="float32")
flat = faiss.IndexFlatIP(8)
inverted = faiss.IndexIVFFlat(faiss.IndexFlatIP(8), 8, 1, faiss.METRIC_INNER_PRODUCT)
found = {}
for index in (flat, inverted):
    index.train(vectors)
    index.add(vectors)
    before = int(index.search(vectors[2:3], 1)[1][0, 0])
    index.remove_ids(np.array([0]))
    after = int(index.search(vectors[2:3], 1)[1][0, 0])
    found[type(index).__name__] = before, after
    print(f"{type(index).__name__}: the third vector is {before}, after removal of the first {after}")
assert found == {"IndexFlatIP": (2, 1), "IndexIVFFlat": (2, 2)}, "this has changed"
PYTHON
