"""State stands where its table does, and tables have rows that devices can divide."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimizers
import pytest
from helpers import assert_close, fast_jit, slow_but_first, slow_unless
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jslices as js

V, D = 64, 8
S = jax.ShapeDtypeStruct
PARAMS = {"table": (V, D), "bias": (V,), "w": (3, 2)}
GRADS = {
    "table": js.IndexedSlices(np.zeros((4, D), np.float32), np.zeros(4, np.int32), (V, D)),
    "bias": np.zeros(V, np.float32),
    "w": np.zeros((3, 2), np.float32),
}
FROZEN = {"table": np.arange(V) < 3, "bias": None, "w": None}
EXACT = functools.partial(js.adam, 0.1, untouched="exact")
OPTIMIZERS = {
    **{name: optimizers.make(js, name, 0.1, kwargs) for name, kwargs in optimizers.FIRST},
    "factored": js.adafactor(0.1, min_dim_size_to_factor=1),
    "exact": EXACT(),
    "chain": js.optim.chain(js.optim.clip_by_global_norm(1.0), js.adam(0.1)),
    "multi_steps": js.optim.multi_steps(js.adam(0.1), 2, GRADS),
    "freeze_rows": js.optim.freeze_rows(EXACT(), FROZEN),
    "from_optax": js.from_optax(optax.adam(0.1)),
    "with_state_dtype": js.optim.with_state_dtype(js.adam(0.1), "bfloat16"),
    "partition": js.optim.partition(
        {"exact": EXACT(), "rows": js.rowwise_adagrad(0.1)},
        {"table": "exact", "bias": "rows", "w": "rows"},
    ),
}
SPLITS = [P("x"), P(None, "x"), P("a", "x"), P(("a", "x")), P()]


def on_mesh(kind, spec):
    if jax.device_count() < 8:
        pytest.skip("needs eight devices")
    mesh = jax.make_mesh((2, 4), ("a", "x"), axis_types=(getattr(AxisType, kind),) * 2)
    specs = {"table": spec, "bias": P(*spec[:1]), "w": P()}
    return mesh, {
        name: jax.device_put(np.ones(shape, np.float32), NamedSharding(mesh, specs[name]))
        for name, shape in PARAMS.items()
    }


def assert_placed(states, params):
    """Each array with the rows or columns of the table is split as these are."""
    mesh, split = (
        params["table"].sharding.mesh,
        (*params["table"].sharding.spec, None, None)[:2],
    )
    wanted = {(V, D): P(*split), (V,): P(split[0]), (D,): P(split[1])}
    seen = set()
    for path, x in jax.tree_util.tree_leaves_with_path(states):
        if x.shape in wanted:
            sharding = NamedSharding(mesh, wanted[x.shape])
            name = jax.tree_util.keystr(path)
            assert x.sharding.is_equivalent_to(sharding, x.ndim), (name, x.sharding.spec)
            seen.add(x.shape)
    assert seen == set(wanted)


def inits(params):
    return {name: tx.init(params) for name, tx in OPTIMIZERS.items()}


@pytest.mark.parametrize(
    "kind, spec",
    slow_unless(
        [*(("Explicit", spec) for spec in SPLITS), ("Auto", P("x")), ("Auto", P("a", "x"))],
        lambda case: case[1] == P("x"),
    ),
    ids=str,
)
def test_state_is_split_as_its_table(kind, spec):
    _, params = on_mesh(kind, spec)
    eager, compiled = inits(params), jax.jit(inits).lower(params).compile()
    assert_placed(eager, params)
    states = compiled(params)
    assert_placed(states, params)
    jax.tree.map(
        np.testing.assert_array_equal, jax.device_get(states), jax.device_get(eager)
    )
    # No device makes more than its part, not even for a moment.
    memory = compiled.memory_analysis()
    parts = (
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(states)
    )
    rows_of_a_part = params["table"].addressable_shards[0].data.nbytes
    assert memory.temp_size_in_bytes <= rows_of_a_part
    assert memory.output_size_in_bytes <= sum(parts) + 64 * len(jax.tree.leaves(states))


def test_on_one_device_state_is_where_the_table_is():
    (device,) = jax.devices()[-1:]
    table = jax.device_put(np.ones((V, D), np.float32), device)
    for tx in (js.rowwise_adagrad(0.1), EXACT()):
        state = tx.init(table)
        arrays = [x for x in jax.tree.leaves(state) if x.shape[:1] == (V,)]
        assert arrays and all(x.devices() == {device} for x in arrays)
    assert not js.rowwise_adagrad(0.1).init(jnp.ones((V, D))).sum_of_squares.committed


@pytest.mark.parametrize("transform", [jax.vmap, lambda init: jax.jit(jax.vmap(init))])
def test_state_of_several_tables_at_once(transform):
    _, params = on_mesh("Auto", P(None, "x"))
    state = transform(js.rowwise_adagrad(0.1).init)(params["table"].reshape(4, 16, D))
    assert state.sum_of_squares.shape == (4, 16)


def test_inside_shard_map_state_is_that_of_a_device():
    mesh, params = on_mesh("Auto", P("x"))

    def init(table):
        return js.rowwise_adagrad(0.1).init(table).sum_of_squares

    each = jax.shard_map(init, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    assert jax.jit(each)(params["table"]).shape == (V,)


RATE = optax.exponential_decay(0.1, 1, 0.5)
SCHEDULED = {
    "sgd": js.sgd(RATE),
    "adamw": js.adamw(RATE, weight_decay=RATE),
    "adafactor": js.adafactor(RATE, weight_decay_rate=RATE),
    "ftrl": js.ftrl(RATE),
    "exact": js.adamw(RATE, weight_decay=RATE, nesterov=True, untouched="exact"),
    "exact_trace": js.rmsprop(RATE, momentum=0.9, bias_correction=True, untouched="exact"),
    "injected": optax.inject_hyperparams(js.adam)(RATE),
}


def two_steps(params, jit, name):
    """What an optimizer makes of the parameters in two steps, of rows and of arrays."""
    rows = js.IndexedSlices(np.ones((2, D), np.float32), np.array([1, 5]), (V, D))

    def run(params):
        tx, state = SCHEDULED[name], SCHEDULED[name].init(params)
        for table in (rows, params["table"]):
            if hasattr(tx, "catch_up"):
                params, state = tx.flush(*tx.catch_up(params, state, dict(IDS)))
            updates, state = tx.update({**params, "table": table}, state, params)
            params = js.apply_updates(params, updates)
        return params

    return (jax.jit(run) if jit else run)(params)


IDS = {"table": np.array([1, 5]), "bias": True, "w": True}


@pytest.mark.parametrize(
    "name, kind, jit",
    slow_unless(
        [
            (name, *how)
            for name in SCHEDULED
            for how in [("Explicit", True), ("Explicit", False), ("Auto", True)]
        ],
        lambda case: case == ("adafactor", "Explicit", True),
    ),
)
def test_schedules_on_every_mesh(name, kind, jit):
    mesh, params = on_mesh(kind, P("x"))
    with jax.set_mesh(mesh):
        found = two_steps(params, jit, name)
    assert name != "sgd" or found["table"].sharding.spec[0] == "x"
    alone = {name: np.ones(shape, np.float32) for name, shape in PARAMS.items()}
    wanted = two_steps(alone, True, name)
    assert_close(jax.device_get(found), jax.device_get(wanted), rtol=1e-5)


@pytest.mark.parametrize("jit", slow_but_first(True, False))
def test_an_injected_number_of_an_exact_optimizer(jit):
    rows = js.IndexedSlices(np.ones((2, D), np.float32), np.array([1, 5]), (V, D))

    def run(params):  # each step of its own, so that no row is behind
        make = lambda rate: js.adamw(rate, weight_decay=rate, untouched="exact")  # noqa: E731
        tx = optax.inject_hyperparams(make)(0.1)
        return tx.update({**params, "table": rows}, tx.init(params), params)[0]

    mesh, params = on_mesh("Explicit", P("x"))
    with jax.set_mesh(mesh):
        found = (jax.jit(run) if jit else run)(params)
    alone = {name: np.ones(shape, np.float32) for name, shape in PARAMS.items()}
    assert_close(jax.device_get(found), jax.device_get(jax.jit(run)(alone)), rtol=1e-5)


@pytest.mark.parametrize("name", slow_but_first("sgd", "exact"))
def test_parameters_on_no_mesh_within_an_explicit_one(name):
    """JAX puts them on all devices, and so does a step: the next one takes what it gave."""
    loss = lambda params, ids: (params["table"][ids] ** 2).sum() * params["w"].sum()  # noqa: E731
    step = fast_jit(js.train_step(loss, SCHEDULED[name]))

    def steps():
        params = {key: jnp.ones(PARAMS[key]) for key in ("table", "w")}
        state = SCHEDULED[name].init(params)
        for ids in ([1, 5], [5, 0]):
            params, state, value = step(params, state, jnp.array(ids))
        return SCHEDULED[name].flush(params, state), value

    wanted = steps()
    with jax.set_mesh(on_mesh("Explicit", P("x"))[0]):
        found = steps()
    assert_close(jax.device_get(found), jax.device_get(wanted), rtol=1e-5)


# --- rows that devices divide --------------------------------------------------------


@pytest.mark.parametrize(
    ["spec", "to"],
    slow_unless(
        itertools.product([P(), P("x"), P(None, "x")], repeat=2),
        [(P("x"), P()), (P("x"), P(None, "x"))].count,
    ),
)
def test_a_table_that_a_loss_places_elsewhere_has_rows(spec, to):
    """On Explicit axes; the gradient, and the step, are where the table was."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    ids, weights = jnp.array([1, 5, V - 1, 1]), np.linspace(1, 2, D, dtype="f4")[None]

    def loss(table):
        rows = jax.sharding.reshard(table, to).at[ids].get(out_sharding=P())
        return jnp.sum((rows * weights) ** 2)

    with jax.set_mesh(mesh):
        start = np.arange(V * D, dtype=np.float32).reshape(V, D) / V
        table = jax.device_put(start, NamedSharding(mesh, spec))
        grad = fast_jit(js.grad(loss))(table)
        assert js.is_slices(grad)
        np.testing.assert_allclose(grad.to_dense(), jax.grad(loss)(table), rtol=1e-6)
        tx = js.sgd(0.1)
        new, _, _ = fast_jit(js.train_step(loss, tx))(table, tx.init(table))
        assert new.sharding.is_equivalent_to(table.sharding, 2)
        np.testing.assert_allclose(new, table - 0.1 * grad.to_dense(), rtol=1e-6)


