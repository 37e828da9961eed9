"""What a map from ids to rows is good for: streams of more ids than the table has rows.

    python benchmarks/keyed_streams.py          # some minutes; writes results/

Every batch is scored before it is learned from. There are 4,096 rows for the ids of three
streams: always the same favourites of 40,000 ids; news, of which 20 come up in each step
while old ones are forgotten; and favourites among ids that never come again. The label of
an id is drawn from a probability of its own. Beside maps of several policies: ids hashed to
4,096 rows, a row for each id, a map whose rows are not begun anew, and the best loss that
is possible. ``python docs/figures/keyed.py`` draws the results.
"""

import argparse
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

import jslices as js
from jslices import dynamic

ROWS, K, IDS = 4096, 512, 40_000
TX = js.adagrad(0.7)
RESULTS = pathlib.Path(__file__).parent / "results" / "keyed_streams.json"
MAPS = {
    "lru": {},
    "lfu": {"policy": "lfu", "half_life": 500},
    "tinylfu, second sighting": {
        "policy": "tinylfu",
        "half_life": 500,
        "after": 2,
        "shared": 1024,
    },
}


def zipf(rng, size):
    odds = 1 / np.arange(1, IDS + 1) ** 1.1
    return rng.choice(IDS, size, p=odds / odds.sum())


def stream(kind, steps):
    """Numbers of ids int32 ``[steps, K]``, ids int64, labels, and the best possible."""
    rng = np.random.default_rng(0)
    numbers = zipf(rng, (steps, K))
    if kind == "news":
        numbers = 20 * np.arange(steps)[:, None] + IDS - numbers
    elif kind == "noise":  # what comes once
        once = IDS + np.arange(numbers.size).reshape(numbers.shape)
        numbers = np.where(rng.random(numbers.shape) < 0.5, numbers, once)
    count = numbers.max() + 1
    ids = rng.integers(0, 2**63, count)[numbers]
    odds = 1 / (1 + np.exp(-1.5 * rng.normal(size=count)[numbers]))
    labels = (rng.random(ids.shape) < odds).astype(np.float32)
    odds = odds[steps // 2 :]
    best = -(odds * np.log(odds) + (1 - odds) * np.log(1 - odds)).mean()
    return numbers.astype(np.int32), ids, labels, float(best)


def train(params, state, rows, labels):
    def loss(params):
        logits = params[rows].sum(-1)
        return jnp.sum(jnp.logaddexp(0.0, logits) - labels * logits)

    value, grads = js.value_and_grad(loss)(params)
    return *TX.apply(grads, state, params), value / K


def hashed(carry, batch):
    ids, labels = batch
    *carry, value = train(*carry, ids, labels)
    return tuple(carry), {"loss": value}


def keyed(resets, carry, batch):
    (ids, params, state), (words, labels) = carry, batch
    ids, out = ids.admit(words)
    if resets:
        params, state = js.checkpoint.reset_rows(TX, params, state, out.fresh, 0.0)
    *carry, value = train(params, state, out.rows, labels)
    shown = {
        "loss": value,
        "in_use": jnp.mean(ids.last > 0),
        "evicted": jnp.sum(out.evicted.high != dynamic.wide_ids([-1]).high),
    }
    return (ids, *carry), shown


def run(step, carry, batches):
    _, shown = jax.jit(functools.partial(jax.lax.scan, step))(carry, batches)
    return {name: np.asarray(x) for name, x in shown.items()}


def start(rows):
    params = jnp.zeros((rows, 1))
    return params, TX.init(params)


def contenders(numbers, ids, labels):
    """What each shows in every step."""
    perfect = start(numbers.max() + 1)
    yield "a row for each id", run(hashed, perfect, (jnp.asarray(numbers), labels))
    modulo = jnp.asarray(ids % ROWS, jnp.int32)
    yield "hashed", run(hashed, start(ROWS), (modulo, labels))
    words = jax.tree.map(jnp.asarray, dynamic.wide_ids(ids))
    for name, options in {**MAPS, "lru, rows not reset": {}}.items():
        empty = dynamic.id_map(ROWS, **options)
        step = functools.partial(keyed, "not" not in name)
        yield name, run(step, (empty, *start(empty.num_rows)), (words, labels))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--keep", action="store_true", help="write results/")
    args = parser.parse_args()
    found = {}
    for kind in ("fixed", "news", "noise"):
        *batches, labels, best = stream(kind, args.steps)
        print(f"{kind}: {len(np.unique(batches[0])):,} ids, best possible {best:.4f}")
        each = max(1, args.steps // 40)
        found[kind] = {"best": best, "every": each}
        for name, shown in contenders(*batches, jnp.asarray(labels)):
            late = float(shown["loss"][args.steps // 2 :].mean())
            print(f"  {name:25} {late:.4f}", flush=True)
            curves = {
                k: x.reshape(-1, each).mean(1).round(4).tolist() for k, x in shown.items()
            }
            found[kind][name] = {"late": late, **curves}
    if args.keep:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
