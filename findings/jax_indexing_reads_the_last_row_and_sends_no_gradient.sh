#!/usr/bin/env bash
# table[ids] reads the last row for an id beyond the table, and sends it no gradient.
#
# Versions: jax and jaxlib 0.10.2 on a CPU (x86), Python 3.11.
# Guess: an id beyond the table is clamped in the lookup, so its gradient goes to the
#   row that was read; moving against the gradient makes the loss smaller.
# Seen (2026-11-28): The value is that of the last row, the gradient is nowhere: the
#   scatter of the backward pass drops what it cannot place. A finite difference says
#   something else than jax.grad. mode="clip" sends the gradient to the row that it
#   reads.
#     table [1.0, 2.0, 3.0, 4.0], ids [0, 5], read [1.0, 4.0]
#     jax.grad of table[ids]: [2.0, 0.0, 0.0, 0.0]
#     finite difference at the last row: 8.0
#     jax.grad with mode="clip": [2.0, 0.0, 0.0, 8.0]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "jax==0.10.2" "numpy==2.2.6"
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp

table, ids = jnp.arange(1.0, 5.0), jnp.array([0, 5])


def plain(table):
    return (table[ids] ** 2).sum()


def clipped(table):
    return (table.at[ids].get(mode="clip") ** 2).sum()


print(f"table {table.tolist()}, ids {ids.tolist()}, read {table[ids].tolist()}")
by_grad = jax.grad(plain)(table)
by_clip = jax.grad(clipped)(table)
by_difference = (plain(table.at[3].add(0.5)) - plain(table.at[3].add(-0.5))) / 1.0
print(f"jax.grad of table[ids]: {by_grad.tolist()}")
print(f"finite difference at the last row: {float(by_difference)}")
print(f'jax.grad with mode="clip": {by_clip.tolist()}')
assert table[ids].tolist() == [1, 4] and by_grad.tolist() == [2, 0, 0, 0], "this has changed"
assert by_difference == 8 and by_clip.tolist() == [2, 0, 0, 8], "this has changed"
PYTHON
