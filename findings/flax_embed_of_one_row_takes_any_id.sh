#!/usr/bin/env bash
# An nnx.Embed of one row returns that row for every id; of two rows, NaN for an id beyond.
#
# Versions: flax 0.12.8, jax and jaxlib 0.10.2 on a CPU (x86), Python 3.11.
# Guess: ids beyond the table read NaN in flax.nnx.Embed, whatever its size, so that a
#   wrong id shows in the loss.
# Seen (2026-11-28): With one embedding the layer does not look at the ids, only at
#   their shape. A field whose vocabulary is cut to one row (a test, a new feature) hides
#   wrong ids.
#     2 rows, ids [0, 1, 7]: NaN [False, False, True]
#     1 row, ids [0, 1, 7]: NaN [False, False, False]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "flax==0.12.8" "jax==0.10.2" "numpy==2.2.6"
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax.numpy as jnp
import numpy as np
from flax import nnx

ids = jnp.array([0, 1, 7])
found = {}
for rows in (2, 1):
    out = nnx.Embed(rows, 3, rngs=nnx.Rngs(0))(ids)
    found[rows] = np.isnan(np.asarray(out)).any(1).tolist()
    print(f"{rows} row{'s'[:rows - 1]}, ids {ids.tolist()}: NaN {found[rows]}")
assert found == {2: [False, False, True], 1: [False, False, False]}, "this has changed"
PYTHON
