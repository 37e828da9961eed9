"""Tables in host memory or a file: trained as one in the device's memory would be."""

import functools
import itertools
import json
import os
import shutil
import subprocess
import sys
import time

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimizers
import pytest
from draws import examples
from forked import Origin
from helpers import slow_but_first, slow_unless
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jslices as js
from jslices._host_table import records as storage
from jslices.errors import FailedPreconditionError, NotFoundError
from jslices.optim.engine import missed

V, D = 40, 3


def loss(table, ids, wanted):
    rows = js.embedding_lookup(table, ids, mode="clip")
    return ((rows.reshape(*ids.shape, -1).sum(-1) - wanted) ** 2).sum()


@functools.cache
def step_of(tx):
    @functools.partial(jax.jit, donate_argnums=0)
    def step(rows, ids, wanted):
        table, state = rows.unpack()
        value, grads = js.value_and_grad(loss)(table, ids, wanted)
        table, state = tx.apply(grads, state, table)
        return rows.pack(table, state), value

    return step


def train(table, tx, batches):
    """The losses of a host table."""
    losses = []
    for ids, wanted in batches:
        rows, places = table.fetch(ids)
        rows, value = step_of(tx)(rows, places, wanted)
        table.store(rows)
        losses.append(value)
    return [float(x) for x in losses]


def train_in_memory(table, tx, batches):
    """The losses and the table, all of it in the device's memory."""

    @jax.jit
    def step(table, state, ids, wanted):
        if tx.catches_up:
            table, state = tx.catch_up(table, state, ids)
        value, grads = js.value_and_grad(loss)(table, ids, wanted)
        return *tx.apply(grads, state, table), value

    losses, state = [], tx.init(table)
    for ids, wanted in batches:
        table, state, value = step(table, state, ids, wanted)
        losses.append(float(value))
    return losses, np.asarray(tx.flush(table, state)[0])


