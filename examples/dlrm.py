"""A recommender in the manner of DLRM: who clicks, from 13 counts and 26 tables.

    python examples/dlrm.py                                   synthetic clicks
    python examples/dlrm.py --data train.txt --rows 1e6       Criteo's, tab-separated
    python examples/dlrm.py --directory run --steps 2000      go on from the last checkpoint

The 26 tables stand in one array: one lookup of all bags, one sort, one step. Rows are
float32, and are multiplied in bfloat16. A step accumulates the gradients of micro-batches,
clips their global norm, steps tables by row-wise Adagrad and layers by Adam, and follows
with a moving average of all parameters, at the cost of the rows that moved. A batch depends
on the number of its step alone, so a run that was stopped goes on to the same bits.

Criteo's files: https://ailab.criteo.com/ressources, the Display Advertising Challenge.
"""

import argparse
import functools
import gzip
import itertools
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jslices as js
from jslices.tables import StackedTables

COUNTS = 13
#: Distinct values of each of the 26 categories in Criteo's Display Advertising Challenge.
CATEGORIES = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)


def of_criteo(most, dim):
    """Tables of at most so many rows, ``[dim]`` each."""
    sizes = {f"C{n}": min(most, size) for n, size in enumerate(CATEGORIES, 1)}
    return StackedTables({name: (size, dim) for name, size in sizes.items()})


# --- Clicks ---------------------------------------------------------------------------


class Clicks(NamedTuple):
    """B impressions; each has a bag of at most L ids for each of T tables."""

    counts: np.ndarray  #: ``[B, 13]`` float32, not negative.
    ids: np.ndarray  #: ``[B, T, L]`` int32, rows of each table.
    mask: np.ndarray  #: ``[B, T, L]`` bool, False for padding.
    clicked: np.ndarray  #: ``[B]`` bool.


def synthetic(tables, seed, longest=3):
    """A source of clicks: ids as frequent as words are, and a truth that can be learned."""
    sizes, firsts = (np.array(x)[:, None] for x in (tables.sizes, tables.offsets))
    rng = np.random.default_rng(seed)
    worth = rng.normal(size=tables.num_rows)  # of each row
    slope = rng.normal(size=COUNTS) / COUNTS

    def draw(count, number, held_out=False):
        rng = np.random.default_rng([seed, number, held_out])
        counts = np.floor(rng.lognormal(1.0, 1.5, (count, COUNTS)))
        shape = count, len(sizes), longest
        ids = np.floor((sizes + 1.0) ** rng.random(shape)).astype(int) - 1  # p(id) ~ 1 / id
        mask = np.arange(longest) < rng.integers(1, longest + 1, (*shape[:2], 1))
        of_bag = (worth[ids + firsts] * mask).sum(-1) / mask.sum(-1)
        score = of_bag.sum(-1) / np.sqrt(len(sizes)) + of_bag[:, 0] * of_bag[:, 1]
        score += np.log1p(counts) @ slope
        clicked = rng.random(count) < 1 / (1 + np.exp(1 - 2 * score))
        return Clicks(counts.astype(np.float32), ids.astype(np.int32), mask, clicked)

    return draw


