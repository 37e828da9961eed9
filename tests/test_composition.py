"""jslices.grad inside other transformations: devices, training loops, micro-batches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import all_at_once, assert_close, fast_jit, gradients
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import jslices as js

V, D = 10, 4
RNG = np.random.default_rng(7)
TABLE = RNG.normal(size=(V, D)).astype(np.float32)
WEIGHT = RNG.normal(size=(D,)).astype(np.float32)
PARAMS = {"table": TABLE, "w": WEIGHT}
IDS = RNG.integers(0, V, (8, 3)).astype(np.int32)


def loss(params, ids):
    return ((params["table"][ids] @ params["w"]) ** 2).sum()


@pytest.fixture(scope="module")
def by_jax():
    """JAX's gradient of the whole batch."""
    return fast_jit(jax.grad(loss))(PARAMS, IDS)


@pytest.fixture
def mesh():
    if jax.device_count() < 4:
        pytest.skip("needs four devices")
    return jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


@pytest.mark.parametrize("check_vma", [True, False])
def test_under_shard_map(mesh, check_vma, by_jax):
    """Every device looks up its part of the batch; the rows are gathered, not a table."""
    spec = PartitionSpec

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(spec(), spec("data")),
        out_specs={"table": spec("data"), "w": spec("data")},
        check_vma=check_vma,
    )
    def grads(params, ids):
        if check_vma:  # the gradient of each device's own loss, not their sum
            params = jax.tree.map(lambda x: lax.pcast(x, "data", to="varying"), params)
        out = js.grad(loss)(params, ids)
        return {"table": out["table"], "w": out["w"][None]}

    out = grads(PARAMS, IDS)
    assert js.is_slices(out["table"]) and out["table"].values.shape == (24, D)
    assert_close(out["table"], by_jax["table"], rtol=1e-4)
    assert_close(np.asarray(out["w"]).sum(axis=0), by_jax["w"], rtol=1e-4)


def test_a_sharded_batch_and_a_replicated_table_under_jit(mesh):
    def put(x, *spec):
        return jax.device_put(np.array(x), NamedSharding(mesh, PartitionSpec(*spec)))

    params = jax.tree.map(put, PARAMS)
    tx = js.adam(0.1)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, ids):
        grads = js.grad(loss)(params, ids)
        updates, state = tx.update(grads, state, params)
        return js.apply_updates(params, updates), state

    got, _ = step(params, tx.init(params), put(IDS, "data"))
    wanted, _ = step(PARAMS, tx.init(PARAMS), IDS)
    assert_close(got, wanted, rtol=1e-4)


def test_a_constraint_on_the_table_stays_on_the_table(mesh):
    sharding = NamedSharding(mesh, PartitionSpec())

    def constrained(table):
        table = lax.with_sharding_constraint(table, sharding)
        return (jnp.sin(table)[IDS[0]] ** 2).sum()

    grad, wanted = gradients(constrained, TABLE)
    assert js.is_slices(grad)
    assert_close(grad, wanted)


def test_per_example_gradients():
    def norms_too(params, ids):
        grads = jax.vmap(js.grad(loss), (None, 0))(params, ids)
        squares = grads["table"].coalesce().values ** 2
        return grads, jnp.sqrt(squares.sum(axis=(1, 2)))

    grads, norms = fast_jit(norms_too)(PARAMS, IDS)
    assert grads["table"].values.shape == (8, 3, D)
    wanted = fast_jit(jax.vmap(jax.grad(loss), (None, 0)))(PARAMS, IDS)
    assert_close(grads, wanted, rtol=1e-4)
    wanted_norms = np.sqrt((np.asarray(wanted["table"]) ** 2).sum(axis=(1, 2)))
    np.testing.assert_allclose(norms, wanted_norms, rtol=1e-4)


def test_a_whole_training_loop_as_one_scan():
    tx = js.sgd(0.01, momentum=0.9)

    def step(carry, ids):
        params, state = carry
        value, grads = js.value_and_grad(loss)(params, ids)
        updates, state = tx.update(grads, state, params)
        return (js.apply_updates(params, updates), state), value

    start = PARAMS, tx.init(PARAMS)
    (params, state), values = fast_jit(lambda c, xs: lax.scan(step, c, xs))(start, IDS)
    carry, once = start, fast_jit(step)
    for ids, value in zip(IDS, values, strict=True):
        carry, wanted = once(carry, ids)
        np.testing.assert_allclose(value, wanted, rtol=1e-4)
    assert_close(params, carry[0], rtol=1e-4)
    assert int(state.count) == 8


def test_gradients_of_micro_batches_add_up_without_a_dense_buffer(by_jax):
    @fast_jit
    def accumulated(params, batches):
        per_batch = lax.map(lambda ids: js.grad(loss)(params, ids)["table"], batches)
        assert per_batch.values.shape == (8, 3, D)
        return js.IndexedSlices(
            per_batch.values.reshape(-1, D), per_batch.indices.reshape(-1), (V, D)
        ).coalesce()

    assert_close(accumulated(PARAMS, IDS), by_jax["table"], rtol=1e-4)


def test_an_outer_gradient_through_an_inner_training_step():
    """Meta-learning: differentiate the loss after a step with respect to the parameters."""
    tx = js.adam(0.1)

    def after(params, grad):
        grads = grad(loss)(params, IDS[0])
        updates, _ = tx.update(grads, tx.init(params), params)
        return loss(js.apply_updates(params, updates), IDS[1])

    through = lambda inner: jax.grad(lambda p: after(p, inner))  # noqa: E731
    found = all_at_once({"ours": through(js.grad), "theirs": through(jax.grad)}, PARAMS)
    assert_close(found["ours"], found["theirs"], rtol=1e-3, atol=1e-4)


def test_disable_jit_and_debug_nans(by_jax):
    with jax.disable_jit():
        assert_close(js.grad(loss)(PARAMS, IDS), by_jax, rtol=1e-4)
    with jax.debug_nans(True):
        assert_close(js.grad(loss)(PARAMS, IDS), by_jax, rtol=1e-4)


def test_callables_of_any_kind(by_jax):
    class Model:
        def __call__(self, params, ids):
            return loss(params, ids)

        def method(self, params, ids):
            return loss(params, ids)

    by_keyword = js.grad(functools.partial(loss, ids=IDS))
    kinds = {
        "call": js.grad(Model()),
        "method": js.grad(Model().method),
        "partial": js.grad(functools.partial(loss)),
        "keyword": lambda params, ids: by_keyword(params),
    }
    found = all_at_once(kinds, PARAMS, IDS)
    assert_close(found, dict.fromkeys(kinds, by_jax), rtol=1e-4)


def test_effects_and_random_keys():
    seen = []

    def fun(params, key, ids):
        jax.debug.callback(lambda x: seen.append(x.shape), params["table"])
        keep = jax.random.bernoulli(key, 0.5, ids.shape)
        return (params["table"][ids].sum(axis=-1) * keep).sum()

    grads = js.grad(fun)(PARAMS, jax.random.key(0), IDS)
    jax.effects_barrier()
    assert js.is_slices(grads["table"]) and seen == [(V, D)]
    wanted = fast_jit(jax.grad(fun))(PARAMS, jax.random.key(0), IDS)
    assert_close(grads, wanted)
