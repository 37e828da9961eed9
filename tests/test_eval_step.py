"""Parameters as they are now: ``tx.now`` and ``js.eval_step`` of rows that missed steps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, fast_jit
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jslices as js
from jslices.tables import stack_tables

V, D = 24, 3
RNG = np.random.default_rng(0)
SHAPES = {"a": (V, D), "b": (V, D), "w": (D,)}
PARAMS = {k: RNG.normal(size=shape).astype(np.float32) for k, shape in SHAPES.items()}
BATCHES = RNG.integers(0, V, (6, 4)).astype(np.int32)
RATE = optax.linear_schedule(0.1, 0.02, 6)
DECAY = 0.95
EXACT = {
    "sgd": js.sgd(RATE, momentum=0.9, nesterov=True, untouched="exact"),
    "adam": js.adam(RATE, untouched="exact"),
    "adamw": js.adamw(RATE, weight_decay=0.1, untouched="exact"),
    "lion": js.lion(RATE, weight_decay=0.1, untouched="exact"),
    "params_ema": js.optim.params_ema(js.adam(RATE, untouched="exact"), DECAY),
}
DENSE = {
    "sgd": optax.sgd(RATE, momentum=0.9, nesterov=True),
    "adam": optax.adam(RATE),
    "adamw": optax.adamw(RATE, weight_decay=0.1),
    "lion": optax.lion(RATE, weight_decay=0.1),
    "params_ema": optax.adam(RATE),
}


def loss(params, ids):
    return jnp.mean((jnp.tanh(params["a"][ids] * params["b"][ids]) @ params["w"]) ** 2)


def metrics(params, ids):
    """Rows by ids, by ids of rows, in loops and branches, and a table as a whole."""
    best = jnp.argmax(params["a"][ids] @ params["w"])
    return {
        "rows": params["a"][ids],
        "best": params["b"][ids[best]],
        "mean": (params["b"].sum(), None),
        "loop": jax.lax.map(lambda i: params["a"][i].sum(), ids),
        "branch": jax.lax.cond(
            ids[0] > 9, lambda p: p["a"][2], lambda p: p["b"][3], params
        ),
        "bags": js.embedding_lookup(params["a"], ids - 2),
    }


def trained(name):
    """Parameters and state after exact steps, and the parameters of dense ones."""
    tx, dense = EXACT[name], DENSE[name]

    @fast_jit
    def both(params):
        mine, theirs = (params, tx.init(params)), (params, dense.init(params))
        for ids in BATCHES:
            *mine, _ = js.train_step(loss, tx)(*mine, ids)
            grads = jax.grad(loss)(theirs[0], ids)
            updates, state = dense.update(grads, theirs[1], theirs[0])
            theirs = optax.apply_updates(theirs[0], updates), state
        return mine, theirs[0]

    return both(PARAMS)


def test_rows_are_evaluated_as_they_are_now():
    tx, table = EXACT["sgd"], jnp.asarray(PARAMS["a"])
    squares = lambda table, ids: (table[ids] ** 2).sum()  # noqa: E731
    state, step = tx.init(table), fast_jit(js.train_step(squares, tx))
    for ids in BATCHES[:3]:
        table, state, _ = step(table, state, ids)
    flushed = tx.flush(table, state)[0]
    got = js.eval_step(squares, tx)(table, state, BATCHES[3])
    np.testing.assert_allclose(got, squares(flushed, BATCHES[3]), rtol=1e-5)
    assert not np.isclose(squares(table, BATCHES[3]), got, rtol=1e-3)
    with pytest.raises(AssertionError, match=r"\d+ of 24 of params"):
        js.testing.assert_up_to_date(table, state)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of bags of a table that is used as a whole, too
@pytest.mark.parametrize("name", EXACT)
def test_metrics_are_those_of_dense_steps(name):
    (params, state), theirs = trained(name)
    tx, ids = EXACT[name], jnp.array([1, 20, 7, 3])
    wanted = metrics(theirs, ids)
    evaluate = js.eval_step(metrics, tx)
    for got in (evaluate(params, state, ids), fast_jit(evaluate)(params, state, ids=ids)):
        assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    assert not np.allclose(metrics(params, ids)["rows"], wanted["rows"], atol=1e-4)
    assert_close(tx.now(params, state), theirs, rtol=1e-4, atol=1e-5)
    assert_close(tx.now(params, state), tx.flush(params, state)[0])
    js.testing.assert_up_to_date(*tx.flush(params, state))
    with pytest.raises(AssertionError, match=r"\d+ of 24 of params\['a'\], \d+ of 24 of"):
        js.testing.assert_up_to_date(params, state)
    for array in jax.tree.leaves((params, state)):
        assert not array.is_deleted()


FIXED = {
    "the first": lambda t: t[:2],
    "the last": lambda t: t[-1],
    "an element": lambda t: t[20, 2],
    "some columns": lambda t: t[2:4, 1:],
    "each seventh": lambda t: t[::7],
    "backwards": lambda t: t[::-1][:2],
    "split": lambda t: jnp.split(t, 4)[1],
    "most": lambda t: t[1:],
    "of a program within": lambda t: jax.jit(lambda t: t[:2])(t),
}


DECAYS = js.sgd(0.05, weight_decay=0.1, untouched="exact")


def near_one(table, ids):
    return ((table[ids] - 1) ** 2).mean()


@functools.cache
def after_three_steps():
    table = jnp.arange(1.0, 97.0).reshape(24, 4)
    state = DECAYS.init(table)
    for ids in BATCHES[:3]:
        table, state, _ = js.train_step(near_one, DECAYS)(table, state, ids)
    return table, state, DECAYS.now(table, state)


@pytest.mark.parametrize("rows", FIXED)
def test_rows_with_fixed_numbers_are_read_as_they_are_now(rows):
    of, (table, state, now) = FIXED[rows], after_three_steps()
    wanted = of(now)
    assert_close(js.eval_step(of, DECAYS)(table, state), wanted)
    beside = lambda table, ids: (near_one(table, ids), of(table))  # noqa: E731
    step = js.train_step(beside, DECAYS, has_aux=True, donate=False)
    *_, aux = step(table, state, BATCHES[3])
    assert_close(aux, wanted)
    assert not np.allclose(of(table.table), wanted)  # they were behind


def test_under_a_lazy_optimizer_it_is_the_function_itself():
    tx = js.adam(0.1)
    state = tx.init(PARAMS)
    assert_close(
        js.eval_step(loss, tx)(PARAMS, state, BATCHES[0]), loss(PARAMS, BATCHES[0])
    )
    assert tx.now(PARAMS, state) is PARAMS
    js.testing.assert_up_to_date(PARAMS, state)
    with pytest.raises(TypeError, match="eval_step wants an optimizer of jslices"):
        js.eval_step(loss, optax.adam(0.1))


def test_no_array_of_the_size_of_a_table():
    shapes = {"a": (10**6, 8), "b": (10**6, 8), "w": (8,)}
    params = {k: jax.ShapeDtypeStruct(x, jnp.float32) for k, x in shapes.items()}
    tx = EXACT["adamw"]
    args = params, jax.eval_shape(tx.init, params), jax.ShapeDtypeStruct((99,), jnp.int32)
    js.testing.assert_no_dense_temporary(js.eval_step(loss, tx), *args)
    whole = js.eval_step(lambda p, ids: p["a"].sum() + loss(p, ids), tx)
    with pytest.warns(js.PerformanceHint, match="'a'.*used as a whole at .*test_eval"):
        jax.eval_shape(whole, *args)


@pytest.mark.slow
@pytest.mark.parametrize(
    "axes", [AxisType.Auto, AxisType.Explicit], ids=["Auto", "Explicit"]
)
def test_tables_that_are_split_over_a_mesh(axes):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(axes,))
    (params, state), theirs = trained("adam")
    split = lambda x: PartitionSpec(*["x"] * (x.shape[:1] == (V,)))  # noqa: E731
    place = lambda x: jax.device_put(x, NamedSharding(mesh, split(x)))  # noqa: E731
    with jax.set_mesh(mesh):
        params, state = jax.tree.map(place, (params, state))
        ids = jax.device_put(BATCHES[1], NamedSharding(mesh, PartitionSpec()))
        evaluate = js.eval_step(
            lambda p, ids: js.embedding_lookup(p["a"], ids), EXACT["adam"]
        )
        rows = evaluate(params, state, ids)
        now = EXACT["adam"].now(params, state)
    assert_close(jax.device_get(rows), theirs["a"][BATCHES[1]], rtol=1e-4, atol=1e-5)
    assert_close(jax.device_get(now), theirs, rtol=1e-4, atol=1e-5)
    assert now["a"].sharding.is_equivalent_to(params["a"].sharding, 2)


@pytest.mark.slow
def test_rows_that_two_axes_number():
    tx, dense, tables = EXACT["adamw"], DENSE["adamw"], RNG.normal(size=(2, 9, D))
    tables = jnp.asarray(tables, jnp.float32)
    of_both = lambda t, i: (t[jnp.arange(2)[:, None], i] ** 2).sum()  # noqa: E731
    mine, theirs = (tables, tx.init(tables)), (tables, dense.init(tables))
    step, evaluate = fast_jit(js.train_step(of_both, tx)), js.eval_step(of_both, tx)
    for ids in RNG.integers(0, 9, (3, 2, 3)):
        *mine, _ = step(*mine, ids)
        updates, state = dense.update(jax.grad(of_both)(theirs[0], ids), *theirs[::-1])
        theirs = optax.apply_updates(theirs[0], updates), state
    ids = jnp.array([[0, 5], [8, 1]])
    assert_close(evaluate(*mine, ids), of_both(theirs[0], ids), rtol=1e-4)
    large = jax.ShapeDtypeStruct((2, 10**6, 8), jnp.float32)
    args = large, jax.eval_shape(tx.init, large), ids
    js.testing.assert_no_dense_temporary(evaluate, *args)


def test_by_hand_a_table_that_two_axes_number_is_used_whole_as_it_is_now():
    tx, table = js.adam(0.1, untouched="exact"), np.ones((2, 3, 2), np.float32)
    squares = lambda table, ids: (table[0, ids] ** 2).sum()  # noqa: E731
    step, state = js.train_step(squares, tx, jit=False), tx.init(table)
    for ids in (1, 2):  # then row 1 is behind
        table, state, _ = step(table, state, ids)

    def of_now(table):
        now = tx.now(table, state)
        return squares(now, 1) + jax.lax.stop_gradient(now).sum()

    now = tx.now(table, state)
    assert_close(js.value_and_grad(of_now)(table)[0], squares(now, 1) + now.sum())


def test_stacked_tables():
    params, unstack = stack_tables({"a": PARAMS["a"], "b": PARAMS["b"]})
    of_stack = lambda stacked, ids: loss(unstack(stacked) | {"w": PARAMS["w"]}, ids)  # noqa: E731
    tx, state = EXACT["adamw"], EXACT["adamw"].init(params)
    step = fast_jit(js.train_step(of_stack, tx))
    for ids in BATCHES[:3]:
        params, state, _ = step(params, state, ids)
    whole = fast_jit(lambda p, s: of_stack(tx.flush(p, s)[0], BATCHES[3]))(params, state)
    assert_close(js.eval_step(of_stack, tx)(params, state, BATCHES[3]), whole, rtol=1e-5)
    assert_close(unstack(tx.now(params, state)), unstack(tx.flush(params, state)[0]))


@pytest.mark.slow
def test_by_hand_rows_that_are_exchanged_are_those_of_the_table_as_it_is_now():
    tx, (params, state) = EXACT["adam"], trained("adam")[0]
    mesh, how = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,)), js.Exchange("x")
    rows = NamedSharding(mesh, PartitionSpec("x"))
    place = lambda x: jax.device_put(x, rows) if x.shape[:1] == (V,) else x  # noqa: E731
    ids = jax.device_put(np.arange(8, dtype=np.int32), rows)

    def step(params, state, **options):
        of_now = lambda params: loss(tx.now(params, state), ids)  # noqa: E731
        grads = js.grad(of_now, **options)(params)
        return tx.apply(grads, state, params)

    with jax.set_mesh(mesh):
        split = jax.tree.map(place, (params, state))
        got = jax.jit(lambda *x: step(*x, exchange={"a": how, "b": how}))(*split)
    ids = np.asarray(ids)
    wanted = jax.jit(step)(params, state)
    assert_close(*(jax.device_get(tx.flush(*x)[0]) for x in (got, wanted)), 1e-4, 1e-6)
