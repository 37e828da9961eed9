"""What examples/ngram_memory.py shows: losses, state, times, and programs for pods.

    python benchmarks/language_model.py losses     every optimizer, three seeds: an hour
    python benchmarks/language_model.py times      a step beside dense Optax: minutes
    python benchmarks/language_model.py v5e:16x16  bytes on the wire: pip install ".[tpu]"
    python benchmarks/language_model.py h100:8     pip install ".[gpu]"

Each writes its part of results/language_model.json, and with ``--quick`` only prints. Times
are medians of turns: believe only the ratios.
"""

import argparse
import functools
import json
import pathlib
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jslices as js
import jslices.testing

sys.path.append(str(pathlib.Path(__file__).parent.parent / "examples"))
import ngram_memory as example

RESULTS = pathlib.Path(__file__).parent / "results" / "language_model.json"
VARIANTS = ["none", *example.OPTIMIZERS]
DEVICES = {"v5e:16x16": 256, "h100:8": 8}
TRAINING = "--steps 500 --batch 8 --every 50"


def setting(*arguments):
    """``(options, sizes, graph, model)`` of the example, without its text."""
    options = example.parsed(list(map(str, arguments)))
    sizes = example.Sizes(options.vocabulary, rows=options.rows, dim=options.dim)
    return options, sizes, *nnx.split(example.Model(sizes, options.length, nnx.Rngs(0)))


def losses(quick):
    """``{variant: {"state_bytes": ..., "losses": {seed: {step: loss}}}}``."""
    results = {}
    for seed in range(1 if quick else 3):
        for name in VARIANTS:
            memory = ["--rows", 0] if name == "none" else ["--optimizer", name]
            size = ["--quick"] if quick else TRAINING.split()
            arguments = [*memory, "--seed", seed, *size]
            training, held_out = example.main(list(map(str, arguments)))
            each = results.setdefault(name, {"losses": {}})
            each["state_bytes"] = state_bytes(training)
            each["losses"][seed] = held_out
            print(name, seed, held_out, flush=True)
    return results


def state_bytes(training):
    """What the optimizer keeps for the memory."""
    if "memory" not in training.run.params:
        return 0
    rows = len(training.run.params["memory"])
    return sum(
        x.nbytes for x in jax.tree.leaves(training.run.state) if x.ndim and len(x) == rows
    )


def times(quick):
    """``{rows: {way: seconds}}``: medians of steps in turns, on the same tokens."""
    return {rows: times_of(rows, quick) for rows in ([1e3] if quick else [1e5, 1e6, 1e7])}


def times_of(rows, quick):
    def contender(optimizer):
        options, sizes, *parts = setting("--rows", rows / 8, "--optimizer", optimizer)
        return example.OnDevice(sizes, options, *parts)

    ours = {name: contender(name) for name in ("lazy_adam", "rowwise_adagrad")}
    options, sizes, graph, model = setting("--rows", rows / 8)
    params = {"model": model, "memory": jnp.zeros((8 * sizes.rows, sizes.dim))}
    tx = optax.adam(1e-3)
    carried = [params, tx.init(params)]

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def dense(params, state, tokens):
        loss = functools.partial(example.loss, graph, sizes)
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    def optax_step(tokens):
        *carried[:], value = dense(*carried, tokens)
        return value

    steps = {name: training.step for name, training in ours.items()}
    steps["optax.adam, dense"] = optax_step
    seconds = {name: [] for name in steps}
    rng = np.random.default_rng(0)
    for turn in range(3 if quick else 12):
        drawn = options.vocabulary ** rng.random((options.batch, options.length + 1))
        for name, step in steps.items():
            start = time.perf_counter()
            jax.block_until_ready(step(drawn.astype(np.int32)))
            if turn > 1:
                seconds[name].append(time.perf_counter() - start)
    found = {name: statistics.median(each) for name, each in seconds.items()}
    print(rows, found, flush=True)
    return found


def on_devices(name, quick):
    """A step of 1e9 rows of 128 that are split over all devices, 1,024 tokens on each."""
    count = DEVICES[name]
    rows = 10**9 // 8 // count * count
    options, sizes, graph, model = setting(
        "--rows", rows, "--dim", 128, "--batch", 16 * count
    )
    axis = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh((count,), ("x",), axis_types=axis)

    def array(x, spec):
        sharding = jax.NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    by_rows, everywhere = jax.P("x"), jax.P()
    table = jax.ShapeDtypeStruct((8 * rows, sizes.dim), jnp.float32)
    params = {
        "model": jax.tree.map(lambda x: array(x, everywhere), model),
        "memory": array(table, by_rows),
    }
    memory, other = example.optimizers(options)
    tx = js.optim.partition(
        {"memory": memory, "model": other}, {"memory": "memory", "model": "model"}
    )
    state = jax.tree.map(
        lambda x: array(x, by_rows if x.ndim and len(x) == 8 * rows else everywhere),
        jax.eval_shape(tx.init, params),
    )
    shape = options.batch, options.length + 1
    tokens = array(jax.ShapeDtypeStruct(shape, jnp.int32), jax.P("x"))
    loss = functools.partial(example.loss, graph, sizes)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, tokens):
        value, grads = js.value_and_grad(
            loss,
            sparse=functools.partial(example.sparse, options.optimizer),
            exchange={"memory": js.Exchange("x", overflow="nan")},
        )(params, tokens)
        params, state = tx.apply(grads, state, params)
        return params, state, value

    memory = js.testing.assert_in_place(step, params, state, tokens, device=name)
    traffic = js.testing.collectives(step, params, state, tokens, device=name)
    print(name, memory, traffic, sep="\n", flush=True)
    return {
        "rows": 8 * rows,
        "tokens": options.batch * options.length,
        **memory._asdict(),
        "received_bytes": traffic.most,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=["losses", "times", *DEVICES])
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    parts = {"losses": losses, "times": times}
    part = parts.get(options.part, functools.partial(on_devices, options.part))
    found = {"jax": jax.__version__, **part(options.quick)}
    if not options.quick:
        results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        RESULTS.write_text(json.dumps({**results, options.part: found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
