#!/usr/bin/env bash
# 500 in float8_e4m3fn is 448 in PyTorch and NaN in JAX and ml_dtypes.
#
# Versions: torch 2.14.1, jax and jaxlib 0.10.2, ml_dtypes 0.6.0 on a CPU (x86), Python
#   3.11.
# Guess: a number beyond 448, the largest of the format, is the same in both when it is
#   cast: 448, or NaN as the format has no infinity.
# Seen (2026-11-28): PyTorch gives the largest number and JAX NaN, without and with jit.
#   A table quantized with too small a scale is clipped there, and has NaN here. Numbers
#   up to 464 round to 448 in both.
#     torch: [448.0, 464.0, 465.0, 500.0] is [448.0, 448.0, 448.0, 448.0]
#     jax: [448.0, 464.0, 465.0, 500.0] is [448.0, 448.0, nan, nan]
#     jax under jit: [448.0, 464.0, 465.0, 500.0] is [448.0, 448.0, nan, nan]
#     ml_dtypes: [448.0, 464.0, 465.0, 500.0] is [448.0, 448.0, nan, nan]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "torch==2.14.1" "jax==0.10.2" \
  "ml_dtypes==0.6.0" "numpy==2.2.6"
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch

numbers = np.array([448.0, 464.0, 465.0, 500.0], np.float32)
cast = lambda x: x.astype(jnp.float8_e4m3fn)
found = {
    "torch": torch.tensor(numbers).to(torch.float8_e4m3fn).float().tolist(),
    "jax": cast(jnp.asarray(numbers)).astype(jnp.float32).tolist(),
    "jax under jit": jax.jit(cast)(numbers).astype(jnp.float32).tolist(),
    "ml_dtypes": numbers.astype(ml_dtypes.float8_e4m3fn).astype(np.float32).tolist(),
}
for name, values in found.items():
    print(f"{name}: {numbers.tolist()} is {values}")
assert found.pop("torch") == [448] * 4, "this has changed"
assert all(np.isnan(x[2:]).all() and x[:2] == [448] * 2 for x in found.values()), "this has changed"
PYTHON
