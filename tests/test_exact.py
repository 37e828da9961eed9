"""untouched="exact": rows that catch up are where a dense optimizer has them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, fast_jit, golden, numpy_dense, slow_but_first, slow_unless
from optimizers import label

import jslices as js

V, D, K, STEPS = 120, 3, 12, 250
RNG = np.random.default_rng(0)
START = jax.device_put(RNG.normal(size=(V, D)).astype(np.float32))
ZIPF = 1 / np.arange(1, V + 1) ** 1.05
ZIPF[-3:] = 0  # rows that are never touched
IDS = RNG.choice(V, size=(STEPS, K), p=ZIPF / ZIPF.sum()).astype(np.int32)
ROWS = RNG.normal(size=(STEPS, K, D)).astype(np.float32)
COSINE = optax.cosine_decay_schedule(0.1, STEPS + 50)
JUMPS = optax.piecewise_constant_schedule(0.1, {60: 0.1, 120: 5.0})

# Largest error over largest movement, against float32 Optax with its own rounding.
CASES = [
    ("sgd", {"momentum": 0.9}, 1e-5),
    ("sgd", {"momentum": 0.99, "nesterov": True}, 1e-5),
    ("adam", {}, 1e-5),
    ("adam", {"nesterov": True}, 1e-5),
    ("adam", {"b1": 0.8, "b2": 0.95, "eps_root": 1e-4, "eps": 0.1}, 1e-3),
    ("adamw", {}, 1e-5),
    ("adamw", {"weight_decay": 0.1, "nesterov": True}, 1e-5),
    ("amsgrad", {}, 1e-5),
    ("amsgrad", {"bias_correction_mu": False}, 1e-5),
    ("lion", {}, 1e-5),
    ("lion", {"weight_decay": 0.0}, 1e-5),
    ("lion", {"weight_decay": 0.1}, 1e-5),
    ("rmsprop", {}, 1e-5),
    ("rmsprop", {"momentum": 0.9, "nesterov": True}, 1e-5),
    ("rmsprop", {"centered": True, "bias_correction": True, "eps": 1e-2}, 1e-4),
    ("adadelta", {"rho": 0.8}, 1e-5),
]
FIRST = [*{case[0]: case for case in reversed(CASES)}.values()][::-1]
DECAYING = [case for case in CASES if case[1].get("weight_decay")]
THREE = [("sgd", {"momentum": 0.9}), ("adam", {}), ("adamw", {})]


# A schedule is numbers of the clock that all optimizers share: some settings have one. Adam
# does what AdamW does.
SMOOTH = [case for case in FIRST if case[0] == "rmsprop"]
SMOOTH += [case for case in CASES if "bias_correction_mu" in case[1]]
JUMPING = [CASES[0], *DECAYING]
RATES = [
    *((*case, 0.1) for case in CASES if case in FIRST or case not in SMOOTH + JUMPING),
    *((*case, COSINE) for case in SMOOTH),
    *((*case, JUMPS) for case in JUMPING),
]
#: One optimizer of each kind, and a schedule.
QUICK = [(*case, 0.1) for case in FIRST if case[0] == "adam"]
QUICK += [(*case, COSINE) for case in FIRST if case[0] == "rmsprop"]


def train_dense(tx, start=START):
    def step(carry, batch):
        params, state = carry
        ids, rows = batch
        grads = jnp.zeros_like(params).at[ids].add(rows.astype(params.dtype))
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    run = lambda: jax.lax.scan(step, (start, tx.init(start)), (IDS, ROWS))[0]  # noqa: E731
    return fast_jit(run)()[0]


def catch_up_and_step(tx, params, state, ids, rows):
    """One step of a program that trains with ``untouched="exact"``."""
    params, state = tx.catch_up(params, state, ids)
    grads = js.IndexedSlices(rows.astype(params.dtype), ids, params.shape)
    updates, state = tx.update(grads, state, params)
    return js.apply_updates(params, updates), state


@functools.cache
def compiled(tx):
    """That step, and ``tx.flush``."""
    step = lambda *args: catch_up_and_step(tx, *args)  # noqa: E731
    return fast_jit(step), fast_jit(tx.flush)


ADAM = js.adam(0.1, untouched="exact")


def train_rows(tx, jit=fast_jit, start=START):
    step = lambda carry, batch: (catch_up_and_step(tx, *carry, *batch), None)  # noqa: E731
    run = lambda: jax.lax.scan(step, (start, tx.init(start)), (IDS, ROWS))[0]  # noqa: E731
    return jit(run)()


def relative_error(got, wanted):
    got, wanted = np.asarray(got), np.asarray(wanted)
    return np.abs(got - wanted).max() / np.abs(wanted - START).max()


@pytest.mark.parametrize(
    "name, kwargs, tolerance, rate", slow_unless(RATES, QUICK.__contains__), ids=label
)
def test_equals_dense_optax(name, kwargs, tolerance, rate):
    if name == "adadelta":
        rate = 10.0  # its steps are tiny
    tx = getattr(js, name)(rate, untouched="exact", **kwargs)
    # Good machine code for three of them: the rest is compiled in half the time.
    jit = jax.jit if (name, kwargs) in THREE and not callable(rate) else fast_jit
    flush = jit(tx.flush)
    params, state = flush(*train_rows(tx, jit))
    wanted = train_dense(getattr(optax, name)(rate, **kwargs))
    looser = 10 if callable(rate) else 1
    assert relative_error(params, wanted) < tolerance * looser
    np.testing.assert_array_equal(state.clock.last, STEPS)
    # Up to date: flushing once more changes nothing, to the bit.
    again, _ = flush(params, state)
    np.testing.assert_array_equal(again, params)


# With an eps that is nothing against the root: what it adds is not closed.
NO_EPS = {"eps": 1e-16}
WIDE = [
    ("sgd", {"momentum": 0.9, "nesterov": True}, COSINE),
    ("adam", NO_EPS, 0.1),
    ("adamw", {**NO_EPS, "weight_decay": 0.1}, COSINE),
    ("adamw", {**NO_EPS, "weight_decay": COSINE, "nesterov": True}, 0.1),
    ("amsgrad", {}, COSINE),
    ("lion", {"weight_decay": 0.1}, COSINE),
    ("rmsprop", {"momentum": 0.9}, 0.1),
    ("adadelta", {"rho": 0.8}, COSINE),
    ("partial_rowwise_adam", NO_EPS, COSINE),
    ("partial_rowwise_adam", {**NO_EPS, "weight_decay": 0.1}, COSINE),
    ("rowwise_adagrad", {"weight_decay": COSINE}, 0.1),
    ("proximal_adagrad", {"l2_regularization_strength": 0.05}, 0.1),
]


@pytest.mark.parametrize(
    "name, kwargs, rate",
    slow_unless(WIDE, lambda case: case[0] == "adam"),
    ids=label,
)
def test_tables_of_64_bits_are_exact_to_64_bits(name, kwargs, rate):
    tx = getattr(js, name)(rate, untouched="exact", **kwargs)
    dense = getattr(optax if hasattr(optax, name) else js, name)(rate, **kwargs)
    with jax.enable_x64(True):
        start = START.astype(jnp.float64)
        params, _ = fast_jit(tx.flush)(*train_rows(tx, start=start))
        assert params.dtype == jnp.float64
        assert relative_error(params, train_dense(dense, start)) < 1e-12


@pytest.mark.slow
def test_tables_of_32_and_64_bits_in_one_tree():
    tx, few = js.adam(COSINE, untouched="exact", **NO_EPS), slice(6)

    def step(carry, batch):
        ids, rows = batch
        params, state = tx.catch_up(*carry, dict.fromkeys(carry[0], ids))
        grad = lambda p: js.IndexedSlices(rows.astype(p.dtype), ids, p.shape)  # noqa: E731
        return tx.apply(jax.tree.map(grad, params), state, params), None

    with jax.enable_x64(True):
        params = {"wide": START.astype(jnp.float64), "narrow": START}
        state, dtypes = tx.init(params), functools.partial(jax.tree.map, lambda x: x.dtype)
        run = lambda *carry: jax.lax.scan(step, carry, (IDS[few], ROWS[few]))[0]  # noqa: E731
        new, new_state = fast_jit(lambda *carry: tx.flush(*run(*carry)))(params, state)
        assert dtypes(new_state) == dtypes(state) and dtypes(new) == dtypes(params)
        assert_close(new["narrow"], new["wide"].astype(jnp.float32), 1e-5, 1e-5)


def test_lazy_does_not():
    """So that the test above can fail."""
    lazy = js.adam(0.1)
    assert relative_error(train_rows(lazy)[0], train_dense(optax.adam(0.1))) > 1e-2
    unflushed = train_rows(ADAM)[0]
    assert relative_error(unflushed, train_dense(optax.adam(0.1))) > 1e-3


@pytest.mark.parametrize(
    "name, kwargs, rate",
    slow_unless(
        [
            ("partial_rowwise_adam", {}, 0.1),
            ("partial_rowwise_adam", {"weight_decay": 0.1}, COSINE),
            ("rowwise_adagrad", {"weight_decay": 0.1}, JUMPS),
            ("sgd", {"weight_decay": 0.1}, JUMPS),
        ],
        lambda case: case[0] == "rowwise_adagrad",
    ),
    ids=label,
)
def test_row_wise_optimizers_equal_themselves_on_dense_gradients(name, kwargs, rate):
    tx = getattr(js, name)(rate, untouched="exact", **kwargs)
    params, _ = fast_jit(tx.flush)(*train_rows(tx))
    wanted = train_dense(getattr(js, name)(rate, **kwargs))
    assert relative_error(params, wanted) < 1e-5


@pytest.mark.parametrize(
    ["kwargs"],
    slow_unless(
        [({"eps": 1e-8},), ({"eps": 0.1, "b1": 0.8, "b2": 0.95, "eps_root": 1e-4},)],
        lambda case: "b1" in case[0],
    ),
)
def test_adam_with_epsilon_hat_equals_itself_on_dense_gradients(kwargs):
    tx = js.adam(0.1, eps_hat=True, untouched="exact", **kwargs)
    params, _ = fast_jit(tx.flush)(*train_rows(tx))
    wanted = train_dense(js.adam(0.1, eps_hat=True, **kwargs))
    assert relative_error(params, wanted) < (1e-5 if kwargs == {"eps": 1e-8} else 1e-3)


@pytest.mark.parametrize("l2", slow_but_first(0.0, 0.05))
def test_proximal_adagrad_equals_itself_on_dense_gradients(l2):
    strengths = {"l1_regularization_strength": 0.02, "l2_regularization_strength": l2}
    rate = 0.1 if l2 else COSINE
    tx = js.proximal_adagrad(rate, untouched="exact", **strengths)
    params, _ = fast_jit(tx.flush)(*train_rows(tx))
    wanted = train_dense(js.proximal_adagrad(rate, **strengths))
    assert relative_error(params, wanted) < 2e-5
    assert (np.asarray(wanted) == 0).any()  # the pull reaches zero, and stays


def test_proximal_adagrad_equals_tensorflow_on_dense_gradients():
    section = golden("optimizers")
    wanted = section["ProximalAdagrad(0.1,l1=.01,l2=.02)"]["dense"][-1]["w"]
    tx = js.proximal_adagrad(
        0.1,
        l1_regularization_strength=0.01,
        l2_regularization_strength=0.02,
        untouched="exact",
    )
    params, (step, flush) = section["_w0"], compiled(tx)
    state = tx.init(params)
    for inputs in section["_steps"]:
        empty = 6 - len(inputs["indices"])  # one shape, one compilation
        ids = np.pad(inputs["indices"], (0, empty), constant_values=len(params))
        rows = np.pad(inputs["values"], ((0, empty), (0, 0)))
        params, state = step(params, state, ids, rows)
    params, _ = flush(params, state)
    np.testing.assert_allclose(params, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_derivatives_by_the_learning_rate_are_those_of_dense_optax(name):
    """Also of rows that missed one step, all of whose quadrature is at one place."""
    few, options = slice(6), {"eps_root": 1e-6}

    def rows(rate):
        tx = getattr(js, name)(rate, **options, untouched="exact")
        step = functools.partial(catch_up_and_step, tx)
        body = lambda carry, batch: (step(*carry, *batch), None)  # noqa: E731
        carry = jax.lax.scan(body, (START, tx.init(START)), (IDS[few], ROWS[few]))[0]
        return tx.flush(*carry)[0]

    def dense(rate):
        tx = getattr(optax, name)(rate, **options)

        def body(carry, batch):
            (params, state), (ids, rows) = carry, batch
            grads = jnp.zeros_like(params).at[ids].add(rows)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(body, (START, tx.init(START)), (IDS[few], ROWS[few]))[0][0]

    @fast_jit
    def both(rate):
        return [jax.jvp(run, (rate,), (1.0,)) for run in (rows, dense)]

    assert_close(*both(0.1), rtol=1e-4, atol=1e-5)


def test_closer_to_the_truth_than_float32_optax():
    """A sum that is closed rounds less often than one that is stepped through."""
    with jax.enable_x64(True):
        truth = np.asarray(train_dense(optax.adamw(0.01), START.astype(jnp.float64)))
    tx = js.adamw(0.01, untouched="exact")
    ours = relative_error(fast_jit(tx.flush)(*train_rows(tx))[0], truth)
    assert ours < 2e-5
    assert ours < 2 * relative_error(train_dense(optax.adamw(0.01)), truth)


@pytest.mark.parametrize("scheduled", slow_but_first(True, False))
def test_weight_decay_of_all_rows_with_lazy_movement(scheduled):
    """FBGEMM's DECOUPLE_GLOBAL: untouched rows shrink by every step's decay, no more."""
    rate = COSINE if scheduled else 0.1
    tx = js.adamw(rate, weight_decay=0.05, weight_decay_mode="all")
    params, state = START, tx.init(START)
    step, flush = compiled(tx)
    for k in range(4):
        params, state = step(params, state, np.array([1, 2]), ROWS[k, :2])
    params, state, start = jax.device_get((*flush(params, state), START))
    left = np.prod([1 - (rate(k) if scheduled else rate) * 0.05 for k in range(4)])
    np.testing.assert_allclose(params[3:], start[3:] * left, rtol=1e-6)
    assert not state.mu[3:].any()


def test_weight_decay_of_touched_rows_with_exact_movement():
    tx = js.adamw(0.1, weight_decay=0.05, untouched="exact", weight_decay_mode="touched")
    params, start = jax.device_get((fast_jit(tx.flush)(*train_rows(tx))[0], START))
    never = np.setdiff1d(np.arange(V), IDS)
    assert len(never)
    np.testing.assert_array_equal(params[never], start[never])


@pytest.mark.slow
def test_a_mask_keeps_weights_from_decaying_while_they_wait():
    params = {"table": START, "other": START}
    mask = {"table": True, "other": False}
    kwargs = {"weight_decay": 0.1, "mask": mask}
    tx = js.lion(0.1, untouched="exact", **kwargs)
    dense_tx = optax.lion(0.1, **kwargs)
    state, dense_state, wanted = tx.init(params), dense_tx.init(params), params

    @fast_jit
    def step(params, state, ids, rows):
        params, state = tx.catch_up(params, state, {"table": ids, "other": ids})
        grads = js.IndexedSlices(rows, ids, (V, D))
        updates, state = tx.update({"table": grads, "other": grads}, state, params)
        return js.apply_updates(params, updates), state

    @fast_jit
    def dense_step(params, state, grad):
        updates, state = dense_tx.update({"table": grad, "other": grad}, state, params)
        return optax.apply_updates(params, updates), state

    for k in range(12):
        params, state = step(params, state, IDS[k], ROWS[k])
        dense = numpy_dense(ROWS[k], IDS[k], (V, D))
        wanted, dense_state = dense_step(wanted, dense_state, dense)
    params, _ = fast_jit(tx.flush)(params, state)
    for name in mask:
        np.testing.assert_allclose(params[name], wanted[name], rtol=2e-5, atol=2e-6)


@pytest.mark.slow
def test_gaps_beyond_the_window():
    """What is left is what the row was told when it was last; Adam's window: 197 steps."""
    ids, rows, missed = jnp.array([3]), jnp.ones((1, D)), 1500
    for rate in (0.01, optax.cosine_decay_schedule(0.01, missed + 300)):
        tx, dense_tx = js.adam(rate, untouched="exact"), optax.adam(rate)

        def ours(tx=tx):
            grads = js.IndexedSlices(rows, ids, (V, D))
            updates, state = tx.update(grads, tx.init(START), START)
            params = js.apply_updates(START, updates)
            # Steps that touch another row.
            other = js.IndexedSlices(0 * rows, ids + 1, (V, D))

            def step(carry, _):
                params, state = tx.catch_up(*carry, ids + 1)
                updates, state = tx.update(other, state, params)
                return (js.apply_updates(params, updates), state), None

            carry, _ = jax.lax.scan(step, (params, state), None, length=missed)
            return tx.catch_up(*carry, ids)[0]

        def theirs(tx=dense_tx):
            start = START.astype(jnp.float32)
            dense = jnp.zeros_like(start).at[ids].add(rows)

            def step(carry, k):
                params, state = carry
                updates, state = tx.update(jnp.where(k == 0, dense, 0), state, params)
                return (optax.apply_updates(params, updates), state), None

            return jax.lax.scan(step, (start, tx.init(start)), jnp.arange(missed + 1))[0][0]

        got, wanted = fast_jit(ours)(), fast_jit(theirs)()
        move = np.abs(wanted[3] - START[3]).max()
        assert np.abs(got[3] - wanted[3]).max() < 1e-4 * move


