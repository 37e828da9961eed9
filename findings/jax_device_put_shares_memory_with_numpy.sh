#!/usr/bin/env bash
# jax.device_put of an aligned NumPy array on a CPU is that memory: a later write shows.
#
# Versions: jax and jaxlib 0.10.2 on a CPU (x86), Python 3.11.
# Guess: arrays of JAX never change, so device_put copies, and a pipeline may fill the
#   same buffer with the next batch; or else jnp.asarray shares it as well.
# Seen (2026-11-28): device_put shares memory that begins at a multiple of 64 bytes
#   (where those of NumPy begin is chance), and the array on the device changes with the
#   buffer. Otherwise it copies, and so do jnp.asarray and jnp.array.
#     device_put, aligned to 64 bytes: the first id was 0 and is 7
#     device_put, 4 bytes further: the first id was 0 and is 0
#     jnp.asarray, aligned: the first id was 0 and is 0
#     jnp.array, aligned: the first id was 0 and is 0
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

memory = np.zeros(1024 + 32, np.int32)
start = -memory.ctypes.data % 64 // 4
changed = {}
for name, put, shift in (
    ("device_put, aligned to 64 bytes", jax.device_put, 0),
    ("device_put, 4 bytes further", jax.device_put, 1),
    ("jnp.asarray, aligned", jnp.asarray, 0),
    ("jnp.array, aligned", jnp.array, 0),
):
    ids = memory[start + shift : start + shift + 1024]
    ids[:] = 0
    batch = jax.block_until_ready(put(ids))
    ids[:] = 7  # the next batch
    changed[name] = int(batch[0])
    print(f"{name}: the first id was 0 and is {changed[name]}")
assert list(changed.values()) == [7, 0, 0, 0], "this has changed"
PYTHON
