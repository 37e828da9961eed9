"""Many tables in one array do what each of them does apart."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import all_at_once, assert_close, fast_jit, slow_unless
from jax.experimental import checkify

import jslices as js
from jslices.tables import StackedTables

SHAPES = {"user": (7, 3), "item": (1, 3), "shop": (4, 3)}
TABLES = StackedTables(SHAPES)
RNG = np.random.default_rng(0)
PARTS = {name: RNG.normal(size=s).astype(np.float32) for name, s in SHAPES.items()}
STACKED = jax.jit(TABLES.stack)(PARTS)
#: For each table every row of it, and ids that would be rows of its neighbours.
IDS = {name: np.arange(-3, rows + 4) for name, (rows, _) in SHAPES.items()}
MODES = ("fill", "clip")


def rows_of(name, ids, mode):
    """Rows of a table by itself."""
    near = np.clip(ids, 0, len(PARTS[name]) - 1)
    good = (near == ids) | (mode == "clip")
    return np.where(good[:, None], PARTS[name][near], np.float32(np.nan))


@pytest.mark.parametrize("mode", MODES)
def test_an_id_never_reads_a_row_of_another_table(mode):
    @fast_jit
    def both(stacked):
        rows = {n: TABLES.rows(ids, n, mode=mode) for n, ids in IDS.items()}
        apart = {n: js.embedding_lookup(stacked, x) for n, x in rows.items()}
        return TABLES.lookup(stacked, IDS, mode=mode), apart

    wanted = {name: rows_of(name, ids, mode) for name, ids in IDS.items()}
    assert_close(both(STACKED), (wanted, wanted), rtol=0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("axis", [-1, 0])
def test_ids_of_all_tables_in_one_array(mode, axis):
    ids = np.stack([np.arange(-3, 12)] * 3, axis)
    which = np.arange(3) if axis == -1 else np.arange(3)[:, None]
    look = lambda t: js.embedding_lookup(t, TABLES.rows(ids, which, mode=mode))  # noqa: E731
    each = [rows_of(name, ids.take(0, axis), mode) for name in PARTS]
    wanted = np.stack(each, axis if axis == 0 else 1)
    assert_close(fast_jit(look)(STACKED), wanted, rtol=0)
    if axis == -1:
        traced = fast_jit(functools.partial(TABLES.rows, mode=mode))
        rows = traced(ids, np.broadcast_to(which, ids.shape))
        assert rows.tolist() == TABLES.rows(ids, mode=mode).tolist()
        of_no_table = traced(np.array([0, 0]), np.array([3, -1]))
        assert of_no_table.tolist() == [TABLES.num_rows] * 2


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint32", "int64"])
def test_ids_of_any_dtype(dtype):
    top = np.iinfo(dtype).max
    rows = TABLES.rows(np.array([0, 3, 4, top], dtype), "shop")
    assert rows.tolist() == [8, 11, 12, 12]


def test_negative_ids_stay_negative():
    """So that what leaves out negative ids still does, and nothing wraps round."""

    @fast_jit
    def both(stacked):
        rows = TABLES.rows([-1, 0], "shop")
        pruned = js.safe_embedding_lookup_sparse(stacked, rows[None])
        return jnp.take(stacked, rows, axis=0)[0], pruned[0]

    missing, pruned = both(STACKED)
    assert np.isnan(missing).all()
    assert_close(pruned, PARTS["shop"][0])


@pytest.mark.parametrize("mode", [*MODES, "check", "promise_in_bounds"])
@pytest.mark.parametrize("padding", [-1, 0, 2**40])
def test_padding_is_that_of_all_tables(mode, padding):
    ids = np.array([[1, 0, padding], [padding, padding, 3]])
    rows = TABLES.rows(ids, padding_id=padding, mode=mode)
    is_padding = ids == padding
    wanted = np.where(is_padding, -1, TABLES.rows(np.where(is_padding, 0, ids)))
    np.testing.assert_array_equal(rows, wanted)
    read = js.embedding_lookup(STACKED, rows, padding_id=-1)
    assert not np.asarray(read)[is_padding].any() and np.isfinite(read).all()
    of_shop = TABLES.rows(ids, "shop", padding_id=padding, mode=mode)
    np.testing.assert_array_equal(of_shop == -1, is_padding)


def test_a_bad_id_is_named_with_its_table():
    text = r"ids of 'shop'\[1\] = 4 is not in \[0, 4\)"
    with pytest.raises(js.IdOutOfRangeError, match="lookup: " + text):
        TABLES.lookup(STACKED, {"user": [6], "shop": [0, 4]}, mode="check")
    with pytest.raises(
        js.IdOutOfRangeError, match=r"'shop'\[0, 2\] = 4 is not in \[0, 4\)"
    ):
        TABLES.rows([[0, 0, 4]], mode="check")
    found = checkify.checkify(
        jax.jit(functools.partial(TABLES.rows, which="shop", mode="check"))
    )
    with pytest.raises(ValueError, match="rows: " + text):
        found(jnp.array([0, 4]))[0].throw()
    bags = {"user": (np.array([[9, 6]]), np.array([[False, True]]))}
    assert TABLES.lookup_sparse(STACKED, bags, mode="check")["user"].shape == (1, 3)
    with pytest.raises(
        js.IdOutOfRangeError, match=r"lookup_sparse: ids of 'user'\[0, 0\] = 9"
    ):
        TABLES.lookup_sparse(STACKED, {"user": np.array([[9, 6]])}, mode="check")


def bags(kind):
    """Bags of every form, or all padded to one length; with bad ids in padding."""
    some = np.random.default_rng(1)
    mask = some.random((5, 4)) < 0.7
    ids = {
        n: np.where(mask, some.integers(0, rows, (5, 4)), 99)
        for n, (rows, _) in SHAPES.items()
    }
    padded = {name: (x, mask) for name, x in ids.items()}
    if kind == "padded":
        return padded
    splits = np.array([0, 2, 2, 3])
    ragged = (np.array([0, 3, 1, 99]), splits)
    segments = (np.array([0, 0, 0]), np.array([1, 9, 1]), 2)
    return {"shop": ragged, "user": padded["user"], "item": segments}


def test_tables_by_name_are_not_stacked():
    with pytest.raises(ValueError, match=r"wants the array .* got dict; tables.stack\(arr"):
        TABLES.lookup(PARTS, {"user": [1]})


def test_combiners_are_of_all_tables_or_one_for_each():
    with pytest.raises(
        ValueError, match=r"combiners for \['user'\], and bags for \['item'"
    ):
        TABLES.lookup_sparse(STACKED, {"item": [[1]]}, combiner={"user": "sum"})
    few = TABLES.lookup_sparse(STACKED, {"item": [[1]]}, combiner=EACH)
    wanted = TABLES.lookup_sparse(STACKED, {"item": [[1]]}, combiner=EACH["item"])
    np.testing.assert_array_equal(few["item"], wanted["item"])


EACH = {"user": "max", "item": "sqrtn", "shop": "max"}


@pytest.mark.parametrize(
    "kind, weighed, combiner",
    slow_unless(
        [
            *(("padded", True, combiner) for combiner in ("mean", EACH)),
            ("mixed", False, "mean"),
            *(("mixed", True, combiner) for combiner in ("max", EACH)),
        ],
        [("padded", True, "mean"), ("mixed", True, EACH)].count,
    ),
)
def test_bags(kind, weighed, combiner):
    given = bags(kind)
    weights = {"user": np.linspace(0.5, 2, 20).reshape(5, 4)} if weighed else {}

    def together(stacked):
        return TABLES.lookup_sparse(stacked, given, weights, combiner)

    def alone(parts):
        return {
            name: js.embedding_lookup_sparse(
                parts[name],
                x,
                weights.get(name),
                combiner if isinstance(combiner, str) else combiner[name],
            )
            for name, x in given.items()
        }

    def loss(of, params):
        rows = of(params)
        return sum((x**2).sum() for x in rows.values()), rows

    @fast_jit
    def both(stacked, parts):
        ours, theirs = (
            js.grad(functools.partial(loss, of), has_aux=True) for of in (together, alone)
        )
        grad, rows = ours(stacked)
        return (TABLES.split(grad.to_dense()), rows), theirs(parts)

    assert_close(*both(STACKED, PARTS), rtol=1e-6)


def ids_of_step(seed, rows):
    return np.random.default_rng(seed).integers(0, rows, 6)


def all_ids(seed):
    return {name: ids_of_step(seed, rows) for name, (rows, _) in SHAPES.items()}


def loss_of(look_up, params, ids):
    return sum(((x - i) ** 2).sum() for i, x in enumerate(look_up(params, ids).values()))


def trained(look_up, tx, params, steps=3):
    state = tx.init(params)

    @fast_jit
    def step(params, state, ids):
        grads = js.grad(functools.partial(loss_of, look_up))(params, ids)
        return tx.apply(grads, state, params)

    for seed in range(steps):
        params, state = step(params, state, all_ids(seed))
    return params, state


def each(params, ids):
    return {name: js.embedding_lookup(params[name], x) for name, x in ids.items()}


def test_training_is_that_of_tables_apart():
    ours, state = trained(TABLES.lookup, js.adam(0.1), STACKED)
    theirs, their_state = trained(each, js.adam(0.1), PARTS)
    assert_close(TABLES.split(ours), theirs, rtol=1e-6)
    assert_close(TABLES.split(state.mu), their_state.mu, rtol=1e-6)


def test_exact_training_is_that_of_all_rows():
    """Also with ids that are rows of no table, which nothing may take for rows."""
    tx = js.adam(0.1, untouched="exact")
    loss = functools.partial(loss_of, TABLES.lookup)

    def with_bad_ids(params, ids):
        bad = jnp.array([-1, 4, 99])
        rows = js.embedding_lookup(params, TABLES.rows(bad, "shop"))
        return loss(params, ids) + jnp.where(jnp.isnan(rows), 0, rows).sum()

    step = fast_jit(js.train_step(with_bad_ids, tx))
    gradient = fast_jit(lambda params, ids: js.grad(loss)(params, ids).to_dense())
    params, state = STACKED, tx.init(STACKED)
    dense, dense_state = STACKED, js.adam(0.1).init(STACKED)
    for seed in range(3):
        params, state, _ = step(params, state, all_ids(seed))
        grads = gradient(dense, all_ids(seed))
        dense, dense_state = js.adam(0.1).apply(grads, dense_state, dense)
    assert_close(tx.flush(params, state)[0], dense, rtol=1e-5)


def test_tables_in_use_by_name():
    """For a model that is already written: ``split`` inside of the loss."""
    look_up = lambda params, ids: each(TABLES.split(params), ids)  # noqa: E731
    by = {"use": look_up, "lookup": TABLES.lookup}
    grads = {n: js.grad(functools.partial(loss_of, look)) for n, look in by.items()}
    found = all_at_once(grads, STACKED, all_ids(0))
    assert js.is_slices(found["use"])
    assert_close(found["use"], found["lookup"], rtol=1e-6)


def test_rates_by_table():
    rates = {"user": 0.5, "shop": 0.01}
    scale = js.optim.scale(TABLES.per_row(rates, default=1.0))
    ours, _ = trained(TABLES.lookup, js.optim.chain(js.adam(0.1), scale), STACKED)
    optimizers = {name: js.adam(0.1 * rates.get(name, 1.0)) for name in SHAPES}
    tx = js.optim.partition(optimizers, {name: name for name in SHAPES})
    theirs, _ = trained(each, tx, PARTS)
    assert_close(TABLES.split(ours), theirs, rtol=1e-5)


@pytest.mark.parametrize("default", [False, 0])
def test_a_whole_table_frozen(default):
    frozen = TABLES.per_row({"user": True}, default=default)
    tx = js.optim.freeze_rows(js.adam(0.1), frozen)
    params, _ = trained(TABLES.lookup, tx, STACKED)
    moved = {n: bool((x != PARTS[n]).any()) for n, x in TABLES.split(params).items()}
    assert moved == {"user": False, "item": True, "shop": True}


LOOKUPS = {
    "rows": lambda tables, t, ids: js.embedding_lookup(t, tables.rows(ids)),
    "lookup": lambda tables, t, ids: tables.lookup(
        t, dict(zip(SHAPES, ids.T, strict=True))
    ),
    "bags": lambda tables, t, ids: tables.lookup_sparse(t, {"user": ids, "shop": ids}),
    "bags of two kinds": lambda tables, t, ids: tables.lookup_sparse(
        t, {"user": (ids, ids != 1), "shop": ids}, {"shop": jnp.sqrt(1.0 + ids)}
    ),
}


@pytest.mark.parametrize(
    "kind, axes",
    slow_unless(
        [(kind, axes) for kind in LOOKUPS for axes in ("Auto", "Explicit")],
        lambda case: case in (("lookup", "Explicit"), ("bags of two kinds", "Auto")),
    ),
)
def test_over_devices(kind, axes):
    tables = StackedTables(SHAPES, devices=8)
    assert tables.shape == (16, 3)
    types = (getattr(jax.sharding.AxisType, axes),)
    by_rows = jax.NamedSharding(jax.make_mesh((8,), ("x",), axis_types=types), jax.P("x"))
    table, ids = tables.stack(PARTS), np.arange(24).reshape(8, 3) % 5

    def loss(table, ids):
        found = jax.tree.leaves(LOOKUPS[kind](tables, table, ids))
        return sum(jnp.where(jnp.isnan(x), 0, x**2).sum() for x in found)

    exchange = js.Exchange("x") if axes == "Auto" else None
    split = jax.jit(js.value_and_grad(loss, exchange=exchange))
    value, grads = split(*jax.device_put((table, ids), by_rows))
    expected, dense = fast_jit(js.value_and_grad(loss))(table, ids)
    assert_close(value, expected, rtol=1e-6)
    assert_close(grads, dense, rtol=1e-6)
    assert_close(tables.split(table), PARTS, rtol=0)


@pytest.mark.parametrize("axes", ["Auto", "Explicit"])
def test_rates_by_table_over_devices(axes):
    types = (getattr(jax.sharding.AxisType, axes),)
    by_rows = jax.NamedSharding(jax.make_mesh((8,), ("x",), axis_types=types), jax.P("x"))
    tables = StackedTables(SHAPES, devices=8)
    rates = tables.per_row({"user": 0.5, "shop": 0.01}, default=1.0)
    grads = js.IndexedSlices(np.ones((8, 3), "f"), np.arange(8) * 2, tables.shape)
    scaled = fast_jit(lambda grads: js.optim.scale(rates).update(grads, ())[0])
    expected, found = scaled(grads), scaled(jax.device_put(grads, by_rows))
    assert_close((found.values, found.indices), (expected.values, expected.indices), rtol=0)


def test_bags_without_room_for_an_id():
    empty = {"user": np.zeros((3, 0), int), "item": np.zeros((2, 0), int)}
    found = fast_jit(lambda stacked: TABLES.lookup_sparse(stacked, empty))(STACKED)
    assert {name: x.shape for name, x in found.items()} == {"user": (3, 3), "item": (2, 3)}
    assert not any(map(np.any, found.values()))


def test_checkpoints_by_name(tmp_path):
    path = js.Saver().save({"tables": TABLES.split(STACKED)}, str(tmp_path / "model"))
    more = StackedTables({"new": (2, 3), **dict(reversed(SHAPES.items()))})
    restored = js.Saver().restore(path, {"tables": PARTS})["tables"]
    stacked = more.stack({"new": jnp.zeros((2, 3)), **restored})
    kept = more.split(stacked)
    del kept["new"]
    assert_close(kept, PARTS, rtol=0)


def test_new_tables():
    def normal(key, shape, dtype):
        return jax.random.normal(key, shape, dtype)

    other = StackedTables({"shop": (4, 3), "user": (7, 3)})
    of_each = {"shop": normal, "user": jax.nn.initializers.zeros}

    @fast_jit
    def every(key):
        table = other.init(key, of_each, jnp.bfloat16)
        news = TABLES.init(key, normal), other.init(key, normal)
        return TABLES.split(news[0]), other.split(news[1]), other.split(table)

    one, two, half = every(jax.random.key(0))
    assert half["user"].dtype == jnp.bfloat16 and not np.any(half["user"])
    assert_close(two["shop"], one["shop"], rtol=0)
    assert len({float(x[0, 0]) for x in one.values()}) == 3


def test_a_description_is_static():
    assert StackedTables(PARTS) == TABLES and hash(StackedTables(PARTS)) == hash(TABLES)
    assert StackedTables(SHAPES, devices=8) != TABLES
    rows = jax.jit(lambda tables, x: tables.rows(x), static_argnums=0)
    assert rows(TABLES, jnp.array([[1, 0, 1]])).tolist() == [[1, 7, 9]]


@pytest.mark.parametrize(
    "call, text",
    [
        (lambda: StackedTables({}), "at least one row by their names"),
        (lambda: StackedTables({"a": (0, 2)}), r"at least one row.*got \{'a': \(0, 2\)\}"),
        (lambda: StackedTables({"a": (1, 2), "b": (1, 3)}), "one StackedTables for each"),
        (lambda: TABLES.rows([0], "shops"), r"some of the tables.*got \['shops'\]"),
        (lambda: TABLES.rows([0, 1]), r"ids \[..., 3\].*got \[2\]; .*rows\(ids, 'user'\)"),
        (lambda: TABLES.rows([0], "user", mode="wrap"), "mode='wrap'"),
        (lambda: TABLES.rows([0], [3], mode="check"), r"which\[0\] = 3 is not in \[0, 3\)"),
        (lambda: TABLES.lookup(STACKED, {"shops": [0]}), "lookup wants some of the tables"),
        (
            lambda: TABLES.lookup_sparse(STACKED, {"user": [[0]]}, {"shop": [[1.0]]}),
            r"weights for \['shop'\], and bags for \['user'\]",
        ),
        (lambda: TABLES.stack({"user": PARTS["user"]}), "stack wants each of the tables"),
        (lambda: TABLES.stack({**PARTS, "item": jnp.ones((2, 3))}), r"'item': \(2, 3\)"),
        (lambda: TABLES.split(jnp.ones((3, 3))), r"split wants .* 12 rows, got \(3, 3\)"),
        (lambda: TABLES.per_row({"user": 1.0}), "per_row wants each of the tables"),
        (lambda: TABLES.per_row({"user": None}, 1.0), "a number or a bool for each table"),
        (lambda: StackedTables({1: (5, 2)}), r"by their names.*got \{1: \(5, 2\)\}"),
        (lambda: StackedTables({"a": 5}), r"by their names.*got \{'a': 5\}"),
        (lambda: TABLES.rows([0, 1, 2], [0, 1]), r"broadcasts to .* \[3\], got \[2\]"),
        (lambda: TABLES.rows([0, 1, 2], [[0], [1]]), r"broadcasts to .*got \[2, 1\]"),
        (lambda: TABLES.lookup(STACKED, np.zeros((2, 3), int)), "ids in a dict.*ndarray"),
        (
            lambda: TABLES.lookup_sparse(STACKED, {"user": [[0]]}, np.ones((1, 1))),
            "sp_weights in a dict",
        ),
        (lambda: TABLES.lookup(jnp.ones((16, 3)), {"user": [7]}), r"of 12 rows, got \(16"),
        (
            lambda: TABLES.lookup_sparse(jnp.ones((9, 3)), {"user": [[1]]}),
            "lookup_sparse wants the array of all tables",
        ),
        (lambda: TABLES.stack(dict.fromkeys(SHAPES, 1.0)), r"stack wants arrays.*\(\)"),
    ],
)
def test_misuse_is_refused(call, text):
    with pytest.raises((ValueError, IndexError), match=text):
        call()
