#!/usr/bin/env bash
# jax.random.choice with p draws only every second of 16 million ids.
#
# Versions: jax and jaxlib 0.10.2 on a CPU (x86), Python 3.11.
# Guess: negatives drawn by jax.random.choice(key, V, p=popularity) come from all V ids,
#   be they millions, in proportion to p; of equal p about as many are even as odd.
# Seen (2026-11-28): Of 2^24 ids of equal p no even one is drawn, of 2^25 again only
#   half come. The uniform number behind a draw has 23 random bits in float32, and steps
#   over the rest. Without p, which draws integers, all come.
#     2^20 ids, draws by id modulo 8: [131444, 131157, 130951, 130767, 130671, 131041, 131315, 131230]
#     2^24 ids, draws by id modulo 8: [0, 262272, 0, 261363, 0, 261878, 0, 263063]
#     2^25 ids, draws by id modulo 8: [0, 0, 262051, 262099, 0, 0, 262025, 262401]
#     2^25 ids without p:             [130761, 131153, 131297, 131043, 131013, 130585, 131356, 131368]
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


def remainders(V, p):
    ids = jax.random.choice(jax.random.key(0), V, (2**20,), p=p)
    return np.bincount(np.asarray(ids) % 8, minlength=8)


found = {}
for power in (20, 24, 25):
    V = 2**power
    found[power] = remainders(V, jnp.full(V, 1 / V))
    print(f"2^{power} ids, draws by id modulo 8: {found[power].tolist()}")
plain = remainders(2**25, None)
print(f"2^25 ids without p:             {plain.tolist()}")
assert found[20].all() and plain.all(), "this has changed"
assert not found[24][::2].any() and (found[25] == 0).sum() == 4, "this has changed"
PYTHON
