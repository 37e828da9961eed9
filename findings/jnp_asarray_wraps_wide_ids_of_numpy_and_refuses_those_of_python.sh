#!/usr/bin/env bash
# jnp.asarray cuts an int64 array of ids to 32 bits, silently, and refuses a list of them.
#
# Versions: jax and jaxlib 0.10.2 on a CPU (x86), Python 3.11.
# Guess: 2**33 + 5 does not fit int32, so jnp.asarray raises OverflowError (as it does
#   for a list), or warns (as it does for dtype=int64), whatever holds the number.
# Seen (2026-11-28): A NumPy array of int64 becomes int32 without a word, and hashed ids
#   are other rows. So does an argument of a jitted function. A list, or a Python int,
#   raises.
#     jnp.asarray(np.array([2**33 + 5])): [5]
#     jax.jit(lambda ids: ids)(the same): [5]
#     jnp.asarray([2**33 + 5]): OverflowError
#     jnp.asarray(the array, dtype="int64"): UserWarning: Explicitly requested dtype int64 requested in asarray is not...
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "jax==0.10.2" "numpy==2.2.6"
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import warnings

import jax
import jax.numpy as jnp
import numpy as np

warnings.simplefilter("error")
wide = np.array([2**33 + 5])
array = jnp.asarray(wide).tolist()
jitted = jax.jit(lambda ids: ids)(wide).tolist()
print(f"jnp.asarray(np.array([2**33 + 5])): {array}")
print(f"jax.jit(lambda ids: ids)(the same): {jitted}")
try:
    listed = jnp.asarray([2**33 + 5]).tolist()
except OverflowError as error:
    listed = type(error).__name__
print(f"jnp.asarray([2**33 + 5]): {listed}")
try:
    asked = jnp.asarray(wide, dtype="int64").tolist()
except UserWarning as warning:
    asked = f"UserWarning: {str(warning)[:60]}..."
print(f'jnp.asarray(the array, dtype="int64"): {asked}')
assert array == jitted == [5] and listed == "OverflowError", "this has changed"
assert "UserWarning" in asked, "this has changed"
PYTHON