def batches_of(seed, count, size=8, rows=V):
    """Ids with duplicates, some rows in every batch and others rarely."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        ids = np.minimum(rng.geometric(0.15, size) - 1, rows - 1)
        yield ids, rng.normal(size=size).astype(np.float32)


def beginning(ids):
    return np.sin(np.arange(D) + np.asarray(ids)[:, None] * 1.0).astype(np.float32)


BATCHES = list(batches_of(0, 6))
START = beginning(np.arange(V))

EXACT = [("sgd", {"momentum": 0.9}), ("adam", {}), ("adamw", {"weight_decay": 0.1})]
EXACT += [("amsgrad", {}), ("lion", {}), ("rmsprop", {}), ("adadelta", {"rho": 0.8})]
EXACT += [("adamw", {"learning_rate": optimizers.SCHEDULE})]
EXACT += [(name, {"weight_decay": 0.1}) for name in ("rowwise_adagrad", "sgd")]
# One case for each set of arrays that are kept of a row.
CASES = [*optimizers.FIRST, ("sgd", {"momentum": 0.9})]
CASES += [("adam", {"bias_correction": "row"})]
CASES += [("rmsprop", {"centered": True, "momentum": 0.9})]
CASES += [("adafactor", {"learning_rate": 0.1, "momentum": 0.9, "factored": False})]
CASES += [(name, {**options, "untouched": "exact"}) for name, options in EXACT]
QUICK = ("adam", "rowwise_adagrad")


def optimizer(name, options):
    """Of these settings; a table of three columns is too narrow to be factored."""
    options = {k: v for k, v in options.items() if k != "min_dim_size_to_factor"}
    return optimizers.make(js, name, 0.1, options)


@pytest.mark.parametrize(
    "name, options",
    slow_unless(CASES, lambda case: case[0] in QUICK and not case[1]),
    ids=optimizers.label,
)
def test_trained_as_in_memory(name, options):
    tx = optimizer(name, options)
    losses, wanted = train_in_memory(jnp.asarray(START), tx, BATCHES)
    for overlap in (False, True):
        table = js.HostTable((V, D), tx, init=beginning, overlap=overlap)
        close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
        close(train(table, tx, BATCHES), losses)
        close(table.read(np.arange(V)), wanted)
        assert table.steps == len(BATCHES)


SGD = js.sgd(0.5)


@examples(25)
@hypothesis.given(
    st.lists(st.lists(st.integers(-2, V + 2), min_size=4, max_size=4), max_size=6),
    st.booleans(),
)
def test_a_numpy_model(batches, overlap):
    init = lambda ids: beginning(ids).round()  # noqa: E731
    table = js.HostTable((V, D), SGD, init=init, overlap=overlap, size=4)
    model = START.round()
    for ids in batches:
        rows, places = table.fetch(np.array(ids))
        values = np.asarray(rows.unpack()[0])
        for i, place in zip(ids, places, strict=True):
            assert place == min(i, 4) if not 0 <= i < V else all(values[place] == model[i])
        rows, _ = step_adding(rows, places)
        table.store(rows)
        for i in ids:
            if 0 <= i < V:
                model[i] += 1
    np.testing.assert_array_equal(table.read(np.arange(V)), model)
    assert table.steps == len(batches)


@functools.partial(jax.jit, donate_argnums=0)
def step_adding(rows, places):
    """Adds one for each id."""
    table, state = rows.unpack()
    grads = js.IndexedSlices(jnp.full((len(places), D), -2.0), places, table.shape)
    table, state = SGD.apply(grads, state, table)
    return rows.pack(table, state), 0


# --- what a record holds --------------------------------------------------------------


@pytest.mark.parametrize(
    "row, dtype",
    slow_unless(
        [((), "float16"), ((2, 3), "bfloat16"), ((1,), "float32"), ((1,), "float16")],
        lambda case: len(case[0]) != 1,
    ),
)
def test_rows_of_any_shape_and_dtype(row, dtype):
    tx = js.adam(0.1, mu_dtype="float32")
    table = js.HostTable((V, *row), tx, init=1.5, dtype=dtype)
    params = jnp.full((V, *row), 1.5, dtype)
    losses, wanted = train_in_memory(params, tx, BATCHES[:2])
    np.testing.assert_allclose(train(table, tx, BATCHES[:2]), losses, rtol=1e-2)
    found = table.read([[0, 1], [2, V]])
    assert (found.shape, found.dtype) == ((2, 2, *row), wanted.dtype)
    np.testing.assert_array_equal(found[0].astype("f4"), wanted[:2].astype("f4"))
    assert np.isnan(found[1, 1].astype("f4")).all()


SLOWLY = [
    pytest.param(dtype, marks=pytest.mark.slow)
    for dtype in ("bfloat16", "float16", "float8_e5m2")
]


@pytest.mark.parametrize("stored", ["float8_e4m3fn", *SLOWLY])
def test_narrow_rows_are_rounded_without_bias(stored, tmp_path):
    """Updates that nearest rounding would lose add up in the mean, whatever the batches."""
    tx, ids, steps = js.adam(0.1, untouched="exact"), np.arange(400), 60
    update = np.float32(jnp.finfo(stored).eps) / 20  # at 1.0

    @jax.jit
    def step(rows, key):
        table, state = rows.unpack()
        return rows.pack(table + update, state, key)

    tables = []
    for order in (ids, ids[::-1]):
        table = js.HostTable((400, D), tx, tmp_path / "t", init=1.0, stored=stored)
        with table:
            for number in range(steps):
                for part in np.split(order, 2) if order[0] else [order]:
                    rows, _ = table.fetch(part)
                    table.store(step(rows, jax.random.fold_in(jax.random.key(3), number)))
            tables.append(table.read(ids))
        (tmp_path / "t").unlink()
    np.testing.assert_array_equal(*tables)  # the same bits in batches of another size
    assert tables[0].dtype == np.float32
    assert (tables[0] == tables[0].astype(stored).astype(np.float32)).all()
    # An element moves by eps in one step of 20.
    deviation = float(jnp.finfo(stored).eps) * (steps / 20 / tables[0].size) ** 0.5
    assert abs(tables[0].mean() - 1 - steps * update) < 4 * deviation


def test_narrow_rows_that_have_a_value_keep_it():
    table = js.HostTable((V, D), SGD, init=1.0, stored="float8_e4m3fn")
    key = jax.random.key(0)
    values = np.float32([[448, 1e6, -1e6], [0, -(2.0**-9), 2.0**-6], [0.5, -2, 240]])
    rows, _ = table.fetch([1, 2, 3])
    state = rows.unpack()[1]
    full = jnp.zeros(rows.unpack()[0].shape).at[:3].set(values)
    table.store(rows.pack(full, state, key))
    np.testing.assert_array_equal(table.read([1, 2, 3]), np.clip(values, -448, 448))
    table.write([9, 8, 7], values, state, key)
    np.testing.assert_array_equal(table.read([9, 8, 7]), np.clip(values, -448, 448))
    rows, _ = table.fetch([1])
    with pytest.raises(js.InvalidArgumentError, match=r"needs a random key.*fold_in"):
        rows.pack(rows.unpack()[0], state)
    rows, _ = js.HostTable((V, D), SGD).fetch([1])
    with pytest.raises(js.InvalidArgumentError, match=r"as float32 rounds nothing"):
        rows.pack(*rows.unpack(), key)
    for options in ({"stored": "int8"}, {"stored": "float16", "dtype": "bfloat16"}):
        with pytest.raises(js.InvalidArgumentError, match=r"stored=.*one of bfloat16"):
            js.HostTable((V, D), SGD, **options)


def test_float64():
    with jax.enable_x64(True):
        tx = js.adam(0.1)
        table = js.HostTable((V, D), tx, dtype="float64")
        start = jnp.zeros((V, D), jnp.float64)
        losses, wanted = train_in_memory(start, tx, BATCHES[:2])
        assert train(table, tx, BATCHES[:2]) == losses
        np.testing.assert_array_equal(table.read(np.arange(V)), wanted)


def test_rows_begin_when_they_are_fetched_and_state_begins_with_them():
    tx = js.adagrad(0.1, initial_accumulator_value=0.25)
    asked = []

    def init(ids):
        assert ids.dtype == np.int64
        asked.extend(ids.tolist())
        return beginning(ids)

    table = js.HostTable((V, D), tx, init=init)
    assert not asked
    rows, _ = table.fetch([3, 3, 9])
    assert set(asked) == {3, 9}
    assert np.asarray(rows.unpack()[1].sum_of_squares)[:2].tolist() == [[0.25] * D] * 2
    np.testing.assert_array_equal(table.read([3]), START[[3]])  # was not stored


def test_rows_that_were_never_stored_are_told():
    """At the line of the next fetch, which gives nothing while warnings are errors."""
    table = js.HostTable((V, D), SGD, overlap=True)
    for ids in ([3, 7], [3]):
        table.store(table.fetch(ids)[0])
        table.read(ids)  # evaluates, and says nothing
    table.fetch([3])
    with pytest.warns(UserWarning, match=r"lost: type table\.store\(rows\).*read") as told:
        table.fetch([4])
    assert [x.filename for x in told] == [__file__]
    with pytest.raises(UserWarning, match="not stored"):
        table.fetch([3])
    table.reset([4])  # takes the rows of the last fetch back
    table.fetch([4])
    both = js.HostTable.together({"a": js.HostTable((V, D), SGD)})
    both.store(both.fetch({"a": [1]})[0])
    both.fetch({"a": [1]})
    with pytest.warns(UserWarning, match="not stored"):
        both.fetch({"a": [1]})


def test_ids_may_be_a_tree():
    table = js.HostTable((V, D), SGD)
    rows, places = table.fetch({"item": np.array([[7, 3], [7, V]]), "user": [9, -1]})
    assert places["item"].tolist() == [[1, 0], [1, len(rows.words)]]
    assert places["user"].tolist() == [2, -1] and places["user"].dtype == np.int32
    assert rows.counts.tolist() == [1, 2, 1, *[0] * (len(rows.words) - 3)]


BATCH = [[3, -1, 7], [-7, 3, V]]


@pytest.mark.parametrize(
    "lookup",
    [
        js.embedding_lookup,
        functools.partial(js.embedding_lookup, padding_id=-1),
        functools.partial(js.embedding_lookup, padding_id=-7),
        js.embedding_lookup_sparse,
        js.safe_embedding_lookup_sparse,
        functools.partial(js.safe_embedding_lookup_sparse, mode="drop"),
    ],
)
@pytest.mark.parametrize("before", [[1], list(range(12))])
def test_ids_that_are_no_rows_mean_what_they_mean_in_an_array(lookup, before):
    """Whatever room the batch before has made."""
    table = js.HostTable((V, D), SGD, init=beginning)
    table.store(table.fetch(before)[0])
    rows, places = table.fetch(BATCH)

    def of(table, ids):
        sums = lambda table: jnp.nansum(lookup(table, ids) * 2)  # noqa: E731
        return lookup(table, ids), js.grad(sums)(table).to_dense()

    (found, grads), (wanted, wanted_grads) = (
        of(rows.unpack()[0], places),
        of(jnp.asarray(START), jnp.asarray(BATCH)),
    )
    assert_same = functools.partial(np.testing.assert_allclose, rtol=1e-6)
    assert_same(found, wanted)
    assert_same(grads[:2], wanted_grads[jnp.array([3, 7])])


def test_ids_beyond_32_bits_are_no_rows():
    table = js.HostTable((V, D), SGD, size=4)
    wide = np.array([3, 2**32 + 3, -(2**40)])
    rows, places = table.fetch(wide)
    table.store(rows)
    assert places.tolist() == [0, 4, -(2**31)]
    assert table.fetch(wide.astype(np.uint64))[1].tolist() == [0, 4, 4]


def test_a_step_is_compiled_once():
    tx, size = js.adam(0.2), 64
    table = js.HostTable((10_000, D), tx)
    train(table, tx, batches_of(1, 8, size, rows=10_000))
    assert step_of(tx)._cache_size() <= 2
    tx = js.adam(0.3)
    table = js.HostTable((10_000, D), tx, size=size)
    train(table, tx, batches_of(1, 8, size, rows=10_000))
    assert step_of(tx)._cache_size() == 1


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_of_other_parameters_too_is_compiled_once(overlap):
    """They are committed to no device before the first step, and nor are they after it."""
    table, w = js.HostTable((V, D), SGD, overlap=overlap), jnp.ones(D)

    @jax.jit
    def step(rows, w, places):
        return rows.pack(*rows.unpack()), w + rows.unpack()[0][places].sum()

    for ids in ([1, 2], [2, 3], [5, 1]):
        rows, places = table.fetch(ids)
        rows, w = step(rows, w, places)
        table.store(rows)
    table.close()
    assert step._cache_size() == 1


def test_on_all_devices_of_a_mesh():
    mesh = jax.make_mesh((4,), ("x",), (jax.sharding.AxisType.Auto,))
    tx = js.adam(0.1)
    losses, wanted = train_in_memory(jnp.asarray(START), tx, BATCHES)
    table = js.HostTable((V, D), tx, init=beginning, device=NamedSharding(mesh, P()))
    by_batch = NamedSharding(mesh, P("x"))
    found = []
    for ids, labels in BATCHES:
        rows, places = table.fetch(ids)
        places, labels = jax.device_put((places, labels), by_batch)
        rows, value = step_of(tx)(rows, places, labels)
        assert rows.words.sharding.is_fully_replicated
        table.store(rows)
        found.append(float(value))
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    np.testing.assert_allclose(table.read(np.arange(V)), wanted, rtol=1e-5, atol=1e-6)


def test_catch_up_makes_up_all_missed_steps():
    tx = js.adam(0.1, untouched="exact")
    tables = [js.HostTable((V, D), tx, init=beginning) for _ in range(2)]
    for table in tables:
        train(table, tx, BATCHES)
    tables[0].catch_up()
    assert tables[0].steps == len(BATCHES)
    every = np.arange(V)
    np.testing.assert_array_equal(tables[0].read(every), tables[1].read(every))
    for table in tables:
        train(table, tx, BATCHES)
    np.testing.assert_allclose(*(x.read(every) for x in tables), rtol=1e-4, atol=1e-5)


# --- rows that begin anew, come from elsewhere or go elsewhere -------------------------


def test_a_step_by_another_optimizer_than_the_exact_table_s_is_said():
    """It cannot tell that rows have caught up, by the table's own."""
    table = js.HostTable((V, D), js.adam(0.1, untouched="exact"))
    tx = js.adam(0.2, untouched="exact")
    with pytest.warns(UserWarning, match="HostTable catch up by its tx.*the same one"):
        train(table, tx, BATCHES[:1])


