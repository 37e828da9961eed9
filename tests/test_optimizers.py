"""Optimizers: dense leaves equal Optax; sparse ones do, on rows touched each step."""

from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, golden
from hypothesis import given, settings
from hypothesis import strategies as st

import jslices as js
from jslices.optim import in_place

V, D = 9, 3
SCHEDULE = optax.cosine_decay_schedule(0.1, 10)
# (name, keyword arguments): Optax has each under the same name.
OPTIMIZERS = [
    ("sgd", {}),
    ("sgd", {"momentum": 0.9}),
    ("sgd", {"momentum": 0.9, "nesterov": True}),
    ("adagrad", {}),
    ("adagrad", {"initial_accumulator_value": 0.0, "eps": 1e-3}),
    ("adam", {}),
    ("adam", {"b1": 0.8, "b2": 0.95, "eps": 1e-3, "eps_root": 1e-4}),
    ("adam", {"nesterov": True}),
]

every = pytest.mark.parametrize("name, kwargs", OPTIMIZERS)


def rng_tree(rng):
    return {
        "table": jnp.asarray(rng.normal(size=(V, D)), jnp.float32),
        "w": jnp.asarray(rng.normal(size=(4,)), jnp.float32),
    }


def slices_of(rng, ids, shape=(V, D)):
    values = rng.normal(size=(len(ids), *shape[1:]))
    return js.IndexedSlices(
        jnp.asarray(values, jnp.float32), jnp.array(ids, jnp.int32), shape
    )


@every
@pytest.mark.parametrize("rate", [0.1, SCHEDULE], ids=["constant", "schedule"])
@pytest.mark.parametrize("jit", [True, False])
def test_dense_leaves_equal_optax(name, kwargs, rate, jit):
    rng = np.random.default_rng(0)
    ours, theirs = (
        getattr(js, name)(rate, **kwargs),
        getattr(optax, name)(rate, **kwargs),
    )
    update, wanted_update = ours.update, theirs.update
    if jit:
        update, wanted_update = jax.jit(update), jax.jit(wanted_update)
    params = wanted = rng_tree(rng)
    state, wanted_state = ours.init(params), theirs.init(params)
    for _ in range(4):
        grads = rng_tree(rng)
        updates, state = update(grads, state, params)
        wanted_updates, wanted_state = wanted_update(grads, wanted_state, wanted)
        params = js.apply_updates(params, updates)
        wanted = optax.apply_updates(wanted, wanted_updates)
        if jit:
            chex.assert_trees_all_equal(updates, wanted_updates)
        else:  # op by op, XLA rounds Optax's jitted part differently
            chex.assert_trees_all_close(updates, wanted_updates, rtol=1e-6, atol=0)
    chex.assert_trees_all_equal_shapes_and_dtypes(params, wanted)


@every
@pytest.mark.parametrize("how", ["eager", "jit", "scan", "vmap"])
def test_rows_touched_at_each_step_equal_optax(name, kwargs, how):
    rng = np.random.default_rng(1)
    ours, theirs = getattr(js, name)(0.1, **kwargs), getattr(optax, name)(0.1, **kwargs)
    params = rng_tree(rng)
    ids = [*range(V), 2, 2, 5, V, -1]  # duplicates and empty slots too
    steps = [{"table": slices_of(rng, ids), "w": rng_tree(rng)["w"]} for _ in range(4)]

    wanted, wanted_state = params, theirs.init(params)
    for grads in steps:
        dense = {**grads, "table": grads["table"].to_dense()}
        updates, wanted_state = theirs.update(dense, wanted_state, wanted)
        wanted = optax.apply_updates(wanted, updates)

    def step(carry, grads):
        params, state = carry
        updates, state = ours.update(grads, state, params)
        return (js.apply_updates(params, updates), state), None

    carry = (params, ours.init(params))
    if how == "scan":
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *steps)
        carry, _ = jax.lax.scan(step, carry, stacked)
    elif how == "vmap":
        carry = jax.tree.map(lambda x: jnp.stack([x, x]), carry)
        for grads in steps:
            carry, _ = jax.vmap(step, in_axes=(0, None))(carry, grads)
        carry = jax.tree.map(lambda x: x[1], carry)
    else:
        run = jax.jit(step) if how == "jit" else step
        for grads in steps:
            carry, _ = run(carry, grads)
    assert_close(carry[0], wanted, rtol=1e-5, atol=1e-6)


