#!/usr/bin/env bash
# Orbax casts what it restores to the dtype of the template, and wraps integers.
#
# Versions: orbax-checkpoint 0.12.8, jax 0.10.2, numpy 2.2.6 on a CPU (x86), Python
#   3.11.
# Guess: a template of another dtype is refused, as one of another shape is: the
#   checkpoint and the program do not belong together.
# Seen (2026-11-29): It is converted without a word: integers wrap, floats overflow to
#   infinity, the imaginary part is dropped.
#     int64 [3, 2^40 + 5] into a template of int32: [3, 5]
#     int32 [300, -200] into a template of int8: [44, 56]
#     float32 [1e6, 0.5] into a template of float16: [inf, 0.5]
#     complex64 [1 + 2j] into a template of float32: [1.0]
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

def restored(saved, dtype):
    with ocp.StandardCheckpointer() as checkpointer:
        path = pathlib.Path(tempfile.mkdtemp(dir=folder)) / "tree"
        checkpointer.save(path, {"x": saved})
        checkpointer.wait_until_finished()
        template = {"x": jax.ShapeDtypeStruct(saved.shape, dtype)}
        return np.asarray(checkpointer.restore(path, template)["x"]).tolist()


ids = restored(np.array([3, 2**40 + 5]), jnp.int32)
narrow = restored(jnp.array([300, -200]), jnp.int8)
half = restored(jnp.array([1e6, 0.5]), jnp.float16)
real = restored(jnp.array([1 + 2j]), jnp.float32)
print(f"int64 [3, 2^40 + 5] into a template of int32: {ids}")
print(f"int32 [300, -200] into a template of int8: {narrow}")
print(f"float32 [1e6, 0.5] into a template of float16: {half}")
print(f"complex64 [1 + 2j] into a template of float32: {real}")
assert (ids, narrow, real) == ([3, 5], [44, 56], [1.0]), "this has changed"
assert half == [float("inf"), 0.5], "this has changed"
PYTHON
