"""Frequency scaling: sum, mean and sqrtn of duplicates, against a plain loop."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from draws import examples
from helpers import assert_close, fast_jit, numpy_dense
from hypothesis import given
from hypothesis import strategies as st

import jslices as js

V, D, K = 5, 2, 8
WEIGHT = {"sum": lambda n: 1.0, "mean": lambda n: n, "sqrtn": np.sqrt}
coalesce = fast_jit(lambda s: {how: s.coalesce(combine=how) for how in WEIGHT})


def loop(values, ids, how):
    out = np.zeros((V, D), np.float32)
    for i in range(V):
        rows = values[np.array(ids) == i]
        if len(rows):
            out[i] = rows.sum(0) / WEIGHT[how](len(rows))
    return out


@examples(40)
@given(st.lists(st.integers(-2, V + 2), min_size=K, max_size=K), st.integers(0, 99))
def test_equals_a_loop(ids, seed):
    values = np.random.default_rng(seed).normal(size=(K, D)).astype(np.float32)
    slices = js.IndexedSlices(values, np.array(ids, np.int32), (V, D))
    for how, out in coalesce(slices).items():
        wanted = loop(values, ids, how)
        got = numpy_dense(out.values, out.indices, (V, D))
        np.testing.assert_allclose(got, wanted, 1e-5, 1e-6)
        assert not np.asarray(out.values)[np.asarray(out.indices) == V].any()


def test_mean_is_the_frequency_scaled_gradient_of_torch():
    # torch.nn.Embedding(5, 1, scale_grad_by_freq=True), ids [1, 3, 1, 1], gradient 1..4:
    # rows 1 and 3 get (1 + 3 + 4) / 3 and 2 / 1.
    grads = js.IndexedSlices(jnp.arange(1.0, 5)[:, None], jnp.array([1, 3, 1, 1]), (5, 1))
    out = grads.coalesce(combine="mean")
    np.testing.assert_allclose(out.to_dense().ravel(), [0, 8 / 3, 0, 2, 0], 1e-6)
    root = grads.coalesce(combine="sqrtn")
    np.testing.assert_allclose(root.to_dense().ravel(), [0, 8 / 3**0.5, 0, 2, 0], 1e-6)


def test_16_bit_floats_are_divided_before_they_are_rounded():
    rows = jnp.full((2, 1), 60_000, jnp.float16)  # the sum would overflow
    out = js.IndexedSlices(rows, jnp.array([1, 1]), (3, 1)).coalesce(combine="mean")
    assert out.dtype == jnp.float16 and out.values[0] == 60_000


def test_together_with_a_size_and_a_batch():
    slices = js.IndexedSlices(jnp.array([2.0, 4, 6]), jnp.array([7, 2, 7]), (9,))
    out = slices.coalesce(5, combine="mean")
    np.testing.assert_array_equal(out.indices, [2, 7, 9, 9, 9])
    np.testing.assert_array_equal(out.values, [4, 4, 0, 0, 0])
    batch = jax.tree.map(lambda x: jnp.stack([x, x]), slices)
    many = fast_jit(lambda s: s.coalesce(combine="mean"))(batch)
    np.testing.assert_array_equal(many.values, [[4, 4, 0]] * 2)

    def mean(values):
        given = js.IndexedSlices(values, slices.indices, slices.dense_shape)
        return (given.coalesce(combine="mean").values ** 2).sum()

    np.testing.assert_allclose(fast_jit(jax.grad(mean))(slices.values), [4, 8, 4])
    empty = js.IndexedSlices(jnp.ones((0, 1)), jnp.zeros((0,), int), (9, 1))
    assert empty.coalesce(combine="mean").values.shape == (0, 1)


def test_the_transformation_stands_in_a_chain():
    table = jnp.ones((V, D))
    ids = jnp.array([1, 1, 3, 1, 0])
    tx = optax.chain(js.optim.combine_duplicates("sqrtn"), js.sgd(0.5))

    @fast_jit
    def step(params, state):
        grads = js.grad(lambda p: (p["t"][ids] ** 2).sum() + p["b"] ** 2)(params)
        updates, state = tx.update(grads, state, params)
        return js.apply_updates(params, updates), state

    params = {"t": table, "b": jnp.float32(3.0)}
    new, _ = step(params, tx.init(params))
    counts = np.bincount(ids, minlength=V)[:, None]
    wanted = table - 0.5 * 2 * counts / np.sqrt(np.maximum(counts, 1)) * table
    assert_close(new, {"t": wanted.astype(jnp.float32), "b": jnp.float32(0.0)})


def test_errors():
    slices = js.IndexedSlices(jnp.ones(1, int), jnp.array([0]), (9,))
    for call in (
        lambda: slices.coalesce(combine="max"),
        lambda: js.optim.combine_duplicates("max"),
    ):
        with pytest.raises(ValueError, match=r"combine='max'\): wanted \"sum\", "):
            call()
    with pytest.raises(TypeError, match=r"divides, and these rows are int32.*astype"):
        slices.coalesce(combine="mean")