@pytest.mark.slow
@pytest.mark.parametrize("in_file", [True, False])
def test_rows_of_a_larger_exact_table_are_those_of_resize_rows(in_file, tmp_path):
    """They begin anew, and decay with the steps from then on."""
    tx = js.adamw(0.1, weight_decay=0.5, untouched="exact")
    path, height = str(tmp_path / "table") if in_file else None, V + 20_000

    @jax.jit
    def step(params, state, ids, wanted):
        params, state = tx.catch_up(params, state, ids)
        return tx.apply(js.grad(loss)(params, ids, wanted), state, params)

    with js.HostTable((V, D), tx, path, init=beginning) as table:
        params, state = jnp.array(START), tx.init(START)
        for batch in BATCHES:
            params, state = step(params, state, *batch)
        train(table, tx, BATCHES)
        table.grow(height)
        fresh = jnp.array(beginning(np.arange(height)))
        params, state = js.checkpoint.resize_rows(tx, params, state, fresh)
        new = np.arange(V, height)
        np.testing.assert_array_equal(table.read(new), beginning(new))
        batches = list(batches_of(1, 3, rows=height))
        batches[1][0][:2] = V + 3, height - 1
        for batch in batches:
            params, state = step(params, state, *batch)
        train(table, tx, batches)
        read = table.read(np.arange(height))
    wanted = tx.flush(params, state)[0]
    assert np.abs(wanted[V:] - beginning(new)).max() > 0.01  # they have moved since
    np.testing.assert_allclose(read, wanted, rtol=1e-4, atol=1e-5)
    if in_file:
        with js.HostTable((height, D), tx, path, init=beginning) as again:
            np.testing.assert_array_equal(again.read(np.arange(height)), read)


