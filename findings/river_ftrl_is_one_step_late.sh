#!/usr/bin/env bash
# river's FTRL computes weights from what it knew before the gradient.
#
# Versions: river 0.26.1, numpy 2.2.6 on a CPU (x86), Python 3.11.
# Guess: after a step of FTRLProximal the weights are those of its z and n, as in the
#   paper and in TensorFlow.
# Seen (2026-11-29): They are those of the z and n before it: the first step moves
#   nothing, and the last gradient of a run is never used.
#     weights after each step: [0.0, -0.05, -0.0736]
#     those of z and n then:   [-0.05, -0.0736, -0.0128]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "river==0.26.1" "numpy==2.2.6"
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
from river import optim

optimizer = optim.FTRLProximal(alpha=0.1, beta=1.0, l1=0.0, l2=0.0)
weights, of_state, found = {"x": 0.0}, [], []
for gradient in (1.0, 0.5, -2.0):
    weights = dict(optimizer.step(weights, {"x": gradient}))
    found.append(round(float(weights["x"]), 4))
    z, n = optimizer.z["x"], optimizer.n["x"]
    of_state.append(round(float(-z / ((1.0 + n**0.5) / 0.1)), 4))
print(f"weights after each step: {found}")
print(f"those of z and n then:   {of_state}")
assert found[0] == 0.0 and found[1:] == of_state[:-1] != found[:-1], "this has changed"
PYTHON
