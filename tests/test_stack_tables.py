"""Tables of any model in one array each train as they do apart."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, fast_jit, slow_but_first
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jslices as js
from jslices.tables import Stacked, StackedTables, Unstack, stack_tables

RNG = np.random.default_rng(0)
ROWS, COUNT, BATCH = 30, 4, 12


def normal(*shape):
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


PARAMS = {
    "emb": {f"t{n}": normal(ROWS + n, 4) for n in range(COUNT)},
    "bias": {f"b{n}": normal(ROWS + n) for n in range(COUNT)},
    "wide": {"x": normal(ROWS, 8), "y": normal(20, 8)},
    "w": normal(4 * COUNT),
    "v": normal(8),
}
BATCHES = [
    (jnp.asarray(RNG.integers(-2, ROWS, (BATCH, COUNT)), jnp.int32), normal(BATCH))
    for _ in range(5)
]
SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 20, 1e-3)


def loss(params, ids, labels):
    rows = [params["emb"][f"t{n}"][ids[:, n]] for n in range(COUNT)]
    out = jnp.concatenate(rows, -1) @ params["w"]
    out += sum(params["bias"][f"b{n}"][ids[:, n]] for n in range(COUNT))
    out += (params["wide"]["x"][ids[:, 0]] * params["wide"]["y"][ids[:, 1] % 20]) @ params[
        "v"
    ]
    return jnp.mean((out - labels) ** 2)


REPORT = js.explain(loss)(PARAMS, *BATCHES[0])
STACKED, UNSTACK = stack_tables(PARAMS, REPORT)


def of_stacked(params, *batch, unstack=UNSTACK):
    return loss(unstack(params), *batch)


def trained(tx, params, fun, batches=BATCHES, state=None):
    step = fast_jit(js.train_step(fun, tx))
    state = tx.init(params) if state is None else state
    for batch in batches:
        params, state, _ = step(params, state, *batch)
    return params, state


def flushed(tx, params, state):
    return tx.flush(params, state) if tx.catches_up else (params, state)


def assert_same(a, b, **close):
    """Structure and values; to the bit, unless ``close`` says how far apart."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    compare = functools.partial(np.testing.assert_allclose, **close)
    jax.tree.map(compare if close else np.testing.assert_array_equal, a, b)


def numbers_of(state):
    """The state without the log, whose columns follow from the tallest array."""
    has_clock = getattr(state, "clock", None) is not None
    return state._replace(clock=state.clock.last) if has_clock else state


OPTIMIZERS = {
    "sgd": js.sgd(0.1),
    "momentum": js.sgd(0.1, momentum=0.9, untouched="exact"),
    "adagrad": js.adagrad(0.1),
    "rowwise": js.rowwise_adagrad(0.1),
    "adam": js.adam(0.1),
    "exact": js.adamw(SCHEDULE, weight_decay=0.1, untouched="exact"),
    "rmsprop": js.rmsprop(0.1),
    "ftrl": js.ftrl(0.1),
    "lamb": js.lamb(0.1),
    "average": js.optim.params_ema(js.adam(0.1, untouched="exact"), 0.95),
    "clipped": js.optim.chain(js.optim.clip(0.01), js.adagrad(0.1)),
}


@pytest.mark.parametrize("name", slow_but_first(*OPTIMIZERS))
def test_trains_as_apart_and_changes_form_at_any_step(name):
    tx = OPTIMIZERS[name]
    apart, stacked = trained(tx, PARAMS, loss), trained(tx, STACKED, of_stacked)
    assert_same(UNSTACK(flushed(tx, *stacked)[0]), flushed(tx, *apart)[0])
    through = UNSTACK(UNSTACK.stack(apart[1]))
    assert_same(numbers_of(UNSTACK(stacked[1])), numbers_of(through))
    # Each goes on in the form of the other.
    params, state = UNSTACK(stacked[0]), UNSTACK(stacked[1])
    there = flushed(tx, *trained(tx, params, loss, state=state))
    params, state = UNSTACK.stack(apart[0]), UNSTACK.stack(apart[1])
    back = flushed(tx, *trained(tx, params, of_stacked, state=state))
    assert_same(there[0], UNSTACK(back[0]))
    assert jax.tree.structure(there[1]) == jax.tree.structure(tx.init(PARAMS))
    assert jax.tree.structure(back[1]) == jax.tree.structure(tx.init(STACKED))