def test_rows_that_devices_divide():
    mesh = AbstractMesh((2, 4), ("a", "x"))
    assert [js.padded_rows(n, 8) for n in (0, 1, 8, 9)] == [0, 8, 8, 16]
    assert (
        js.padded_rows(np.int64(9), 1) == 9 and type(js.padded_rows(np.int64(9), 2)) is int
    )
    assert js.padded_rows(9, mesh) == 16
    assert js.padded_rows(9, mesh, "x") == js.padded_rows(9, mesh, ("x",)) == 12
    assert js.padded_rows(9, mesh, ("a", "x")) == 16
    assert js.padded_rows(9, Mesh(np.array(jax.devices()[:1]), ("x",))) == 9
    assert js.padded_rows(2**40 + 1, 4096) == 2**40 + 4096


def test_jax_takes_as_many_rows():
    mesh, _ = on_mesh("Auto", P())
    split = NamedSharding(mesh, P("x"))
    with pytest.raises(
        ValueError, match="partitioned 4 times, but the dimension size is 65"
    ):
        jax.device_put(np.ones((V + 1, D)), split)
    rows = js.padded_rows(V + 1, mesh, "x")
    assert jax.device_put(np.ones((rows, D)), split).shape == (68, D)


@pytest.mark.parametrize(
    "args, error, text",
    [
        ((-1, 8), js.InvalidArgumentError, "at least 0 rows, got -1"),
        ((9, 0), js.InvalidArgumentError, "at least 1 device, got 0"),
        (
            (9, 8, "x"),
            js.InvalidArgumentError,
            "wants a mesh with this axis, got 8 devices",
        ),
        (
            (9, AbstractMesh((2,), ("a",)), "x"),
            js.InvalidArgumentError,
            r"axis='x'\): the mesh has the axes \('a',\), and not 'x'",
        ),
        ((9, None), TypeError, r"got NoneType; type jax.device_count\(\)"),
        ((9.0, 8), TypeError, "float"),
    ],
)
def test_bad_counts(args, error, text):
    with pytest.raises(error, match=text):
        js.padded_rows(*args)


