"""What is saved of an exact optimizer, with rows behind or after flush, is restored."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import fast_jit, slow_unless
from optimizers import SCHEDULE
from safetensors.numpy import load_file
from test_delta import assert_same

import jslices as js

V, D, LAST = 12, 2, [5, 1, 5]
EXACT = {"untouched": "exact"}
OPTIMIZERS = {
    "adam": js.adam(0.1, **EXACT),
    "scheduled": js.lion(SCHEDULE, weight_decay=0.1, **EXACT),
    "frozen": js.optim.freeze_rows(js.adamw(0.1, **EXACT), {"table": lambda row: row < 3}),
    "in a partition": js.optim.partition(
        {"a": js.optim.chain(js.optim.clip(1.0), js.adam(0.1, **EXACT))}, "a"
    ),
}


@functools.cache
def trained(name):
    """Parameters and state after two steps, after a third, and then after flush."""
    tx = OPTIMIZERS[name]
    loss = lambda params, ids: (jnp.sin(params["table"][ids]) ** 3).sum()  # noqa: E731
    step = fast_jit(js.train_step(loss, tx))
    params = {"table": jnp.asarray(np.random.default_rng(0).normal(size=(V, D)), "f4")}
    now, seen = (params, tx.init(params)), []
    for ids in ([2, 7], [7, 9], LAST):
        *now, _ = step(*now, jnp.array(ids))
        seen.append({"params": now[0], "state": now[1]})
    flushed = dict(zip(seen[0], fast_jit(tx.flush)(*now), strict=True))
    return tx, seen[1], seen[2], flushed


def by_delta(tx, base, tree, path, **touched):
    saver = js.Saver()
    saver.save(base, path, 1)
    return js.Saver().restore(saver.save_delta(tree, path, 2, **touched), tree)


def by_halves(tx, base, tree, path):
    path = js.Saver().save(tree, path)
    halves = [
        js.Saver().restore(path, rows={"*/table": slice(*part)})
        for part in ((0, 5), (5, V))
    ]
    whole = lambda x, y: np.concatenate([x, y]) if len(x) == 5 else x  # noqa: E731
    leaves = map(jax.tree.leaves, halves)
    joined = [whole(x, y) if x.ndim else x for x, y in zip(*leaves, strict=True)]
    # Restored without variables, states are dicts, in the order of their keys.
    path = js.Saver().save(jax.tree.structure(halves[0]).unflatten(joined), path)
    return js.Saver().restore(path, tree)


def resized(tx, base, tree, path):
    back = np.arange(V)[::-1]
    del base, path
    for _ in range(2):
        new = js.checkpoint.resize_rows(
            tx, tree["params"], tree["state"], tree["params"], rows={"table": back}
        )
        tree = dict(zip(tree, new, strict=True))
    return tree


GRADIENT = js.IndexedSlices(np.zeros((3, D), np.float32), np.array(LAST), (V, D))
WAYS = {
    "whole": lambda tx, base, tree, path: js.Saver().restore(
        js.Saver().save(tree, path), tree
    ),
    "shards": lambda tx, base, tree, path: js.Saver().restore(
        js.Saver(sharded=True).save(tree, path), tree
    ),
    "delta": by_delta,
    "touched": functools.partial(by_delta, touched={"*/table": LAST}),
    "touched parameters": functools.partial(by_delta, touched={"params/table": GRADIENT}),
    "halves": by_halves,
    "resized": resized,
}


QUICK = ("adam", False), ("frozen", True)
CASES = itertools.product(OPTIMIZERS, (False, True))


@pytest.mark.parametrize("name, flushed", slow_unless(CASES, QUICK.__contains__))
def test_what_is_restored_is_what_was_saved(name, flushed, tmp_path):
    tx, base, *trees = trained(name)
    tree = trees[flushed]
    for way, restored in WAYS.items():
        (tmp_path / way).mkdir()
        assert_same(restored(tx, base, tree, tmp_path / way / "m"), tree)


def test_a_delta_holds_no_more_rows_than_have_moved(tmp_path):
    _, base, tree, _ = trained("scheduled")
    saver = js.Saver()
    saver.save(base, tmp_path / "m", 1)
    path = saver.save_delta(tree, tmp_path / "m", 2, touched={"*/table": LAST})
    arrays = load_file(path)
    held = {name: len(x) for name, x in arrays.items() if name.endswith("@rows")}
    assert len(held) == 3 and set(held.values()) == {2}


@pytest.mark.parametrize("name", ["adam", "frozen"])
def test_states_for_other_libraries_are_those_after_flush(name):
    _, _, behind, flushed = trained(name)
    with pytest.raises(ValueError, match=r"rows are behind.*tx\.flush"):
        js.checkpoint.export_state(behind["params"], behind["state"], "torch")
    slots = js.checkpoint.export_state(flushed["params"], flushed["state"], "torch")
    np.testing.assert_array_equal(slots["table"]["exp_avg"], flushed["state"].mu["table"])


@pytest.mark.slow
def test_copies_of_a_host_table(tmp_path):
    tx = js.adamw(0.1, **EXACT)
    tables = [js.HostTable((V, D), tx, init=1.0) for _ in range(3)]

    @fast_jit
    def step(rows, places):
        table, state = rows.unpack()
        grads = js.grad(lambda table: (table[places] ** 2).sum())(table)
        return rows.pack(*tx.apply(grads, state, table))

    for ids in ([2, 7], [7, 9], LAST):
        rows, places = tables[0].fetch(ids)
        tables[0].store(step(rows, places))
    for number, table in enumerate(tables[1:]):
        tables[0].save(tmp_path / str(number))
        table.restore(tmp_path / str(number))
        tables[0].catch_up()
    for table in tables:
        rows, places = table.fetch([2, 9, 0])
        table.store(step(rows, places))
        np.testing.assert_allclose(
            table.read(np.arange(V)), tables[0].read(np.arange(V)), rtol=1e-6
        )


def test_warns_of_rows_behind_whose_clock_is_not_restored(tmp_path):
    tx, other = js.adam(SCHEDULE, **EXACT), js.adam(0.1)
    params = {"table": jnp.ones((V, D))}
    step = fast_jit(js.train_step(lambda params, ids: params["table"][ids].sum(), tx))
    params, state, _ = step(params, tx.init(params), jnp.array(LAST))
    params, state, _ = step(params, state, jnp.array([2]))
    path = js.Saver().save({"state": state}, tmp_path / "behind")
    with pytest.warns(UserWarning, match="rows are behind in state/clock") as seen:
        js.Saver().restore(path, {"state": other.init(params)})
    assert seen[0].filename == __file__ and len(seen) == 1
    for same in (tx, js.adam(0.1, **EXACT)):  # pytest fails where it warns
        js.Saver().restore(path, {"state": same.init(params)})
    params, state = tx.flush(params, state)
    path = js.Saver().save({"state": state}, tmp_path / "flushed")
    js.Saver().restore(path, {"state": other.init(params)})


def test_states_of_earlier_versions_are_refused(tmp_path):
    """Which kept snapshots with every row, and numbers of a schedule's future."""
    tx, params = js.adam(0.1, **EXACT), {"table": jnp.ones((V, D))}
    state = tx.init(params)
    clock = {"last": state.clock.last, "run": jnp.zeros(2)}
    old = {"count": state.count, "mu": state.mu, "nu": state.nu, "clock": clock}
    path = js.Saver().save({"state": old}, tmp_path / "old")
    with pytest.raises(js.NotFoundError, match=r"earlier version.*flush.*import_state"):
        js.Saver().restore(path, {"state": state})