@pytest.mark.slow
def test_is_dense_optax():
    tx = optax.adamw(SCHEDULE, weight_decay=0.1)
    params, state = PARAMS, tx.init(PARAMS)
    for batch in BATCHES:
        updates, state = tx.update(jax.grad(loss)(params, *batch), state, params)
        params = optax.apply_updates(params, updates)
    ours = flushed(OPTIMIZERS["exact"], *trained(OPTIMIZERS["exact"], STACKED, of_stacked))
    assert_same(UNSTACK(ours[0]), params, rtol=1e-5, atol=1e-6)


def test_what_the_loss_looks_up_is_stacked():
    assert {k: x.shape for k, x in STACKED.tables.items()} == {
        "1": (4 * ROWS + 6,),
        "4": (4 * ROWS + 6, 4),
        "8": (ROWS + 20, 8),
    }
    assert STACKED.rest["emb"] == dict.fromkeys(PARAMS["emb"])
    assert_same((STACKED.rest["w"], STACKED.rest["v"]), (PARAMS["w"], PARAMS["v"]))
    assert UNSTACK.tables["8"] == StackedTables({"wide.x": (ROWS, 8), "wide.y": (20, 8)})
    assert "wide.y: rows 30 to 50" in repr(UNSTACK)
    assert_same(UNSTACK(STACKED), PARAMS)
    assert_same(UNSTACK.stack(PARAMS), STACKED)


def test_a_number_by_table():
    some = {**dict.fromkeys(PARAMS), "emb": {**dict.fromkeys(PARAMS["emb"]), "t1": 0.5}}
    of_rows = UNSTACK.per_row(some, default=1.0).tables["4"]
    assert of_rows(jnp.array([0, 29, 30, 60, 61])).tolist() == [1, 1, 0.5, 0.5, 1]
    height = UNSTACK.tables["4"].num_rows
    spread = js.spread_ids(jnp.arange(height), height)
    back = of_rows(js.spread_ids(spread, height, inverse=True))
    np.testing.assert_array_equal(back, of_rows(jnp.arange(height)))


def test_slices_are_split_and_stacked():
    slices = js.IndexedSlices(jnp.ones((4, 4)), jnp.array([0, 29, 30, 61]), (126, 4))
    parts = UNSTACK.tables["4"].split(slices)
    again = UNSTACK.tables["4"].stack(parts)
    assert again.indices.shape == (16,)
    assert_same(again.to_dense(), slices.to_dense())
    with pytest.raises(js.InvalidArgumentError, match="stack wants slices for"):
        UNSTACK.tables["4"].stack({**parts, "emb.t0": slices})


