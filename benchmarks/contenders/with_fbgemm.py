"""FBGEMM's tables on a CPU, as TorchRec uses them: the backward pass makes the update."""

import fbgemm_gpu
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)

from contenders import BAG
from contenders.with_torch import wait as wait

VERSION = f"fbgemm-gpu {fbgemm_gpu.__version__}"
RULES = {
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
}


def make(optimizer, num_rows, dim, rate, read="gather"):
    bag = BAG if read == "bags" else 1
    layer = SplitTableBatchedEmbeddingBagsCodegen(
        [(num_rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=RULES[optimizer],
        learning_rate=rate,
    )
    layer.split_embedding_weights()[0].data.fill_(1.0)

    def step(batch):
        ids, starts = batch
        loss = 0.5 / len(ids) * (layer(ids, starts) ** 2).sum()
        loss.backward()
        return loss

    def convert(ids):
        return torch.from_numpy(ids.astype("int64")), torch.arange(0, len(ids) + 1, bag)

    return step, convert
