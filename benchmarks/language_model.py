"""What examples/ngram_memory.py shows: losses, state, times, and programs for pods.

    python benchmarks/language_model.py losses     every optimizer, 3 seeds: half an hour
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
TRAINING = "--steps 300 --batch 8 --every 100"


def setting(*arguments):
    """``(options, sizes, graph, model)`` of the example, without its text."""
    options = example.parsed(list(map(str, arguments)))
    sizes = example.Sizes(options.vocabulary, rows=options.rows, dim=options.dim)
    return options, sizes, *nnx.split(example.Model(sizes, options.length, nnx.Rngs(0)))


def losses(quick):
    """``{variant: {"state_bytes": ..., "losses": {seed: {step: loss}}}}``."""
    results = {"arguments": TRAINING}
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
    tables = training.run.params["memory"].shape[:3]
    leaves = jax.tree.leaves(training.run.state)
    return sum(x.nbytes for x in leaves if x.shape[:3] == tables)


def times(quick):
    """``{rows: {way: seconds}}``: medians of steps in turns, on the same tokens."""
    return {rows: times_of(rows, quick) for rows in ([1e3] if quick else [1e5, 1e6, 1e7])}


def times_of(rows, quick):
    """All with rows of 16, so that three trainings of 1e7 rows fit into 8 GB."""

    def contender(optimizer):
        options, sizes, *parts = setting(*memory, "--optimizer", optimizer)
        return example.OnDevice(sizes, options, *parts)

    memory = "--rows", rows / 8, "--dim", 16
    steps = {name: contender(name).step for name in ("lazy_adam", "rowwise_adagrad")}
    options, sizes, graph, model = setting(*memory)
    params = {"model": model, "memory": jnp.zeros(sizes.memory)}
    tx = optax.adam(1e-3)
    carried = [params, tx.init(params)]
    loss = functools.partial(example.loss, graph, sizes)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def dense(params, state, tokens):
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    def optax_step(tokens):
        *carried[:], value = dense(*carried, tokens)
        return value

    steps["dense optax.adam"] = optax_step
    seconds = {name: [] for name in steps}
    rng = np.random.default_rng(0)
    for turn in range(3 if quick else 12):
        drawn = options.vocabulary ** rng.random((options.batch, options.length + 1))
        for name, step in steps.items():
            start = time.perf_counter()
            jax.block_until_ready(step(drawn.astype(np.int32)))
            if turn > 1:
                seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    print(rows, medians, flush=True)
    return medians


def on_devices(name, quick):
    """A step of 1e9 rows of 128 that are split over all devices, 1,024 tokens on each."""
    count = DEVICES[name]
    rows = (2**10 if quick else 10**9 // 8) // count * count
    options, sizes, graph, model = setting(
        "--rows", rows, "--dim", 128, "--batch", 16 * count
    )
    axis = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh((count,), ("x",), axis_types=axis)
    flat = 8 * rows, sizes.dim  # devices divide the rows of all tables together

    def array(x, spec):
        sharding = jax.NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    def split(x):
        return array(x, jax.P("x") if x.shape[:1] == flat[:1] else jax.P())

    memory, other = example.optimizers(options)
    params = {"model": model, "memory": jax.ShapeDtypeStruct(flat, jnp.float32)}
    tx = js.optim.partition(
        {"memory": memory, "model": other}, {name: name for name in params}
    )
    params, state = jax.tree.map(split, (params, jax.eval_shape(tx.init, params)))
    shape = options.batch, options.length + 1
    tokens = array(jax.ShapeDtypeStruct(shape, jnp.int32), jax.P("x"))

    def loss(params, tokens):
        tables = {**params, "memory": params["memory"].reshape(sizes.memory)}
        return example.loss(graph, sizes, tables, tokens)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, tokens):
        value, grads = js.value_and_grad(
            loss,
            sparse=functools.partial(example.sparse, options.optimizer),
            exchange={"memory": js.Exchange("x", overflow="nan")},
        )(params, tokens)
        params, state = tx.apply(grads, state, params)
        return params, state, value

    traffic = js.testing.collectives(step, params, state, tokens, device=name)
    memory = js.testing.assert_in_place(step, params, state, tokens, device=name)
    print(name, memory, traffic, sep="\n", flush=True)
    of_rows = sum(x.received for x in traffic.collectives if x.kind == "all-to-all")
    return {
        "rows": 8 * rows,
        "tokens": options.batch * options.length,
        **memory._asdict(),
        "received_bytes": traffic.most,
        "received_rows_bytes": of_rows,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=["losses", "times", *DEVICES])
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    parts = {"losses": losses, "times": times}
    part = parts.get(options.part, functools.partial(on_devices, options.part))
    result = {"jax": jax.__version__, **part(options.quick)}
    if not options.quick:
        results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        RESULTS.write_text(json.dumps({**results, options.part: result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
