#!/usr/bin/env bash
# The sparse gradient of one lookup in a table of one number a row is lost after sum().
#
# Versions: torch 2.14.1, numpy 2.2.6 on a CPU (x86), Python 3.11.
# Guess: nn.Embedding(V, 1, sparse=True), a table of biases, is trained as any other: a
#   step of SGD by layer(ids).sum() moves the rows of ids by the rate, for one id as for
#   two.
# Seen (2026-11-28): For one id nothing moves: the gradient's values are [[1.]],
#   expanded from a scalar (strides 0), and adding them to a dense tensor, to_dense()
#   too, adds zero. Two ids, two numbers a row, or a gradient in memory of its own are
#   right.
#     ids [0], rows of 1, strides (0, 0): moved [False, False, False]
#     ids [0], rows of 1, strides (1, 1): moved [True, False, False]
#     ids [0], rows of 2, strides (2, 1): moved [True, False, False]
#     ids [0, 2], rows of 1, strides (1, 1): moved [True, False, True]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "torch==2.14.1" "numpy==2.2.6"
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import torch


def step(ids, width, copied=False):
    layer = torch.nn.Embedding(3, width, sparse=True, _weight=torch.ones(3, width))
    optimizer = torch.optim.SGD(layer.parameters(), 0.5)
    rows = layer(torch.tensor(ids))
    rows.backward(torch.ones(len(ids), width)) if copied else rows.sum().backward()
    grad = layer.weight.grad
    optimizer.step()
    moved = (layer.weight[:, 0] != 1).tolist()
    print(f"ids {ids}, rows of {width}, strides {grad._values().stride()}: moved {moved}")
    return moved


lost = step([0], 1)
right = [step([0], 1, copied=True), step([0], 2), step([0, 2], 1)]
assert lost == [False] * 3, "this has changed"
assert right == [[True, False, False]] * 2 + [[True, False, True]], "this has changed"
PYTHON
