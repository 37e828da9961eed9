#!/usr/bin/env bash
# Decaying means of Optax in bfloat16 stop at half of what they are a mean of.
#
# Versions: optax 0.2.8, jax and jaxlib 0.10.2 on a CPU (x86), Python 3.11.
# Guess: a decaying mean of ones, 0.999 * mean + 0.001, comes near 1 in some thousand
#   steps, in bfloat16 to two or three digits.
# Seen (2026-11-28): It stops at 0.5 for good: from there on a step adds 0.0005, less
#   than half of the distance to the next number. So do ema, incremental_update (target
#   networks) and the second moment of Adam for bfloat16 gradients.
#   optax.ema(accumulator_dtype=float32) goes on.
#     ema: 0.5
#     incremental_update: 0.5
#     second moment of scale_by_adam: 0.5
#     ema with accumulator_dtype=float32: 0.993
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "jax==0.10.2" "numpy==2.2.6" "optax==0.2.8"
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp
import optax

STEPS = 5_000
one, zero = jnp.ones((), jnp.bfloat16), jnp.zeros((), jnp.bfloat16)


def after(step, start):
    return jax.jit(lambda x: jax.lax.fori_loop(0, STEPS, lambda _, x: step(x), x))(start)


def mean(**how):
    tx = optax.ema(0.999, debias=False, **how)
    return after(lambda state: tx.update(one, state)[1], tx.init(zero)).ema


adam = optax.scale_by_adam(b2=0.999)
found = {
    "ema": mean(),
    "incremental_update": after(lambda x: optax.incremental_update(one, x, 1e-3), zero),
    "second moment of scale_by_adam": after(
        lambda state: adam.update(one, state)[1], adam.init(zero)
    ).nu,
    "ema with accumulator_dtype=float32": mean(accumulator_dtype=jnp.float32),
}
for name, x in found.items():
    print(f"{name}: {float(x):.3g}")
*stuck, wide = map(float, found.values())
assert stuck == [0.5] * 3 and wide > 0.99, "this has changed"
PYTHON
