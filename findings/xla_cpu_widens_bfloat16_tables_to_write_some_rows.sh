#!/usr/bin/env bash
# XLA:CPU widens a whole bfloat16 table to float32 and back to write 100 rows of it.
#
# Versions: jax and jaxlib 0.10.2 on a CPU (x86), Python 3.11.
# Guess: adding to some rows of a donated table in bfloat16 moves half the bytes of
#   float32, in place; at most the rows are widened.
# Seen (2026-11-28): The table is converted as a whole, twice, which takes a float32
#   copy of it. float8 goes by float16 in the same way. float16 and float32 are written
#   in place. jax 0.12.0.1 widens float8 alone.
#     float32: a table of 19.2 MB, temporaries of 0.0 MB
#     float16: a table of 9.6 MB, temporaries of 0.0 MB
#     bfloat16: a table of 9.6 MB, temporaries of 19.2 MB
#     float8_e4m3fn: a table of 4.8 MB, temporaries of 9.6 MB
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "jax==0.10.2" "numpy==2.2.6"
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp

V, D, K = 300_000, 16, 100


def temporaries(dtype):
    table, rows = jax.ShapeDtypeStruct((V, D), dtype), jax.ShapeDtypeStruct((K, D), dtype)
    ids = jax.ShapeDtypeStruct((K,), jnp.int32)
    step = jax.jit(lambda table, ids, rows: table.at[ids].add(rows), donate_argnums=0)
    compiled = step.lower(table, ids, rows).compile()
    return compiled.memory_analysis().temp_size_in_bytes


found = {}
for dtype in ("float32", "float16", "bfloat16", "float8_e4m3fn"):
    found[dtype] = temporaries(dtype) / 1e6
    size = V * D * jnp.dtype(dtype).itemsize / 1e6
    print(f"{dtype}: a table of {size:.1f} MB, temporaries of {found[dtype]:.1f} MB")
assert found["float32"] < 0.1 and found["float16"] < 0.1, "this has changed"
assert found["bfloat16"] > 19 and found["float8_e4m3fn"] > 9, "this has changed"
PYTHON
