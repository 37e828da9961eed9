"""JAX alone, for plain SGD: the cotangents of a table are added to it where it lies."""

import functools

import jax
import jax.numpy as jnp

from contenders.with_jslices import runner
from contenders.with_jslices import wait as wait

VERSION = f"jax {jax.__version__}"
if jax.__version_info__ < (0, 12):
    raise ImportError(f"jax {jax.__version__} has no vjp(...).with_refs; 0.12 has")


class Stateless:
    """What the runner asks of an optimizer."""

    init = staticmethod(lambda table: ())


def make(optimizer, num_rows, dim, rate):
    assert optimizer == "sgd", "a ref adds what comes, and does nothing else"

    def loss(table, ids):
        return 0.5 / ids.shape[0] * jnp.sum(table[ids] ** 2)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(table, state, ids):
        value, pullback = jax.vjp(lambda table: loss(table, ids), table)
        ref = jax.new_ref(table)
        pullback.with_refs(ref)(jnp.full_like(value, -rate))
        return jax.freeze(ref), state, value

    return runner(step, Stateless, num_rows, dim)
