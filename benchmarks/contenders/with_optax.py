"""JAX and Optax as they are: a dense gradient, an update of every row."""

import jax
import optax

from contenders.with_jslices import jitted
from contenders.with_jslices import wait as wait

VERSION = f"jax {jax.__version__}, optax {optax.__version__}"


def make(optimizer, num_rows, dim, rate):
    tx = getattr(optax, optimizer)(rate)
    return jitted(jax.value_and_grad, tx, optax.apply_updates, num_rows, dim)
