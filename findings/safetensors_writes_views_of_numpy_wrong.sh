#!/usr/bin/env bash
# safetensors writes a transposed, strided or reversed array of NumPy as other numbers, silently.
#
# Versions: safetensors 0.8.0, numpy 2.2.6, Python 3.11 (x86).
# Guess: safetensors.numpy.save_file copies what is not contiguous, or refuses it as it
#   does tensors of PyTorch that are not contiguous.
# Seen (2026-11-28): The file has the shape of the view and the numbers of the memory
#   behind it, from its first byte on: W.T comes back as another matrix, without an error.
#   np.ascontiguousarray before save_file is right.
#     W.T: shape (3, 2), right: False
#     W[:, ::2]: shape (2, 2), right: False
#     W[::-1]: shape (2, 3), right: False
#     np.ascontiguousarray(W.T): shape (3, 2), right: True
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "safetensors==0.8.0" "numpy==2.2.6"
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import numpy as np
from safetensors.numpy import load_file, save_file

W = np.arange(6, dtype=np.float32).reshape(2, 3)
views = {
    "W.T": W.T,
    "W[:, ::2]": W[:, ::2],
    "W[::-1]": W[::-1],
    "np.ascontiguousarray(W.T)": np.ascontiguousarray(W.T),
}
for name, view in views.items():
    save_file({"w": view}, "w.safetensors")
    back = load_file("w.safetensors")["w"]
    right = np.array_equal(back, view)
    print(f"{name}: shape {back.shape}, right: {right}")
    assert right == ("contiguous" in name), "this has changed"
PYTHON
