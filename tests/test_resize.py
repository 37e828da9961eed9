"""Tables of other rows: what the old ones were, new ones begin, and the optimizer knows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, fast_jit, slow_unless
from jax.sharding import NamedSharding, PartitionSpec
from optimizers import FIRST, make

import jslices as js
from jslices.checkpoint import resize_rows
from jslices.tables import StackedTables

V, D = 6, 2
EXACT = {"untouched": "exact"}
RATE = optax.exponential_decay(0.1, 2, 0.9)
SLICES = js.IndexedSlices(jnp.zeros((2, D)), jnp.zeros(2, jnp.int32), (V, D))
BITS = np.arange(9) == 7


def labelled(rows):
    return js.optim.partition(
        {"rows": rows, "rest": optax.sgd(0.1, momentum=0.9)}, {"table": "rows", "w": "rest"}
    )


#: Those whose state arrays are of different kinds: none, full, of one number a row, ...
NAMES = ("sgd", "adagrad", "adam", "amsgrad", "ftrl", "rowwise_adagrad")
NAMES += ("partial_rowwise_adam",)
# From a number of rows to an optimizer.
OPTIMIZERS = {
    **{n: lambda v, n=n, kw=kw: make(js, n, 0.1, kw) for n, kw in FIRST if n in NAMES},
    "exact": lambda v: js.lion(0.1, weight_decay=0.1, **EXACT),
    "partition_exact": lambda v: labelled(js.sgd(RATE, momentum=0.9, **EXACT)),
    "chain": lambda v: js.optim.chain(
        js.optim.clip_by_global_norm(1.0), labelled(js.adam(0.1))
    ),
    "frozen": lambda v: js.optim.freeze_rows(
        js.lion(0.1, **EXACT), {"table": BITS[:v], "w": None}
    ),
    "in_float32": lambda v: js.optim.with_state_dtype(js.adam(0.1), "float32"),
    "rowwise": lambda v: js.adafactor(0.1, min_dim_size_to_factor=1),
    "from_optax": lambda v: js.from_optax(optax.adam(0.1)),
}
QUICK = ("rowwise_adagrad", "rowwise")


def start(v, seed=0):
    rng = np.random.default_rng(seed)
    table = jax.device_put(rng.normal(size=(v, D)).astype(np.float32))
    return {"table": table, "w": np.ones(3, np.float32)}


def grads_of(v, rows):
    values = np.random.default_rng(9).normal(size=(len(rows), D)).astype(np.float32)
    rows = js.IndexedSlices(*jax.device_put((values, np.array(rows))), (v, D))
    return {"table": rows, "w": np.ones(3, np.float32)}


@functools.cache
def compiled(tx):
    """A step of an optimizer."""

    def step(params, state, rows, grads):
        if tx.catches_up:
            params, state = tx.catch_up(params, state, {"table": rows, "w": True})
        return tx.apply(grads, state, params)

    return fast_jit(step)


def trained(tx, params, state, *steps):
    for rows in steps:
        grads = grads_of(len(params["table"]), rows)
        params, state = compiled(tx)(params, state, np.array(rows), grads)
    return params, state


def flushed(tx, params, state):
    return tx.flush(params, state) if tx.catches_up else (params, state)


def rows_of(tree, v):
    """The arrays ``[v, ...]`` of a tree."""
    return [np.asarray(x) for x in jax.tree.leaves(tree) if jnp.shape(x)[:1] == (v,)]


@pytest.mark.parametrize(
    "name", [*slow_unless([(n,) for n in OPTIMIZERS], lambda case: case[0] in QUICK)]
)
def test_old_rows_go_on_and_new_ones_begin(name):
    """Grown, and with the rows in another order; then a step with old rows and new."""
    small, large = OPTIMIZERS[name](V), OPTIMIZERS[name](9)
    params, state = trained(small, start(V), small.init(start(V)), [1, 4], [4, 0])
    fresh = start(9, seed=1)
    rows = np.array([1, -1, 0, 4, 5, -1, 2, -1, 3])
    new, after = resize_rows(large, params, state, fresh, rows={"table": rows})
    begin = large.init(fresh)
    assert jax.tree.structure(after) == jax.tree.structure(begin)
    before, begun = np.asarray(params["table"]), np.asarray(fresh["table"])
    assert_close(new["table"], np.where(rows[:, None] < 0, begun, before[rows]))
    for old, now, first in zip(
        rows_of(state, V), rows_of(after, 9), rows_of(begin, 9), strict=True
    ):
        np.testing.assert_array_equal(now[rows >= 0], old[rows[rows >= 0]])
        if now.ndim > 1:
            np.testing.assert_array_equal(now[rows < 0], first[rows < 0])
    # New rows have missed no step.
    up_to_date = jax.device_get(flushed(large, new, after)[0])
    np.testing.assert_array_equal(up_to_date["table"][rows < 0], begun[rows < 0])
    # And what was there takes the next steps as it would have.
    params, state = trained(small, params, state, [1, 4], [2, 4])
    at = {int(old): int(i) for i, old in enumerate(rows)}
    new, after = trained(large, new, after, [at[1], at[4]], [at[2], at[4]])
    params, now = jax.device_get(
        (flushed(small, params, state)[0], flushed(large, new, after)[0])
    )
    np.testing.assert_array_equal(now["table"][rows >= 0], params["table"][rows[rows >= 0]])
    np.testing.assert_array_equal(now["w"], params["w"])
    # Fewer rows: the first.
    tx = OPTIMIZERS[name](4)
    few, less = resize_rows(tx, new, after, start(4))
    for old, x in zip(rows_of((new, after), 9), rows_of((few, less), 4), strict=True):
        np.testing.assert_array_equal(x, old[:4])


@pytest.mark.parametrize("name", ["exact", "chain", "optax"])
def test_of_a_checkpoint(name, tmp_path):
    """Without variables to restore into, states are dicts."""
    tx = optax.adam(0.1) if name == "optax" else OPTIMIZERS[name](V)
    params = start(V)
    state = tx.init(params)
    if name != "optax":
        params, state = trained(tx, params, state, [1, 4])
    path = js.Saver().save({"params": params, "state": state}, tmp_path / "model")
    saved = js.Saver().restore(path)
    fresh = start(9, seed=1)
    with pytest.raises(
        js.InvalidArgumentError, match=r"js.checkpoint.resize_rows\(tx, par"
    ):
        js.Saver().restore(path, {"params": fresh, "state": tx.init(fresh)})
    tree = resize_rows(tx, saved["params"], saved["state"], fresh)
    again = resize_rows(tx, params, state, fresh)
    assert jax.tree.structure(tree) == jax.tree.structure(again)
    jax.tree.map(np.testing.assert_array_equal, tree, again)


def test_one_array_is_all():
    tx, table = js.adam(RATE, **EXACT), jnp.ones((2, 2))
    state = tx.init(table)
    new, after = resize_rows(tx, table, state, jnp.zeros((3, 2)), {"value": [1, -1, 0]})
    np.testing.assert_array_equal(new[:, 0], [1, 0, 1])
    assert after.clock.whole.shape == (1,) and after.mu.shape == (3, 2)


def short_logs(monkeypatch, columns):
    monkeypatch.setattr("jslices.optim.engine.clock.SHORTEST_LOG", columns)


#: All rows move in every step, and a log may be short.
SHORT = js.adamw(0.01, weight_decay=0.1, weight_decay_mode="all")


def all_in_turn(change):
    """A table after steps of its first row, with ``change(params, state)`` after each."""
    params = start(40)
    params, state = trained(SHORT, params, SHORT.init(params), range(40))
    for _ in range(80):
        params, state = change(*trained(SHORT, params, state, [0]))
    return SHORT.flush(params, state)[0]["table"]


@pytest.mark.slow
def test_rows_whose_order_changes_do_not_fall_out_of_a_log(monkeypatch):
    """Nor where the new state begins with a longer one, or a shorter."""
    short_logs(monkeypatch, 16)
    back = np.r_[0, np.arange(39, 0, -1)]
    wanted, lengths = all_in_turn(lambda *now: now), iter((64, 16, 4) * 3)

    def resized(params, state):
        if int(state.count) % 11:  # seven times
            return params, state
        short_logs(monkeypatch, next(lengths))
        params, state = resize_rows(SHORT, params, state, params, rows={"table": back})
        assert state.clock.log[0].shape[1] == 16
        return params, state

    assert_close(all_in_turn(resized)[back], wanted)


def test_other_rows_miss_no_step_where_rows_are_reset(monkeypatch):
    short_logs(monkeypatch, 16)
    rows, values = {"table": np.array([3]), "w": None}, {"table": 5.0, "w": None}

    def reset(params, state):
        return js.checkpoint.reset_rows(SHORT, params, state, rows, values)

    found, wanted = all_in_turn(reset), all_in_turn(lambda *now: now)
    others = np.arange(40) != 3
    assert_close(found[others], wanted[others])
    np.testing.assert_array_equal(found[3], 5.0)


@pytest.mark.parametrize("explicit", [False, True])
def test_of_tables_over_devices(explicit):
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    rows = NamedSharding(jax.make_mesh((8,), ("x",), (kind,)), PartitionSpec("x"))
    tx = js.adamw(0.1, **EXACT)
    old, fresh = (jax.device_put(jnp.full((v, D), float(v)), rows) for v in (8, 16))
    state = tx.init({"table": old})
    state = state._replace(count=state.count + 3)  # rows are behind
    params, state = resize_rows(tx, {"table": old}, state, {"table": fresh})
    for x in (params["table"], state.mu["table"], state.clock.last["table"]):
        assert x.sharding.is_equivalent_to(rows, x.ndim) and x.shape[0] == 16
    np.testing.assert_array_equal(params["table"][:, 0], [8] * 8 + [16] * 8)
    np.testing.assert_array_equal(state.clock.last["table"], [0] * 8 + [3] * 8)


@pytest.mark.interop
def test_of_a_model_of_nnx():
    """By the line of docs/models/nnx.md."""
    nnx = pytest.importorskip("flax.nnx")
    tx = js.adam(0.1)
    model, larger = (nnx.Embed(v, D, rngs=nnx.Rngs(v)) for v in (V, 9))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    old, fresh = (nnx.as_pure(nnx.state(m, nnx.Param)) for m in (model, larger))
    optimizer.update(model, jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param)))
    old = nnx.as_pure(nnx.state(model, nnx.Param))
    params, state = resize_rows(tx, old, nnx.as_pure(optimizer.opt_state), fresh)
    after = nnx.Optimizer(larger, tx, wrt=nnx.Param)
    nnx.update(larger, params)
    nnx.update(after.opt_state, nnx.state(state))
    np.testing.assert_array_equal(larger.embedding[:V], model.embedding[...])
    nu = after.opt_state.nu["embedding"][:, 0]
    assert_close(nu, jnp.array([1e-3] * V + [0.0] * 3), rtol=1e-3)


def test_stacked_tables_grow_one_by_one():
    old = StackedTables({"user": (3, 1), "item": (2, 1)})
    new = StackedTables({"item": (3, 1), "shop": (2, 1), "user": (2, 1)}, devices=4)
    rows = new.rows_of(old)
    np.testing.assert_array_equal(rows, [3, 4, -1, -1, -1, 0, 1, -1])
    table, fresh, tx = jnp.arange(5.0)[:, None], jnp.full((8, 1), 9.0), js.adagrad(0.1)
    params, _ = resize_rows(
        tx, {"t": table}, tx.init({"t": table}), {"t": fresh}, {"t": rows}
    )
    assert params["t"].ravel().tolist() == [3, 4, 9, 9, 9, 0, 1, 9]


def test_gradients_that_wait():
    grads = {"table": SLICES, "w": jnp.ones(3)}
    tx, params = js.optim.multi_steps(js.adam(0.1), 2, grads), start(V)
    larger = {"table": js.IndexedSlices(SLICES.values, SLICES.indices, (9, D))}
    tx_after = js.optim.multi_steps(js.adam(0.1), 2, grads | larger)
    step = fast_jit(tx.apply)
    params, state = step(grads_of(V, [1, 4]), tx.init(params), params)
    with pytest.raises(ValueError, match=r"wait in the state .* when mini_step is 0"):
        resize_rows(tx_after, params, state, start(9))
    params, state = step(grads_of(V, [1, 4]), state, params)
    params, state = resize_rows(tx_after, params, state, start(9))
    assert int(state.gradient_step) == 1
    params, state = fast_jit(tx_after.apply)(grads_of(9, [1, 8]), state, params)


def test_names_of_state_arrays_that_are_names_of_parameters():
    params = {"mu": jnp.arange(8.0).reshape(4, 2), "w": jnp.arange(4.0)}
    tx = js.adam(0.1)
    state = tx.init(params)._replace(mu=params, nu=params)
    _, new = resize_rows(tx, params, state, params, rows={"mu": [3, 2, 1, 0]})
    for array in (new.mu, new.nu):
        np.testing.assert_array_equal(array["mu"], params["mu"][::-1])
        np.testing.assert_array_equal(array["w"], params["w"])


def wrong(message, error=ValueError, **changes):
    return pytest.param(changes, error, message, id=message[:20])


@pytest.mark.parametrize(
    "changes, error, message",
    [
        wrong(
            r"table was float32\[6, 2\], float32\[9, 3\] is wanted: only the number",
            fresh={"table": jnp.ones((9, 3)), "w": jnp.ones(3)},
        ),
        wrong(
            r"w was float32\[3\], float32\[1, 3\] is wanted",
            fresh={"table": jnp.ones((9, 2)), "w": jnp.ones((1, 3))},
        ),
        wrong(
            r'table was float32, bfloat16 is wanted: type x.astype\("bfloat16"\)',
            fresh={"table": jnp.ones((9, 2), "bfloat16"), "w": jnp.ones(3)},
        ),
        wrong(
            r"params must hold the arrays that fresh has, got no \['b'\] and \['w'\] as",
            fresh={"table": jnp.ones((9, 2)), "b": jnp.ones(3)},
        ),
        wrong(
            r"state must hold the arrays that tx.init\(fresh\) has, got no \['nu_max/tab",
            tx=js.amsgrad(0.1),
        ),
        wrong(
            r"rows of 'table' must be 9 integers, .* old one of 6, or -1, got int64\[9\]",
            rows={"table": np.arange(9)},
        ),
        wrong(
            r"rows of 'table' must be 9 integers, .* got float64\[9\]",
            rows={"*": np.ones(9)},
        ),
        wrong(
            r"names no variable with 'tabel'; there are \['table', 'w'\]",
            js.errors.NotFoundError,
            rows={"tabel": np.arange(9)},
        ),
        wrong(
            r"rows=...\) wants a dict from names .* got list; there are \['table', 'w'\]",
            TypeError,
            rows=[0, 1],
        ),
        wrong(r"fresh are arrays", TypeError, fresh=jax.eval_shape(lambda: start(9))),
        wrong(
            r"0/diff_params_memory/table is float32\[10, 6, 2\]: its rows are not along",
            tx=(lbfgs := optax.lbfgs()),
            state=lbfgs.init(start(V)),
            fresh=start(V),
            rows={"table": np.arange(V)[::-1]},
        ),
        wrong(r"resize_rows wants transformations \(with init", TypeError, tx={}),
    ],
)
def test_what_does_not_fit_is_named(changes, error, message):
    tx, params = js.adam(0.1), start(V)
    arguments = {"tx": tx, "params": params, "state": tx.init(params), "fresh": start(9)}
    with pytest.raises(error, match=message):
        resize_rows(**arguments | changes)


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(js.rowwise_adagrad(0.1), id="lazy"),
        pytest.param(
            js.sgd(0.1, momentum=0.9, **EXACT), id="exact", marks=pytest.mark.slow
        ),
    ],
)
def test_tables_of_layers_grow_together(optimizer):
    """``[L, V, D]`` to ``[L, V', D]``: as the same rows numbered by one axis."""
    layers, rng, sources = 3, np.random.default_rng(4), np.array([4, -1, 0, 1, -1, 5, 2, 3])
    old = rng.normal(size=(layers, V, D)).astype(np.float32)
    fresh = rng.normal(size=(layers, len(sources), D)).astype(np.float32)
    above = np.arange(layers)[:, None] * V
    by_one_axis = np.where(sources < 0, -1, above + sources).reshape(-1)

    @fast_jit
    def step(table, state, rows):
        axes = table.ndim - 1
        if optimizer.catches_up:
            none = jnp.zeros((len(rows), 0))
            ids = js.IndexedSlices(none, rows, (*table.shape[:axes], 0), axes)
            table, state = optimizer.catch_up(table, state, ids)
        grads = js.IndexedSlices(jnp.ones((len(rows), D)), rows, table.shape, axes)
        return optimizer.apply(grads, state, table)

    def grown(old, fresh, sources):
        table, state = step(old, optimizer.init(old), np.array([1, V + 4, 2 * V]))
        table, state = resize_rows(optimizer, table, state, fresh, {"value": sources})
        new = table
        table, state = step(table, state, np.array([3, 9, 10]))
        return new, flushed(optimizer, table, state)[0]

    stacked = grown(old, fresh, sources)
    flat = grown(old.reshape(-1, D), fresh.reshape(-1, D), by_one_axis)
    for one, other in zip(stacked, flat, strict=True):
        assert_close(one.reshape(-1, D), other)


def test_a_table_with_the_name_of_a_field_takes_its_own_state_along():
    tx, table, back = js.adam(0.1), jnp.arange(3.0)[:, None], np.arange(3)[::-1]
    params = {"mu": {"table": table}, "table": table}
    state = tx.init(params)._replace(mu=params)
    rows = {"mu/table": back}
    _, state = js.checkpoint.resize_rows(tx, params, state, params, rows=rows)
    np.testing.assert_array_equal(state.mu["mu"]["table"], table[back])
    np.testing.assert_array_equal(state.mu["table"], table)