def test_rows_begin_anew():
    tx = js.adagrad(0.1, initial_accumulator_value=0.25)
    table, undisturbed = (js.HostTable((V, D), tx, init=beginning) for _ in range(2))
    for each in (table, undisturbed):
        train(each, tx, BATCHES)
    rows = table.written_rows()
    assert rows.tolist() == np.unique([ids for ids, _ in BATCHES]).tolist()
    table.reset([[rows[0], rows[2]], [rows[0], V - 1]])  # the last was never fetched
    assert table.steps == len(BATCHES)
    assert table.written_rows().tolist() == [*rows[1:2], *rows[3:]]
    wanted = undisturbed.read(np.arange(V))
    wanted[rows[[0, 2]]] = START[rows[[0, 2]]]
    np.testing.assert_array_equal(table.read(np.arange(V)), wanted)
    now, _ = table.fetch(rows[[0, 2]])
    assert (np.asarray(now.unpack()[1].sum_of_squares)[:2] == 0.25).all()
    table.reset(rows[:1])
    with pytest.raises(FailedPreconditionError, match=r"since the last .*reset"):
        table.store(now)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, options",
    [
        ("adamw", {"weight_decay": 0.3}),
        ("rmsprop", {"initial_scale": 1.0}),
        ("adamw", {"learning_rate": optimizers.SCHEDULE}),
    ],
    ids=optimizers.label,
)
def test_rows_that_begin_anew_have_missed_no_step(name, options):
    tx = optimizer(name, {**options, "untouched": "exact"})
    host, rows = js.HostTable((V, D), tx, init=beginning), [0, 1, V - 1]
    params = {"table": jnp.asarray(START)}
    state, fresh = tx.init(params), params

    @jax.jit
    def step(params, state, ids, wanted):
        params, state = tx.catch_up(params, state, {"table": ids})
        grads = js.grad(lambda params: loss(params["table"], ids, wanted))(params)
        return tx.apply(grads, state, params)

    for part in (BATCHES[:3], BATCHES[3:]):
        for ids, labels in part:
            params, state = step(params, state, ids, labels)
        train(host, tx, part)
        sources = {"table": np.where(np.isin(np.arange(V), rows), -1, np.arange(V))}
        params, state = js.checkpoint.resize_rows(tx, params, state, fresh, sources)
        host.reset(rows)
        np.testing.assert_array_equal(host.read(rows), START[rows])
        ids, labels = BATCHES[0]
        params, state = step(params, state, ids, labels)
        train(host, tx, BATCHES[:1])
    wanted = tx.flush(params, state)[0]["table"]
    np.testing.assert_allclose(host.read(np.arange(V)), wanted, rtol=1e-4, atol=1e-5)


def test_a_copy_of_some_rows_in_another_order(tmp_path):
    tx = js.adam(0.1)
    table = js.HostTable((V, D), tx, init=beginning)
    train(table, tx, BATCHES)
    rows = np.array([5, 0, 0, 3])
    table.save(tmp_path / "some", rows=rows)
    with js.HostTable((4, D), tx, tmp_path / "some") as some:
        np.testing.assert_array_equal(some.read([0, 1, 2, 3]), table.read(rows))
        assert some.steps == table.steps
        for each, ids in ((some, [3, 0]), (table, [3, 5])):
            train(each, tx, [(np.array(ids), np.ones(2, np.float32))])
        np.testing.assert_array_equal(some.read([3, 0]), table.read([3, 5]))
    for wrong, message in (([0, V], "got row 40 of rows 0 to 39"), ([], r"shape=\(0,\)")):
        with pytest.raises(js.InvalidArgumentError, match=message):
            table.save(tmp_path / "none", rows=np.array(wrong, int))
    assert os.listdir(tmp_path) == ["some"]


@pytest.mark.parametrize("name", slow_but_first("momentum", "lazy", "adam"))
def test_a_table_that_was_trained_in_memory(name, tmp_path):
    exact = {"untouched": "exact"}
    tx = {
        "momentum": js.sgd(0.1, 0.9, **exact),
        "lazy": js.adam(0.1),
        "adam": js.adam(0.1, **exact),
    }[name]
    params, state = jnp.asarray(START), tx.init(jnp.asarray(START))
    for ids, wanted in BATCHES[:3]:
        params, state = tx.catch_up(params, state, ids)
        grads = js.grad(loss)(params, ids, wanted)
        params, state = tx.apply(grads, state, params)
    with js.HostTable((V, D), tx, tmp_path / "table") as table:
        for rows in (np.arange(V)[::-3], np.arange(V)[1::3], np.arange(V)[2::3]):
            part = [
                x[rows] if x.ndim and len(x) == V else x for x in jax.tree.leaves(state)
            ]
            table.write(rows, params[rows], jax.tree.structure(state).unflatten(part))
        assert table.steps == 0 and len(table.written_rows()) == V
        train(table, tx, BATCHES[3:])
        found = table.read(np.arange(V))
    wanted = train_in_memory(jnp.asarray(START), tx, BATCHES)[1]
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_a_table_of_another_library():
    tx, moments = js.adam(0.1), np.float32([[[0.5]], [[0.25]]]) * np.ones((2, V, D), "f4")
    slots = {"table": dict(zip(("exp_avg", "exp_avg_sq"), moments, strict=True))}
    params = {"table": START}
    state = js.checkpoint.import_state(tx, params, slots, count=7)
    table = js.HostTable((V, D), tx)
    flat = jax.tree.leaves(state)
    of_array = jax.tree.structure(tx.init(START)).unflatten(flat)
    table.write(np.arange(V), START, of_array)
    rows, _ = table.fetch([3, 5])
    params, found = rows.unpack()
    assert int(found.count) == 7 and (found.mu[:2] == 0.5).all()
    np.testing.assert_array_equal(params[:2], START[[3, 5]])
    with pytest.raises(js.InvalidArgumentError, match=r"count 0, and the table has 7.*new"):
        table.write([1], START[:1], tx.init(START[:1]))
    for ids, wrong, message in [
        ([1, 1], START[:2], r"write\(.* got a row twice"),
        ([1, 2], START[:1], "got 1 rows, and these are 2"),
        ([1, V], START[:2], r"write\(.* got row 40"),
        ([1], START[:1].tolist(), r"table as float64\[1, 3\].*float32"),
    ]:
        like = jax.tree.map(
            lambda x, wrong=wrong: x[: len(wrong)] if x.ndim else x, of_array
        )
        with pytest.raises(js.InvalidArgumentError, match=message):
            table.write(ids, wrong, like)


