"""What is saved of an exact optimizer, with rows behind or after flush, is restored."""

import functools
import itertools
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import fast_jit, slow_but_first, slow_unless
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


def loss_of(params, ids):
    return (jnp.sin(params["table"][ids]) ** 3).sum()


@functools.cache
def trained(name):
    """Parameters and state after two steps, after a third, and then after flush."""
    tx = OPTIMIZERS[name]
    step = fast_jit(js.train_step(loss_of, tx))
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
    pairs = zip(*map(jax.tree.leaves, halves), strict=True)
    joined = [np.concatenate([x, y]) if x.shape != y.shape else x for x, y in pairs]
    # Restored without variables, states are dicts, in the order of their keys.
    path = js.Saver().save(jax.tree.structure(halves[0]).unflatten(joined), path)
    return js.Saver().restore(path, tree)


def resized(tx, base, tree, path):
    back, before = np.arange(V)[::-1], tree
    del base, path
    for _ in range(2):
        new = js.checkpoint.resize_rows(
            tx, tree["params"], tree["state"], tree["params"], rows={"table": back}
        )
        tree = dict(zip(tree, new, strict=True))

    def with_log(path, new, old):  # which begins anew where no row is behind
        return old if re.search("log|whole", jax.tree_util.keystr(path)) else new

    return jax.tree_util.tree_map_with_path(with_log, tree, before)


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


QUICK = [("adam", False)]
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
    assert held.pop("state/clock/log/0@rows") <= tree["state"].clock.log[0].shape[0]
    assert len(held) == 3 and set(held.values()) == {2}


@pytest.mark.parametrize("touched", [None, {"*/table": LAST}])
def test_a_delta_holds_the_columns_of_a_log_that_have_changed(touched, tmp_path):
    _, base, tree, _ = trained("adam")
    saver = js.Saver()
    saver.save(base, tmp_path / "m", 1)
    path = saver.save_delta(tree, tmp_path / "m", 2, touched=touched)
    (log,) = tree["state"].clock.log
    assert pathlib.Path(path).stat().st_size < log.nbytes / 20


def test_a_delta_holds_all_rows_of_a_table_that_moved_as_a_whole(tmp_path):
    tx = js.adam(0.1, **EXACT)
    params = {"other": jnp.ones((V, D)), "table": jnp.ones((V, D))}
    saver, state = js.Saver(), tx.init(params)
    saver.save({"params": params, "state": state}, tmp_path / "m", 1)
    rows = js.IndexedSlices(jnp.ones((2, D)), jnp.array([1, 5]), (V, D))
    grads = {"other": rows, "table": params["table"]}
    params, state = tx.apply(grads, state, params)
    tree = {"params": params, "state": state}
    path = saver.save_delta(
        tree, tmp_path / "m", 2, touched={"*/table": [1], "*/other": [1]}
    )
    assert_same(js.Saver().restore(path, tree), tree)
    held = {name for name in load_file(path) if name.endswith("@rows")}
    assert held == {
        f"{x}@rows"
        for x in ("params/other", *(f"state/{y}/other" for y in ("mu", "nu", "clock/last")))
    } | {"state/clock/log/0@rows"}


@pytest.mark.parametrize("name", slow_but_first("adam", "frozen"))
def test_states_for_other_libraries_are_those_after_flush(name):
    tx, _, behind, flushed = trained(name)
    with pytest.raises(ValueError, match=r"rows are behind.*names, tx\).*tx\.flush"):
        js.checkpoint.export_state(behind["params"], behind["state"], "torch")
    held = js.hold(behind["params"])
    for tree in ((flushed["params"], flushed["state"]), (held, behind["state"])):
        slots = js.checkpoint.export_state(*tree, "torch", tx=tx)["table"]
        assert slots["step"] == 3
        moments = flushed["state"].mu["table"], flushed["state"].nu["table"]
        np.testing.assert_allclose(slots["exp_avg"], moments[0], rtol=1e-6)
        np.testing.assert_allclose(slots["exp_avg_sq"], moments[1], rtol=1e-6)


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


PART = ["state/count", "state/mu", "state/nu", "state/clock/last"]


