#!/usr/bin/env bash
# On an H100 lax.top_k with k = 17 sorts all scores, with k = 16 none.
#
# Versions: jax and jaxlib 0.10.2, jax-cuda13-plugin 0.10.2, compiled for an H100
#   without one, Python 3.11.
# Guess: lax.top_k selects; a k of 100 among a million costs little more than a k of 10.
# Seen (2026-11-29): Up to 16 a kernel selects, in no memory of its own. From 17 on
#   everything is sorted with its places, in twice the memory of the scores. Two calls for
#   16 and 1, with the first 16 set to -inf between them, sort nothing.
#     k = 16: 0 sorts, 0 MB of temporaries for scores of 128 MB
#     k = 17: 1 sorts, 256 MB of temporaries for scores of 128 MB
#     16, then 1: 0 sorts, 128 MB of temporaries for scores of 128 MB
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "jax==0.10.2" \
  "jax-cuda13-pjrt==0.10.2" "jax-cuda13-plugin==0.10.2" "numpy==2.2.6"
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import re

import jax
import jax.numpy as jnp
from jax.experimental import topologies

H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132
  fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: 3352320000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 84942979072
  shared_memory_per_block_optin: 232448 cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
topology = topologies.get_topology_desc(
    platform="cuda", topology_name="", topology="1x1x1", target_config=H100
)
here = jax.sharding.SingleDeviceSharding(topology.devices[0])
scores = jax.ShapeDtypeStruct((32, 1_000_000), jnp.float32, sharding=here)


def in_rounds(scores):
    first = jax.lax.top_k(scores, 16)
    left = jax.vmap(lambda x, places: x.at[places].set(-jnp.inf))(scores, first[1])
    return first, jax.lax.top_k(left, 1)


def cost(function):
    compiled = jax.jit(function).lower(scores).compile()
    sorts = len(re.findall(r" sort\(", compiled.as_text()))
    return sorts, round(compiled.memory_analysis().temp_size_in_bytes / 1e6)


found = {f"k = {k}": cost(lambda scores: jax.lax.top_k(scores, k)) for k in (16, 17)}
found["16, then 1"] = cost(in_rounds)
for name, (sorts, memory) in found.items():
    print(f"{name}: {sorts} sorts, {memory} MB of temporaries for scores of 128 MB")
assert found["k = 16"] == (0, 0) and found["16, then 1"][0] == 0, "this has changed"
assert found["k = 17"][0] == 1 and found["k = 17"][1] > 200, "this has changed"
PYTHON