@pytest.mark.slow
def test_gradients_are_rows_of_the_stacks():
    grads = fast_jit(js.grad(of_stacked))(STACKED, *BATCHES[0])
    assert isinstance(grads, Stacked)
    assert [g.indices.shape for g in grads.tables.values()] == [(48,), (48,), (24,)]
    apart = js.grad(loss)(PARAMS, *BATCHES[0])
    for split in (UNSTACK(grads), UNSTACK(UNSTACK.stack(apart))):
        assert_close(split, apart)
    clip = lambda tree: js.tree.map(lambda g: js.clip_by_norm(g, 0.1), tree)  # noqa: E731
    clipped = UNSTACK.stack(clip(UNSTACK(grads)))
    tx = js.sgd(1.0)
    one = tx.apply(clipped, tx.init(STACKED), STACKED)[0]
    two = tx.apply(clip(apart), tx.init(PARAMS), PARAMS)[0]
    assert_same(UNSTACK(one), two, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("untouched", ["lazy", "exact"])
def test_rows_by_table(untouched):
    """Frozen tables, and rates by table."""
    adam = js.adam(0.1, untouched=untouched)
    bits = {**dict.fromkeys(PARAMS, False), "emb": {f"t{n}": n == 2 for n in range(COUNT)}}
    freeze = functools.partial(js.optim.freeze_rows, adam)
    apart = trained(freeze(bits), PARAMS, loss)
    stacked = trained(freeze(UNSTACK.per_row(bits)), STACKED, of_stacked)
    assert_same(UNSTACK(stacked[0]), apart[0])
    assert_same(apart[0]["emb"]["t2"], PARAMS["emb"]["t2"])
    if untouched == "exact":
        return
    rates = {**dict.fromkeys(PARAMS), "emb": {f"t{n}": n / 2 for n in range(COUNT)}}
    scale = lambda rates: js.optim.chain(adam, js.optim.scale(rates))  # noqa: E731
    apart = trained(scale(rates), PARAMS, loss)
    stacked = trained(scale(UNSTACK.per_row(rates)), STACKED, of_stacked)
    assert_same(UNSTACK(stacked[0]), apart[0])


@pytest.mark.slow
def test_partition_and_masks_by_stack():
    labels = {"emb": "a", "bias": "b", "wide": "a", "w": "b", "v": "b"}
    each = {"a": js.adam(0.1, untouched="exact"), "b": js.sgd(0.1)}
    tx = js.optim.partition(each, labels)
    own = js.optim.partition(each, UNSTACK.per_stack(labels))
    apart, stacked = trained(tx, PARAMS, loss), trained(own, STACKED, of_stacked)
    assert_same(UNSTACK(stacked[0]), apart[0])
    assert jax.tree.structure(UNSTACK(stacked[1])) == jax.tree.structure(apart[1])
    assert jax.tree.structure(UNSTACK.stack(apart[1])) == jax.tree.structure(stacked[1])
    mask = {key: label == "a" for key, label in labels.items()}
    decay = functools.partial(js.adamw, 0.1, weight_decay=0.5, untouched="exact")
    apart = trained(decay(mask=mask), PARAMS, loss)
    stacked = trained(decay(mask=UNSTACK.per_stack(mask)), STACKED, of_stacked)
    assert_same(UNSTACK(stacked[0]), apart[0])


@pytest.mark.slow
def test_names_of_optimizers_may_be_those_of_tables():
    params = {"a": normal(9, 4), "b": normal(7, 4)}
    stacked, unstack = stack_tables(params)
    loss = lambda p, ids: jnp.sum(p["a"][ids] * p["b"][ids])  # noqa: E731
    each = {"a": js.adam(0.1, untouched="exact"), "b": js.sgd(0.1)}
    apart = js.optim.partition(each, "a")
    both = js.optim.partition(each, unstack.per_stack("a"))
    ids = [(jnp.array([1, 2]),), (jnp.array([0, 2]),)]
    one = trained(apart, params, loss, ids)
    two = trained(both, stacked, lambda p, ids: loss(unstack(p), ids), ids)
    assert_same(unstack(two[0]), one[0], rtol=1e-5, atol=1e-6)
    assert jax.tree.structure(unstack(two[1])) == jax.tree.structure(one[1])
    assert jax.tree.structure(unstack.stack(one[1])) == jax.tree.structure(two[1])


def test_tables_of_one_string_are_together():
    where = {
        **dict.fromkeys(PARAMS, False),
        "emb": {f"t{n}": "ab"[n > 1] for n in range(4)},
    }
    stacked, unstack = stack_tables(PARAMS, where)
    assert {k: x.shape for k, x in stacked.tables.items()} == {
        "a_4": (61, 4),
        "b_4": (65, 4),
    }
    assert unstack.per_stack(where).tables == {"a_4": "a", "b_4": "b"}
    assert_same(unstack(stacked), PARAMS)
    with pytest.raises(js.InvalidArgumentError, match=r"'a' for emb.t0 and 'b' for emb.t2"):
        UNSTACK.per_stack({**dict.fromkeys(PARAMS), **where})
    function = stack_tables(PARAMS, lambda params: {**where, "w": None})[1]
    assert function.tables == unstack.tables


@pytest.mark.slow
@pytest.mark.parametrize("exchange", [False, True])
def test_rows_over_devices(exchange):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    stacked, unstack = stack_tables(PARAMS, REPORT, devices=8)
    assert all(x.shape[0] % 8 == 0 for x in stacked.tables.values())
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))  # noqa: E731
    tables = {k: put(x, "x") for k, x in stacked.tables.items()}
    params = Stacked(tables, jax.tree.map(put, stacked.rest))
    more = Stacked(dict.fromkeys(tables, js.Exchange("x")), None) if exchange else None
    tx = js.adam(0.1, untouched="exact")
    fun = functools.partial(of_stacked, unstack=unstack)
    step = fast_jit(js.train_step(fun, tx, exchange=more))
    batches = [(jnp.tile(ids, (2, 1)), jnp.tile(y, 2)) for ids, y in BATCHES]
    state = tx.init(params)
    for ids, labels in batches:
        params, state, _ = step(params, state, put(ids, "x"), put(labels, "x"))
    params, state = tx.flush(params, state)
    assert params.tables["4"].sharding.is_equivalent_to(tables["4"].sharding, 2)
    apart = tx.flush(*trained(tx, PARAMS, loss, batches))[0]
    there = jax.tree.map(np.asarray, unstack(jax.tree.map(np.asarray, params)))
    assert_same(there, jax.tree.map(np.asarray, apart), rtol=1e-5, atol=1e-6)


