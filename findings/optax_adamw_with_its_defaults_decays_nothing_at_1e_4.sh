#!/usr/bin/env bash
# optax.adamw(1e-4) decays no float32 weight at rest, in any number of steps.
#
# Versions: optax 0.2.8, jax 0.10.2, numpy 2.2.6 on a CPU (x86), Python 3.11.
# Guess: a weight without gradients shrinks by rate * weight_decay a step: with the
#   default decay of 1e-4 by 1e-3 in 100,000 steps at a rate of 1e-4.
# Seen (2026-11-29): 1e-8 of a float32 number is less than half of its last place, so
#   each step leaves it as it is. At 3e-4 weights move by nothing, or by twice what they
#   should; at 1e-2 all is nearly right.
#     rate 0.0001, 100000 steps: 0.00 to 0.00 of the decay
#     rate 0.0003, 20 steps: 0.00 to 2.00 of the decay
#     rate 0.01, 20 steps: 0.94 to 1.06 of the decay
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "optax==0.2.8" "jax==0.10.2" "numpy==2.2.6"
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp
import numpy as np
import optax

start = np.random.default_rng(0).uniform(1, 2, 2000).astype(np.float32)
found = {}
for rate, steps in ((1e-4, 100_000), (3e-4, 20), (1e-2, 20)):
    tx = optax.adamw(rate)

    @jax.jit
    def run(p):
        def step(_, kept):
            p, state = kept
            updates, state = tx.update(jnp.zeros_like(p), state, p)
            return optax.apply_updates(p, updates), state

        return jax.lax.fori_loop(0, steps, step, (p, tx.init(p)))[0]

    wanted = np.expm1(steps * np.log1p(-rate * 1e-4))
    shares = (np.asarray(run(start), np.float64) / start - 1) / wanted
    found[rate] = shares.min(), shares.max()
    print(f"rate {rate:g}, {steps} steps: {abs(shares.min()):.2f} to {shares.max() + 0:.2f} of the decay")
assert found[1e-4] == (0, 0) and found[3e-4][0] == 0 and found[3e-4][1] > 1.9, "this has changed"
assert 0.9 < found[1e-2][0] < found[1e-2][1] < 1.1, "this has changed"
PYTHON
