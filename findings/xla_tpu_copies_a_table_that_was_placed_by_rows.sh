#!/usr/bin/env bash
# A donated table that is placed by rows on a v5e is still copied twice to write some rows.
#
# Versions: jax and jaxlib 0.10.2, libtpu 0.0.42.1, compiled for a v5e without one,
#   Python 3.11.
# Guess: an argument with the layout of rows, Format(Layout((0, 1))), is written in
#   place by .at[ids].add, as it is donated: XLA keeps its layout for the result, which
#   lives in its memory.
# Seen (2026-11-28): The result gets the default layout, by columns, and XLA converts
#   the table there, updates it by rows and converts it back: two copies. out_shardings=
#   with the same format is needed as well.
#     default: 2 copies of the table
#     argument by rows: 2 copies of the table
#     argument and result by rows: 0 copies of the table
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "jax==0.10.2" "libtpu==0.0.42.1" "numpy==2.2.6"
cd "$folder"
JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 TPU_ACCELERATOR_TYPE=v5litepod-4 \
  TPU_WORKER_HOSTNAMES=localhost TPU_WORKER_ID=0 "$folder/venv/bin/python" - <<'PYTHON'
import re

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.experimental.layout import Format, Layout

V, D, K = 1_000_000, 64, 10_000
device = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[0]
here = jax.sharding.SingleDeviceSharding(device)
by_rows = Format(Layout((0, 1)), here)


def copies(place, **how):
    table = jax.ShapeDtypeStruct((V, D), jnp.float32, sharding=place)
    ids = jax.ShapeDtypeStruct((K,), jnp.int32, sharding=here)
    rows = jax.ShapeDtypeStruct((K, D), jnp.float32, sharding=here)
    step = jax.jit(lambda t, ids, rows: t.at[ids].add(rows), donate_argnums=0, **how)
    text = step.lower(table, ids, rows).compile().as_text()
    return len(re.findall(rf"= f32\[{V},{D}\]\S* copy\(", text))


found = {
    "default": copies(here),
    "argument by rows": copies(by_rows),
    "argument and result by rows": copies(by_rows, out_shardings=by_rows),
}
for name, count in found.items():
    print(f"{name}: {count} copies of the table")
assert list(found.values()) == [2, 2, 0], "this has changed"
PYTHON
