#!/usr/bin/env bash
# jax.random.choice without replacement returns ids of probability zero.
#
# Versions: jax and jaxlib 0.10.2, numpy 2.2.6 on a CPU (x86), Python 3.11.
# Guess: an id with p = 0 (one already seen, a masked item) is never drawn; where fewer
#   ids than are wanted have p > 0 there is an error, as in NumPy.
# Seen (2026-11-28): The rest is filled up with ids of p = 0, without an error or a
#   mark. With replacement none of them comes.
#     p [0.5, 0.5, 0.0, 0.0, 0.0], 4 without replacement: [1, 0, 2, 3]
#     NumPy: ValueError: Fewer non-zero entries in p than size
#     1000 with replacement: [0, 1]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "jax==0.10.2" "numpy==2.2.6"
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp
import numpy as np

p = np.array([0.5, 0.5, 0.0, 0.0, 0.0])
drawn = jax.random.choice(jax.random.key(0), 5, (4,), replace=False, p=jnp.asarray(p))
print(f"p {p.tolist()}, 4 without replacement: {drawn.tolist()}")
try:
    numpy = np.random.default_rng(0).choice(5, 4, replace=False, p=p).tolist()
except ValueError as error:
    numpy = f"ValueError: {error}"
print(f"NumPy: {numpy}")
again = jax.random.choice(jax.random.key(0), 5, (1000,), p=jnp.asarray(p))
print(f"1000 with replacement: {sorted(set(again.tolist()))}")
assert len(set(drawn.tolist())) == 4 and "ValueError" in numpy, "this has changed"
assert set(again.tolist()) == {0, 1}, "this has changed"
PYTHON
