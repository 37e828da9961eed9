#!/usr/bin/env bash
# XLA computes the norms of all rows of a table to read those of ten.
#
# Versions: jax and jaxlib 0.10.2, numpy 2.2.6 on a CPU (x86), Python 3.11.
# Guess: jnp.linalg.norm(table, axis=1)[ids] in one program reads ten rows: the gather
#   moves before the norm, which treats rows alike.
# Seen (2026-11-29): A gather stays behind what makes its operand: all rows are read and
#   multiplied, 10,000 times the work of jnp.linalg.norm(table[ids], axis=1).
#     norm(table)[ids]: 12,700,030 operations
#     norm(table[ids]): 1,300 operations
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "jax==0.10.2" "numpy==2.2.6"
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp

table, ids = jax.ShapeDtypeStruct((100_000, 64), jnp.float32), jnp.arange(10)


def work(function):
    cost = jax.jit(function).lower(table, ids).compile().cost_analysis()
    return cost["flops"]


after = work(lambda table, ids: jnp.linalg.norm(table, axis=1)[ids])
before = work(lambda table, ids: jnp.linalg.norm(table[ids], axis=1))
print(f"norm(table)[ids]: {after:,.0f} operations")
print(f"norm(table[ids]): {before:,.0f} operations")
assert after > 1000 * before, "this has changed"
PYTHON
