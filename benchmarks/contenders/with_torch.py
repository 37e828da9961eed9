"""PyTorch: nn.Embedding, sparse with SparseAdam and the like, or dense."""

import torch

from contenders import BAG, on_gpu

VERSION = f"torch {torch.__version__}"


def wait(loss):
    loss.item()


def make(optimizer, num_rows, dim, rate, sparse, read="gather"):
    bags = {"mode": "sum"} if read == "bags" else {}
    device = "cuda" if on_gpu() else "cpu"
    weight = torch.ones(num_rows, dim, device=device)
    layer = (torch.nn.EmbeddingBag if bags else torch.nn.Embedding)(
        num_rows, dim, sparse=sparse, _weight=weight, **bags
    )
    kinds = {
        "sgd": torch.optim.SGD,
        "adagrad": torch.optim.Adagrad,
        "adam": torch.optim.SparseAdam if sparse else torch.optim.Adam,
    }
    tx = kinds[optimizer](layer.parameters(), rate)

    def step(ids):
        tx.zero_grad()
        loss = 0.5 / ids.numel() * (layer(ids) ** 2).sum()
        loss.backward()
        tx.step()
        return loss

    shape = (-1, BAG) if bags else -1
    return step, lambda ids: torch.tensor(ids, dtype=torch.int64, device=device).view(shape)
