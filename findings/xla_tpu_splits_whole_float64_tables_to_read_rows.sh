#!/usr/bin/env bash
# A TPU splits a whole float64 table in two to read some rows of it.
#
# Versions: jax and jaxlib 0.10.2, libtpu 0.0.42.1, compiled for a v5e without one,
#   Python 3.11.
# Guess: TPUs have no float64, and XLA emulates it by pairs of float32; a lookup of
#   10,000 rows reads 10,000 rows of pairs, and arithmetic on them is slow.
# Seen (2026-11-28): The table is an argument of 8 bytes a number and is split as a
#   whole before the gather: 512 MB of temporaries to read 10 MB. Adding to rows splits
#   it and joins it again. float32 and bfloat16 need none.
#     bfloat16: temporaries of 0.0 MB to read rows, 0.0 MB to add to them
#     float32: temporaries of 0.0 MB to read rows, 0.0 MB to add to them
#     float64: temporaries of 512.0 MB to read rows, 1024.0 MB to add to them
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

jax.config.update("jax_enable_x64", True)
V, D, K = 1_000_000, 128, 10_000
device = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[0]
here = jax.sharding.SingleDeviceSharding(device)
of = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=here)


def temporaries(step, *args):
    compiled = jax.jit(step, donate_argnums=0).lower(*args).compile()
    return compiled.memory_analysis().temp_size_in_bytes / 1e6


found = {}
for dtype in ("bfloat16", "float32", "float64"):
    table, ids, rows = of((V, D), dtype), of((K,), jnp.int32), of((K, D), dtype)
    read = temporaries(lambda table, ids: table[ids], table, ids)
    add = temporaries(lambda table, ids, rows: table.at[ids].add(rows), table, ids, rows)
    found[dtype] = read, add
    print(f"{dtype}: temporaries of {read:.1f} MB to read rows, {add:.1f} MB to add to them")
assert min(found.pop("float64")) > 500, "this has changed"
assert all(max(sizes) < 20 for sizes in found.values()), "this has changed"
PYTHON
