"""Tables keyed by ids: against a dict, a perfect map, and on a mesh."""

import dataclasses
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
import safetensors
from draws import examples
from helpers import fast_jit, slow_unless
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental import checkify
from jax.sharding import AxisType

import jslices as js
from jslices import dynamic

POLICIES = ("lru", "lfu", "tinylfu", "never")
NO_ROW = 2**31 - 1


@functools.cache
def admitting(num_rows, **options):
    """An empty map, and its ``admit``, compiled once for all examples."""
    ids = dynamic.id_map(num_rows, shared=3, **options)
    return ids, jax.jit(lambda ids, batch: ids.admit(batch))


def check_against_a_dict(admit, ids, owner, batch):
    """One batch: no id in two rows, no two in one; the map, and the owners of its rows."""
    size = ids.low.shape[0]
    before = {i: row for row, i in owner.items()}
    ids, out = admit(ids, dynamic.wide_ids(batch))
    rows, fresh, found = map(np.asarray, (out.rows, out.fresh, out.found))
    new = [row for row in fresh.tolist() if row != NO_ROW]
    assert len(new) == len({*new}), "a row is fresh once"
    for i, row, has_row in zip(*(x.tolist() for x in (batch, rows, found)), strict=True):
        if not has_row:
            assert size <= row < ids.num_rows
            assert i not in before, "who is in the batch keeps its row"
        elif i in before:
            assert row == before[i] and row not in new
        else:
            assert row in new
    pairs = {*zip(batch[found].tolist(), rows[found].tolist(), strict=True)}
    assert len({i for i, _ in pairs}) == len({row for _, row in pairs}) == len(pairs)
    gone = {owner[row] for row in new if row in owner}
    assert {*out.evicted.to_int64().tolist()} - {-1} == gone
    assert not gone & {*batch[found].tolist()}
    assert int(out.refused) == (~found & (batch != -1)).sum()
    owner = {row: i for row, i in owner.items() if row not in new}
    again, still = ids.find(dynamic.wide_ids(batch))
    assert (again == rows).all() and (still == found).all()
    return ids, owner | {row: i for i, row in pairs}


@pytest.mark.parametrize(
    "policy, options",
    slow_unless(
        [
            (policy, options)
            for policy in POLICIES
            for options in (
                *({}, {"after": 2}, {"expire": 5}),
                {"after": 3, "expire": 8, "half_life": 4},
            )
        ],
        lambda case: (case[0] == "lru") == (not case[1]) and len(case[1]) != 1,
    ),
)
def test_is_a_dict_of_limited_size(policy, options):
    rng, owner = np.random.default_rng(0), {}
    ids, admit = admitting(64, policy=policy, **options)
    for _ in range(30):
        batch = rng.zipf(1.3, 64).astype(np.int64) % 2**30 * 0x1_0000_0001
        batch[::9] = rng.integers(0, 2**62, len(batch[::9]))
        batch[5] = -1
        ids, owner = check_against_a_dict(admit, ids, owner, batch)
    known, rows = ids.export()
    assert dict(zip(rows.tolist(), known.tolist(), strict=True)) == owner
    ids.check((ids.num_rows, 2))


def is_usual(case):
    return case[0] in ("lru", "tinylfu")


few = st.integers(-1, 40).map(lambda i: i << 33 if i > 20 else i)


@pytest.mark.parametrize("policy", slow_unless([(x,) for x in POLICIES], is_usual))
@examples(20)
@given(batches=st.lists(st.lists(few, min_size=12, max_size=12), min_size=1, max_size=6))
def test_whatever_comes(policy, batches):
    owner = {}
    ids, admit = admitting(16, policy=policy, expire=2 if policy == "never" else None)
    for batch in batches:
        ids, owner = check_against_a_dict(admit, ids, owner, np.array(batch))


ROW = jnp.linspace(-0.5, 1.0, 4)
W = jnp.array([1.0, -1.0, 0.5, 2.0])


def loss(params, rows, labels):
    return jnp.mean((params["table"][rows] @ params["w"] - labels) ** 2)


