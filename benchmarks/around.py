"""What a step costs that returns or reads more than its loss needs.

Prints the ratio to the bare step, of steps that took turns in one run: metrics of the same
rows and of others, rows behind ``stop_gradient``, losses that are linear in the rows.

    python benchmarks/around.py --rows 1e6 --dim 64 --ids 1e3
"""

import argparse
import statistics

import jax
import jax.numpy as jnp
import numpy as np
from turns import time_steps

import jslices as js

stop = jax.lax.stop_gradient


def squares(params, ids):
    return jnp.mean((params["table"][ids] @ params["w"] - 1.0) ** 2)


def linear(params, ids):
    return (params["table"][ids] * params["w"]).sum()


#: ``(value, aux)`` of parameters, ids and other ids; the first is the bare step.
AROUND = {
    "the loss alone": lambda p, i, o: (squares(p, i), None),
    "aux: the greatest of its rows": lambda p, i, o: (
        squares(p, i),
        jnp.abs(p["table"][i]).max(),
    ),
    "aux: a mean of other rows": lambda p, i, o: (squares(p, i), p["table"][o].mean()),
    "aux: one row": lambda p, i, o: (squares(p, i), p["table"][7]),
    "linear": lambda p, i, o: (linear(p, i), None),
    "linear, aux: its rows": lambda p, i, o: (linear(p, i), p["table"][i].sum(0)),
    "its rows behind stop_gradient": lambda p, i, o: (
        squares(p, i) + (stop(p["table"][i]) @ p["w"]).sum(),
        None,
    ),
    "other rows behind stop_gradient": lambda p, i, o: (
        squares(p, i) + (stop(p["table"])[o] @ p["w"]).sum(),
        None,
    ),
}
OPTIMIZERS = {
    "sgd": js.sgd(0.1),
    "adagrad": js.adagrad(0.1),
    "rowwise_adagrad": js.rowwise_adagrad(0.1),
    "adam": js.adam(0.1),
    "exact adam": js.adam(0.1, untouched="exact"),
}


def runner(loss, tx, params, ids):
    step = jax.jit(js.train_step(loss, tx, has_aux=True), donate_argnums=(0, 1))
    carry = [jax.tree.map(jnp.array, params), tx.init(params)]

    def run():
        *carry[:], value, aux = step(*carry, *ids)
        return jax.block_until_ready((value, aux))

    return run


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=float, default=1e6)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--ids", type=float, default=1e3)
    parser.add_argument("--optimizer", nargs="+", default=list(OPTIMIZERS))
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    rows, count = int(options.rows), int(options.ids)
    rng = np.random.default_rng(0)
    ids = [jnp.asarray(rng.integers(0, rows, count, np.int32)) for _ in range(2)]
    params = {"table": jnp.ones((rows, options.dim)), "w": jnp.ones(options.dim) / 9}
    ratios = []
    print(f"{rows:,} rows of {options.dim}, {count:,} ids, {jax.default_backend()}")
    for name in options.optimizer:
        # In twos: as many tables as there are contenders take the memory of so many.
        bare, *others = AROUND
        for other in others:
            steps = {
                x: runner(AROUND[x], OPTIMIZERS[name], params, ids) for x in (bare, other)
            }
            seconds = time_steps(steps, options.turns, options.steps)
            ratios.append(seconds[other].wall / seconds[bare].wall)
            times = (f"{1e3 * seconds[x].wall:8.3f}" for x in (other, bare))
            print(
                f"{name:16} {other:32}{' of '.join(times)} ms, {ratios[-1]:.2f}", flush=True
            )
    print(f"median {statistics.median(ratios):.2f}, greatest {max(ratios):.2f}")


if __name__ == "__main__":
    main()
