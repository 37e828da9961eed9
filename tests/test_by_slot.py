"""Gradients that are computed some slots at a time, where they are used."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close

import jslices as js
from jslices._grad import api, by_slot, reread
from jslices.optim import fold, in_place, large, leaf, step, stream

V, K, D = 9, 11, 11  # K = D, which nothing may take for each other
RNG = np.random.default_rng(0)
TABLE = jnp.asarray(RNG.normal(size=(V, D)), jnp.float32)
IDS = jnp.array([4, 1, 4, 0, 8, 8, 4, 2, 4, 1, 7], jnp.int32)
OUT_OF_RANGE = IDS.at[3].set(V + 5).at[9].set(-V - 1)
TARGETS = jnp.asarray(RNG.normal(size=(K, D)), jnp.float32)
ROW, WEIGHTS = TARGETS[:1], TARGETS[:, :1]

BY_SLOT = {
    "squares": lambda t, i: jnp.mean(t[i] ** 2),
    "targets": lambda t, i: jnp.sum((t[i] - TARGETS) ** 2),
    "transposed": lambda t, i: jnp.sum((t[i] - jnp.tanh(TARGETS.T)) ** 2),
    "a row for all": lambda t, i: jnp.sum(jnp.tanh(t[i] * ROW)),
    "a number for each row": lambda t, i: jnp.sum(jnp.abs(t[i]) * WEIGHTS),
    "a number for each column": lambda t, i: jnp.sum(jnp.exp(t[i]) * jnp.arange(D)[None]),
    "ids": lambda t, i: jnp.sum(t[i] ** 3 * (i % 3)[:, None]),
    "sums of rows": lambda t, i: jnp.mean((jnp.abs(t[i]).sum(-1) - jnp.arange(K)) ** 2),
    "of all rows": lambda t, i: jnp.sum(jnp.sin((t[i] ** 2).sum(0))),
    "filled": lambda t, i: jnp.sum(jnp.cos(t.at[i].get(mode="fill", fill_value=0.5))),
    "the greatest": lambda t, i: (
        lambda r: jnp.mean(r**2) + jax.lax.stop_gradient(r.max())
    )(t[i]),
    "its own dtype": lambda t, i: jnp.sum(t[i].astype(jnp.bfloat16) ** 2).astype("float32"),
    "columns": lambda t, i: jnp.sum(t[i] ** 2 * jax.lax.iota(jnp.float32, D)[None]),
}
# What takes other rows than the slot's own, or is no sum over slots.
NOT_BY_SLOT = {
    "other rows": lambda t, i: jnp.sum(t[i] * jax.lax.stop_gradient(t[i[::-1]])),
    "others of the same": lambda t, i: jnp.sum(t[i] * t[(i + 1) % V]),
    "two lookups": lambda t, i: jnp.sum((t[i] - t[i[::-1]]) ** 2),
    "normed": lambda t, i: jnp.sum(jax.nn.softmax(t[i], -1) ** 2),
    "a dense layer": lambda t, i: jnp.sum((t[i] @ TARGETS) ** 2),
    "clipped ids": lambda t, i: jnp.sum(jnp.take(t, i, axis=0, mode="clip") ** 2),
    "neighbours": lambda t, i: jnp.sum(jnp.diff(t[i], axis=0) ** 2),
    "bags": lambda t, i: jnp.sum(t[i[:10].reshape(5, 2)].sum(1) ** 2),
}
LOSSES = BY_SLOT | NOT_BY_SLOT


@pytest.fixture(autouse=True)
def _few_at_a_time(monkeypatch):
    for module in (reread, api):
        monkeypatch.setattr(module, "LARGE", 0)
    for module in (reread, step):
        monkeypatch.setattr(module, "is_large", lambda *shape: True)
    for module in (in_place, fold, large, stream, step):
        monkeypatch.setattr(module, "CHUNK", 4)
    monkeypatch.setattr(step, "covers", lambda *shape: False)
    monkeypatch.setattr(large, "LONG", 0)
    monkeypatch.setattr(leaf, "is_mapped", lambda num_bytes: True)
    monkeypatch.setattr(by_slot, "CHUNK_BYTES", 3 * D * 4)


def train(loss, tx, in_one_call, found=None):
    def run(table, state, ids):
        value, grads = js.value_and_grad(loss)(table, ids)
        if found is not None:
            found.append(reread.slot_gradient(grads) is not None)
        if in_one_call:
            return *tx.apply(grads, state, table), value
        updates, state = tx.update(grads, state, table)
        return js.apply_updates(table, updates), state, value

    return run


def dense_step(loss, tx):
    def run(table, state, ids):
        value, grads = jax.value_and_grad(loss)(table, ids)
        updates, state = tx.update(grads, state, table)
        return optax.apply_updates(table, updates), state, value

    return run


@pytest.mark.parametrize("in_one_call", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_a_step_is_that_of_optax(name, in_one_call):
    found, tx = [], js.adagrad(0.1)
    ours = jax.jit(train(LOSSES[name], tx, in_one_call, found))
    theirs = jax.jit(dense_step(LOSSES[name], optax.adagrad(0.1)))
    got, wanted = (TABLE, tx.init(TABLE)), (TABLE, optax.adagrad(0.1).init(TABLE))
    for ids in (IDS, IDS[::-1]):
        *got, value = ours(*got, ids)
        *wanted, wanted_value = theirs(*wanted, ids)
        close = 2e-2 if name == "its own dtype" else 2e-5
        np.testing.assert_allclose(value, wanted_value, rtol=close, atol=1e-5)
        np.testing.assert_allclose(got[0], wanted[0], rtol=close, atol=close)
    assert found == [name in BY_SLOT]


@pytest.mark.parametrize("in_one_call", [False, True])
def test_ids_out_of_range_give_no_gradient(in_one_call):
    loss, tx = BY_SLOT["filled"], js.adam(0.1)
    got = jax.jit(train(loss, tx, in_one_call))(TABLE, tx.init(TABLE), OUT_OF_RANGE)
    dense = dense_step(loss, optax.adam(0.1))
    wanted = dense(TABLE, optax.adam(0.1).init(TABLE), OUT_OF_RANGE)
    assert_close((got[0], got[2]), (wanted[0], wanted[2]), atol=1e-5)


@pytest.mark.parametrize("in_one_call", [False, True])
def test_sgd_and_rows_that_are_only_zero(in_one_call):
    tx = js.sgd(0.1)
    got = jax.jit(train(lambda t, i: jnp.sum(t[i] * 0), tx, in_one_call))
    assert_close(got(TABLE, tx.init(TABLE), IDS)[0], TABLE)
    got = jax.jit(train(BY_SLOT["squares"], tx, in_one_call))(TABLE, tx.init(TABLE), IDS)
    assert_close(got[0], TABLE - 0.1 * jax.grad(BY_SLOT["squares"])(TABLE, IDS))


def test_other_parameters_than_those_of_the_gradient():
    """A gradient taken elsewhere (looking ahead, say) is applied as it is."""
    tx, ahead = js.adagrad(0.1), TABLE + 0.3

    @jax.jit
    def run(table, ahead):
        _, grads = js.value_and_grad(BY_SLOT["squares"])(ahead, IDS)
        updates, _ = tx.update(grads, tx.init(table), table)
        applied, _ = tx.apply(grads, tx.init(table), table)
        return applied, js.apply_updates(table, updates)

    grads = jax.grad(BY_SLOT["squares"])(ahead, IDS)
    updates, _ = optax.adagrad(0.1).update(grads, optax.adagrad(0.1).init(TABLE), TABLE)
    for got in run(TABLE, ahead):
        assert_close(got, TABLE + updates)


def test_a_gradient_that_was_changed_is_taken_as_it_is():
    tx = js.adagrad(0.1)

    @jax.jit
    def run(table):
        _, grads = js.value_and_grad(BY_SLOT["squares"])(table, IDS)
        assert reread.slot_gradient(grads) is not None
        updates, _ = tx.update(grads * 3, tx.init(table), table)
        return tx.apply(grads * 3, tx.init(table), table)[0], updates

    grads = 3 * jax.grad(BY_SLOT["squares"])(TABLE, IDS)
    updates, _ = optax.adagrad(0.1).update(grads, optax.adagrad(0.1).init(TABLE), TABLE)
    applied, got = run(TABLE)
    assert_close(applied, TABLE + updates)
    assert_close(got.to_dense(), updates)


@pytest.mark.parametrize("in_one_call", [False, True])
@pytest.mark.parametrize("name", ["targets", "sums of rows"])
def test_derivatives_of_a_step(name, in_one_call):
    def after(run, tx, rate, table):
        table, _, value = run(LOSSES[name], tx(rate))(table, tx(rate).init(table), IDS)
        return jnp.sum(table**2) + value

    ours = functools.partial(train, in_one_call=in_one_call)
    for which in (0, 1):
        got = jax.jit(jax.grad(functools.partial(after, ours, js.adam), which))(0.1, TABLE)
        wanted = jax.grad(functools.partial(after, dense_step, optax.adam), which)(
            0.1, TABLE
        )
        np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("in_one_call", [False, True])
def test_in_vmap_and_scan(in_one_call):
    tx, loss = js.adagrad(0.1), BY_SLOT["targets"]
    one, dense = train(loss, tx, in_one_call), dense_step(loss, optax.adagrad(0.1))
    ids = jnp.stack([IDS, IDS[::-1], IDS * 0])

    @jax.jit
    def run(table):
        start = table, tx.init(table)
        last, _ = jax.lax.scan(lambda carry, i: (one(*carry, i)[:2], None), start, ids)
        return last[0], jax.vmap(lambda i: one(*start, i)[0])(ids)

    table, state, each = TABLE, dense_state(TABLE), []
    for i in ids:
        each.append(dense(TABLE, dense_state(TABLE), i)[0])
        table, state, _ = dense(table, state, i)
    assert_close(run(TABLE), (table, jnp.stack(each)), rtol=1e-4, atol=1e-5)


def dense_state(table):
    return optax.adagrad(0.1).init(table)


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("in_one_call", [False, True])
@pytest.mark.parametrize("name", ["targets", "two lookups", "bags"])
def test_per_device(name, in_one_call, check):
    """Each device steps a table of its own; JAX checks what differs between them."""
    if jax.device_count() < 4:
        pytest.skip("needs four devices")
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    shares, tx = jax.sharding.PartitionSpec("data"), js.adagrad(0.1)

    def run(table, ids):
        new = train(LOSSES[name], tx, in_one_call)(table[0], tx.init(table[0]), ids[0])
        return new[0][None]

    tables = jnp.stack([TABLE + n for n in range(4)])
    ids = jnp.stack([(IDS + n) % V for n in range(4)])
    got = jax.jit(
        jax.shard_map(run, mesh=mesh, in_specs=shares, out_specs=shares, check_vma=check)
    )(tables, ids)
    for table, i, mine in zip(tables, ids, got, strict=True):
        dense = dense_step(LOSSES[name], optax.adagrad(0.1))
        assert_close(mine, dense(table, dense_state(table), i)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_other_platforms_have_the_ordinary_program(platform):
    tx = js.adagrad(0.1)
    step = jax.jit(train(BY_SLOT["targets"], tx, True))
    traced = step.trace(TABLE, jax.eval_shape(tx.init, TABLE), IDS)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert ("stablehlo.while" in text) == (platform == "cpu")


def test_what_is_read_again_is_noticed_if_wrong(monkeypatch):
    """These tests can fail: rows of other slots give another step."""
    right = by_slot.BySlot.of
    monkeypatch.setattr(
        by_slot.BySlot, "of", lambda self, a, rows, t: right(self, a, rows[::-1], t)
    )
    with pytest.raises(AssertionError):
        test_a_step_is_that_of_optax("squares", True)