def keyed_step(tx):
    """Of a map, parameters and the state."""
    run = js.train_step(loss, tx)

    def step(ids, params, state, batch, labels):
        ids, out = ids.admit(batch)
        rows, values = {"table": out.fresh, "w": None}, {"table": ROW, "w": None}
        params, state = js.checkpoint.reset_rows(tx, params, state, rows, values)
        params, state, value = run(params, state, out.rows, labels)
        return ids, params, state, value

    return step


EXACT = {
    "adam": (js.adam(0.05, untouched="exact"), optax.adam(0.05)),
    "adamw": (
        js.adamw(0.05, weight_decay=0.1, untouched="exact"),
        optax.adamw(0.05, weight_decay=0.1),
    ),
    "adagrad": (js.adagrad(0.1), optax.adagrad(0.1)),
}


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.slow] * (x != "adamw")) for x in EXACT]
)
def test_trains_like_a_dense_table_with_a_row_for_each_id(name):
    """A row that begins late has missed no step."""
    (tx, dense_tx), rng = EXACT[name], np.random.default_rng(0)
    universe = rng.integers(0, 2**62, 100)
    ids = dynamic.id_map(512, name="users")
    params = {"table": jnp.zeros((ids.num_rows, 4)), "w": W}
    dense = {"table": jnp.zeros((100, 4)), "w": W}
    state, dense_state = tx.init(params), dense_tx.init(dense)
    step = fast_jit(keyed_step(tx))

    @fast_jit
    def dense_step(dense, state, at, new, labels):
        put = lambda x, row: x.at[new].set(row, mode="drop")  # noqa: E731
        begin = {"mu": 0.0, "nu": 0.0, "sum_of_squares": 0.1}
        for field, value in begin.items():
            moments = optax.tree.get(state, field)
            if moments is not None:
                moments = moments | {"table": put(moments["table"], value)}
                state = optax.tree.set(state, **{field: moments})
        dense = dense | {"table": put(dense["table"], ROW)}
        value, grads = jax.value_and_grad(loss)(dense, at, labels)
        updates, state = dense_tx.update(grads, state, dense)
        return optax.apply_updates(dense, updates), state, value

    begun = set()
    for k in range(20):
        at = rng.integers(0, 20 + 4 * k, 32)
        new = np.full(32, 100)
        new[: len({*at} - begun)] = sorted({*at} - begun)
        begun |= {*at}
        labels = jnp.asarray(np.sin(at), jnp.float32)
        batch = dynamic.wide_ids(universe[at])
        ids, params, state, value = step(ids, params, state, batch, labels)
        dense, dense_state, wanted = dense_step(dense, dense_state, at, new, labels)
        np.testing.assert_allclose(value, wanted, rtol=2e-5)
    rows, found = ids.find(dynamic.wide_ids(universe[sorted(begun)]))
    assert found.all()
    params, _ = tx.flush(params, state)
    np.testing.assert_allclose(
        params["table"][rows], dense["table"][np.array(sorted(begun))], rtol=1e-4, atol=1e-6
    )


# --- rows that begin anew -----------------------------------------------------------------

TABLES = {
    "sgd": js.sgd(0.1, momentum=0.9),
    "adam": js.adam(0.05),
    "amsgrad": js.amsgrad(0.05),
    "adafactor": js.adafactor(0.05, min_dim_size_to_factor=2),
    "rowwise_adagrad": js.rowwise_adagrad(0.1),
    "exact": js.adam(optax.linear_schedule(0.1, 0.0, 9), untouched="exact"),
    "chain": js.optim.chain(js.optim.clip(1.0), js.adagrad(0.1)),
    "partition": js.optim.partition(
        {"rows": js.adam(0.1), "rest": js.sgd(0.1)}, {"table": "rows", "w": "rest"}
    ),
    "optax": js.from_optax(optax.adam(0.1)),
}


