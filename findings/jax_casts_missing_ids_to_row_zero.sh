#!/usr/bin/env bash
# Cast to int32, a missing id of NaN is row 0 in JAX, and the least integer in NumPy.
#
# Versions: jax and jaxlib 0.10.2, pyarrow 26.0.1, numpy 2.2.6 on a CPU (x86), Python
#   3.11.
# Guess: a column of ids with a missing one comes as float64 with NaN, and NaN cast to
#   an integer is the least integer, as in NumPy, which no table has: it reads NaN or is
#   dropped.
# Seen (2026-11-28): JAX makes it 0, with and without jit, so that missing ids read and
#   train row 0. An id too large becomes the largest integer, not the lower bits.
#     column: float64 [7.0, nan, 3000000000.0]
#     JAX: [7, 0, 2147483647], under jit [7, 0, 2147483647]
#     NumPy: [7, -2147483648, -2147483648]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "jax==0.10.2" "numpy==2.2.6" "pyarrow==26.0.1"
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa

column = pa.array([7, None, 3_000_000_000]).to_numpy(zero_copy_only=False)
print(f"column: {column.dtype} {column.tolist()}")
eager = jnp.asarray(column).astype(jnp.int32).tolist()
jitted = jax.jit(lambda x: x.astype(jnp.int32))(column).tolist()
print(f"JAX: {eager}, under jit {jitted}")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    numpy = column.astype(np.int32).tolist()
print(f"NumPy: {numpy}")
assert eager == jitted == [7, 0, 2**31 - 1], "this has changed"
assert numpy[1] == -(2**31), "this has changed"
PYTHON
