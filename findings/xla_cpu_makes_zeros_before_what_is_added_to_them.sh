#!/usr/bin/env bash
# XLA:CPU makes an array of zeros at the start of a program, and keeps it until it is used.
#
# Versions: jax 0.10.2, jaxlib 0.10.2, numpy 2.3.5, Python 3.11 (x86).
# Guess: jnp.zeros(...).at[numbers].add(rows) makes its zeros when rows are there, in memory
#   of what is dead by then: sums of gradients of looked-up rows take two arrays of their
#   size, the rows and the gradient, then the gradient and the sums.
# Seen (2026-11-29): three, as what depends on nothing comes first. Zeros that depend on the
#   numbers, which come after the loss, take two; values and order of additions are the same.
#     jax 0.10.2, jnp.zeros: 3.0 arrays of 25.6 MB
#     jax 0.10.2, zeros that wait: 2.0 arrays of 25.6 MB
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "jax==0.10.2" "jaxlib==0.10.2" "numpy==2.3.5"
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp

V, D, K = 1_000_000, 64, 100_000


def sums(table, ids, wait):
    loss, pullback = jax.vjp(lambda rows: (rows**2).mean(), table[ids])
    (grads,) = pullback(1.0)
    ids = jnp.where(loss > jnp.inf, 0, ids)  # numbers come after the loss
    ordered = jnp.sort(ids)
    numbers = jnp.searchsorted(ordered, ids)
    value = jnp.where(numbers[0] < 0, 1.0, 0.0) if wait else 0.0
    return loss, jnp.full((K, D), value).at[numbers].add(grads)[ordered % K].sum(1)


shapes = jax.ShapeDtypeStruct((V, D), "float32"), jax.ShapeDtypeStruct((K,), "int32")
found = []
for wait in False, True:
    program = jax.jit(sums, static_argnums=2).lower(*shapes, wait).compile()
    arrays = program.memory_analysis().temp_size_in_bytes / (K * D * 4)
    found.append(round(arrays))
    name = "zeros that wait" if wait else "jnp.zeros"
    print(f"jax {jax.__version__}, {name}: {arrays:.1f} arrays of {K * D * 4 / 1e6} MB")
assert found == [3, 2], "this has changed"
PYTHON
