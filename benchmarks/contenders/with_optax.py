"""JAX and Optax as they are: a dense gradient, an update of every row."""

import functools

import jax
import jax.numpy as jnp
import optax

from contenders.with_jslices import runner

VERSION = f"jax {jax.__version__}, optax {optax.__version__}"


def make(optimizer, num_rows, dim, rate):
    tx = getattr(optax, optimizer)(rate)

    def loss(table, ids):
        return 0.5 / ids.shape[0] * jnp.sum(table[ids] ** 2)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(table, state, ids):
        value, grads = jax.value_and_grad(loss)(table, ids)
        updates, state = tx.update(grads, state, table)
        return optax.apply_updates(table, updates), state, value

    return runner(step, tx, num_rows, dim)
