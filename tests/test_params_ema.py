"""Averages of parameters, against optax.incremental_update after each step."""

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from draws import examples
from helpers import assert_close, fast_jit, slow_but_first, slow_unless
from hypothesis import given
from hypothesis import strategies as st

import jslices as js

V, STEPS, DECAY = 40, 120, 0.97
RNG = np.random.default_rng(0)
PARAMS = jax.device_put(
    {"table": RNG.normal(size=(V, 4)).astype(np.float32), "w": np.ones(4, np.float32)}
)
IDS = (RNG.zipf(1.2, size=(STEPS, 5)) % V).astype(np.int32)
RATE = optax.warmup_cosine_decay_schedule(0, 0.003, 20, STEPS)


FAST = {"weight_decay": 1.0, "weight_decay_mode": "all"}


def loss(params, ids):
    return ((params["table"][ids] @ params["w"] - 1) ** 2).mean()


def trained(step, state, ema=None):
    """``(params, state)`` and the average after all steps, taken beside them if told."""

    def body(carry, ids):
        params, state, average = carry
        params, state, _ = step(params, state, ids)
        if ema:
            average = optax.incremental_update(params, average, 1 - ema)
        return (params, state, average), None

    run = lambda p: jax.lax.scan(body, (p, state, p if ema else ()), IDS)[0]  # noqa: E731
    return fast_jit(run)(PARAMS)


def dense_step(tx, params, state, ids):
    value, grads = jax.value_and_grad(loss)(params, ids)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value


# Rows wait for longer than a momentum of 0.5 lasts; 0.01 * 3 is the average's own decay.
@pytest.mark.parametrize(
    ["name", "rate", "options"],
    slow_unless(
        [
            ("sgd", 0.02, {"momentum": 0.9}),
            ("adam", 0.01, {"b1": 0.5}),
            ("adam", RATE, {}),
            ("adamw", 0.01, {"weight_decay": 3.0}),
            ("adamw", RATE, {"weight_decay": 0.1, "b1": 0.5}),
            ("adamw", RATE, {"weight_decay": 10.0}),
        ],
        lambda case: case[0] == "sgd",
    ),
)
def test_of_exact_optimizers_is_that_of_dense_ones(name, rate, options):
    check_exact(name, rate, options)


@pytest.mark.slow
@given(data=st.data(), decay=st.sampled_from([0.9, 0.97, 0.999]))
@examples(10)
def test_of_drawn_numbers(data, decay):
    momentum = data.draw(st.sampled_from([0.0, 0.5, 0.8, 0.99 * decay]))
    start = data.draw(st.sampled_from([1e-3, 1e-2]))
    falling = optax.warmup_cosine_decay_schedule(0, start, 20, STEPS)
    rate = data.draw(st.sampled_from([start, falling]))
    share = data.draw(st.sampled_from([0.1, 0.999, 1.0]))
    options = {"weight_decay": share * (1 - decay) / start}
    check_exact("adamw", rate, {**options, "b1": momentum, "b2": 0.99}, decay)


def check_exact(name, rate, options, decay=DECAY):
    tx = getattr(js, name)(rate, **options, untouched="exact")
    tx = js.optim.chain(js.optim.clip_by_global_norm(1.0), js.optim.params_ema(tx, decay))
    dense = getattr(optax, name)(rate, **options)
    dense = optax.chain(optax.clip_by_global_norm(1.0), dense)
    params, state, _ = trained(js.train_step(loss, tx), tx.init(PARAMS))
    params, state = tx.flush(params, state)
    step = functools.partial(dense_step, dense)
    wanted, _, average = trained(step, dense.init(PARAMS), ema=decay)
    assert_close(params, wanted, rtol=1e-4, atol=1e-5)
    assert_close(optax.tree.get(state, "ema"), average, rtol=1e-4, atol=1e-5)
    assert np.abs(average["table"] - wanted["table"]).max() > 1e-4


LAZY = js.adam(0.01), js.adam(RATE), js.rowwise_adagrad(0.1), js.lion(0.01)