def test_dense_gradients_and_scalars_stay_optax_to_the_bit():
    params = {"table": START, "w": jnp.ones(4), "scale": jnp.float32(2.0)}
    ours, theirs = js.adamw(COSINE, untouched="exact"), optax.adamw(COSINE)
    state, wanted_state = ours.init(params), theirs.init(params)
    update, wanted_update = jax.jit(ours.update), jax.jit(theirs.update)
    for k in range(3):
        grads = jax.tree.map(lambda p, k=k: jnp.sin(p + k), params)
        updates, state = update(grads, state, params)
        wanted, wanted_state = wanted_update(grads, wanted_state, params)
        jax.tree.map(np.testing.assert_array_equal, updates, wanted)


def test_rows_that_did_not_catch_up_are_noticed():
    slices = lambda *ids: js.IndexedSlices(jnp.ones((2, D)), jnp.array(ids), (V, D))  # noqa: E731
    updates, state = ADAM.update(slices(4, 1), ADAM.init(START), START)
    params = js.apply_updates(START, updates)
    message = r"row 7 did its last step at 0, the optimizer has done 1: .*tx.catch_up"
    with pytest.raises(ValueError, match=message):
        ADAM.update(slices(7, 4), state, params)
    # Under jit nothing can be raised: the row becomes NaN.
    updates, _ = fast_jit(ADAM.update)(slices(7, 4), state, params)
    new = js.apply_updates(params, updates)
    assert np.isnan(new[7]).all() and not np.isnan(new[jnp.array([1, 4])]).any()
    with pytest.raises(ValueError, match="row 0 did its last step at 0"):
        ADAM.update(jnp.ones((V, D)), state, params)  # every row, then
    # Those that did are not.
    params, state = ADAM.catch_up(params, state, jnp.array([[7, 7]]))
    ADAM.update(slices(7, 4), state, params)


