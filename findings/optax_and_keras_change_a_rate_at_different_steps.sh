#!/usr/bin/env bash
# The same boundary of a piecewise constant rate is one step later in Keras than in Optax.
#
# Versions: keras 3.15.1 on jax, optax 0.2.8, jax and jaxlib 0.10.2 on a CPU (x86),
#   Python 3.11.
# Guess: a rate that changes at the boundary 2 is the new one from step 2 on, counted
#   from 0, in both libraries.
# Seen (2026-11-28): Optax has the new rate at step 2, Keras at step 3: its boundary is
#   the last step of the old rate. (Optax also multiplies by the value, where Keras has
#   the rate itself.)
#     keras, steps 0 to 4: [1.0, 1.0, 1.0, 0.5, 0.5]
#     optax, steps 0 to 4: [1.0, 1.0, 0.5, 0.5, 0.5]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "jax==0.10.2" "numpy==2.2.6" "optax==0.2.8" "keras==3.15.1"
cd "$folder"
JAX_PLATFORMS=cpu KERAS_BACKEND=jax "$folder/venv/bin/python" - <<'PYTHON'
import keras
import optax

by_keras = keras.optimizers.schedules.PiecewiseConstantDecay([2], [1.0, 0.5])
by_optax = optax.piecewise_constant_schedule(1.0, {2: 0.5})
rates = {
    "keras": [float(by_keras(step)) for step in range(5)],
    "optax": [float(by_optax(step)) for step in range(5)],
}
for name, values in rates.items():
    print(f"{name}, steps 0 to 4: {values}")
assert rates["keras"] == [1, 1, 1, 0.5, 0.5], "this has changed"
assert rates["optax"] == [1, 1, 0.5, 0.5, 0.5], "this has changed"
PYTHON
