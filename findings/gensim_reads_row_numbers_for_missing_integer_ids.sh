#!/usr/bin/env bash
# In gensim an integer id that has no vector reads the row of that number.
#
# Versions: gensim 4.4.0, numpy 2.2.6, Python 3.11 (x86).
# Guess: of vectors for items 10 and 0 (ids of products, as in item2vec), item 1 is
#   missing, and kv[1] raises KeyError as a missing word does.
# Seen (2026-11-28): A key that is an integer and not in the vocabulary is taken as a
#   row number: kv[1] is the vector of item 0. Only integers beyond the rows raise. Ids
#   as strings raise.
#     items 10 and 0 by int: of 10, 0, 1, 2 the vectors are [100.0, 200.0, 200.0, 'KeyError']
#     items 10 and 0 by str: of 10, 0, 1, 2 the vectors are [100.0, 200.0, 'KeyError', 'KeyError']
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "gensim==4.4.0" "numpy==2.2.6"
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import numpy as np
from gensim.models import KeyedVectors


def read(vectors, key):
    try:
        return float(vectors[key][0])
    except KeyError:
        return "KeyError"


found = {}
for kind in (int, str):
    vectors = KeyedVectors(1)
    vectors.add_vectors([kind(10), kind(0)], np.array([[100.0], [200.0]]))
    found[kind] = [read(vectors, kind(key)) for key in (10, 0, 1, 2)]
    print(f"items 10 and 0 by {kind.__name__}: of 10, 0, 1, 2 the vectors are {found[kind]}")
assert found[int] == [100, 200, 200, "KeyError"], "this has changed"
assert found[str] == [100, 200, "KeyError", "KeyError"], "this has changed"
PYTHON