@every
@settings(max_examples=15)
@given(ids=st.lists(st.integers(-2, V + 2), max_size=8), data=st.integers(0, 99))
def test_untouched_rows_and_their_state_do_not_change(name, kwargs, ids, data):
    rng = np.random.default_rng(data)
    tx = getattr(js, name)(0.1, **kwargs)
    table = rng_tree(rng)["table"]
    state = tx.init(table)
    # Some history first, so that momentum would move a row if it were let to.
    updates, state = tx.update(rng_tree(rng)["table"], state, table)
    before = (table, state)
    updates, state = tx.update(slices_of(rng, ids), state, table)
    after = (js.apply_updates(table, updates), state)
    untouched = sorted(set(range(V)) - set(ids))
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        if old.shape == (V, D):
            np.testing.assert_array_equal(
                old[jnp.array(untouched, int)], new[jnp.array(untouched, int)]
            )
    touched = sorted(set(range(V)) & set(ids))
    assert all((np.asarray(after[0])[i] != np.asarray(table)[i]).any() for i in touched)
    # The update names each row once.
    np.testing.assert_array_equal(updates.indices[: len(touched)], touched)
    assert not np.asarray(updates.values)[len(touched) :].any()


def _lazy_states(state):
    return {"m": state.mu, "v": state.nu}


@pytest.mark.parametrize(
    "name, tx, slots",
    [
        ("GradientDescent(0.1)", js.sgd(0.1), lambda s: {}),
        ("Momentum(0.1,0.9)", js.sgd(0.1, 0.9), lambda s: {"momentum": s.trace}),
        (
            "Momentum(0.1,0.9,use_nesterov)",
            js.sgd(0.1, 0.9, nesterov=True),
            lambda s: {"momentum": s.trace},
        ),
        (
            "Adagrad(0.1)",
            js.adagrad(0.1, eps=0.0),
            lambda s: {"accumulator": s.sum_of_squares},
        ),
        ("LazyAdam(0.1)", js.adam(0.1), _lazy_states),
    ],
)
def test_equal_tensorflow_with_duplicates_and_untouched_rows(name, tx, slots):
    section = golden("optimizers")
    params = jnp.asarray(section["_w0"])
    state = tx.init(params)
    for inputs, wanted in zip(section["_steps"], section[name]["sparse"], strict=True):
        grads = js.IndexedSlices(inputs["values"], inputs["indices"], params.shape)
        updates, state = tx.update(grads, state, params)
        params = js.apply_updates(params, updates)
        # LazyAdam puts its epsilon of 1e-8 elsewhere; float32 hardly sees it.
        np.testing.assert_allclose(params, wanted["w"], rtol=2e-5, atol=2e-6)
        for slot, values in slots(state).items():
            np.testing.assert_allclose(values, wanted["slots"][slot], rtol=1e-5, atol=1e-7)


@every
def test_protocol_in_optax_and_without_gradients(name, kwargs):
    rng = np.random.default_rng(3)
    params = rng_tree(rng)
    tx = optax.chain(getattr(js, name)(0.1, **kwargs))
    grads = {"table": slices_of(rng, [1, 1]), "w": None}
    updates, _state = tx.update(grads, tx.init(params), params)
    assert updates["w"] is None
    new = js.apply_updates(params, updates)
    chex.assert_trees_all_equal(new["w"], params["w"])
    again = optax.apply_updates({"table": params["table"]}, {"table": updates["table"]})
    chex.assert_trees_all_equal(again["table"], new["table"])


@every
def test_one_compilation_for_all_steps(name, kwargs):
    chex.clear_trace_counter()
    tx = getattr(js, name)(SCHEDULE, **kwargs)

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(params, state, ids):
        grads = js.grad(lambda p: (p["table"][ids] ** 2).sum() + (p["w"] ** 2).sum())(
            params
        )
        updates, state = tx.update(grads, state, params)
        return js.apply_updates(params, updates), state

    params = rng_tree(np.random.default_rng(4))
    state = tx.init(params)
    for k in range(4):
        new = step(params, state, jnp.array([k, k, 3]))
        chex.assert_trees_all_equal_shapes_and_dtypes(new, (params, state))
        params, state = new


