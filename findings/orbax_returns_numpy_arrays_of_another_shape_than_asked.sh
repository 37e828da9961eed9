#!/usr/bin/env bash
# Orbax restores an array of NumPy in the shape that was saved, whatever the template says.
#
# Versions: orbax-checkpoint 0.12.8, jax 0.10.2, numpy 2.2.6 on a CPU (x86), Python
#   3.11.
# Guess: a template [2, 2] for an array that was saved as [4, 2] is refused, for arrays
#   of JAX and of NumPy alike.
# Seen (2026-11-29): It is refused for what was saved as an array of JAX. What was saved
#   as one of NumPy comes back as [4, 2], for a ShapeDtypeStruct and for an array of NumPy
#   as the template.
#     [4, 2] of JAX, for a ShapeDtypeStruct [2, 2]: refused
#     [4, 2] of NumPy, for a ShapeDtypeStruct [2, 2]: [4, 2]
#     [4, 2] of NumPy, for an array of NumPy [2, 2]: [4, 2]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "orbax-checkpoint==0.12.8" "jax==0.10.2" "numpy==2.2.6"
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import logging
import pathlib
import tempfile
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

warnings.simplefilter("ignore")
logging.disable(logging.CRITICAL)
folder = pathlib.Path(tempfile.mkdtemp(dir=".")).resolve()

def restored(saved, template):
    with ocp.StandardCheckpointer() as checkpointer:
        path = pathlib.Path(tempfile.mkdtemp(dir=folder)) / "tree"
        checkpointer.save(path, {"x": saved})
        checkpointer.wait_until_finished()
        try:
            return list(checkpointer.restore(path, {"x": template})["x"].shape)
        except ValueError:
            return "refused"


shape = jax.ShapeDtypeStruct((2, 2), jnp.float32)
rows = np.arange(8.0, dtype=np.float32).reshape(4, 2)
found = {
    "of JAX, for a ShapeDtypeStruct [2, 2]": restored(jnp.array(rows), shape),
    "of NumPy, for a ShapeDtypeStruct [2, 2]": restored(rows, shape),
    "of NumPy, for an array of NumPy [2, 2]": restored(rows, np.zeros((2, 2), np.float32)),
}
for name, what in found.items():
    print(f"[4, 2] {name}: {what}")
assert [*found.values()] == ["refused", [4, 2], [4, 2]], "this has changed"
PYTHON
