#!/usr/bin/env bash
# jnp.take with int8 ids reads another row of a table of 300, and indexing raises.
#
# Versions: jax and jaxlib 0.10.2 on a CPU (x86), Python 3.11.
# Guess: ids of a narrow dtype, as files of small vocabularies have, name the same rows
#   in jnp.take and table[ids]; -1 is the last row, or out of range.
# Seen (2026-11-28): jnp.take adds the 300 rows to -1 in int8, where that is 43, and
#   reads row 43. Indexing raises OverflowError for any ids of int8, those in range as
#   well. With uint8, and in a table of 100 rows, jnp.take is right.
#     jnp.take(table, int8 [-1]): row 43 of 300
#     table[int8 [5]]: OverflowError
#     jnp.take(table, int32 [-1]): row 299 of 300
#     jnp.take(table, uint8 [200]): row 200 of 300
#     jnp.take(table[:100], int8 [-1]): row 99 of 100
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "jax==0.10.2" "numpy==2.2.6"
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax.numpy as jnp

table = jnp.arange(300.0)
narrow = int(jnp.take(table, jnp.array([-1], jnp.int8))[0])
print(f"jnp.take(table, int8 [-1]): row {narrow} of 300")
try:
    error = f"row {int(table[jnp.array([5], jnp.int8)][0])}"
except OverflowError as raised:
    error = type(raised).__name__
print(f"table[int8 [5]]: {error}")
wide = int(jnp.take(table, jnp.array([-1], jnp.int32))[0])
print(f"jnp.take(table, int32 [-1]): row {wide} of 300")
unsigned = int(jnp.take(table, jnp.array([200], jnp.uint8))[0])
print(f"jnp.take(table, uint8 [200]): row {unsigned} of 300")
short = int(jnp.take(table[:100], jnp.array([-1], jnp.int8))[0])
print(f"jnp.take(table[:100], int8 [-1]): row {short} of 100")
assert (narrow, error, wide) == (43, "OverflowError", 299), "this has changed"
assert (unsigned, short) == (200, 99), "this has changed"
PYTHON