@pytest.mark.filterwarnings("ignore:train_step got jslices.from_optax")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(x, marks=[pytest.mark.slow] * (x not in ("exact", "adafactor")))
        for x in TABLES
    ],
)
def test_a_reset_row_begins_with_the_state_of_a_new_one(name):
    tx = TABLES[name]
    params = {"table": jnp.ones((6, 4)), "w": W}
    state = tx.init(params)
    step = jax.jit(js.train_step(loss, tx))
    for ids in ([0, 1, 5], [1, 2, 5]):
        params, state, _ = step(params, state, jnp.array(ids), jnp.arange(3.0))
    rows = {"table": jnp.array([5, -1, 1]), "w": None}  # fewer than columns
    values = {"table": ROW, "w": None}
    after, new = jax.jit(functools.partial(js.checkpoint.reset_rows, tx))(
        params, state, rows, values
    )
    anew, others = np.array([1, 5]), np.array([0, 2, 3, 4])
    assert (after["table"][anew] == ROW[None]).all() and after["w"] is not None
    np.testing.assert_array_equal(after["table"][others], params["table"][others])
    moved = 0
    paths, _ = zip(*jax.tree.leaves_with_path(state), strict=True)
    for path, old, x, start in zip(
        paths, *map(jax.tree.leaves, (state, new, tx.init(params))), strict=True
    ):
        if old.shape[:1] != (6,):
            np.testing.assert_array_equal(x, old)
            continue
        np.testing.assert_array_equal(x[others], old[others])
        if "clock" in jax.tree_util.keystr(path):
            assert (x[anew] == x[1]).all()  # that of a row which the last step moved
        else:
            np.testing.assert_array_equal(x[anew], start[anew])
            moved += bool((x[anew] != old[anew]).any())
    assert moved


@pytest.mark.parametrize("is_dense", [False, True])
def test_gradients_that_wait_for_a_reset_row_are_dropped(is_dense):
    params = jnp.zeros((6, 4))
    grads = js.IndexedSlices(jnp.ones((3, 4)), jnp.array([1, 2, 2]), (6, 4))
    grads = grads.to_dense() if is_dense else grads
    tx = js.optim.multi_steps(js.sgd(1.0), 2, grads)
    state = tx.init(params)
    params, state = tx.apply(grads, state, params)
    params, state = js.checkpoint.reset_rows(tx, params, state, jnp.array([2]), 7.0)
    params, state = tx.apply(grads, state, params)
    np.testing.assert_array_equal(params[:, 0], [0, -1, 6, 0, 0, 0])


def test_a_table_with_the_name_of_a_field_has_its_own_state():
    tx, params = (
        js.adam(0.1),
        {"mu": {"table": jnp.ones((6, 2))}, "table": jnp.ones((6, 2))},
    )
    state = jax.tree.map(jnp.ones_like, tx.init(params))
    rows, values = ({"mu": {"table": x}, "table": None} for x in (np.array([1]), 0.0))
    _, state = js.checkpoint.reset_rows(tx, params, state, rows, values)
    for moments in (state.mu, state.nu):
        assert moments["mu"]["table"][:, 0].tolist() == [1, 0, 1, 1, 1, 1]
        assert (moments["table"] == 1).all()


def test_reset_refuses_what_it_cannot_place():
    tx, params = js.adam(0.1), {"table": jnp.zeros((3, 2)), "w": jnp.zeros(2)}
    state = tx.init(params)
    reset = functools.partial(js.checkpoint.reset_rows, tx, params, state)
    with pytest.raises(ValueError, match="rows and values must mirror params"):
        reset({"tables": jnp.array([1])}, {"table": 0.0, "w": None})
    with pytest.raises(TypeError, match=r"integer rows of table, got float32\[1\]"):
        reset({"table": jnp.array([1.0]), "w": None}, {"table": 0.0, "w": None})
    with pytest.raises(ValueError, match=r"values of table must be \[1, 2\].* got \[3\]"):
        reset({"table": jnp.array([1]), "w": None}, {"table": jnp.ones(3), "w": None})
    with pytest.raises(ValueError, match="number, which has no rows"):
        js.checkpoint.reset_rows(tx, 1.0, tx.init(1.0), jnp.array([0]), 0.0)
    square, by_row = jnp.zeros((3, 3)), js.rowwise_adagrad(0.1)
    with pytest.raises(ValueError, match=r"sum_of_squares \[3\].*table higher than it is"):
        js.checkpoint.reset_rows(by_row, square, by_row.init(square), np.array([1]), 0.0)
    wide = np.array([2**32 + 1])  # no row
    np.testing.assert_array_equal(
        reset({"table": wide, "w": None}, {"table": 5.0, "w": None})[0]["table"], 0.0
    )
    with pytest.raises(ValueError, match="None"):
        reset({"table": jnp.array([1]), "w": None}, {"table": None, "w": None})
    with pytest.raises(ValueError, match=r"reset_rows: state must hold the arrays"):
        rows, values = {"table": jnp.array([1]), "w": None}, {"table": 0.0, "w": None}
        js.checkpoint.reset_rows(js.sgd(0.1), params, state, rows, values)


