#!/usr/bin/env bash
# XLA:CPU copies two whole arrays to step one row of them in place, and none to step two.
#
# Versions: jax and jaxlib 0.10.2 and 0.12.0.1 on a CPU (x86), Python 3.11 and 3.13.
# Guess: a jitted step of Adagrad that gathers and scatters some rows of two donated arrays
#   works in place for any number of rows, one included.
# Seen (2026-11-28): of one row the gather becomes a slice, which is computed anew in each
#   kernel that uses it. The accumulator is then read after it is written, and so copied.
#     rows: 1, copies: 2
#     rows: 2, copies: 0
#     rows: 3, copies: 0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "jax==0.10.2" "numpy==2.2.6"
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import re

import jax
import jax.numpy as jnp

V, D = 300_000, 16


def step(table, squares, ids, grad):
    total = squares[ids] + grad * grad
    squares = squares.at[ids].set(total, unique_indices=True)
    update = -0.1 * grad * jax.lax.rsqrt(total)
    return table.at[ids].add(update, unique_indices=True), squares


def copies(rows):
    args = jnp.ones((V, D)), jnp.ones((V, D)), jnp.arange(rows), jnp.ones((rows, D))
    text = jax.jit(step, donate_argnums=(0, 1)).lower(*args).compile().as_text()
    return len(re.findall(rf"= f32\[{V},{D}\]\S* copy\(", text))


found = {rows: copies(rows) for rows in (1, 2, 3)}
for rows, count in found.items():
    print(f"rows: {rows}, copies: {count}")
assert found[1] and not found[2] and not found[3], "this has changed"
PYTHON