def criteo(path, tables, lines, seed):
    """A source of clicks from lines of a label, 13 integers and 26 hexadecimal ids.

    Any of them but the label may be missing. An id is hashed into its table, and a missing
    one is an empty bag. The last tenth of the lines is held out.
    """
    opened = gzip.open if str(path).endswith(".gz") else open
    counts, ids, clicked = [], [], []
    with opened(path, "rt") as file:
        for line in itertools.islice(file, lines):
            label, *fields = line.rstrip("\n").split("\t")
            if len(fields) != COUNTS + len(tables.names):
                raise ValueError(f"{path}: a label, 13 and 26 fields wanted, got {line!r}")
            clicked.append(label == "1")
            counts.append([max(float(x or 0), 0) for x in fields[:COUNTS]])
            of_line = zip(fields[COUNTS:], tables.sizes, strict=True)
            ids.append([int(x, 16) % size if x else -1 for x, size in of_line])
    ids = np.array(ids, np.int32)[..., None]
    everything = Clicks(np.array(counts, np.float32), ids, ids >= 0, np.array(clicked))
    training = len(ids) - max(1, len(ids) // 10)

    def draw(count, number, held_out=False):
        span = (training, len(ids)) if held_out else (0, training)
        some = np.random.default_rng([seed, number, held_out]).integers(*span, count)
        return Clicks(*(x[some] for x in everything))

    return draw


# --- The model ------------------------------------------------------------------------


def init(key, tables, bottom, top):
    """Parameters: one array of all tables, and two stacks of layers."""
    keys = iter(jax.random.split(key, 2 + len(bottom) + len(top)))
    (dim,), num_features = tables.row_shape, 1 + len(tables.names)
    widths = {
        "bottom": (COUNTS, *bottom, dim),
        "top": (dim + num_features * (num_features - 1) // 2, *top, 1),
    }

    def layer(m, n):
        return jax.random.normal(next(keys), (m, n)) / np.sqrt(m), jnp.zeros(n)

    def rows(key, shape, dtype):
        return jax.random.uniform(key, shape, dtype, -1, 1) / np.sqrt(shape[0])

    params = {k: [layer(*x) for x in itertools.pairwise(w)] for k, w in widths.items()}
    return {"tables": tables.init(key, rows), **params}


def layers(params, x):
    for number, (w, b) in enumerate(params):
        x = (jax.nn.relu(x) if number else x) @ w.astype(x.dtype) + b.astype(x.dtype)
    return x


def logits(tables, params, clicks, dtype=jnp.bfloat16):
    """``[B]`` float32."""
    of_table = np.arange(len(tables.names))[:, None]
    rows = tables.rows(clicks.ids, of_table)
    bags = js.embedding_lookup_sparse(params["tables"], (rows, clicks.mask))  # means
    return interact(params, clicks.counts, bags, dtype)


def interact(params, counts, bags, dtype):
    """``[B]`` float32, from counts, bags ``[B, T, D]``, and products of all pairs."""
    x = layers(params["bottom"], jnp.log1p(counts).astype(dtype))
    features = jnp.concatenate([x[:, None], bags.astype(dtype)], axis=1)
    products = jnp.einsum("bid,bjd->bij", features, features)
    pairs = products[:, *np.tril_indices(features.shape[1], -1)]
    out = layers(params["top"], jnp.concatenate([x, pairs], axis=1))
    return out[:, 0].astype(jnp.float32)


def loss(tables, params, clicks):
    return entropy(logits(tables, params, clicks), clicks.clicked)


def entropy(x, clicked):
    return jnp.mean(jax.nn.softplus(x) - x * clicked)


# --- Training -------------------------------------------------------------------------


class Run(NamedTuple):
    """All that a checkpoint holds."""

    params: dict
    state: tuple  #: of the optimizer.
    gap: dict  #: the moving average less the parameters, rows as of their last step,
    last: jax.Array  #: int32 ``[V]``, which is this.
    step: jax.Array  #: int32 ``[]``, the steps done.


def optimizer(params, rate):
    """Clipping over all parameters, then a step for tables and one for layers."""
    steps = {"tables": js.rowwise_adagrad(10 * rate), "layers": js.adam(rate)}
    labels = {name: "tables" if name == "tables" else "layers" for name in params}
    clip = js.optim.clip_by_global_norm(1.0)
    return js.optim.chain(clip, js.optim.partition(steps, labels))


def start(params, tx):
    last = jnp.zeros(len(params["tables"]), jnp.int32)
    gap = jax.tree.map(jnp.zeros_like, params)
    return Run(params, tx.init(params), gap, last, jnp.zeros((), jnp.int32))


def make_step(tables, tx, decay):
    """A step on micro-batches ``[A, B, ...]``."""

    @functools.partial(jax.jit, donate_argnums=0)
    def step(run, clicks):
        def of_one(clicks):
            return js.value_and_grad(functools.partial(loss, tables))(run.params, clicks)

        value, grads = js.accumulate_gradients(of_one, clicks)
        updates, state = tx.update(grads, run.state, run.params)
        gap, last = follow(run, updates, decay)
        params = js.apply_updates(run.params, updates)
        return Run(params, state, gap, last, run.step + 1), value

    return step


def follow(run, updates, decay):
    """A moving average of all parameters, at the cost of the rows that move.

    ``average = decay * average + (1 - decay) * params``: ``gap = decay * (gap - update)``.
    A row does not move in steps that do not name it, and its gap shrinks by ``decay``; it
    is given these when it moves again.
    """
    rows = updates["tables"]  # each once; an index of V is none
    read = functools.partial(js.embedding_lookup, ids=rows.indices, mode="clip")
    missed = run.step - read(run.last)
    gap = decay * (read(run.gap["tables"]) * decay ** missed[:, None] - rows.values)
    table = js.scatter_update(run.gap["tables"], rows.indices, gap)
    gaps = jax.tree.map(
        lambda gap, update: table if js.is_slices(update) else decay * (gap - update),
        run.gap,
        updates,
        is_leaf=js.is_slices,
    )
    now = read(run.last) + missed + 1  # the step, after a read: XLA copies `last` otherwise
    return gaps, js.scatter_update(run.last, rows.indices, now)


def in_parts(clicks, count):
    return jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), clicks)