def test_word_vectors_of_a_table_larger_than_memory(tmp_path):
    """They are read part by part."""
    table = js.HostTable((9000, 64), SGD, init=lambda ids: ids[:, None] * np.ones(64))
    words = [f"w{i}" for i in range(9000)]
    read, sizes = table.read, []
    table.read = lambda ids: sizes.append(len(ids)) or read(ids)
    js.checkpoint.save_word_vectors(tmp_path / "all.vec", words, table)
    found = js.checkpoint.load_word_vectors(tmp_path / "all.vec")
    assert found.words == words and max(sizes) < 5000
    assert (found.vectors == np.arange(9000)[:, None]).all()


# --- files ----------------------------------------------------------------------------


def test_training_goes_on_from_a_file(tmp_path):
    tx = js.adam(0.1)
    losses, wanted = train_in_memory(jnp.asarray(START), tx, BATCHES)
    path = tmp_path / "table"
    with js.HostTable((V, D), tx, path, init=beginning) as table:
        found = train(table, tx, BATCHES[:4])
    assert os.listdir(tmp_path) == ["table"]
    with js.HostTable((V, D), tx, path, init=beginning, overlap=True) as table:
        assert table.steps == 4
        found += train(table, tx, BATCHES[table.steps :])
        table.flush()
        np.testing.assert_allclose(table.read(np.arange(V)), wanted, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found, losses, rtol=1e-4)
    table.close()


def test_files_take_batches_without_a_row_and_narrow_shared_values(tmp_path):
    tx = optax.inject_hyperparams(js.sgd, hyperparam_dtype=jnp.bfloat16)(learning_rate=0.5)
    with js.HostTable((V, D), tx, tmp_path / "table", init=1.0) as table:
        for ids in ([V, -1], [3, V]):
            rows, _ = table.fetch(np.array(ids))
            table.store(rows)
    with js.HostTable((V, D), tx, tmp_path / "table") as table:
        assert table.steps == 2
        assert table.read([3]).tolist() == [[1.0] * D]
        with pytest.warns(UserWarning, match=r"table'\) begin at 0.*give init="):
            assert table.read([3, 4]).tolist() == [[1.0] * D, [0.0] * D]
        table.save(tmp_path / "copy")
    table = js.HostTable((V, D), tx)
    table.restore(tmp_path / "copy")
    with pytest.warns(UserWarning, match="begin at 0, and others did not"):
        table.fetch([5])


@pytest.mark.slow
def test_a_file_that_is_open_is_refused(tmp_path):
    path = tmp_path / "table"
    with js.HostTable((V, D), SGD, path) as table:
        train(table, SGD, BATCHES[:1])
        with pytest.raises(FailedPreconditionError, match=r"is open as a HostTable.*cl"):
            js.HostTable((V, D), SGD, path)
        code = f"js.HostTable(({V}, {D}), js.sgd(0.5), {str(path)!r})"
        other = subprocess.run(
            [sys.executable, "-c", f"import jslices as js; {code}"],
            capture_output=True,
            text=True,
        )
        assert "FailedPreconditionError" in other.stderr and table.steps == 1
    js.HostTable((V, D), SGD, path).close()


def test_other_files_are_refused_and_left_alone(tmp_path):
    path = tmp_path / "table"
    path.write_text("my thesis")
    with pytest.raises(js.InvalidArgumentError, match="no file of a HostTable"):
        js.HostTable((V, D), SGD, path)
    assert path.read_text() == "my thesis"
    path.unlink()
    js.HostTable((V, D), SGD, path).close()
    before = path.read_bytes()
    exact = js.sgd(0.1, momentum=0.9, untouched="exact")
    for shape, tx, differs in [
        ((V + 1, D), SGD, r"40 rows, and .* 41 rows;"),
        ((V, D), js.adam(0.1), r"less, and .* mu float32\[3\], nu float32\[3\];"),
        ((V, D + 1), SGD, r"table float32\[3\], and .* table float32\[4\];"),
        ((V, D), exact, r"less, and .* clock/last int32\[\],"),
    ]:
        with pytest.raises(js.InvalidArgumentError, match=f"holds a table with {differs}"):
            js.HostTable(shape, tx, path)
    assert path.read_bytes() == before
    for old, new in [
        (b'["count", "int32", []]', b'["clock/run", "f4", []]'),
        (b'"record": ', b'"fields": '),
        (b"host table 2\n", b"host table 1\n"),
    ]:
        path.write_bytes(before.replace(old, new))
        with pytest.raises(js.InvalidArgumentError, match=r"earlier version .*resize_rows"):
            js.HostTable((V, D), SGD, path)


def test_another_optimizer_than_the_last_time_is_said(tmp_path):
    path, open_with = tmp_path / "t", lambda tx: js.HostTable((V, D), tx, path).close()
    for _ in range(2):
        open_with(js.adam(0.1, untouched="exact"))
        open_with(js.adam(0.1, 0.9, untouched="exact"))
    with pytest.warns(
        UserWarning, match=r"t was last open with another .* than adam\(.*0.2"
    ):
        open_with(js.adam(0.2, untouched="exact"))
    open_with(js.adam(0.2, untouched="exact"))
    path.unlink()
    for learning_rate in (0.1, 0.1, 0.2):  # of Optax they are not known
        open_with(optax.adam(learning_rate))
    path.unlink()
    chained = js.optim.chain(js.optim.clip_rows_by_norm(1.0), js.sgd(0.1))
    open_with(chained)
    open_with(js.optim.chain(js.optim.clip_rows_by_norm(1.0), js.sgd(0.1)))
    other = js.optim.chain(js.optim.clip_rows_by_norm(2.0), js.sgd(0.1))
    saved = js.HostTable((V, D), other)
    with pytest.warns(UserWarning, match=r"than chain\(.*max_norm=2.0.*sgd"):
        saved.restore(path)
    open_with(chained)


