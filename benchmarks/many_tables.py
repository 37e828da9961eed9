"""Many tables of one model, apart, in one array, and with Optax' dense gradients.

    python benchmarks/many_tables.py --tables 1 8 26 200
    python benchmarks/many_tables.py --device h100      kernels; wants the extras tpu, gpu

A Flax NNX model of so many ``nnx.Embed`` and two layers, its code the same for all, AdamW
with warmup and cosine. Prints the seconds of the processor to trace and compile a step, its
instructions, the microseconds of a step, and ratios to dense Optax, in turns in one run.
"""

import argparse
import functools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from turns import Stopwatch, in_turns

import jslices as js
from jslices._proof.cost import cost_of
from jslices._proof.targets import target
from jslices.tables import stack_tables

DIM, ROWS, BATCH = 16, 1_500, 128
SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 3e-3, 30, 3000, 3e-5)


class Model(nnx.Module):
    def __init__(self, tables, rngs):
        self.embed = nnx.List([nnx.Embed(ROWS + n, DIM, rngs=rngs) for n in range(tables)])
        self.hidden = nnx.Linear(tables * DIM, 64, rngs=rngs)
        self.out = nnx.Linear(64, 1, rngs=rngs)

    def __call__(self, ids):
        rows = [embed(ids[:, n]) for n, embed in enumerate(self.embed)]
        return self.out(jax.nn.relu(self.hidden(jnp.concatenate(rows, -1))))[:, 0]


def contenders(tables):
    """``{name: (step, params, state)}`` of one model."""
    model, params = nnx.split(Model(tables, nnx.Rngs(0)), nnx.Param)
    params = nnx.as_pure(params)

    def loss(params, ids, labels):
        return jnp.mean((nnx.merge(model, params)(ids) - labels) ** 2)

    def dense(params, state, ids, labels):
        value, grads = jax.value_and_grad(loss)(params, ids, labels)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    optimizer = optax.adamw(SCHEDULE, weight_decay=1e-2)
    lazy = js.adamw(SCHEDULE, weight_decay=1e-2, weight_decay_mode="touched")
    exact = js.adamw(SCHEDULE, weight_decay=1e-2, untouched="exact")
    ours = {"lazy": (loss, lazy, params), "exact": (loss, exact, params)}
    if tables > 1:
        stacked, unstack = stack_tables(params, js.explain(loss)(params, *batch(tables)))
        of_stacked = lambda params, *batch: loss(unstack(params), *batch)  # noqa: E731
        ours["lazy, stacked"] = of_stacked, lazy, stacked
        ours["exact, stacked"] = of_stacked, exact, stacked
    steps = {"dense Optax": (dense, params, optimizer.init(params))}
    for name, (fun, tx, at) in ours.items():
        steps[name] = js.train_step(fun, tx), at, tx.init(at)
    return steps


def batch(tables):
    ids = np.random.default_rng(0).integers(0, ROWS, (BATCH, tables))
    return jnp.asarray(ids, jnp.int32), jnp.ones(BATCH)


def compiled(step, *args):
    """The program, and the seconds of the processor that it took."""
    jax.clear_caches()
    with Stopwatch() as watch:
        program = jax.jit(step, donate_argnums=(0, 1)).lower(*args).compile()
    return program, watch.seconds.cores


def kernels(tables, device, without):
    for name, (step, *carry) in contenders(tables).items():
        if name in without:
            continue
        args = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (*carry, *batch(tables))
        )
        if name != "dense Optax":
            args = (*js.row_major(args[:2]), *args[2:])
        there = target(device)
        with jax.default_device(there.devices[0]):
            program, seconds = compiled(step, *there.place(args))
        count = sum(cost_of(program).kernels.values())
        print(f"{tables:>7} {name:>15} {count:>8} kernels {seconds:>8.1f} s", flush=True)


def measured(tables, turns, steps, without):
    runs = {k: x for k, x in contenders(tables).items() if k not in without}
    built = in_turns(
        {name: functools.partial(compiled, *x, *batch(tables)) for name, x in runs.items()},
        turns,
    )
    programs = {name: each[-1][0] for name, each in built.items()}
    carries = {name: jax.tree.map(jnp.copy, x[1:]) for name, x in runs.items()}
    times, losses, data = {name: [] for name in runs}, {}, batch(tables)
    for _ in range(steps):
        for name, program in programs.items():
            began = time.perf_counter()
            *carries[name], losses[name] = jax.block_until_ready(
                program(*carries[name], *data)
            )
            times[name].append(time.perf_counter() - began)
    first = None
    for name, each in built.items():
        cores = statistics.median(x for _, x in each)
        micros = 1e6 * statistics.median(times[name])
        first = first or (cores, micros)
        size = programs[name].as_text().count(" = ")
        ratios = f"{cores / first[0]:>6.2f} {micros / first[1]:>6.2f}"
        cells = f"{cores:>8.2f} s {size:>7} {micros:>8.0f} us {ratios}"
        print(f"{tables:>7} {name:>15} {cells} loss {losses[name]:.3e}", flush=True)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--tables", type=int, nargs="+", default=[1, 8, 26])
    add("--turns", type=int, default=3, help="compilations of each")
    add("--steps", type=int, default=200)
    add("--device", help="compile for it, and count kernels, instead")
    add("--without", nargs="*", default=[], help='contenders, such as "exact"')
    options = parser.parse_args()
    print(f"jax {jax.__version__}, {BATCH} ids a table, about {ROWS} rows of {DIM}")
    for tables in options.tables:
        if options.device:
            kernels(tables, options.device, options.without)
        else:
            measured(tables, options.turns, options.steps, options.without)


if __name__ == "__main__":
    main()