def test_a_step_on_known_numbers_inside_of_a_trace():
    """As optax.apply_if_finite runs it, in a branch of lax.cond."""
    grads, state = js.IndexedSlices(ROWS[0], IDS[0], (V, D)), ADAM.init(START)
    got = jax.lax.cond(True, lambda: ADAM.update(grads, state, START)[0], lambda: grads)
    wanted, _ = fast_jit(ADAM.update)(grads, state, START)
    np.testing.assert_allclose(got.to_dense(), wanted.to_dense(), rtol=1e-5)
    guarded = optax.apply_if_finite(ADAM, 3)
    updates, _ = guarded.update(grads, guarded.init(START), START)
    np.testing.assert_allclose(updates.to_dense(), wanted.to_dense(), rtol=1e-5)


@pytest.mark.parametrize(
    "tx",
    slow_but_first(
        js.optim.chain(js.optim.clip(0.5), js.sgd(0.1, momentum=0.9, untouched="exact")),
        ADAM,
        js.adamw(optax.linear_schedule(0.1, 0.0, 50), untouched="exact"),
    ),
    ids=["chain", "adam", "adamw"],
)
def test_gradients_at_rows_as_they_are_now_step_as_if_these_had_caught_up(tx):
    """By ``apply``, and by ``update`` and ``apply_updates``; nothing was written before."""
    table = np.random.default_rng(3).normal(size=(9, 2)).astype(np.float32)
    squares = lambda table, ids: (table[ids] ** 2).sum()  # noqa: E731

    @fast_jit
    def reading(table, state, ids):
        loss = lambda table: squares(tx.now(table, state), ids)  # noqa: E731
        value, grads = js.value_and_grad(loss)(table)
        updates, other = tx.update(grads, state, table)
        new = tx.apply(grads, state, table)
        return value, new, (js.apply_updates(table, updates), other)

    @fast_jit
    def catching_up(table, state, ids):
        table, state = tx.catch_up(table, state, ids)
        value, grads = js.value_and_grad(squares)(table, ids)
        return value, tx.apply(grads, state, table)

    mine = other = table, tx.init(table)
    for ids in np.array([[1, 4, 4], [7, 1, 0], [4, 7, 4], [1, 1, 8]], np.int32):
        value, new, in_two = reading(*mine, ids)
        wanted, other = catching_up(*other, ids)
        assert_close((value, new), (wanted, other), rtol=1e-5)
        assert_close(in_two, new, rtol=1e-5)
        mine = new
    assert_close(tx.now(*mine), tx.flush(*mine)[0])


