#!/usr/bin/env bash
# Orbax saves no tree in which an array has no elements.
#
# Versions: orbax-checkpoint 0.12.8, jax 0.10.2, numpy 2.2.6 on a CPU (x86), Python
#   3.11.
# Guess: an array of shape (0, 4), as an empty buffer or a part that is not used, is
#   saved and restored like any other: NumPy, safetensors and pickles do it.
# Seen (2026-11-29): The save of the whole tree raises, for arrays of JAX and of NumPy
#   alike. None in its place is saved.
#     a tree with jax [0, 4]: cannot be saved
#     a tree with numpy [0, 4]: cannot be saved
#     a tree with None: saved
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

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

warnings.simplefilter("ignore")
logging.disable(logging.CRITICAL)
folder = pathlib.Path(tempfile.mkdtemp(dir=".")).resolve()

def attempt(leaf):
    with ocp.StandardCheckpointer() as checkpointer:
        path = pathlib.Path(tempfile.mkdtemp(dir=folder)) / "tree"
        try:
            checkpointer.save(path, {"table": jnp.ones((2, 4)), "buffer": leaf})
            checkpointer.wait_until_finished()
        except ValueError as error:
            return "cannot be saved" if "zero size" in str(error) else str(error)
        return "saved"


leaves = {"jax [0, 4]": jnp.zeros((0, 4)), "numpy [0, 4]": np.zeros((0, 4)), "None": None}
found = {name: attempt(leaf) for name, leaf in leaves.items()}
for name, what in found.items():
    print(f"a tree with {name}: {what}")
assert [*found.values()] == ["cannot be saved"] * 2 + ["saved"], "this has changed"
PYTHON