# --- ids ----------------------------------------------------------------------------------


def test_ids_of_any_kind():
    wide = lambda ids: dynamic.wide_ids(ids).to_int64().tolist()  # noqa: E731
    assert wide([3, 2**40]) == [3, 2**40]
    assert wide(np.array([[1], [2]], np.uint8)) == [[1], [2]]
    assert wide(np.array([2**63 + 5], np.uint64)) == [5 - 2**63]
    assert wide([2**63 + 5]) == [5 - 2**63]
    assert wide(jnp.array([-1, 7, 2**31 - 1])) == [-1, 7, 2**31 - 1]
    assert wide([]) == []
    assert wide(np.array(["cat", "dog"])) == wide([b"cat", b"dog"]) == wide(["cat", "dog"])
    assert min(wide([str(n) for n in range(99)])) >= 0
    with jax.enable_x64(True):
        assert wide(jnp.array([2**40 + 1, -5])) == [2**40 + 1, -1]
        low, high = jax.jit(dynamic.wide_ids)(jnp.array([2**63 + 9], jnp.uint64))
        assert (int(low[0]), int(high[0])) == (9, 2**31)


@pytest.mark.parametrize("bad", [np.array([1.5]), np.array([True]), [None], [1, "a"], 1j])
def test_what_are_no_ids_is_refused(bad):
    with pytest.raises(TypeError, match="wide_ids wants integers or strings, got"):
        dynamic.wide_ids(bad)


def test_ids_that_would_lose_bits_are_refused():
    with pytest.raises(OverflowError, match="more than 64 bits"):
        dynamic.wide_ids([2**64])
    with pytest.warns(UserWarning, match=r'view\("uint64"\)'):
        assert dynamic.wide_ids([-7]).to_int64().tolist() == [-1]
    ids = dynamic.id_map(8)
    for bad in (np.array([1, 2]), jnp.array([[1, 2]]), [3]):
        for call in ("find", "admit", "evict"):
            with pytest.raises(
                TypeError, match=rf"{call} wants the ids that wide_ids makes"
            ):
                getattr(ids, call)(bad)


# --- maps ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_scan_is_a_loop_and_a_checkpoint_keeps_it(tmp_path):
    ids = dynamic.id_map(64, policy="tinylfu", half_life=3, name="users")
    batches = [dynamic.wide_ids(np.arange(16) * 2**40 + 5 * k) for k in range(6)]
    looped = ids
    for batch in batches:
        looped, _ = looped.admit(batch)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *batches)
    scanned, _ = jax.jit(lambda *x: jax.lax.scan(lambda m, b: m.admit(b), *x))(ids, stacked)
    saver = js.Saver()
    saver.save({"ids": ids}, f"{tmp_path}/whole")
    path = saver.save_delta({"ids": looped}, f"{tmp_path}/delta")
    restored = js.Saver().restore(path, {"ids": ids})["ids"]
    for other in (scanned, restored):
        jax.tree.map(np.testing.assert_array_equal, other, looped)
    restored.check((restored.num_rows, 3))
    with pytest.raises(js.InvalidArgumentError, match="64"):
        js.Saver().restore(
            path, {"ids": dynamic.id_map(128, policy="tinylfu", half_life=3)}
        )


def test_a_map_of_another_table_is_found_out():
    batch = dynamic.wide_ids(np.arange(50))
    users, _ = dynamic.id_map(400, name="users").admit(batch)
    items = dataclasses.replace(users, name="items")
    with pytest.raises(js.InvalidArgumentError, match=r"'items' has \d+ ids in places"):
        items.check((401, 2))
    with pytest.raises(js.InvalidArgumentError, match="401 rows and the table 400; make"):
        users.check(jnp.zeros((400, 2)))
    users.check(jax.ShapeDtypeStruct((408, 2), jnp.float32))


