#!/usr/bin/env bash
# jax.random.normal in bfloat16 has 128 values, none of them beyond 2.52.
#
# Versions: jax and jaxlib 0.10.2 on a CPU (x86), Python 3.11.
# Guess: four million numbers of a normal distribution in bfloat16 are those of float32
#   rounded: some thousand values, the largest near 5.
# Seen (2026-11-28): They come from uniform numbers in bfloat16, which have 7 random
#   bits. A table that is initialized in bfloat16 has few distinct numbers and no tails.
#   float16 has 10 bits. Draw in float32, and cast.
#     drawn in bfloat16, kept in bfloat16: 128 values, largest 2.52
#     drawn in float16, kept in float16: 1024 values, largest 3.18
#     drawn in float32, kept in bfloat16: 4110 values, largest 5.22
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "jax==0.10.2" "numpy==2.2.6"
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp
import numpy as np

found = {}
for drawn, kept in (("bfloat16", "bfloat16"), ("float16", "float16"), ("float32", "bfloat16")):
    numbers = jax.random.normal(jax.random.key(0), (4_000_000,), drawn).astype(kept)
    numbers = np.asarray(numbers.astype(jnp.float32))
    found[drawn] = len(np.unique(numbers)), float(numbers.max())
    print(f"drawn in {drawn}, kept in {kept}: {found[drawn][0]} values, largest {numbers.max():.2f}")
assert found["bfloat16"][0] == 128 and found["bfloat16"][1] < 2.6, "this has changed"
assert found["float32"][0] > 1_000 and found["float32"][1] > 4.5, "this has changed"
PYTHON
