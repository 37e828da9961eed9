#!/usr/bin/env bash
# flax.serialization.from_bytes puts a table of 5 rows in the place of one of 10.
#
# Versions: flax 0.12.8, orbax-checkpoint 0.12.8, jax and jaxlib 0.10.2 on a CPU (x86),
#   Python 3.11.
# Guess: the target says what is wanted, so a file with another shape or dtype under the
#   same name is an error, as a missing name is.
# Seen (2026-11-28): Only names are compared. The array of the file comes back with its
#   own shape and dtype; a lookup of the lost rows then reads the last one. Orbax
#   refuses the shape.
#     wanted [10, 3] float32, got [5, 3] bfloat16
#     another name: ValueError
#     Orbax: ValueError: Requested shape: (10, 3) is not compatible with the stored shape: (5, 3). Trunca
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "jax==0.10.2" "numpy==2.2.6" \
  "flax==0.12.8" "orbax-checkpoint==0.12.8"
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import pathlib

import jax.numpy as jnp
import orbax.checkpoint as ocp
from flax import serialization

saved, target = {"w": jnp.ones((5, 3), jnp.bfloat16)}, {"w": jnp.zeros((10, 3))}
back = serialization.from_bytes(target, serialization.to_bytes(saved))["w"]
print(f"wanted [10, 3] float32, got {list(back.shape)} {back.dtype}")
try:
    serialization.from_bytes({"v": target["w"]}, serialization.to_bytes(saved))
    named = "no error"
except ValueError as error:
    named = type(error).__name__
print(f"another name: {named}")
with ocp.StandardCheckpointer() as saver:
    saver.save(f"{pathlib.Path.cwd()}/orbax", saved)
    saver.wait_until_finished()
    try:
        saver.restore(f"{pathlib.Path.cwd()}/orbax", target)
        orbax = "no error"
    except ValueError as error:
        orbax = f"ValueError: {str(error)[:80]}"
print(f"Orbax: {orbax}")
assert back.shape == (5, 3) and back.dtype == jnp.bfloat16, "this has changed"
assert named == "ValueError" and "ValueError" in orbax, "this has changed"
PYTHON
