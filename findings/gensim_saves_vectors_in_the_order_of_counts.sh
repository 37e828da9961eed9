#!/usr/bin/env bash
# gensim writes word vectors in the order of their counts, not of their rows.
#
# Versions: gensim 4.4.0, numpy 2.2.6, Python 3.11 (x86).
# Guess: row 0 of kv.vectors is the first line of save_word2vec_format, so that the file
#   and an optimizer's state, or ids of a table, keep one numbering.
# Seen (2026-11-28): If words have counts, lines are sorted by these, the most frequent
#   first; loaded again, words have other row numbers than before. sort_attr=None keeps
#   the order.
#     before: ['sea', 'sun', 'sky']
#     saved and loaded: ['sun', 'sky', 'sea']
#     with sort_attr=None: ['sea', 'sun', 'sky']
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "gensim==4.4.0" "numpy==2.2.6"
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import numpy as np
from gensim.models import KeyedVectors

vectors = KeyedVectors(1)
vectors.add_vectors(["sea", "sun", "sky"], np.array([[1.0], [2.0], [3.0]]))
for word, count in {"sea": 1, "sun": 5, "sky": 3}.items():
    vectors.set_vecattr(word, "count", count)
print(f"before: {vectors.index_to_key}")
vectors.save_word2vec_format("vectors.txt")
back = KeyedVectors.load_word2vec_format("vectors.txt").index_to_key
print(f"saved and loaded: {back}")
vectors.save_word2vec_format("vectors.txt", sort_attr=None)
kept = KeyedVectors.load_word2vec_format("vectors.txt").index_to_key
print(f"with sort_attr=None: {kept}")
assert back == ["sun", "sky", "sea"] and kept == vectors.index_to_key, "this has changed"
PYTHON
