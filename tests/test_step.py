"""The ways of a step, each forced in turn, give one result."""

import contextlib
import functools
import math
import re
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, quickly
from hypothesis import given, settings
from hypothesis import strategies as st
from optimizers import BY_ROW, OWN, SHARED, label, make, slices_of

import jslices as js
from jslices.optim import fold, in_place, large, step, stream, whole

# The first setting of each optimizer that has no way of its own, and momentum.
FIRST = {name: (name, kwargs) for name, kwargs in reversed([*SHARED, *BY_ROW, *OWN])}
CASES = [*(FIRST.keys() - {"adafactor"})]
CASES = [*(FIRST[name] for name in sorted(CASES)), ("sgd", {"momentum": 0.9})]
D, K = 3, 42
WAYS = ["whole", "fold", "chunks", "quarters"]  # and at_once, their measure
_step_rows = in_place.step_rows


@contextlib.contextmanager
def forced(way):
    """Makes ``step_slices`` go one way with small shapes."""
    few = way in ("at_once", "quarters")
    with contextlib.ExitStack() as stack:
        patch = lambda *args: stack.enter_context(mock.patch.object(*args))  # noqa: E731
        patch(step, "covers", lambda *shape: way == "whole")
        patch(step, "is_large", lambda *shape: way == "fold")
        for module in (in_place, fold, large, stream, step):
            patch(module, "CHUNK", 10**9 if few else 16)
        patch(in_place, "FEW_ROWS", 10**9 if few else 16)
        patch(in_place, "FEW_BYTES", 0)
        rows = functools.partial(_step_rows, quarters=way == "quarters")
        patch(step, "step_rows", lambda *args, quarters: rows(*args))
        yield


def two_steps(name, kwargs, grads, table, way, jit=quickly, in_one_call=False):
    """The table, the state and, but for ``tx.apply``, the last updates."""
    tx = make(js, name, 0.1, kwargs)
    state, updates = tx.init(table), None
    with forced(way):
        # A new function each time: another way is another program.
        step = jit(lambda *args: (tx.apply if in_one_call else tx.update)(*args))
        for _ in range(2):
            if in_one_call:
                table, state = step(grads, state, table)
            else:
                updates, state = step(grads, state, table)
                table = js.apply_updates(table, updates)
    return table, state, updates


def check_update(updates, ids, num_rows):
    """Each row is named once; what is named by no id is empty, and zero."""
    present = sorted({i for i in np.asarray(ids).tolist() if 0 <= i < num_rows})
    named = np.asarray(updates.indices)
    assert sorted(named[named < num_rows].tolist()) == present
    assert not np.asarray(updates.values)[named >= num_rows].any()


def many_rows(num_rows=60):
    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.normal(size=(num_rows, D)), jnp.float32)
    ids = np.concatenate([[5] * 9, rng.integers(-3, num_rows + 3, K - 9)])
    return table, ids, slices_of(rng, ids, (num_rows, D)), num_rows


@functools.lru_cache(maxsize=1)
def at_once(number):
    """What each way is compared with, compiled once for all of them."""
    table, _, grads, _ = many_rows()
    return two_steps(*CASES[number], grads, table, "at_once")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name, kwargs", CASES, ids=label)
def test_every_way_gives_the_same(name, kwargs, way):
    table, ids, grads, num_rows = many_rows()
    wanted = at_once(CASES.index((name, kwargs)))
    got = two_steps(name, kwargs, grads, table, way)
    assert_close(got[:2], wanted[:2], rtol=1e-5, atol=1e-6)
    update, wanted_update = got[2].to_dense(), wanted[2].to_dense()
    assert_close(update, wanted_update, rtol=1e-5, atol=1e-6)
    check_update(got[2], ids, num_rows)