@pytest.mark.slow
def test_a_gradient_knows_whether_it_was_taken_at_rows_as_they_are_now():
    """Through arithmetic and clipping; not if some of its rows were read as they were."""
    table, ids = jnp.ones((6, 2)), jnp.array([1, 3, 1])
    state = ADAM.init(table)
    now = lambda table: ADAM.now(table, state)[ids].sum()  # noqa: E731
    grads = jax.jit(js.grad(now))(table)
    step = fast_jit(lambda grads: ADAM.apply(grads, behind(state), table)[0])
    for good in (grads, 2 * grads, js.clip_by_global_norm(grads, 1.0)[0], grads + grads):
        assert jnp.isfinite(step(good)).all()
    mixed = js.grad(lambda table: now(table) + table[ids].sum())(table)
    for stale in (js.grad(lambda table: table[ids].sum())(table), mixed):
        assert jnp.isnan(step(stale)[1]).all()
        with pytest.raises(ValueError, match="did its last step at 0"):
            ADAM.apply(stale, behind(state), table)
    updates, _ = ADAM.update(grads, behind(state), table)
    assert jnp.isnan(step(updates)[1]).all()  # which is no gradient at rows any more


def behind(state):
    """The state after another step, which no row has done."""
    rows = js.IndexedSlices(jnp.zeros((0, 2)), jnp.zeros((0,), jnp.int32), (6, 2))
    return ADAM.apply(rows, state, jnp.ones((6, 2)))[1]


