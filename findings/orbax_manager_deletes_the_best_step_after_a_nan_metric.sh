#!/usr/bin/env bash
# A metric of NaN makes a CheckpointManager of Orbax delete the best step.
#
# Versions: orbax-checkpoint 0.12.8, jax 0.10.2, numpy 2.2.6 on a CPU (x86), Python
#   3.11.
# Guess: with max_to_keep=1 and best_fn the step of the largest metric stays; NaN, of an
#   evaluation that went wrong, never counts as the best.
# Seen (2026-11-29): After the metrics 0.5, NaN and 0.4 the step of 0.4 is left, and
#   best_step names it. Without the NaN it is the step of 0.5.
#     of the metrics 0.5, NaN, 0.4 the step of [0.4] is kept
#     of the metrics 0.5, 0.3, 0.4 the step of [0.5] is kept
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

def kept(metrics):
    options = ocp.CheckpointManagerOptions(
        max_to_keep=1, best_fn=lambda metrics: metrics["accuracy"], best_mode="max"
    )
    path = pathlib.Path(tempfile.mkdtemp(dir=folder)) / "run"
    with ocp.CheckpointManager(path, options=options) as manager:
        for step, value in enumerate(metrics, 1):
            args = ocp.args.StandardSave({"x": jnp.ones(1)})
            manager.save(step, args=args, metrics={"accuracy": value})
        manager.wait_until_finished()
        return [metrics[step - 1] for step in manager.all_steps()]


with_nan, without = kept([0.5, float("nan"), 0.4]), kept([0.5, 0.3, 0.4])
print(f"of the metrics 0.5, NaN, 0.4 the step of {with_nan} is kept")
print(f"of the metrics 0.5, 0.3, 0.4 the step of {without} is kept")
assert with_nan == [0.4] and without == [0.5], "this has changed"
PYTHON
