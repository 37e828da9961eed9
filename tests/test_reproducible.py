"""On a CPU a step gives the same bits each time, and each time it is compiled."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_step import forced

import jslices as js

D = 16


@pytest.fixture(autouse=True)
def compiled_anew():
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", True)


def run_twice(tx, num_rows, num_ids):
    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.normal(size=(num_rows, D)), jnp.float32)
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
    "num_rows, num_ids, way",
    [(500, 300, None), (500, 300, "fold"), (9_000, 6_000, None), (1_000, 6_000, "whole")],
)
@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam"])
def test_same_bits_each_time(name, num_rows, num_ids, way):
    """Duplicates by the hundred, whose sums depend on the order of additions."""
    results = []
    for _ in range(2):
        tx = getattr(js, name)(0.1)
        if way is None:
            results += run_twice(tx, num_rows, num_ids)
        else:
            with forced(way):
                results += run_twice(tx, num_rows, num_ids)
        jax.clear_caches()
    for other in results[1:]:
        jax.tree.map(np.testing.assert_array_equal, results[0], other)


def test_the_flag_for_gpus_is_one_that_xla_knows():
    """docs/speed.md names it; XLA ends a process that is given an unknown one."""
    code = "import jax; jax.jit(lambda x: x + 1)(1.0)"
    for flag, ends in (("deterministic_ops", False), ("nonsense", True)):
        environment = {**os.environ, "XLA_FLAGS": f"--xla_gpu_{flag}=true"}
        found = subprocess.run([sys.executable, "-c", code], env=environment, check=False)
        assert bool(found.returncode) == ends