def test_save_and_restore(tmp_path):
    tx = js.adam(0.1)
    table = js.HostTable((V, D), tx, init=beginning, overlap=True)
    train(table, tx, BATCHES[:3])
    table.save(tmp_path / "saved")
    assert os.listdir(tmp_path) == ["saved"]
    later = train(table, tx, BATCHES[3:])
    other = js.HostTable((V, D), tx, init=beginning)
    train(other, tx, BATCHES[4:])
    other.restore(tmp_path / "saved")
    assert other.steps == 3 and train(other, tx, BATCHES[3:]) == later
    with js.HostTable((V, D), tx, tmp_path / "saved", init=beginning) as opened:
        assert train(opened, tx, BATCHES[3:]) == later
        with pytest.raises(js.InvalidArgumentError, match="file of this table"):
            opened.save(tmp_path / "saved")
    with pytest.raises(NotFoundError, match="is not there"):
        other.restore(tmp_path / "nothing")
    with pytest.raises(OSError):
        other.save(tmp_path / "no" / "directory")


def train_until_killed(path):
    """Run by the test below, in a process of its own."""
    tx = js.adam(0.1)
    table = js.HostTable((V, D), tx, path, init=beginning)
    for batch in itertools.islice(batches_of(0, 10_000), table.steps, None):
        train(table, tx, [batch])
        print(table.steps, flush=True)


@pytest.mark.slow
@pytest.mark.parametrize("kills", [1, 3])
def test_a_killed_process_leaves_whole_steps(tmp_path, kills):
    path, tx, before = str(tmp_path / "table"), js.adam(0.1), 0
    undisturbed = js.HostTable((V, D), tx, init=beginning)
    with Origin("test_host_table") as origin:
        for kill in range(kills):
            with origin.forked("train_until_killed", path=path) as process:
                while len(done := process.lines()) < 3 + kill:
                    assert not process.has_ended(), process.errors()
                    time.sleep(0.001)
                time.sleep(0.00037 * kill)  # somewhere in a step
            assert int(done[0]) > before
            with js.HostTable((V, D), tx, path, init=beginning) as table:
                steps, rows = table.steps, table.read(np.arange(V))
            assert steps >= before + 3 + kill
            train(undisturbed, tx, list(batches_of(0, steps))[before:])
            np.testing.assert_array_equal(rows, undisturbed.read(np.arange(V)))
            before = steps


FLAT = """
import json, os, sys
import jax, numpy as np, jslices as js, test_host_table as t
def anonymous():
    lines = open("/proc/self/status").read().splitlines()
    return int(next(x for x in lines if x.startswith("RssAnon")).split()[1]) / 1024
tx, rng, seen = js.adam(0.1), np.random.default_rng(0), []
table = js.HostTable((int(sys.argv[2]), 32), tx, sys.argv[1])
for number in range(60):
    ids = rng.integers(0, table.shape[0], 512)
    t.train(table, tx, [(ids, np.ones(512, np.float32))])
    seen.append(anonymous())
print(json.dumps([os.path.getsize(sys.argv[1]) / 2**30, seen[10], seen[-1]]))
"""


def kind_of_file_system(path):
    said = subprocess.run(["stat", "-f", "-c", "%T", path], capture_output=True, text=True)
    return said.stdout.strip()


def test_a_sparse_file_may_be_larger_than_the_disk(tmp_path):
    if kind_of_file_system(tmp_path) in ("", "tmpfs"):
        pytest.skip("needs a disk with sparse files")
    rows = 2 * shutil.disk_usage(tmp_path).free // 4 // 2**20
    with js.HostTable((rows, 2**20), SGD, tmp_path / "table", init=1.0) as table:
        rows, _ = table.fetch([3, 5])
        table.store(rows)
        assert os.stat(tmp_path / "table").st_blocks * 512 < 2**24
    assert os.stat(tmp_path / "table").st_size > shutil.disk_usage(tmp_path).free


def test_copies_are_sparse(tmp_path):
    """Rows that never began, or begin anew, take no room in them."""
    with js.HostTable((100_000, 64), SGD, tmp_path / "table") as table:
        rows, _ = table.fetch(np.r_[:4000, 7, 50_000, 99_999])
        table.store(rows)
        table.reset(np.arange(20, 4000))
        table.save(tmp_path / "copy")
        table.grow(200_000)
        assert table.written_rows().tolist() == [*range(20), 50_000, 99_999]
    for name in ("table", "copy"):
        assert os.stat(tmp_path / name).st_blocks * 512 < 2**16


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs Linux")
def test_a_large_file_trains_in_little_memory(tmp_path):
    rows = 50_000_000  # 18 GiB, of which the pages of 30,000 rows come to be on the disk
    if shutil.disk_usage(tmp_path).free < 2**30 + rows * 400:
        rows = shutil.disk_usage(tmp_path).free // 800
    found = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    said = subprocess.run(
        [sys.executable, "-c", FLAT, str(tmp_path / "table"), str(rows)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": found},
    )
    assert said.returncode == 0, said.stderr
    size, warm, after = json.loads(said.stdout)
    assert size * 2**30 > rows * 388 and after < warm + 64


# --- refused --------------------------------------------------------------------------


def test_optimizers_that_step_rows_together_are_refused():
    like = js.IndexedSlices(jnp.zeros((2, 256)), jnp.array([1, 2]), (300, 256))
    for tx, message in [
        (js.adafactor(0.1), r"keeps v_\w+ \[256\] for all rows.*factored=False"),
        (js.optim.multi_steps(SGD, 2, like), "multi_steps.*accumulate_gradients|sizes"),
    ]:
        with pytest.raises(js.InvalidArgumentError, match=message):
            js.HostTable((300, 256), tx)
    js.HostTable((300, 256), js.adafactor(0.1, factored=False))
    js.HostTable((300, 127), js.adafactor(0.1))


def test_optimizers_of_optax_and_chains():
    chained = js.optim.chain(js.optim.clip_rows_by_norm(1e6), js.adam(0.1))
    _, wanted = train_in_memory(jnp.asarray(START), js.adam(0.1), BATCHES[:2])
    for tx in (js.from_optax(optax.adam(0.1)), chained):
        table = js.HostTable((V, D), tx, init=beginning)
        train(table, tx, BATCHES[:2])
        np.testing.assert_allclose(table.read(np.arange(V)), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: js.HostTable((), SGD), js.InvalidArgumentError, r"wanted \(V, \*D\)"),
        (lambda: js.HostTable((0, 3), SGD), js.InvalidArgumentError, r"\(0, 3\)"),
        (lambda: js.HostTable((V, D), SGD, size=0), js.InvalidArgumentError, "size=0"),
        (
            lambda: js.HostTable((V, D), SGD, dtype="int32"),
            js.InvalidArgumentError,
            "int32",
        ),
        (
            lambda: js.HostTable((V, D), SGD, dtype="complex64"),
            js.InvalidArgumentError,
            "complex64.*imaginary parts in one row",
        ),
        (
            lambda: js.HostTable((V, D), SGD, init=np.ones((V, D))),
            js.InvalidArgumentError,
            r"init=array\[40, 3\].*lambda ids: W\[ids\]",
        ),
        (lambda: js.HostTable((V, D), 0.1), TypeError, "HostTable wants transformations"),
    ],
)
def test_what_is_no_table(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    "use",
    [
        lambda table: table[np.array([1])],
        list,
        np.asarray,
        jnp.asarray,
        lambda table: js.embedding_lookup(table, jnp.array([1])),
        js.grad(lambda table: table[jnp.array([1])].sum()),
        js.sgd(0.1).init,
        lambda table: js.adam(0.1).init({"table": table}),
    ],
)
def test_a_host_table_is_no_array(use):
    with pytest.raises(TypeError, match=r"no array: .*table\.fetch\(ids\) brings.*read"):
        use(js.HostTable((V, D), SGD))


