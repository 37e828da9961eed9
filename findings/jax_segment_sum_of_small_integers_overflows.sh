#!/usr/bin/env bash
# jax.ops.segment_sum of 200 int8 ones is -56, jnp.sum of them 200.
#
# Versions: jax and jaxlib 0.10.2 on a CPU (x86), Python 3.11.
# Guess: counts of flags in int8 add up alike in jnp.sum, segment_sum and .at[].add,
#   which is what segment_sum is.
# Seen (2026-11-28): jnp.sum widens to int32. segment_sum and .at[].add keep the dtype
#   of the data and wrap silently.
#     jnp.sum of int8: 200
#     segment_sum of int8: -56
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "jax==0.10.2" "numpy==2.2.6"
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp

ones = jnp.ones(200, jnp.int8)
total = int(jnp.sum(ones))
segment = int(jax.ops.segment_sum(ones, jnp.zeros(200, int), 1)[0])
print(f"jnp.sum of int8: {total}")
print(f"segment_sum of int8: {segment}")
assert (total, segment) == (200, -56), "this has changed"
PYTHON
