#!/usr/bin/env bash
# A v5e copies a whole table of rows of 64 to read 10,000 of them.
#
# Versions: jax and jaxlib 0.10.2, libtpu 0.0.42.1, compiled for a v5e without one,
#   Python 3.11.
# Guess: table[ids] of f32[1000000, 64] reads 10,000 rows, each in one piece; rows of 64
#   and of 128 differ by a factor of two in bytes, and nothing else.
# Seen (2026-11-28): XLA:TPU keeps the table by columns, f32[1000000,64]{0,1}, as rows
#   of 64 would be padded to 128, and copies all of it to rows for the gather: 512 MB of
#   temporaries. Rows of 128 are kept by rows and read in place.
#     rows of 64: layout {0,1}, temporaries of 512.0 MB
#     rows of 128: layout {1,0}, temporaries of 0.0 MB
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "jax==0.10.2" "libtpu==0.0.42.1" "numpy==2.2.6"
cd "$folder"
JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 TPU_ACCELERATOR_TYPE=v5litepod-4 \
  TPU_WORKER_HOSTNAMES=localhost TPU_WORKER_ID=0 "$folder/venv/bin/python" - <<'PYTHON'
import re

import jax
import jax.numpy as jnp
from jax.experimental import topologies

V, K = 1_000_000, 10_000
device = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[0]
here = jax.sharding.SingleDeviceSharding(device)
found = {}
for D in (64, 128):
    table = jax.ShapeDtypeStruct((V, D), jnp.float32, sharding=here)
    ids = jax.ShapeDtypeStruct((K,), jnp.int32, sharding=here)
    compiled = jax.jit(lambda table, ids: table[ids]).lower(table, ids).compile()
    layout = re.search(rf"f32\[{V},{D}\]\{{(\d,\d)", compiled.as_text())[1]
    found[D] = layout, compiled.memory_analysis().temp_size_in_bytes / 1e6
    print(f"rows of {D}: layout {{{layout}}}, temporaries of {found[D][1]:.1f} MB")
assert found[64][0] == "0,1" and found[64][1] > 500, "this has changed"
assert found[128][0] == "1,0" and found[128][1] < 1, "this has changed"
PYTHON