def test_dtypes_are_kept():
    table = jnp.ones((V, D), jnp.bfloat16)
    grads = js.IndexedSlices(jnp.ones((2, D), jnp.bfloat16), jnp.array([1, 1]), (V, D))
    for name, kwargs in [*OPTIMIZERS, ("adam", {"mu_dtype": "float32"})]:
        tx = getattr(js, name)(SCHEDULE, **kwargs)
        state = tx.init(table)
        updates, new = tx.update(grads, state, table)
        chex.assert_trees_all_equal_shapes_and_dtypes(state, new)
        assert js.apply_updates(table, updates).dtype == jnp.bfloat16
    assert js.adam(0.1, mu_dtype="float32").init(table).mu.dtype == jnp.float32


@every
@pytest.mark.parametrize("count, rows", [(2500, 5000), (5000, 2100), (4096, 300_000)])
def test_many_rows_are_worked_off_in_chunks(name, kwargs, count, rows):
    rng = np.random.default_rng(5)
    ids = rng.integers(-2, rows + 2, count)
    table = jnp.zeros((rows, D))
    grads = slices_of(rng, ids, (rows, D))
    ours, theirs = getattr(js, name)(0.1, **kwargs), getattr(optax, name)(0.1, **kwargs)
    updates, state = jax.jit(ours.update)(grads, ours.init(table))
    wanted, _ = theirs.update(grads.to_dense(), theirs.init(table))
    np.testing.assert_allclose(updates.to_dense(), wanted, rtol=1e-4, atol=1e-6)
    present = np.unique(ids[(ids >= 0) & (ids < rows)])
    np.testing.assert_array_equal(updates.indices[: len(present)], present)
    assert not np.asarray(updates.values)[len(present) :].any()
    # Done at once, as on a GPU: the same numbers.
    with mock.patch.object(in_place, "CHUNK", 10**9):
        at_once, state_at_once = jax.jit(lambda g, s: ours.update(g, s))(
            grads, ours.init(table)
        )
    assert_close((updates, state), (at_once, state_at_once), rtol=1e-6)


def test_a_learned_learning_rate_goes_through_many_rows():
    rng = np.random.default_rng(6)
    table = jnp.asarray(rng.normal(size=(5000, D)), jnp.float32)
    ids = jnp.asarray(rng.integers(0, 5000, 3000))

    def after(rate, grad, module):
        tx = module.adam(rate)
        loss = lambda t: (t[ids] ** 3).sum()  # noqa: E731
        updates, _ = tx.update(grad(loss)(table), tx.init(table), table)
        return (module.apply_updates(table, updates)[ids] ** 2).sum()

    for derivative in (jax.grad, jax.jacfwd, lambda f: jax.jit(jax.grad(f))):
        got = derivative(lambda r: after(r, js.grad, js))(jnp.float32(0.1))
        wanted = derivative(lambda r: after(r, jax.grad, optax))(jnp.float32(0.1))
        np.testing.assert_allclose(got, wanted, rtol=1e-3)


def test_slices_without_dense_shape():
    grads = js.IndexedSlices(jnp.ones((2, D)), jnp.array([1, 1]))
    table = jnp.zeros((V, D))
    for tx in (js.sgd(0.5), js.sgd(0.5, momentum=0.9)):
        updates, _ = tx.update(grads, tx.init(table), table)
        np.testing.assert_array_equal(js.apply_updates(table, updates)[1], [-1] * D)


def test_errors():
    table = jnp.zeros((V, D))
    wrong = js.IndexedSlices(jnp.ones((1, D)), jnp.array([1]), (V + 1, D))
    tx = js.adam(0.1)
    with pytest.raises(ValueError, match=r"shape \(10, 3\), the optimizer state"):
        tx.update(wrong, tx.init(table), table)
    with pytest.raises(ValueError, match=r"cannot add .* to a parameter of shape \(9, 3\)"):
        js.apply_updates(table, wrong)
    batch = jax.vmap(lambda v: js.IndexedSlices(v, jnp.array([1]), (V, D)))(
        jnp.ones((2, 1, D))
    )
    with pytest.raises(ValueError, match="batch axis from vmap; sum it first"):
        tx.update(batch, tx.init(table), table)
    with pytest.raises(TypeError, match="wants a number or a schedule"):
        js.adam("0.1")
    with pytest.raises(TypeError, match="wants a number or a schedule"):
        js.sgd(None)