@pytest.mark.parametrize("var_list", [["state"], PART], ids=["lazy", "part of the clock"])
@pytest.mark.parametrize("bare", slow_but_first(False, True), ids=["dict", "array"])
def test_warns_of_rows_behind_whose_clock_is_not_restored(var_list, bare, tmp_path):
    tx, saver = js.adam(SCHEDULE, **EXACT), js.Saver(var_list)
    params = jnp.ones((V, D)) if bare else {"table": jnp.ones((V, D))}
    loss = lambda params, ids: (params if bare else params["table"])[ids].sum()  # noqa: E731
    step = fast_jit(js.train_step(loss, tx))
    other = {"state": (tx if var_list is PART else js.adam(0.1)).init(params)}
    params, state, _ = step(params, tx.init(params), jnp.array(LAST))
    params, state, _ = step(params, state, jnp.array([2]))
    path = js.Saver().save({"state": state}, tmp_path / "behind")
    with pytest.warns(UserWarning, match="rows are behind in state/clock") as seen:
        saver.restore(path, other)
    assert seen[0].filename == __file__ and len(seen) == 1
    js.Saver().restore(path, {"state": state})  # pytest fails where it warns
    params, state = tx.flush(params, state)
    path = js.Saver().save({"state": state}, tmp_path / "flushed")
    saver.restore(path, other)
    # A dense gradient moves all rows, and no row by itself.
    params, state = tx.apply(params, state, params)
    saver.restore(js.Saver().save({"state": state}, tmp_path / "dense"), other)


LINEAR = optax.linear_schedule(0.3, 0.05, 12)
DECAY = {"weight_decay": 0.01}


@fast_jit
def step_at(rate, *args):
    return js.train_step(loss_of, js.adamw(rate, **DECAY, **EXACT))(*args)


