"""A row is the same row wherever ids are renumbered, or rows are laid out otherwise.

Every way to do that, times everything that goes by row numbers or by how many there are:
it trains as a table that is looked up as it is, or is refused.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, fast_jit, slow_but_first, slow_unless
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jslices as js
from jslices.tables import StackedTables

V, D, PER, LAYERS = 16, 3, 4, 2
START = np.sin(np.arange(V * D, dtype=np.float32)).reshape(V, D)
BATCHES = [
    np.array(ids) for ids in ([2, 7, 8, 9], [9, 3, 1, 7], [15, 15, 0, 2], [4, 3, 9, 8])
]
SOME = np.isin(np.arange(V), [0, 1, 2, 3, 9, 15])
EXACT = {"untouched": "exact"}


def some(rows):
    return jnp.asarray(SOME)[rows]


def rates(rows):
    return jnp.where(some(rows), 0.1, 1.0)


def freeze(tx):
    return lambda of: js.optim.freeze_rows(tx, of(some))


#: What goes by row numbers: from a function that changes functions of rows, an optimizer.
BY_ROW = {
    "freeze_rows": freeze(js.adamw(0.1, weight_decay=0.1)),
    "freeze_rows, exact": freeze(js.adamw(0.1, weight_decay=0.1, **EXACT)),
    "freeze_rows of a chain": freeze(
        js.optim.chain(js.optim.clip(1.0), js.lion(0.1, **EXACT))
    ),
    "scale": lambda of: js.optim.chain(js.adagrad(0.1), js.optim.scale(of(rates))),
    "scale before": lambda of: js.optim.chain(js.optim.scale(of(rates)), js.sgd(0.5)),
    "in a partition": lambda of: js.optim.partition(
        {0: js.optim.with_state_dtype(freeze(js.adam(0.1, **EXACT))(of), "float32")}, 0
    ),
    "masked": lambda of: js.optim.chain(
        js.optim.masked(js.optim.scale(of(rates)), True), freeze(js.sgd(0.5))(of)
    ),
    # Goes by V.
    "clip_by_block_rms": lambda of: js.optim.chain(
        js.optim.clip_by_block_rms(0.1), js.sgd(0.5)
    ),
}


def loss(table, ids, look=lambda table, ids: table[ids]):
    return (jnp.sin(look(table, ids)) ** 3).sum()


def train(make, table=START, look=lambda table, ids: table[ids], of=lambda f: f, **how):
    """An array after steps by which it is looked up in some way."""
    tx = make(of)
    step = js.train_step(functools.partial(loss, look=look), tx, **how)
    table = jnp.asarray(table)
    state = tx.init(table)
    for ids in map(jnp.asarray, BATCHES):
        table, state, _ = fast_jit(step)(table, state, ids)
    return tx.flush(table, state)[0]


@functools.cache
def plain(name):
    return np.asarray(train(BY_ROW[name]))


def on_a_host(make, by_exact_step=False):
    tx = make(lambda f: f)
    table = js.HostTable((V, D), tx, init=lambda ids: START[ids])

    @fast_jit
    def step(rows, places):
        array, state = rows.unpack()
        if by_exact_step:
            return rows.pack(*js.train_step(loss, tx)(array, state, places)[:2])
        grads = js.grad(loss)(array, places)
        return rows.pack(*tx.apply(grads, state, array))

    for ids in BATCHES:
        rows, places = table.fetch(ids)
        table.store(step(rows, places))
    return table.read(np.arange(V))


def in_exchange(make):
    if jax.device_count() < 8:
        pytest.skip("needs eight devices")
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    table = jax.device_put(START, NamedSharding(mesh, P("x")))
    return train(make, table, exchange=js.Exchange("x", capacity=8.0))


def spread(make):
    """As in a table of spread ids: what goes by ids takes them back."""
    places = js.spread_ids(np.arange(V), V, 4)
    back = lambda rows: js.spread_ids(rows, V, 4, inverse=True)  # noqa: E731
    table = np.zeros_like(START)
    table[places] = START
    look = lambda table, ids: table[js.spread_ids(ids, V, 4)]  # noqa: E731
    return train(make, table, look, lambda f: lambda rows: f(back(rows)))[places]


def stacked(make):
    tables = StackedTables({"a": (5, D), "b": (V - 5, D)})
    array = tables.stack({"a": START[:5], "b": START[5:]})

    def look(table, ids):
        name = (ids >= 5).astype(int)
        return table[tables.rows(ids - 5 * name, name)]

    return train(make, array, look)[:V]


def resized(make):
    """Half of the steps in a table of the rows in reverse, then in order."""
    back = np.arange(V)[::-1].copy()
    tx = [make(lambda f: lambda rows: f(V - 1 - rows)), make(lambda f: f)]
    table, state = jnp.asarray(START[::-1]), None
    for number, ids in enumerate(map(jnp.asarray, BATCHES)):
        now = tx[number >= 2]
        state = now.init(table) if state is None else state
        if number == 2:
            table, state = js.checkpoint.resize_rows(
                now, table, state, table, rows={"value": back}
            )
        ids = ids if number >= 2 else V - 1 - ids
        table, state, _ = fast_jit(js.train_step(loss, now))(table, state, ids)
    return now.flush(table, state)[0]


def views(table, ids):
    whole = jnp.concatenate([table[:6] * 1.0, table[6:]])
    return whole[::-1][V - 1 - ids]


def layers(make):
    """Rows of `[L, V, D]` are numbered by layer and row."""
    array = START.reshape(LAYERS, V // LAYERS, D)
    by = V // LAYERS
    return train(make, array, lambda t, ids: t[ids // by, ids % by]).reshape(V, D)


SAME = {
    "host table": on_a_host,
    "exact_step there": functools.partial(on_a_host, by_exact_step=True),
    "exchange": in_exchange,
    "spread ids": spread,
    "stacked tables": stacked,
    "resize_rows": resized,
    "views": lambda make: train(make, look=views),
    "layers": layers,
    "multi_steps": lambda make: train(
        lambda of: js.optim.multi_steps(make(of), 1, js.grad(loss)(START, BATCHES[0]))
    ),
    "vmap": lambda make: train(make, look=lambda t, ids: jax.vmap(lambda i: t[i])(ids)),
}


QUICK = ("host table", "clip_by_block_rms"), ("exchange", "freeze_rows")
QUICK += ("spread ids", "scale"), ("views", "masked")
CASES = [(way, name) for way in SAME for name in BY_ROW]
#: The clocks of rows that two axes number want bools: below.
CLOCKS = "freeze_rows, exact", "freeze_rows of a chain", "in a partition"
CASES = [case for case in CASES if case[0] != "layers" or case[1] not in CLOCKS]


@pytest.mark.parametrize("way, name", slow_unless(CASES, QUICK.__contains__))
def test_they_train_as_a_table_that_is_looked_up(way, name):
    assert_close(SAME[way](BY_ROW[name]), plain(name), rtol=1e-5, atol=1e-6)


def test_tables_by_name_in_a_host_table():
    tables = StackedTables({"a": (5, D), "b": (V - 5, D)})
    by_name = tables.per_row({"a": 0.0}, default=1.0), tables.per_row({"a": True}, False)
    scaled, frozen = (
        on_a_host(lambda of, tx=tx: tx)
        for tx in (
            js.optim.chain(js.adam(0.1), js.optim.scale(by_name[0])),
            js.optim.freeze_rows(js.adam(0.1), by_name[1]),
        )
    )
    np.testing.assert_array_equal(scaled, frozen)
    assert (frozen[:5] == START[:5]).all() and (frozen[7] != START[7]).all()


PACKED = np.repeat(START, 2, 1).reshape(V // PER, 2 * PER * D)
LAYERED = START.reshape(LAYERS, V // LAYERS, D)


def of_packed(make):
    return train(make, PACKED, lambda t, ids: t.reshape(V, 2 * D)[ids])


def hidden(make):
    return js.HostTable((V, D), optax.chain(optax.sgd(0.1), make(lambda f: f)))


def lifted(make):
    return train(lambda of: js.from_optax(optax.chain(optax.sgd(0.1), make(of))))


def of_whole_layers(make):
    return train(make, LAYERED, lambda t, ids: jnp.sin(t).sum(0)[ids], sparse=False)


LAZY = freeze(js.adam(0.1))
SCALE = lambda of: js.optim.scale(of(rates))  # noqa: E731
AVERAGE = lambda of: js.optim.clip_by_block_rms(0.1)  # noqa: E731
REFUSED = [
    (of_packed, LAZY, r"rows hold 4 each of those looked up.*give bools for each row of"),
    (of_packed, BY_ROW["scale"], r"rows hold 4 each.*groups of rows in tables of their"),
    (of_packed, BY_ROW["scale before"], r"rows hold 4 each of those looked up"),
    (hidden, LAZY, r"optax\.chain in a HostTable.*put them outside.*jslices\.optim\.chain"),
    (hidden, SCALE, r"optax\.chain in a HostTable, or the like, cannot tell"),
    (hidden, AVERAGE, r"optax\.chain in a HostTable, or the like, cannot tell"),
    (lifted, SCALE, r"from_optax cannot tell freeze_rows.*the rows of the table"),
    (lifted, AVERAGE, r"from_optax cannot tell freeze_rows"),
    (of_whole_layers, LAZY, r"may be numbered by 2 axes; give bools"),
    (of_whole_layers, BY_ROW["scale"], r"may be numbered by 2 axes; keep groups"),
    (layers, BY_ROW["freeze_rows, exact"], r"by 2 axes; give bools of shape \(2, 8\)"),
]


@pytest.mark.parametrize("way, make, message", REFUSED)
def test_or_are_refused(way, make, message):
    with pytest.raises(ValueError, match=message):
        way(make)


@pytest.mark.parametrize(
    "tx", slow_but_first(js.adam(0.1), js.adam(0.1, **EXACT)), ids=["lazy", "exact"]
)
def test_bools_are_those_of_the_rows_of_a_host_table(tx):
    frozen = js.optim.freeze_rows(tx, SOME)
    wanted = np.asarray(train(lambda of: frozen))
    assert_close(on_a_host(lambda of: frozen), wanted, rtol=1e-5, atol=1e-6)
    assert (wanted == START).all(1)[[3, 9]].all() and (wanted[7] != START[7]).all()
    wide = js.optim.with_state_dtype(frozen, "float32")
    rows, _ = js.HostTable((V, D), wide, dtype="bfloat16").fetch(np.arange(2))
    assert rows.unpack()[1].state.mu.dtype == "float32"


def test_packed_rows_are_frozen_together_or_masked_by_entry():
    whole = SOME.reshape(-1, PER).all(1)
    frozen = of_packed(lambda of: js.optim.freeze_rows(js.adam(0.1), whole))
    assert whole.any() and ((frozen == PACKED).all(1) == whole).all()
    look = lambda t, ids: t.reshape(V, 2 * D)[ids]  # noqa: E731
    ids = np.array([9, 3, 1, 7, 7])
    grads = js.grad(functools.partial(loss, look=look))(PACKED, ids)
    with pytest.raises(ValueError, match=r"mask_rows got a function.*each entry, keep"):
        js.mask_rows(grads, lambda rows: ~some(rows))
    assert js.mask_rows(grads, ~SOME[ids]).indices.tolist() == [4, 4, 4, 1, 1]