def test_explicit_axes_say_what_to_type():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    stacked, unstack = stack_tables(PARAMS, REPORT, devices=8)
    with jax.set_mesh(mesh):
        whole = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, P())), stacked)
        assert_same(unstack(whole)["emb"]["t1"], PARAMS["emb"]["t1"])
        tables = {k: jax.device_put(x, P("x")) for k, x in whole.tables.items()}
        with pytest.raises(js.InvalidArgumentError, match=r"'x': look up tables.rows"):
            unstack(whole._replace(tables=tables))


@pytest.mark.slow
def test_checkpoints_in_either_form(tmp_path):
    tx = OPTIMIZERS["exact"]
    params, state = trained(tx, STACKED, of_stacked)
    saver = js.Saver()
    path = saver.save({"p": params, "s": state}, tmp_path / "stacked")
    again = saver.restore(path, {"p": STACKED, "s": tx.init(STACKED)})
    assert_same((again["p"], again["s"]), (params, state))
    apart = {"p": UNSTACK(params), "s": UNSTACK(state)}
    path = saver.save(apart, tmp_path / "apart")
    template = UNSTACK(jax.eval_shape(lambda: {"p": STACKED, "s": tx.init(STACKED)}))
    again = UNSTACK.stack(saver.restore(path, template))
    assert_same(tx.flush(again["p"], again["s"])[0], tx.flush(params, state)[0])


