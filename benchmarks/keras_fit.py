"""Keras' ``fit`` with and without row gradients, in one run: believe only the ratios.

    KERAS_BACKEND=jax python benchmarks/keras_fit.py --rows 2e4 2e5

Embedding (V, 64), mean of 50 ids, Dense(1): Adam of Keras, and Adam of jslices, lazy and
exact, on the same batches, drawn as words occur. Compilation is left out: the first fit is
not counted.
"""

import argparse
import os
import statistics
import time

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np

import jslices as js
import jslices.keras as jk

DIM, LENGTH, BATCH = 64, 50, 128


def model_of(rows: int) -> keras.Model:
    keras.utils.set_random_seed(0)
    table = keras.layers.Embedding(rows, DIM)
    return keras.Sequential(
        [table, keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(1)]
    )


OPTIMIZERS = {
    "keras.optimizers.Adam": lambda: keras.optimizers.Adam(1e-3),
    "js.adam": lambda: jk.Optimizer(js.adam, 1e-3),
    'js.adam, "exact"': lambda: jk.Optimizer(js.adam, 1e-3, untouched="exact"),
    "js.adam, dense gradients": lambda: jk.Optimizer(js.adam, 1e-3),
}


def seconds(rows: int, steps: int, repeats: int) -> dict[str, float]:
    rng = np.random.default_rng(0)
    ids = (rng.zipf(1.1, size=(BATCH * steps, LENGTH)) % rows).astype("int32")
    labels = rng.normal(size=(BATCH * steps, 1)).astype("float32")
    models = {}
    for name, make in OPTIMIZERS.items():
        model = model_of(rows)
        if name.startswith("js.adam") and "dense" not in name:
            jk.row_gradients(model)
        model.compile(make(), "mse")
        models[name] = model
    times: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(repeats + 1):
        for name, model in models.items():
            start = time.perf_counter()
            model.fit(ids, labels, batch_size=BATCH, shuffle=False, verbose=0)
            if turn:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(each) for name, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=float, nargs="+", default=[2e4, 2e5])
    parser.add_argument("--steps", type=int, default=192)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    for rows in map(int, args.rows):
        found = seconds(rows, args.steps, args.repeats)
        whole = found["keras.optimizers.Adam"]
        print(f"V = {rows:,}, {args.steps} steps, batches of {BATCH} x {LENGTH} ids")
        for name, each in found.items():
            print(f"  {name:26}{each:8.2f} s{whole / each:8.1f} x")


if __name__ == "__main__":
    main()
