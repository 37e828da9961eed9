"""On a CPU a step gives the same bits each time, and each time it is compiled."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import slow_unless

import jslices as js

pytestmark = pytest.mark.as_users
# Rows, their length, ids: sizes that are stepped each way.
SIZES = {
    "together": (500, 16, 300),
    "in chunks": (9_000, 80, 5_000),
    "all rows": (1_000, 16, 6_000),
}


@pytest.fixture(autouse=True)
def _compiled_anew():
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", True)


def run_twice(tx, num_rows, dim, num_ids):
    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.normal(size=(num_rows, dim)), jnp.float32)
    ids = jnp.asarray(rng.zipf(1.3, num_ids) % num_rows, jnp.int32)

    def step(table, state):
        def loss(table):
            return jnp.mean(jnp.tanh(table[ids]) ** 2)

        value, grads = js.value_and_grad(loss)(table)
        updates, state = tx.update(grads, state, table)
        return js.apply_updates(table, updates), state, value

    compiled = jax.jit(step).lower(table, tx.init(table)).compile()
    results = []
    for _ in range(2):
        x, state = table, tx.init(table)
        for _ in range(3):
            x, state, value = compiled(x, state)
        results.append(jax.tree.map(np.asarray, (x, state, value)))
    return results


@pytest.mark.parametrize(
    "name, way",
    slow_unless(
        [(name, way) for name in ("adam", "sgd") for way in SIZES],
        lambda case: case[0] == "adam",
    ),
)
def test_same_bits_each_time(name, way):
    """Duplicates by the hundred, whose sums depend on the order of additions."""
    tx = getattr(js, name)(0.1)
    first, *others = [x for _ in range(2) for x in run_twice(tx, *SIZES[way])]
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, first, other)