@pytest.mark.parametrize(
    "jit", [jax.jit, pytest.param(lambda f: f, marks=pytest.mark.slow)]
)
def test_rows_of_other_arrays_are_read_beside_those_of_a_table(jit):
    """Masks, weights and ages by row, on the Explicit axes that ``jax.make_mesh`` makes."""
    mesh, _ = on_mesh("Explicit", P("x"))
    rng, ids = np.random.default_rng(0), np.arange(0, 64, 8)
    table, by_row = rng.normal(size=(V, D)).astype("f"), np.arange(V)
    forms = [
        lambda t, n: t * n[:, None],
        lambda t, n: jnp.where((n > 9)[:, None], t, 0),
        lambda t, n: t * jnp.exp(-n / 9)[:, None] + n[:, None] * 1.0,
    ]

    def loss(table, by_row, ids, split):
        rows = (form(table, by_row).at[ids].get(out_sharding=split) for form in forms)
        return sum((x**2).sum() for x in rows)

    wanted = jax.grad(loss)(table, by_row, ids, None)
    with jax.set_mesh(mesh):
        arrays = jax.device_put((table, by_row, ids), NamedSharding(mesh, P("x")))
        split = NamedSharding(mesh, P("x", None))
        found = jit(js.grad(lambda *arrays: loss(*arrays, split)))(*arrays)
    assert js.is_slices(found)
    assert_close(found.to_dense(), wanted, 1e-5)


