"""Proofs from the compiled program: nothing of the table's size but the table itself."""

import functools
import re

import jax
import jax.numpy as jnp
import optax
import pytest

import jslices as js

V, D, K = 200_000, 16, 64
TABLE_BYTES = V * D * 4


def loss(params, ids):
    return ((params["table"][ids] @ params["w"]) ** 2).mean()


def compiled_step(value_and_grad, tx, apply_updates, num_ids=K):
    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, ids):
        value, grads = value_and_grad(loss)(params, ids)
        updates, state = tx.update(grads, state, params)
        return apply_updates(params, updates), state, value

    params = {
        "table": jax.ShapeDtypeStruct((V, D), jnp.float32),
        "w": jax.ShapeDtypeStruct((D,), jnp.float32),
    }
    ids = jax.ShapeDtypeStruct((num_ids,), jnp.int32)
    return step.lower(params, jax.eval_shape(tx.init, params), ids).compile()


def big_temporaries(compiled):
    """Instructions that make an array of the table's size out of thin air."""
    shape = rf"f32\[{V},{D}\]"
    made = re.findall(rf"= {shape}\S* (\w[\w-]*)\(", compiled.as_text())
    # Scatters, fusions of them and loops work in place on what they are given.
    harmless = {
        "parameter",
        "scatter",
        "fusion",
        "get-tuple-element",
        "bitcast",
        "call",
    }
    return [name for name in made if name not in harmless]


MANY = 5_000  # rows are then worked off in chunks
SPARSE = {
    "sgd": (js.sgd(0.1), 1),
    "momentum": (js.sgd(0.1, momentum=0.9), 2),
    "adagrad": (js.adagrad(0.1), 2),
    "adam": (js.adam(0.1), 3),
}


@pytest.mark.parametrize("num_ids", [K, MANY], ids=["at_once", "in_chunks"])
@pytest.mark.parametrize("name", SPARSE)
def test_step_is_in_place_and_without_dense_temporaries(name, num_ids):
    tx, tables = SPARSE[name]
    compiled = compiled_step(js.value_and_grad, tx, js.apply_updates, num_ids)
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < min(
        TABLE_BYTES / 4, 10 * num_ids * (D + 1) * 4 + 4096
    )
    # The table and each of its state arrays share the memory of the donated ones.
    assert memory.alias_size_in_bytes >= tables * TABLE_BYTES
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes < 1024
    assert not big_temporaries(compiled)


def test_the_proof_can_fail():
    compiled = compiled_step(jax.value_and_grad, optax.adam(0.1), optax.apply_updates)
    assert compiled.memory_analysis().temp_size_in_bytes >= TABLE_BYTES / 10
    assert big_temporaries(compiled)


def test_gradient_alone_is_as_small_as_the_rows():
    params = {
        "table": jax.ShapeDtypeStruct((V, D), jnp.float32),
        "w": jax.ShapeDtypeStruct((D,), jnp.float32),
    }
    ids = jax.ShapeDtypeStruct((K,), jnp.int32)
    memory = jax.jit(js.grad(loss)).lower(params, ids).compile().memory_analysis()
    # Rows and their numbers, the gradient of w, and the table of pointers to them.
    assert memory.output_size_in_bytes <= K * (D + 1) * 4 + D * 4 + 64
    assert memory.temp_size_in_bytes < 10 * K * D * 4


def test_a_table_of_four_billion_elements_only_lowers():
    table = jax.ShapeDtypeStruct((250_000_000, 16), jnp.float32)
    lowered = jax.jit(js.grad(lambda t, i: (t[i] ** 2).sum())).lower(
        table, jax.ShapeDtypeStruct((K,), jnp.int32)
    )
    values, indices = jax.tree.leaves(lowered.out_info)
    assert values.shape == (K, 16) and indices.shape == (K,)