def test_lazy_parameters_are_now_what_they_are():
    table = jnp.ones((3, 1))
    assert js.adam(0.1).now(table, js.adam(0.1).init(table)) is table


def test_ids_of_any_shape_and_out_of_range_ones():
    tx = js.sgd(0.1, momentum=0.9, untouched="exact")
    params = {"table": START, "w": jnp.ones(2)}
    state = tx.init(params)
    catch_up = fast_jit(tx.catch_up)
    grads = {"table": js.IndexedSlices(ROWS[0], IDS[0], (V, D)), "w": jnp.ones(2)}
    _, state = tx.update(grads, state, params)
    _, state = tx.update({"table": None, "w": jnp.ones(2)}, state, params)
    ids = jnp.array([[int(IDS[0, 0]), V + 5], [-1, int(IDS[0, 0])]])
    new, after = catch_up(params, state, {"table": ids, "w": None})
    changed = np.flatnonzero((np.asarray(new["table"]) != np.asarray(START)).any(1))
    np.testing.assert_array_equal(changed, [IDS[0, 0]])
    assert int(after.clock.last["table"][IDS[0, 0]]) == 2
    same, _ = tx.catch_up(params, state, {"table": None, "w": None})
    np.testing.assert_array_equal(same["table"], START)


def test_errors():
    tx = js.adam(0.1, untouched="exact")
    params = {"table": START, "w": jnp.float32(1.0)}
    state = tx.init(params)
    with pytest.raises(ValueError, match=r"ids must mirror params, with an array of row"):
        tx.catch_up(params, state, {"table": IDS[0]})
    with pytest.raises(
        TypeError, match=r"integer row numbers of a table, got float32\[2\]"
    ):
        tx.catch_up(params, state, {"table": jnp.ones(2), "w": None})
    rows = js.IndexedSlices(ROWS[0], IDS[0], (V, D))
    with pytest.raises(TypeError, match=r"wants row numbers, got IndexedSlices.*indices"):
        tx.catch_up(params, state, {"table": rows, "w": None})
    with pytest.raises(TypeError, match=r"for a parameter of shape \(\); pass None"):
        tx.catch_up(params, state, {"table": None, "w": IDS[0]})
    names = ("sgd", "adam", "adamw", "amsgrad", "rmsprop", "adadelta", "lion", "adagrad")
    for name in (*names, "rowwise_adagrad", "ftrl", "lamb", "adafactor"):
        with pytest.raises(ValueError, match=f'{name}.*wanted "lazy" .* or "exact"'):
            getattr(js, name)(0.1, untouched="dense")
    for name in ("ftrl", "lamb", "adafactor"):
        with pytest.raises(ValueError, match=f'{name}.*no exact form, as .*"lazy"'):
            getattr(js, name)(0.1, untouched="exact")
    with pytest.raises(ValueError, match=r"needs b1\*\*2 < b2, got b1=0.9, b2=0.5"):
        js.adam(0.1, b2=0.5, untouched="exact")
    with pytest.raises(
        ValueError, match=r"adadelta\(untouched=\"exact\"\) takes no weight"
    ):
        js.adadelta(0.1, weight_decay=0.1, untouched="exact")
    with pytest.raises(
        ValueError, match=r"strength takes a number as learning_rate, got a schedule"
    ):
        js.proximal_adagrad(COSINE, 0.1, 0.0, 0.1, untouched="exact")
    with pytest.raises(
        ValueError, match=r"takes a number for weight_decay, got a schedule"
    ):
        js.lion(0.1, weight_decay=COSINE, untouched="exact")
    with pytest.raises(ValueError, match=r"the missed movement is closed together with"):
        js.lion(0.1, untouched="exact", weight_decay_mode="touched")
    with pytest.raises(TypeError, match=r"needs b1 as known numbers.*args=\('b1',\)"):
        jax.jit(lambda b1: js.adam(0.1, b1, untouched="exact").init(START))(0.9)
    make = lambda l2: js.proximal_adagrad(0.1, 0.1, 0.0, l2, untouched="exact")  # noqa: E731
    with pytest.raises(TypeError, match=r"needs l2_regularization_strength as known"):
        jax.jit(lambda l2: make(l2).init(START))(0.1)


FROZEN = np.arange(V) % 3 == 0


