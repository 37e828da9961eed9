#!/usr/bin/env bash
# A Flax Embed that computes in bfloat16 adds up the gradient of its float32 table to 256.
#
# Versions: flax 0.12.8, jax and jaxlib 0.10.2 on a CPU (x86), Python 3.11.
# Guess: with float32 parameters and dtype=bfloat16, the usual mixed precision, rows are
#   cast after the lookup and their gradients are added up in float32: of 1,000 lookups
#   of one id, each with gradient 1, the row gets 1,000.
# Seen (2026-11-28): It gets 256, in flax.nnx and flax.linen: the table is cast before
#   the lookup, so that gradients of duplicates are added one by one in bfloat16, where
#   256 + 1 is 256. Frequent ids get a fraction of their gradient. Casting the rows
#   instead gives 1,000.
#     nnx.Embed: gradient 256, float32
#     linen.Embed: gradient 256, float32
#     rows cast after the lookup: gradient 1000, float32
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "jax==0.10.2" "numpy==2.2.6" "flax==0.12.8"
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

ids = jnp.zeros(1_000, jnp.int32)
layer = nnx.Embed(4, 2, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
by_nnx = nnx.grad(lambda layer: layer(ids).astype(jnp.float32).sum())(layer)["embedding"][...]

module = nn.Embed(4, 2, dtype=jnp.bfloat16)
params = module.init(jax.random.key(0), ids)
by_linen = jax.grad(lambda params: module.apply(params, ids).astype(jnp.float32).sum())(params)
by_linen = by_linen["params"]["embedding"]

rows = lambda table: table[ids].astype(jnp.bfloat16).astype(jnp.float32).sum()
by_rows = jax.grad(rows)(jnp.ones((4, 2)))
found = {"nnx.Embed": by_nnx, "linen.Embed": by_linen, "rows cast after the lookup": by_rows}
for name, grad in found.items():
    print(f"{name}: gradient {float(grad[0, 0]):.0f}, {grad.dtype}")
assert [float(grad[0, 0]) for grad in found.values()] == [256, 256, 1000], "this has changed"
PYTHON
