#!/usr/bin/env bash
# In Keras the mean of masked embeddings is NaN for a text of nothing but padding.
#
# Versions: keras 3.15.1 on jax and jaxlib 0.10.2 on a CPU (x86), Python 3.11.
# Guess: Embedding(mask_zero=True) and GlobalAveragePooling1D give zeros for a row of
#   padding (a user without a history), as PyTorch's EmbeddingBag does.
# Seen (2026-11-28): The mean divides by the number of ids that are not masked, which is
#   zero. One empty row in a batch makes the loss NaN, and its gradient the whole model.
#     ids [1, 2]: 2.0
#     ids [1, 0]: 1.0
#     ids [0, 0]: nan
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "jax==0.10.2" "numpy==2.2.6" "keras==3.15.1"
cd "$folder"
JAX_PLATFORMS=cpu KERAS_BACKEND=jax "$folder/venv/bin/python" - <<'PYTHON'
import keras
import numpy as np

layers = [keras.layers.Embedding(3, 1, mask_zero=True), keras.layers.GlobalAveragePooling1D()]
model = keras.Sequential([keras.layers.Input((2,)), *layers])
model.set_weights([np.array([[5.0], [1.0], [3.0]])])
ids = np.array([[1, 2], [1, 0], [0, 0]])
means = np.asarray(model(ids))[:, 0]
for row, mean in zip(ids.tolist(), means.tolist()):
    print(f"ids {row}: {mean}")
assert means[:2].tolist() == [2, 1] and np.isnan(means[2]), "this has changed"
PYTHON