@pytest.mark.parametrize(
    "later", slow_but_first(0.02, LINEAR, [0.1, 0.03, 0.2, 0.03, 0.0, 0.1])
)
def test_rows_that_are_behind_go_on_at_other_rates(later, tmp_path):
    """A schedule, a constant or an argument, to the numbers of dense Optax."""
    rng = np.random.default_rng(3)
    start = {"table": jnp.asarray(rng.normal(size=(V, D)), "f4")}
    ids = rng.integers(0, V, (12, 3)).astype(np.int32)
    ids[2:9] %= 5  # others wait
    tx = js.adamw(SCHEDULE, **DECAY, **EXACT)
    params, state, step = start, tx.init(start), fast_jit(js.train_step(loss_of, tx))
    for batch in ids[:6]:
        params, state, _ = step(params, state, batch)
    assert (state.clock.last["table"] < 6).any()
    path = js.Saver().save({"params": params, "state": state}, tmp_path / "m")
    rates = later if isinstance(later, list) else [0.02] * 6
    if callable(later):
        rates = [later(count) for count in range(6, 12)]
    tx = js.adamw(7.0 if isinstance(later, list) else later, **DECAY, **EXACT)
    begun = {"params": start, "state": tx.init(start)}
    params, state = js.Saver().restore(path, begun).values()
    step = fast_jit(js.train_step(loss_of, tx))
    for batch, rate in zip(ids[6:], rates, strict=True):
        by_argument = isinstance(later, list)
        args = params, state, batch
        params, state, _ = step_at(rate, *args) if by_argument else step(*args)
    found = fast_jit(tx.flush)(params, state)[0]["table"]
    rates = jnp.asarray([*map(SCHEDULE, range(6)), *rates])
    dense = optax.adamw(lambda count: rates[count], **DECAY)

    @fast_jit
    def dense_step(params, state, batch):
        updates, state = dense.update(jax.grad(loss_of)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    params, state = start, dense.init(start)
    for batch in ids:
        params, state = dense_step(params, state, batch)
    moved = float(jnp.abs(params["table"] - start["table"]).max())
    np.testing.assert_allclose(found, params["table"], rtol=0, atol=1e-5 * moved)


# --- files of an earlier version ----------------------------------------------------------


def with_snapshots(state):
    """The names that the arrays of a state had."""
    clock = {"last": state.clock.last, "run": np.zeros(2, np.float32)}
    clock["snapshot"] = {"table": (np.zeros(V, np.float32),)}
    return {"count": state.count, "mu": state.mu, "nu": state.nu, "clock": clock}


OLD = r"earlier version .* params, state = tx\.flush\(params, state\).*resize_rows\(tx, s"


def test_a_file_with_snapshots_is_refused_with_what_to_type(tmp_path):
    _, _, tree, _ = trained("adam")
    old = with_snapshots(tree["state"])
    path = js.Saver().save({"state": old}, tmp_path / "m")
    with pytest.raises(js.errors.NotFoundError, match=rf"holds no .*clock/log/0.*{OLD}"):
        js.Saver().restore(path, {"state": tree["state"]})
    with pytest.warns(UserWarning, match="rows are behind in state/clock"):
        js.Saver().restore(path, {"state": js.adam(0.1).init(tree["params"])})
    path = js.Saver().save({"state": {"count": 1}}, tmp_path / "m")
    with pytest.raises(js.errors.NotFoundError, match="holds no") as error:
        js.Saver().restore(path, {"state": tree["state"]})
    assert "resize_rows" not in str(error.value)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_state_without_the_numbers_that_made_its_log_goes_on(name, tmp_path):
    """As the version before wrote it."""
    make = functools.partial(getattr(js, name), 0.1, **EXACT)
    tx = make(**HAD[name])
    params, state = some_steps(tx, *begun(tx), IDS[:6])
    old = state._replace(clock=state.clock._replace(numbers=None))
    path = js.Saver().save({"params": params, "state": old}, tmp_path / "m")
    with pytest.raises(js.errors.NotFoundError, match=rf"clock/numbers.*{OLD}"):
        js.Saver().restore(path, {"params": params, "state": state})
    saved = js.Saver().restore(path)
    mine = js.checkpoint.resize_rows(tx, *saved.values(), saved["params"])
    assert_same(mine, (params, state))


OLD_FILES = pathlib.Path(__file__).parent / "golden" / "states_6209fa5"
DECAYS = {"weight_decay": 0.1, **EXACT}
OF_OLD_FILES = {
    "adam": js.adam(0.1, **EXACT),
    "adamw": js.adamw(0.1, **DECAYS),
    "amsgrad": js.amsgrad(0.1, **EXACT),
    "sgd": js.sgd(0.1, 0.9, **EXACT),
    "rmsprop": js.rmsprop(0.1, momentum=0.9, **EXACT),
    "frozen": js.optim.freeze_rows(js.adamw(0.1, **DECAYS), {"table": lambda row: row < 3}),
    "ema": js.optim.params_ema(js.adam(0.1, **EXACT), 0.99),
    "adadelta": js.adadelta(1.0, **EXACT),
    "lion": js.lion(0.01, **DECAYS),
    "partial_rowwise_adam": js.partial_rowwise_adam(0.1, **EXACT),
    "proximal_adagrad": js.proximal_adagrad(0.1, l1_regularization_strength=0.01, **EXACT),
    "rowwise_adagrad": js.rowwise_adagrad(0.1),
    "adagrad": js.adagrad(0.1),
    "ftrl": js.ftrl(0.1),
    "lamb": js.lamb(0.1),
    "adafactor": js.adafactor(0.1),
}


@pytest.mark.parametrize(
    "name", slow_unless([(x,) for x in OF_OLD_FILES], lambda x: x in [("sgd",), ("ftrl",)])
)
def test_files_of_an_earlier_version_go_on_as_they_did_there(name):
    """Flushed after six steps, as the error says; it has the numbers after six more."""
    tx, start = OF_OLD_FILES[name], {"table": jnp.zeros((V, D))}
    into = {"params": start, "state": tx.init(start)}
    if hasattr(tx.init(start), "clock") and tx.init(start).clock is not None:
        with pytest.raises(js.errors.NotFoundError, match=OLD):
            js.Saver().restore(OLD_FILES / name, into)
    saved = js.Saver().restore(OLD_FILES / name)
    now = js.checkpoint.resize_rows(tx, *saved.values(), saved["params"])
    found = tx.flush(*some_steps(tx, *now, IDS[6:]))[0]["table"]
    expected = json.loads((OLD_FILES / "after.json").read_text())[name]
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_host_tables_of_an_earlier_version_go_on_as_they_did_there(name):
    """All rows, so that those that were never stored decay as well."""
    saved, tx = js.Saver().restore(OLD_FILES / f"host_{name}"), OF_OLD_FILES[name]
    new = js.checkpoint.resize_rows(tx, saved["params"], saved["state"], saved["params"])
    table = js.HostTable((V, D), tx, init=0.5)
    table.write(saved["rows"], *new)
    some_stored(table, tx, np.arange(V))
    expected = json.loads((OLD_FILES / "after.json").read_text())[f"host_{name}"]
    np.testing.assert_allclose(table.read(np.arange(V)), expected, atol=1e-5)


@pytest.mark.slow
def test_a_keyed_table_of_an_earlier_version_goes_on_as_it_did_there(tmp_path):
    saved, tx = js.Saver().restore(OLD_FILES / "keyed_adamw"), OF_OLD_FILES["adamw"]
    ids = js.dynamic.id_map(16)
    table = js.HostTable((ids.num_rows, D), tx, tmp_path / "table", init=0.5, keyed=ids)
    rows, here = table.fetch(saved["ids"])
    new, _ = rows.unpack()
    order = np.full(len(new), -1)
    order[here] = saved["places"]
    old = saved["params"], saved["state"]
    table.store(rows.pack(*js.checkpoint.resize_rows(tx, *old, new, {"*": order})))
    names = np.arange(9) * 10**12 + 7
    some_stored(table, tx, names)
    expected = json.loads((OLD_FILES / "after.json").read_text())["keyed_adamw"]
    np.testing.assert_allclose(table.read(names), expected, atol=1e-5)
    table.close()
    path = tmp_path / "table"
    path.write_bytes(path.read_bytes().replace(b'"record": ', b'"fields": '))
    with pytest.raises(js.InvalidArgumentError, match=r"earlier version .*ids\.export"):
        js.HostTable((ids.num_rows, D), tx, path, init=0.5, keyed=ids)


def some_stored(table, tx, names):
    """Six more steps, of some of these rows."""

    @fast_jit
    def step(rows, places):
        table, state = rows.unpack()
        loss = lambda table: (jnp.sin(js.embedding_lookup(table, places)) ** 3).sum()  # noqa: E731
        return rows.pack(*tx.apply(js.grad(loss)(table), state, table))

    for ids in np.random.default_rng(3).integers(0, 9, (12, 3))[6:]:
        rows, places = table.fetch(names[ids])
        table.store(step(rows, places))


# --- other numbers ------------------------------------------------------------------------

HAD = {"sgd": {"momentum": 0.9}, "adam": {}, "adamw": {}, "lion": {}, "rmsprop": {}}
NUMBERS = {
    "sgd": [{"momentum": 0.99}, {"momentum": 0.5}],
    "adam": [{"b1": 0.8}, {"b2": 0.9999}, {"eps": 1e-3}, {"eps_hat": True}, {"b1": 0.95}],
    "adamw": [{"b2": 0.99}, {"eps": 1e-3}],
    "lion": [{"b1": 0.8}, {"b2": 0.9}, {"weight_decay": 0.1}],
    "rmsprop": [{"decay": 0.8}],
}
CHANGES = [(name, change) for name, changes in NUMBERS.items() for change in changes]
IDS = np.random.default_rng(3).integers(0, V, (12, 3)).astype(np.int32)
IDS[2:6] %= 5  # others wait
IS_OTHER = r"other numbers .* tx\.flush\(params, state\), then .*resize_rows\(tx, params, s"


def begun(tx):
    params = {"table": jnp.asarray(np.random.default_rng(0).normal(size=(V, D)), "f4")}
    return params, tx.init(params)


def some_steps(tx, params, state, ids, jit=fast_jit):
    step = jit(js.train_step(loss_of, tx))
    for batch in ids:
        params, state, _ = step(params, state, batch)
    return params, state


def has_other_log(*each):
    logs = (tx.init(jnp.zeros((V, D))).clock.log for tx in each)
    one, other = ([x.shape for x in log if x is not None] for log in logs)
    return one != other


@pytest.mark.parametrize("name, change", slow_unless(CHANGES, lambda x: x in CHANGES[:4]))
def test_rows_that_are_behind_by_other_numbers_are_refused(name, change, tmp_path):
    make = functools.partial(getattr(js, name), 0.1, **EXACT)
    tx, other = make(**HAD[name]), make(**change)
    params, state = some_steps(tx, *begun(tx), IDS[:6])
    path = js.Saver().save({"params": params, "state": state}, tmp_path / "m")
    with pytest.raises(js.InvalidArgumentError, match=IS_OTHER):
        js.Saver().restore(path, {"params": params, "state": other.init(params)})
    with pytest.raises(ValueError, match=IS_OTHER):
        other.flush(params, state)
    with pytest.raises(ValueError, match=IS_OTHER):
        js.checkpoint.resize_rows(other, params, state, params)
    try:  # in a program nothing can be raised but for the form of the log
        wrong, _ = fast_jit(other.flush)(params, state)
    except ValueError as error:
        assert re.search(IS_OTHER, str(error)) and has_other_log(tx, other)
    else:
        late = np.asarray(state.clock.last["table"] < 6)
        assert late.any() and (np.isnan(wrong["table"]).all(1) == late).all()


def test_rows_behind_stay_unknown_once_the_numbers_have_changed():
    make = functools.partial(js.sgd, 0.1, **EXACT)
    params, state = some_steps(make(0.9), *begun(make(0.9)), IDS[:6])
    late = np.asarray(state.clock.last["table"] < 6)
    params, state = some_steps(make(0.5), params, state, [np.array([0])] * 2)
    wrong, _ = fast_jit(make(0.5).flush)(params, state)
    assert (np.isnan(wrong["table"]).all(1) == late).all()
    wrong, _ = fast_jit(make(0.9).flush)(params, state)  # back again: two steps are others
    assert np.isnan(wrong["table"][late]).all()


@pytest.mark.parametrize("resizes", [False, True])
@pytest.mark.parametrize("name, change", slow_unless(CHANGES, lambda x: x in CHANGES[:2]))
def test_after_a_flush_it_goes_on_by_other_numbers(name, change, resizes, tmp_path):
    """To the numbers of dense Optax, changed at the same step."""
    make, dense = (functools.partial(getattr(x, name), 0.1) for x in (js, optax))
    tx, other = make(**HAD[name], **EXACT), make(**change, **EXACT)
    if "eps_hat" in change or (has_other_log(tx, other) and not resizes):
        pytest.skip("Optax has none; it has to be resized")
    params, state = tx.flush(*some_steps(tx, *begun(tx), IDS[:6]))
    if resizes:
        params, state = js.checkpoint.resize_rows(other, params, state, params)
    path = js.Saver().save({"params": params, "state": state}, tmp_path / "m")
    tree = js.Saver().restore(path, {"params": params, "state": other.init(params)})
    params, state = some_steps(other, *tree.values(), IDS[6:])
    found = other.flush(params, state)[0]["table"]
    start, _ = begun(tx)
    params, state = start, dense(**HAD[name]).init(start)
    for number, batch in enumerate(IDS):
        steps = dense(**(HAD[name] if number < 6 else change))
        updates, state = steps.update(jax.grad(loss_of)(params, batch), state, params)
        params = optax.apply_updates(params, updates)
    moved = float(jnp.abs(params["table"] - start["table"]).max())
    np.testing.assert_allclose(found, params["table"], rtol=0, atol=1e-5 * moved)


def test_parameters_alone_are_not_restored_in_silence(tmp_path):
    tx, saver = js.sgd(0.1, 0.9, **EXACT), js.Saver()
    params, state = some_steps(tx, *begun(tx), IDS[:6])
    path = saver.save({"params": params, "state": state}, tmp_path / "m")
    with pytest.warns(UserWarning, match="rows are behind in state/clock"):
        js.Saver().restore(path, {"params": params})
    params, state = tx.flush(params, state)
    path = saver.save({"params": params, "state": state}, tmp_path / "m")
    js.Saver().restore(path, {"params": params})  # pytest fails where it warns


def test_a_pickled_clock_with_snapshots_is_refused():
    tx, _, tree, _ = trained("adam")
    old = with_snapshots(tree["state"])["clock"]
    # What pickle does with the class as it is now.
    clock = type(tree["state"].clock)(old["last"], old["snapshot"], old["run"], None)
    state = tree["state"]._replace(clock=clock)
    params, ids = tree["params"], {"table": jnp.array([1])}
    grads = {"table": GRADIENT}
    for call in (
        lambda: tx.update(grads, state, params),
        lambda: tx.apply(grads, state, params),
        lambda: tx.catch_up(params, state, ids),
        lambda: tx.now(params, state),
        lambda: tx.flush(params, state),
        lambda: jax.jit(tx.flush)(params, state),
    ):
        with pytest.raises(TypeError, match=OLD):
            call()
