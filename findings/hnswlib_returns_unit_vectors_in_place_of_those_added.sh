#!/usr/bin/env bash
# get_items of an hnswlib index for cosine distances returns unit vectors, not those that were added.
#
# Versions: hnswlib 0.8.0, numpy 2.2.6 on a CPU (x86), Python 3.11.
# Guess: get_items gives back the vectors of add_items, in every space; and a distance
#   in the space l2 is the Euclidean one.
# Seen (2026-11-29): In the space cosine they are divided by their norm, which is lost;
#   in l2 they are as added, but its distance is the square.
#     l2: added [[3.0, 4.0], [6.0, 8.0]], got [[3.0, 4.0], [6.0, 8.0]]
#     l2: the distance of [0, 0] and [3, 4] is 25.0
#     ip: added [[3.0, 4.0], [6.0, 8.0]], got [[3.0, 4.0], [6.0, 8.0]]
#     cosine: added [[3.0, 4.0], [6.0, 8.0]], got [[0.6000000238418579, 0.800000011920929], [0.6000000238418579, 0.800000011920929]]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "hnswlib==0.8.0" "numpy==2.2.6"
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import hnswlib
import numpy as np

rows = np.array([[3.0, 4.0], [6.0, 8.0]], np.float32)
found = {}
for space in ("l2", "ip", "cosine"):
    index = hnswlib.Index(space, 2)
    index.init_index(4)
    index.add_items(rows, [0, 1])
    found[space] = np.round(index.get_items([0, 1]), 3).tolist()
    print(f"{space}: added {rows.tolist()}, got {found[space]}")
    if space == "l2":
        distance = float(index.knn_query(np.zeros((1, 2), np.float32), 1)[1][0, 0])
        print(f"l2: the distance of [0, 0] and [3, 4] is {distance}")
assert found["l2"] == found["ip"] == rows.tolist() and distance == 25.0, "this has changed"
assert np.allclose(found["cosine"], [[0.6, 0.8], [0.6, 0.8]]), "this has changed"
PYTHON
