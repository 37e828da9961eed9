#!/usr/bin/env bash
# optax.incremental_update of the integer 7 with 7 is 6.
#
# Versions: optax 0.2.8, jax and jaxlib 0.10.2 on a CPU (x86), Python 3.11.
# Guess: the mean of two equal integers (a step count or a vocabulary size in a tree of
#   parameters that is averaged) is that integer, or integers are left alone.
# Seen (2026-11-28): 0.1 * 7 + 0.9 * 7 is a little less than 7 in float32, and is cut to
#   6. Of the integers below 200, 54 become one less. A count that has grown by one also
#   stays behind for good.
#     7 and 7: 6
#     one less than both: 54 of 200, [3, 6, 7, 9, 12, 14, 18, 23] ...
#     the mean of a count that is now 1000: 990
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "jax==0.10.2" "numpy==2.2.6" "optax==0.2.8"
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax.numpy as jnp
import optax


def mean(new, old):
    return int(optax.incremental_update(jnp.array(new), jnp.array(old), 0.1))


less = [n for n in range(200) if mean(n, n) == n - 1]
other = [n for n in range(200) if mean(n, n) not in (n, n - 1)]
print(f"7 and 7: {mean(7, 7)}")
print(f"one less than both: {len(less)} of 200, {less[:8]} ...")
count = 0
for step in range(1, 1001):
    count = mean(step, count)
print(f"the mean of a count that is now 1000: {count}")
assert mean(7, 7) == 6 and len(less) == 54 and not other, "this has changed"
PYTHON