@pytest.mark.parametrize("lazy", slow_but_first(*LAZY))
def test_of_lazy_optimizers_is_that_of_the_same_steps(lazy):
    tx = js.optim.params_ema(lazy, DECAY)
    params, state, _ = trained(js.train_step(loss, tx), tx.init(PARAMS))
    wanted, _, average = trained(js.train_step(loss, lazy), lazy.init(PARAMS), ema=DECAY)
    assert_close(params, wanted, rtol=1e-5, atol=1e-6)
    assert_close(tx.flush(params, state)[1].ema, average, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("make", [js.adam, functools.partial(js.adamw, weight_decay=1.0)])
def test_with_an_injected_learning_rate(make):
    def averaged(learning_rate):
        return js.optim.params_ema(make(learning_rate, untouched="exact"), DECAY)

    @fast_jit
    def by_argument(rate):
        tx = averaged(rate)
        body = lambda c, ids: (js.train_step(loss, tx)(*c, ids)[:2], None)  # noqa: E731
        return tx.flush(*jax.lax.scan(body, (PARAMS, tx.init(PARAMS)), IDS)[0])

    tx = averaged(0.01)
    wanted = tx.flush(*trained(js.train_step(loss, tx), tx.init(PARAMS))[:2])
    assert_close(by_argument(0.01)[1].ema, wanted[1].ema, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_frozen_rows_are_their_average():
    tx = js.optim.params_ema(js.adamw(0.01, weight_decay=0.3, untouched="exact"), DECAY)
    tx = js.optim.freeze_rows(tx, {"table": lambda rows: rows < 9, "w": None})
    whole = lambda p, ids: (p["table"] ** 2).mean() + loss(p, ids)  # noqa: E731
    for step in (js.train_step(loss, tx), js.train_step(whole, tx, sparse=False)):
        params, state = tx.flush(*trained(step, tx.init(PARAMS))[:2])
        now, ema = params["table"], state.ema["table"]
        np.testing.assert_array_equal(now[:9], PARAMS["table"][:9])
        np.testing.assert_allclose(ema[:9], now[:9], rtol=1e-5)
        assert np.abs(ema[9:] - now[9:]).max() > 1e-3


@pytest.mark.parametrize("untouched", slow_but_first("lazy", "exact"))
def test_is_in_place_and_saved(untouched, tmp_path):
    tx = js.optim.params_ema(js.adam(0.01, untouched=untouched), DECAY)
    params = {"table": jnp.ones((200_000, 4)), "w": jnp.ones(4)}
    args = params, tx.init(params), IDS[0]
    js.testing.assert_in_place(js.train_step(loss, tx), *args, donate_argnums=(0, 1))
    params, state, _ = fast_jit(js.train_step(loss, tx))(PARAMS, tx.init(PARAMS), IDS[0])
    path = js.Saver().save({"p": params, "s": state}, tmp_path / "model")
    restored = js.Saver().restore(path, {"p": PARAMS, "s": tx.init(PARAMS)})["s"]
    for again in (restored, pickle.loads(pickle.dumps(state))):
        jax.tree.map(np.testing.assert_array_equal, again, state)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_on_a_mesh(kind):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType[kind],))
    tx = js.optim.params_ema(js.adamw(RATE, weight_decay=1.0, untouched="exact"), DECAY)
    read = lambda p, ids: {**p, "table": js.embedding_lookup(p["table"], ids)}  # noqa: E731
    step = js.train_step(lambda p, ids: loss(read(p, ids), jnp.arange(5)), tx)
    placed = {
        k: jax.device_put(x, jax.NamedSharding(mesh, jax.P())) for k, x in PARAMS.items()
    }
    placed["table"] = jax.device_put(placed["table"], jax.NamedSharding(mesh, jax.P("x")))
    results = []
    for params in (PARAMS, placed):
        state = tx.init(params)
        for ids in IDS[:9]:
            params, state, _ = fast_jit(step)(params, state, ids)
        results.append((params, state.ema))
    assert_close(*results, rtol=1e-5, atol=1e-6)
    assert results[1][1]["table"].sharding == results[1][0]["table"].sharding


