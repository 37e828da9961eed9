#!/usr/bin/env bash
# jax.grad of a float32 table is float64 through a product with a float64 BCOO matrix.
#
# Versions: jax and jaxlib 0.10.2 on a CPU (x86), 64-bit types enabled, Python 3.11.
# Guess: the gradient of an array has its dtype, as jax.grad checks for every dense
#   product: the dense matrix in float64 gives a float32 gradient of a float32 table.
# Seen (2026-11-28): Through matrix.T @ table of jax.experimental.sparse it is float64,
#   twice the memory, and an optimizer's state and parameters follow. A float32 matrix
#   with a float64 table is right.
#     table float32, matrix float64: gradient float64 by BCOO, float32 dense
#     table float64, matrix float32: gradient float64 by BCOO, float64 dense
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "jax==0.10.2" "numpy==2.2.6"
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp
from jax.experimental import sparse

jax.config.update("jax_enable_x64", True)


def dtype_of_gradient(matrix, table):
    return jax.grad(lambda table: (matrix.T @ table).sum())(table).dtype.name


found = {}
for of_matrix, of_table in (("float64", "float32"), ("float32", "float64")):
    dense, table = jnp.eye(4, 3, dtype=of_matrix), jnp.ones((4, 2), of_table)
    both = dtype_of_gradient(sparse.BCOO.fromdense(dense), table), dtype_of_gradient(dense, table)
    found[of_table] = both
    print(f"table {of_table}, matrix {of_matrix}: gradient {both[0]} by BCOO, {both[1]} dense")
assert found["float32"] == ("float64", "float32"), "this has changed"
assert found["float64"] == ("float64", "float64"), "this has changed"
PYTHON
