#!/usr/bin/env bash
# jax.jit(optax.adam(rate).init) of a table split over devices makes moments whole on the first one.
#
# Versions: optax 0.2.8, jax 0.10.2, numpy 2.2.6 on a CPU (x86) with eight devices,
#   Python 3.11.
# Guess: init makes zeros like the table, so the moments are split as it is, with jit as
#   without.
# Seen (2026-11-29): Without jit they are split. Under jit the zeros depend on no
#   argument, and the compiler puts them whole on device 0, where the table was split
#   because it does not fit.
#     init(table): a moment on 8 devices, 8 of 64 rows on the first
#     jax.jit(init)(table): a moment on 1 devices, 64 of 64 rows on the first
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "optax==0.2.8" "jax==0.10.2" "numpy==2.2.6"
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp
import optax

jax.config.update("jax_num_cpu_devices", 8)
mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
table = jnp.zeros((64, 4), device=jax.NamedSharding(mesh, jax.P("x", None)))
init, found = optax.adam(0.1).init, {}
for name, function in {"init(table)": init, "jax.jit(init)(table)": jax.jit(init)}.items():
    moment = function(table)[0].mu
    found[name] = len(moment.sharding.device_set), moment.addressable_shards[0].data.shape[0]
    print(f"{name}: a moment on {found[name][0]} devices, {found[name][1]} of 64 rows on the first")
assert [*found.values()] == [(8, 8), (1, 64)], "this has changed"
PYTHON