@pytest.mark.filterwarnings("ignore:the rows that were fetched before:UserWarning")
def test_misuse_says_what_to_type_and_changes_nothing():
    table = js.HostTable((V, D), SGD, size=2)
    with pytest.raises(js.InvalidArgumentError, match=r"3 distinct rows.*size=2.*least 3"):
        table.fetch([1, 2, 3])
    with pytest.raises(TypeError, match=r"integers, got float32\[2\]"):
        table.fetch(np.ones(2, np.float32))
    with pytest.raises(TypeError, match=r"<U3\[1\]; for strings type keyed="):
        table.fetch(["dog"])
    with pytest.raises(TypeError, match=r"outside of jit"):
        jax.jit(table.fetch)(jnp.ones(2, int))
    with pytest.raises(FailedPreconditionError, match="nothing was fetched"):
        table.store(js.HostTable((V, D), SGD, size=2).fetch([1])[0])
    first, _ = table.fetch([1, 2])
    second, _ = table.fetch([3, 4])
    with pytest.raises(FailedPreconditionError, match=r"earlier fetch.*not written"):
        table.store(first)
    other, _ = js.HostTable((V, D), SGD, size=2).fetch([3, 4])
    second, _ = table.fetch([3, 4])
    with pytest.raises(FailedPreconditionError, match=r"another table.*not written"):
        table.store(other)
    with pytest.raises(TypeError, match="store wants the rows"):
        table.store(second.words)
    with pytest.raises(TypeError, match="store wants the rows"):
        table.store(js.HostTable((V, D), js.adam(0.1)).fetch([1])[0])
    with pytest.raises(js.InvalidArgumentError, match=r"table as float16\[2, 3\].*float32"):
        second.pack(second.unpack()[0].astype("float16"), second.unpack()[1])
    with pytest.raises(js.InvalidArgumentError, match=r"got 1 rows.*are 2"):
        second.pack(second.unpack()[0][:1], second.unpack()[1])
    with pytest.raises(js.InvalidArgumentError, match="structure"):
        second.pack(second.unpack()[0], js.adam(0.1).init(jnp.zeros((2, D))))
    assert table.steps == 0 and not table.read(np.arange(V)).any()
    bad = js.HostTable((V, D), SGD, init=lambda ids: np.zeros(3))
    with pytest.raises(js.InvalidArgumentError, match=r"returned \[3\]; wanted \[2, 3\]"):
        bad.fetch([1, 2])
    table.close()
    with pytest.raises(FailedPreconditionError, match=r"HostTable\(.* is closed"):
        table.fetch([1])


