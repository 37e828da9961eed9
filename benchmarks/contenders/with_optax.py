"""JAX and Optax as they are: a dense gradient, an update of every row."""

import jax
import optax
from step import dense_step

from contenders.with_jslices import jitted
from contenders.with_jslices import wait as wait

VERSION = f"jax {jax.__version__}, optax {optax.__version__}"


def make(optimizer, num_rows, dim, rate):
    return jitted(dense_step, getattr(optax, optimizer)(rate), num_rows, dim)