def test_a_full_table_is_counted_and_an_error_if_asked():
    ids = dynamic.id_map(8, policy="never")
    ids, out = ids.admit(dynamic.wide_ids(np.arange(6)))
    assert out.found.all() and int(out.refused) == 0
    batch = dynamic.wide_ids([3, 6, 7, 8, 9, 8, -1])
    _, out = ids.admit(batch)
    assert out.found.tolist() == [True, True, True, False, False, False, False]
    assert int(out.refused) == 3 and (out.rows[3:] == 8).all()
    with pytest.raises(js.errors.FailedPreconditionError, match="3 ids of a batch got no"):
        ids.admit(batch, check=True)
    checked = checkify.checkify(lambda ids, batch: ids.admit(batch, check=True))
    error, _ = jax.jit(checked)(ids, batch)
    assert "3 ids of a batch got no row" in error.get()


def test_evicted_ids_leave_their_rows_and_show_in_what_a_server_needs():
    ids, out = dynamic.id_map(64).admit(dynamic.wide_ids([7, 2**40, 9]))
    rows = dict(zip([7, 2**40, 9], out.rows.tolist(), strict=True))
    since = int(ids.step)
    assert ids.export(since)[0].size == 0
    ids, free = ids.evict(dynamic.wide_ids([9, 5, 9, -1]))
    assert free.tolist() == [rows[9], NO_ROW, rows[9], NO_ROW]
    assert not ids.find(dynamic.wide_ids([9]))[1].any()
    known, at = ids.export()
    assert dict(zip(known.tolist(), at.tolist(), strict=True)) == {
        7: rows[7],
        2**40: rows[2**40],
    }
    ids, out = ids.admit(dynamic.wide_ids([7]))
    changed = dict(zip(*(x.tolist() for x in ids.export(since)[::-1]), strict=True))
    assert changed == {rows[9]: -1, rows[7]: 7}


def test_exact_optimizers_move_what_nobody_has_seen():
    """With their state an export has all owners, and who left."""
    ids, _ = dynamic.id_map(64).admit(dynamic.wide_ids([7, 8, 9]))
    ids, _ = ids.evict(dynamic.wide_ids([9]))[0].admit(dynamic.wide_ids([7]))
    since, table = int(ids.step), jnp.zeros((ids.num_rows, 2))
    ids, left = ids.admit(dynamic.wide_ids([10]))[0].evict(dynamic.wide_ids([8]))
    exact = js.optim.chain(
        js.optim.clip_by_global_norm(1.0), js.adam(0.1, untouched="exact")
    )
    known, rows = ids.export(since, exact.init(table))
    assert sorted(known.tolist()) == [-1, 7, 10] and rows[known == -1] == left
    for state in (None, js.adam(0.1).init(table)):
        assert {*ids.export(since, state)[0].tolist()} == {10, -1}


def test_a_server_that_applies_what_changes_has_what_the_map_has():
    """By the loop of the page: ids change rows, and none is lost with an old owner."""
    page = (pathlib.Path(__file__).parent.parent / "docs/keyed_tables.md").read_text()
    loop = re.search(r"^for row in rows.*?(?=^assert)", page, re.M | re.S)[0]
    ids, rng, names = dynamic.id_map(32), np.random.default_rng(0), {"np": np}
    names |= {"vectors": {}, "owners": {}, "params": {"items": np.arange(99.0)}}
    admit, moved = jax.jit(lambda ids, batch: ids.admit(batch)[0]), 0
    for _ in range(60):
        since, before = int(ids.step), dict(names["vectors"])
        if rng.random() < 0.5:
            ids, _ = ids.evict(dynamic.wide_ids(rng.integers(0, 60, 8)))
        for _ in range(2):
            ids = admit(ids, dynamic.wide_ids(rng.integers(0, 60, 8)))
        names["changed"], names["rows"] = ids.export(since)
        exec(loop, names)
        known = dict(zip(*(x.tolist() for x in ids.export()), strict=True))
        assert names["vectors"] == known
        moved += sum(before.get(x, row) != row for x, row in known.items())
    assert moved


