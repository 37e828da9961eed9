"""A model written with variables, trained: sparse, in place, equal to a dense program."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, fast_jit

import jslices as js
import jslices.tf1 as tf

V, D, B = 50, 4, 6
KEY = jax.random.key(3)
IDS = jnp.array([[3, 3, 7], [0, 49, 7]] * 3)
LABELS = jnp.arange(6.0) / 6


def l2(scale):
    return lambda w: scale * jnp.sum(w * w)


def model(ids, training=True):
    """Mean of the rows of a table, a layer used twice, and a counter of words."""
    table = tf.get_variable("table", [V, D], initializer=tf.random_normal_initializer())
    with tf.variable_scope("tower", regularizer=l2(0.1)) as tower:
        x = layer(jnp.mean(js.embedding_lookup(table, ids), axis=1))
        tower.reuse_variables()
        x = layer(x)
    out = tf.get_variable("out", [D], initializer=tf.ones_initializer())
    if training:
        seen = tf.Variable(jnp.zeros((V, 1)), name="seen", trainable=False)
        ones = jnp.ones((ids.size, 1))
        seen.scatter_add(js.IndexedSlices(ones, ids.reshape(-1)))
    return x @ out, sum(tf.get_collection("regularization_losses"))


def layer(x):
    w = tf.get_variable("w", [D, D])
    return jnp.tanh(x @ w)


MODEL = tf.transform(model)


def loss(params, rest, ids, labels):
    (out, penalty), variables = MODEL.apply(params | rest, ids)
    return jnp.mean((out - labels) ** 2) + penalty, variables.non_trainable


@functools.cache
def initial():
    return fast_jit(MODEL.init)(KEY, IDS)


def train(value_and_grad, tx, apply_updates, steps=20):
    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(variables, state, ids, labels):
        params = variables.trainable
        (value, rest), grads = value_and_grad(loss, has_aux=True)(
            params, variables.non_trainable, ids, labels
        )
        traces.append(ids)
        kinds.update({name: js.is_slices(grad) for name, grad in grads.items()})
        updates, state = tx.update(grads, state, params)
        return apply_updates(params, updates) | rest, state, value

    kinds, values, traces = {}, [], []
    variables = jax.tree.map(jnp.copy, initial())
    state = tx.init(variables.trainable)
    for _ in range(steps):
        given = variables
        variables, state, value = step(variables, state, IDS, LABELS)
        assert all(x.is_deleted() for x in given.values())  # donated, none twice
        values.append(float(value))
    assert len(traces) == 1  # one compilation for all steps
    return variables, values, kinds


@functools.cache
def trained():
    return train(js.value_and_grad, js.adam(0.05), js.apply_updates)


def test_training_equals_the_dense_program():
    variables, values, kinds = trained()
    with pytest.warns(js.DensificationWarning):
        dense = train(jax.value_and_grad, optax.adam(0.05), optax.apply_updates)
    assert kinds == {"table": True, "tower/w": False, "out": False}
    assert values[-1] < 0.2 * values[0]
    np.testing.assert_allclose(values, dense[1], rtol=1e-4)
    assert_close(dict(variables), dict(dense[0]), 1e-4, 1e-5)
    counts = np.bincount(IDS.reshape(-1), minlength=V) * 20
    np.testing.assert_array_equal(variables["seen"][:, 0], counts)


def test_lazy_adam_leaves_other_rows_alone():
    before = initial()["table"]
    after = trained()[0]["table"]
    moved = (before != after).any(axis=1)
    assert set(np.flatnonzero(moved).tolist()) == {0, 3, 7, 49}


def test_gradients_mirror_the_variables():
    variables = initial()
    grads, _ = fast_jit(js.grad(loss, has_aux=True))(
        variables.trainable, variables.non_trainable, IDS, LABELS
    )
    assert isinstance(grads, tf.Variables) and list(grads) == list(variables.trainable)
    assert grads["table"].values.shape == (IDS.size, D)
    assert repr(grads).startswith(
        "Variables(table: IndexedSlices(18 rows of float32[50, 4]"
    )
    dense = jax.grad(lambda p: loss(p, variables.non_trainable, IDS, LABELS)[0])
    with pytest.warns(js.DensificationWarning):
        wanted = fast_jit(dense)(variables.trainable)
    assert_close(dict(grads), dict(wanted))


LOOKUPS = {
    "handle[ids]": lambda table, ids: table[ids],
    "take": lambda table, ids: jnp.take(table, ids, axis=0),
    "value": lambda table, ids: table.value()[ids],
    "vmap": lambda table, ids: jax.vmap(lambda i: table[i])(ids),
    "scan": lambda table, ids: jax.lax.scan(lambda c, i: (c, table[i]), 0, ids)[1],
    "scaled": lambda table, ids: (2 * table)[ids],
    "argument": lambda table, ids: jax.jit(lambda t: t[ids])(table),
}


@pytest.mark.parametrize("how", LOOKUPS)
def test_every_way_to_look_up_a_handle_is_sparse(how):
    def squares(ids):
        return jnp.sum(LOOKUPS[how](tf.get_variable("t", [V, D]), ids) ** 2)

    one, ids = tf.transform(squares), jnp.array([3, 9, 3])
    variables = tf.Variables({"t": jnp.arange(1.0, 1 + V * D).reshape(V, D)})

    def whole(variables):  # all variables come back as well, which is no dense use
        return one.apply(variables, ids)

    grads, _ = fast_jit(js.grad(whole, has_aux=True))(variables)
    wanted, _ = fast_jit(jax.grad(whole, has_aux=True))(variables)
    assert js.is_slices(grads["t"])
    assert_close(grads["t"], wanted["t"])


def test_sparse_read_is_sparse():
    one = tf.transform(lambda: jnp.sum(tf.get_variable("t", [V, D]).sparse_read([3, 9, 3])))
    grads, _ = js.grad(one.apply, has_aux=True)(tf.Variables({"t": jnp.ones((V, D))}))
    assert grads["t"].indices.tolist() == [3, 9, 3] and (grads["t"].values == 1).all()


def test_explain_names_the_users_line():
    def lookup(ids):
        return tf.get_variable("table", [V, D])[ids].sum()

    one = tf.transform(lookup)
    declared = one.abstract_init(KEY, IDS)
    report = str(js.explain(lambda p, ids: one.apply(p, ids)[0])(declared, IDS))
    line = inspect.getsourcelines(lookup)[1] + 1
    assert f"test_variables_training.py:{line}" in report and "table" in report


def test_a_dense_use_names_the_users_line():
    def tied(ids):
        table = tf.get_variable("table", [9000, D])
        return jnp.sum(table[ids]) + jnp.sum(table**2)

    one = tf.transform(tied)
    variables = tf.Variables({"table": jnp.ones((9000, D))})
    with pytest.warns(js.DensificationWarning) as caught:
        grads = fast_jit(js.grad(lambda p: one.apply(p, IDS)[0]))(variables)
    assert not js.is_slices(grads["table"])
    assert caught[0].filename == __file__


def test_regularizers_are_asked_for_or_not_computed():
    def one(ids, asked):
        table = tf.get_variable("table", [V, D], regularizer=l2(1.0))
        tf.get_variable("w", [2], initializer=tf.ones_initializer(), regularizer=l2(0.5))
        tf.get_variable("u", [2], regularizer=lambda w: None)
        losses = tf.get_collection("regularization_losses") if asked else []
        return table[ids].sum() + sum(losses), losses

    m = tf.transform(one)
    variables = fast_jit(functools.partial(m.init, asked=True))(KEY, IDS)
    (_, losses), _ = m.apply(variables, IDS, True)
    assert len(losses) == 2 and losses[1] == 1.0
    np.testing.assert_allclose(losses[0], jnp.sum(variables["table"] ** 2), rtol=1e-6)
    grads = fast_jit(js.grad(lambda p: m.apply(p, IDS, False)[0][0]))(variables)
    assert js.is_slices(grads["table"])


SIZES = jax.ShapeDtypeStruct((200_000, 16), jnp.float32)


@pytest.mark.parametrize("how", ["add", "sub", "mul", "div", "min", "max", "update"])
def test_scatter_methods_make_nothing_of_the_tables_size(how):
    def one(slices):
        v = tf.Variable(jnp.zeros(SIZES.shape), name="v")
        getattr(v, f"scatter_{how}")(slices)

    slices = js.IndexedSlices.tree_unflatten(
        None,
        (
            jax.ShapeDtypeStruct((64, 16), jnp.float32),
            jax.ShapeDtypeStruct((64,), jnp.int32),
        ),
    )
    step = jax.jit(tf.transform(one).apply, donate_argnums=0)
    lowered = step.lower(tf.Variables({"v": SIZES}), slices)
    quick = {"xla_backend_optimization_level": 0}
    memory = lowered.compile(compiler_options=quick).memory_analysis()
    table_bytes = 200_000 * 16 * 4
    assert memory.temp_size_in_bytes < 100_000
    assert memory.alias_size_in_bytes >= table_bytes


def test_a_step_of_all_variables_leaves_those_that_are_not_trainable():
    def model(ids):
        shape, ones = [V, 2], tf.ones_initializer()
        table = tf.get_variable("table", shape, initializer=ones)
        fixed = tf.get_variable("fixed", shape, initializer=ones, trainable=False)
        scale = tf.get_variable("scale", [2], initializer=ones, trainable=False)
        return jnp.sum((tf.gather(table, ids) * tf.gather(fixed, ids)) ** 2 @ scale)

    model, tx = tf.transform(model), js.sgd(0.1)
    variables = model.init(jax.random.key(0), IDS)
    step = js.train_step(lambda variables, ids: model.apply(variables, ids)[0], tx)
    new, _, _ = step(variables, tx.init(variables), IDS)
    assert (new["fixed"] == 1).all() and (new["scale"] == 1).all()
    assert (new["table"][IDS] != 1).all()