GAPS = {
    "adamw": (js.adamw, optax.adamw, {"weight_decay": 0.1}),
    "sgd": (js.sgd, optax.sgd, {"momentum": 0.9}),
    "lion": (js.lion, optax.lion, {"weight_decay": 0.1}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name, in_file", [*itertools.product(GAPS, (False, True))])
def test_rows_that_wait_longer_than_a_device_s_log(name, in_file, tmp_path):
    """The host keeps the log of all steps; and the rate is an argument of each."""
    ours, theirs, options = GAPS[name]
    make = lambda rate: ours(rate, untouched="exact", **options)  # noqa: E731
    path, steps, height = tmp_path / "table" if in_file else None, 900, 16
    rates = np.where(np.arange(steps) < 300, 1e-2, 1e-3).astype(np.float32)
    batches = [[k % 3, 3] if k < 6 else [4 + k % 5, 9] for k in range(steps)]

    @jax.jit
    def step(rows, places, rate):
        table, state = rows.unpack()
        grads = js.grad(lambda table: (table[places] ** 2).sum())(table)
        return rows.pack(*make(rate).apply(grads, state, table))

    table = js.HostTable((height, D), make(1e-2), path, init=1.0, size=4)
    with pytest.warns(UserWarning, match="HostTable catch up by its tx"):
        for k, (ids, rate) in enumerate(zip(batches, rates, strict=True)):
            if in_file and k == 700:
                table.close()
                table = js.HostTable((height, D), make(1e-2), path, init=1.0, size=4)
            rows, places = table.fetch(ids)
            table.store(step(rows, places, rate))
    assert table.fetch([1])[0].shared[-1].size < 16 * 1024
    found = table.read(np.arange(height))
    table.close()

    def body(carry, now):
        (params, state), (ids, rate) = carry, now
        grads = jax.grad(lambda p: (p[ids] ** 2).sum())(params)
        updates, state = theirs(rate, **options).update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    start = jnp.ones((height, D))
    begin = start, theirs(1e-2, **options).init(start)
    batches = jnp.array(batches), jnp.asarray(rates)
    (wanted, _), _ = jax.jit(lambda c: jax.lax.scan(body, c, batches))(begin)
    # Lion's signs turn on rounding where a row is nearly zero.
    atol = 3e-3 if name == "lion" else 0
    np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=atol)


def squares(table, ids):
    return (table[ids] ** 2).sum()


def trained_at_once(tx, loss, batches, shape=(V, D)):
    """What a dense optimizer of Optax makes of a table of ones."""

    def body(carry, ids):
        params, state = carry
        updates, state = tx.update(jax.grad(loss)(params, ids), state, params)
        return (optax.apply_updates(params, updates), state), None

    start = jnp.ones(shape)
    run = jax.jit(lambda *carry: jax.lax.scan(body, carry, jnp.array(batches))[0])
    return run(start, tx.init(start))[0]


def trained_from_host(table, tx, loss, batches, grad=js.grad):
    @jax.jit
    def step(rows, places):
        params, state = rows.unpack()
        return rows.pack(*tx.apply(grad(loss)(params, places), state, params))

    for ids in batches:
        rows, places = table.fetch(ids)
        table.store(step(rows, places))
    return table.read(np.arange(table.shape[0]))


def test_a_dense_gradient_steps_the_fetched_rows_alone():
    tx, batches = js.adam(0.1, untouched="exact"), [[k % 3, 3 + k % 5] for k in range(12)]
    table = js.HostTable((V, D), tx, init=1.0, size=2)
    found = trained_from_host(table, tx, squares, batches, jax.grad)
    wanted = trained_at_once(optax.adam(0.1), squares, batches)
    np.testing.assert_allclose(found, wanted, rtol=1e-4)


EXACT_ADAM = js.adam(0.01, untouched="exact")


@pytest.mark.parametrize(
    "row, tx",
    slow_unless(
        [
            ((2, 3), EXACT_ADAM),
            ((D,), js.optim.partition({"x": EXACT_ADAM, "y": EXACT_ADAM}, lambda _: "x")),
            ((D,), js.optim.params_ema(EXACT_ADAM, 0.99)),
        ],
        lambda case: case[0] == (2, 3),
    ),
    ids=["rows of two axes", "partition", "params_ema"],
)
def test_rows_of_all_kinds_wait_longer_than_a_device_s_log(row, tx, tmp_path):
    batches = [[k % 3, 3] if k < 6 else [4 + k % 5, 9] for k in range(600)]
    with js.HostTable((V, *row), tx, tmp_path / "table", init=1.0, size=2) as table:
        found = trained_from_host(table, tx, squares, batches)
    wanted = trained_at_once(optax.adam(0.01), squares, batches, (V, *row))
    np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=1e-6)


def test_in_memory_the_log_grows_with_the_steps(monkeypatch):
    with js.HostTable((V, D), js.adamw(0.1, untouched="exact")) as table:
        assert table._records.logs[0].nbytes < 1 << 18
    monkeypatch.setattr(storage, "FIRST_STEPS", 4)
    batches = [[k % 3, 3] if k < 6 else [4 + k % 5, 9] for k in range(600)]
    with js.HostTable((V, D), EXACT_ADAM, init=1.0, size=2) as table:
        found = trained_from_host(table, EXACT_ADAM, squares, batches)
        assert 4 < len(table._records.logs[0]) < 512
    wanted = trained_at_once(optax.adam(0.01), squares, batches)
    np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
def test_means_of_lion_vanish_while_rows_wait(overlap, monkeypatch, tmp_path):
    """Elements stop in steps that a row's own column of the log does not tell."""
    for module in (missed, storage):
        monkeypatch.setattr(module, "LONG_LOG", 64)
    slopes, rate = jnp.array([[1e-35, 1e-36, 1]]), optax.cosine_decay_schedule(0.01, 600)
    loss, tx = lambda x, ids: (x[ids] * slopes).sum(), js.lion(rate, untouched="exact")
    batches = [[k % 3, 3] if k < 6 else [4 + k % 5, 9] for k in range(600)]
    options = {"init": 1.0, "size": 2, "overlap": overlap}
    with js.HostTable((V, D), tx, tmp_path / "table", **options) as table:
        trained_from_host(table, tx, loss, batches[:400])
    with js.HostTable((V, D), tx, tmp_path / "table", **options) as table:
        found = trained_from_host(table, tx, loss, [*batches[400:], [0, 4]])
        table.catch_up()
        np.testing.assert_array_equal(table.read(np.arange(V)), found)
    wanted = trained_at_once(optax.lion(rate), loss, [*batches, [0, 4]])
    np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=1e-5)


def test_a_whole_step_of_an_exact_optimizer_names_no_other_rows():
    """Its log is too short for rows in turn, which only a table in memory needs."""
    tx = js.proximal_adagrad(0.1, l1_regularization_strength=0.01, untouched="exact")
    tables = [js.HostTable((V, D), tx, init=1.0, size=2) for _ in range(2)]
    batches = [[k % 3, 3 + k % 5] for k in range(6)]

    @jax.jit
    def step(rows, places):
        return rows.pack(*js.train_step(squares, tx)(*rows.unpack(), places)[:2])

    for ids in batches:
        tables[0].store(step(*tables[0].fetch(ids)))
    wanted = trained_from_host(tables[1], tx, squares, batches)
    np.testing.assert_allclose(tables[0].read(np.arange(V)), wanted, rtol=1e-6)


def test_tables_in_boxes_are_written_and_packed():
    """As compiled steps of an exact optimizer return them."""
    tx, all_rows = js.sgd(0.1, untouched="exact"), np.arange(4)
    table, held = js.HostTable((4, 2), tx), js.hold(jnp.ones((4, 2)))
    table.write(all_rows, held, tx.init(held))
    rows, _ = table.fetch([1])
    now, state = rows.unpack()
    table.store(rows.pack(js.hold(2 * now), state))
    np.testing.assert_array_equal(table.read(all_rows)[:, 0], [1, 2, 1, 1])
