#!/usr/bin/env bash
# Writing 8,000 rows of an array [6, V, 128] copies all of it on a v5e, unless 8 divides V.
#
# Versions: jax and jaxlib 0.10.2, libtpu 0.0.42.1, compiled for a v5e without one,
#   Python 3.11.
# Guess: layers.at[layer, ids].add(rows) on a donated array of rows of 128 is in place,
#   as it is for [V, 128] with any V: only the rows are read and written.
# Seen (2026-11-28): With V = 131,075 there are 403 MB of temporaries, the array itself,
#   and compiling takes many times as long; with five rows more there are none.
#     [6, 131075, 128]: temporaries of 402.8 MB
#     [6, 131080, 128]: temporaries of 0.0 MB
#     [786450, 128]: temporaries of 0.0 MB
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

L, K, D = 6, 8_000, 128
device = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[0]
here = jax.sharding.SingleDeviceSharding(device)


def temporaries(shape, ids):
    of = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=here)
    ids = [of((K,), jnp.int32)] * ids
    step = jax.jit(lambda table, ids, rows: table.at[tuple(ids)].add(rows), donate_argnums=0)
    compiled = step.lower(of(shape, jnp.float32), ids, of((K, D), jnp.float32)).compile()
    return compiled.memory_analysis().temp_size_in_bytes / 1e6


found = [temporaries((L, V, D), 2) for V in (131_075, 131_080)]
print(f"[{L}, 131075, {D}]: temporaries of {found[0]:.1f} MB")
print(f"[{L}, 131080, {D}]: temporaries of {found[1]:.1f} MB")
flat = temporaries((L * 131_075, D), 1)
print(f"[{L * 131_075}, {D}]: temporaries of {flat:.1f} MB")
assert found[0] > 400 and found[1] < 1 and flat < 1, "this has changed"
PYTHON
