#!/usr/bin/env bash
# jnp.bincount counts id -1 as row 0, where segment_sum of ones leaves it out.
#
# Versions: jax and jaxlib 0.10.2 on a CPU (x86), Python 3.11.
# Guess: -1 as padding is in no bin: NumPy's bincount raises for it, and
#   jax.ops.segment_sum of ones, the same count, leaves it out.
# Seen (2026-11-28): Padding is counted for row 0. An id beyond the length is left out
#   by both.
#     bincount of [-1, -1, 2, 9]: [2 0 1 0]
#     segment_sum of ones:        [0 0 1 0]
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

ids = jnp.array([-1, -1, 2, 9])
counts = np.asarray(jnp.bincount(ids, length=4))
sums = np.asarray(jax.ops.segment_sum(jnp.ones(4, int), ids, 4))
print(f"bincount of {ids.tolist()}: {counts}")
print(f"segment_sum of ones:        {sums}")
assert counts.tolist() == [2, 0, 1, 0] and sums.tolist() == [0, 0, 1, 0], "this has changed"
PYTHON