def averaged(run, decay):
    """The averages of all parameters."""
    rows = run.gap["tables"] * decay ** (run.step - run.last)[:, None]
    return jax.tree.map(jnp.add, run.params, {**run.gap, "tables": rows})


def auc(scores, clicked):
    """How often a click has a higher score than what was not clicked; ties count half."""
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
    clicks = clicked.sum()
    above = ranks[clicked].sum() - clicks * (clicks + 1) / 2
    return above / (clicks * (len(clicked) - clicks))


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--data", type=Path, help="Criteo's train.txt, also gzipped (default: synthetic)")
    add("--lines", type=float, default=1e6, help="of it, to read into memory")
    add("--rows", type=float, default=1e5, help="the most rows of a table")
    add("--dim", type=int, default=16)
    add("--batch", type=int, default=2048)
    add("--micro-batches", type=int, default=2, help="in which a batch is computed")
    add("--steps", type=int, default=500, help="in all, those of earlier runs included")
    add("--learning-rate", type=float, default=1e-3, help="of layers; 10 times it of rows")
    add("--decay", type=float, default=0.99, help="of the moving average")
    add("--directory", type=Path, help="for checkpoints; goes on from the last one")
    add("--every", type=int, default=100, help="steps from one checkpoint to the next")
    add("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.batch % options.micro_batches:
        parser.error(f"--micro-batches must divide --batch, {options.batch}")

    tables = of_criteo(int(options.rows), options.dim)
    if options.data:
        draw = criteo(options.data, tables, int(options.lines), options.seed)
    else:
        draw = synthetic(tables, options.seed)
    params = init(jax.random.key(options.seed), tables, (64, 32), (128, 64))
    tx = optimizer(params, options.learning_rate)
    run, step = start(params, tx), make_step(tables, tx, options.decay)
    saver, last = js.Saver(), None
    if options.directory:
        options.directory.mkdir(parents=True, exist_ok=True)
        last = js.checkpoint.latest_checkpoint(options.directory)
    if last:
        run = saver.restore(last, run)
        print(f"goes on after step {int(run.step)}")

    for number in range(int(run.step), options.steps):
        clicks = draw(options.batch, number)
        run, value = step(run, in_parts(clicks, options.micro_batches))
        if (number + 1) % options.every == 0 or number + 1 == options.steps:
            print(f"step {number + 1}: loss {float(value):.4f}", flush=True)
            if options.directory:
                saver.save(run, options.directory / "model", number + 1)

    score = jax.jit(functools.partial(logits, tables))
    found = {}
    for name, params in ("last", run.params), ("averaged", averaged(run, options.decay)):
        batches = [draw(options.batch, number, held_out=True) for number in range(8)]
        scores = np.concatenate([score(params, clicks) for clicks in batches])
        found[name] = auc(scores, np.concatenate([clicks.clicked for clicks in batches]))
    print("AUC on held-out clicks: " + ", ".join(f"{found[n]:.4f} ({n})" for n in found))
    return run, found


if __name__ == "__main__":
    main()