@pytest.mark.slow
def test_rows_that_a_flush_moved_are_in_a_delta_and_not_in_the_export(tmp_path):
    """What a server needs under an exact optimizer, as the page says."""
    tx, ids = EXACT["adam"][0], dynamic.id_map(64)
    params = {"table": jnp.zeros((ids.num_rows, 4)), "w": W}
    state, step, labels = tx.init(params), jax.jit(keyed_step(tx)), jnp.ones(3)
    ids, params, state, _ = step(ids, params, state, dynamic.wide_ids([7, 8, 9]), labels)
    params, state = tx.flush(params, state)
    saver, served, since = js.Saver(), np.array(params["table"]), int(ids.step)
    saver.save({"params": params, "state": state}, tmp_path / "m", 0)
    for _ in range(3):
        ids, params, state, _ = step(
            ids, params, state, dynamic.wide_ids([10, 11, 12]), labels
        )
    params, state = tx.flush(params, state)
    wanted, by_export = np.asarray(params["table"]), served.copy()
    seen = ids.export(since)[1]
    by_export[seen] = wanted[seen]
    assert np.abs(by_export - wanted).max() > 0.05
    moved = ids.export(since, state)[1]
    by_export[moved] = wanted[moved]
    np.testing.assert_array_equal(by_export[: ids.low.size], wanted[: ids.low.size])
    delta = saver.save_delta({"params": params, "state": state}, tmp_path / "m", 1)
    with safetensors.safe_open(delta, "np") as file:
        about = json.loads(file.metadata()["jslices"])["delta"]
        rows = file.get_tensor(about["rows"]["params/table"])
        assert 6 <= len(rows) < len(served)
        served[rows] = file.get_tensor("params/table")
    np.testing.assert_array_equal(served, wanted)


def test_least_worthy_owners_go_first():
    """Of a bucket: not seen for longest, seen least, and nobody who is in the batch."""
    batches = [
        [0, 0, 1, 2, 3, 4, 5, 6, 7],
        [1, 1],
        [2, 3, 4, 5, 6, 7],
        [0, *range(2, 8), 9],
    ]
    gone = {}
    for policy in ("lru", "lfu", "tinylfu", "never"):
        ids = dynamic.id_map(8, policy=policy)
        for batch in batches:
            batch += [-1] * (9 - len(batch))
            ids, out = ids.admit(dynamic.wide_ids(batch))
        gone[policy] = out.evicted.to_int64().max()
    assert gone == {"lru": 1, "lfu": 1, "tinylfu": -1, "never": -1}


def test_wrong_options_are_refused():
    for options in ({"after": 0}, {"shared": 0}, {"half_life": -1}, {"devices": 0}):
        with pytest.raises(js.InvalidArgumentError, match="int of at least 1"):
            dynamic.id_map(8, **options)
    with pytest.raises(js.InvalidArgumentError, match="of at least 1"):
        dynamic.id_map(0)
    with pytest.raises(js.InvalidArgumentError, match="at most"):
        dynamic.id_map(2**31)
    with pytest.raises(ValueError, match="policy='fifo'"):
        dynamic.id_map(8, policy="fifo")
    with pytest.raises(js.InvalidArgumentError, match=r"on no mesh.*sharding="):
        dynamic.id_map(8).find(dynamic.wide_ids([1]), exchange=js.Exchange("x"))


# --- memory -------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["lru", "tinylfu"])
def test_a_step_is_in_place(policy):
    """And nothing as large as the table is made."""
    tx, ids = js.adam(1e-3), jax.eval_shape(lambda: dynamic.id_map(200_000, policy=policy))
    params = {"table": jax.ShapeDtypeStruct((ids.num_rows, 16), jnp.float32)}
    params["w"] = jax.ShapeDtypeStruct((16,), jnp.float32)
    batch = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, dynamic.wide_ids(range(500))))
    labels = jax.ShapeDtypeStruct((500,), jnp.float32)
    arguments = ids, params, jax.eval_shape(tx.init, params), batch, labels

    def step(ids, params, state, batch, labels):
        ids, out = ids.admit(batch)
        rows, values = {"table": out.fresh, "w": None}, {"table": 0.0, "w": None}
        params, state = js.checkpoint.reset_rows(tx, params, state, rows, values)
        grads = js.grad(loss)(params, out.rows, labels)
        params, state = tx.apply(grads, state, params)
        return ids, params, state

    js.testing.assert_in_place(
        step, *arguments, donate_argnums=(0, 1, 2), min_bytes=700_000
    )
    js.testing.assert_no_dense_temporary(step, *arguments, donate_argnums=(0, 1, 2))


