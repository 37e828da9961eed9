#!/usr/bin/env bash
# FBGEMM reads and trains row 0 for an id beyond the table, and raises for -1.
#
# Versions: fbgemm-gpu-cpu 1.9.0, torch 2.14.1, numpy 2.2.6 on a CPU (x86), Python 3.11.
# Guess: BoundsCheckMode.WARNING, the default, warns of an id beyond the table and
#   ignores it: it reads zeros and trains nothing. Padding of -1 is treated alike.
# Seen (2026-11-28): The id is replaced by 0 before the lookup, so row 0 is read and its
#   gradient steps row 0. -1 passes the check, as a row that was pruned, and the lookup
#   on a CPU raises.
#     id 6 of 6 rows reads [0.0, 1.0, 2.0, 3.0], row 0 is [0.0, 1.0, 2.0, 3.0]
#     after the step row 0 is [-1.0, 0.0, 1.0, 2.0]
#     id -1: RuntimeError: Index 0 is out of bounds: -1, range 0 to 6
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "fbgemm-gpu-cpu==1.9.0" "torch==2.14.1" "numpy==2.2.6"
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import logging

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)

logging.disable()
where = [(6, 4, EmbeddingLocation.HOST, ComputeDevice.CPU)]
tables = SplitTableBatchedEmbeddingBagsCodegen(
    where, optimizer=EmbOptimType.EXACT_SGD, learning_rate=1.0
)
weight = tables.split_embedding_weights()[0]
weight.data.copy_(torch.arange(24.0).reshape(6, 4))
read = tables(torch.tensor([6]), torch.tensor([0, 1]))
print(f"id 6 of 6 rows reads {read[0].tolist()}, row 0 is {weight[0].tolist()}")
read.sum().backward()
print(f"after the step row 0 is {weight[0].tolist()}")
try:
    minus = tables(torch.tensor([-1]), torch.tensor([0, 1])).tolist()
except RuntimeError as error:
    minus = f"RuntimeError: {str(error).splitlines()[0][:60]}"
print(f"id -1: {minus}")
assert read[0].tolist() == [0, 1, 2, 3] and weight[0].tolist() == [-1, 0, 1, 2], "this has changed"
assert "RuntimeError" in minus, "this has changed"
PYTHON
