#!/usr/bin/env bash
# SGD with momentum moves rows that a sparse gradient does not have, in every later step.
#
# Versions: torch 2.14.1, numpy 2.2.6 on a CPU (x86), Python 3.11.
# Guess: with nn.Embedding(sparse=True) a step moves and reads the rows of the batch
#   alone, in SGD with momentum as in SparseAdam, whose state of other rows waits.
# Seen (2026-11-28): The momentum keeps all rows that it has seen, and a step adds all
#   of it: a row that was looked up once moves on, as under a dense gradient. SparseAdam
#   leaves it alone.
#     row 0 after steps on the ids 0, 1 and 1: SGD with momentum [0.9, 0.81, 0.729]
#     row 0 after steps on the ids 0, 1 and 1: SparseAdam [0.9, 0.9, 0.9]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "torch==2.14.1" "numpy==2.2.6"
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import torch


def rows(make):
    layer = torch.nn.Embedding(3, 2, sparse=True, _weight=torch.ones(3, 2))
    optimizer, found = make(layer.parameters()), []
    for ids in ([0], [1], [1]):
        optimizer.zero_grad()
        layer(torch.tensor(ids)).sum().backward()
        optimizer.step()
        found.append(round(float(layer.weight[0, 0]), 3))
    return found


momentum = rows(lambda p: torch.optim.SGD(p, 0.1, momentum=0.9))
adam = rows(lambda p: torch.optim.SparseAdam(p, 0.1))
print(f"row 0 after steps on the ids 0, 1 and 1: SGD with momentum {momentum}")
print(f"row 0 after steps on the ids 0, 1 and 1: SparseAdam {adam}")
assert momentum == sorted(momentum, reverse=True) and len(set(momentum)) == 3, "this has changed"
assert adam == [0.9, 0.9, 0.9], "this has changed"
PYTHON
