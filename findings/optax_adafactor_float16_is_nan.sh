#!/usr/bin/env bash
# Adafactor of Optax makes all float16 parameters NaN in its first step, whatever their size.
#
# Versions: optax 0.2.8, jax and jaxlib 0.10.2 on a CPU (x86), Python 3.11.
# Guess: a default optimizer steps float16 parameters whose gradients are about 1, if
#   coarsely; elements without gradient may be 0/0, as in Adam, whose eps is zero in float16.
# Seen (2026-11-28): every element is NaN, those with a gradient too, in vectors and in
#   factored matrices. In float32 and bfloat16 none is. Adam's are right where there is a
#   gradient. The eps of Adafactor, 1e-30, is zero in float16, and its root mean squares
#   divide by zero where one element has no gradient.
#     adafactor float16 [3]: 3 of 3 NaN
#     adafactor float16 [256, 256]: 65536 of 65536 NaN
#     adafactor bfloat16 [3]: 0 of 3 NaN
#     adafactor float32 [3]: 0 of 3 NaN
#     adam float16 [3]: 2 of 3 NaN
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "jax==0.10.2" "numpy==2.2.6" "optax==0.2.8"
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp
import optax


def nans(name, dtype, shape):
    params = jnp.ones(shape, dtype)
    grads = jnp.zeros(shape, dtype).at[0].set(0.5)
    tx = getattr(optax, name)(0.1)
    updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
    count = int(jnp.isnan(updates).sum())
    print(f"{name} {dtype} {list(shape)}: {count} of {updates.size} NaN")
    return count


assert nans("adafactor", "float16", (3,)) == 3
assert nans("adafactor", "float16", (256, 256)) == 65536
assert nans("adafactor", "bfloat16", (3,)) == 0
assert nans("adafactor", "float32", (3,)) == 0
assert nans("adam", "float16", (3,)) == 2
PYTHON
