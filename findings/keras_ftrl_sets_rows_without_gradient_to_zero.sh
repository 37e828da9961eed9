#!/usr/bin/env bash
# The first step of Keras' Ftrl sets every row that gets no gradient to zero.
#
# Versions: keras 3.15.1 on jax and jaxlib 0.10.2 on a CPU (x86), Python 3.11.
# Guess: without regularization a row whose gradient is zero stays as it was initialized
#   or loaded, as under Adam, Adagrad and RMSprop.
# Seen (2026-11-28): The rule recomputes a parameter from its sums, which are zero, and
#   so the parameter is too. Pretrained rows that the first batch does not look up are
#   lost.
#     Ftrl: rows [0.0, 0.25, 0.0] after a gradient of row 1
#     Adagrad: rows [0.5, 0.4, 0.5] after a gradient of row 1
#     Adam: rows [0.5, 0.4, 0.5] after a gradient of row 1
#     RMSprop: rows [0.5, 0.18, 0.5] after a gradient of row 1
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "jax==0.10.2" "numpy==2.2.6" "keras==3.15.1"
cd "$folder"
JAX_PLATFORMS=cpu KERAS_BACKEND=jax "$folder/venv/bin/python" - <<'PYTHON'
import jax.numpy as jnp
import keras

found = {}
for name in ("Ftrl", "Adagrad", "Adam", "RMSprop"):
    table = keras.Variable([[0.5], [0.5], [0.5]])
    optimizer = getattr(keras.optimizers, name)(0.1)
    optimizer.apply([jnp.array([[0.0], [1.0], [0.0]])], [table])
    found[name] = [round(float(x), 2) for x in table.value[:, 0]]
    print(f"{name}: rows {found[name]} after a gradient of row 1")
assert found.pop("Ftrl")[::2] == [0, 0], "this has changed"
assert all(rows[::2] == [0.5, 0.5] for rows in found.values()), "this has changed"
PYTHON
