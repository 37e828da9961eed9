"""A step of a knowledge graph's model beside PyKEEN's, on the same facts, in turns.

    pip install ".[demo]" pykeen
    python benchmarks/knowledge_graph.py

The sizes are those of WN18RR and of notebooks/knowledge_graph.ipynb: 40,943 entities, 11
relations and as many backwards, 200 numbers each, 512 facts a step that share 1,024 wrong
answers, each weighed by how well it scores. Facts are drawn at random. PyKEEN scores them
by its own models, ``score_hrt`` and, of the wrong answers, ``score_t``, with ``NSSALoss``
and PyTorch's Adam; its loop would draw wrong answers for every fact apart, which takes far
longer. Both start from the same tables, and their first losses must agree. Compare ratios.
"""

import argparse
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from turns import compare

import jslices as js

ENTITIES, RELATIONS, DIM = 40_943, 11, 200
FACTS, WRONG, RATE = 512, 1024, 5e-3
BATCHES = 8


def product(head, relation):
    return head * relation


def complex_product(head, relation):
    (a, b), (c, d) = (jnp.split(x, 2, axis=-1) for x in (head, relation))
    return jnp.concatenate([a * c - b * d, a * d + b * c], axis=-1)


QUERIES = {"DistMult": product, "ComplEx": complex_product}


def drawn(rng):
    """``(tables, batches)``; of a batch ``(facts [FACTS, 3], wrong [WRONG])``."""
    heights = {"entities": ENTITIES, "relations": 2 * RELATIONS}
    tables = {
        name: rng.normal(0, 0.5, (height, DIM)).astype(np.float32)
        for name, height in heights.items()
    }
    limits = [ENTITIES, 2 * RELATIONS, ENTITIES]
    facts = rng.integers(0, limits, (BATCHES, FACTS, 3))
    return tables, [(each, rng.integers(0, ENTITIES, WRONG)) for each in facts]


def step_of_jslices(model, tables, batches):
    def loss(params, facts, wrong):
        entities = params["entities"]
        query = QUERIES[model](entities[facts[:, 0]], params["relations"][facts[:, 1]])
        true = (query * entities[facts[:, 2]]).sum(axis=1)
        false = query @ entities[wrong].T
        weights = jax.nn.softmax(jax.lax.stop_gradient(false))
        told = (weights * jax.nn.log_sigmoid(-false)).sum(axis=1)
        return -(jax.nn.log_sigmoid(true) + told).mean() / 2

    tx = js.adam(RATE)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, facts, wrong):
        value, grads = js.value_and_grad(loss)(params, facts, wrong)
        return *tx.apply(grads, state, params), value

    params = jax.tree.map(jnp.asarray, tables)
    held = [params, tx.init(params)]
    batches = itertools.cycle(jax.tree.map(jnp.asarray, batches))

    def run():
        *held[:], value = step(*held, *next(batches))
        return float(value)

    return run


def step_of_pykeen(model, tables, batches):
    import pykeen.models
    import torch
    from pykeen.losses import NSSALoss
    from pykeen.triples import KGInfo

    sizes = KGInfo(ENTITIES, 2 * RELATIONS, create_inverse_triples=False)
    pairs = model == "ComplEx"  # real and imaginary parts side by side
    net = getattr(pykeen.models, model)(
        triples_factory=sizes,
        embedding_dim=DIM // 2 if pairs else DIM,
        loss=NSSALoss(margin=0.0),
        regularizer=None,
    )
    layers = {
        "entities": net.entity_representations,
        "relations": net.relation_representations,
    }
    for name, (layer,) in layers.items():
        table = tables[name]
        if pairs:
            table = table.reshape(-1, 2, DIM // 2).swapaxes(1, 2)
        weight = next(layer.parameters())
        weight.data.copy_(torch.from_numpy(table.reshape(weight.shape)))
    net.train()
    tx = torch.optim.Adam(net.parameters(), RATE)
    batches = itertools.cycle([tuple(map(torch.from_numpy, each)) for each in batches])

    def run():
        facts, wrong = next(batches)
        tx.zero_grad()
        loss = net.loss.process_slcwa_scores(
            net.score_hrt(facts), net.score_t(facts[:, :2], tails=wrong)
        )
        loss.backward()
        tx.step()
        return loss.item()

    return run


CONTENDERS = {"jslices": step_of_jslices, "PyKEEN": step_of_pykeen}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", default=list(QUERIES), choices=QUERIES)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--timed", type=int, default=5, help="steps in a turn")
    options = parser.parse_args()
    for model in options.model:
        data = drawn(np.random.default_rng(0))
        makers = {
            name: functools.partial(make, model, *data) for name, make in CONTENDERS.items()
        }
        compare(model, makers, options)


if __name__ == "__main__":
    main()
