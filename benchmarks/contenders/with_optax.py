"""JAX and Optax as they are: a dense gradient, an update of every row."""

import jax
import optax

from contenders.with_jslices import jitted
from contenders.with_jslices import wait as wait

VERSION = f"jax {jax.__version__}, optax {optax.__version__}"


def make(optimizer, num_rows, dim, rate):
    return jitted(dense_step, getattr(optax, optimizer)(rate), num_rows, dim)


def dense_step(loss, tx):
    """What ``js.train_step`` replaces."""

    def step(params, state, *batch):
        value, grads = jax.value_and_grad(loss)(params, *batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step
