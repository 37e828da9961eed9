#!/usr/bin/env bash
# A lookup in a table split by rows adds up the rows of all ids on all devices.
#
# Versions: jax and jaxlib 0.10.2, four devices of a CPU (x86), Python 3.11.
# Guess: with a table split by rows and a batch split over the same devices, table[ids]
#   sends each id to the device that has its row and the row back: an all-to-all of the
#   device's share.
# Seen (2026-11-28): Every device gets all ids, makes an array of all rows of the batch
#   with zeros where it has none, and these are added up by an all-reduce, of which each
#   keeps its share. What a device receives does not fall with the number of devices.
#     all-gather of s32[64,1], of 64 ids on 4 devices
#     all-reduce of f32[64,16], of 64 ids on 4 devices
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "jax==0.10.2" "numpy==2.2.6"
cd "$folder"
JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=4 "$folder/venv/bin/python" - <<'PYTHON'
import re

import jax
import jax.numpy as jnp

K, D = 64, 16
mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
split = jax.NamedSharding(mesh, jax.P("x"))
table = jax.device_put(jnp.zeros((4_000, D)), split)
ids = jax.device_put(jnp.zeros(K, jnp.int32), split)
text = jax.jit(lambda table, ids: table[ids]).lower(table, ids).compile().as_text()
kinds = "all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute"
found = re.findall(rf"= (\w+\[[\d,]*\])\S* ({kinds})\(", text)
for shape, kind in found:
    print(f"{kind} of {shape}, of {K} ids on 4 devices")
assert (f"f32[{K},{D}]", "all-reduce") in found, "this has changed"
assert not any(kind == "all-to-all" for _, kind in found), "this has changed"
PYTHON
