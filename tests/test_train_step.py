"""A whole step: rows catch up by themselves before it reads them."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    as_users,
    assert_close,
    fast_jit,
    slow_but_first,
    slow_unless,
    traced_as_on,
)
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jslices as js

V, D, K, STEPS = 50, 3, 8, 40
RNG = np.random.default_rng(1)
SHAPES = {"a": (V, D), "b": (V, 1), "w": (D,)}
PARAMS = {k: RNG.normal(size=shape).astype(np.float32) for k, shape in SHAPES.items()}
PARAMS = jax.device_put(PARAMS)
IDS = (RNG.zipf(1.3, size=(STEPS, K)) % V).astype(np.int32)
LABELS = RNG.normal(size=(STEPS, K)).astype(np.float32)
# The smallest program of an exact optimizer; others are in test_exact.py.
EXACT = js.sgd(0.03, momentum=0.9, untouched="exact")
LAZY, OPTAX = js.sgd(0.03, momentum=0.9), optax.sgd(0.03, momentum=0.9)
STEER = js.sgd(0.01, momentum=0.9, untouched="exact")
STEER_DENSELY = optax.sgd(0.01, momentum=0.9)
optim = js.optim


def loss(params, ids, labels):
    rows = params["a"][ids] @ params["w"] + params["b"][ids[::-1]][:, 0]
    return jnp.mean((rows - labels) ** 2)


def of_one_table(params, ids, labels):
    return jnp.mean((params["a"][ids] @ params["w"] - labels) ** 2)


def with_aux(params, ids, labels):
    value = loss(params, ids, labels)
    return value, {"twice": 2 * value, "ids": ids}


def copied(tree):
    return jax.device_put(jax.tree.map(np.array, tree))


def by_hand(loss, tx, params, state, ids, labels):
    rows = js.lookup_ids(loss)(params, ids, labels)
    params, state = tx.catch_up(params, state, rows)
    value, grads = js.value_and_grad(loss)(params, ids, labels)
    params, state = tx.apply(grads, state, params)
    return params, state, value


@functools.cache
def trained_densely():
    def step(carry, batch):
        params, state = carry
        value, grads = jax.value_and_grad(loss)(params, *batch)
        updates, state = OPTAX.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), value

    run = lambda p: jax.lax.scan(step, (p, OPTAX.init(p)), (IDS, LABELS))  # noqa: E731
    (params, _), values = fast_jit(run)(PARAMS)
    return params, values


@pytest.mark.parametrize("tx", slow_but_first(LAZY, EXACT), ids=["lazy", "exact"])
def test_is_the_calls_by_hand(tx):
    """To the bit, but that a row moves once where by hand it catches up and then steps."""
    step = jax.jit(js.train_step(loss, tx), donate_argnums=(0, 1))
    hand = jax.jit(functools.partial(by_hand, loss, tx), donate_argnums=(0, 1))
    mine, other = copied((PARAMS, tx.init(PARAMS))), copied((PARAMS, tx.init(PARAMS)))
    for batch in zip(IDS[:6], LABELS, strict=False):
        *mine, value = step(*mine, *batch)
        *other, wanted = hand(*other, *batch)
        bounds = {"rtol": 0, "atol": 0} if tx is LAZY else {}
        assert_close((mine, value), (other, wanted), **bounds)


def test_scanned_it_equals_dense_optax():
    step = js.train_step(with_aux, EXACT, has_aux=True)

    def scanned(carry, batch):
        params, state, value, aux = step(*carry, *batch)
        return (params, state), (value, aux)

    @fast_jit
    def run(params):
        carry = params, EXACT.init(params)
        (params, state), found = jax.lax.scan(scanned, carry, (IDS, LABELS))
        return EXACT.flush(params, state)[0], found

    params, (values, aux) = run(PARAMS)
    wanted, losses = trained_densely()
    assert_close((params, values), (wanted, losses), rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(aux["ids"], IDS)
    np.testing.assert_array_equal(aux["twice"], 2 * values)


def test_traces_the_loss_once():
    calls = []

    def counted(params, ids, labels):
        calls.append(1)
        return loss(params, ids, labels)

    step = js.train_step(counted, EXACT)
    jax.make_jaxpr(step)(PARAMS, EXACT.init(PARAMS), IDS[0], LABELS[0])
    assert len(calls) == 1


def test_traces_what_missed_steps_do_once_for_each_shape():
    calls = []

    def rate(step):
        calls.append(1)
        return 0.1 / (1 + step)

    tx = js.adam(rate, untouched="exact")
    params = {"table": jax.ShapeDtypeStruct((60_000, 64), jnp.float32)}
    ids = jax.ShapeDtypeStruct((9_000,), jnp.int32)
    state = jax.eval_shape(tx.init, params)
    step = js.train_step(lambda params, ids: params["table"][ids].sum(), tx)
    calls.clear()
    jax.make_jaxpr(step)(params, state, ids)
    # All rows that are named and a chunk of them; the rest is the table of missed steps.
    assert len(calls) <= 8


def test_rows_are_numbered_once():
    """Catching up and the step name the same rows; on a CPU a loop numbers them."""
    table, ids = jnp.ones((50_000, 16)), jnp.arange(300)

    def loops(tx):
        step = js.train_step(lambda table, ids: (table[ids] ** 2).sum(), tx)
        step = as_users(step, donate_argnums=(0, 1))
        return step.lower(table, tx.init(table), ids).compile().as_text().count(" while(")

    assert loops(EXACT) == loops(LAZY) == 1


#: So many entries are stepped by a pass over a table of as many rows.
ENOUGH = 600
SCHEDULE = optax.exponential_decay(0.1, 3, 0.8)


@pytest.mark.parametrize(
    ["name", "options", "layers"],
    slow_unless(
        [
            ("adam", {"learning_rate": 0.1}, 1),
            ("lion", {"learning_rate": SCHEDULE, "weight_decay": 0.1}, 2),
            ("adamw", {"learning_rate": 0.1}, 1),
        ],
        lambda case: case[0] == "adam",
    ),
)
def test_a_pass_over_the_table_between_steps_of_few_rows(name, options, layers):
    """Most rows miss some of these.

    With a table for each of two layers, ``[2, V, D]``, as with one.
    """
    tx, truth = getattr(js, name)(**options, untouched="exact"), getattr(optax, name)
    truth = truth(**options)

    @fast_jit
    def dense_step(table, state, counts):
        updates, state = truth.update(2 * counts[..., None] * table, state, table)
        return optax.apply_updates(table, updates), state

    step = fast_jit(js.train_step(of_each_layer, tx))
    rows = ENOUGH // layers
    table = RNG.normal(size=(layers, rows, D)).astype(np.float32)
    many = (RNG.zipf(1.3, size=(layers, rows)) % rows).astype(np.int32)
    if layers == 1:
        table, many = table[0], many[0]
    mine, wanted = (table, tx.init(table)), (table, truth.init(table))
    few = many[..., :5]
    for ids in (many, few, few + 3, many, many):
        counts = (ids[..., None, :] == np.arange(rows)[:, None]).sum(-1)
        mine, wanted = step(*mine, ids)[:2], dense_step(*wanted, np.float32(counts))
    assert_close(tx.flush(*mine)[0], wanted[0], rtol=1e-4, atol=1e-5)


def of_each_layer(table, ids):
    if table.ndim == 2:
        return squares(table, ids)
    add = lambda total, layer: (total + squares(*layer), None)  # noqa: E731
    return jax.lax.scan(add, 0.0, (table, ids))[0]


def squares(table, ids):
    return (table[ids] ** 2).sum()


@pytest.mark.parametrize(
    ["untouched", "decays"],
    slow_unless([("exact", "touched"), ("lazy", "all")], lambda case: case[0] == "lazy"),
)
def test_a_pass_over_the_table_does_no_more_than_missed_steps(untouched, decays):
    """Where rows do not decay, or do not move, in the steps that they miss."""
    tx = js.adamw(0.1, weight_decay=0.1, untouched=untouched, weight_decay_mode=decays)
    by_step = fast_jit(js.train_step(squares, tx))

    @fast_jit
    def by_hand(table, state, ids):
        table, state = tx.catch_up(table, state, ids)
        return tx.apply(js.grad(squares)(table, ids), state, table)

    table = RNG.normal(size=(ENOUGH, D)).astype(np.float32)
    mine = other = table, tx.init(table)
    many = (RNG.zipf(1.3, size=ENOUGH) % ENOUGH).astype(np.int32)
    for ids in (many, many[:5], many // 2):
        mine, other = by_step(*mine, ids)[:2], by_hand(*other, ids)
    assert_close(mine, other, rtol=1e-5)
    assert (np.asarray(mine[1].clock.last) < 3).any()


@pytest.mark.slow
def test_without_jit_and_with_keywords():
    step = js.train_step(loss, EXACT)
    params, state = copied(PARAMS), EXACT.init(PARAMS)
    for ids, labels in zip(IDS[:3], LABELS, strict=False):
        params, state, value = step(params, state, ids, labels=labels)
    np.testing.assert_allclose(value, trained_densely()[1][2], rtol=1e-5)


def test_a_loss_of_the_parameters_alone():
    step = jax.jit(
        js.train_step(lambda p: p["a"][:2].sum() * p["w"][0], EXACT),
        donate_argnums=(0, 1),
    )
    params, _, value = step(copied(PARAMS), EXACT.init(PARAMS))
    params, start = jax.device_get((params, PARAMS))
    np.testing.assert_allclose(value, start["a"][:2].sum() * start["w"][0], rtol=1e-6)
    np.testing.assert_array_equal(params["a"][2:], start["a"][2:])


@pytest.mark.slow
def test_two_losses_take_turns():
    """One reads rows of a table, one all of it, one nothing: each finds it caught up."""
    losses = [
        loss,
        lambda p, i, y: loss(p, i, y) + jnp.mean(p["a"] ** 2),
        lambda p, i, y: jnp.mean((p["b"][i][:, 0] * p["w"][0] - y) ** 2),
    ]
    params = wanted = PARAMS
    state, truth = EXACT.init(PARAMS), OPTAX.init(PARAMS)
    steps = [fast_jit(js.train_step(each, EXACT)) for each in losses]

    def dense_step(loss):
        def step(params, state, ids, labels):
            value, grads = jax.value_and_grad(loss)(params, ids, labels)
            updates, state = OPTAX.update(grads, state, params)
            return optax.apply_updates(params, updates), state, value

        return fast_jit(step)

    dense = [dense_step(each) for each in losses]
    with pytest.warns(js.DensificationWarning, match=r"'a'"):
        for n, batch in enumerate(zip(IDS[:12], LABELS, strict=False)):
            params, state, value = steps[n % 3](params, state, *batch)
            wanted, truth, loss_now = dense[n % 3](wanted, truth, *batch)
            np.testing.assert_allclose(value, loss_now, rtol=1e-4)
    assert_close(EXACT.flush(params, state)[0], wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("platform", slow_but_first("tpu", "cpu"))
def test_what_row_numbers_follow_from_catches_up_first(platform):
    """It misses steps in which it is not used, and some use it for row numbers alone."""

    def steered(params, ids, labels):
        ahead = jnp.argmax(jax.lax.stop_gradient(params["w"])).astype(jnp.int32)
        return jnp.mean((params["a"][ids + 9 * ahead].sum(1) - labels) ** 2)

    steer = lambda p, i, y: 3 * p["w"][0] + squares(p["a"], i)  # noqa: E731
    losses = steer, lambda p, i, y: squares(p["a"], i), steered
    params = wanted = {"a": PARAMS["a"], "w": jnp.array([1.0, 0.94, 0.9])}
    state, truth = (tx.init(params) for tx in (STEER, STEER_DENSELY))

    def dense_step(loss):
        def step(params, state, *batch):
            value, grads = jax.value_and_grad(loss)(params, *batch)
            updates, state = STEER_DENSELY.update(grads, state, params)
            return optax.apply_updates(params, updates), state, value

        return fast_jit(step)

    with traced_as_on(platform):
        steps = [fast_jit(js.train_step(loss, STEER)) for loss in losses]
        dense = [dense_step(loss) for loss in losses]
        turns = [0, 1, 1, 2, 2]
        ahead = []
        for n, batch in zip(turns, zip(IDS % 20, LABELS, strict=True), strict=False):
            params, state, value = steps[n](params, state, *batch)
            wanted, truth, value_now = dense[n](wanted, truth, *batch)
            np.testing.assert_allclose(value, value_now, rtol=1e-4)
            ahead.append(int(jnp.argmax(params["w"])))
    assert ahead[:2] == [0, 0] and ahead[-1] > 0  # it has moved on in the steps it missed
    assert_close(STEER.flush(params, state)[0], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_rows_that_no_gradient_comes_into_catch_up_too():
    """A table is looked up, and looked up once more behind stop_gradient, or for aux."""

    def loss(params, ids, labels):
        stopped = jax.lax.stop_gradient(params["a"])[ids[::-1] + 1]
        value = jnp.mean(((params["a"][ids] * stopped).sum(1) - labels) ** 2)
        value += jnp.mean(params["b"][ids])
        return value, params["b"][ids + 2].sum()

    def dense_step(carry, batch):
        params, state = carry
        (value, aux), grads = jax.value_and_grad(loss, has_aux=True)(params, *batch)
        updates, state = OPTAX.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), (value, aux)

    def exact_step(carry, batch):
        *carry, value, aux = js.train_step(loss, EXACT, has_aux=True)(*carry, *batch)
        return tuple(carry), (value, aux)

    @fast_jit
    def both(params, *batches):
        exact = jax.lax.scan(exact_step, (params, EXACT.init(params)), batches)[1]
        return exact, jax.lax.scan(dense_step, (params, OPTAX.init(params)), batches)[1]

    assert_close(*both(PARAMS, IDS[:9], LABELS[:9]), rtol=1e-4)


def test_small_tables_may_be_dense_in_some_batches():
    step = js.train_step(loss, EXACT, sparse="if_smaller")
    compiled, params, state = fast_jit(step), PARAMS, EXACT.init(PARAMS)
    wide = np.tile(np.arange(V), 2)
    for ids in (IDS[0], wide, IDS[1], wide):
        params, state, value = compiled(params, state, ids, np.zeros(ids.shape, np.float32))
        assert np.isfinite(value)


FROZEN = {"a": lambda rows: rows < 9, "w": None}
#: An optimizer, and how many arrays as large as the table it steps.
HELD = {
    "alone": (js.adam(0.03, untouched="exact"), 3),
    "reads params": (js.lion(0.03, weight_decay=0.1, untouched="exact"), 2),
    "clipped": (optim.chain(optim.clip_by_global_norm(0.5), EXACT), 2),
    "averaged": (optim.chain(optim.combine_duplicates("mean"), EXACT), 2),
    "apart": (optim.partition({"x": EXACT, "y": js.sgd(0.1)}, {"a": "x", "w": "y"}), 2),
    "frozen": (optim.freeze_rows(EXACT, FROZEN), 2),
    "put together": (
        js.GradientTransformation(
            EXACT.init,
            EXACT.update,
            EXACT.catch_up,
            EXACT.flush,
            apply=EXACT.apply,
        ),
        2,
    ),
}


@pytest.mark.parametrize(
    ["name", "platform"],
    slow_unless(
        [(name, each) for name in HELD for each in ("cpu", "tpu")], ("apart", "tpu").__eq__
    ),
)
def test_rows_are_written_once(name, platform):
    """The table's and its state's, whatever stands around the optimizer."""
    tx, writes = HELD[name]
    step = as_users(js.train_step(of_one_table, tx), donate_argnums=(0, 1))
    params = {name: PARAMS[name] for name in ("a", "w")}
    mine, other = copied((params, tx.init(params))), (params, tx.init(params))
    with traced_as_on(platform):
        step = step.lower(*mine, IDS[0], LABELS[0]).compile()
    written = re.findall(rf"= f32\[{V},{D}\]\S* scatter\(", step.as_text())
    assert len(written) == writes
    hand = fast_jit(functools.partial(by_hand, of_one_table, tx))
    for batch in zip(IDS[:6], LABELS, strict=False):
        mine, other = step(*mine, *batch)[:2], hand(*other, *batch)[:2]
    assert_close(mine, other, rtol=1e-5)


@pytest.mark.parametrize("name", slow_but_first("apart", "after another"))
def test_an_exact_optimizer_beside_a_lazy_one(name):
    """Both of tables that are looked up."""
    tx = {
        "apart": optim.partition(
            {"x": EXACT, "y": js.adam(0.1)}, {"a": "x", "b": "y", "w": "y"}
        ),
        "after another": optim.chain(js.sgd(0.5), EXACT),
    }[name]
    mine = other = PARAMS, tx.init(PARAMS)
    step = fast_jit(js.train_step(loss, tx))
    hand = fast_jit(functools.partial(by_hand, loss, tx))
    for batch in zip(IDS[:4], LABELS, strict=False):
        mine, other = step(*mine, *batch)[:2], hand(*other, *batch)[:2]
    assert_close(mine, other)


def reads_of_all_kinds(params, ids):
    """Of tables, in loops, branches and checkpoints; some out of range."""
    squares = lambda table, ids: (jnp.tanh(table[ids]) ** 2).sum()  # noqa: E731
    value = jax.lax.cond(
        ids[0] > 9, lambda: squares(params["a"], ids[1]), lambda: params["a"][ids[2]].sum()
    )
    value += jax.checkpoint(squares)(params["a"], ids[::-1] + 1) + squares(
        2 * params["b"], ids
    )
    add = lambda total, layer: (total + squares(layer, ids), None)  # noqa: E731
    value = jax.lax.scan(add, value, params["layers"])[0]
    beyond = ids.at[3:].add(V)
    for mode in ("fill", "clip"):
        value += (params["b"].at[beyond].get(mode=mode, fill_value=0.5) ** 2).sum()
    edges = jax.vmap(lambda layer: squares(layer, beyond))(params["layers"])
    return value + squares(params["a"], beyond) + edges.sum()


def as_on(platform, name, options, rate):
    """The last parameters and the losses, and their derivative by the learning rate."""
    part = PARAMS["a"][:48]  # which the tiles of a TPU divide
    params = {**PARAMS, "layers": jnp.stack([part, 1 - part])}

    def run(rate):
        tx = getattr(js, name)(rate, **options, untouched="exact")
        step = js.train_step(reads_of_all_kinds, tx)

        def body(carry, ids):
            *carry, value = step(*carry, ids)
            return tuple(carry), value

        end, values = jax.lax.scan(body, (params, tx.init(params)), IDS[:6] % (V - 10))
        return tx.flush(*end)[0], values

    with traced_as_on(platform):
        return fast_jit(lambda rate: jax.jvp(run, (rate,), (1.0,)))(rate)


@pytest.mark.slow
@pytest.mark.parametrize(
    ["name", "options"],
    [("sgd", {"momentum": 0.9}), ("adamw", {"eps_root": 1e-6})],
)
def test_rows_that_are_read_aside_are_those_of_the_table(name, options):
    """As on a TPU and as on a CPU, also what follows from the learning rate."""
    found, wanted = (as_on(platform, name, options, 0.01) for platform in ("tpu", "cpu"))
    assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_the_state_of_any_optimizer_catches_up_in_the_step():
    names = {
        "partial_rowwise_adam": {},
        "rmsprop": {"momentum": 0.9, "centered": True},
        "proximal_adagrad": {"l1_regularization_strength": 0.01},
    }
    one_table = lambda table, ids: (table[ids] ** 2).sum()  # noqa: E731

    def hand(tx, table, state, ids):
        table, state = tx.catch_up(table, state, ids)
        return tx.apply(js.grad(one_table)(table, ids), state, table)

    @fast_jit
    def run(ids):
        results = []
        for name, options in names.items():
            options = {"learning_rate": 0.1, "untouched": "exact", **options}
            tx = getattr(js, name)(**options)
            start = PARAMS["b"], tx.init(PARAMS["b"])
            for step in (js.train_step(one_table, tx), functools.partial(hand, tx)):
                body = lambda x, ids: (step(*x, ids)[:2], None)  # noqa: E731, B023
                results.append(jax.lax.scan(body, start, ids)[0])
        return results

    results = run(IDS[:9])
    assert_close(results[::2], results[1::2], rtol=1e-6)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(AxisType.Auto, marks=pytest.mark.slow), AxisType.Explicit],
    ids=lambda kind: kind.name,
)
def test_on_a_mesh(kind):
    if jax.device_count() < 8:
        pytest.skip("needs eight devices")
    mesh = jax.make_mesh((8,), ("x",), axis_types=(kind,))
    put = lambda x, *spec: jax.device_put(  # noqa: E731
        x, NamedSharding(mesh, PartitionSpec(*spec))
    )
    start = {"table": np.asarray(PARAMS["a"])[:48], "w": PARAMS["w"]}

    def loss(params, ids, labels):
        rows = js.embedding_lookup(params["table"], ids, mode="clip")
        return jnp.mean((rows @ params["w"] - labels) ** 2)

    def run(params, ids, labels, **options):
        step = js.train_step(loss, EXACT, **options)

        def scanned(carry, batch):
            *carry, value = step(*carry, *batch)
            return tuple(carry), value

        carry = params, EXACT.init(params)
        carry, values = jax.lax.scan(scanned, carry, (ids, labels))
        return EXACT.flush(*carry)[0], values

    wanted = fast_jit(run)(start, IDS[:5], LABELS[:5])
    params = {"table": put(start["table"], "x"), "w": put(start["w"])}
    exchange = {"table": js.Exchange("x")}
    with jax.set_mesh(mesh):
        run_there = fast_jit(functools.partial(run, exchange=exchange))
        found = run_there(params, put(IDS[:5], None, "x"), put(LABELS[:5], None, "x"))
    assert found[0]["table"].sharding.spec[0] == "x"
    assert_close(jax.device_get(found), jax.device_get(wanted), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_in_a_shard_map_with_tables_of_each_devices_own():
    if jax.device_count() < 8:
        pytest.skip("needs eight devices")
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    tables, ids = np.stack([PARAMS["a"] + i for i in range(8)]), IDS[:8]
    step = js.train_step(squares, EXACT)

    def steps(table, ids):
        state = jax.tree.map(lambda x: x + 0 * ids[0], EXACT.init(table))
        table, state, _ = step(table, state, ids)
        return step(table, state, ids + 1)[0]

    of_one = lambda table, ids: steps(table[0], ids[0])[None]  # noqa: E731
    split = PartitionSpec("x")
    run = jax.shard_map(of_one, mesh=mesh, in_specs=(split, split), out_specs=split)
    found = fast_jit(run)(tables, ids)
    assert_close(found, np.stack(jax.lax.map(lambda x: steps(*x), (tables, ids))))


def test_is_in_place():
    V = 200_000
    params = {"a": jnp.ones((V, D)), "b": jnp.ones((V, 1)), "w": jnp.ones(D)}
    step = js.train_step(loss, EXACT)
    args = params, EXACT.init(params), IDS[0], LABELS[0]
    js.testing.assert_in_place(step, *args, donate_argnums=(0, 1), min_bytes=V)  # clocks
    table = jnp.ones((5000, 64))  # all rows do the step
    args = table, EXACT.init(table), jnp.zeros(5000, jnp.int32)
    step = js.train_step(squares, EXACT)
    js.testing.assert_in_place(step, *args, donate_argnums=(0, 1))


@pytest.mark.slow
def test_in_a_trainer_that_names_what_it_donates_and_keeps_the_state_first():
    """And returns logits, as in docs/trainers.md."""

    def loss(params, ids):
        logits = params["t"][ids] @ params["w"]
        return (logits**2).mean(), logits

    params = {"t": jnp.ones((300, 4)), "w": jnp.ones((4, 3))}
    tx, ids = js.adam(0.1, untouched="exact"), jnp.array([1, 3, 1])
    step = js.train_step(loss, tx, has_aux=True)
    named = jax.jit(step, donate_argnames=("params", "state"))

    @functools.partial(jax.jit, donate_argnames=("params", "state"))
    def state_first(state, params, ids):
        return step(params, state, ids)[1::-1]

    undonated = jax.jit(step)
    wanted, wanted_state, value, logits = undonated(params, tx.init(params), ids)
    wanted, *_ = undonated(wanted, wanted_state, ids)
    old, state = params["t"], tx.init(params)
    params, state, again, same = named(params=params, state=state, ids=ids)
    assert old.is_deleted() and same.shape == (3, 3)
    assert_close([again, same], [value, logits], rtol=1e-6)
    state, params = state_first(state, params, ids)
    assert_close(params, wanted, rtol=1e-6)
    with pytest.raises(TypeError, match=r"got a state first, wanted step\(params, state"):
        named(state, params, ids)


@pytest.mark.parametrize(
    "rate", slow_but_first(0.01, optax.linear_schedule(0.02, 0.005, 9))
)
def test_ids_may_follow_from_rows_of_the_table_itself(rate):
    """Which are those of the table as it is now, also if they get no gradient."""

    def walk(params, ids):
        code = jnp.abs(40 * params["a"][ids].sum(axis=-1)).astype(jnp.int32) % V
        nearest = jnp.argmax(params["b"][ids] @ params["a"][:9].T, axis=-1)
        return (params["a"][code] ** 2).sum() + (params["b"][nearest] @ params["w"]).sum()

    own = js.sgd(rate, weight_decay=0.1, untouched="exact")
    dense = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(rate))
    rng = np.random.default_rng(0)
    shapes = {"a": (V, D), "b": (V, D), "w": (D,)}
    params = {k: jnp.asarray(rng.normal(size=x), jnp.float32) for k, x in shapes.items()}
    other, state, theirs = params, own.init(params), dense.init(params)
    step = fast_jit(js.train_step(walk, own))
    in_full = fast_jit(jax.value_and_grad(walk))
    for ids in rng.integers(0, V, (12, 3)):
        params, state, value = step(params, state, ids)
        wanted, grads = in_full(other, ids)
        np.testing.assert_allclose(value, wanted, rtol=1e-4)
        updates, theirs = dense.update(grads, theirs, other)
        other = optax.apply_updates(other, updates)
    assert_close(own.now(params, state), other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tx", slow_but_first(LAZY, EXACT), ids=["lazy", "exact"])
def test_complex_parameters_go_downhill(tx):
    """As those of a dense program that conjugates its gradients."""
    target = jnp.exp(1j * jnp.arange(V))
    start = {"a": jnp.zeros((V, 2), complex), "w": jnp.ones(2, complex)}

    def loss(params, ids):
        return (abs(params["a"][ids] @ params["w"] - target[ids]) ** 2).mean()

    def dense_step(params, state, ids):
        value, grads = jax.value_and_grad(loss)(params, ids)
        updates, state = OPTAX.update(jax.tree.map(jnp.conj, grads), state, params)
        return optax.apply_updates(params, updates), state, value

    step, dense_step = fast_jit(js.train_step(loss, tx)), fast_jit(dense_step)
    mine, truth = (start, tx.init(start)), (start, OPTAX.init(start))
    for ids in IDS[:6] if tx is EXACT else [np.arange(V)] * 6:
        *mine, value = step(*mine, ids)
        *truth, wanted = dense_step(*truth, ids)
        np.testing.assert_allclose(value, wanted, rtol=1e-4)
    assert_close(tx.flush(*mine)[0], truth[0], rtol=1e-4, atol=1e-5)


def test_refuses_what_is_no_loss_and_no_optimizer():
    with pytest.raises(TypeError, match="expected a function"):
        js.train_step(3, EXACT)
    for tx, instead in (
        (optax.adam(0.1), r"got optax.chain; type jslices\.adam for optax.adam"),
        (
            optax.partition({0: LAZY}, lambda p: jax.tree.map(lambda x: 0, p)),
            r"got optax.partition; type jslices\.optim\.partition$",
        ),
        (optax.apply_if_finite(LAZY, 3), r"lax\.cond with jslices\.all_finite"),
        (optax.inject_hyperparams(js.adam)(0.1), "with rate as an argument"),
        (optax.scale_by_adam(), r"got Gradient.*jslices\.from_optax"),
    ):
        with pytest.raises(TypeError, match=instead):
            js.train_step(loss, tx)
    state = EXACT.init(PARAMS)
    for first in (state, (state, ())):
        with pytest.raises(TypeError, match=r"wanted step\(params, state, \*batch\)"):
            js.train_step(loss, EXACT)(first, PARAMS, IDS[0], LABELS[0])
    step = js.train_step(lambda p, i, y: p["a"][i], EXACT)
    with pytest.raises(TypeError, match="must return a scalar"):
        step(PARAMS, EXACT.init(PARAMS), IDS[0], LABELS[0])


def test_an_own_wrapper_that_passes_a_catch_up_on_is_read_by_rows():
    tx, seen = EXACT, []

    def catch_up(params, state, ids):
        seen.append(ids)
        return tx.catch_up(params, state, ids)

    own = js.GradientTransformation(tx.init, tx.update, catch_up, tx.flush)
    table, ids = np.ones((5, 2), np.float32), np.array([1, 3])
    state = tx.apply(js.grad(squares)(table, ids), tx.init(table), jnp.array(table))[1]
    for of in (js.train_step, js.eval_step):
        got, wanted = (fast_jit(of(squares, x))(table, state, ids + 1) for x in (own, tx))
        assert_close(got, wanted)
    assert {x for x in seen} == {True, None}  # all as they are now; none is written
    shape = jnp.zeros((10**6, 8))
    loss = lambda table: squares(own.now(table, state), ids)  # noqa: E731
    assert isinstance(jax.eval_shape(js.grad(loss), shape[:5, :2]), js.IndexedSlices)


def test_an_own_optimizer_needs_a_catch_up_alone():
    """Of rows that shrink in each step: what it knows of them is by row, and not ours."""
    left = lambda last, count: 0.5 ** (count - last)[:, None]  # noqa: E731

    def catch_up(params, state, ids):
        last, count = state
        if ids is None:
            return params, state
        rows = jnp.arange(len(params)) if ids is True else ids
        moved = params.at[rows].set((left(last, count) * params)[rows])
        return moved, (last.at[rows].set(count), count)

    def update(grads, state, params):
        last, count = state
        rows = grads.with_values(-0.5 * params[grads.indices] - grads.values)
        return rows, (last.at[grads.indices].set(count + 1), count + 1)

    init = lambda table: (jnp.zeros(len(table), jnp.int32), jnp.zeros((), jnp.int32))  # noqa: E731
    tx, table = js.GradientTransformation(init, update, catch_up), jnp.ones((5, 2))
    loss, wanted, state = lambda table, ids: table[ids].sum(), table, init(table)
    step = fast_jit(js.train_step(loss, tx))
    for ids in jnp.array([[0, 2], [2, 3]]):
        table, state, value = step(table, state, ids)
        np.testing.assert_allclose(value, loss(wanted, ids))
        wanted = 0.5 * wanted - jax.grad(loss)(wanted, ids)
    assert_close(js.eval_step(jnp.copy, tx)(table, state), wanted)
    assert_close(tx.now(table, state), wanted)
    by_now = jax.grad(lambda table: loss(tx.now(table, state), jnp.array([1])))(table)
    assert_close(by_now, jnp.zeros((5, 2)).at[1].set(1.0))


def codes_of(params, ids):
    return jnp.argmax(jax.lax.stop_gradient(params["code"][ids]), -1)


def scaled(params, ids):
    return (ids * jax.lax.stop_gradient(params["scale"][0])).astype(int) % 8


def places(params, ids):
    return (3 * jax.lax.stop_gradient(params["t"][ids]).sum(-1)).astype(int) % 8


#: Row numbers of one array, or of two, that follow from rows of another.
FOLLOWING = {
    "codes": lambda params, ids: (codes_of(params, ids), ids),
    "a scale": lambda params, ids: (scaled(params, ids), ids),
    "codes at scaled ids": lambda params, ids: (codes_of(params, scaled(params, ids)), ids),
    "each from the other": lambda params, ids: (codes_of(params, ids), places(params, ids)),
}


@pytest.mark.parametrize(
    "name", slow_unless([(x,) for x in FOLLOWING], lambda case: case[0] == "codes")
)
def test_row_numbers_may_follow_from_rows_of_another_array(name):
    rng = np.random.default_rng(0)
    start = {
        "t": rng.normal(size=(8, 2)).astype("f"),
        "code": rng.normal(size=(8, 8)).astype("f") / 9,
        "scale": np.array([1.2], "f"),
    }
    batches = rng.integers(0, 8, (9, 3))

    def loss(params, ids):
        rows, others = FOLLOWING[name](params, ids)
        moved = ((params["t"][rows] - 1) ** 2).sum() + (params["scale"][0] - 0.5) ** 2
        return moved + ((params["code"][others] - jnp.arange(8.0)[None] / 9) ** 2).sum()

    tx = js.sgd(0.05, momentum=0.9, untouched="exact")
    step, dense = js.train_step(loss, tx), optax.sgd(0.05, momentum=0.9)

    @fast_jit
    def run(params):
        def both(carry, ids):
            mine, (wanted, state) = carry
            updates, state = dense.update(jax.grad(loss)(wanted, ids), state, wanted)
            wanted = optax.apply_updates(wanted, updates)
            return (step(*mine, ids)[:2], (wanted, state)), None

        carry = (params, tx.init(params)), (params, dense.init(params))
        (mine, (wanted, _)), _ = jax.lax.scan(both, carry, batches)
        return tx.flush(*mine)[0], wanted

    params, wanted = run(start)
    assert_close(params, wanted, 1e-5, 1e-5)
    ids = js.lookup_ids(loss)(start, batches[0])
    assert ids["t"][:3].tolist() == FOLLOWING[name](start, batches[0])[0].tolist()