def test_frozen_rows_never_move():
    tx = js.lion(COSINE, weight_decay=0.1, untouched="exact")
    tx = js.optim.freeze_rows(tx, FROZEN)
    params, state = START, tx.init(START)
    step, flush = compiled(tx)
    for k in range(4):
        params, state = step(params, state, IDS[k], ROWS[k])
    params, start = jax.device_get((flush(params, state)[0], START))
    np.testing.assert_array_equal(params[FROZEN], start[FROZEN])
    assert (params[~FROZEN] != start[~FROZEN]).any(1).all()


KINDS = {
    "exact": js.lion(0.1, weight_decay=0.5, untouched="exact"),
    "decay of all rows": js.adamw(0.1, weight_decay=0.5, weight_decay_mode="all"),
}


@pytest.mark.parametrize(
    "kind", slow_unless([(kind,) for kind in KINDS], lambda case: case[0] == "exact")
)
def test_masked_gradients_alone_do_not_freeze_rows_that_catch_up(kind):
    """They decay, as the docstring of mask_rows says; freeze_rows holds them."""
    tx = KINDS[kind]

    def train(tx):
        def step(carry, batch):
            ids, rows = batch
            params, state = tx.catch_up(*carry, ids)
            grads = js.IndexedSlices(rows, ids, (V, D))
            updates, state = tx.update(js.mask_rows(grads, ~FROZEN), state, params)
            return (js.apply_updates(params, updates), state), None

        batches = IDS[:3], ROWS[:3]
        run = fast_jit(lambda carry: tx.flush(*jax.lax.scan(step, carry, batches)[0])[0])
        return run((START, tx.init(START)))

    start, masked = np.asarray(START), np.asarray(train(tx))
    np.testing.assert_allclose(masked[FROZEN], start[FROZEN] * 0.95**3, rtol=1e-5)
    frozen = np.asarray(train(js.optim.freeze_rows(tx, FROZEN)))
    np.testing.assert_array_equal(frozen[FROZEN], start[FROZEN])
    np.testing.assert_array_equal(frozen[~FROZEN], masked[~FROZEN])


def one_row_waits(tx, steps=6):
    """Row 0 gets a gradient once, row 1 ever after."""

    def step(carry, k):
        ids = jnp.minimum(k, 1)[None]
        params, state = tx.catch_up(*carry, ids)
        grads = js.IndexedSlices(jnp.ones((1, 1)), ids, (2, 1))
        updates, state = tx.update(grads, state, params)
        return (js.apply_updates(params, updates), state), None

    @fast_jit
    def train(*carry):
        return tx.flush(*jax.lax.scan(step, carry, jnp.arange(steps))[0])[0]

    start = jnp.full((2, 1), 0.5)
    return train(start, tx.init(start))


def one_row_waits_dense(tx, steps=6):
    def step(carry, k):
        grads = jnp.zeros((2, 1)).at[jnp.minimum(k, 1)].set(1.0)
        updates, state = tx.update(grads, carry[1], carry[0])
        return (optax.apply_updates(carry[0], updates), state), None

    start = jnp.full((2, 1), 0.5)
    carry = start, tx.init(start)
    return fast_jit(lambda: jax.lax.scan(step, carry, jnp.arange(steps))[0][0])()


def climbing(step):
    return jnp.full_like(step, -0.1, jnp.float32)


def waves(step):
    return 0.05 * jnp.cos(0.9 * step)


@pytest.mark.parametrize(
    "name, rate, kwargs",
    slow_unless(
        [
            ("adamw", climbing, {"weight_decay": 0.1}),
            ("adam", waves, {}),
            ("adam", 0.1, {"b1": 0.0}),
            ("lion", 0.1, {"b1": 0.0}),
            ("lion", climbing, {"weight_decay": 0.1}),
            ("sgd", 0.1, {"momentum": 0.0}),
        ],
        ("lion", 0.1, {"b1": 0.0}).__eq__,
    ),
)
def test_odd_hyperparameters(name, rate, kwargs):
    got = one_row_waits(getattr(js, name)(rate, untouched="exact", **kwargs))
    wanted = one_row_waits_dense(getattr(optax, name)(rate, **kwargs))
    np.testing.assert_allclose(got, wanted, rtol=2e-5)


@pytest.mark.parametrize(
    "make, message",
    [
        (
            lambda **k: js.sgd(0.1, momentum=1.0, **k),
            r"sgd.*momentum at least 0 and below",
        ),
        (
            lambda **k: js.adam(0.1, b1=0.9, b2=0.82, **k),
            r"b1=0.9 and b2=0.82 have no closed form .* wanted b2 > b1",
        ),
        (lambda **k: js.lion(0.1, b2=0, **k), r"lion.* needs b2 above 0, got 0"),
    ],
)
def test_what_has_no_closed_form_is_refused(make, message):
    make()
    with pytest.raises(ValueError, match=message):
        make(untouched="exact")


@pytest.mark.slow
def test_an_array_without_gradient_for_a_step_catches_up_as_a_whole():
    tx = js.adam(0.1, untouched="exact")
    params = {"table": START, "scale": jnp.float32(1.0)}
    state = tx.init(params)
    only_scale = {"table": None, "scale": jnp.float32(1.0)}
    only_table = {"table": START, "scale": None}
    _, state = tx.update(only_scale, state, params)
    params, state = tx.catch_up(params, state, {"table": True, "scale": None})
    _, state = tx.update(only_table, state, params)
    with pytest.raises(ValueError, match=r"row 0 did its last step at 1.*tx.flush"):
        tx.update(only_scale, state, params)
    params, state = tx.catch_up(params, state, {"table": None, "scale": True})
    tx.update(only_scale, state, params)


