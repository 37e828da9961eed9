"""A step of node2vec beside PyTorch Geometric's, on the same walks, in turns.

    pip install ".[demo]" torch torch-geometric
    python benchmarks/node2vec.py

The sizes are those of PyTorch Geometric's example: 128 numbers a node, walks of 20 nodes,
ten from each of 128 nodes and as many of nodes drawn at random, contexts of ten, and
SparseAdam. The graph is made up: 169,343 nodes, as many as ogbn-arxiv has, with neighbours
drawn as words occur. Walks are drawn before, and cut into the contexts that PyTorch
Geometric reads, 281,600 rows a step. jslices takes these too, and the walks as they are: it
reads their rows, 51,200, once for all contexts. All start from the same table, and their
first losses must agree; all keep memory. Compare ratios.
"""

import argparse
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from contenders.ids import batches as drawn
from turns import compare

import jslices as js

NODES, DEGREE, DIM = 169_343, 7, 128
WALKS, LENGTH, CONTEXT, RATE = 1280, 20, 10, 1e-2
BATCHES = 4


def walk(rng, neighbours):
    """``[WALKS, LENGTH]`` nodes, each a neighbour of the one before."""
    nodes = [rng.integers(0, NODES, WALKS)]
    while len(nodes) < LENGTH:
        nodes.append(neighbours[nodes[-1], rng.integers(0, DEGREE, WALKS)])
    return np.stack(nodes, axis=1)


def contexts(walks):
    """``[WALKS * (LENGTH - CONTEXT + 1), CONTEXT]``: each part of a walk of that length."""
    parts = np.lib.stride_tricks.sliding_window_view(walks, CONTEXT, axis=1)
    return parts.reshape(-1, CONTEXT)


def of_contexts(table, nodes):
    """How near the first of each context is to the others: ``[n, CONTEXT - 1]``."""
    rows = table[nodes]
    return (rows[:, :1] * rows[:, 1:]).sum(axis=2)


def of_walks(table, walks):
    """The same of all contexts of n walks: ``[CONTEXT - 1, n, LENGTH - CONTEXT + 1]``."""
    rows, count = table[walks], LENGTH - CONTEXT + 1
    far = (rows[:, away : away + count] for away in range(1, CONTEXT))
    return jnp.stack([(rows[:, :count] * each).sum(axis=2) for each in far])


def step_of_jslices(scores, table, batches):
    def loss(table, near, random):
        true, false = scores(table, near), scores(table, random)
        return -(jax.nn.log_sigmoid(true).mean() + jax.nn.log_sigmoid(-false).mean())

    tx = js.adam(RATE)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(table, state, near, random):
        value, grads = js.value_and_grad(loss)(table, near, random)
        return *tx.apply(grads, state, table), value

    table = jnp.asarray(table)
    held = [table, tx.init(table)]
    batches = itertools.cycle(jax.tree.map(jnp.asarray, batches))

    def run():
        *held[:], value = step(*held, *next(batches))
        return float(value)

    return run


def step_of_geometric(table, batches):
    import torch
    from torch_geometric.nn import Node2Vec

    class Model(Node2Vec):
        """Without what draws walks, which takes pyg-lib."""

        def __init__(self, table):
            torch.nn.Module.__init__(self)
            self.embedding = torch.nn.Embedding.from_pretrained(
                table, freeze=False, sparse=True
            )
            self.embedding_dim, self.EPS = DIM, 1e-15

    net = Model(torch.from_numpy(table.copy()))
    tx = torch.optim.SparseAdam(net.parameters(), RATE)
    batches = itertools.cycle([tuple(map(torch.from_numpy, each)) for each in batches])

    def run():
        tx.zero_grad()
        loss = net.loss(*next(batches))
        loss.backward()
        tx.step()
        return loss.item()

    return run


CONTENDERS = {
    "jslices": (functools.partial(step_of_jslices, of_contexts), contexts),
    "jslices, rows of walks": (functools.partial(step_of_jslices, of_walks), lambda x: x),
    "PyTorch Geometric": (step_of_geometric, contexts),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--timed", type=int, default=5, help="steps in a turn")
    options = parser.parse_args()
    js.keep_memory()  # which is the process's, so PyTorch's as well
    rng = np.random.default_rng(0)
    neighbours = drawn(NODES, NODES * DEGREE, "zipf", 1)[0].reshape(NODES, DEGREE)
    walks = [
        (walk(rng, neighbours), rng.integers(0, NODES, (WALKS, LENGTH)))
        for _ in range(BATCHES)
    ]
    table = rng.normal(0, 0.3, (NODES, DIM)).astype(np.float32)
    makers = {
        name: functools.partial(make, table, [tuple(map(form, each)) for each in walks])
        for name, (make, form) in CONTENDERS.items()
    }
    compare("node2vec", makers, options)


if __name__ == "__main__":
    main()