@pytest.mark.parametrize("way", ["at_once", *WAYS])
@pytest.mark.parametrize("name, kwargs", CASES, ids=label)
def test_update_and_apply_in_one_call(name, kwargs, way):
    table, _, grads, _ = many_rows()
    wanted = at_once(CASES.index((name, kwargs)))[:2]
    got = two_steps(name, kwargs, grads, table, way, in_one_call=True)
    assert_close(got[:2], wanted, rtol=1e-5, atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(
    ids=st.lists(st.integers(-2, 12), min_size=K, max_size=K),
    way=st.sampled_from(WAYS),
)
def test_any_ids(ids, way):
    rng = np.random.default_rng(1)
    table = jnp.asarray(rng.normal(size=(10, D)), jnp.float32)
    grads = slices_of(rng, ids, (10, D))
    (table_now, _, updates), one_call = _adam_of(way)(grads, table)
    assert_close(one_call[0], table_now, atol=1e-5)
    dense, state = table, optax.adam(0.1).init(table)
    for _ in range(2):
        update, state = optax.adam(0.1).update(grads.to_dense(), state, dense)
        dense = optax.apply_updates(dense, update)
    touched = sorted({i for i in ids if 0 <= i < 10})
    rest = sorted(set(range(10)) - set(touched))
    assert_close(
        table_now[np.array(touched, int)], dense[np.array(touched, int)], atol=1e-5
    )
    np.testing.assert_array_equal(
        table_now[np.array(rest, int)], table[np.array(rest, int)]
    )
    check_update(updates, ids, 10)


@functools.cache
def _adam_of(way):
    @jax.jit
    def run(grads, table):
        return [two_steps("adam", {}, grads, table, way, jax.jit, b) for b in (False, True)]

    with forced(way):
        run(slices_of(np.random.default_rng(0), [0] * K, (10, D)), jnp.zeros((10, D)))
    return run


@pytest.mark.parametrize("bad", [np.inf, np.nan, -np.inf])
def test_what_is_not_finite_stays_in_its_row(bad):
    grads = js.IndexedSlices(jnp.ones((K, D)).at[3].set(bad), [3, 7] * (K // 2), (60, D))
    for way in WAYS:
        table, _, updates = two_steps("adam", {}, grads, jnp.ones((60, D)), way)
        assert np.isfinite(np.delete(table, 7, 0)).all(), way
        check_update(updates, [3, 7], 60)


def test_the_way_is_chosen_from_the_shapes():
    taken = []
    ways = {
        "whole": (step, "step_whole"),
        "fold": (large, "step_folded"),
        "rows": (step, "step_rows"),
    }
    with contextlib.ExitStack() as stack:
        for way, (module, name) in ways.items():
            real = getattr(module, name)

            def spy(*args, way=way, real=real, **kwargs):
                taken.append(way)
                return real(*args, **kwargs)

            stack.enter_context(mock.patch.object(module, name, spy))
        for num_rows, dim, count, way in [
            (1_000, 16, 100, "rows"),  # few
            (1_000, 16, 600, "whole"),  # half of the table
            (100_000, 16, 10_000, "rows"),
            (100_000, 16, 30_000, "whole"),
            (100_000, 64, 15_000, "rows"),
            (100_000, 64, 16_000, "fold"),
            (100_000, 64, 130_000, "fold"),
            (1_000_000, 16, 300_000, "rows"),  # short rows
            (100_000, 64, 200_000, "whole"),
            (1_000_000, 64, 100_000, "fold"),
        ]:
            shape = (num_rows, dim)
            grads = js.IndexedSlices(
                np.broadcast_to(np.float32(0), (count, dim)),
                np.broadcast_to(np.int32(0), count),
                shape,
            )
            tx = js.adagrad(0.1)
            table = jax.ShapeDtypeStruct(shape, jnp.float32)
            jax.eval_shape(tx.update, grads, jax.eval_shape(tx.init, table), table)
            assert taken.pop() == way, (num_rows, dim, count)


def test_many_slots_of_sgd_stay_as_they_are():
    ids = jnp.asarray([1] * 300 + [-1] * 300 + [2] * 300)
    values = jnp.ones((900, 2)).at[300:600].set(jnp.nan)
    tx = js.sgd(0.5)
    tall = js.IndexedSlices(values, ids, (500, 2))
    updates, _ = jax.jit(tx.update)(tall, tx.init(jnp.zeros((500, 2))))
    assert updates.values.shape == (900, 2)
    assert not updates.values[300:600].any()
    np.testing.assert_array_equal(updates.to_dense()[:5, 0], [0, -150, -150, 0, 0])
    # Short rows, each named many times: the dense sum.
    grads = js.IndexedSlices(values, ids, (5, 2))
    updates, _ = jax.jit(tx.update)(grads, tx.init(jnp.zeros((5, 2))))
    assert updates.indices.tolist() == [5, 1, 2, 5, 5]
    np.testing.assert_array_equal(updates.values[:, 0], [0, -150, -150, 0, 0])
    for params in (jnp.zeros((5, 2)), np.zeros((5, 2), np.float32)):
        stepped = js.apply_updates(params, updates)
        np.testing.assert_array_equal(stepped[:, 0], [0, -150, -150, 0, 0])
    # 16 bits would round at each addition, so there they are summed first.
    updates, _ = tx.update(grads.astype(jnp.bfloat16), tx.init(jnp.zeros((5, 2))))
    assert updates.indices.tolist() == [1, 2, 5, 5, 5]


@pytest.mark.parametrize(
    "name, length, rows, ids_a_row",
    [
        *(("adam", 1, 10**5, 0.27 / 8), ("adam", 4, 10**6, 0.27 / 2)),
        *(("adam", 8, 10**6, 0.27), ("adam", 256, 10**4, 0.27), ("adam", 16, 10**6, 1 / 3)),
        *(("adam", 32, 10**6, 2 / 3), ("adam", 256, 10**5, 2)),
        *(("ftrl", 8, 10**6, 3.62 / 6), ("ftrl", 4, 10**6, 3.62 / 12)),
        *(("ftrl", 32, 10**6, 2 / 3), ("ftrl", 256, 10**5, 2)),
    ],
)
def test_how_many_ids_are_enough_for_all_rows(name, length, rows, ids_a_row):
    tx = getattr(js, name)(0.5)
    table = jax.ShapeDtypeStruct((rows, length), jnp.float32)

    def kind(count):
        grads = js.IndexedSlices(
            jax.ShapeDtypeStruct((count, length), jnp.float32),
            jax.ShapeDtypeStruct((count,), jnp.int32),
            (rows, length),
        )
        return type(
            jax.eval_shape(tx.update, grads, jax.eval_shape(tx.init, table), table)[0]
        )

    enough = math.ceil(rows * ids_a_row)
    assert kind(enough) is whole.EveryRow
    assert kind(enough - 1) is js.IndexedSlices


def compiled_step(tx, grad, shape, count):
    """An ordinary step of a table with so many ids; it is not run."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train(table, state, ids):
        grads = grad(lambda p: jnp.sum(p[ids] ** 2))(table)
        updates, state = tx.update(grads, state, table)
        return js.apply_updates(table, updates), state

    table = jax.ShapeDtypeStruct(shape, jnp.float32)
    ids = jax.ShapeDtypeStruct((count,), jnp.int32)
    return train.lower(table, jax.eval_shape(tx.init, table), ids).compile()


@pytest.mark.parametrize("name", ["adam", "ftrl"])  # at once, and in quarters
@pytest.mark.parametrize("length", [8, 16, 64])
@pytest.mark.parametrize(
    "count",
    [500, 2049, 5859, 5860, 23_437, 23_438, 26_999, 27_000, 60_333, 60_334, 100_000],
)
def test_temporaries_are_less_than_six_arrays_of_the_gradient(count, length, name):
    compiled = compiled_step(getattr(js, name)(0.5), js.grad, (100_000, length), count)
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    assert temporaries < 6 * count * length * 4


@pytest.mark.parametrize("num_rows", [40_000, 300_000])  # a map of all rows, and a hash
@pytest.mark.parametrize("name", ["adagrad", "amsgrad", "adafactor"])
def test_many_short_rows_together_are_the_same_as_in_chunks(name, num_rows):
    rng = np.random.default_rng(0)
    tx, count, length = getattr(js, name)(0.5), 5_000, 4
    ids = (num_rows * rng.random(count) ** 4).astype(np.int32)  # some are named often
    ids[::50] = rng.choice([-1, num_rows, num_rows + 7], 100)  # some are no rows
    grads = js.IndexedSlices(
        jnp.asarray(rng.normal(size=(count, length)), jnp.float32), ids, (num_rows, length)
    )
    table = jnp.asarray(rng.normal(size=grads.dense_shape), jnp.float32)

    def two_steps(few_bytes):
        def step(table, state, grads):
            updates, state = tx.update(grads, state, table)
            return js.apply_updates(table, updates), state

        with mock.patch.object(in_place, "FEW_BYTES", few_bytes):
            lowered = jax.jit(step).lower(table, tx.init(table), grads)
        step, now = lowered.compile(), (table, tx.init(table))
        chunk = f"tensor<{in_place.CHUNK}x{length}xf32>"
        return step(*step(*now, grads), grads), chunk in lowered.as_text()

    together, cut = two_steps(in_place.FEW_BYTES)
    assert not cut
    in_chunks, cut = two_steps(0)
    assert cut
    chex.assert_trees_all_close(together, in_chunks, rtol=1e-5, atol=1e-6)
    assert not np.array_equal(together[0], table)


@pytest.mark.parametrize("name", ["adam", "adadelta", "rmsprop", "amsgrad"])
def test_a_pass_over_all_rows_copies_no_array(name):
    tx = getattr(js, name)(0.5)
    params, ids = jnp.zeros((1000, 24)), jnp.arange(1000) * 7 % 1000

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train(params, state, ids):
        grads = js.grad(lambda p: jnp.sum(p[ids] ** 2))(params)
        updates, state = tx.update(grads, state, params)
        assert isinstance(updates, whole.EveryRow)
        return js.apply_updates(params, updates), state

    program = train.lower(params, tx.init(params), ids).compile().as_text()
    assert "f32[1000,24]" in program
    assert not [x for x in program.splitlines() if "f32[1000,24]" in x and " copy(" in x]


@pytest.mark.parametrize("length", [1, 8, 16])
@pytest.mark.parametrize("name", ["adagrad", "rmsprop", "adam"])
def test_a_pass_over_all_rows_goes_over_them_as_often_as_a_dense_step(name, length):
    tx = getattr(js, name)(0.5)

    def passes(grad):
        compiled = compiled_step(tx, grad, (3000, length), 2000)
        program = compiled.as_text().partition("ENTRY")[2]
        return sorted(re.findall(rf"= f32\[3000,{length}\]\S* (?!parameter)\w+", program))

    assert passes(js.grad) == passes(jax.grad) != []


@pytest.mark.parametrize(
    "kernel",
    [
        lambda g, a, b: (g, a, b + g),  # as it was
        lambda g, a, b: (a + g, a + g, a + g),
        lambda g, a, b: (g * 2, b, a),
        lambda g, a, b: (lambda c: (c, b * c, c))(a + g),  # the update is kept as state
        lambda g, a, b: (lambda c: (c, c, c))(jnp.sin(g + a * b)),
        lambda g, a, b: (a * 0 + jnp.nan, g / 0 * 0, jnp.where(g > 1, b, jnp.inf)),
    ],
)
def test_a_pass_over_all_rows_keeps_those_without_a_gradient(kernel):
    a, b = jnp.arange(24.0).reshape(6, 4), 7 - jnp.arange(24.0).reshape(6, 4)
    rows, ids = jnp.ones((5, 4)), jnp.array([1, 4, 4, 6, 1])
    indices, *out = whole.step_whole(kernel, ids, rows, 6, (a, b), 0, False)
    want = kernel(jnp.zeros((6, 4)).at[ids].add(rows, mode="drop"), a, b)
    assert indices.tolist() == [6, 1, 6, 6, 4, 6]
    for got, each, old in zip(out, want, (0 * a, a, b), strict=True):
        named = jnp.array([False, True, False, False, True, False])[:, None]
        np.testing.assert_allclose(got, jnp.where(named, each, old), rtol=1e-6)


def test_updates_of_all_rows_are_slices_like_others():
    grads = js.IndexedSlices(jnp.ones((600, 2)), jnp.arange(600) % 7, (1000, 2))
    tx = js.adam(0.5)
    params = jnp.zeros((1000, 2))
    updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
    assert isinstance(updates, whole.EveryRow) and js.is_slices(updates)
    want = jnp.zeros((1000, 2)).at[:7].set(-0.5)
    for done in (
        js.apply_updates(params, updates),
        optax.apply_updates(params, updates),
        js.apply_updates(params, updates.coalesce()),
        params + updates,
        (params - updates * 2) / -2,
    ):
        np.testing.assert_allclose(done, want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("way", WAYS)
def test_a_learned_learning_rate_goes_each_way(way):
    rng = np.random.default_rng(6)
    table = jnp.asarray(rng.normal(size=(60, D)), jnp.float32)
    grads = slices_of(rng, rng.integers(0, 60, K), (60, D))

    def after(rate, way):
        with forced(way):
            tx = js.adam(rate)
            updates, _ = tx.update(grads, tx.init(table), table)
            apart = (js.apply_updates(table, updates) ** 2).sum()
            return apart, (tx.apply(grads, tx.init(table), table)[0] ** 2).sum()

    wanted, _ = jax.jacrev(after)(0.1, "at_once")
    for got in jax.jacrev(after)(0.1, way):
        np.testing.assert_allclose(got, wanted, rtol=1e-4)
