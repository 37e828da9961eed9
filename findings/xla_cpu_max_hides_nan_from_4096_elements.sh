#!/usr/bin/env bash
# A maximum and a minimum on a CPU hide NaN once an array has 4,096 elements.
#
# Versions: jax and jaxlib 0.10.2 on a CPU (x86), Python 3.11.
# Guess: jnp.max of an array with a NaN is NaN, as in NumPy, whatever the size; a loss
#   or a norm that is NaN shows in a maximum.
# Seen (2026-11-28): With 4,095 elements it is NaN, with 4,096 it is the largest other
#   number, in jnp.max, jnp.min and under jit. A maximum along the first axis of a matrix
#   hides NaN from fewer rows on. jnp.argmax, sort and isnan find it.
#     4095 elements: max nan, min nan
#     4096 elements: max 0.0, min 0.0
#     [4095, 2], along axis 0: max [0. 0.]
#     argmax of 4096 elements: 2048, which is nan
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "jax==0.10.2" "numpy==2.2.6"
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax.numpy as jnp
import numpy as np


def with_nan(*shape):
    return jnp.zeros(shape).at[shape[0] // 2].set(jnp.nan)


found = {}
for size in (4095, 4096):
    x = with_nan(size)
    found[size] = float(jnp.max(x)), float(jnp.min(x))
    print(f"{size} elements: max {found[size][0]}, min {found[size][1]}")
columns = np.asarray(jnp.max(with_nan(4095, 2), axis=0))
print(f"[4095, 2], along axis 0: max {columns}")
place = int(jnp.argmax(with_nan(4096)))
print(f"argmax of 4096 elements: {place}, which is {with_nan(4096)[place]}")
assert np.isnan(found[4095]).all() and found[4096] == (0.0, 0.0), "this has changed"
assert not columns.any() and place == 2048, "this has changed"
PYTHON