def test_nothing_to_train():
    tx = js.adam(0.1, untouched="exact")
    params, state = tx.catch_up({}, tx.init({}), {})
    params, state = tx.flush(params, state)
    updates, _ = tx.update({}, state, params)
    assert updates == {}


def test_what_is_kept_with_rows_is_where_the_rows_are():
    mesh = jax.make_mesh((4,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    by_row = jax.P("rows")
    table = jax.device_put(jnp.ones((12, D)), jax.sharding.NamedSharding(mesh, by_row))
    tx = js.adam(0.1, untouched="exact")
    state = tx.init(table)
    totals = js.rowwise_adagrad(0.1).init(table).sum_of_squares
    for kept in (state.clock.last, totals):
        assert len(kept.sharding.device_set) == 4
    # Each device flushes its own rows.
    specs = jax.tree.map(lambda x: by_row if x.shape[:1] == (12,) else jax.P(), state)
    flush = jax.jit(
        jax.shard_map(
            tx.flush, mesh=mesh, in_specs=(by_row, specs), out_specs=(by_row, specs)
        )
    )
    assert "all-gather" not in flush.lower(table, state).compile().as_text()
    np.testing.assert_array_equal(flush(table, state)[0], table)


def test_lazy_ones_have_nothing_to_catch_up():
    tx = js.adam(0.1)
    state = tx.init(START)
    assert not tx.catches_up and state.clock is None
    assert tx.catch_up(START, state, IDS[0]) == (START, state)
    assert tx.flush(START, state) == (START, state)


def test_chain_hands_catching_up_on():
    inner = js.adam(0.1, untouched="exact")
    tx = js.optim.chain(js.optim.clip(0.5), inner)
    state = tx.init(START)
    grads = js.IndexedSlices(ROWS[0], IDS[0], (V, D))
    updates, state = tx.update(grads, state, START)
    params = js.apply_updates(START, updates)
    params, state = tx.catch_up(params, state, IDS[1])
    params, state = tx.flush(params, state)
    np.testing.assert_array_equal(state[1].clock.last, 1)
    with pytest.raises(TypeError, match="chain wants transformations"):
        js.optim.chain(0.1)


#: Links that leave rows without gradient alone; the first ones have something to do.
LINKS = [
    js.optim.combine_duplicates("mean"),
    js.optim.clip(0.5),
    js.optim.clip_rows_by_norm(0.4),
    js.optim.clip_by_global_norm(1.0),
    js.optim.clip_by_block_rms(0.05),
    js.optim.scale(2.0),
    js.optim.scale(lambda rows: jnp.where(rows < 5, 0.5, 1.0)),
    js.optim.clip(jnp.float32(9.0)),
    js.optim.masked(js.optim.clip(9.0), True),
    js.optim.partition({0: js.optim.clip_rows_by_norm(9.0)}, 0),
    js.optim.freeze_rows(js.optim.clip(9.0), np.arange(16) == 3),
    js.from_optax(optax.clip_by_global_norm(9.0)),
]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("exchange", [None, "all_to_all"])
def test_a_chain_on_a_mesh_takes_the_links_that_it_takes_on_one_device(kind, exchange):
    """There a program also says where arrays are, which is nothing that rows do."""
    start = np.asarray(START[:16])
    ids = np.array([[0, 3, 3, 1, 5, 7, 15, 2], [7, 9, 9, 4, 0, 12, 3, 8]])
    kind = getattr(jax.sharding.AxisType, kind)
    mesh = jax.make_mesh((4,), ("x",), axis_types=(kind,), devices=jax.devices()[:4])

    def loss(table, ids):
        return (js.embedding_lookup(table, ids) ** 2).sum()

    def trained(tx, place, exchange=None):
        step = js.train_step(loss, tx, exchange=exchange)

        @fast_jit
        def run(table, state, *batches):
            for ids in batches:
                table, state, _ = step(table, state, ids)
            return tx.flush(table, state)[0]

        table = jax.device_put(start, place)
        return run, table, tx.init(table), *jax.device_put([*ids], place)

    tx = js.optim.chain(*LINKS, js.adam(0.1, untouched="exact"))
    run, *args = trained(tx, jax.devices()[0])
    wanted = run(*args)
    assert (wanted[3] == start[3]).all() and (wanted[7] != start[7]).all()
    rows = jax.sharding.NamedSharding(mesh, jax.P("x"))
    plan = exchange and js.Exchange("x", exchange, 4.0)
    decay = js.from_optax(optax.add_decayed_weights(0.1))
    moves = js.optim.chain(decay, js.adam(0.1, untouched="exact"))
    with jax.set_mesh(mesh):
        run, *args = trained(tx, rows, plan)
        assert_close(run(*args), wanted, rtol=1e-5, atol=1e-6)
        run, *args = trained(moves, rows, plan)
        with pytest.raises(ValueError, match="this chain moves rows without gradient"):
            run(*args)


def test_flush_is_in_place_and_goes_over_the_table_in_chunks():
    """The step is proved in test_proof.py."""
    rows, dim = 200_000, 16
    tx = js.adamw(COSINE, untouched="exact")
    table = jax.ShapeDtypeStruct((rows, dim), jnp.float32)
    state = jax.eval_shape(tx.init, table)
    flush = jax.jit(
        tx.flush,
        donate_argnums=(0, 1),
        compiler_options={"xla_backend_optimization_level": 0},
    )
    memory = flush.lower(table, state).compile().memory_analysis()
    assert memory.temp_size_in_bytes < rows * dim * 4
    assert memory.alias_size_in_bytes >= 3 * rows * dim * 4


@pytest.mark.parametrize(
    "name, kwargs, tolerance",
    # AMSGrad moves as Adam does, and AdamW decays as Lion does.
    slow_unless(
        [case for case in FIRST if case[0] not in ("amsgrad", "adamw")],
        lambda case: case[0] == "lion",
    ),
    ids=label,
)
def test_a_learning_rate_that_is_known_in_the_step_alone(name, kwargs, tolerance):
    """All rows catch up where it changes, and later ones miss steps of the new one."""
    make = lambda rate: getattr(js, name)(rate, untouched="exact", **kwargs)  # noqa: E731
    half = STEPS // 2

    @fast_jit
    def some_steps(params, state, rate, ids, rows):
        step = lambda carry, batch: (  # noqa: E731
            catch_up_and_step(make(rate), *carry, *batch),
            None,
        )
        carry, _ = jax.lax.scan(step, (params, state), (ids, rows))
        return make(rate).flush(*carry)

    scale = 100.0 if name == "adadelta" else 1.0
    params, state = START, make(0.1 * scale).init(START)
    for part, rate in ((slice(half), 0.1), (slice(half, None), 0.02)):
        params, state = some_steps(params, state, rate * scale, IDS[part], ROWS[part])
    schedule = optax.piecewise_constant_schedule(0.1 * scale, {half: 0.2})
    wanted = train_dense(getattr(optax, name)(schedule, **kwargs))
    assert relative_error(params, wanted) < max(tolerance, 2e-5)


def test_places_without_a_parameter_stay_without_state():
    """Equinox has None where a model has functions."""
    tx = js.lion(optax.exponential_decay(0.1, 2, 0.9), untouched="exact")
    params = {"table": jnp.ones((4, 2)), "activation": None}
    grads = {"table": js.IndexedSlices(jnp.ones((1, 2)), [1], (4, 2)), "activation": None}
    first = tx.init(params)

    @fast_jit
    def step(params, state):
        params, state = tx.flush(params, state)
        return tx.apply(grads, state, params)

    for _ in range(2):
        params, state = step(params, first)
        assert jax.tree.structure(state) == jax.tree.structure(first)
    assert params["activation"] is None and state.count == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_masks_where_parameters_are_none(name):
    mask = lambda params: jax.tree.map(lambda p: p.ndim > 1, params)  # noqa: E731
    kwargs = {"weight_decay": 0.1, "mask": mask}
    tx = getattr(js, name)(0.1, untouched="exact", **kwargs)
    dense_tx = getattr(optax, name)(0.1, **kwargs)
    params = {"activation": None, "bias": START[:8, 0], "table": START[:8]}
    state, dense_state, wanted = tx.init(params), dense_tx.init(params), params
    kept, flush = jax.tree.structure(state), fast_jit(tx.flush)

    @fast_jit
    def step(params, state, grads):
        touched = jax.tree.map(lambda g: g.indices, grads, is_leaf=js.is_slices)
        return tx.apply(grads, *tx.catch_up(params, state, touched)[::-1])

    @fast_jit
    def dense_step(grads, state, params):
        updates, state = dense_tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for k in range(4):
        grads = {
            "activation": None,
            "bias": js.IndexedSlices(ROWS[k, :3, 0], IDS[k, :3] % 8, (8,)),
            "table": js.IndexedSlices(ROWS[k, :3], IDS[k, :3] % 8, (8, D)),
        }
        rows = jax.tree.leaves(grads, is_leaf=js.is_slices)
        bias, table = (numpy_dense(g.values, g.indices, g.shape) for g in rows)
        dense = {"activation": None, "bias": bias, "table": table}
        if k < 3:
            params, state = step(params, state, grads)
        else:  # an array touches every row
            params, state = fast_jit(tx.apply)(dense, *flush(params, state)[::-1])
        wanted, dense_state = dense_step(dense, dense_state, wanted)
        assert jax.tree.structure(state) == kept
        assert_close(flush(params, state)[0], wanted, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    "rate, least, most",
    slow_unless(
        [(1e-4, 0, 0), (3e-4, 0, 2), (1e-3, 0.66, 1.34), (1e-2, 0.94, 1.06)],
        (1e-3, 0.66, 1.34).__eq__,
    ),
)
def test_small_decays_are_lost_by_dense_adamw_alone(rate, least, most):
    """The numbers of docs/optimizers.md; the default decay is 1e-4."""
    steps, start = 20, np.random.default_rng(0).uniform(1, 2, (2_000, 1)).astype("f")
    share = np.expm1(steps * np.log1p(-rate * 1e-4))

    @fast_jit
    def dense(p):
        def step(_, kept):
            p, state = kept
            updates, state = tx.update(jnp.zeros_like(p), state, p)
            return optax.apply_updates(p, updates), state

        tx = optax.adamw(rate)
        return jax.lax.fori_loop(0, steps, step, (p, tx.init(p)))[0]

    taken = (np.asarray(dense(start), "f8") / start - 1) / share
    assert taken.min() == pytest.approx(least, abs=0.02)
    assert taken.max() == pytest.approx(most, abs=0.02)
    tx = js.adamw(rate, untouched="exact")

    one = js.train_step(lambda p, ids: 0 * p[ids].sum(), tx)

    @fast_jit
    def exact(p):
        step = lambda _, kept: one(*kept, jnp.array([0]))[:2]  # noqa: E731
        return tx.flush(*jax.lax.fori_loop(0, 200 * steps, step, (p, tx.init(p))))[0]

    wanted = start[1:].astype("f8") * np.exp(200 * steps * np.log1p(-rate * 1e-4))
    np.testing.assert_allclose(exact(start)[1:], wanted, rtol=2e-7)
