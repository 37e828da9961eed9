#!/usr/bin/env bash
# optax.tree.norm of the integer 100,000 is 37,550.8.
#
# Versions: optax 0.2.8, jax and jaxlib 0.10.2 on a CPU (x86), Python 3.11.
# Guess: a norm of integer leaves (ids beside values, a counter in a tree) is computed
#   in floating point, as jnp.linalg.norm does, or refused.
# Seen (2026-11-28): The squares are computed and added up in the dtype of the leaf, and
#   wrap: 100 in int8 has the norm 4. A tree with ids in it is clipped by such a number,
#   silently.
#     100000 in int32: optax.tree.norm 37550.8, jnp.linalg.norm 100000.0
#     100 in int8: optax.tree.norm 4.0, jnp.linalg.norm 100.0
#     100 in float32: optax.tree.norm 100.0, jnp.linalg.norm 100.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "jax==0.10.2" "numpy==2.2.6" "optax==0.2.8"
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax.numpy as jnp
import optax

found = {}
for number, dtype in ((100_000, "int32"), (100, "int8"), (100, "float32")):
    leaf = jnp.array([number], dtype)
    norm, other = float(optax.tree.norm({"ids": leaf})), float(jnp.linalg.norm(leaf))
    found[dtype] = round(norm, 1), other
    print(f"{number} in {dtype}: optax.tree.norm {norm:.1f}, jnp.linalg.norm {other:.1f}")
assert found["int32"] == (37550.8, 100_000.0) and found["int8"] == (4.0, 100.0), "this has changed"
PYTHON
