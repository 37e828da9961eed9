#!/usr/bin/env bash
# Donated arrays of one shape that return in another order are copied whole.
#
# Versions: jax and jaxlib 0.10.2 on a CPU (x86), Python 3.11.
# Guess: a step that writes some rows of two donated arrays works in place, in whichever
#   order it returns them: both are donated, and each result comes from one of them.
# Seen (2026-11-28): JAX pairs donated arguments with results of their shape and dtype
#   as they come, and not by what is computed from what. step(state, params) that
#   returns (params, state) copies both.
#     (state, params) returns (state, params): 0 copies of an array
#     (state, params) returns (params, state): 4 copies of an array
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

V, D, K = 300_000, 16, 1_000


def copies(swap):
    def step(state, params, ids, rows):
        state, params = state.at[ids].add(rows * rows), params.at[ids].add(rows)
        return (params, state) if swap else (state, params)

    table, ids, rows = jnp.ones((V, D)), jnp.arange(K), jnp.ones((K, D))
    lowered = jax.jit(step, donate_argnums=(0, 1)).lower(table, table, ids, rows)
    return len(re.findall(rf"= f32\[{V},{D}\]\S* copy\(", lowered.compile().as_text()))


same, other = copies(swap=False), copies(swap=True)
print(f"(state, params) returns (state, params): {same} copies of an array")
print(f"(state, params) returns (params, state): {other} copies of an array")
assert not same and other, "this has changed"
PYTHON