# --- meshes -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_a_device_has_whole_buckets(kind):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(getattr(AxisType, kind),))
    ids = dynamic.id_map(8, sharding=jax.NamedSharding(mesh, jax.P("x")))
    exchange = js.Exchange("x") if kind == "Auto" else None
    with pytest.raises(js.InvalidArgumentError, match=r"8 rows on .*whole buckets"):
        ids.find(dynamic.wide_ids([1]), exchange=exchange)


def test_ids_travel_to_the_devices_that_hold_their_buckets():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    by_rows, exchange = jax.NamedSharding(mesh, jax.P("x")), js.Exchange("x")
    alone = dynamic.id_map(64, devices=4)
    split = dynamic.id_map(64, devices=4, sharding=by_rows)
    batch = dynamic.wide_ids(np.arange(16) * 2**40 % 11)
    alone, out = fast_jit(lambda ids, batch: ids.admit(batch))(alone, batch)
    admit = fast_jit(lambda ids, batch: ids.admit(batch, exchange=exchange))
    split, out_too = admit(split, jax.device_put(batch, by_rows))
    np.testing.assert_array_equal(out.rows, out_too.rows)
    jax.tree.map(np.testing.assert_array_equal, alone, split)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, plan", [*itertools.product(("Auto", "Explicit"), ("all_to_all", "gather"))]
)
def test_split_over_devices_it_is_the_same_map(kind, plan):
    """Ids travel to their buckets; a step is equal, where ids crowd on one device too."""
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(getattr(AxisType, kind),) * 2)
    by_rows = jax.NamedSharding(mesh, jax.P("x"))
    options = {"name": "users", "shared": 8, "devices": 4, "after": 2}
    exchange, tx = js.Exchange("x", plan=plan, capacity=1.5), js.adagrad(0.1)
    one, many = (
        dynamic.id_map(256, **options),
        dynamic.id_map(256, **options, sharding=by_rows),
    )
    start = {"table": jnp.zeros((one.num_rows, 4))}

    def step(exchange, ids, params, state, batch, labels):
        ids, out = ids.admit(batch, exchange=exchange)
        rows, values = {"table": out.fresh}, {"table": ROW}
        params, state = js.checkpoint.reset_rows(tx, params, state, rows, values)

        def loss(params):
            rows = js.embedding_lookup(params["table"], out.rows)
            return jnp.mean((rows.sum(-1) - labels) ** 2)

        exchanges = None if exchange is None else {"table": exchange}
        value, grads = js.value_and_grad(loss, exchange=exchanges)(params)
        params, state = tx.apply(grads, state, params)
        return ids, params, state, value, out

    whole = one, start, tx.init(start)
    table = {
        "table": jax.device_put(start["table"], jax.NamedSharding(mesh, jax.P("x", None)))
    }
    split = many, table, tx.init(table)
    alone = jax.jit(functools.partial(step, None))
    on_mesh = jax.jit(functools.partial(step, exchange))
    rng = np.random.default_rng(1)
    for _ in range(4):
        batch = dynamic.wide_ids(rng.zipf(1.2, 128).astype(np.int64) % 2**30 * 2**33)
        labels = np.ones(128, np.float32)
        *whole, value, out = alone(*whole, batch, labels)
        by_batch = jax.NamedSharding(mesh, jax.P(("x", "y")))
        placed = jax.device_put((batch, labels), by_batch)
        *split, value_too, out_too = on_mesh(*split, *placed)
        np.testing.assert_allclose(value, value_too, rtol=1e-5)
        np.testing.assert_array_equal(out.rows, out_too.rows)
        fresh = [np.sort(x)[:128].tolist() for x in (out.fresh, out_too.fresh)]
        assert fresh[0] == fresh[1] and int(out.refused) == int(out_too.refused)
    jax.tree.map(np.testing.assert_array_equal, whole[0], split[0])
    np.testing.assert_allclose(whole[1]["table"], split[1]["table"], atol=1e-6)
    assert split[0].low.sharding.is_equivalent_to(by_rows, 1)
    find = jax.jit(lambda ids, batch: ids.find(batch, exchange=exchange))
    for there, here in zip(find(split[0], batch), whole[0].find(batch), strict=True):
        np.testing.assert_array_equal(there, here)
