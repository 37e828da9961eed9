"""Host tables keyed by ids: the same as in memory, and map and rows always of one step."""

import functools
import itertools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_host_table_faults import STRIDES_AND_KINDS, Copies, fast_disk, interruptions

import jslices as js
from jslices import dynamic

__all__ = ["fast_disk"]
D = 3


def loss(table, rows, wanted):
    return ((js.embedding_lookup(table, rows).sum(-1) - wanted) ** 2).sum()


def batches_of(seed, count, size=24):
    """Some ids in every batch, most in one."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        ids = rng.zipf(1.4, size) % 2**40 * 0x10001
        yield ids.astype(np.int64), rng.normal(size=size).astype(np.float32)


POLICIES = {
    "lru": {},
    "lfu": {"policy": "lfu", "half_life": 4},
    "tinylfu": {"policy": "tinylfu", "after": 2, "half_life": 3, "shared": 3},
    "never": {"policy": "never", "expire": 3},
}
OPTIMIZERS = {
    "adagrad": js.adagrad(0.1),
    "exact": js.adamw(0.1, weight_decay=0.3, untouched="exact"),
}


@functools.cache
def steps_of(tx):
    @jax.jit
    def in_memory(ids, table, state, batch, wanted):
        ids, out = ids.admit(batch)
        table, state = js.checkpoint.reset_rows(tx, table, state, out.fresh, 0.5)
        if tx.catches_up:
            table, state = tx.catch_up(table, state, out.rows)
        table, state = tx.apply(js.grad(loss)(table, out.rows, wanted), state, table)
        return ids, table, state

    @functools.partial(jax.jit, donate_argnums=0)
    def on_host(rows, places, wanted):
        table, state = rows.unpack()
        table, state = tx.apply(js.grad(loss)(table, places, wanted), state, table)
        return rows.pack(table, state)

    return in_memory, on_host


CASES = [*itertools.product(POLICIES, OPTIMIZERS, (False, True))]


@pytest.mark.filterwarnings("ignore:the rows that were fetched before:UserWarning")
@pytest.mark.slow
@pytest.mark.parametrize("policy, name, overlap", CASES)
def test_is_the_table_and_the_map_of_a_step_in_memory(policy, name, overlap, tmp_path):
    tx = OPTIMIZERS[name]
    in_memory, on_host = steps_of(tx)
    empty = ids = dynamic.id_map(64, name="items", **POLICIES[policy])
    params = jnp.full((ids.num_rows, D), 0.5)
    state = tx.init(params)
    make = functools.partial(js.HostTable, params.shape, tx, tmp_path / "t", keyed=empty)
    table = make(init=0.5, overlap=overlap)
    for number, (batch, wanted) in enumerate(batches_of(0, 12)):
        ids, params, state = in_memory(ids, params, state, dynamic.wide_ids(batch), wanted)
        table.fetch(batch[::2] + 1)  # not stored: as if it had never been
        rows, places = table.fetch(batch)
        table.store(on_host(rows, places, wanted))
        if number == 7:
            gone = batch[::3]
            ids, free = ids.evict(dynamic.wide_ids(gone))
            table.evict(gone)
            assert {*free.tolist()} - {2**31 - 1}
        if number % 4 == 3 and ids.sightings is None:
            table.close()
            table = make(init=0.5, overlap=overlap)
    for mine, wanted in zip(*map(jax.tree.leaves, (table.ids, ids)), strict=True):
        np.testing.assert_array_equal(mine, wanted)
    known, at = ids.export()
    assert len(known) > 15 and table.steps == 12
    every = np.append(known, [2**50, -1])
    wanted, found = tx.flush(params, state)[0], table.read(every)
    np.testing.assert_allclose(found[: len(at)], wanted[at], rtol=2e-5, atol=1e-6)
    shared = ids.find(dynamic.wide_ids(every[-2:]))[0][0]
    np.testing.assert_allclose(found[-2], wanted[shared], rtol=2e-5, atol=1e-6)
    assert np.isnan(found[-1]).all()
    table.close()


# --- faults ---------------------------------------------------------------------------

#: 16 rows with owners, so that each of these batches takes rows of others.
MAP = dynamic.id_map(16, name="k", shared=4)
BATCHES = np.arange(1, 25).reshape(3, 8) * 2**33


def keyed(path, row=(D,), **options):
    return js.HostTable((MAP.num_rows, *row), js.sgd(0.5), path, keyed=MAP, **options)


@jax.jit
def put(rows, places, values):
    table, state = rows.unpack()
    return rows.pack(table.at[places].set(values[:, None]), state)


def step(table, ids):
    """Each row gets a value of its id."""
    rows, places = table.fetch(ids)
    table.store(put(rows, places, ids.astype(np.float32)))


def owners(table, _=()):
    """The steps, and the ids that own rows, each of which has the value of its id."""
    known, rows = table.ids.export()
    assert len({*rows.tolist()}) == len({*known.tolist()}) == len(known)
    assert (table.read(known) == known[:, None]).all()
    assert not table.read([7, 2**62]).any()
    return table.steps, frozenset(known.tolist())


CHANGES = {
    "step": lambda table: step(table, BATCHES[2]),
    "evict": lambda table: table.evict(BATCHES[1]),
}


@functools.cache
def states(name):
    """Before and after a change."""
    table, both = keyed(None), []
    for change in (lambda table: [step(table, x) for x in BATCHES[:2]], CHANGES[name]):
        change(table)
        both.append(owners(table))
    assert both[0][1] - both[1][1]
    return both


@STRIDES_AND_KINDS
@pytest.mark.parametrize("name", CHANGES)
def test_interrupted_changes_are_whole(stride, tmp_path, name, file, overlap):
    numbers = iter(range(10_000))

    def do(interrupted):
        path = tmp_path / str(next(numbers)) if file else None
        table = keyed(path, overlap=overlap)
        step(table, BATCHES[0])
        step(table, BATCHES[1])
        with interrupted():
            CHANGES[name](table)
        now = owners(table)
        assert now in states(name)
        if file:
            table.close()
            table = keyed(path)
        assert owners(table) == now
        table.close()

    interruptions(do, stride, tmp_path)


@pytest.mark.parametrize("name", [*CHANGES, "restore", "save"])
def test_killed_at_any_line_map_and_rows_are_of_one_step(tmp_path, name):
    folder = tmp_path / "now"
    folder.mkdir()
    with keyed(folder / "copy") as table:
        step(table, BATCHES[2])
        copied = owners(table)
    with keyed(folder / "table") as table:
        step(table, BATCHES[0])
        step(table, BATCHES[1])
        before = owners(table)
        with Copies(folder) as copies:
            if name in CHANGES:
                CHANGES[name](table)
            else:
                getattr(table, name)(folder / "copy")
        after = owners(table)
    seen = set()
    for copy in copies.paths:
        with keyed(copy / "table") as table:
            seen.add(owners(table))
        with keyed(copy / "copy") as table:
            assert owners(table) in ((copied, before) if name == "save" else (copied,))
    assert seen == {before, after} and (after == copied) == (name == "restore")


@pytest.mark.filterwarnings("ignore:the rows that were fetched before:UserWarning")
def test_a_step_that_cannot_be_stored_takes_its_ids_along():
    table = keyed(None, overlap=True)
    step(table, BATCHES[0])
    other, _ = table.fetch(BATCHES[1])
    table.fetch(BATCHES[1])
    before = owners(table)
    table.fetch(BATCHES[1])
    table.store(other)  # of an earlier fetch, which is noticed when it is written
    rows, places = table.fetch(BATCHES[2])  # goes on from there
    for error in ("earlier fetch", "went on from a step which could not be stored"):
        with pytest.raises(js.errors.FailedPreconditionError, match=error):
            table.store(put(rows, places, BATCHES[2].astype(np.float32)))
    assert owners(table) == before
    step(table, BATCHES[2])
    assert owners(table)[0] == 2


def test_tables_together(tmp_path):
    def both():
        user = keyed(tmp_path / "user", overlap=True)
        item = js.HostTable((50, D), js.sgd(0.5), tmp_path / "item", overlap=True)
        return js.HostTable.together({"user": user, "item": item})

    for number, ids in enumerate(BATCHES):
        with both() as tables:
            rows, places = tables.fetch({"user": ids, "item": ids >> 33})
            assert places["item"].tolist() == [*range(8)]
            value = ids.astype(np.float32)
            tables.store({name: put(x, places[name], value) for name, x in rows.items()})
            steps, known = owners(tables["user"])
            assert steps == number + 1 and known >= {*ids.tolist()}
            assert (tables["item"].read(ids >> 33) == value[:, None]).all()
    shutil.rmtree(tmp_path)


def test_ids_of_any_kind():
    table = js.HostTable((17, D), js.sgd(0.5), keyed=dynamic.id_map(16))
    batch = {
        "words": [["cat", "dog"], ["cat", "cow"]],
        "pairs": dynamic.wide_ids(["cow"]),
        "wide": np.array([2**64 - 2, 2**63], np.uint64),
        "none": np.array([-1]),
    }
    rows, places = table.fetch(batch)
    assert np.shape(places["words"]) == (2, 2) and places["none"].tolist() == [-1]
    distinct = [places["words"][0][0], *places["words"][:, 1], *places["wide"]]
    assert sorted(distinct) == [0, 1, 2, 3, 4]
    assert places["pairs"].tolist() == [places["words"][1][1]]
    assert np.asarray(rows.counts)[distinct].tolist() == [2, 1, 2, 1, 1]
    assert not len(table.ids.export()[0]), "nothing is admitted before it is stored"
    table.store(put(rows, places["words"].reshape(-1), np.arange(4.0, dtype="f4")))
    assert table.read(["dog", "cow", "pig"])[:, 0].tolist() == [1, 3, 0]
    assert {*table.ids.export()[0].tolist()} >= {-2, -(2**63)}
    with pytest.raises(TypeError, match="read outside of jit"):
        jax.jit(table.fetch)(jnp.arange(3))


def test_opening_with_another_map_says_what_to_type(tmp_path):
    path, shape, tx = tmp_path / "t", (17, D), js.sgd(0.5)
    js.HostTable(shape, tx, path, keyed=dynamic.id_map(16, name="a", expire=9)).close()
    text = r"keyed=dynamic.id_map\(16, name='a', shared=1, policy='lru', after=1, expire=9"
    for other in (
        None,
        dynamic.id_map(16, name="b", expire=9),
        dynamic.id_map(16, name="a", expire=9, policy="never"),
        dynamic.id_map(16, name="a", expire=9, policy="lfu"),
        dynamic.id_map(16, name="a", expire=8),
    ):
        with pytest.raises(js.InvalidArgumentError, match=text):
            js.HostTable(shape, tx, path, keyed=other)
    js.HostTable(shape, tx, tmp_path / "numbers").close()
    with pytest.raises(
        js.InvalidArgumentError, match=r"holds a table with keyed=None, and .*id_map"
    ):
        js.HostTable(shape, tx, tmp_path / "numbers", keyed=dynamic.id_map(16))


def test_what_a_keyed_table_cannot_do_says_what_to_type(tmp_path):
    table, refused = keyed(None), pytest.raises
    step(table, BATCHES[0])
    for call, text in (
        (lambda: table.reset([1]), r"type table.evict\(ids\)"),
        (
            lambda: table.write([1], np.zeros((1, D)), ()),
            r"type table.fetch",
        ),
        (lambda: table.grow(99), r"type HostTable\("),
        (lambda: table.save(tmp_path / "t", rows=[1]), r"type table.save\(path\)"),
        (lambda: js.HostTable((9, D), js.sgd(1)).evict([1]), r"type table.reset\(ids\)"),
    ):
        with refused(js.errors.FailedPreconditionError, match=text):
            call()
    tried, _ = MAP.admit(dynamic.wide_ids([1]))
    for wrong, error, text in (
        (3, TypeError, r"got int; type keyed=dynamic.id_map\(rows\)"),
        (
            dynamic.id_map(8),
            js.InvalidArgumentError,
            r"20 rows wants .* not of 9, at step 0",
        ),
        (tried, js.InvalidArgumentError, r"at step 1; type"),
    ):
        with refused(error, match=text):
            js.HostTable((20, D), js.sgd(1), keyed=wrong)
    with refused(ValueError, match=r"type table.read\(words\)"):
        js.checkpoint.save_word_vectors(tmp_path / "v", ["a"] * 20, table)


def test_a_step_writes_what_it_touches(tmp_path):
    """Of the map as well: a file has holes where no row was stored."""
    ids = dynamic.id_map(1_000_000)
    with js.HostTable((ids.num_rows, D), js.sgd(0.5), tmp_path / "t", keyed=ids) as table:
        step(table, BATCHES[0])
        table.save(tmp_path / "copy")
    for path in (tmp_path / "t", tmp_path / "copy"):
        assert path.stat().st_size > 28 * ids.num_rows
        assert path.stat().st_blocks * 512 < 40 * 4096
