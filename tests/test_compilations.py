"""How many programs are compiled outside of ``jax.jit``: few, and each once."""

import contextlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, slow_but_first, slow_unless
from jax import lax

import jslices as js

V = 37  # no other test compiles for so many rows
PARAMS = {"table": np.zeros((V, 3), np.float32), "w": np.zeros(5, np.float32)}
PARAMS = jax.device_put(PARAMS)
DEVICE = jax.devices()[0]
GRADS = {
    "table": js.IndexedSlices(np.ones((6, 3), np.float32), [1, 2, 2, 7, 9, V], (V, 3)),
    "w": jax.device_put(np.ones(5, np.float32)),
}


@pytest.fixture(autouse=True)
def _nothing_compiled():
    """As in a process of its own, whatever other tests have compiled."""
    jax.clear_caches()


@contextlib.contextmanager
def at_most(limit):
    """Fails if more programs are compiled, or read from the cache of compiled ones."""
    events = []

    def listen(event, duration, **kwargs):
        events.extend([event] * event.endswith("backend_compile_duration"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert len(events) <= limit, len(events)


def test_the_count_counts():
    with pytest.raises(AssertionError), at_most(0):
        jax.jit(lambda x: x * V)(jnp.ones(3)).block_until_ready()


@pytest.mark.slow
def test_the_first_use_of_an_exact_optimizer():
    tx = js.adam(0.01, b2=0.99, untouched="exact")
    state = tx.init(PARAMS)
    ids = {"table": jnp.array([1, 2, 7, 9]), "w": True}
    with at_most(3):
        params, state = tx.catch_up(PARAMS, state, ids)
    with at_most(3):
        updates, state = tx.update(GRADS, state, params)
    with at_most(3):
        tx.flush(js.apply_updates(params, updates), state)


@pytest.mark.slow
def test_exact_optimizers_with_a_schedule_compile_their_programs_once():
    tx = js.adam(optax.linear_schedule(0.1, 0.2, 9), untouched="exact")
    ids = {"table": jnp.array([1, 2, 7, 9]), "w": True}
    params, state = PARAMS, tx.init(PARAMS)
    for programs in (3, 0):
        with at_most(programs):
            params, state = tx.catch_up(params, state, ids)
        with at_most(programs):
            params, state = tx.apply(GRADS, state, params)
        with at_most(programs):
            params, state = tx.flush(params, state)


@pytest.mark.slow
def test_a_state_that_comes_from_elsewhere_is_stepped_by_the_same_program(tmp_path):
    tx = js.adam(0.1, untouched="exact")
    params, state = PARAMS, tx.init(PARAMS)
    step = jax.jit(js.train_step(lambda p, i: p["table"][i].sum() - p["w"].sum(), tx))
    ids = jnp.array([1, 2])
    params, state, _ = step(params, state, ids)
    params, state = tx.flush(params, state)
    slots = js.checkpoint.export_state(params, state, "torch")
    js.Saver().save({"params": params, "state": state}, tmp_path / "saved")
    restored = js.Saver().restore(tmp_path / "saved", {"params": params, "state": state})
    take = js.checkpoint.import_state
    for same in (
        (params, take(tx, params, jax.tree.map(np.asarray, slots))),
        (params, take(tx, params, jax.device_put(slots, DEVICE))),
        js.checkpoint.resize_rows(tx, params, state, params),
        (restored["params"], restored["state"]),
    ):
        step(*same, ids)
        assert step._cache_size() == 1


@pytest.mark.parametrize(
    "make", slow_but_first(js.adam, js.adagrad, js.rowwise_adagrad, js.adafactor)
)
def test_an_optimizer(make):
    tx = make(0.015625)
    state = tx.init(PARAMS)
    with at_most(3):
        updates, _ = tx.update(GRADS, state, PARAMS)
    with at_most(3):
        js.apply_updates(PARAMS, updates)
    with at_most(3):
        tx.apply(GRADS, state, PARAMS)
    with at_most(0):  # the same optimizer, made again
        make(0.015625).apply(GRADS, state, PARAMS)


def test_what_stands_around_a_step():
    rows = GRADS["table"]
    for function in (
        lambda: js.clip_by_global_norm(GRADS, 0.5),
        lambda: js.global_norm(GRADS),
        lambda: js.all_finite(GRADS),
        lambda: rows.coalesce(),
        lambda: rows.to_dense(),
    ):
        with at_most(3):
            jax.block_until_ready(jax.tree.leaves(function()))


def test_injected_hyperparameters_are_not_compiled_anew_in_every_step():
    tx = optax.inject_hyperparams(js.adam)(optax.linear_schedule(0.1, 0.0, 10))
    state, params = tx.init(PARAMS), PARAMS
    for step in range(4):
        with at_most(np.inf if step < 2 else 3):
            updates, state = tx.update(GRADS, state, params)
            params = js.apply_updates(params, updates)


def test_what_is_known_of_slices_stays_in_a_program():
    facts = js.IndexedSlices([[1.0]], [0], (2, 1)).facts
    assert facts == (False, None, 1, False, False, False, None)
    unique = GRADS["table"].coalesce()
    assert unique.facts.distinct and (-unique * 2).facts.distinct
    tx, table = js.sgd(0.1, momentum=0.5), PARAMS["table"]

    @jax.jit
    def step(grads, state, table):
        updates, state = tx.update(grads, state, table)
        assert updates.facts.distinct  # so that adding them takes no second sort
        return js.apply_updates(table, updates), state

    step(unique, tx.init(table), table)
    # Whatever is made of the children may hold other rows.
    twice = jax.tree.map(lambda *x: jnp.concatenate(x), unique, unique)
    assert not twice.facts.distinct
    np.testing.assert_array_equal(twice.to_dense(), 2 * unique.to_dense())
    moved, _ = js.sgd(1.0).apply(twice, js.sgd(1.0).init(PARAMS["table"]), PARAMS["table"])
    np.testing.assert_array_equal(moved, -2 * unique.to_dense())


def test_numbers_that_change_in_every_step_are_not_compiled_anew_for_ever():
    table, rows = PARAMS["w"], GRADS["w"]
    state = js.sgd(0.0).init(table)
    rates = np.linspace(0.1, 0.2, 100).tolist()
    with at_most(80):
        for rate in rates:
            updates, _ = js.sgd(rate).update(rows, state, table)
            np.testing.assert_allclose(updates, -rate, rtol=1e-6)


def test_a_method_is_one_function_for_jit():
    tx, params = js.sgd(0.25), PARAMS["w"]
    state = tx.init(params)
    jax.jit(tx.apply)(GRADS["w"], state, params)
    jax.jit(tx.flush)(params, state)
    with at_most(0):
        jax.jit(tx.apply)(GRADS["w"], state, params)
        jax.jit(tx.flush)(params, state)


@pytest.mark.parametrize("make", [js.adagrad, lambda rate: js.sgd(rate, momentum=0.5)])
def test_a_step_takes_its_arguments_by_keyword(make):
    tx = make(0.1)
    state = tx.init(PARAMS)
    wanted = tx.update(GRADS, state, PARAMS)
    for got in (
        tx.update(GRADS, state, params=PARAMS),
        tx.update(grads=GRADS, state=state, params=PARAMS),
    ):
        jax.tree.map(np.testing.assert_array_equal, got, wanted)


@pytest.mark.parametrize(
    ["name"],
    slow_unless([("adam",), ("adafactor",), ("ftrl",)], lambda case: case[0] == "adam"),
)
def test_the_number_of_a_schedule_is_an_argument_of_one_program(name):
    tx = getattr(js, name)(
        lambda step: 0.5 / (1 + float(step))
    )  # no function that JAX traces
    constants = [getattr(js, name)(0.5 / (1 + step)) for step in range(2)]
    params, state = PARAMS, tx.init(PARAMS)
    for step, constant in enumerate(constants):
        wanted = constant.apply(GRADS, state, params)
        with at_most(np.inf if step == 0 else 0):
            params, state = tx.apply(GRADS, state, params)
        jax.tree.map(assert_close, (params, state), wanted)


def test_equal_masks_are_compiled_once():
    """Made anew in every step, an optimizer with a mask does not wait for its program."""
    make = lambda bit: js.adamw(0.1, mask={"table": True, "w": [bit, None]})  # noqa: E731
    assert make(False).update is make(False).update is not make(True).update


def test_schedules_and_masks_are_functions_of_values():
    rates = [1.0, 0.5]
    by_hand = iter([0.25, 0.125])
    for schedule, wanted in (
        (lambda step: rates[0] if step < 1 else rates[1], rates),
        (lambda step: np.array(rates)[step], rates),
        (lambda step: next(by_hand), [0.25, 0.125]),
    ):
        tx = js.sgd(schedule)
        state = tx.init(PARAMS["w"])
        for rate in wanted:
            updates, state = tx.update(GRADS["w"], state, PARAMS["w"])
            np.testing.assert_array_equal(updates, -rate * np.ones(5))
    rate = np.array(0.5)
    tx = js.sgd(rate)
    tx.update(GRADS["w"], tx.init(PARAMS["w"]), PARAMS["w"])
    rate[...] = 0.25
    updates, _ = tx.update(GRADS["w"], tx.init(PARAMS["w"]), PARAMS["w"])
    np.testing.assert_array_equal(updates, -0.25 * np.ones(5))
    tx = js.adamw(0.5, mask=lambda params: bool((params > 0).any()))
    tx.update(GRADS["w"], tx.init(PARAMS["w"]), PARAMS["w"])


def test_state_that_no_gradient_touches_is_not_copied():
    tx = js.adam(0.0625)
    state = tx.init(PARAMS)
    params, new = tx.apply({**GRADS, "table": None}, state, PARAMS)
    assert params["table"] is PARAMS["table"] and new.mu["table"] is state.mu["table"]


def test_tables_of_one_size_share_what_is_traced():
    tx = js.adam(0.015625)

    def lines(tables):
        params, grads = [PARAMS["table"]] * tables, [GRADS["table"]] * tables
        step = jax.jit(lambda grads, state, params: tx.apply(grads, state, params))
        return step.lower(grads, tx.init(params), params).as_text().count("\n")

    assert lines(6) - lines(2) < 4 * 0.6 * lines(1)


@pytest.mark.slow
def test_tracing_does_not_depend_on_the_height_of_a_table():
    """A prefix sum in parallel is made of slices and concatenations of the table."""

    def loss(table, ids):
        return (lax.associative_scan(jnp.add, table)[ids] ** 2).sum()

    def calls(rows):
        counted = []
        sys.setprofile(lambda frame, event, arg: counted.append(event == "call"))
        try:
            jax.make_jaxpr(js.grad(loss))(jnp.ones((rows, 2)), jnp.arange(3))
        finally:
            sys.setprofile(None)
        return sum(counted)

    table = jnp.arange(20.0).reshape(10, 2)
    ids = jnp.array([3, 9, 3])
    with pytest.warns(js.DensificationWarning, match="needs more than rows"):
        assert calls(4096) < 3 * calls(512)
        assert_close(js.grad(loss)(table, ids), jax.grad(loss)(table, ids))
