#!/usr/bin/env bash
# jax.random.permutation of a million numbers sorts them twice.
#
# Versions: jax and jaxlib 0.10.2, numpy 2.2.6 on a CPU (x86), Python 3.11.
# Guess: shuffling an epoch is one sort by random keys of 32 bits.
# Seen (2026-11-29): As many sorts follow one another as make equal keys unlikely: one
#   up to 1,625 numbers, two up to 2.6 million, three above.
#     1,000 numbers: 1 sorts
#     1,000,000 numbers: 2 sorts
#     10,000,000 numbers: 3 sorts
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "jax==0.10.2" "numpy==2.2.6"
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import re

import jax

found = {}
for count in (1_000, 1_000_000, 10_000_000):
    shuffle = jax.jit(lambda key: jax.random.permutation(key, count))
    text = shuffle.lower(jax.random.key(0)).as_text()
    found[count] = len(re.findall(r"stablehlo\.sort", text))
    print(f"{count:,} numbers: {found[count]} sorts")
assert found == {1_000: 1, 1_000_000: 2, 10_000_000: 3}, "this has changed"
PYTHON
