#!/usr/bin/env bash
# A layout constraint within lax.platform_dependent has no effect on a TPU, outside it has.
#
# Versions: jax and jaxlib 0.10.2, libtpu 0.0.42.1, compiled for a v5e without one,
#   Python 3.11.
# Guess: with_layout_constraint(x, by_rows), wrapped in lax.platform_dependent(tpu=...)
#   so that other devices do without it, does on a TPU what it does unwrapped.
# Seen (2026-11-28): Unwrapped it keeps the table by rows, and there are no temporaries.
#   In the branch for TPUs it is as if it were not there: the table is copied to the
#   default layout and back, 512 MB.
#     no constraint: temporaries of 512.1 MB
#     with_layout_constraint: temporaries of 0.0 MB
#     within platform_dependent: temporaries of 512.1 MB
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
from jax.experimental.layout import Format, Layout, with_layout_constraint

V, D, K = 1_000_000, 64, 10_000
device = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[0]
here = jax.sharding.SingleDeviceSharding(device)
by_rows = Layout((0, 1))
constrain = lambda x: with_layout_constraint(x, by_rows)
wrapped = lambda x: jax.lax.platform_dependent(x, tpu=constrain, default=lambda x: x)


def temporaries(place):
    table = jax.ShapeDtypeStruct((V, D), jnp.float32, sharding=Format(by_rows, here))
    ids = jax.ShapeDtypeStruct((K,), jnp.int32, sharding=here)
    rows = jax.ShapeDtypeStruct((K, D), jnp.float32, sharding=here)
    step = jax.jit(lambda table, ids, rows: place(table.at[ids].add(rows)))
    memory = step.lower(table, ids, rows).compile().memory_analysis()
    return memory.temp_size_in_bytes / 1e6


found = {
    "no constraint": temporaries(lambda x: x),
    "with_layout_constraint": temporaries(constrain),
    "within platform_dependent": temporaries(wrapped),
}
for name, size in found.items():
    print(f"{name}: temporaries of {size:.1f} MB")
plain, direct, inside = found.values()
assert plain > 500 and direct < 1 and inside > 500, "this has changed"
PYTHON
