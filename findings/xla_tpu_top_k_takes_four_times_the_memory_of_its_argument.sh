#!/usr/bin/env bash
# lax.top_k of 32 rows of a million takes four times the memory of the scores on a TPU.
#
# Versions: jax and jaxlib 0.10.2, libtpu 0.0.42.1, compiled for a v5e without one,
#   Python 3.11.
# Guess: the ten largest of each row are found while the scores are read once, in memory
#   for some of them.
# Seen (2026-11-29): For k of 1, 10 and 17 the program has temporaries of 512 MB beside
#   scores of 128 MB, for k of 100 none.
#     k = 1: temporaries of 4.0 times the scores
#     k = 10: temporaries of 4.0 times the scores
#     k = 17: temporaries of 4.0 times the scores
#     k = 100: temporaries of 0.0 times the scores
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "jax==0.10.2" "libtpu==0.0.42.1" "numpy==2.2.6"
cd "$folder"
JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 TPU_ACCELERATOR_TYPE=v5litepod-4 \
  TPU_WORKER_HOSTNAMES=localhost TPU_WORKER_ID=0 "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp
from jax.experimental import topologies

device = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[0]
here = jax.sharding.SingleDeviceSharding(device)
found = {}
for k in (1, 10, 17, 100):
    scores = jax.ShapeDtypeStruct((32, 1_000_000), jnp.float32, sharding=here)
    compiled = jax.jit(lambda scores: jax.lax.top_k(scores, k)).lower(scores).compile()
    memory = compiled.memory_analysis()
    found[k] = memory.temp_size_in_bytes / memory.argument_size_in_bytes
    print(f"k = {k}: temporaries of {found[k]:.1f} times the scores")
assert found[10] > 2, "this has changed"
PYTHON
