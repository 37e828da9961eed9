"""What examples/ngram_memory.py shows: losses, state, times, and programs for pods.

    python benchmarks/language_model.py losses     every optimizer, 3 seeds: half an hour
    python benchmarks/language_model.py times      a step beside dense Optax: minutes
    python benchmarks/language_model.py v5e:16x16  bytes on the wire: pip install ".[tpu]"
    python benchmarks/language_model.py h100:8     pip install ".[gpu]"
    python benchmarks/language_model.py page       docs/language_models.md, from the results

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

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "language_model.json"
PAGE = ROOT / "docs" / "language_models.md"
BEGIN, END = "<!-- made by benchmarks/language_model.py: {} -->\n\n", "\n<!-- end -->\n"
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
    """``{rows: {way: ...}}``: seconds, and multiples of row-wise Adagrad's in each turn."""
    sizes = [1_000] if quick else [100_000, 1_000_000, 10_000_000]
    return {rows: times_of(rows, quick) for rows in sizes}


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
    for turn in range(3 if quick else 10):
        drawn = options.vocabulary ** rng.random((options.batch, options.length + 1))
        for name, step in steps.items():
            start = time.perf_counter()
            jax.block_until_ready(step(drawn.astype(np.int32)))
            if turn > 1:
                seconds[name].append(time.perf_counter() - start)
    ours = seconds["rowwise_adagrad"]
    result = {
        name: {
            "seconds": statistics.median(each),
            "times": statistics.median(x / y for x, y in zip(each, ours, strict=True)),
        }
        for name, each in seconds.items()
    }
    print(rows, result, flush=True)
    return result


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


# --- The page -------------------------------------------------------------------------


def losses_table(results):
    lines = [
        "| memory | loss, held out | state, MB | of dense Adam's |",
        "|---|---:|---:|---:|",
    ]
    dense = results["losses"]["dense_adam"]["state_bytes"]
    for name in VARIANTS:
        each = results["losses"][name]
        last = [list(curve.values())[-1] for curve in each["losses"].values()]
        state = each["state_bytes"]
        share = f"1/{dense / state:.0f}" if state else "0"
        loss = f"{np.mean(last):.3f} ± {np.std(last, ddof=1):.3f}"
        lines.append(f"| {name.replace('_', ' ')} | {loss} | {state / 1e6:.1f} | {share} |")
    return lines


def times_table(results):
    times = {rows: x for rows, x in results["times"].items() if rows != "jax"}
    ways = list(next(iter(times.values())))
    lines = [f"| rows | {' | '.join(way.replace('_', ' ') for way in ways)} |"]
    lines.append(f"|---:|{'---:|' * len(ways)}")
    for rows, each in times.items():
        cells = (f"{each[way]['times']:.1f}" for way in ways)
        lines.append(f"| {int(rows):,} | {' | '.join(cells)} |")
    return lines


def devices_table(results):
    names = {
        "argument_bytes": "tables, state and weights",
        "temp_bytes": "temporaries",
        "received_rows_bytes": "received: ids, rows, gradients",
        "received_bytes": "received in all",
    }
    lines = [f"| MB on each of | {' | '.join(names.values())} |", f"|---|{'---:|' * 4}"]
    for device in filter(results.get, DEVICES):
        cells = (f"{results[device][name] / 1e6:,.1f}" for name in names)
        lines.append(f"| `{device}` | {' | '.join(cells)} |")
    return lines


def page(text, results):
    """The page with its tables as the results have them."""
    tables = {"losses": losses_table, "times": times_table, "devices": devices_table}
    for name, table in tables.items():
        before, rest = text.split(BEGIN.format(name))
        after = rest.split(END, 1)[1]
        shown = "\n".join(table(results))
        text = f"{before}{BEGIN.format(name)}{shown}\n{END}{after}"
    return text


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=["losses", "times", *DEVICES, "page"])
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if options.part == "page":
        PAGE.write_text(page(PAGE.read_text(), results))
        return
    parts = {"losses": losses, "times": times}
    part = parts.get(options.part, functools.partial(on_devices, options.part))
    result = {"jax": jax.__version__, **part(options.quick)}
    if not options.quick:
        results[options.part] = result
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
