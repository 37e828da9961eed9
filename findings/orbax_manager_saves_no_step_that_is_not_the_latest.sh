#!/usr/bin/env bash
# A CheckpointManager of Orbax saves nothing for a step at or below the latest one, and raises nothing.
#
# Versions: orbax-checkpoint 0.12.8, jax 0.10.2, numpy 2.2.6 on a CPU (x86), Python
#   3.11.
# Guess: after a run went back from step 5 to step 3, save(3) saves it, and save(5)
#   replaces the old step or raises.
# Seen (2026-11-29): Both calls return False and write nothing: the run that went back
#   is not saved until it is past the old one.
#     save returned [True, False, False, True] for the steps 5, 3, 5 and 6
#     steps [5, 6] with the values [1.0, 4.0]
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

with ocp.CheckpointManager(folder / "run") as manager:
    saved = [
        manager.save(step, args=ocp.args.StandardSave({"x": jnp.full(1, value)}))
        for step, value in [(5, 1.0), (3, 2.0), (5, 3.0), (6, 4.0)]
    ]
    manager.wait_until_finished()
    steps, values = list(manager.all_steps()), []
    for step in steps:
        values.append(float(manager.restore(step)["x"][0]))
print(f"save returned {saved} for the steps 5, 3, 5 and 6")
print(f"steps {steps} with the values {values}")
assert saved == [True, False, False, True] and steps == [5, 6], "this has changed"
assert values == [1.0, 4.0], "this has changed"
PYTHON
