#!/usr/bin/env bash
# XLA:CPU takes optimization barriers out before it fuses and looks for copies.
#
# Versions: jax and jaxlib 0.10.2 on a CPU (x86), Python 3.11.
# Guess: a scatter whose indices go through jax.lax.optimization_barrier together with a
#   number that was computed from the table comes after that read, so that a donated table
#   is written in place.
# Seen (2026-11-28): the whole table is copied, as without a barrier. A lax.cond on a
#   predicate that XLA does not know, with the identity in one branch, does keep the order.
#   jax 0.12.0.1 keeps the order of a barrier, too: 2, 0, 0 copies.
#     plain: 2 copies of the table
#     barrier: 2 copies of the table
#     cond: 0 copies of the table
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


def copies(order):
    def step(table, ids, y):
        value = (table[ids] * y).sum()
        value, ids = order(value, ids)
        return table.at[ids].add(y), value

    args = jnp.ones((V, D)), jnp.arange(K), jnp.ones((K, D))
    text = jax.jit(step, donate_argnums=0).lower(*args).compile().as_text()
    return len(re.findall(rf"= f32\[{V},{D}\]\S* copy\(", text))


def by_cond(value, ids):
    other = lambda value, ids: (-value, ~ids)
    same = lambda value, ids: (value, ids)
    return jax.lax.cond(value > jnp.inf, other, same, value, ids)


found = {
    "plain": copies(lambda *both: both),
    "barrier": copies(lambda *both: jax.lax.optimization_barrier(both)),
    "cond": copies(by_cond),
}
for name, count in found.items():
    print(f"{name}: {count} copies of the table")
assert found["plain"] and found["barrier"] and not found["cond"], "this has changed"
PYTHON