@pytest.mark.slow
def test_of_a_host_table():
    tx = js.optim.params_ema(js.adamw(RATE, weight_decay=1.0, untouched="exact"), DECAY)
    table, w = PARAMS["table"], PARAMS["w"]
    host = js.HostTable(table.shape, tx, init=lambda ids: table[ids], size=5)
    on_table = lambda table, ids: loss({"table": table, "w": w}, ids)  # noqa: E731

    @fast_jit
    def by_rows(rows, places):
        table, state = rows.unpack()
        return rows.pack(*tx.apply(js.grad(on_table)(table, places), state, table))

    step, state = fast_jit(js.train_step(on_table, tx)), tx.init(table)
    for ids in IDS[:20]:
        rows, places = host.fetch(ids)
        host.store(by_rows(rows, places))
        table, state, _ = step(table, state, ids)
    table, state = tx.flush(table, state)
    rows, places = host.fetch(IDS[0])
    mine, own = rows.unpack()
    for got, wanted in ((mine, table), (own.ema, state.ema)):
        assert_close(got[places], wanted[IDS[0]], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_of_a_run_that_began_elsewhere_and_of_a_table_that_grows():
    options = {"weight_decay": 0.5, "weight_decay_mode": "all", "b1": 0.5}
    dense = optax.adamw(0.01, b1=0.5, weight_decay=0.5)
    tx = js.optim.params_ema(js.adamw(0.01, untouched="exact", **options), DECAY)
    run = functools.partial(jax.lax.scan, lambda s, i: (dense_step(dense, *s, i)[:2], None))
    params, theirs = fast_jit(run)((PARAMS, dense.init(PARAMS)), IDS[:60])[0]
    moments = optax.tree.get(theirs, "mu"), optax.tree.get(theirs, "nu")
    slots = jax.tree.map(lambda mu, nu: {"mu": mu, "nu": nu}, *moments)
    average = wanted = params
    state = js.checkpoint.import_state(tx, params, slots, count=60)
    step, dense_steps = (
        fast_jit(js.train_step(loss, tx)),
        fast_jit(functools.partial(dense_step, dense)),
    )
    for ids in IDS[60:90]:
        params, state, _ = step(params, state, ids)
        wanted, theirs, _ = dense_steps(wanted, theirs, ids)
        average = optax.incremental_update(wanted, average, 1 - DECAY)
    fresh = {**PARAMS, "table": jnp.zeros((V + 3, 4))}
    params, state = tx.flush(*js.checkpoint.resize_rows(tx, params, state, fresh))
    for mine, theirs in ((params, wanted), (state.ema, average)):
        np.testing.assert_allclose(mine["table"][:V], theirs["table"], rtol=1e-4, atol=1e-5)
        assert (mine["table"][V:] == 0).all()
    slots = js.checkpoint.export_state(params, state, "torch")
    assert slots["w"].keys() == {"step", "exp_avg", "exp_avg_sq"}
    again = js.checkpoint.import_state(
        tx, params, {k: {**x, "ema": state.ema[k]} for k, x in slots.items()}
    )
    assert_close(again.ema, state.ema, atol=0)


def test_of_16_bits_is_in_float32():
    tx = js.optim.params_ema(js.sgd(0.1), DECAY)
    assert tx.init(jnp.ones((4, 2), jnp.bfloat16)).ema.dtype == jnp.float32


@pytest.mark.parametrize(
    "make, match",
    [
        (lambda ema: ema(js.lion(0.1, untouched="exact"), 0.9), "no closed form"),
        (lambda ema: ema(js.adafactor(0.1), 0.9), "no closed form"),
        (lambda ema: ema(js.adam(0.1, untouched="exact"), 0.8), "faster than momentum"),
        (
            lambda ema: ema(js.optim.dp_sgd(0.1, 1.0, 1.0, 8, jax.random.key(0)), 0.9),
            "wants a plain optimizer",
        ),
        (lambda ema: ema(js.adamw(0.1, **FAST), 0.95), "leaves 0.9 of a row"),
        (lambda ema: ema(js.adamw(lambda n: n / 99, **FAST), 0.95), "no faster than"),
        (
            lambda ema: ema(js.optim.chain(js.sgd(0.1)), 0.9),
            "links and wrappers go around it",
        ),
        (
            lambda ema: ema(js.optim.freeze_rows(js.sgd(0.1), True), 0.9),
            r"got freeze_rows.*around it: ema = .*, then jslices\.optim\.freeze_rows\(ema",
        ),
        (lambda ema: ema(optax.adam(0.1), 0.9), "wants a plain optimizer"),
        (lambda ema: ema(js.sgd(0.1), 0.0), "decay above 0"),
    ],
)
def test_refuses_what_it_cannot_average(make, match):
    with pytest.raises((TypeError, ValueError), match=match):
        make(js.optim.params_ema)