def test_another_rate_after_a_restore(tmp_path):
    """Rows that are behind do the steps that they missed by the rates that these had."""
    options = {"weight_decay": 0.1}
    first, then = js.adamw(0.1, **options, **EXACT), js.adamw(SCHEDULE, **options, **EXACT)
    batches = [[2, 7], [7, 9], [0, 2], [7, 7], [9, 1], [7, 0]]
    loss = lambda table, ids: (table[ids] ** 2).sum()  # noqa: E731
    table, truth = jnp.ones((V, D)), jnp.ones((V, D))
    state = first.init(table)
    for ids in batches[:3]:
        step = fast_jit(js.train_step(loss, first))
        table, state, _ = step(table, state, jnp.array(ids))
    path = js.Saver().save({"table": table, "state": state}, tmp_path / "m")
    fresh = {"table": table, "state": then.init(table)}
    restored = js.Saver().restore(path, fresh)
    table, state = restored["table"], restored["state"]
    for ids in batches[3:]:
        step = fast_jit(js.train_step(loss, then))
        table, state, _ = step(table, state, jnp.array(ids))
    table, _ = then.flush(table, state)
    dense = optax.adamw(lambda k: jnp.where(k < 3, 0.1, SCHEDULE(k)), **options)
    moments = dense.init(truth)
    for ids in batches:
        grads = jax.grad(loss)(truth, jnp.array(ids))
        updates, moments = dense.update(grads, moments, truth)
        truth = optax.apply_updates(truth, updates)
    np.testing.assert_allclose(table, truth, rtol=1e-5)
