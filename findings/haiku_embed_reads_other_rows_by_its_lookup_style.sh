#!/usr/bin/env bash
# hk.Embed reads zeros or the last row for an id beyond the table, by its lookup style.
#
# Versions: dm-haiku 0.0.17, jax and jaxlib 0.10.2 on a CPU (x86), Python 3.11.
# Guess: lookup_style chooses how the rows are read, a gather or a product with one-hot
#   vectors, which is faster on some devices; what is read is the same.
# Seen (2026-11-28): With ARRAY_INDEX, the default, padding of -1 and ids beyond the
#   table read the last row. With ONE_HOT they read zeros. A model that was trained with
#   one is another with the other.
#     ARRAY_INDEX: ids [0, 4, -1, 5] of 5 read [1.0, 5.0, 5.0, 5.0]
#     ONE_HOT: ids [0, 4, -1, 5] of 5 read [1.0, 5.0, 0.0, 0.0]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "jax==0.10.2" "numpy==2.2.6" "dm-haiku==0.0.17"
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import haiku as hk
import jax
import jax.numpy as jnp

ids = jnp.array([0, 4, -1, 5])
table = jnp.arange(1.0, 6.0)[:, None]
found = {}
for style in ("ARRAY_INDEX", "ONE_HOT"):
    model = hk.transform(lambda ids: hk.Embed(5, 1, lookup_style=style)(ids))
    rows = model.apply({"embed": {"embeddings": table}}, None, ids)
    found[style] = rows[:, 0].tolist()
    print(f"{style}: ids {ids.tolist()} of 5 read {found[style]}")
assert found["ARRAY_INDEX"] == [1, 5, 5, 5], "this has changed"
assert found["ONE_HOT"] == [1, 5, 0, 0], "this has changed"
PYTHON
