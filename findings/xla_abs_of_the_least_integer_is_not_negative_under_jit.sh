#!/usr/bin/env bash
# Under jit the absolute value of the least integer is not below zero, and it is negative.
#
# Versions: jax and jaxlib 0.10.2 on a CPU (x86), Python 3.11.
# Guess: abs of the least int64 (or int32) overflows to itself, as in NumPy, and is
#   below zero, so that a check `abs(x) >= 0` fails under jit as it does without.
# Seen (2026-11-28): Without jit the check is False. Under jit XLA knows that abs is
#   never negative and makes it True, while the number that the same program returns is
#   negative. jax 0.12.0.1 says False under jit, too.
#     int32: abs is -2147483648; abs >= 0 is False, under jit True
#     int64: abs is -9223372036854775808; abs >= 0 is False, under jit True
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "jax==0.10.2" "numpy==2.2.6"
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp

jax.config.update("jax_enable_x64", True)


def check(x):
    size = jnp.abs(x)
    return size, size >= 0


for dtype in ("int32", "int64"):
    least = jnp.array(jnp.iinfo(dtype).min, dtype)
    size, eager = check(least)
    inside, jitted = jax.jit(check)(least)
    print(f"{dtype}: abs is {size}; abs >= 0 is {eager}, under jit {jitted}")
    assert inside == size < 0 and not eager and jitted, "this has changed"
PYTHON