@pytest.mark.parametrize("name", ["adam", "adagrad", "rmsprop", "sgd"])
def test_a_jitted_init_of_optax_puts_all_on_one_device(name):
    """As docs/sharding.md says; ours: :func:`test_state_is_split_as_its_table`."""
    _, params = on_mesh("Auto", P("x"))
    settings = {"momentum": 0.9} if name == "sgd" else {}
    make = lambda module: getattr(module, name)(0.1, **settings)  # noqa: E731

    def places(state):
        tables = (x for x in jax.tree.leaves(state) if x.shape == (V, D))
        return {len(x.sharding.device_set) for x in tables}

    assert places(make(optax).init(params)) == places(make(js).init(params)) == {8}
    assert places(jax.jit(make(js).init)(params)) == {8}
    assert places(jax.jit(make(optax).init)(params)) == {1}


def test_steps_by_hand_and_frozen_rows_on_explicit_axes():
    """Of gradients alone, of rows by ``tx.now`` and of exact frozen ones JAX made none."""
    mesh, params = on_mesh("Explicit", P("x"))
    ids = jax.device_put(np.arange(8, dtype=np.int32), NamedSharding(mesh, P("x")))
    average = js.optim.params_ema(js.sgd(0.1, 0.9, untouched="exact"), 0.95)
    freezing = js.optim.freeze_rows(EXACT(), FROZEN)

    def loss(params):
        rows = (js.embedding_lookup(params[name], ids) for name in ("table", "bias"))
        return sum((x**2).sum() for x in rows)

    def by_hand(params, state):
        _, grads = js.value_and_grad(lambda p: loss(average.now(p, state)))(params)
        return average.apply(grads, state, params), average.now(params, state)

    def caught_up(params):
        named = {"table": ids, "bias": None, "w": None}
        return freezing.catch_up(params, freezing.init(params), named)[0]

    with jax.set_mesh(mesh):
        state = jax.eval_shape(average.init, params)
        fast_jit(by_hand).lower(params, state)
        values = jax.eval_shape(js.grad(loss), params)["table"].values
        table = jax.eval_shape(caught_up, params)["table"]
        assert values.sharding.spec[0] == table.sharding.spec[0] == "x"
