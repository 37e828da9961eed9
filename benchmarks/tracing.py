"""What row gradients cost before the first step: the time to trace and to compile it.

    python benchmarks/tracing.py                            a transformer of 12 layers
    python benchmarks/tracing.py --tables 26 --layers 0     many tables and little else

Prints the median seconds to trace and to compile one training step of AdamW with clipping
by plain JAX and Optax, and with jslices, lazy and exact, in turn in one run: seconds of
the processor, on all cores, and their ratios to the first.
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
import optax

import jslices as js


def init(tables, layers, dim, rows):
    def matrix(key, *shape):
        return jax.random.normal(key, shape) * 0.02

    keys = iter(jax.random.split(jax.random.key(0), tables + 4 * layers + 1))
    return {
        "tables": [matrix(next(keys), rows, dim) for _ in range(tables)],
        "out": matrix(next(keys), dim, 100),
        "layers": [
            {
                "qkv": matrix(next(keys), dim, 3 * dim),
                "proj": matrix(next(keys), dim, dim),
                "up": matrix(next(keys), dim, 4 * dim),
                "down": matrix(next(keys), 4 * dim, dim),
                "scale": jnp.ones(dim),
            }
            for _ in range(layers)
        ],
    }


def normalise(x):
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)


def loss(params, ids, labels):
    x = sum(table[i] for table, i in zip(params["tables"], ids, strict=True))
    mask = jnp.tril(jnp.ones((labels.shape[1], labels.shape[1]), bool))
    for layer in params["layers"]:
        q, k, v = jnp.split(normalise(x) * layer["scale"] @ layer["qkv"], 3, axis=-1)
        scores = jnp.where(mask, jnp.einsum("btd,bsd->bts", q, k), -1e9)
        x = x + jax.nn.softmax(scores) @ v @ layer["proj"]
        x = x + jax.nn.gelu(normalise(x) @ layer["up"]) @ layer["down"]
    logits = jax.nn.log_softmax(x @ params["out"])
    return -jnp.take_along_axis(logits, labels[..., None], axis=-1).mean()


def dense_step(schedule):
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))

    def step(params, state, ids, labels):
        value, grads = jax.value_and_grad(loss)(params, ids, labels)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return tx, step


def row_step(schedule, untouched):
    adamw = js.adamw(schedule, untouched=untouched)
    tx = js.optim.chain(js.optim.clip_by_global_norm(1.0), adamw)
    return tx, js.train_step(loss, tx)


def measure(tables, layers, schedule, repeats):
    """``{kind: (seconds to trace and lower, seconds to compile)}``, medians."""
    params = init(tables, layers, 64, 50_000)
    labels = jnp.zeros((8, 32), jnp.int32)
    # Of their own for each table: with the same ids XLA would sort, or add, only once.
    ids = [labels] * tables
    rate = 1e-3
    if schedule:
        rate = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 100, 1000)
    kinds = {
        "JAX + Optax": dense_step(rate),
        "lazy": row_step(rate, "lazy"),
        "exact": row_step(rate, "exact"),
    }
    traced, compiled = {k: [] for k in kinds}, {k: [] for k in kinds}
    for number in range(repeats + 1):
        for kind, (tx, step) in kinds.items():
            jax.clear_caches()
            state = tx.init(params)
            start = time.process_time()
            lowered = jax.jit(step).lower(params, state, ids, labels)
            middle = time.process_time()
            lowered.compile()
            if number:
                traced[kind].append(middle - start)
                compiled[kind].append(time.process_time() - middle)
    median = statistics.median
    return {kind: (median(traced[kind]), median(compiled[kind])) for kind in kinds}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", type=int, default=1)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--schedule", action="store_true", help="of the learning rate")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    seconds = measure(args.tables, args.layers, args.schedule, args.repeats)
    print(f"{args.tables} tables, {args.layers} layers, jax {jax.__version__}")
    print(f"{'':>12} {'trace and lower s':>18} {'compile s':>10} {'together s':>11} ratio")
    first = None
    for kind, (trace, build) in seconds.items():
        first = first or trace + build
        ratio = (trace + build) / first
        print(
            f"{kind:>12} {trace:>18.2f} {build:>10.2f} {trace + build:>11.2f} {ratio:.2f}"
        )


if __name__ == "__main__":
    main()