@pytest.mark.slow
def test_slots_of_other_libraries_and_back():
    """They are those of tables apart."""
    tx = js.adam(0.1, untouched="exact")
    params, state = flushed(tx, *trained(tx, STACKED, of_stacked))
    slots = js.checkpoint.export_state(UNSTACK(params), UNSTACK(state), "torch")
    assert slots["emb"]["t1"]["exp_avg"].shape == (ROWS + 1, 4)
    again = js.checkpoint.import_state(tx, UNSTACK(params), slots, count=len(BATCHES))
    one = flushed(tx, *trained(tx, params, of_stacked, state=UNSTACK.stack(again)))
    two = flushed(tx, *trained(tx, params, of_stacked, state=state))
    assert_same(one[0], two[0], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_tables_that_grow_go_and_join():
    tx = js.adam(0.1, untouched="exact")
    params, state = flushed(tx, *trained(tx, STACKED, of_stacked))
    emb = {"t0": normal(50, 4), "t1": normal(10, 4), "new": normal(7, 4)}
    where = {**dict.fromkeys(PARAMS, True), "w": False, "v": False}
    fresh, unstack = stack_tables({**PARAMS, "emb": emb}, where)
    rows = {k: x.rows_of(UNSTACK.tables[k]) for k, x in unstack.tables.items()}
    rows = {f"tables/{k}": x for k, x in rows.items()}
    new, moved = js.checkpoint.resize_rows(tx, params, state, fresh, rows=rows)
    zeros = jax.tree.map(jnp.zeros_like, emb)
    for after, before, start in (
        (unstack(new), UNSTACK(params), emb),
        (unstack(moved).mu, UNSTACK(state).mu, zeros),
    ):
        before, after = before["emb"], after["emb"]
        grown = jnp.concatenate([before["t0"], start["t0"][ROWS:]])
        assert_same(after, {"t0": grown, "t1": before["t1"][:10], "new": start["new"]})


def test_boxes_keep_their_names():
    meta = pytest.importorskip("flax.core.meta")
    boxed = {k: meta.Partitioned(normal(5, 2), ("rows", None)) for k in "ab"}
    stacked, unstack = stack_tables(boxed)
    assert stacked.tables["2"].shape == (10, 2) and stacked.rest == {"a": None, "b": None}
    assert jax.tree.structure(unstack(stacked)) == jax.tree.structure(boxed)
    assert_same(unstack(stacked), boxed)
    state = js.rowwise_adagrad(0.1).init(stacked)
    assert unstack(state).sum_of_squares["a"].names == ("rows",)


@pytest.mark.interop
@pytest.mark.parametrize("make", ["nnx", "linen", "equinox", "haiku"])
def test_models_of_other_libraries(make):
    """The model's own code, on tables in one array."""
    params, fun = globals()[f"{make}_model"]()
    ids, labels = BATCHES[0][0] % 20, BATCHES[0][1]
    loss = lambda params, ids, labels: jnp.mean((fun(params, ids) - labels) ** 2)  # noqa: E731
    stacked, unstack = stack_tables(params, js.explain(loss)(params, ids, labels))
    assert {k: x.shape for k, x in stacked.tables.items()} == {"4": (4 * 20 + 6, 4)}
    own = lambda params, *batch: loss(unstack(params), *batch)  # noqa: E731
    tx, batches = js.adam(0.1, untouched="exact"), [(ids, labels), (ids % 7, labels)]
    apart = flushed(tx, *trained(tx, params, loss, batches))
    both = flushed(tx, *trained(tx, stacked, own, batches))
    assert_same(unstack(both[0]), apart[0])
    assert jax.tree.structure(unstack(both[1])) == jax.tree.structure(apart[1])


def nnx_model():
    nnx = pytest.importorskip("flax.nnx")

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.List([nnx.Embed(20 + n, 4, rngs=rngs) for n in range(COUNT)])
            self.out = nnx.Linear(4 * COUNT, 1, rngs=rngs)

        def __call__(self, ids):
            rows = [embed(ids[:, n]) for n, embed in enumerate(self.embed)]
            return self.out(jnp.concatenate(rows, -1))[:, 0]

    model, params = nnx.split(Model(nnx.Rngs(0)), nnx.Param)
    return params, lambda params, ids: nnx.merge(model, params)(ids)


def linen_model():
    linen = pytest.importorskip("flax.linen")

    class Model(linen.Module):
        @linen.compact
        def __call__(self, ids):
            init = linen.with_partitioning(linen.initializers.normal(), ("rows", None))
            rows = [
                linen.Embed(20 + n, 4, embedding_init=init)(ids[:, n]) for n in range(COUNT)
            ]
            return linen.Dense(1)(jnp.concatenate(rows, -1))[:, 0]

    model = Model()
    return model.init(jax.random.key(0), jnp.zeros((1, COUNT), jnp.int32)), model.apply


def equinox_model():
    eqx = pytest.importorskip("equinox")
    keys = jax.random.split(jax.random.key(0), COUNT)

    class Model(eqx.Module):
        embed: list
        w: jax.Array

        def __call__(self, ids):
            rows = [jax.vmap(embed)(ids[:, n]) for n, embed in enumerate(self.embed)]
            return jnp.concatenate(rows, -1) @ self.w

    embed = [eqx.nn.Embedding(20 + n, 4, key=key) for n, key in enumerate(keys)]
    return Model(embed, jnp.ones(4 * COUNT)), lambda model, ids: model(ids)


def haiku_model():
    hk = pytest.importorskip("haiku")

    def forward(ids):
        rows = [hk.Embed(20 + n, 4)(ids[:, n]) for n in range(COUNT)]
        return hk.Linear(1)(jnp.concatenate(rows, -1))[:, 0]

    model = hk.without_apply_rng(hk.transform(forward))
    return model.init(jax.random.key(0), jnp.zeros((1, COUNT), jnp.int32)), model.apply


def test_stacks_of_shapes_fit_int32():
    s = jax.ShapeDtypeStruct
    shapes = {"a": 2**31 - 9, "b": 10, "c": 10, "d": 2**31 - 20, "e": 9, "f": 9, "g": 2}
    tables = {k: s((n, 4), jnp.float32) for k, n in shapes.items()}
    tables["h"] = s((5, 4), jnp.bfloat16)
    stacked, unstack = stack_tables(tables)
    assert {k: x.names for k, x in unstack.tables.items()} == {
        "4": ("b", "c"),
        "4_1": ("d", "e", "f"),
    }
    assert stacked.tables["4_1"] == s((2**31 - 2, 4), jnp.float32)
    assert unstack(stacked) == tables


def test_what_goes_by_columns_is_refused():
    with pytest.raises(
        ValueError, match=r"means of the columns.*\['1', '4', '8'\].*where="
    ):
        js.adafactor(0.1).init(STACKED)
    each = {"a": js.adafactor(0.1), "b": js.sgd(0.1)}
    labels = UNSTACK.per_stack({**dict.fromkeys(PARAMS, "b"), "w": "a"})
    js.optim.partition(each, labels).init(STACKED)


def test_says_what_to_type():
    def refused(match, *args, error=js.InvalidArgumentError, call=stack_tables):
        with pytest.raises(error, match=match):
            call(*args)

    refused(r"two tables or more.*got float32\[V, 2\]; give", {"a": normal(3, 2)})
    refused(r"two tables or more.*got no table", {"a": normal(3), "b": normal(3)})
    refused(r"a report of other arrays", {"a": normal(3, 2)}, REPORT)
    refused(r"bools or strings in the structure.*got 3", PARAMS, 3)
    refused(r"prefix of it; .*", PARAMS, {"emb": True}, error=ValueError)
    refused(r"floats, got int32\[3\] at n", {**PARAMS, "n": jnp.arange(3)}, True)
    refused(r"two arrays a.b; rename", {"a": {"b": normal(3, 2)}, "a.b": normal(3, 2)})
    refused("returned first.*got PyTreeDef", PARAMS, error=TypeError, call=UNSTACK)
    refused(r"as stack_tables got them", STACKED, error=TypeError, call=UNSTACK.stack)
    refused(
        r"as stack_tables got them", {"a": normal(3)}, error=TypeError, call=UNSTACK.stack
    )
    assert isinstance(UNSTACK, Unstack)


def test_plain_jax_grad_warns():
    with pytest.warns(js.DensificationWarning, match="of this unstack a dense gradient"):
        jax.grad(of_stacked)(STACKED, *BATCHES[0])


def test_many_tables_apart_are_hinted_at(monkeypatch):
    monkeypatch.setattr("jslices._place.hints.hinted", set())
    tables = {f"t{n}": jnp.ones((9, 3)) for n in range(8)}
    loss = lambda tables, ids: sum(x[ids].sum() for x in tables.values())  # noqa: E731
    tx, ids = js.sgd(0.1), jnp.arange(2)
    lower = lambda fun, at: jax.jit(js.train_step(fun, tx)).lower(at, tx.init(at), ids)  # noqa: E731
    with pytest.warns(js.PerformanceHint, match=r"8 tables float32\[V, 3\].*stack_t"):
        lower(loss, tables)
    monkeypatch.setattr("jslices._place.hints.hinted", set())
    lower(loss, {k: tables[k] for k in list(tables)[:7]})  # warnings are errors here
    stacked, unstack = stack_tables(tables)
    lower(lambda at, ids: loss(unstack(at), ids), stacked)


@pytest.mark.parametrize(
    "tx", slow_but_first(js.adam(0.1), js.adamw(SCHEDULE, untouched="exact"))
)
def test_stacks_in_host_memory(tx):
    stacked, unstack = stack_tables(PARAMS["emb"])
    tables = unstack.tables["4"]
    beginning = np.asarray(stacked.tables["4"])

    def of_rows(rows, labels):
        return jnp.mean((jnp.sum(rows, (1, 2)) - labels) ** 2)

    def apart(emb, ids, labels):
        rows = [emb[f"t{n}"][ids[:, n]] for n in range(COUNT)]
        return of_rows(jnp.stack(rows, 1), labels)

    @fast_jit
    def step(rows, places, labels):
        in_host = lambda now: of_rows(js.embedding_lookup(now, places), labels)  # noqa: E731
        now, state = rows.unpack()
        return rows.pack(*tx.apply(js.grad(in_host)(now), state, now))

    batches = [(ids % ROWS, labels) for ids, labels in BATCHES]
    host = js.HostTable(tables.shape, tx, init=lambda rows: beginning[rows], size=64)
    for ids, labels in batches:
        rows, places = host.fetch(np.asarray(tables.rows(ids)))
        host.store(step(rows, places, labels))
    expected, _ = flushed(tx, *trained(tx, PARAMS["emb"], apart, batches))
    now = tables.split(jnp.asarray(host.read(np.arange(tables.num_rows))))
    assert_close(now, dict(zip(tables.names, expected.values(), strict=True)))


def test_a_table_of_no_rows_stays_apart():
    params = {"none": jnp.zeros((0, 3)), "a": jnp.ones((4, 3)), "b": jnp.ones((2, 3))}
    stacked, unstack = stack_tables(params)
    assert [x.shape for x in stacked.tables.values()] == [(6, 3)]
    assert stacked.rest["none"].shape == (0, 3)
    assert jax.tree.map(jnp.shape, unstack(stacked)) == jax.tree.map(jnp.shape, params)
    with pytest.raises(js.InvalidArgumentError, match="at none; leave it out of where"):
        stack_tables(params, True)
