#!/usr/bin/env bash
# model2vec divides the weighted sum of its rows by the number of tokens.
#
# Versions: model2vec 0.10.0, tokenizers 0.23.3, numpy 2.2.6 on a CPU (x86), Python
#   3.11.
# Guess: with weights of tokens a text is the weighted mean of its rows: the sum divided
#   by the sum of the weights.
# Seen (2026-11-29): It is divided by the number of tokens, so that a text of rare words
#   is longer than one of frequent words by as much as their weights.
#     rows of ones, weights 0.25 of 'the' and 2 of 'sea'
#     'the the', 'the sea' and 'sea sea': [0.25, 1.125, 2.0]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "model2vec==0.10.0" "tokenizers==0.23.3" "numpy==2.2.6"
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import numpy as np
from model2vec import StaticModel
from tokenizers import Tokenizer, models, pre_tokenizers

words = ["[UNK]", "the", "sea"]
tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
rows, weights = np.ones((3, 1), np.float32), np.array([1.0, 0.25, 2.0], np.float32)
model = StaticModel(rows, tokenizer, weights=weights, normalize=False)
found = [float(model.encode([text])[0, 0]) for text in ("the the", "the sea", "sea sea")]
print("rows of ones, weights 0.25 of 'the' and 2 of 'sea'")
print(f"'the the', 'the sea' and 'sea sea': {found}")
assert found == [0.25, 1.125, 2.0], "this has changed"
PYTHON
