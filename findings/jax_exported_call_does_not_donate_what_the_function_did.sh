#!/usr/bin/env bash
# A step that was exported with donated arguments does not donate them when it is called.
#
# Versions: jax and jaxlib 0.10.2, numpy 2.2.6 on a CPU (x86), Python 3.11.
# Guess: donate_argnums is part of what is exported, as sharding is: exported.call of
#   the step writes into the table in place.
# Seen (2026-11-29): Its arguments stay, and the table is copied in every call.
#   jax.jit(exported.call, donate_argnums=0) steps in place.
#     jax.jit(step, donate_argnums=0): the table was donated: True
#     exported.call: the table was donated: False
#     jax.jit(exported.call, donate_argnums=0): the table was donated: True
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "jax==0.10.2" "numpy==2.2.6"
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp


def step(table, ids):
    return table.at[ids].add(1.0)


ids, found = jnp.array([1, 2]), {}
table = jax.ShapeDtypeStruct((1000, 64), jnp.float32)
exported = jax.export.export(jax.jit(step, donate_argnums=0))(table, ids)
for name, call in {
    "jax.jit(step, donate_argnums=0)": jax.jit(step, donate_argnums=0),
    "exported.call": exported.call,
    "jax.jit(exported.call, donate_argnums=0)": jax.jit(exported.call, donate_argnums=0),
}.items():
    table = jnp.zeros((1000, 64))
    call(table, ids)
    found[name] = table.is_deleted()
    print(f"{name}: the table was donated: {found[name]}")
assert [*found.values()] == [True, False, True], "this has changed"
PYTHON
