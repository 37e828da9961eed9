#!/usr/bin/env bash
# Optax's clip_by_global_norm makes float16 gradients zero once their norm is above 255.
#
# Versions: optax 0.2.8, jax and jaxlib 0.10.2 on a CPU (x86), Python 3.11.
# Guess: gradients of a norm of 1,000 come out with norm 1, in float16 to two or three
#   digits; float16 holds numbers up to 65,504.
# Seen (2026-11-28): The sum of the squares is infinite in float16, the norm too, and
#   the gradients divided by it are zero: nothing is learned, and no NaN tells. A loss
#   scale makes it likely.
#     float16: norm before 1000, after clipping to 1: 0.000
#     bfloat16: norm before 1000, after clipping to 1: 1.001
#     float32: norm before 1000, after clipping to 1: 1.000
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "jax==0.10.2" "numpy==2.2.6" "optax==0.2.8"
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax.numpy as jnp
import optax

clip = optax.clip_by_global_norm(1.0)
found = {}
for dtype in ("float16", "bfloat16", "float32"):
    grads = {"w": jnp.full(100, 100.0, dtype)}
    clipped, _ = clip.update(grads, clip.init(grads))
    norm = float(jnp.linalg.norm(clipped["w"].astype("float32")))
    found[dtype] = norm
    print(f"{dtype}: norm before 1000, after clipping to 1: {norm:.3f}")
assert found["float16"] == 0, "this has changed"
assert abs(found["bfloat16"] - 1) < 0.01 and abs(found["float32"] - 1) < 0.01, "this has changed"
PYTHON
