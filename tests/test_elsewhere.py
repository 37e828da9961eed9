"""What is done where the platform is no CPU, compiled here."""

import functools
import re
from unittest import mock

import jax
import jax.numpy as jnp
from jax import lax

import jslices as js


def elsewhere(*args, cpu, default):
    return default(*args)


def test_writes_are_told_that_indices_are_unique_and_copy_nothing():
    tx = js.adam(0.1)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(table, state, ids):
        grads = js.grad(lambda t: (t[ids] ** 2).sum())(table)
        updates, state = tx.update(grads, state, table)
        return js.apply_updates(table, updates), state

    table = jax.ShapeDtypeStruct((100_000, 32), jnp.float32)
    ids = jax.ShapeDtypeStruct((5000,), jnp.int32)
    with mock.patch.object(lax, "platform_dependent", elsewhere):
        lowered = step.lower(table, jax.eval_shape(tx.init, table), ids)
    scatters = lowered.as_text().split('"stablehlo.scatter"(')[1:]
    into_table = [
        re.search(r"unique_indices = (\w+)", scatter)[1]
        for scatter in scatters
        if re.search(r"\}\) : \((tensor<\S+>)", scatter)[1] == "tensor<100000x32xf32>"
    ]
    # Both moments are written. The table is added to: the update names each row once, but
    # its type does not say so, and looking would make XLA copy the table.
    assert sorted(into_table) == ["false", "true", "true"]
    compiled = lowered.compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 100_000 * 32 * 4 / 2
    assert not re.search(r"f32\[100000,32\]\S* copy\(", compiled.as_text())
