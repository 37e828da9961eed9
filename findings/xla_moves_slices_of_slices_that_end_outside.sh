#!/usr/bin/env bash
# Under jit a slice of a slice reads another row if the first would end beyond the array.
#
# Versions: jax 0.10.2, jaxlib 0.10.2, numpy 2.3.5, Python 3.11 (x86).
# Guess: lax.dynamic_slice moves a start so that the slice ends within the array, each
#   slice by itself: of six rows, two from row 5 on are rows 4 and 5, and the first of
#   these is row 4, under jit too.
# Seen (2026-11-29): XLA makes one slice of the two, whose start is the sum of both starts,
#   and moves that alone: row 5 under jit, where the same lines give row 4 without; and of
#   rows 2 and 3 the one at 9, which is row 3, is row 5. jax 0.12.0.1 gives rows 4 and 3.
#     rows 5 and 6 of 0 to 5, the first of them: 4.0, under jit 5.0
#     rows 2 and 3, the one at 9: 3.0, under jit 5.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "jax==0.10.2" "jaxlib==0.10.2" "numpy==2.3.5"
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp


def one_of_two(table, first, second):
    two = jax.lax.dynamic_slice_in_dim(table, first, 2)
    return jax.lax.dynamic_slice_in_dim(two, second, 1)[0]


table, found = jnp.arange(6.0), []
for first, second, what in (
    (5, 0, "rows 5 and 6 of 0 to 5, the first of them"),
    (2, 9, "rows 2 and 3, the one at 9"),
):
    alone, jitted = (float(f(table, first, second)) for f in (one_of_two, jax.jit(one_of_two)))
    print(f"{what}: {alone}, under jit {jitted}")
    found.append((alone, jitted))
assert found == [(4, 5), (3, 5)], "this has changed"
PYTHON
