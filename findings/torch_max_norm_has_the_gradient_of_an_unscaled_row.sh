#!/usr/bin/env bash
# The gradient of nn.Embedding(max_norm=1) is that of a row that was not scaled.
#
# Versions: torch 2.14.1, numpy 2.2.6 on a CPU (x86), Python 3.11.
# Guess: max_norm scales the rows that are read, so the gradient of the first number of
#   [3, 4] read with norm 1 is that of the scaled row, [0.128, -0.096].
# Seen (2026-11-28): It is [1, 0]: the weight itself is scaled in place before the
#   lookup, without a gradient, in eval mode and under no_grad as well, so that
#   evaluating changes the model.
#     gradient [1.0, 0.0]; of the scaled row [0.128, -0.096]
#     the weight after evaluating: [0.6, 0.8]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "torch==2.14.1" "numpy==2.2.6"
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import torch

weight = torch.tensor([[3.0, 4.0]])
layer = torch.nn.Embedding(1, 2, max_norm=1.0, _weight=weight.clone())
layer(torch.tensor([0]))[0, 0].backward()
grad = layer.weight.grad[0].tolist()
free = weight.clone().requires_grad_()
(free / free.norm())[0, 0].backward()
wanted = [round(x, 3) for x in free.grad[0].tolist()]
print(f"gradient {grad}; of the scaled row {wanted}")
evaluated = torch.nn.Embedding(1, 2, max_norm=1.0, _weight=weight.clone()).eval()
with torch.no_grad():
    evaluated(torch.tensor([0]))
after = [round(x, 3) for x in evaluated.weight[0].tolist()]
print(f"the weight after evaluating: {after}")
assert grad == [1, 0] and wanted == [0.128, -0.096] and after == [0.6, 0.8], "this has changed"
PYTHON
