#!/usr/bin/env bash
# XLA:GPU reads rows a second time after they are written, and copies the table for that.
#
# Versions: jax and jaxlib 0.10.2, jax-cuda13-plugin 0.10.2, compiled for an H100
#   without one, Python 3.11.
# Guess: rows = table[ids] before a write is one gather into memory of its own; a metric
#   that compares the new rows with these leaves the write in place, as it does on a
#   CPU.
# Seen (2026-11-28): XLA repeats the gather in the kernel that uses the rows, which runs
#   after the write, and must keep the old table for it: two copies of 256 MB. An
#   optimization barrier behind the gather stores the rows, and there is no copy.
#     plain: 2 copies of the table
#     barrier behind the gather: 0 copies of the table
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "jax==0.10.2" "jax-cuda13-pjrt==0.10.2" \
  "jax-cuda13-plugin==0.10.2" "numpy==2.2.6"
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
V, D, K = 1_000_000, 64, 10_000
topology = topologies.get_topology_desc(
    platform="cuda", topology_name="", topology="1x1x1", target_config=H100
)
here = jax.sharding.SingleDeviceSharding(topology.devices[0])


def copies(keep):
    def step(table, ids, grad):
        old = keep(table[ids])
        table = table.at[ids].add(-0.1 * grad)
        return table, jnp.abs(table[ids] - old).sum()

    of = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=here)
    args = of((V, D), jnp.float32), of((K,), jnp.int32), of((K, D), jnp.float32)
    text = jax.jit(step, donate_argnums=0).lower(*args).compile().as_text()
    return len(re.findall(rf"= f32\[{V},{D}\]\S* copy\(", text))


plain, kept = copies(lambda rows: rows), copies(jax.lax.optimization_barrier)
print(f"plain: {plain} copies of the table")
print(f"barrier behind the gather: {kept} copies of the table")
assert plain and not kept, "this has changed"
PYTHON
