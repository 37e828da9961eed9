#!/usr/bin/env bash
# With rbg keys every TPU chip draws the whole table to keep its part.
#
# Versions: jax and jaxlib 0.10.2, libtpu 0.0.42.1, compiled for eight v5e without one,
#   Python 3.11.
# Guess: jax.random.uniform whose result is split over eight chips makes an eighth on
#   each, with rbg, which is there to be fast on TPUs, as with threefry.
# Seen (2026-11-29): threefry does. With rbg and unsafe_rbg each chip draws all of it,
#   in 2,048 MB of temporaries, and keeps 256.
#     threefry2x32: 0 MB of temporaries to keep 256 MB
#     rbg: 2048 MB of temporaries to keep 256 MB
#     unsafe_rbg: 2048 MB of temporaries to keep 256 MB
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "jax==0.10.2" "libtpu==0.0.42.1" "numpy==2.2.6"
cd "$folder"
JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 TPU_ACCELERATOR_TYPE=v5litepod-8 \
  TPU_WORKER_HOSTNAMES=localhost TPU_WORKER_ID=0 "$folder/venv/bin/python" - <<'PYTHON'
import jax
import numpy as np
from jax.experimental import topologies

devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices
mesh = jax.sharding.Mesh(np.array(devices), ("x",))
rows, rest = (jax.sharding.NamedSharding(mesh, spec) for spec in (jax.P("x"), jax.P()))
found = {}
for impl in ("threefry2x32", "rbg", "unsafe_rbg"):
    key = jax.eval_shape(lambda: jax.random.key(0, impl=impl))
    key = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=rest)
    draw = jax.jit(lambda key: jax.random.uniform(key, (2**23, 64)), out_shardings=rows)
    memory = draw.lower(key).compile().memory_analysis()
    kept, found[impl] = (
        x / 2**20 for x in (memory.output_size_in_bytes, memory.temp_size_in_bytes)
    )
    print(f"{impl}: {found[impl]:.0f} MB of temporaries to keep {kept:.0f} MB")
assert found["threefry2x32"] < 1 and min(found["rbg"], found["unsafe_rbg"]) > 2000, "this has changed"
PYTHON
