"""As many ids as rows: steps of jslices against those that take a dense gradient.

    python benchmarks/many_ids.py

The gradient names most rows, so that nothing is won by naming them, and nothing should be
lost. The same optimizer on the gradient of ``jax.grad``, and Optax's, take turns with it in
one process.
"""

import argparse
import itertools

import jax
from contenders import OPTIMIZERS, RATE, with_jslices, with_optax
from contenders.ids import batches
from same_ids import in_turns

import jslices as js


def dense(optimizer, num_rows, dim, rate):
    tx = getattr(js, optimizer)(rate)
    return with_jslices.jitted(jax.value_and_grad, tx, js.apply_updates, num_rows, dim)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=float, nargs="+", default=[1e4, 1e5])
    parser.add_argument("--dim", type=int, nargs="+", default=[8, 16, 64])
    parser.add_argument("--times", type=float, nargs="+", default=[1], help="ids a row")
    parser.add_argument("--optimizer", nargs="+", default=OPTIMIZERS, choices=OPTIMIZERS)
    options = parser.parse_args()
    for optimizer, rows, dim in itertools.product(
        options.optimizer, map(int, options.rows), options.dim
    ):
        makers = (with_jslices.make, dense, with_optax.make)
        made = [make(optimizer, rows, dim, RATE) for make in makers]
        for times, kind in itertools.product(options.times, ("zipf", "uniform")):
            count = int(rows * times)
            ids = [made[0][1](x) for x in batches(rows, count, kind)]
            ours, same, optax = in_turns([step for step, _ in made], ids)
            print(
                f"{optimizer}, V {rows:.0e}, D {dim}, {count:.0e} {kind} ids: "
                f"jslices {ours * 1e3:.2f} ms; {same / ours:.2f} times as fast as on a "
                f"dense gradient, {optax / ours:.2f} times as fast as Optax",
                flush=True,
            )


if __name__ == "__main__":
    main()
