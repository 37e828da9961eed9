#!/usr/bin/env bash
# The mean of weighted rows in FBGEMM is divided by the number of ids, not by their weights.
#
# Versions: fbgemm-gpu-cpu 1.9.0, torch 2.14.1, numpy 2.2.6 on a CPU (x86), Python 3.11.
# Guess: PoolingMode.MEAN with weights 3 and 1 is the weighted mean, (3 a + b) / 4, as
#   in TensorFlow's embedding_lookup_sparse; rows of ones have the mean 1.
# Seen (2026-11-28): It is (3 a + b) / 2: rows of ones come out as 2. Weights that do
#   not add up to the number of ids scale the output.
#     mean of two rows of ones: [1.0, 1.0, 1.0, 1.0]
#     with weights 3 and 1: [2.0, 2.0, 2.0, 2.0]
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
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)

logging.disable()
tables = SplitTableBatchedEmbeddingBagsCodegen(
    [(6, 4, EmbeddingLocation.HOST, ComputeDevice.CPU)],
    optimizer=EmbOptimType.EXACT_SGD,
    pooling_mode=PoolingMode.MEAN,
)
tables.split_embedding_weights()[0].data.fill_(1.0)
ids, splits = torch.tensor([0, 1]), torch.tensor([0, 2])
plain = tables(ids, splits)[0].tolist()
weighted = tables(ids, splits, torch.tensor([3.0, 1.0]))[0].tolist()
print(f"mean of two rows of ones: {plain}")
print(f"with weights 3 and 1: {weighted}")
assert plain == [1] * 4 and weighted == [2] * 4, "this has changed"
PYTHON
