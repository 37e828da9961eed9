#!/usr/bin/env bash
# In JAX an int32 of -1 equals the uint32 of 2**32 - 1: jnp.isin finds padding among hashes.
#
# Versions: jax and jaxlib 0.10.2, numpy 2.2.6 on a CPU (x86), Python 3.11.
# Guess: comparing int32 with uint32 either widens, as in NumPy, or raises, since no
#   32-bit type holds both; padding of -1 is in no set of unsigned hashes.
# Seen (2026-11-28): Without 64-bit types both become int32, silently, and 2**32 - 1 is
#   -1. So say ==, isin, where and concatenate. NumPy widens to int64.
#     jax.numpy: == True, isin True, joined int32 [-1, -1]
#     numpy: == False, isin False, joined int64 [-1, 4294967295]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "jax==0.10.2" "numpy==2.2.6"
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax.numpy as jnp
import numpy as np

found = {}
for library in (jnp, np):
    padding = library.asarray([-1], dtype="int32")
    hashes = library.asarray([2**32 - 1], dtype="uint32")
    joined = library.concatenate([padding, hashes])
    equal, member = bool((padding == hashes)[0]), bool(library.isin(padding, hashes)[0])
    found[library.__name__] = equal, member
    print(f"{library.__name__}: == {equal}, isin {member}, joined {joined.dtype} {joined.tolist()}")
assert found == {"jax.numpy": (True, True), "numpy": (False, False)}, "this has changed"
PYTHON
