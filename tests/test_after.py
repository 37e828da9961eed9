"""That the step backward waits for the loss, for the memory, and changes nothing else."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jslices as js
from jslices._after import after
from jslices._grad.api import LARGE

K, D = 15_000, 64
BYTES = K * D * 4


def loss(table, ids):
    return 0.5 * jnp.mean(jnp.square(table[ids]))


def compiled_step(value_and_grad, ids=K):
    tx = js.sgd(0.1)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(table, state, ids):
        value, grads = value_and_grad(loss)(table, ids)
        updates, state = tx.update(grads, state, table)
        return js.apply_updates(table, updates), state, value

    table = jax.ShapeDtypeStruct((50_000, D), jnp.float32)
    ids = jax.ShapeDtypeStruct((ids,), jnp.int32)
    return step.lower(table, jax.eval_shape(tx.init, table), ids).compile()


def test_a_step_holds_one_array_of_the_gradients_size():
    """The rows looked up, their cotangents and the update are one array after the other."""
    assert BYTES >= LARGE
    temporaries = compiled_step(js.value_and_grad).memory_analysis().temp_size_in_bytes
    assert 1.0 <= temporaries / BYTES < 1.1


def test_without_waiting_it_holds_two(monkeypatch):
    monkeypatch.setattr("jslices._grad.api.LARGE", 10 * BYTES)
    temporaries = compiled_step(js.value_and_grad).memory_analysis().temp_size_in_bytes
    assert 2.0 <= temporaries / BYTES < 2.1


@pytest.mark.parametrize("large", [0, 10**9])
def test_values_are_the_same_to_the_bit(monkeypatch, large):
    monkeypatch.setattr("jslices._grad.api.LARGE", large)
    table = jnp.asarray(np.random.default_rng(0).normal(size=(50, 8)), jnp.float32)
    ids = jnp.array([3, 3, 7, 49])
    expected = jax.jit(jax.value_and_grad(loss))(table, ids)
    for run in (js.value_and_grad(loss), jax.jit(js.value_and_grad(loss))):
        value, grads = run(table, ids)
        assert value == expected[0]
        np.testing.assert_array_equal(grads.to_dense(), expected[1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "complex64"])
@pytest.mark.parametrize("value", [0.0, 3.0, jnp.nan, jnp.inf])
def test_it_is_the_identity(dtype, value):
    x = jnp.asarray(1.5).astype(dtype)
    earlier = jnp.asarray(value).astype(dtype)
    for run in (after, jax.jit(after), jax.vmap(after, in_axes=(None, None), axis_size=1)):
        result = run(x, earlier)
        assert result.dtype == x.dtype
        np.testing.assert_array_equal(jnp.ravel(result)[0], x)


def test_it_is_linear_in_the_first_and_knows_nothing_of_the_second():
    for transform in (lambda f: f, jax.jit):
        run = transform(lambda x, y: after(3 * x, jnp.sin(y)))
        assert jax.grad(run, (0, 1))(1.0, 2.0) == (3.0, 0.0)
    many = jax.vmap(after)(jnp.arange(3.0), jnp.arange(3.0))
    np.testing.assert_array_equal(many, [0, 1, 2])


def test_second_derivatives_go_through(monkeypatch):
    monkeypatch.setattr("jslices._grad.api.LARGE", 0)
    table, ids = jnp.arange(1.0, 7.0).reshape(3, 2), jnp.array([0, 2, 2])

    def cubes(table):
        return jnp.sum(table[ids] ** 3)

    def norm(value_and_grad, dense):
        def of(table):
            value, grads = value_and_grad(cubes)(table)
            return value + jnp.sum(dense(grads) ** 2)

        return of

    ours = norm(js.value_and_grad, lambda g: g.to_dense())
    theirs = norm(jax.value_and_grad, lambda g: g)
    for transform in (jax.grad, jax.jacfwd, lambda f: jax.jit(jax.grad(f))):
        chex.assert_trees_all_close(transform(ours)(table), transform(theirs)(table))


def test_a_gradient_without_its_value_does_not_compute_the_loss():
    """``js.grad`` waits for nothing: what no result needs is not in the program."""
    table = jax.ShapeDtypeStruct((50_000, D), jnp.float32)
    ids = jax.ShapeDtypeStruct((K,), jnp.int32)
    text = jax.jit(lambda t, i: js.grad(loss)(t, i).values).lower(table, ids)
    assert " reduce(" not in text.compile().as_text()
