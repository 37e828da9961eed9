#!/usr/bin/env bash
# The dense gradient of a table split by rows comes out whole on every device.
#
# Versions: jax and jaxlib 0.10.2, four devices of a CPU (x86), Python 3.11.
# Guess: jax.grad by a table that is split by rows returns an array that is split like
#   it, as it has the shape of the table and is added to it: a quarter on each of four
#   devices.
# Seen (2026-11-28): It is replicated: an all-reduce of the whole table, which each
#   device then holds. In one program with the step that subtracts it, it is split.
#   out_shardings= says so by hand.
#     jit(grad): 4000 of 4000 rows on each device
#     jit(step): 1000 of 4000 rows on each device
#     jit(grad, out_shardings=): 1000 of 4000 rows on each device
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "jax==0.10.2" "numpy==2.2.6"
cd "$folder"
JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=4 "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp

mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
split = jax.NamedSharding(mesh, jax.P("x"))
table = jax.device_put(jnp.zeros((4_000, 16)), split)
ids = jax.device_put(jnp.zeros(64, jnp.int32), split)
grad = jax.grad(lambda table, ids: (table[ids] ** 2).sum())
step = lambda table, ids: table - 0.1 * grad(table, ids)

found = {}
for name, function in (
    ("jit(grad)", jax.jit(grad)),
    ("jit(step)", jax.jit(step)),
    ("jit(grad, out_shardings=)", jax.jit(grad, out_shardings=split)),
):
    out = function(table, ids)
    found[name] = out.addressable_shards[0].data.shape[0]
    print(f"{name}: {found[name]} of {len(out)} rows on each device")
assert list(found.values()) == [4_000, 1_000, 1_000], "this has changed"
PYTHON
