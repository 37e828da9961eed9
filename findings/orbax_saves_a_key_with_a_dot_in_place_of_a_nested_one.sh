#!/usr/bin/env bash
# Orbax keeps one array for the key "a.b" and for "b" within "a".
#
# Versions: orbax-checkpoint 0.12.8, jax 0.10.2, numpy 2.2.6 on a CPU (x86), Python
#   3.11.
# Guess: the keys "a.b" and "a" with "b" in it are two leaves, as in the tree, or the
#   save is refused.
# Seen (2026-11-29): Both have one name on the disk. The save succeeds, both keys come
#   back, and both have the values of one of them.
#     saved: 1.0 as 'a.b', 2.0 as 'b' within 'a'
#     restored: 2.0 as 'a.b', 2.0 as 'b' within 'a'
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
import orbax.checkpoint as ocp

warnings.simplefilter("ignore")
logging.disable(logging.CRITICAL)
folder = pathlib.Path(tempfile.mkdtemp(dir=".")).resolve()

tree = {"a.b": jnp.full(2, 1.0), "a": {"b": jnp.full(2, 2.0)}}
with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(folder / "tree", tree)
    checkpointer.wait_until_finished()
    found = checkpointer.restore(folder / "tree", tree)
dotted, nested = (float(x[0]) for x in (found["a.b"], found["a"]["b"]))
print("saved: 1.0 as 'a.b', 2.0 as 'b' within 'a'")
print(f"restored: {dotted} as 'a.b', {nested} as 'b' within 'a'")
assert dotted == nested, "this has changed"
PYTHON
