"""Tables split over devices: the same as on one device, and only rows travel."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optimizers
import pytest
from helpers import all_at_once, assert_close, fast_jit, numpy_dense, slow_unless
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jslices as js

P = PartitionSpec
V, D, K, STEPS = 64, 4, 32, 3
RNG = np.random.default_rng(5)
TABLE = RNG.normal(size=(V, D)).astype(np.float32)
W = RNG.normal(size=(D,)).astype(np.float32)
LABELS = RNG.normal(size=(K,)).astype(np.float32)
# Mesh shapes, their axes, and how the table and the ids are split.
ROWS = {
    "8": ((8,), ("x",), P("x"), P("x")),
    "2x4": ((2, 4), ("a", "x"), P("x"), P(("a", "x"))),
    "2x4, all axes": ((2, 4), ("a", "x"), P(("a", "x")), P(("a", "x"))),
    "8x1": ((8, 1), ("a", "x"), P("x"), P("a")),
    "2x4, columns": ((2, 4), ("a", "x"), P("x", "a"), P(("a", "x"))),
}
# Some ids out of range everywhere; -1 is the last row in JAX.
IDS = {
    "any": RNG.integers(0, V, (STEPS, K)),
    "equal": np.full((STEPS, K), 7),
    "of one owner": RNG.integers(0, V // 8, (STEPS, K)),
    "distinct of one owner": np.arange(STEPS * K).reshape(STEPS, K) % (V // 8),
    "out of range": RNG.integers(-2 * V, 3 * V, (STEPS, K)),
    "none": np.full((STEPS, K), 5 * V),
}
IDS = {name: ids.astype(np.int32) for name, ids in IDS.items()}


def mesh_of(shape, names, kind=AxisType.Auto):
    if jax.device_count() < 8:
        pytest.skip("needs eight devices")
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names))


def on(mesh, x, spec):
    return jax.device_put(x, NamedSharding(mesh, spec))


def split(mesh, tree, spec):
    """What has a row for each of V on the devices where these rows are."""
    return jax.tree.map(lambda x: on(mesh, x, spec if x.shape[:1] == (V,) else P()), tree)


def loss(params, ids, labels):
    rows = js.embedding_lookup(params["table"], ids)
    rows = jnp.where(jnp.isnan(rows), 0.0, rows)
    return jnp.mean((jnp.tanh(rows @ params["w"]) - labels) ** 2)


def train(tx, exchange, params, state, ids):
    """Some steps, each on its own ids; those of exact optimizers catch up."""

    def step(carry, ids):
        params, state = carry
        if tx.catches_up:
            rows = js.lookup_ids(loss, exchange=exchange)(params, ids, LABELS)
            params, state = tx.catch_up(params, state, {**rows, "w": True})
        grads = js.grad(loss, exchange=exchange)(params, ids, LABELS)
        return tx.apply(grads, state, params), None

    return tx.flush(*jax.lax.scan(step, (params, state), ids)[0])


def params_on_one():
    return {"table": jnp.asarray(TABLE), "w": jnp.asarray(W)}


@functools.cache
def training(mesh, exchange):
    """Steps of Adam of a table that is split so, to be called with ids by name."""
    shape, names, spec, batch = ROWS[mesh]
    if len(spec[0]) > 1:
        exchange = js.Exchange(spec[0], exchange.plan, exchange.capacity)
    mesh, tx = mesh_of(shape, names), OPTIMIZERS["adam"]
    params = split(mesh, params_on_one(), spec)
    state = split(mesh, tx.init(params), spec)
    run = fast_jit(functools.partial(train, tx, {"table": exchange}))

    def call(ids):
        given = on(mesh, IDS[ids], P(None, *batch))
        return run(params, state, given)

    return call


@functools.cache
def training_on_one():
    tx, params = OPTIMIZERS["adam"], params_on_one()
    run = fast_jit(functools.partial(train, tx, None))
    return lambda ids: run(params, tx.init(params), IDS[ids])


def step_each(which, exchange, params, states, ids):
    """The steps of optimizers by the gradients of one table, which does not move."""

    def step(carry, ids):
        grads = js.grad(loss, exchange=exchange)(params, ids, LABELS)
        rows = js.lookup_ids(loss, exchange=exchange)(params, ids, LABELS)
        done = {}
        for name in which:
            tx, (moved, state) = OPTIMIZERS[name], carry[name]
            if tx.catches_up:
                moved, state = tx.catch_up(moved, state, {**rows, "w": True})
            done[name] = tx.apply(grads, state, moved)
        return done, None

    done = jax.lax.scan(step, {name: (params, states[name]) for name in which}, ids)[0]
    return {name: OPTIMIZERS[name].flush(*done[name]) for name in which}


OPTIMIZERS = {
    name: optimizers.make(js, name, 0.1, kwargs) for name, kwargs in optimizers.KINDS
} | {
    f"exact {name}": getattr(js, name)(rate, untouched="exact")
    for name, rate in [
        ("adam", 0.1),
        ("adamw", lambda count: 0.1 / (1 + count)),
        ("partial_rowwise_adam", 0.1),
    ]
}
TO_OWNERS, GATHER = js.Exchange("x", "all_to_all"), js.Exchange("x", "gather")
CROWDED = js.Exchange("x", "all_to_all", capacity=0.5)  # has to gather for some ids
ROOMY = js.Exchange("x", "all_to_all", capacity=8.0)  # has room for all ids


@pytest.mark.parametrize("ids", IDS)
@pytest.mark.parametrize(
    "mesh, exchange",
    slow_unless(
        [
            *((mesh, TO_OWNERS) for mesh in ROWS),
            *((mesh, GATHER) for mesh in ("2x4", "2x4, columns")),
            *((mesh, CROWDED) for mesh in ("8", "2x4, columns")),
        ],
        lambda case: case[0] == "2x4" and case[1] != CROWDED,
    ),
    ids=str,
)
def test_training_is_the_same_whatever_the_ids(mesh, exchange, ids):
    assert_close(training(mesh, exchange)(ids), training_on_one()(ids), rtol=1e-4)


def test_what_does_not_fit_shows():
    mesh = mesh_of((8,), ("x",))
    exchange = js.Exchange("x", "all_to_all", capacity=0.5, overflow="nan")
    table = on(mesh, TABLE, P("x"))

    def run(ids):
        look_up = js.value_and_grad(lambda t, i: (t[i] ** 2).sum(), exchange=exchange)
        return fast_jit(look_up)(table, on(mesh, ids.astype(np.int32), P("x")))

    fits = np.tile(np.arange(8) * 8, 4)  # one id for each pair of devices
    value, grad = run(fits)
    np.testing.assert_allclose(value, (TABLE[fits] ** 2).sum(), rtol=1e-5)
    assert grad.indices.shape == (8 * 8 * 1,)
    assert np.isnan(run(np.arange(K) % 8)[0])


@functools.cache
def stepped_on_one(which):
    params, ids = params_on_one(), IDS["any"]
    states = {name: OPTIMIZERS[name].init(params) for name in which}
    run = functools.partial(step_each, which, None)
    return jax.device_get(fast_jit(run)(params, states, ids))


FEW = "sgd", "exact adam"  # with each kind of axes; the others with one of them
OTHERS = [name for name in OPTIMIZERS if name not in FEW]
ON_KINDS = [(FEW, "Auto"), (FEW, "Explicit")]
ON_KINDS += [(tuple(OTHERS[::2]), "Auto"), (tuple(OTHERS[1::2]), "Explicit")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "which, kind",
    ON_KINDS,
    ids=lambda x: x if type(x) is str else f"{len(x)} optimizers",
)
def test_each_kind_of_optimizer_on_a_mesh(which, kind):
    shape, names, spec, batch = ROWS["2x4"]
    mesh = mesh_of(shape, names, getattr(AxisType, kind))
    plan = "all_to_all" if kind == "Auto" else "gather"
    exchange = {"table": js.Exchange("x", plan, overflow="nan", capacity=4.0)}
    with jax.set_mesh(mesh):
        params = split(mesh, params_on_one(), spec)
        given = on(mesh, IDS["any"], P(None, *batch))
        states = {name: OPTIMIZERS[name].init(params_on_one()) for name in which}
        states = split(mesh, states, spec)
        run = functools.partial(step_each, which, exchange)
        stepped = fast_jit(run)(params, states, given)
    wanted = stepped_on_one(which)
    for name, result in stepped.items():
        assert_close(jax.device_get(result), wanted[name], rtol=1e-4, atol=1e-5)
        assert result[0]["table"].sharding.is_equivalent_to(params["table"].sharding, 2)


FORMS = {
    "matrix": lambda t, i: jnp.sin(js.embedding_lookup(t, i)).sum(1),
    "cast": lambda t, i: js.embedding_lookup(t.astype(jnp.float16), i).sum(1) * 2.0,
    "scaled": lambda t, i: js.embedding_lookup(t * 2.0, i).sum(1),
    "twice": lambda t, i: js.embedding_lookup(t, i[:, 0]) * js.embedding_lookup(t, i[:, 1]),
    "padding": lambda t, i: js.embedding_lookup(t, i, padding_id=3).sum(1),
    "checkpoint": lambda t, i: jax.checkpoint(
        lambda t: jnp.sin(js.embedding_lookup(t, i)).sum(1)
    )(t),
    "bags": lambda t, i: js.embedding_lookup_sparse(t, i, combiner="mean"),
    "scan": lambda t, i: jax.lax.scan(
        lambda c, x: (c + jnp.sin(js.embedding_lookup(t, x)).sum(), None), 0.0, i.T
    )[0],
    "cond": lambda t, i: jax.lax.cond(
        t.shape[0] > i.sum(),
        lambda: js.embedding_lookup(t, i[:, 0]) ** 3,
        lambda: js.embedding_lookup(t, i[:, 1]),
    ),
    "vmap": lambda t, i: jax.vmap(lambda x: js.embedding_lookup(t, x).sum(0))(i),
}
PLACES = [
    ("Auto", (8,), ("x",), P("x")),
    ("Auto", (2, 4), ("a", "x"), P("x")),
    ("Auto", (2, 4), ("a", "x"), P("x", "a")),
    ("Explicit", (8,), ("x",), P("x")),
    ("Explicit", (2, 4), ("a", "x"), P("x")),
    ("Explicit", (2, 4), ("a", "x"), P("a", "x")),
    ("Explicit", (4,), ("x",), P(None, "x")),
    ("Explicit", (8,), ("x",), P()),
    ("Explicit", (1,), ("x",), P("x")),
]


FORM_IDS = RNG.integers(0, V, (16, 4)).astype(np.int32)


def grad_of(form, exchange, grad=js.grad):
    def whole(t, i):
        return (form(t, i).astype(jnp.float32) ** 2).sum()

    return grad(whole) if exchange is None else js.grad(whole, exchange=exchange)


@functools.cache
def forms_on_one():
    forms = {name: grad_of(form, None, jax.grad) for name, form in FORMS.items()}
    return all_at_once(forms, TABLE, FORM_IDS)


# Half of the forms at each of four places, two of a kind; a third at each other one.
HALVES = {1: 1, 2: 0, 3: 0, 4: 1}
IN_PLACES = [
    (*place, tuple(FORMS)[HALVES[i] :: 2] if i in HALVES else tuple(FORMS)[i % 3 :: 3])
    for i, place in enumerate(PLACES)
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::jslices.DensificationWarning")
@pytest.mark.parametrize("kind, shape, names, spec, forms", IN_PLACES)
def test_lookups_in_every_form(kind, shape, names, spec, forms):
    if jax.device_count() < 8:
        pytest.skip("needs eight devices")
    kinds, devices = (getattr(AxisType, kind),) * len(names), jax.devices()
    devices = devices[: int(np.prod(shape))]
    mesh = jax.make_mesh(shape, names, axis_types=kinds, devices=devices)
    exchanges = dict.fromkeys(forms, ROOMY if kind == "Auto" else None)
    if kind == "Auto":  # where ids that do not fit are gathered
        exchanges |= dict.fromkeys({"scan", "vmap"} & {*forms}, js.Exchange("x"))
    ids = FORM_IDS
    with jax.set_mesh(mesh):
        batch = P(names) if "x" not in spec[1:] else P(names[:-1] or None)
        found = all_at_once(
            {name: grad_of(FORMS[name], exchange) for name, exchange in exchanges.items()},
            on(mesh, TABLE, spec),
            on(mesh, ids, batch),
        )
    wanted = forms_on_one()
    for name, slices in found.items():
        assert js.is_slices(slices), name
        ours = numpy_dense(slices.values, slices.indices, (V, D))
        atol = 0.05 if name == "cast" else 1e-4
        assert_close(ours, wanted[name], rtol=1e-3, atol=atol)


def test_around_the_optimizer_nothing_but_numbers_travels():
    mesh = mesh_of((8,), ("x",))
    placed = on(mesh, TABLE, P("x"))
    ids = on(mesh, IDS["any"][0], P("x"))

    def loss(table, ids):
        return (table[ids] ** 2).sum()

    grads = fast_jit(js.grad(loss, exchange=ROOMY))(placed, ids)

    def around(g):
        clipped = js.clip_by_global_norm(g, 1.0)[0]
        rows = js.clip_rows_by_norm(clipped, 0.1)
        return rows, js.global_norm(rows), js.all_finite(rows), rows + g, g.coalesce()

    compiled = fast_jit(around).lower(grads).compile()
    sent = [c for c in js._proof.cost.cost_of(compiled).collectives]
    assert all(c.nbytes <= 16 for c in sent), sent
    wanted = fast_jit(lambda t, i: around(js.grad(loss)(t, i)))(TABLE, np.asarray(ids))
    assert_close(jax.device_get(compiled(grads)), jax.device_get(wanted), rtol=1e-4)


@pytest.mark.parametrize(
    "spec, name",
    slow_unless(
        itertools.product([P(), P("x"), P(None, "x")], ["sgd", "adam"]),
        lambda case: (case[1] == "adam") == (case[0] == P("x")),
    ),
    ids=str,
)
def test_without_an_exchange_no_table_travels_either(name, spec):
    mesh, tx = mesh_of((4,), ("x",)), OPTIMIZERS[name]
    params = split(mesh, params_on_one(), spec)
    state = tx.init(params)
    ids = on(mesh, IDS["any"][0], P("x"))

    def step(params, state, ids):
        grads = js.grad(loss)(params, ids, LABELS)
        return tx.apply(grads, state, params)

    compiled = fast_jit(step).lower(params, state, ids).compile()
    most = max(c.nbytes for c in js._proof.cost.cost_of(compiled).collectives)
    assert most <= 3 * K * D * 4  # of rows looked up: of Adam's three arrays at a time
    wanted = fast_jit(step)(params_on_one(), tx.init(params_on_one()), IDS["any"][0])
    assert_close(jax.device_get(compiled(params, state, ids)), jax.device_get(wanted))


def test_lookup_ids_are_what_the_program_reads():
    def loss(params, ids):
        def body(total, i):
            return total + params["a"][i].sum(), None

        total, _ = jax.lax.scan(body, 0.0, ids)
        return total + params["b"][ids[:2]].sum() + (params["a"][ids] ** 2).sum()

    params = {"a": np.ones((9, 2), "f4"), "b": np.ones(7, "f4"), "c": None}
    found = js.lookup_ids(loss)(params, np.array([4, 8, 4]))
    np.testing.assert_array_equal(found["a"], [4, 8, 4, 4, 8, 4])
    np.testing.assert_array_equal(found["b"], [4, 6])  # the nearest row
    assert found["c"] is None
    both = js.lookup_ids(lambda a, b, i: a[i].sum() * b.sum(), argnums=(0, 1))
    rows, dense = both(params["a"], np.ones(2, "f4"), np.array([1]))
    assert rows.tolist() == [1] and dense is None

    def chained(links, table, ids):
        return table[links[ids].astype(jnp.int32)[:, 0]].sum()

    links = np.ones((5, 1), "f4")
    rows = js.lookup_ids(chained, argnums=1)(links, params["a"], np.array([3]))
    assert rows.tolist() == [1]

    def walk(table, ids):
        return table[table[ids].astype(jnp.int32)[:, 0]].sum()

    with pytest.raises(ValueError, match=r"depend on its own values .*flush"):
        js.lookup_ids(walk)(params["a"], np.array([3]))


def test_explain_tells_bytes_and_what_does_not_fit():
    mesh = mesh_of((8,), ("x",))
    table = jax.ShapeDtypeStruct((V, D), jnp.float32, sharding=NamedSharding(mesh, P("x")))

    def report(ids, **how):
        look_up = js.explain(lambda t, i: t[i].sum(), exchange=js.Exchange("x", **how))
        return look_up(table, ids).leaves[0].exchange

    described = report(jax.ShapeDtypeStruct((K,), jnp.int32))
    # Four ids on each of eight devices, room for one of each pair, rows of 16 bytes.
    assert described.way == "all_to_all" and described.capacity == 1
    assert described.all_to_all_bytes == 7 * 1 * (4 + 2 * 16)
    assert described.gather_bytes == 7 * 4 * (4 + 2 * 16)
    assert described.fullest is None and described.overflowing is None
    crowded = report(np.arange(K, dtype=np.int32) % 8)
    assert (crowded.fullest, crowded.overflowing) == (4, 8 * 3)
    assert "24 ids too many, that lookup gathers" in str(crowded)
    even = report(np.repeat(np.arange(8, dtype=np.int32) * 8, 4), overflow="nan")
    assert (even.fullest, even.overflowing) == (1, 0)
    assert "NaN" in str(report(np.arange(K, dtype=np.int32) % 8, overflow="nan"))
    assert report(np.arange(K, dtype=np.int32), plan="gather").way == "gather"


def test_bad_exchanges_say_what_to_type():
    for wrong, message in [
        ({"axis": ()}, "the name of a mesh axis"),
        ({"axis": "x", "plan": "all2all"}, "wanted .auto.,"),
        ({"axis": "x", "overflow": "drop"}, "wanted .gather. or"),
        ({"axis": "x", "capacity": 0}, "wanted a finite number above 0"),
        ({"axis": "x", "capacity": float("inf")}, "wanted a finite number above 0"),
        ({"axis": ""}, "the name of a mesh axis"),
        ({"axis": None}, "the name of a mesh axis"),
        ({"axis": ("x", "x")}, "or several, each once"),
    ]:
        with pytest.raises(js.InvalidArgumentError, match=message):
            js.Exchange(**wrong)
    mesh, ids = mesh_of((8,), ("x",)), np.arange(4)

    def grad(table, exchange):
        def loss(p):
            return js.embedding_lookup(p["table"], ids).sum()

        return js.grad(loss, exchange=exchange)({"table": table})

    placed = on(mesh, TABLE, P("x"))
    with pytest.raises(js.InvalidArgumentError, match=r"axes \('x',\), and not 'y'"):
        grad(placed, js.Exchange("y"))
    with pytest.raises(js.InvalidArgumentError, match=r"jslices.padded_rows\(63, 8\)"):
        grad(on(mesh, TABLE[:63], P()), js.Exchange("x"))
    with pytest.raises(js.InvalidArgumentError, match="on no mesh"):
        grad(jnp.asarray(TABLE), js.Exchange("x"))
    with pytest.raises(TypeError, match=r"Exchange or None .* for p\['table'\]"):
        grad(placed, {"table": "x"})
    with pytest.raises(ValueError, match="prefix"):
        grad(placed, {"tables": js.Exchange("x")})
    explicit = mesh_of((2, 4), ("a", "x"), AxisType.Explicit)
    with pytest.raises(js.InvalidArgumentError, match=r"split along \('x',\)"):
        grad(on(explicit, TABLE, P("x")), js.Exchange("a"))


ALONG_X = P("x")


def on_mesh(kind=AxisType.Auto, rows=ALONG_X, ids=ALONG_X, count=4_000, axes=("x",)):
    """A loss and its arguments, on eight devices."""
    shape = (8,) if len(axes) == 1 else (2, 4)
    mesh = jax.make_mesh(shape, axes, axis_types=(kind,) * len(axes))
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))  # noqa: E731
    params = {"table": put(jnp.ones((40_000, 64)), rows), "w": put(jnp.ones(64), P())}
    return params, put(jnp.arange(count) * 7, ids)


def mean_of_rows(params, ids):
    rows = js.embedding_lookup(params["table"], ids)
    return jnp.mean(rows @ params["w"])


@pytest.mark.parametrize(
    ("axes", "split", "said"),
    slow_unless(
        [
            (("x",), "x", "js.Exchange('x')"),
            (("a", "x"), ("a", "x"), "js.Exchange(('a', 'x'))"),
        ],
        lambda case: case[1] == "x",
    ),
)
def test_an_exchange_that_would_pay_is_hinted_at(axes, split, said, monkeypatch):
    monkeypatch.setattr("jslices._place.hints.hinted", set())
    tx = js.sgd(0.1, 0.9, untouched="exact")
    params, ids = on_mesh(rows=P(split), ids=P(split), axes=axes)
    step, state = js.train_step(mean_of_rows, tx), tx.init(params)
    with pytest.warns(
        js.PerformanceHint, match=r"rows of params\['table'\].*1.0 MB"
    ) as told:
        params, state, _ = step(params, state, ids)
    assert [x.filename for x in told] == [__file__] and said in str(told[0].message)
    params, state, _ = step(params, state, ids[:3992])  # compiles anew, and says no more


FINE = {
    "exchange": ({}, {"exchange": {"table": js.Exchange("x")}}),
    "Explicit axes": ({"kind": AxisType.Explicit}, {}),
    "every device has the table": ({"rows": P()}, {}),
    "every device has the ids": ({"ids": P()}, {}),
    "few rows": ({"count": 80}, {}),
    "columns are split": ({"rows": P(None, "x")}, {}),
    "ids along another axis": ({"axes": ("a", "x"), "ids": P("a")}, {}),
}


@pytest.mark.parametrize("name", FINE)
def test_no_exchange_is_hinted_at_where_none_would_pay(name, monkeypatch):
    monkeypatch.setattr("jslices._place.hints.hinted", set())
    where, how = FINE[name]
    params, ids = on_mesh(**where)
    tx = js.sgd(0.1)
    js.train_step(mean_of_rows, tx, **how)(params, tx.init(params), ids)
